"""What the arriving requests ask of the workers, measured where they arrive. Pure: time is an argument.

Arrivals are kept by kind (what the length forecast can tell apart), and valued with the forecast of the
moment of asking. So a better forecast corrects the whole window at once, and is not taken for a change. A request
whose end was told counts with the answer that it got: kinds are shared by demands whose answers are not alike.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

import msgspec

BIN_S = 1.0
_NUM_QUANTILES = 8
_PROMPTS_KEPT = 512
_UNDER_WAY_KEPT = 20_000
_POISSON_DISPERSION = 2.0  # 1 + a squared CV of prompts of 1: the public traces' is 0.9 to 1.7


class DemandSample(msgspec.Struct, frozen=True, kw_only=True):
    """One arriving request."""

    kind: Hashable
    """Requests of one kind get one output forecast."""
    prompt_tokens: int
    prefill_ms: float
    """Compute time of its uncached prompt, alone on a worker."""
    feasible: bool
    """An idle machine would meet its targets."""


class OutputMoments(msgspec.Struct, frozen=True):
    """Forecast of a kind's output tokens."""

    mean: float
    mean_square: float


Forecast = Callable[[Hashable], OutputMoments]


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """Arrivals of a span of time, as rate and moments per request."""

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
    prompt_tokens: float
    output_tokens: float
    kv_token_steps: float
    """KV tokens held, summed over decode steps: E[n*O + O^2/2]."""
    kv_token_steps_square: float
    """The squares of what is held, summed over the steps: for the spread of memory in use."""
    kv_token_ms_before: float
    """KV tokens held while the prompt is computed elsewhere, times how long: E[n*S]."""
    span_s: float
    feasible_prompt_share: float = 1.0
    """Share (0 to 1) of the prompt tokens that belong to feasible requests."""
    course: tuple[tuple[int, float], ...] = ()
    """Feasible requests of each second, and the compute time of their prompts, ms."""


class _Kind:
    """Requests of a kind that arrived within some time, and the answers that they got."""

    __slots__ = ("ended", "into", "number", "output", "output_square", "prompt", "prompt_square", "unknown")

    def __init__(self) -> None:
        self.number = self.prompt = self.prompt_square = 0
        self.ended = self.output = self.output_square = 0
        self.unknown = 0  # broken off: how long they would have got nobody knows
        self.into: _Kind | None = None

    def join(self, whole: "_Kind") -> None:
        """Become a part of a longer time's; what ends is counted there from now on."""
        for name in self.__slots__:
            if name != "into":
                setattr(whole, name, getattr(whole, name) + getattr(self, name))
        self.into = whole

    def moments(self, forecast: OutputMoments) -> OutputMoments:
        """Return what the answers were, those under way as forecast.

        The first to end are the short ones: until half have, all are as forecast.
        """
        known = self.number - self.unknown
        if known <= 0 or 2 * self.ended < known:
            return forecast
        under_way = known - self.ended
        return OutputMoments(
            (self.output + under_way * forecast.mean) / known,
            (self.output_square + under_way * forecast.mean_square) / known,
        )


class _Bin:
    """The arrivals of one second."""

    __slots__ = ("feasible", "feasible_prefill", "feasible_prompt", "kinds", "kv_before", "number", "prefill")

    def __init__(self) -> None:
        self.number = self.feasible = self.feasible_prompt = 0
        self.prefill = self.feasible_prefill = self.kv_before = 0.0
        self.kinds: dict[Hashable, _Kind] = {}

    def add(self, sample: DemandSample) -> _Kind:
        """Count an arrival, and return those that it is counted with."""
        prompt = sample.prompt_tokens
        self.number += 1
        self.prefill += sample.prefill_ms
        self.kv_before += prompt * sample.prefill_ms
        if sample.feasible:
            self.feasible += 1
            self.feasible_prefill += sample.prefill_ms
            self.feasible_prompt += prompt
        kind = self.kinds.get(sample.kind)
        if kind is None:
            kind = self.kinds[sample.kind] = _Kind()
        kind.number += 1
        kind.prompt += prompt
        kind.prompt_square += prompt * prompt
        return kind


