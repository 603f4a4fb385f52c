"""The steps of one run: which loads, in which order, and how far they are."""

import resource
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice, takewhile

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from pdgate.bench.drive import Driver, Heard
from pdgate.bench.endpoint import Endpoint
from pdgate.bench.load import Arrivals, Described, Lengths, Session, arrival_times, described_sessions, traced_sessions
from pdgate.bench.records import Record, Step
from pdgate.bench.texts import Author, Scale
from pdgate.plan.workload import Workload


class Campaign(msgspec.Struct, frozen=True, kw_only=True):
    """What to send. Each rate, or each concurrency, is a step; a trace alone is one."""

    rates: tuple[float, ...]  # sessions/s
    concurrencies: tuple[int, ...]
    arrivals: Arrivals
    burst_cv: float
    trace: Workload | None
    described: Described
    length_scale: float
    requests: int | None  # sessions per step
    duration_s: float | None  # per step
    deadline_s: float  # of one answer

    @property
    def words(self) -> str:
        """The load in words: the same words, the same load."""
        seed = f", seed {self.described.seed}"
        if self.trace is not None:
            source = f"trace {self.trace.name}"
            source += f", lengths x {self.length_scale:g}" if self.length_scale != 1 else ""
            seed = ""
        else:
            load = self.described
            source = f"{_spread(load.prompt)} tokens in, {_spread(load.output)} out"
            if load.prefix_tokens:
                source += f", {load.prefixes} shared prefix{'es' if load.prefixes > 1 else ''} of {load.prefix_tokens}"
            if load.turns > 1:
                source += f", {load.turns} turns {load.think_s:g} s apart"
            if self.rates:
                source += f", {self.arrivals.value} arrivals"
                source += f" of CV {self.burst_cv:g}" if self.arrivals is Arrivals.GAMMA else ""
        bounds = [f"{self.duration_s:g} s"] if self.duration_s is not None else []
        bounds += [f"{self.requests} sessions"] if self.requests is not None else []
        return ", ".join([source, *bounds]) + seed

    def sessions(self, rate_rps: float | None) -> Iterator[Session]:
        """Return the sessions of a step: open at this rate (a trace also as recorded), or closed."""
        closed = bool(self.concurrencies)
        if self.trace is not None:
            trace = self.trace.at_rate(rate_rps) if rate_rps else self.trace
            found = traced_sessions(trace, open_loop=not closed, length_scale=self.length_scale)
        else:
            seed = self.described.seed
            times = arrival_times(self.arrivals, rate_rps=rate_rps, cv=self.burst_cv, seed=seed) if rate_rps else None
            found = described_sessions(self.described, times)
        if self.duration_s is not None and not closed:
            end_s = self.duration_s
            found = takewhile(lambda session: (session.at_s or 0.0) < end_s, found)
        return islice(found, self.requests) if self.requests is not None else found

    def total(self, rate_rps: float | None) -> float | None:
        """Return the expected number of requests of a step; None where only time bounds it."""
        turns = self.described.turns if self.trace is None else 1
        if self.concurrencies and self.duration_s is not None:
            return None
        if self.trace is not None:
            return float(sum(1 for _ in self.sessions(rate_rps)))
        by_time = rate_rps * self.duration_s if rate_rps and self.duration_s is not None else float("inf")
        return turns * min(by_time, self.requests if self.requests is not None else float("inf"))


def _spread(lengths: Lengths) -> str:
    return f"{lengths.mean:g}" + (f" (CV {lengths.cv:g})" if lengths.cv else "")


async def play(endpoint: Endpoint, campaign: Campaign, *, shown: bool) -> tuple[Scale, list[Step]]:
    """Measure the endpoint's tokenizer, then play every step.

    Raises:
        EndpointError: it cannot be reached, or refuses a first request.
    """
    _raise_file_limit()
    try:
        scale = await endpoint.prepare()
        steps = []
        for rate in campaign.rates or (None,) * (not campaign.concurrencies):
            name = f"{rate:g} sessions/s" if rate else "trace as recorded"
            with _bar(name, campaign.total(rate), None, shown=shown) as heard:
                driver = _driver(endpoint, campaign, scale, heard)
                steps.append(await driver.open_loop(campaign.sessions(rate), name=name, rate_rps=rate))
        for users in campaign.concurrencies:
            name = f"{users} at once"
            with _bar(name, campaign.total(None), campaign.duration_s, shown=shown) as heard:
                driver = _driver(endpoint, campaign, scale, heard)
                steps.append(
                    await driver.closed_loop(
                        campaign.sessions(None),
                        name=name,
                        concurrency=users,
                        duration_s=campaign.duration_s,
                        think_s=campaign.described.think_s if campaign.described.turns > 1 else 0.0,
                    )
                )
    finally:
        endpoint.connections.close()
    return scale, steps


def _driver(endpoint: Endpoint, campaign: Campaign, scale: Scale, heard: Heard) -> Driver:
    author = Author(scale, salt=secrets.token_hex(8))  # no step finds another one's texts in the endpoint's caches
    return Driver(endpoint, author, deadline_s=campaign.deadline_s, heard=heard)


@contextmanager
def _bar(name: str, total: float | None, duration_s: float | None, *, shown: bool) -> Iterator[Heard]:
    """Show how many requests were sent, ended and failed; `duration_s` where only time bounds them."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[counts]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as progress:
        task = progress.add_task(name, total=total if total is not None else duration_s, counts="")
        sent = ended = failed = 0

        def heard(record: Record | None) -> None:
            nonlocal sent, ended, failed
            if record is None:
                sent += 1
            else:
                ended += 1
                failed += record.error is not None
            counts = f"{ended:,} of {sent:,} sent" + (f", {failed:,} failed" if failed else "")
            completed = ended if total is not None else min(progress.get_time() - begun_s, duration_s or 0.0)
            progress.update(task, completed=completed, counts=counts)

        begun_s = progress.get_time()
        told: Callable[[Record | None], None] = heard
        yield told


def _raise_file_limit() -> None:
    """Let this process hold as many connections as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
