"""The real SGLang for tests: a prefill and a decode worker, and a unified one to compare with.

Three worker processes with a tiny random model, started once per run on a Valkey of their own, so
that emptying the other one takes nobody's lease away. The pair serves the model `tiny`; the unified
worker is a pool of its own, the model `reference`.
"""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from redis import Redis
from tokenizers import Tokenizer

from contracts.keys import worker_lease
from contracts.wire import Registration
from pdgate.libibverbs import library_environment
from pdgate.services import start_valkey
from tests.processes import REPOSITORY, engine_python

BOOT_S = 420.0
PEER_TIMEOUT_S = 15
ROLES = ("prefill", "decode", "unified")
POOL_OF = {"prefill": "tiny", "decode": "tiny", "unified": "reference"}
TEXTS = (
    "What is the capital of France?",
    "The quick brown fox jumps over",
    "Once upon a time, in a small village near the sea, there lived",
    "def fibonacci(n):\n    ",
    "List of planets in the solar system: " * 12,
)

_MODEL = """
[models.NAME]
tokenizer = "tiny"
context_tokens = 2048
tool_parser = "hermes"
default_max_tokens = 256
[models.NAME.price]
prefill_computed = "0.10"
prefill_cached = "0.02"
decode = "0.40"
[models.NAME.tiers.default]
ttft_ms = 4000
tpot_ms = 400
"""


def catalogue_entry(name: str, *lines: str) -> str:
    """One more model of the catalogue, `lines` being fields of its own."""
    return _MODEL.replace("NAME", name).replace("\ntokenizer", "".join(f"\n{line}" for line in lines) + "\ntokenizer")


def model_lines(name: str) -> str:
    """Return the catalogue's lines for a model of the tiny tokenizer, in a pool of its own."""
    return _MODEL.replace("NAME", name)


class EngineWorker:
    """One worker process and what its lease says."""

    def __init__(self, process: subprocess.Popen, registration: Registration, log: Path) -> None:
        self.process = process
        self.registration = registration
        self.log = log
        self.address = registration.address
        self.epoch = registration.epoch
        self.bootstrap = (registration.bootstrap_host, registration.bootstrap_port)


class Engines:
    """The three workers, and what a stack in front of them needs."""

    def __init__(
        self, workers: dict[str, EngineWorker], *, folder: Path, redis_url: str, catalog_file: Path, model: Path
    ) -> None:
        self.prefill, self.decode, self.unified = (workers[role] for role in ROLES)
        self.faults = folder / "faults"
        self.redis_url = redis_url
        self.catalog_file = catalog_file
        self.models_dir = model.parent
        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.prompts = [self.tokenizer.encode(text).ids for text in TEXTS]


def tiny_model() -> Path:
    models = Path(os.environ.get("PDGATE_MODELS_DIR", REPOSITORY / ".pdgate/models"))
    if not (models / "tiny" / "config.json").exists():
        pytest.fail(f"{models / 'tiny'} is missing: run `pdgate engine install`, or set PDGATE_MODELS_DIR")
    return models / "tiny"


def _start(
    role: str, *, folder: Path, redis_url: str, catalog_file: Path, model: Path, environ: Mapping[str, str]
) -> subprocess.Popen:
    python = engine_python()
    environment = {
        **os.environ,
        **library_environment(Path(python).parents[2] / "lib"),
        "PYTHONPATH": str(REPOSITORY),
        "WORKER_ID": f"engine-{role}",
        "WORKER_POOL": POOL_OF[role],
        "WORKER_ROLE": role,
        "WORKER_ENGINE": "sglang",
        "WORKER_REDIS_URL": redis_url,
        "WORKER_CATALOG": str(catalog_file),
        "WORKER_MODEL_PATH": str(model),
        "WORKER_FAULTS_FILE": str(folder / "faults"),
        "WORKER_PEER_TIMEOUT_S": str(PEER_TIMEOUT_S),
        "WORKER_SLEEPS": "true",
        **environ,
    }
    with (folder / f"{role}.log").open("wb") as log:
        return subprocess.Popen(
            [python, "-m", "workers"],
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # as the supervisor starts it; and Linux shares the CPU among sessions
        )


def _await_lease(redis: Redis, role: str, process: subprocess.Popen, log: Path, deadline: float) -> Registration:
    while (raw := redis.get(worker_lease(POOL_OF[role], f"engine-{role}"))) is None:
        if process.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"the {role} worker did not start (exit {process.poll()}):\n{log.read_text()[-4000:]}")
        time.sleep(0.1)
    return msgspec.msgpack.decode(raw, type=Registration)


@contextmanager
def running_engines(
    folder: Path,
    *,
    model: Path | None = None,
    reference: Path | None = None,
    further_models: str = "",
    environ: Mapping[str, str] | None = None,
) -> Iterator[Engines]:
    """Start the three workers below `folder`, and stop them at the end.

    `reference` is the unified worker's model where it is another one; `further_models` adds to the catalogue;
    `environ` is for the pair alone.
    """
    model = model or tiny_model()
    catalog_file = folder / "models.toml"
    catalog_file.write_text("".join(_MODEL.replace("NAME", name) for name in ("tiny", "reference")) + further_models)
    valkey = start_valkey(folder / "valkey")
    redis = Redis.from_url(valkey.url)
    processes: dict[str, subprocess.Popen] = {}
    try:
        for role in ROLES:
            own = reference or model if role == "unified" else model
            processes[role] = _start(
                role,
                folder=folder,
                redis_url=valkey.url,
                catalog_file=catalog_file,
                model=own,
                environ=environ or {} if role != "unified" else {},
            )
        deadline = time.monotonic() + BOOT_S
        workers = {}
        for role, process in processes.items():
            log = folder / f"{role}.log"
            workers[role] = EngineWorker(process, _await_lease(redis, role, process, log, deadline), log)
        yield Engines(workers, folder=folder, redis_url=valkey.url, catalog_file=catalog_file, model=model)
    finally:
        redis.close()
        for process in processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
        valkey.stop()
