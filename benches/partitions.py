"""A network of one machine that can be cut between any two processes: each has a namespace and an address of its own.

Needs Linux, root and `ip` (iproute2). A cut is silent, like that of a cable: packets vanish both ways, no reset.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence

HUB = 1  # host number of the machine itself


class Unavailable(Exception):
    """This machine gives no network namespaces to this user."""


class Partitions:
    """Namespaces on one bridge, by name. `close` removes them."""

    def __init__(self, names: Sequence[str]) -> None:
        if shutil.which("ip") is None or os.geteuid() != 0:
            raise Unavailable("network namespaces need root and `ip`")
        self._tag = f"p{os.getpid() % 100_000}"
        self._net = f"10.{64 + os.getpid() % 64}.{os.getpid() // 64 % 256}"
        self._numbers = {name: number for number, name in enumerate(names, start=HUB + 1)}
        try:
            _ip("link", "add", self._tag, "type", "bridge")
            _ip("addr", "add", f"{self._net}.{HUB}/24", "dev", self._tag)
            _ip("link", "set", self._tag, "up")
            for name, number in self._numbers.items():
                space, outside = self.space(name), f"{self._tag}v{number}"
                _ip("netns", "add", space)
                _ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", space)
                _ip("link", "set", outside, "master", self._tag, "up")
                _ip("-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
                _ip("-n", space, "link", "set", "eth0", "up")
                _ip("-n", space, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            self.close()
            raise Unavailable(f"{' '.join(error.cmd)}: {error.stderr.strip()}") from None

    @property
    def hub(self) -> str:
        """The machine's own address in this network."""
        return f"{self._net}.{HUB}"

    def space(self, name: str) -> str:
        """Return the name of a namespace."""
        return f"{self._tag}-{self._numbers[name]}"

    def address(self, name: str) -> str:
        """Return the address of a process."""
        return f"{self._net}.{self._numbers[name]}"

    def command(self, name: str, argv: list[str]) -> list[str]:
        """Return `argv` as it is run in a namespace; the process is the same one, `ip` execs it."""
        return ["ip", "netns", "exec", self.space(name), *argv]

    def cut(self, one: str, other: str) -> None:
        """Let nothing through between two processes."""
        for here, there in ((one, other), (other, one)):
            _ip("-n", self.space(here), "route", "add", "blackhole", f"{self.address(there)}/32")

    def heal(self, one: str, other: str) -> None:
        """Undo a cut."""
        for here, there in ((one, other), (other, one)):
            _ip("-n", self.space(here), "route", "del", "blackhole", f"{self.address(there)}/32")

    def close(self) -> None:
        """Remove everything; what is not there is no error."""
        for number in self._numbers.values():
            _ip("netns", "del", f"{self._tag}-{number}", check=False)
        _ip("link", "del", self._tag, check=False)


def _ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=check, capture_output=True, text=True, timeout=10)
