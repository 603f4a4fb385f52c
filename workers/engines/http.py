"""An OpenAI-compatible server that runs already, SGLang, vLLM or llama.cpp, as an engine: one unified worker before it.

1. `start` waits until the server answers and has the model. `run` asks for its health; while it does not answer,
   nothing is taken, and after `DOWN_AFTER_S` the worker is unhealthy until it answers again.
2. A job is one streamed `/v1/completions` with token ids for a prompt, so that the server computes what was counted.
3. Text comes back, and token ids only from servers that are asked for them (`http_fields`) and give them. Otherwise
   they are made from the text with the model's tokenizer: right enough to go on elsewhere, an estimate as a count.
4. Final counts are those of the server's `usage`; without it they are estimates, and marked.
5. An abort closes the connection, which these servers take for the end of the request.

What a foreign server cannot do is refused before it is asked (`_check`); docs/http-engine.md lists it.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import httpx
import msgspec
import structlog
from tokenizers import Tokenizer

from contracts.lifecycle import FinishReason, HandOff, Phase, Role
from contracts.wire import Counts, Sampling, Stages, unpack_ids
from workers.engine import End, EngineFacts, EngineLoad, Job, Outlet, Refusal, SwitchRefused

log = structlog.get_logger()

HEALTH_PERIOD_S: Final = 1.0
HEALTH_TIMEOUT_S: Final = 2.0
DOWN_AFTER_S: Final = 5.0
CONNECT_S: Final = 5.0
SLOWEST_STEP_MS: Final = 60_000.0  # how long the prompts of a server are, and how fast it is, nobody says
_DONE: Final = "[DONE]"
_FINISH: Final = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}

# Ours to the names that SGLang, vLLM and llama.cpp share; what is not given is not sent.
_NAMES: Final = (
    "temperature", "top_p", "top_k", "min_p", "min_tokens", "frequency_penalty", "presence_penalty",
    "repetition_penalty",
)  # fmt: skip


class HttpOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where the server is, and what is known of it."""

    url: str  # base, without /v1
    model: str  # its name there
    key: str = ""
    fields: Mapping[str, Any] = {}  # added to every request
    kv_capacity_tokens: int
    max_running: int
    context_tokens: int


