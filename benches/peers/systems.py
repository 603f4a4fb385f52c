"""What is compared: how each is started, where its client connects, and which processes are its own."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Protocol

import httpx
import msgspec
from tokenizers import Tokenizer

from benches import load
from benches.__main__ import CATALOG, INSTANT, registered, services
from benches.direct import DirectClient
from benches.peers.environments import environment
from benches.peers.worker import MODEL
from pdgate.models import timed_models
from pdgate.services import Service
from tests.processes import REPOSITORY, Stack, free_port, until

PROMPT = "Tell me a story about a lighthouse keeper who counts ships. " * 2
START_S = 90.0
KEY = "sk-bench"


class Straight(Protocol):
    """Times to the first token of one-token requests straight to a worker, ms."""

    async def __call__(self, *, count: int, quick_ack: bool) -> list[float]: ...


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """One started system."""

    port: int
    key: str
    pids: Mapping[str, int]  # the system's own processes; children are counted with them
    worker_pids: Mapping[str, int]
    straight_ms: Straight
    tick: Callable[[float], AbstractAsyncContextManager["Running"]]

    def request(self, tokens: int) -> bytes:
        """Return one streaming request of so many tokens."""
        return load.chat_request(f"127.0.0.1:{self.port}", self.key, MODEL, prompt=PROMPT, max_tokens=tokens)


class Start(Protocol):
    """Starts a system in a folder, with so many workers that decode."""

    def __call__(self, folder: Path, copies: int = 1) -> AbstractAsyncContextManager[Running]: ...


class System(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table. `does` is what its figures include."""

    name: str
    protocol: str
    does: str
    command: str  # as it was started, for people
    start: Start


def pdgate() -> System:
    """The whole stack: gateway, scheduler, billing, Valkey, PostgreSQL, a timed pair."""
    return System(
        name="pdgate, prefill and decode",
        protocol="gRPC step batches",
        does="keys, limits, budget, chat template and tokens, durable queue, tenant fairness, scheduling by targets, "
        "metering by phase, ledger",
        command="python -m gateway, scheduler, billing; Valkey and PostgreSQL; two timed workers",
        start=_pdgate,
    )


def routers() -> list[System]:
    """The two Rust routers, plain and split; smg also over gRPC, where it tokenizes itself as pdgate does."""
    found = []
    for package, version, program, grpc in (
        ("sglang-router", "0.3.2", ("python", "-m", "sglang_router.launch_router"), False),
        ("smg", "1.13.0", ("smg", "launch"), False),
        ("smg", "1.13.0", ("smg", "launch"), True),
    ):
        for split in (False, True):
            tail = ("--pd-disaggregation", "--prefill URL PORT", "--decode URL") if split else ("--worker-urls URL",)
            extra = ("--model-path TOKENIZER",) if grpc else ()
            work = "chat template, tokens in and out; chooses a worker" if grpc else "forwards bytes; chooses a worker"
            found.append(
                System(
                    name=f"{package} {version}{' gRPC' if grpc else ''}, {'prefill and decode' if split else 'plain'}",
                    protocol="gRPC, SGLang's servicer" if grpc else "HTTP, SGLang's",
                    does=work + (" pair, adds a bootstrap room" if split else ""),
                    command=" ".join((*program, *tail, "--policy round_robin", *extra)),
                    start=_router(package, program, split=split, grpc=grpc),
                )
            )
    return found


def litellm() -> System:
    """LiteLLM's proxy with one OpenAI-compatible deployment and a master key; no database."""
    return System(
        name="LiteLLM 1.106.12",
        protocol="HTTP, OpenAI's",
        does="one key, translation between providers, counts tokens and cost in memory; no database",
        command="litellm --config (one openai/ deployment, a master key) --num_workers 1",
        start=_litellm,
    )


def systems() -> list[System]:
    """All of them."""
    return [pdgate(), *routers(), litellm()]


