"""A real Valkey cluster of three nodes on this machine, each with a third of the slots."""

import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import redis

from pdgate.services import valkey_binary

SLOTS = 16_384
STARTS_S = 30.0


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _until(condition, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + STARTS_S
    while True:
        with contextlib.suppress(redis.ConnectionError, redis.exceptions.BusyLoadingError):
            if condition():
                return
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError("the Valkey cluster did not start")
        time.sleep(0.01)


@contextlib.contextmanager
def valkey_cluster(folder: Path) -> Iterator[list[int]]:
    """Give the ports of the nodes."""
    ports, buses = _free_ports(6)[:3], _free_ports(3)
    while set(ports) & set(buses):
        buses = _free_ports(3)
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        for port, bus in zip(ports, buses, strict=True):
            own = folder / str(port)
            own.mkdir(parents=True)
            argv = [str(valkey_binary()), "--port", str(port), "--cluster-port", str(bus), "--bind", "127.0.0.1"]
            argv += ["--dir", str(own), "--cluster-enabled", "yes", "--save", "", "--appendonly", "no"]
            nodes.append(subprocess.Popen(argv, stdout=subprocess.DEVNULL))
        clients = [redis.Redis(port=port) for port in ports]
        for number, (client, node) in enumerate(zip(clients, nodes, strict=True)):
            _until(client.ping, node)
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", number * SLOTS // 3, (number + 1) * SLOTS // 3 - 1)
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for port, bus in zip(ports[1:], buses[1:], strict=True):
            clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", port, bus)

        def whole(client: redis.Redis) -> bool:
            told = client.execute_command("CLUSTER", "INFO").decode().split()
            return {"cluster_state:ok", "cluster_known_nodes:3", f"cluster_slots_assigned:{SLOTS}"} <= set(told)

        for client, node in zip(clients, nodes, strict=True):
            _until(lambda client=client: whole(client), node)
            client.close()
        yield ports
    finally:
        for node in nodes:
            node.kill()
            node.wait()