class _Segment:
    """A demand that has ended, and the requests that it was made of: none, if another window saw them."""

    __slots__ = ("demand", "kinds")

    def __init__(self, demand: Demand, bins: Iterable[_Bin] = ()) -> None:
        self.demand = demand
        self.kinds: dict[Hashable, _Kind] = {}
        for b in bins:
            for name, kind in b.kinds.items():
                kind.join(self.kinds.setdefault(name, _Kind()))

    def value(self, forecast: Forecast) -> None:
        """Value the demand by the answers that its requests got."""
        number = sum(kind.number for kind in self.kinds.values())
        if number:
            output, kv, kv_square = _decoding([self.kinds], forecast)
            self.demand = msgspec.structs.replace(
                self.demand,
                output_tokens=output / number,
                kv_token_steps=kv / number,
                kv_token_steps_square=kv_square / number,
            )


class DemandWindow:
    """Arrivals of the last `span_s` seconds, cut where the demand changes.

    Each time it is asked, the latest 4, 8 and 16 seconds are held against those before them; a change of
    work that the spread of both does not explain ends a segment. `demand` covers the current segment only,
    `segments` remembers the ended ones. Answers that have ended count as they were, those under way as forecast;
    whether the demand has changed is asked of forecasts alone, which treat the latest seconds like those before.
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
        self._prompts: deque[tuple[int, float]] = deque(maxlen=_PROMPTS_KEPT)
        self._segments: deque[_Segment] = deque(maxlen=keep_segments)
        self._under_way: OrderedDict[Hashable, _Kind] = OrderedDict()
        self.alarms_s: deque[float] = deque(maxlen=16)
        """When the demand changed, the latest last."""

    def restore(self, segments: Sequence[Demand], alarms_s: Sequence[float]) -> None:
        """Take over what an earlier window has seen change, on this clock. Before anything was observed."""
        self._segments.extend(_Segment(demand) for demand in segments)
        self.alarms_s.extend(alarms_s)

    @property
    def segments(self) -> Sequence[Demand]:
        """Demands of the segments that have ended, the latest last, as of the last call of `demand`."""
        return tuple(segment.demand for segment in self._segments)

    def observe(self, now_s: float, sample: DemandSample, request: Hashable | None = None) -> None:
        """Count an arrival. Its end is told by `request`; None = it is not told."""
        self._advance(now_s)
        kind = self._open.add(sample)
        if request is not None:
            self._under_way[request] = kind
            if len(self._under_way) > _UNDER_WAY_KEPT:
                self._under_way.popitem(last=False)
        if sample.feasible and self._open_number is not None:
            self._prompts.append((self._open_number, sample.prefill_ms))

    def ended(self, request: Hashable, output_tokens: int | None) -> None:
        """Take how long a request's answer got; None = it was broken off, or never begun."""
        kind = self._under_way.pop(request, None)
        if kind is None:
            return
        kind = kind.into or kind
        if output_tokens is None:
            kind.unknown += 1
        else:
            kind.ended += 1
            kind.output += output_tokens
            kind.output_square += output_tokens * output_tokens

    def demand(self, now_s: float, forecast: Forecast, *, as_forecast: bool = False) -> Demand | None:
        """Return the demand of the current segment; None before the first full second.

        Seconds without arrivals are readings too: after a minute of silence the rate is zero.
        `as_forecast`: answers count with what such ones are expected to get, those that have ended, too.
        """
        self._advance(now_s)
        self._look_for_change(forecast)
        for segment in self._segments:
            segment.value(forecast)
        return self._demand(list(self._bins), forecast, as_forecast=as_forecast) if self._bins else None

    def _advance(self, now_s: float) -> None:
        number = int(now_s / BIN_S)
        if self._open_number is None:
            self._open_number = number
        if number - self._open_number > self._span_bins:
            self._bins.clear()
            self._bins.extend(_Bin() for _ in range(self._span_bins))
            self._open, self._open_number = _Bin(), number
        while self._open_number < number:
            self._bins.append(self._open)
            self._open = _Bin()
            self._open_number += 1

    def _demand(self, bins: Sequence[_Bin], forecast: Forecast, *, as_forecast: bool = False) -> Demand:
        number = sum(b.number for b in bins)
        feasible = sum(b.feasible for b in bins)
        span_s = len(bins) * BIN_S
        scale = 1 / number if number else 0.0
        work = [b.prefill for b in bins]
        prompt_ms = sum(work) * scale
        oldest = (self._open_number or 0) - len(bins)
        prompt = sum(k.prompt for b in bins for k in b.kinds.values())
        output, kv, kv_square = _decoding([b.kinds for b in bins], forecast, as_forecast=as_forecast)
        return Demand(
            rate_rps=number / span_s,
            prefill_ms=prompt_ms,
            feasible_share=feasible * scale,
            feasible_prefill_ms=sum(b.feasible_prefill for b in bins) / feasible if feasible else 0.0,
            dispersion=_dispersion(work, prompt_ms),
            prefill_ms_quantiles=_quantiles(sorted(ms for at, ms in self._prompts if at >= oldest)),
            prompt_tokens=prompt * scale,
            output_tokens=output * scale,
            kv_token_steps=kv * scale,
            kv_token_steps_square=kv_square * scale,
            kv_token_ms_before=sum(b.kv_before for b in bins) * scale,
            span_s=span_s,
            feasible_prompt_share=sum(b.feasible_prompt for b in bins) / prompt if prompt else 1.0,
            course=tuple((b.feasible, b.feasible_prefill) for b in bins),
        )

    def _look_for_change(self, forecast: Forecast) -> None:
        total = len(self._bins)
        if total < 12:
            return
        bins = list(self._bins)
        readings = ([b.prefill for b in bins], [_decoding((b.kinds,), forecast, as_forecast=True)[1] for b in bins])
        for recent in (4, 8, 16):
            before = total - recent
            if before < 2 * recent:
                return
            if any(self._differs(reading[:before], reading[before:]) for reading in readings):
                self._segments.append(_Segment(self._demand(bins[:before], forecast), bins[:before]))
                self.alarms_s.append(((self._open_number or 0) - recent) * BIN_S)
                self._bins = deque(bins[before:], maxlen=self._span_bins)
                return

    def _differs(self, before: Sequence[float], after: Sequence[float]) -> bool:
        mean, latest = sum(before) / len(before), sum(after) / len(after)
        change = abs(latest - mean)
        if change <= self._alarm_change * max(mean, latest):
            return False
        # Both spreads count: a quiet past followed by bursts is not a certain change.
        earlier = sum((value - mean) ** 2 for value in before) / (len(before) - 1)
        later = sum((value - latest) ** 2 for value in after) / (len(after) - 1)
        error = math.sqrt(earlier * (1 / len(after) + 1 / len(before)) + later / len(after))
        return change > self._alarm_sigma * error


