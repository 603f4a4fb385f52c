"""Where Prometheus finds the processes of a one-machine stack: a port for each, and the files that say so.

Ports lie below those that the kernel hands out to connections, so a process that is started again finds its own free.
A later start on the same data takes the same ones where it can, so that series go on.
"""

import contextlib
import os
import random
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

LOOPBACK: Final = "127.0.0.1"
_FIRST: Final = 20_000
_LAST: Final = 29_999
_CONFIG: Final = """\
# Written by `pdgate up`. Run: prometheus --config.file={file}
global: {{scrape_interval: 5s, evaluation_interval: 5s}}
rule_files: ["{rules}/*.yml"]
scrape_configs:
  - job_name: pdgate
    file_sd_configs: [{{files: ["{targets}"]}}]
"""


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """One group of Prometheus' file-based discovery; `job` and `process` become labels."""

    targets: tuple[str, ...]
    labels: Mapping[str, str]


class Scraping:
    """Gives each process its port, once, and writes what Prometheus reads."""

    def __init__(self, folder: Path) -> None:
        """`folder`: for `prometheus.yml` and `targets.json`."""
        self._folder = folder
        self._groups: list[Group] = []
        self._earlier = _earlier(self.targets)
        self._next = random.randint(_FIRST, _LAST)  # noqa: S311 - so that stacks side by side do not meet

    @property
    def config(self) -> Path:
        """What to start Prometheus with."""
        return self._folder / "prometheus.yml"

    @property
    def targets(self) -> Path:
        """The processes, in Prometheus' form."""
        return self._folder / "targets.json"

    @property
    def num_targets(self) -> int:
        """How many processes can be scraped."""
        return len(self._groups)

    def listen(self, process: str, job: str) -> str:
        """Return `host:port` for the metrics of a process."""
        earlier = self._earlier.get(process)
        address = earlier if earlier and _free(earlier) else self._new()
        self.found(process, job, address)
        return address

    def found(self, process: str, job: str, address: str) -> None:
        """Note a process that serves its metrics at an address of its own."""
        self._groups.append(Group(targets=(address,), labels={"job": job, "process": process}))

    def write(self, rules: Path) -> None:
        """Write both files; `rules`: the folder of alerts and recording rules."""
        self._folder.mkdir(parents=True, exist_ok=True)
        _replace(self.targets, msgspec.json.format(msgspec.json.encode(self._groups)))
        text = _CONFIG.format(file=self.config, rules=rules, targets=self.targets)
        _replace(self.config, text.encode())

    def _new(self) -> str:
        for _ in range(_LAST - _FIRST):
            self._next = self._next + 1 if self._next < _LAST else _FIRST
            address = f"{LOOPBACK}:{self._next}"
            if all(address not in group.targets for group in self._groups) and _free(address):
                return address
        raise OSError(f"no port from {_FIRST} to {_LAST} is free")


def _free(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
        try:
            probe.bind((host, int(port)))
        except OSError:
            return False
    return True


def _earlier(file: Path) -> Mapping[str, str]:
    """Return the addresses of the last start, by process."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        groups = msgspec.json.decode(file.read_bytes(), type=list[Group])
        ours = [group for group in groups if group.targets and "process" in group.labels]
        return {group.labels["process"]: group.targets[0] for group in ours}
    return {}


def _replace(file: Path, content: bytes) -> None:
    draft = file.with_name(f"{file.name}.{os.getpid()}")
    draft.write_bytes(content)
    draft.replace(file)
