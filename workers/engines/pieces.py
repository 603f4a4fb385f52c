"""What one request's outputs become on their way to the outlet: content, details, log probabilities.

A request that asks for nothing but text goes through without a copy or a value of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from contracts.parsing import Detail
from workers.engine import Job, Outlet
from workers.engines.answer_parser import AnswerParser
from workers.engines.sglang_features import logprobs_of


class Pieces:
    """Writes one request's outputs to its outlet."""

    def __init__(self, job: Job, parser: AnswerParser | None, token_bytes: Callable[[int], bytes]) -> None:
        self._parser = parser
        self._with_logprobs = job.sampling.top_logprobs is not None
        self._token_bytes = token_bytes
        self._complete = False

    @property
    def reasoning_tokens(self) -> int:
        """How many tokens were reasoning."""
        return self._parser.reasoning_tokens if self._parser is not None else 0

    def put(self, outlet: Outlet, text: str, ids: Sequence[int], meta: Mapping[str, Any]) -> None:
        """Pass one output on."""
        detail: Detail | None = None
        if self._parser is not None:
            text, detail = self._parser.take(text, len(ids))
        finish = meta.get("finish_reason") or {}
        self._complete = finish.get("type") == "stop"
        if self._with_logprobs:
            # The token that says stop is not part of the text, so its probability is not part of the answer.
            hidden = self._complete and isinstance(finish.get("matched"), int)
            logprobs = logprobs_of(meta, len(ids), self._token_bytes)[: -1 if hidden else None]
            if logprobs:
                detail = msgspec.structs.replace(detail or Detail(), logprobs=logprobs)
        outlet.chunk(text, ids, detail)

    def finish(self, outlet: Outlet) -> None:
        """Pass on what the parsers held back, when the outputs have ended by themselves."""
        if self._parser is None:
            return
        text, detail = self._parser.end(complete=self._complete)
        if text or detail is not None:
            outlet.chunk(text, (), detail)
