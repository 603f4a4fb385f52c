"""What the timed engine says besides text, on request: log probabilities, reasoning, and calls that are forced.

Everything follows from the words that it makes anyway, so it is the same on every worker:

* The first `REASONING_TOKENS` words are reasoning, for a model with a reasoning parser.
* A forced call is `CALL_TOKENS` words as the argument `text` of the first tool, or of the one that is named. A call
  that is not forced is never made.
* What would need a model is refused by name.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Final

from contracts.lifecycle import FinishReason
from contracts.parsing import Detail, Parsing, TokenLogprob, ToolCallDelta
from contracts.wire import Counts, Sampling, Stages
from workers.engine import End, Job, Outlet, Refusal
from workers.engines.timed_text import FIRST_ID, WORDS

REASONING_TOKENS: Final = 4
CALL_TOKENS: Final = 8
_MOST: Final = 20  # alternatives


def check_details(sampling: Sampling) -> None:
    """Refuse what a latency model cannot play. Raises Refusal."""
    for parameter, wanted in (
        ("response_format", sampling.grammar),
        ("logit_bias", sampling.logit_bias),
        ("stop_token_ids", sampling.stop_token_ids),
    ):
        if wanted:
            raise Refusal("bad_request", f"'{parameter}': the simulated engine has no model to follow it")


def is_forced(parsing: Parsing | None) -> bool:
    """Return whether the answer has to be a call."""
    return parsing is not None and bool(parsing.tools and (parsing.tool_name or parsing.tool_choice == "required"))


def detailed(job: Job, outlet: Outlet) -> Outlet:
    """Return an outlet that says more than text if the job wants it, otherwise the outlet itself."""
    if job.parsing is None and job.sampling.top_logprobs is None:
        return outlet
    return _Detailed(job, outlet)


class _Detailed:
    """An outlet in front of another one, for one job."""

    def __init__(self, job: Job, outlet: Outlet) -> None:
        self._job = job
        self._outlet = outlet
        self._position = job.num_delivered
        self._calls = is_forced(job.parsing)
        self._thinks = job.parsing is not None and bool(job.parsing.reasoning_parser) and not self._calls
        self._reasoning_tokens = 0

    def chunk(self, text: str, token_ids: Sequence[int], detail: Detail | None = None) -> None:
        """Take a chunk apart."""
        del detail  # the engine itself makes none
        begins, self._position = self._position, self._position + len(token_ids)
        reasoning = ""
        calls: tuple[ToolCallDelta, ...] = ()
        if self._calls:
            text, calls = "", self._call(text, begins=begins == 0)
        elif self._thinks and begins < REASONING_TOKENS:
            self._reasoning_tokens += len(token_ids)
            text, reasoning = "", text
        detail = Detail(reasoning=reasoning, tool_calls=calls, logprobs=self._logprobs(token_ids))
        self._outlet.chunk(text, token_ids, detail if detail != Detail() else None)

    def prefilled(self, counts: Counts, stages: Stages) -> None:
        """Pass on."""
        self._outlet.prefilled(counts, stages)

    def end(self, end: End) -> None:
        """Close the call, count the reasoning, and pass on."""
        if self._calls and end.reason is FinishReason.STOP and self._position:
            self._outlet.chunk("", (), Detail(tool_calls=(ToolCallDelta(index=0, arguments='"}'),)))
        counts = end.counts
        if self._reasoning_tokens:
            counts = Counts(
                prompt_tokens=counts.prompt_tokens,
                cached_tokens=counts.cached_tokens,
                completion_tokens=counts.completion_tokens,
                reasoning_tokens=self._reasoning_tokens,
            )
        self._outlet.end(
            End(reason=end.reason, counts=counts, stages=end.stages, error=end.error, matched_stop=end.matched_stop)
        )

    def _call(self, text: str, *, begins: bool) -> tuple[ToolCallDelta, ...]:
        parsing, attempt = self._job.parsing, self._job.attempt
        assert parsing is not None, "only a forced call comes here"
        arguments = ToolCallDelta(index=0, arguments=json.dumps(text, ensure_ascii=False)[1:-1])
        if not begins:
            return (arguments,)
        name = parsing.tool_name or json.loads(parsing.tools)[0]["function"]["name"]
        digest = hashlib.blake2b(f"{attempt.rid}/{attempt.sample}".encode(), digest_size=12).hexdigest()
        opening = ToolCallDelta(index=0, id=f"call_{digest}", name=name, arguments='{"text":"')
        return (opening, arguments)

    def _logprobs(self, token_ids: Sequence[int]) -> tuple[TokenLogprob, ...]:
        alternatives = self._job.sampling.top_logprobs
        if alternatives is None:
            return ()
        return tuple(_logprob(token_id, min(alternatives, _MOST)) for token_id in token_ids)


def _logprob(token_id: int, alternatives: int) -> TokenLogprob:
    """Return a token with a probability that its id decides; it is the likeliest of its alternatives."""
    first = -0.1 - (token_id % 16) / 32
    word = token_id - FIRST_ID
    others = [FIRST_ID + (word + i) % len(WORDS) for i in range(alternatives)]
    return TokenLogprob(
        id=token_id,
        logprob=first,
        token=_bytes(token_id),
        top=tuple(TokenLogprob(id=o, logprob=first - 1.5 * i, token=_bytes(o)) for i, o in enumerate(others)),
    )


def _bytes(token_id: int) -> bytes:
    return WORDS[token_id - FIRST_ID].encode()
