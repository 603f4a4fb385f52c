"""What answers that are still being written say about how long answers get. Pure: time is an argument.

Finished answers alone tell of a change too late, and tell of the short ones first. So all requests placed in the last
`span_s` seconds are looked at, finished or not, which no length favours; one that has grown past its forecast is
expected to grow on by a quarter.
"""

from collections import OrderedDict
from collections.abc import Hashable

from scheduler.policy.demand import OutputMoments

_GROWS_ON = 1.25
_ENOUGH = 10


class _Answer:
    __slots__ = ("ended_tokens", "forecast_tokens", "kind", "since_s", "step_ms")

    def __init__(self, since_s: float, kind: Hashable, forecast_tokens: float, step_ms: float) -> None:
        self.since_s = since_s
        self.kind = kind
        self.forecast_tokens = forecast_tokens
        self.step_ms = step_ms
        self.ended_tokens: int | None = None


class GrowingAnswers:
    """Requests placed lately, by id."""

    def __init__(self, *, span_s: float = 60.0, max_answers: int = 20_000) -> None:
        self._span_s = span_s
        self._max_answers = max_answers
        self._answers: OrderedDict[Hashable, _Answer] = OrderedDict()
        self._seen: dict[Hashable, OutputMoments] = {}

    def __len__(self) -> int:
        return len(self._answers)

    def started(
        self, now_s: float, request: Hashable, kind: Hashable, *, forecast_tokens: float, step_ms: float
    ) -> None:
        """Take that a request was placed; it is expected to get a token each `step_ms`."""
        self._answers[request] = _Answer(now_s, kind, forecast_tokens, step_ms)
        while len(self._answers) > self._max_answers:
            self._answers.popitem(last=False)

    def ended(self, request: Hashable, output_tokens: int) -> None:
        """Take its length."""
        answer = self._answers.get(request)
        if answer is not None:
            answer.ended_tokens = output_tokens

    def forget(self, request: Hashable) -> None:
        """Drop an answer that was broken off: it says nothing about lengths."""
        self._answers.pop(request, None)

    def look(self, now_s: float) -> None:
        """Value what is there; `moments` answers with it until the next look."""
        while self._answers:
            request, oldest = next(iter(self._answers.items()))
            if oldest.since_s >= now_s - self._span_s:
                break
            del self._answers[request]
        sums: dict[Hashable, list[float]] = {}
        for answer in self._answers.values():
            tokens: float
            if answer.ended_tokens is not None:
                tokens = answer.ended_tokens
            else:
                so_far = (now_s - answer.since_s) * 1000 / answer.step_ms
                tokens = max(answer.forecast_tokens, _GROWS_ON * so_far)
            counted = sums.setdefault(answer.kind, [0, 0.0, 0.0])
            counted[0] += 1
            counted[1] += tokens
            counted[2] += tokens * tokens
        self._seen = {
            kind: OutputMoments(total / number, square / number)
            for kind, (number, total, square) in sums.items()
            if number >= _ENOUGH
        }

    def moments(self, kind: Hashable, learned: OutputMoments) -> OutputMoments:
        """Return what was learned of a kind from finished answers, or more if those under way have outgrown it."""
        seen = self._seen.get(kind)
        if seen is None or seen.mean <= learned.mean:
            return learned
        return seen
