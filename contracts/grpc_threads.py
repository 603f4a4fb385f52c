"""How many threads of gRPC's own a message passes: one, if asked for before gRPC is imported.

By default gRPC reads its sockets in a pool of threads ("event engine"), which hands what came to a third thread, which
wakes the event loop. Without it that third thread reads by itself, as all of gRPC did for years: a third of the changes
of threads that a request costs (decision 91).
"""

import os
from typing import Final

VARIABLE: Final = "GRPC_EXPERIMENTS"
READ_WHERE_AWAITED: Final = "-event_engine_client,-event_engine_listener"


def use_few_threads() -> None:
    """Have gRPC read where it is waited for, unless the environment says something else of its experiments.

    Works only before the first import of `grpc`. A version that does not know the names says so once on stderr, and
    works as it would without.
    """
    os.environ.setdefault(VARIABLE, READ_WHERE_AWAITED)
