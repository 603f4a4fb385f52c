"""What one request's outputs become on their way to the outlet: content, details, log probabilities.

A request that asks for nothing but text goes through without a copy or a value of its own. A continued
answer gets its text from its ids, and only what the client does not have comes out (continued_text).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from contracts.parsing import Detail
from workers.engine import Job, Outlet
from workers.engines.answer_parser import AnswerParser
from workers.engines.continued_text import ContinuedText, Seam
from workers.engines.sglang_features import logprobs_of


class Pieces:
    """Writes one request's outputs to its outlet."""

    def __init__(
        self,
        job: Job,
        parser: AnswerParser | None,
        token_bytes: Callable[[int], bytes],
        continued: ContinuedText | None = None,
    ) -> None:
        self._parser = parser
        self._with_logprobs = job.sampling.top_logprobs is not None
        self._token_bytes = token_bytes
        self._continued = continued
        self._seam = Seam(job.delivered_chars)
        self._complete = False

    @property
    def reasoning_tokens(self) -> int:
        """How many tokens were reasoning, those of earlier attempts included."""
        return self._parser.reasoning_tokens if self._parser is not None else 0

    @property
    def stopped_by(self) -> str:
        """The stop string over the seam that ended the answer; the engine does not know of it."""
        return self._continued.stopped_by if self._continued is not None else ""

    def replay(self, outlet: Outlet) -> None:
        """Bring text and parsers to where the client is, and pass on what it lacks of the delivered tokens."""
        if self._continued is None:
            return
        for text in self._continued.replay():
            detail: Detail | None = None
            if self._parser is not None:
                text, detail = self._parser.take(text, 1)  # noqa: PLW2901 - as in `put`
            self._pass_on(outlet, text, (), detail)

    def put(self, outlet: Outlet, text: str, ids: Sequence[int], meta: Mapping[str, Any]) -> bool:
        """Pass one output on; False when the answer ends here although the engine goes on. What follows is dropped."""
        detail: Detail | None = None
        if self.stopped_by:
            return True
        finish = meta.get("finish_reason") or {}
        self._complete = finish.get("type") == "stop"
        hidden = finish.get("matched") if self._complete and isinstance(finish.get("matched"), int) else None
        if self._continued is not None:
            text = self._continued.take(ids, last=bool(finish), hidden=hidden)
            self._complete = self._complete or bool(self._continued.stopped_by)
        if self._parser is not None:
            text, detail = self._parser.take(text, len(ids))
        if self._with_logprobs:
            # The token that says stop is not part of the text, so its probability is not part of the answer.
            logprobs = logprobs_of(meta, len(ids), self._token_bytes)[: None if hidden is None else -1]
            if logprobs:
                detail = msgspec.structs.replace(detail or Detail(), logprobs=logprobs)
        if self._continued is None:
            outlet.chunk(text, ids, detail)
        else:
            self._pass_on(outlet, text, ids, detail)
        return not self.stopped_by

    def finish(self, outlet: Outlet) -> None:
        """Pass on what was held back, when the outputs have ended by themselves."""
        if self._parser is None:
            return
        text, detail = self._parser.end(complete=self._complete)
        self._pass_on(outlet, text, (), detail)

    def finish_early(self, outlet: Outlet, *, complete: bool) -> None:
        """Pass on what is left of an answer of which the engine has nothing more to make."""
        self._complete = complete
        if self._continued is not None:
            text, detail = self._continued.take((), last=True), None
            if self._parser is not None:
                text, detail = self._parser.take(text, 0)
            self._pass_on(outlet, text, (), detail)
        self.finish(outlet)

    def _pass_on(self, outlet: Outlet, text: str, ids: Sequence[int], detail: Detail | None) -> None:
        text, detail = self._seam.after(text, detail)
        if text or ids or detail is not None:
            outlet.chunk(text, ids, detail)
