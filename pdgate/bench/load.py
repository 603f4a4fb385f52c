"""What is sent, when: sessions of one or more turns, from a description or from a trace."""

import enum
import math
import random
from collections.abc import Iterator, Sequence

import msgspec

from pdgate.bench.texts import Piece
from pdgate.plan.workload import Workload


class Arrivals(enum.StrEnum):
    """How sessions arrive under an open loop."""

    POISSON = "poisson"
    CONSTANT = "constant"
    GAMMA = "gamma"


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One request."""

    pieces: tuple[Piece, ...]  # of the new message
    output_tokens: int


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that follow each other: each takes the whole conversation along."""

    at_s: float | None  # since the start of the step; None = as soon as a user is free (closed loop)
    turns: tuple[Turn, ...]
    system: tuple[Piece, ...] = ()  # text shared with other sessions, in front of the conversation
    think_s: float = 0.0  # from the end of an answer to the next turn


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """A log-normal distribution of lengths in tokens."""

    mean: float
    cv: float = 0.0  # standard deviation over mean; 0 = always the mean

    def draw(self, rng: random.Random) -> int:
        """Return one length, at least 1."""
        if self.cv <= 0:
            return max(1, round(self.mean))
        variance = math.log1p(self.cv**2)
        return max(1, round(rng.lognormvariate(math.log(self.mean) - variance / 2, math.sqrt(variance))))


class Described(msgspec.Struct, frozen=True, kw_only=True):
    """A load without a trace."""

    prompt: Lengths  # of each turn's own message
    output: Lengths
    prefix_tokens: int = 0  # in front of each session, shared
    prefixes: int = 1  # how many different ones
    turns: int = 1
    think_s: float = 0.0
    seed: int = 1


def arrival_times(kind: Arrivals, *, rate_rps: float, cv: float, seed: int) -> Iterator[float]:
    """Return endless arrival times in seconds from zero; the first one arrives after a gap too.

    Args:
        kind: of the gaps.
        rate_rps: mean arrivals per second.
        cv: standard deviation of a gap over its mean, for gamma.
        seed: of the draws.
    """
    rng = random.Random(f"arrivals {seed}")  # noqa: S311
    shape = 1 / cv**2 if cv > 0 else 0.0
    at_s = 0.0
    while True:
        if kind is Arrivals.POISSON:
            at_s += rng.expovariate(rate_rps)
        elif kind is Arrivals.CONSTANT or not shape:
            at_s += 1 / rate_rps
        else:
            at_s += rng.gammavariate(shape, 1 / (shape * rate_rps))
        yield at_s


def described_sessions(load: Described, times: Iterator[float] | None) -> Iterator[Session]:
    """Return endless sessions; without `times` for a closed loop. One seed gives one load."""
    rng = random.Random(f"lengths {load.seed}")  # noqa: S311
    number = 0
    while True:
        turns = tuple(
            Turn(pieces=(Piece(f"s{number}t{turn}", load.prompt.draw(rng)),), output_tokens=load.output.draw(rng))
            for turn in range(load.turns)
        )
        shared = rng.randrange(load.prefixes)
        yield Session(
            at_s=next(times) if times is not None else None,
            turns=turns,
            system=(Piece(f"prefix{shared}", load.prefix_tokens),) if load.prefix_tokens else (),
            think_s=load.think_s,
        )
        number += 1


def traced_sessions(trace: Workload, *, open_loop: bool = True, length_scale: float = 1.0) -> Iterator[Session]:
    """Return the requests of a trace, once, with the prefix structure that it records.

    Blocks with one id become one and the same text, so that the endpoint's prefix cache meets what the recorded one
    met. A log that says only how many tokens were cached gets prompts that share so many tokens.

    Args:
        trace: what was recorded.
        open_loop: keep the arrival times.
        length_scale: factor on all lengths, for a model with a shorter context.
    """
    block = max(1, round(trace.block_tokens * length_scale))
    for number, request in enumerate(trace.requests):
        tokens = max(1, round(request.prompt_tokens * length_scale))
        yield Session(
            at_s=request.arrival_s if open_loop else None,
            turns=(
                Turn(
                    pieces=_pieces(number, tokens, block, request.blocks, request.cached_tokens, length_scale),
                    output_tokens=max(1, round(request.output_tokens * length_scale)),
                ),
            ),
        )


def _pieces(
    number: int, tokens: int, block: int, ids: Sequence[int], cached: int | None, length_scale: float
) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    left = tokens
    for block_id in ids:
        if left <= 0:
            break
        pieces.append(Piece(f"b{block_id}", min(block, left)))
        left -= block
    if not pieces and cached:
        shared = min(round(cached * length_scale), tokens - 1)
        if shared > 0:
            pieces.append(Piece("cached", shared))
            left -= shared
    if left > 0:
        pieces.append(Piece(f"r{number}", left))
    return tuple(pieces)
