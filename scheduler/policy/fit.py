"""Costs of a worker, learned from what workers report: recursive least squares around a prior. Pure.

Each coefficient is estimated as a multiple of its prior, and errors count relative to what was measured, so that
short and long prompts weigh alike. A stated prior is believed: multiples stay within ±50 %. An assumed one is
only a place to start from. An outlier counts as three standard deviations at most (Huber). What a measurement says
nothing about is not forgotten with it: hours of prompts of one length leave what is known of the others (directional
forgetting, Kulhavy 1987).
"""

from collections.abc import Sequence

import msgspec

from contracts.perf import LatencyModel

_FORGETTING = 0.995
_NOISE = 0.01  # squared relative error of one measurement
_OUTLIER_SIGMAS = 3.0
_SURE, _OPEN = 0.05, 1e4
_STATED_BOUNDS, _ASSUMED_BOUNDS = (0.5, 1.5), (1e-3, 1e4)


class RlsState(msgspec.Struct, frozen=True):
    """One estimate, for another process."""

    multiples: list[float]
    seen: int
    p: list[list[float]]
    variance: float


class FitState(msgspec.Struct, frozen=True):
    """A fit, for another process: of use only around the same prior."""

    prior: LatencyModel
    prefill: RlsState
    decode: RlsState


class Rls:
    """Multiples of prior coefficients, for y = sum of multiple_i * x_i."""

    def __init__(self, size: int, *, stated: bool) -> None:
        self.multiples = [1.0] * size
        self.seen = 0
        self._bounds = _STATED_BOUNDS if stated else _ASSUMED_BOUNDS
        variance = _SURE if stated else _OPEN
        self._p = [[variance if i == j else 0.0 for j in range(size)] for i in range(size)]
        self._variance = 0.25 if stated else 1e6  # of relative errors: what counts as an outlier

    def observe(self, parts: Sequence[float], measured: float) -> None:
        """Take a measurement.

        Args:
            parts: what each coefficient contributes by its prior.
            measured: the sum that was seen, > 0.
        """
        x = [part / measured for part in parts]
        error = 1.0 - sum(a * b for a, b in zip(x, self.multiples, strict=True))
        limit = _OUTLIER_SIGMAS * max(self._variance, _NOISE) ** 0.5
        error = min(max(error, -limit), limit)
        self._variance += (error * error - self._variance) * (0.05 if self.seen > 20 else 0.3)
        self._move(x, error)
        px = [sum(row[j] * x[j] for j in range(len(x))) for row in self._p]
        unsure = sum(a * b for a, b in zip(x, px, strict=True))
        learned = (1.0 - (1.0 / _FORGETTING - 1.0) * _NOISE / unsure) / (_NOISE + unsure) if unsure > 0 else 0.0
        for i, row in enumerate(self._p):
            for j in range(len(row)):
                row[j] -= px[i] * px[j] * learned
        self.seen += 1

    def _move(self, x: Sequence[float], error: float) -> None:
        """Turn the multiples by an error. One at its bound that would go beyond is no help: the others do it.

        Left in, it would take the error for its own for good, while those it is traded against went the wrong way.
        """
        low, high = self._bounds
        free = list(range(len(x)))
        while True:
            px = {i: sum(self._p[i][j] * x[j] for j in free) for i in free}
            spread = _NOISE + sum(x[i] * px[i] for i in free)
            moved = {i: self.multiples[i] + px[i] / spread * error for i in free}
            stuck = [i for i in free if (moved[i] - self.multiples[i]) * self._beyond(i) > 0]
            if not stuck:
                break
            free = [i for i in free if i not in stuck]
        for i, multiple in moved.items():
            self.multiples[i] = min(max(multiple, low), high)

    def _beyond(self, index: int) -> int:
        """Return the direction in which a multiple has no way to go: 1, -1, or 0 between the bounds."""
        low, high = self._bounds
        return (self.multiples[index] >= high) - (self.multiples[index] <= low)

    @property
    def state(self) -> RlsState:
        """The estimate as it is."""
        return RlsState(list(self.multiples), self.seen, [list(row) for row in self._p], self._variance)

    def restore(self, state: RlsState) -> None:
        """Take over an estimate that has seen more."""
        if state.seen > self.seen and len(state.multiples) == len(self.multiples):
            self.multiples, self.seen = list(state.multiples), state.seen
            self._p, self._variance = [list(row) for row in state.p], state.variance


class LatencyFit:
    """The latency model of a pool's workers, as far as it is known.

    `stated`: the prior comes from the operator or the engine; otherwise it is a guess, and measurements decide.
    """

    def __init__(self, prior: LatencyModel, *, stated: bool) -> None:
        self.prior = prior
        self.stated = stated
        self._prefill = Rls(3, stated=stated)
        self._decode = Rls(3, stated=stated)
        self._model = prior

    @property
    def model(self) -> LatencyModel:
        """Costs as believed now."""
        return self._model

    @property
    def num_seen(self) -> tuple[int, int]:
        """Measurements of prompts, of decode steps."""
        return self._prefill.seen, self._decode.seen

    @property
    def state(self) -> FitState:
        """The fit as it is."""
        return FitState(self.prior, self._prefill.state, self._decode.state)

    def restore(self, state: FitState) -> None:
        """Take over what another fit around the same prior has seen more of."""
        if state.prior == self.prior:
            self._prefill.restore(state.prefill)
            self._decode.restore(state.decode)
            self._update()

    def prompt(self, *, uncached_tokens: int, cached_tokens: int, compute_ms: float) -> None:
        """Take the computing time of one prompt."""
        if compute_ms <= 0 or uncached_tokens <= 0:
            return
        cost = self.prior.prefill
        pairs = uncached_tokens * uncached_tokens + 2 * cached_tokens * uncached_tokens
        parts = (cost.fixed_ms, cost.per_token_ms * uncached_tokens, cost.per_token_pair_ms * pairs)
        self._prefill.observe(parts, compute_ms)
        self._update()

    def step(self, *, num_requests: float, kv_tokens: float, step_ms: float) -> None:
        """Take the mean time of decode steps with so many requests and resident KV tokens."""
        if step_ms <= 0 or num_requests <= 0:
            return
        cost = self.prior.decode
        parts = (cost.fixed_ms, cost.per_request_ms * num_requests, cost.per_kv_token_ms * kv_tokens)
        self._decode.observe(parts, step_ms)
        self._update()

    def _update(self) -> None:
        prior, replace = self.prior, msgspec.structs.replace
        a, b, c = self._prefill.multiples
        d0, d1, d2 = self._decode.multiples
        self._model = replace(
            prior,
            prefill=replace(
                prior.prefill,
                fixed_ms=prior.prefill.fixed_ms * a,
                per_token_ms=prior.prefill.per_token_ms * b,
                per_token_pair_ms=prior.prefill.per_token_pair_ms * c,
            ),
            decode=replace(
                prior.decode,
                fixed_ms=prior.decode.fixed_ms * d0,
                per_request_ms=prior.decode.per_request_ms * d1,
                per_kv_token_ms=prior.decode.per_kv_token_ms * d2,
            ),
        )
