"""llama.cpp's own HTTP server on a GGUF file: `python serve.py FILE PORT NAME`. Runs where xllamacpp is."""

import signal
import sys

import xllamacpp

options = xllamacpp.CommonParams()
options.model.path = sys.argv[1]
options.port = int(sys.argv[2])
options.model_alias = {sys.argv[3]}
options.n_ctx = 4096  # of all slots
options.n_parallel = 2
options.cpuparams.n_threads = 2
options.endpoint_slots = True
server = xllamacpp.Server(options)
signal.pause()