class HttpEngine:
    """See workers.engine.Engine for the calls."""

    def __init__(self, options: HttpOptions, tokenizer: Tokenizer) -> None:
        self._options = options
        self._tokenizer = tokenizer
        headers = {"Authorization": f"Bearer {options.key}"} if options.key else {}
        limits = httpx.Limits(max_connections=options.max_running + 4, max_keepalive_connections=options.max_running)
        timeout = httpx.Timeout(None, connect=CONNECT_S)
        self._client = httpx.AsyncClient(base_url=options.url, headers=headers, limits=limits, timeout=timeout)
        self._tasks: asyncio.TaskGroup | None = None
        self._jobs: dict[str, asyncio.Task[None]] = {}
        self._tokens: dict[str, int] = {}  # held by each job
        self._up = False
        self._answered_s = 0.0
        self._begun = 0  # answers whose first text has come

    async def start(self, role: Role) -> EngineFacts:
        """Wait for the server. Raises ValueError for a role that it cannot have, or a model that it has not."""
        if role is not Role.UNIFIED:
            raise ValueError(f"the http engine is unified: there is no hand-off to another server, so not {role}")
        while not await self._answers():  # noqa: ASYNC110 - the server tells nobody
            await asyncio.sleep(HEALTH_PERIOD_S)
        self._up, self._answered_s = True, time.monotonic()
        context_tokens = self._options.context_tokens
        for card in await self._models():
            if card.get("id") == self._options.model:
                told = card.get("max_model_len") or (card.get("meta") or {}).get("n_ctx_train")
                context_tokens = min(context_tokens, int(told)) if told else context_tokens
                break
        else:
            raise ValueError(f"{self._options.url} has no model {self._options.model!r}")
        return EngineFacts(
            name="http",
            role=Role.UNIFIED,
            simulated=False,
            dtype="",
            kv_dtype="",
            page_size=1,
            tp_size=1,
            dp_size=1,
            transfer_backend="none",
            bootstrap_host="",
            bootstrap_port=0,
            kv_capacity_tokens=self._options.kv_capacity_tokens,
            kv_bytes_per_token=0,
            max_running=self._options.max_running,
            context_tokens=context_tokens,
            hand_offs=(HandOff.DIRECT,),  # of the pools that it may be in; as a unified worker it takes part in none
            slowest_step_ms=SLOWEST_STEP_MS,
        )

    async def run(self) -> None:
        """Watch the server's health until cancelled; then end what is open."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                while True:
                    up = await self._answers()
                    if up is not self._up:
                        log.warning("http_server_up" if up else "http_server_down", url=self._options.url)
                    self._up = up
                    if up:
                        self._answered_s = time.monotonic()
                    await asyncio.sleep(HEALTH_PERIOD_S)
        finally:
            self._tasks = None
            await self._client.aclose()

    def submit(self, job: Job, outlet: Outlet) -> None:
        """Take a job, or raise Refusal."""
        if self._tasks is None or not self._up:
            raise Refusal("unhealthy", "the server does not answer")
        if len(self._jobs) >= self._options.max_running:
            raise Refusal("full", "as many requests run as the server was said to take")
        _check(job)
        reply = _Reply(job, self._tokenizer)
        self._tokens[job.engine_id] = job.num_input_tokens
        task = self._jobs[job.engine_id] = self._tasks.create_task(self._serve(job, reply, outlet))
        # Not in the task itself: one that is cancelled before its first step runs nothing.
        task.add_done_callback(lambda ended: self._ended(ended, job, reply, outlet))

    def abort(self, job: Job) -> None:
        """Close the connection of a job."""
        task = self._jobs.get(job.engine_id)
        if task is not None:
            task.cancel()

    async def switch(self, role: Role) -> EngineFacts:
        """Refuse: a foreign server keeps its role."""
        raise SwitchRefused(f"an http engine cannot become {role}")

    def load(self) -> EngineLoad:
        """Return what we sent there."""
        return EngineLoad(
            num_running=len(self._jobs),
            num_computing=len(self._jobs),
            kv_used_tokens=sum(self._tokens.values()),
            prefill_chunks_done=self._begun,
            out_of_service=not self._up and time.monotonic() - self._answered_s > DOWN_AFTER_S,
        )

    # -- the server ------------------------------------------------------------------------------------

    async def _answers(self) -> bool:
        for path in ("/health", "/v1/models"):  # not every server has the first
            try:
                answer = await self._client.get(path, timeout=HEALTH_TIMEOUT_S)
            except httpx.HTTPError:
                return False
            if answer.status_code != httpx.codes.NOT_FOUND:
                return answer.is_success
        return False

    async def _models(self) -> Sequence[Mapping[str, Any]]:
        answer = await self._client.get("/v1/models", timeout=HEALTH_TIMEOUT_S)
        answer.raise_for_status()
        cards: Sequence[Mapping[str, Any]] = answer.json().get("data") or ()
        return cards

    # -- requests --------------------------------------------------------------------------------------

    def _ended(self, task: asyncio.Task[None], job: Job, reply: "_Reply", outlet: Outlet) -> None:
        reply.aborted = task.cancelled()
        del self._jobs[job.engine_id], self._tokens[job.engine_id]
        outlet.end(reply.end())

    async def _serve(self, job: Job, reply: "_Reply", outlet: Outlet) -> None:
        reply.replay(outlet)
        if job.num_delivered >= job.sampling.max_tokens:  # only the end was lost
            reply.finish = "length"
            return
        try:
            async with self._client.stream("POST", "/v1/completions", json=self._body(job)) as answer:
                if not answer.is_success:
                    await answer.aread()
                    reply.error = f"{answer.status_code} {answer.text[:500]}"
                    return
                async for line in answer.aiter_lines():
                    if line.startswith("data:") and (data := line[5:].strip()) != _DONE:
                        first = not reply.num_tokens
                        reply.take(msgspec.json.decode(data), outlet)
                        self._begun += first and bool(reply.num_tokens)
                        self._tokens[job.engine_id] = job.num_input_tokens + reply.num_tokens
        except (httpx.HTTPError, msgspec.DecodeError) as failure:
            reply.error = f"{type(failure).__name__}: {failure}"

    def _body(self, job: Job) -> dict[str, Any]:
        sampling = job.sampling
        body: dict[str, Any] = {
            "model": self._options.model,
            "prompt": list(unpack_ids(job.input)),
            "max_tokens": sampling.max_tokens - job.num_delivered,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body |= {name: value for name in _NAMES if (value := getattr(sampling, name)) is not None}
        if job.delivered:
            body.pop("min_tokens", None)  # reached: otherwise the answer is not continued
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if sampling.seed is not None:
            body["seed"] = sampling.seed + job.attempt.sample
        if sampling.logit_bias:
            body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
        if sampling.ignore_eos:
            body["ignore_eos"] = True
        if sampling.stop_token_ids:
            body["stop_token_ids"] = list(sampling.stop_token_ids)
        if job.cache_salt:
            body["cache_salt"] = job.cache_salt
        return body | dict(self._options.fields)


class _Reply:
    """What the server has said so far of one answer."""

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        self.finish = self.error = self.matched = ""
        self.aborted = False
        self.num_tokens = 0
        self._job = job
        self._tokenizer = tokenizer
        self._usage: Mapping[str, Any] = {}
        self._began_s = time.monotonic()
        self._first_s = 0.0

    def replay(self, outlet: Outlet) -> None:
        """Tell what the client does not have of the tokens that it was told."""
        if self._job.delivered:
            text = self._tokenizer.decode(unpack_ids(self._job.delivered)).rstrip("\N{REPLACEMENT CHARACTER}")
            if held := text[self._job.delivered_chars :]:
                outlet.chunk(held, ())

    def take(self, event: Mapping[str, Any], outlet: Outlet) -> None:
        """Take one event of the stream."""
        if error := event.get("error"):
            self.error = str(error)
        self._usage = event.get("usage") or self._usage
        for choice in event.get("choices") or ():
            text = choice.get("text") or ""
            ids = choice.get("token_ids")
            if ids is None:
                ids = self._tokenizer.encode(text, add_special_tokens=False).ids if text else []
            if ids or text:
                self._first_s = self._first_s or time.monotonic()
                self.num_tokens += len(ids)
                outlet.chunk(text, ids)
            self.finish = choice.get("finish_reason") or self.finish
            matched = choice.get("matched_stop") or choice.get("stop_reason")
            self.matched = matched if isinstance(matched, str) else self.matched

    def end(self) -> End:
        """Return how it ended."""
        reason = _FINISH.get(self.finish, FinishReason.ERROR)
        if self.aborted:
            reason = FinishReason.ABORTED
        elif self.error:
            reason = FinishReason.ERROR
        now_s = time.monotonic()
        first_s = self._first_s or now_s
        stages = Stages(compute_ms=(now_s - first_s) * 1000, first_token_ms=(first_s - self._began_s) * 1000)
        error = self.error or ("the server ended the answer without a reason" if reason is FinishReason.ERROR else "")
        return End(reason=reason, counts=self._counts(), stages=stages, error=error, matched_stop=self.matched)

    def _counts(self) -> Counts:
        if self._usage:
            details = self._usage.get("prompt_tokens_details") or {}
            prompt_tokens = int(self._usage.get("prompt_tokens") or 0)
            return Counts(
                prompt_tokens=prompt_tokens,
                cached_tokens=min(int(details.get("cached_tokens") or 0), prompt_tokens),
                completion_tokens=int(self._usage.get("completion_tokens") or 0),
            )
        computed = bool(self.num_tokens or self.finish)
        return Counts(
            prompt_tokens=self._job.num_input_tokens if computed else 0,
            completion_tokens=self.num_tokens,
            estimated=computed,
        )


def _check(job: Job) -> None:
    """Refuse what the plain completions of a foreign server do not do, or not alike.

    Raises:
        Refusal: with the field's name.
    """
    sampling: Sampling = job.sampling
    asked = {
        "phase": job.phase is not Phase.UNIFIED,
        "tools": job.parsing is not None,
        "logprobs": sampling.top_logprobs is not None,
        "response_format": sampling.grammar is not None,
        "model": bool(job.adapter),
    }
    for parameter, wanted in asked.items():
        if wanted:
            raise Refusal("bad_request", f"'{parameter}': the server behind this model is used without it")
