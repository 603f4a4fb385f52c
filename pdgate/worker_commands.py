"""`pdgate workers`: who is alive, and orders to one of them."""

import asyncio
import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
import typer
from redis.asyncio import Redis

from contracts import keys
from contracts.lifecycle import Role
from contracts.orders import MAX_ORDERS, Answer, Order, answer, orders
from contracts.wire import FIELD, Registration, encode
from pdgate.connection import open_redis
from pdgate.layout import catalog_file
from pdgate.output import AsJson, show
from pdgate.preflight import CannotStart
from pdgate.serving_commands import CatalogFile, all_models, read_models
from scheduler.policy.pairing import mismatch
from scheduler.worker import compatibility_of

ANSWER_S = 240
"""How long an order may take: a drain of 60 s and a restart of the engine."""

workers = typer.Typer(help="The workers that are alive, and orders to one of them.", invoke_without_command=True)
WorkerId = Annotated[str, typer.Argument(help="As `pdgate workers` lists it.")]


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True):
    """A live worker as it is printed."""

    id: str
    pool: str
    role: str
    state: str
    epoch: int
    pid: int
    address: str
    engine: str
    simulated: bool
    running: int
    waiting: int
    pairs: str  # how many workers of the other role it fits, or in what it differs from them
    catalog: str  # whether it was started with this catalogue


@workers.callback()
def list_workers(context: typer.Context, file: CatalogFile = None, as_json: AsJson = False) -> None:
    """List the workers that are alive now."""
    if context.invoked_subcommand is not None:
        return

    async def run() -> list[WorkerRow]:
        async with open_redis() as redis:
            catalog = await all_models(redis, file)
            alive = [await alive_workers(redis, pool) for pool in catalog.pools]
        return [_row(worker, pool, catalog.revision) for pool in alive for worker in pool]

    show(asyncio.run(run()), as_json=as_json, empty="no worker is alive")


@workers.command("role")
def change_role(worker_id: WorkerId, role: Annotated[Role, typer.Argument()], file: CatalogFile = None) -> None:
    """Give a worker another role: it drains, switches and is ready again. Exit 1 when it keeps its role."""
    result = asyncio.run(_order(worker_id, "role", role, file))
    if not result.ok:
        typer.echo(f"{worker_id} keeps its role: {result.message}", err=True)
        raise typer.Exit(1)
    typer.echo(f"{worker_id} is {role}: drained in {result.drain_ms:.0f} ms, switched in {result.switch_ms:.0f} ms")


@workers.command("drain")
def drain(
    worker_id: WorkerId,
    off: Annotated[bool, typer.Option("--off", help="Let it take requests again.")] = False,
    file: CatalogFile = None,
) -> None:
    """Let a worker end what it runs and take nothing new."""
    result = asyncio.run(_order(worker_id, "undrain" if off else "drain", None, file))
    if not result.ok:
        typer.echo(f"{worker_id}: {result.message}", err=True)
        raise typer.Exit(1)
    typer.echo(f"{worker_id} " + ("takes requests again" if off else "drains"))


@workers.command("renew")
def renew(
    pool: Annotated[str, typer.Argument(help="Of which pool; without it of all of them.")] = "",
    file: CatalogFile = None,
) -> None:
    """Replace the workers that a fleet has started, one after the other, while the pool serves."""
    catalog = read_models(file or catalog_file())
    scaling = [name for name in catalog.pools if catalog.scaling_of(name) is not None]
    if pool and pool not in scaling:
        raise CannotStart(f"no workers of pool {pool!r} come and go; of these they do: {', '.join(scaling) or 'none'}")

    async def run() -> None:
        async with open_redis() as redis:
            for name in [pool] if pool else scaling:
                await redis.set(keys.renewal(name), int(time.time() * 1000))

    asyncio.run(run())
    names = pool or ", ".join(scaling) or "no pool"
    typer.echo(f"the workers of {names} are being replaced; `pdgate top` shows how far")


async def order_role(redis: Redis, pool: str, worker_id: str, role: Role) -> Answer:
    """Ask the pool's leader to give a worker another role, and wait. Raises CannotStart without a leader."""
    return await _sent(redis, pool, _order_of(worker_id, "role", role))


async def _order(worker_id: str, what: Literal["role", "drain", "undrain"], role: Role | None, file: Any) -> Answer:
    async with open_redis() as redis:
        catalog = await all_models(redis, file)
        for pool in catalog.pools:
            if any(w.worker_id == worker_id for w in await alive_workers(redis, pool)):
                return await _sent(redis, pool, _order_of(worker_id, what, role))
    raise CannotStart(f"no worker {worker_id!r} is alive; `pdgate workers` lists them")


def _order_of(worker_id: str, what: Literal["role", "drain", "undrain"], role: Role | None) -> Order:
    return Order(
        order_id=uuid.uuid4().hex, worker_id=worker_id, what=what, role=role, asked_unix_ms=int(time.time() * 1000)
    )


async def _sent(redis: Redis, pool: str, order: Order) -> Answer:
    await redis.xadd(orders(pool), {FIELD: encode(order)}, maxlen=MAX_ORDERS)
    got: Any = await redis.blpop([answer(pool, order.order_id)], timeout=ANSWER_S)
    if got is None:
        raise CannotStart("no scheduler has answered: does one run?")
    return msgspec.msgpack.decode(got[1], type=Answer)


async def alive_workers(redis: Redis, pool: str) -> Sequence[Registration]:
    """Return the pool's workers whose lease holds."""
    ids: list[Any] = await redis.zrange(keys.pool_workers(pool), 0, -1)
    leases: list[Any] = [await redis.get(keys.worker_lease(pool, worker_id.decode())) for worker_id in sorted(ids)]
    return [msgspec.msgpack.decode(lease, type=Registration) for lease in leases if lease]


def _row(worker: Registration, pool: Sequence[Registration], revision: str) -> WorkerRow:
    return WorkerRow(
        id=worker.worker_id,
        pool=worker.pool,
        role=worker.role.value,
        state=worker.state.value,
        epoch=worker.epoch,
        pid=worker.pid,
        address=worker.address,
        engine=worker.engine,
        simulated=worker.simulated,
        running=worker.num_running,
        waiting=worker.num_waiting,
        pairs=_pairs(worker, pool),
        catalog="same" if worker.catalog_revision == revision else "other",
    )


def _pairs(worker: Registration, pool: Sequence[Registration]) -> str:
    """Return how many workers of the other role fit, or why those that do not differ."""
    other = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}.get(worker.role)
    peers = [peer for peer in pool if peer.role is other]
    why = [mismatch(compatibility_of(worker), compatibility_of(peer)) for peer in peers]
    misfits = sorted({str(reason) for reason in why if reason is not None})
    return " ".join([str(why.count(None)), *(f"not:{reason}" for reason in misfits)]) if other else ""