@asynccontextmanager
async def _pdgate(folder: Path, copies: int = 1) -> AsyncIterator[Running]:
    _catalogues(folder)
    async with _databases(folder) as (valkey, postgres):
        stack = Stack(
            folder=folder,
            redis_url=valkey.url,
            database_url=postgres.url,
            catalog_file=folder / "models.toml",
            models_dir=timed_models(folder / "models", {MODEL}),
        )
        await stack.seed()
        stack.add_gateway()
        stack.add_scheduler()
        stack.add_billing()
        stack.start()
        own = {name: process.pid for name, process in stack.processes.items()}
        own |= {"valkey": valkey.process.pid, "postgres": postgres.process.pid}

        @asynccontextmanager
        async def tick(step_ms: float) -> AsyncIterator[Running]:
            environ = {**INSTANT, "WORKER_STEP_MS": str(step_ms)}
            names = ("prefill-0", *(f"decode-{number}" for number in range(copies)))
            for name in names:
                stack.add_worker(name, role=name.partition("-")[0], environ=environ)
            alone = {"WORKER_CATALOG": str(folder / "direct.toml")}  # a pool that no scheduler and no gateway knows
            stack.add_worker("direct-0", role="unified", pool="direct", environ=environ | alone)
            stack.start(*names, "direct-0")
            try:
                await stack.ready()
                pids = {name: stack.processes[name].pid for name in names}
                yield msgspec.structs.replace(running, worker_pids=pids)
            finally:
                for name in (*names, "direct-0"):
                    stack.processes[name].terminate()  # does nothing to one that is gone
                for name in (*names, "direct-0"):
                    stack.processes[name].wait(10)
                await stack.unready()

        async def straight_ms(*, count: int, quick_ack: bool) -> list[float]:
            del quick_ack  # gRPC acknowledges as its transport does
            registration = await registered(stack, "direct", "direct-0")
            direct = DirectClient(registration.address, worker_epoch=registration.epoch)
            ready = asyncio.Event()
            async with asyncio.TaskGroup() as tasks:
                link = tasks.create_task(direct.run(ready))
                async with asyncio.timeout(10):
                    await ready.wait()
                seen = [await direct.one(list(range(100, 140)), 1) for _ in range(count)]
                link.cancel()
            return [(one.first - one.started) * 1000 for one in seen]

        running = Running(
            port=stack.gateway_port, key=stack.api_key, pids=own, worker_pids={}, straight_ms=straight_ms, tick=tick
        )
        try:
            yield running
        finally:
            stack.stop()


@asynccontextmanager
async def _databases(folder: Path) -> AsyncIterator[tuple[Service, Service]]:
    """Run both databases; starting and stopping them blocks, so a thread does it."""
    both = services(folder)
    started = await asyncio.to_thread(both.__enter__)
    try:
        yield started
    finally:
        await asyncio.to_thread(both.__exit__, None, None, None)


def _catalogues(folder: Path) -> None:
    folder.chmod(0o755)
    (folder / "models.toml").write_text(CATALOG)
    (folder / "direct.toml").write_text(CATALOG.replace("models.tiny", "models.direct"))


def _router(package: str, program: Sequence[str], *, split: bool, grpc: bool) -> Start:
    @asynccontextmanager
    async def start(folder: Path, copies: int = 1) -> AsyncIterator[Running]:
        executables = environment(package)
        roles = ("prefill", *["decode"] * copies) if split else ("unified",) * copies
        extra: tuple[str, ...] = ("--disable-tokenizer-autoload",) if package == "smg" else ()
        if grpc:
            tokenizer = timed_models(folder / "models", {MODEL}) / MODEL
            extra = ("--model-path", str(tokenizer))
            started = _grpc_workers(folder, roles, executables / "python", tokenizer)
        else:
            started = _workers(folder, roles)
        async with started as workers:
            port = free_port()
            urls = list(workers.urls.values())
            placed: tuple[str, ...]
            if split:
                placed = ("--pd-disaggregation", "--prefill", urls[0], str(free_port()))
                placed += tuple(word for url in urls[1:] for word in ("--decode", url))
            else:
                placed = ("--worker-urls", *urls)
            argv = [
                *(str(executables / program[0]), *program[1:], "--host", "127.0.0.1", "--port", str(port)),
                *("--policy", "round_robin", "--log-level", "warn", "--prometheus-port", str(free_port())),
                *("--max-concurrent-requests", "2048", *extra, *placed),
            ]
            async with _served(folder, package, argv, port) as pid:
                yield _running(port, {package: pid}, workers)

    return start


@asynccontextmanager
async def _litellm(folder: Path, copies: int = 1) -> AsyncIterator[Running]:
    executables = environment("litellm")
    async with _workers(folder, ("unified",) * copies) as workers:
        port = free_port()
        config = folder / "litellm.yaml"
        deployments = "".join(
            f"  - model_name: {MODEL}\n    litellm_params:\n      model: openai/{MODEL}\n"
            f"      api_base: {url}/v1\n      api_key: none\n"
            for url in workers.urls.values()
        )
        config.write_text(f"model_list:\n{deployments}general_settings:\n  master_key: {KEY}\n")
        argv = [
            *(str(executables / "litellm"), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)),
            *("--num_workers", "1", "--telemetry", "False"),
        ]
        environ = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"}
        async with _served(folder, "litellm", argv, port, environ) as pid:
            yield _running(port, {"litellm": pid}, workers)


class Workers(msgspec.Struct, frozen=True, kw_only=True):
    """Started workers by their names, role and number, in the order of the roles asked for."""

    urls: dict[str, str]
    clocks: dict[str, str]  # where `POST /clock` goes
    pids: dict[str, int]
    straight_ms: Straight


