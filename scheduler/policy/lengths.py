"""How long answers get: output quantiles learned per model, tenant and request shape."""

from collections import OrderedDict
from collections.abc import Sequence

import msgspec

_PER_OCTAVE = 4
_NUM_BUCKETS = 72  # up to 2**18 tokens
_STANDS = 32


class LengthKey(msgspec.Struct, frozen=True, kw_only=True):
    """What tells requests apart before they run."""

    model: str
    tenant: str
    shape: int
    """Octave of the prompt's length."""

    @classmethod
    def of(cls, *, model: str, tenant: str, prompt_tokens: int) -> "LengthKey":
        """Return the key of a request."""
        return cls(model=model, tenant=tenant, shape=prompt_tokens.bit_length())


class OutputForecast(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution of output tokens."""

    mean: float
    mean_square: float
    shares: tuple[float, ...]  # cumulative, by bucket

    def quantile(self, share: float) -> int:
        """Return the tokens that `share` (0 to 1) of such answers do not exceed."""
        for bucket, below in enumerate(self.shares):
            if below >= share:
                return _upper(bucket)
        return _upper(_NUM_BUCKETS - 1)

    def share_up_to(self, tokens: int) -> float:
        """Return the share (0 to 1) of answers with at most so many tokens."""
        return self.shares[_bucket(tokens)]


class Level(msgspec.Struct, frozen=True):
    """What is known of the answers of a model, a tenant or one of its shapes: for another process."""

    name: tuple[str, ...]
    shape: int | None
    counts: dict[int, float]
    """By bucket; those that are not there are 0."""
    weighted: float
    weighted_square: float


class _Histogram:
    """Counts by log-spaced bucket; old ones fade."""

    __slots__ = ("counts", "total", "weighted", "weighted_square")

    def __init__(self) -> None:
        self.counts = [0.0] * _NUM_BUCKETS
        self.total = 0.0
        self.weighted = 0.0
        self.weighted_square = 0.0

    def add(self, tokens: int, memory: float) -> None:
        if self.total >= memory:  # halve all: the last `memory` answers weigh most
            self.counts = [count / 2 for count in self.counts]
            self.total /= 2
            self.weighted /= 2
            self.weighted_square /= 2
        self.counts[_bucket(tokens)] += 1
        self.total += 1
        self.weighted += tokens
        self.weighted_square += tokens * tokens


class LengthModel:
    """Learns from finished answers and forecasts new ones.

    A forecast mixes three levels: this tenant's requests of this shape, this tenant's, the model's.
    A level with n answers gets n / (n + `prior_weight`) of what the finer ones left. Before anything is
    learned the forecast is `prior_tokens`, spread by a factor of two. At most `max_keys` histograms are
    kept; the least recently fed leave. A forecast stands until so many answers have come that it could have
    changed: each one at first, one in 32 of those remembered later on.
    """

    def __init__(
        self, *, prior_tokens: int = 256, prior_weight: float = 16.0, memory: float = 512.0, max_keys: int = 4096
    ) -> None:
        self._prior_weight = prior_weight
        self._memory = memory
        self._max_keys = max_keys
        self._levels: OrderedDict[tuple[object, ...], _Histogram] = OrderedDict()
        self._forecasts: dict[tuple[object, ...], OutputForecast] = {}
        self._stand_until = 0  # answers seen
        self._covered = [0] * 11
        self._seen = 0
        self._prior = _Histogram()
        for factor in (0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8):
            self._prior.add(max(1, int(prior_tokens * factor)), float("inf"))

    def __len__(self) -> int:
        return len(self._levels)

    def learn(self, key: LengthKey, output_tokens: int) -> None:
        """Take a finished answer; it is first held against what was forecast (see `calibration`)."""
        below = self.forecast(key).share_up_to(output_tokens)
        self._covered[min(10, int(below * 10))] += 1
        self._seen += 1
        for level in _levels(key):
            histogram = self._levels.pop(level, None) or _Histogram()
            self._levels[level] = histogram
            histogram.add(output_tokens, self._memory)
        while len(self._levels) > self._max_keys:
            self._levels.popitem(last=False)
        if self._seen >= self._stand_until:
            self._forecasts.clear()
            self._stand_until = self._seen + 1 + int(min(self._seen, self._memory)) // _STANDS

    def forecast(self, key: LengthKey) -> OutputForecast:
        """Return the distribution expected for a request."""
        levels = _levels(key)
        known = self._forecasts.get(levels[0])
        if known is None:
            if len(self._forecasts) >= self._max_keys:
                self._forecasts.clear()
            known = self._mix([self._levels.get(level) for level in levels])
            self._forecasts[levels[0]] = known
        return known

    def levels(self, most: int) -> list[Level]:
        """Return the `most` levels that were fed last, the latest last."""
        found = []
        for name in list(self._levels)[-most:]:
            histogram = self._levels[name]
            texts = tuple(part for part in name if isinstance(part, str))
            shape = next((part for part in name if isinstance(part, int)), None)
            counts = {bucket: count for bucket, count in enumerate(histogram.counts) if count}
            found.append(Level(texts, shape, counts, histogram.weighted, histogram.weighted_square))
        return found

    def restore(self, levels: Sequence[Level]) -> None:
        """Take over levels where this model knows less."""
        for level in levels:
            name: tuple[object, ...] = level.name if level.shape is None else (*level.name, level.shape)
            known, total = self._levels.get(name), sum(level.counts.values())
            if known is not None and known.total >= total:
                continue
            histogram = _Histogram()
            for bucket, count in level.counts.items():
                if 0 <= bucket < _NUM_BUCKETS:
                    histogram.counts[bucket] = count
            histogram.total = total
            histogram.weighted, histogram.weighted_square = level.weighted, level.weighted_square
            self._levels[name] = histogram
            self._levels.move_to_end(name)
        while len(self._levels) > self._max_keys:
            self._levels.popitem(last=False)
        self._forecasts.clear()

    def calibration(self) -> Sequence[float]:
        """Return, per decile of the forecast, the share of answers that fell into it; 0.1 each is perfect."""
        counts = [*self._covered[:9], self._covered[9] + self._covered[10]]
        return [count / self._seen for count in counts] if self._seen else [0.0] * 10

    def _mix(self, levels: Sequence[_Histogram | None]) -> OutputForecast:
        shares = [0.0] * _NUM_BUCKETS
        mean = mean_square = 0.0
        left = 1.0
        for histogram in [*levels, self._prior]:
            if histogram is None or not histogram.total:
                continue
            weight = left
            if histogram is not self._prior:
                weight *= histogram.total / (histogram.total + self._prior_weight)
            left -= weight
            scale = weight / histogram.total
            mean += histogram.weighted * scale
            mean_square += histogram.weighted_square * scale
            for bucket, count in enumerate(histogram.counts):
                if count:
                    shares[bucket] += count * scale
        total = 0.0
        for bucket, share in enumerate(shares):
            total += share
            shares[bucket] = total
        return OutputForecast(mean=mean, mean_square=mean_square, shares=tuple(shares))


def _levels(key: LengthKey) -> tuple[tuple[object, ...], ...]:
    return (key.model, key.tenant, key.shape), (key.model, key.tenant), (key.model,)


def _bucket(tokens: int) -> int:
    """Return the bucket of a length: four per octave above 1."""
    if tokens <= 1:
        return 0
    octave = tokens.bit_length() - 1
    within = (tokens - (1 << octave)) * _PER_OCTAVE >> octave
    return min(_NUM_BUCKETS - 1, octave * _PER_OCTAVE + within)


def _upper(bucket: int) -> int:
    """Return the highest length of a bucket."""
    octave, within = divmod(bucket, _PER_OCTAVE)
    return max(1, (1 << octave) + ((within + 1) * (1 << octave) - 1) // _PER_OCTAVE)
