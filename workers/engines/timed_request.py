"""One request in the timed engine: its prompt, its text so far, its clocks."""

import asyncio

from contracts.lifecycle import FinishReason, Phase
from contracts.wire import Counts, Stages
from workers.engine import End, Job, Outlet
from workers.engines.timed_details import CALL_TOKENS, is_forced
from workers.engines.timed_text import IDS, WORDS, replayed, safe_split, state_of, word_at

_SEEDS = 2**63


class TimedRequest:
    """State of one job. The engine moves it between its queues; this class makes text and counts."""

    __slots__ = (
        "_accepted_s", "_computed_s", "_first_token_s", "_held", "_ids_held", "_matched", "_max_position",
        "_min_position", "_outlet", "_position", "_started_s", "_state", "_stops", "_stops_at", "_timer", "begun",
        "cached", "computed", "intact", "job", "kv", "load_ms", "num_prompt", "open", "reason", "stored",
        "transfer_from_s", "transfer_ms", "uncomputed",
    )  # fmt: skip

    def __init__(self, job: Job, outlet: Outlet, *, accepted_s: float) -> None:
        self.job = job
        self.num_prompt = job.num_input_tokens
        self.uncomputed = self.num_prompt if job.computes else 0
        self.load_ms = 0.0  # getting pages from the store; becomes part of the next step
        self.intact = True  # what the store gave was what it said
        self.cached = 0
        self.stored = 0  # of the cached ones: from the store
        self.computed = False
        self.begun = False  # the first token was made
        self.open = True
        self.kv = 0  # tokens of KV room held when admitted
        self.reason: FinishReason | None = None
        self.transfer_from_s = 0.0
        self.transfer_ms = 0.0
        self._outlet = outlet
        self._position = job.num_delivered
        self._max_position = job.sampling.max_tokens
        self._min_position = job.sampling.min_tokens or 0
        self._stops = job.sampling.stop
        self._stops_at = CALL_TOKENS if is_forced(job.parsing) else 0  # 0 = it never stops by itself
        self._state = 0
        self._held = ""
        self._matched = ""
        self._accepted_s = accepted_s
        self._started_s = 0.0
        self._computed_s = 0.0
        self._first_token_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_output(self) -> int:
        """Tokens sampled here."""
        return self._position - self.job.num_delivered

    def kv_wanted(self, reserved_output_tokens: int) -> int:
        """Return the KV room that admission asks for, tokens."""
        if self.job.phase is Phase.PREFILL:
            return self.num_prompt
        most = max(0, self.job.sampling.max_tokens - self.job.num_delivered)
        return self.num_prompt + self.num_output + min(most, reserved_output_tokens)

    # -- clocks ----------------------------------------------------------------------------------------

    def start(self, now_s: float) -> None:
        """Note when work on the request began; later calls change nothing."""
        self._started_s = self._started_s or now_s

    def prefilled(self, now_s: float) -> None:
        """Note and report that the prompt is computed."""
        self._computed_s = self.transfer_from_s = now_s
        self._outlet.prefilled(self._counts(), self._stages(now_s))

    def note_transfer(self, now_s: float) -> None:
        """Note that the KV cache was handed over."""
        self.transfer_ms = (now_s - (self.transfer_from_s or now_s)) * 1000

    def fetch(self, whole_ms: float, now_s: float) -> None:
        """Note that pages come from the store, and began to when the request came: its wait in the queue hides it."""
        self.load_ms = self.transfer_ms = max(0.0, whole_ms - (now_s - self._accepted_s) * 1000)

    def arm(self, timer: asyncio.TimerHandle) -> None:
        """Replace the hand-off timer."""
        self.disarm()
        self._timer = timer

    def disarm(self) -> None:
        """Stop the hand-off timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- text ------------------------------------------------------------------------------------------

    def begin(self, kv: bytes, now_s: float) -> bool:
        """Make the first token from the prompt's KV; True when it is the last as well."""
        seed = (self.job.sampling.seed or 0) + self.job.attempt.sample  # each sample is another text
        self._state = state_of(kv, (seed + _SEEDS) % (2 * _SEEDS) - _SEEDS)
        self._first_token_s = now_s
        self.begun = True
        if self.job.delivered:
            text, self._state = replayed(self._state, self.job.delivered)
            self._held = text[self.job.delivered_chars :]
            if self._position >= self._max_position:  # only the end was lost
                self._outlet.chunk(self._held, ())
                self.reason = FinishReason.LENGTH
                return True
        return self.step()

    def step(self) -> bool:
        """Make one token; True when the request is finished, `reason` says how."""
        position = self._position
        word = word_at(self._state, position)
        self._position = position = position + 1
        if self._stops or self._held or self._stops_at:
            return self._step_with_stops(WORDS[word], IDS[word])
        self._outlet.chunk(WORDS[word], IDS[word])
        if position < self._max_position:
            return False
        self.reason = FinishReason.LENGTH
        return True

    def _step_with_stops(self, text: str, ids: tuple[int]) -> bool:
        text = self._held + text
        if self._position < self._min_position:
            sendable, stop = len(text), None
        else:
            sendable, stop = safe_split(text, self._stops)
        if stop is not None:
            self.reason, self._matched = FinishReason.STOP, stop
        elif self._position == self._stops_at:
            self.reason, sendable = FinishReason.STOP, len(text)
        elif self._position >= self._max_position:
            self.reason, sendable = FinishReason.LENGTH, len(text)
        self._outlet.chunk(text[:sendable], ids)
        self._held = text[sendable:]
        return self.reason is not None

    # -- end -------------------------------------------------------------------------------------------

    def end(self, reason: FinishReason, now_s: float, error: str) -> None:
        """Report the end."""
        self.open = False
        self.disarm()
        self._outlet.end(
            End(
                reason=reason,
                counts=self._counts(),
                stages=self._stages(now_s),
                error=error,
                matched_stop=self._matched,
            )
        )

    def _counts(self) -> Counts:
        prompt = self.num_prompt
        if self.job.computes:
            prompt -= self.uncomputed
            if not self._started_s:
                prompt = 0
        cached = min(self.cached, prompt)
        return Counts(
            prompt_tokens=prompt,
            cached_tokens=cached,
            cached_store_tokens=min(self.stored, cached),
            completion_tokens=self.num_output,
        )

    def _stages(self, now_s: float) -> Stages:
        started_s = self._started_s or now_s
        computing_from_s = started_s if self.job.computes else self._first_token_s
        computed_s = self._computed_s or now_s
        return Stages(
            queue_ms=(started_s - self._accepted_s) * 1000,
            compute_ms=(computed_s - computing_from_s) * 1000 if computing_from_s else 0.0,
            transfer_ms=self.transfer_ms,
            first_token_ms=(self._first_token_s - self._accepted_s) * 1000 if self._first_token_s else 0.0,
        )