def _decoding(
    times: Iterable[Mapping[Hashable, _Kind]], forecast: Forecast, *, as_forecast: bool = False
) -> tuple[float, float, float]:
    """Return sums over the arrivals: output tokens, KV token steps, and their squares' steps.

    `as_forecast`: answers that have ended count so, too.
    """
    output = kv = kv_square = 0.0
    for kinds in times:
        for name, kind in kinds.items():
            moments = forecast(name) if as_forecast else kind.moments(forecast(name))
            mean = moments.mean
            grown = moments.mean_square / mean / 2 if mean > 0 else 0.0  # mean growth, weighted by steps
            output += kind.number * mean
            kv += mean * (kind.prompt + kind.number * grown)
            kv_square += mean * (kind.prompt_square + 2 * kind.prompt * grown + kind.number * grown * grown)
    return output, kv, kv_square


def _dispersion(work: Sequence[float], prompt_ms: float) -> float:
    """Return the larger dispersion of work per second and per few seconds: bursts may last that long."""
    if prompt_ms <= 0:
        return _POISSON_DISPERSION
    highest = 1.0
    for scale in (1, 4):
        sums = [sum(work[first : first + scale]) for first in range(len(work) % scale, len(work), scale)]
        mean = sum(sums) / len(sums) if sums else 0.0
        if len(sums) < 2 or mean <= 0:  # the only arrivals may be in the seconds left over at the beginning
            break
        spread = sum((value - mean) ** 2 for value in sums) / (len(sums) - 1)
        trust = len(sums) / (len(sums) + 20)  # few values say little about their spread
        highest = max(highest, trust * spread / (mean * prompt_ms) + (1 - trust) * _POISSON_DISPERSION)
    return min(highest, 60.0)


def _quantiles(ordered: Sequence[float]) -> tuple[float, ...]:
    if not ordered:
        return ()
    count = len(ordered)
    return tuple(ordered[min(count - 1, int((i + 0.5) / _NUM_QUANTILES * count))] for i in range(_NUM_QUANTILES))