def _running(port: int, pids: dict[str, int], workers: Workers) -> Running:
    @asynccontextmanager
    async def tick(step_ms: float) -> AsyncIterator[Running]:
        async with httpx.AsyncClient(trust_env=False) as client:
            for url in workers.clocks.values():
                (await client.post(f"{url}/clock", json={"step_ms": step_ms})).raise_for_status()
        yield running

    running = Running(
        port=port, key=KEY, pids=pids, worker_pids=workers.pids, straight_ms=workers.straight_ms, tick=tick
    )
    return running


@asynccontextmanager
async def _workers(folder: Path, roles: Sequence[str]) -> AsyncIterator[Workers]:
    """Run workers that speak SGLang's HTTP."""
    ports = {f"{role}-{number}": free_port() for number, role in enumerate(roles)}

    async def straight_ms(*, count: int, quick_ack: bool) -> list[float]:
        last = list(ports.values())[-1]
        request = load.chat_request(f"127.0.0.1:{last}", KEY, MODEL, prompt=PROMPT, max_tokens=1)
        streams = await load.run("127.0.0.1", last, [[request] * count], quick_ack=quick_ack)
        return [stream.ttfb_ms for stream in streams]

    async with contextlib.AsyncExitStack() as stack:
        pids = {}
        for name, port in ports.items():
            role = name.partition("-")[0]
            argv = [sys.executable, "-m", "benches.peers.worker", "--port", str(port), "--role", role]
            pids[name] = await stack.enter_async_context(_served(folder, f"worker-{name}", argv, port))
        urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
        yield Workers(urls=urls, clocks=urls, pids=pids, straight_ms=straight_ms)


@asynccontextmanager
async def _grpc_workers(folder: Path, roles: Sequence[str], python: Path, tokenizer: Path) -> AsyncIterator[Workers]:
    """Run workers that speak SGLang's gRPC, in the environment that has its protocol."""
    ports = {f"{role}-{number}": (free_port(), free_port()) for number, role in enumerate(roles)}
    said = folder / "said.json"
    said.write_text(json.dumps(_speakable(tokenizer)))

    async def straight_ms(*, count: int, quick_ack: bool) -> list[float]:
        del quick_ack
        channel, asked = f"127.0.0.1:{list(ports.values())[-1][0]}", str(count)
        script = REPOSITORY / "benches" / "peers" / "grpc_straight.py"
        process = await asyncio.create_subprocess_exec(python, script, channel, asked, stdout=asyncio.subprocess.PIPE)
        async with asyncio.timeout(START_S):
            out, _ = await process.communicate()
        times: list[float] = json.loads(out)
        return times

    async with contextlib.AsyncExitStack() as stack:
        pids = {}
        for name, (port, clock_port) in ports.items():
            argv = [
                *(str(python), str(REPOSITORY / "benches" / "peers" / "grpc_worker.py"), "--port", str(port)),
                *("--clock-port", str(clock_port), "--role", name.partition("-")[0], "--tokens", str(said)),
                *("--tokenizer", str(tokenizer)),
            ]
            pids[name] = await stack.enter_async_context(_served(folder, f"worker-{name}", argv, clock_port))
        yield Workers(
            urls={name: f"grpc://127.0.0.1:{port}" for name, (port, _) in ports.items()},
            clocks={name: f"http://127.0.0.1:{port}" for name, (_, port) in ports.items()},
            pids=pids,
            straight_ms=straight_ms,
        )


def _speakable(folder: Path) -> list[int]:
    """Return tokens that are a word of their own, so that a router has something to send for each."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    words = ((token, tokenizer.decode([token])) for token in range(tokenizer.get_vocab_size()))
    return [token for token, word in words if word.isascii() and word[:1] == " " and word[1:].isalpha()]


@asynccontextmanager
async def _served(
    folder: Path, name: str, argv: list[str], port: int, environ: Mapping[str, str] | None = None
) -> AsyncIterator[int]:
    """Run a process of a group of its own until it names the model; give its id, and end the group afterwards."""
    log = folder / f"{name}.log"
    with log.open("ab") as out:
        process = subprocess.Popen(  # noqa: ASYNC220 - it only forks; what it does is waited for below
            argv,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), **(environ or {})},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )

    async def serves() -> bool:
        if process.poll() is not None:
            raise RuntimeError(f"{name} ended with {process.returncode}: {log.read_text()[-600:]}")
        try:
            answer = await client.get("/v1/models")
        except httpx.TransportError:
            return False
        return answer.status_code == 200 and MODEL in answer.text

    try:
        base = f"http://127.0.0.1:{port}"
        headers = {"authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(base_url=base, headers=headers, timeout=5, trust_env=False) as client:
            await until(serves, START_S, every_s=0.2)
        yield process.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(8)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
