"""What the arriving requests ask of the workers, measured where they arrive. Pure: time is an argument."""

import math
from collections import deque
from collections.abc import Sequence

import msgspec

BIN_S = 1.0
_NUM_QUANTILES = 8
_SAMPLES_KEPT = 512


class DemandSample(msgspec.Struct, frozen=True, kw_only=True):
    """One arriving request, with its output as forecast."""

    prefill_ms: float
    """Compute time of its uncached prompt, alone on a worker."""
    output_tokens: float
    kv_token_steps: float
    """KV tokens it holds, summed over its decode steps: n*O + O^2/2 in expectation."""
    kv_token_steps_square: float
    """The squares of what it holds, summed over its steps: for the spread of memory in use."""
    kv_token_ms_before: float
    """KV tokens it holds before it decodes, times how long: while its prompt is computed elsewhere."""
    feasible: bool
    """An idle machine would meet its targets."""


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """Arrivals of a span of time, as rate and moments."""

    rate_rps: float
    prefill_ms: float
    """Mean compute time of a prompt."""
    feasible_share: float
    """Share of requests that an idle machine would serve within the targets, 0.0 to 1.0."""
    feasible_prefill_ms: float
    """Mean compute time of their prompts."""
    dispersion: float
    """Variance of the prefill work arriving per second over (its mean * the mean prompt): for Poisson arrivals
    1 + the squared CV of prompts, more when arrivals cluster. Equals C_a^2 + C_s^2 of Allen and Cunneen."""
    prefill_ms_quantiles: tuple[float, ...]
    """Compute times of feasible prompts at evenly spaced quantiles."""
    output_tokens: float
    kv_token_steps: float
    kv_token_steps_square: float
    kv_token_ms_before: float
    span_s: float


class _Bin:
    __slots__ = ("feasible", "feasible_prefill", "kv", "kv_before", "kv_square", "number", "output", "prefill")

    def __init__(self) -> None:
        self.number = self.feasible = 0
        self.prefill = self.feasible_prefill = self.output = self.kv = self.kv_square = self.kv_before = 0.0


