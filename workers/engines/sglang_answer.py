"""Translation between our values and SGLang's dictionaries; pure, so it needs no SGLang to test."""

import time
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from contracts.lifecycle import FinishReason, HandOff, Phase
from contracts.wire import Counts, Sampling, Stages
from workers.engine import End, Job

_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "sampling_seed",
    "min_tokens": "min_new_tokens",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "repetition_penalty": "repetition_penalty",
}


ONE_TOKEN: Mapping[str, Any] = {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}
"""Sampling parameters of a prompt that is only computed: hand-off by the store. The token is discarded."""


def sampling_params(sampling: Sampling, *, num_delivered: int = 0) -> dict[str, Any]:
    """Return SGLang's sampling parameters for the tokens after the delivered ones; None stays with its defaults."""
    given = {theirs: getattr(sampling, ours) for ours, theirs in _NAMES.items()}
    params = {name: value for name, value in given.items() if value is not None}
    params |= {"max_new_tokens": sampling.max_tokens - num_delivered, "ignore_eos": sampling.ignore_eos}
    if num_delivered:
        params.pop("min_new_tokens", None)  # reached: otherwise the answer is not continued
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    return params


class Answer:
    """What one engine request has said so far, and the End that follows from it.

    Counts: on the PREFILL side prompt and cached tokens are the truth and the one sampled token is not
    counted; on the DECODE side the sampled tokens are, the first one included. What SGLang leaves out
    when it aborts a waiting request is taken from the chunks.
    """

    def __init__(self, job: Job, *, chunk_tokens: int = 0) -> None:
        """`chunk_tokens`: what is computed of a prompt at a time, and then sent; 0 = all of it."""
        self._job = job
        self._chunk_tokens = chunk_tokens
        self._accepted_s = time.monotonic()
        self._accepted_unix_s = time.time()
        self._first_token_s = 0.0
        self._num_tokens = 0
        self._meta: Mapping[str, Any] = {}

    def take(self, out: Mapping[str, Any]) -> tuple[str, list[int]]:
        """Note one output and return its text and token ids."""
        # An abort of a waiting request comes with fewer fields than the outputs before it.
        self._meta = {**self._meta, **out["meta_info"]}
        ids: list[int] = out.get("output_ids") or []
        if ids and not self._num_tokens:
            self._first_token_s = time.monotonic()
        self._num_tokens += len(ids)
        return out.get("text") or "", ids

    def end(self, *, abort_asked: bool, error: str = "", stopped_by: str = "") -> End:
        """Return the End for what came last.

        `error`: the request broke off with it. `stopped_by`: a stop string that the engine could not see.
        """
        if stopped_by and not error:
            return self._made(FinishReason.STOP, matched_stop=stopped_by)
        finish = self._meta.get("finish_reason") or {}
        kind = finish.get("type", "")
        if error or kind not in ("stop", "length"):
            message = error or str(finish.get("message", "the engine ended the request without a reason"))
            reason = self._broken_off(abort_asked=abort_asked, in_engine=not error, status=finish.get("status_code"))
            return self._made(reason, error="" if reason is FinishReason.ABORTED else message)
        if self._job.phase is Phase.PREFILL or kind == "stop":
            matched = finish.get("matched")
            return self._made(FinishReason.STOP, matched_stop=matched if isinstance(matched, str) else "")
        return self._made(FinishReason.LENGTH)

    def _broken_off(self, *, abort_asked: bool, in_engine: bool, status: int | None) -> FinishReason:
        if abort_asked:
            return FinishReason.ABORTED
        if not in_engine or status == HTTPStatus.BAD_REQUEST:
            return FinishReason.ERROR
        # Before the first token of a decode side, and on a prefill side, only the hand-off can fail.
        waits_for_peer = self._job.phase is Phase.PREFILL or (self._job.phase is Phase.DECODE and not self._num_tokens)
        has_peer = self._job.hand_off is HandOff.DIRECT
        return FinishReason.HAND_OFF if waits_for_peer and has_peer else FinishReason.ERROR

    def _made(self, reason: FinishReason, *, error: str = "", matched_stop: str = "") -> End:
        counts, stages = self._counts(), self._stages()
        overlapped_ms = self._overlapped_ms(counts, stages)
        return End(
            reason=reason,
            counts=counts,
            stages=stages,
            overlapped_ms=overlapped_ms,
            error=error,
            matched_stop=matched_stop,
        )

    def _overlapped_ms(self, counts: Counts, stages: Stages) -> float:
        """Return for how long chunks were sent while others were computed: from the end of the first chunk.

        SGLang does not say when that was, so chunks are taken to last equally long.
        """
        computed = counts.prompt_tokens - counts.cached_tokens
        if not (stages.transfer_ms and 0 < self._chunk_tokens < computed):
            return 0.0
        return stages.compute_ms * (1 - 1 / -(-computed // self._chunk_tokens))

    def _counts(self) -> Counts:
        meta, prompt_tokens = self._meta, self._job.num_input_tokens
        if self._job.phase is not Phase.DECODE and not self._prefilled:
            prompt_tokens = 0  # nothing says how far an aborted prompt got
        cached_tokens = min(int(meta.get("cached_tokens") or 0), prompt_tokens)
        # Only with a hierarchical cache does it say where they were; else there is but the device.
        tiers = meta.get("cached_tokens_details") or {}
        host = min(int(tiers.get("host") or 0), cached_tokens)
        completion_tokens = max(self._num_tokens, int(meta.get("completion_tokens") or 0))
        return Counts(
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            cached_host_tokens=host,
            cached_store_tokens=min(int(tiers.get("storage") or 0), cached_tokens - host),
            completion_tokens=0 if self._job.phase is Phase.PREFILL else completion_tokens,
            reasoning_tokens=int(meta.get("reasoning_tokens") or 0),
        )

    @property
    def _prefilled(self) -> bool:
        return bool(self._num_tokens or self._meta.get("prefill_finished_time"))

    def _stages(self) -> Stages:
        now_s, meta = time.monotonic(), self._meta
        if self._job.phase is Phase.PREFILL:
            entered_unix_s = float(meta.get("forward_entry_time") or 0.0)
            computed_unix_s = float(meta.get("prefill_finished_time") or 0.0)
            if not (entered_unix_s and computed_unix_s):
                return Stages()
            return Stages(
                queue_ms=max(0.0, entered_unix_s - self._accepted_unix_s) * 1000,
                compute_ms=max(0.0, computed_unix_s - entered_unix_s) * 1000,
                transfer_ms=max(0.0, time.time() - computed_unix_s) * 1000,
                first_token_ms=max(0.0, computed_unix_s - self._accepted_unix_s) * 1000,
            )
        if not self._first_token_s:
            return Stages()
        return Stages(
            queue_ms=float(meta.get("queue_time") or 0.0) * 1000,
            compute_ms=(now_s - self._first_token_s) * 1000,
            first_token_ms=(self._first_token_s - self._accepted_s) * 1000,
        )