class DemandWindow:
    """Arrivals of the last `span_s` seconds, cut where the demand changes.

    Once a second the latest 4, 8 and 16 seconds are held against those before them; a change of work
    that the spread of the earlier seconds does not explain ends a segment. `demand` covers the current
    segment only, `segments` remembers the ended ones.
    """

    def __init__(
        self, *, span_s: float = 180.0, alarm_sigma: float = 5.0, alarm_change: float = 0.3, keep_segments: int = 6
    ) -> None:
        self._span_bins = int(span_s / BIN_S)
        self._alarm_sigma = alarm_sigma
        self._alarm_change = alarm_change
        self._bins: deque[_Bin] = deque(maxlen=self._span_bins)
        self._open = _Bin()
        self._open_number: int | None = None  # of the open bin, since the clock's zero
        self._prompts: deque[tuple[int, float]] = deque(maxlen=_SAMPLES_KEPT)
        self._segments: deque[Demand] = deque(maxlen=keep_segments)
        self.alarms_s: deque[float] = deque(maxlen=16)
        """When the demand changed, the latest last."""

    @property
    def segments(self) -> Sequence[Demand]:
        """Demands of the segments that have ended, the latest last."""
        return tuple(self._segments)

    def observe(self, now_s: float, sample: DemandSample) -> None:
        """Count an arrival."""
        self.advance(now_s)
        entry = self._open
        entry.number += 1
        entry.prefill += sample.prefill_ms
        entry.output += sample.output_tokens
        entry.kv += sample.kv_token_steps
        entry.kv_square += sample.kv_token_steps_square
        entry.kv_before += sample.kv_token_ms_before
        if sample.feasible and self._open_number is not None:
            entry.feasible += 1
            entry.feasible_prefill += sample.prefill_ms
            self._prompts.append((self._open_number, sample.prefill_ms))

    def advance(self, now_s: float) -> None:
        """Close the seconds that have passed; seconds without arrivals are readings too."""
        number = int(now_s / BIN_S)
        if self._open_number is None:
            self._open_number = number
        if number - self._open_number > self._span_bins:
            self._bins.clear()
            self._open, self._open_number = _Bin(), number
        while self._open_number < number:
            self._bins.append(self._open)
            self._open = _Bin()
            self._open_number += 1
            self._look_for_change()

    def demand(self, now_s: float) -> Demand | None:
        """Return the demand of the current segment; None before the first full second."""
        self.advance(now_s)
        return self._demand(list(self._bins)) if self._bins else None

    def _demand(self, bins: Sequence[_Bin]) -> Demand:
        number = sum(b.number for b in bins)
        feasible = sum(b.feasible for b in bins)
        span_s = len(bins) * BIN_S
        scale = 1 / number if number else 0.0
        work = [b.prefill for b in bins]
        mean = sum(work) / len(work)
        prompt_ms = sum(work) * scale
        spread = sum((w - mean) ** 2 for w in work) / max(1, len(work) - 1)
        dispersion = spread / (mean * prompt_ms) if mean > 0 else 1.0
        # Few seconds say little about the spread: lean on Poisson arrivals of such prompts (2 = 1 + CV^2 of 1).
        trust = len(work) / (len(work) + 20)
        oldest = (self._open_number or 0) - len(bins)
        prompts = sorted(ms for at, ms in self._prompts if at >= oldest)
        return Demand(
            rate_rps=number / span_s,
            prefill_ms=prompt_ms,
            feasible_share=feasible * scale,
            feasible_prefill_ms=sum(b.feasible_prefill for b in bins) / feasible if feasible else 0.0,
            dispersion=min(max(trust * dispersion + (1 - trust) * 2.0, 1.0), 60.0),
            prefill_ms_quantiles=_quantiles(prompts),
            output_tokens=sum(b.output for b in bins) * scale,
            kv_token_steps=sum(b.kv for b in bins) * scale,
            kv_token_steps_square=sum(b.kv_square for b in bins) * scale,
            kv_token_ms_before=sum(b.kv_before for b in bins) * scale,
            span_s=span_s,
        )

    def _look_for_change(self) -> None:
        total = len(self._bins)
        if total < 12:
            return
        bins = list(self._bins)
        for recent in (4, 8, 16):
            before = total - recent
            if before < 2 * recent:
                return
            for read in (_prefill_work, _decode_work):
                if self._differs([read(b) for b in bins[:before]], [read(b) for b in bins[before:]]):
                    self._segments.append(self._demand(bins[:before]))
                    self.alarms_s.append(((self._open_number or 0) - recent) * BIN_S)
                    self._bins = deque(bins[before:], maxlen=self._span_bins)
                    return

    def _differs(self, before: Sequence[float], after: Sequence[float]) -> bool:
        mean, latest = sum(before) / len(before), sum(after) / len(after)
        change = abs(latest - mean)
        if change <= self._alarm_change * max(mean, latest):
            return False
        variance = sum((value - mean) ** 2 for value in before) / (len(before) - 1)
        # Both spreads count: a quiet past followed by bursts is not a certain change.
        later = sum((value - latest) ** 2 for value in after) / (len(after) - 1)
        error = math.sqrt(variance * (1 / len(after) + 1 / len(before)) + later / len(after))
        return change > self._alarm_sigma * error


def _prefill_work(b: _Bin) -> float:
    return b.prefill


def _decode_work(b: _Bin) -> float:
    return b.kv


def _quantiles(ordered: Sequence[float]) -> tuple[float, ...]:
    if not ordered:
        return ()
    count = len(ordered)
    return tuple(ordered[min(count - 1, int((i + 0.5) / _NUM_QUANTILES * count))] for i in range(_NUM_QUANTILES))
