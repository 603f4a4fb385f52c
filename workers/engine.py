"""What a worker needs from an inference engine, and the values that cross that border.

One engine request goes through these steps:

1. The server checks fences and roles and calls `Engine.submit(job, outlet)`. The engine either raises
   `Refusal` at once, and nothing has happened, or it owns the job until it calls `outlet.end`.
2. PREFILL: the prompt is computed; `outlet.prefilled` says with which counts. Then the KV cache goes
   to the decode side that asked for the job's bootstrap room, and the job ends with STOP. Its one
   token is discarded and not counted: the decode side counts it.
3. DECODE: the engine reserves KV room, fetches the prompt's KV cache from the prefill side and calls
   `outlet.chunk` for each piece of text, the token that the prefill side sampled being the first.
   UNIFIED does both parts in one engine.
4. `outlet.end` is called exactly once per accepted job, last, whatever happens: a stop, the maximum,
   an abort, a fault. Nothing is called on the outlet after it.
   A job with `delivered` tokens continues an answer: the engine computes prompt and delivered tokens as
   one prompt, brings its detokeniser to where the client is (`delivered_chars`), and its chunks start
   there. Sampling holds for the whole answer, so delivered tokens count towards its maximum.
5. `Engine.abort` asks for an end. It may be repeated, and may name a job that is gone. The end then
   comes with ABORTED and the counts of the work that was really done.

A PREFILL or DECODE job without a hand-off has no peer: its KV cache goes nowhere, or comes from nowhere, so its text
means nothing. It shows that the engine computes in its role (workers.roles).

The engine's role may change while no job is open (`Engine.switch`); its prefix cache is empty afterwards.
The worker around it moves by this table (contracts.lifecycle.WORKER_NEXT), and gets a new epoch with each start and
each role change:

    starting   -> ready (engine up) | unhealthy | stopped
    ready      -> draining (a role change, or drain) | unhealthy (work is there, nothing moves) | stopped
    draining   -> switching (nothing runs any more) | ready (called off) | sleeping | unhealthy | stopped
    switching  -> ready (a tiny generation worked) | draining (the engine still had work of its own)
                  | unhealthy (rebuild failed: the process starts again) | stopped
    sleeping   -> ready (its memory is back) | unhealthy | stopped
    unhealthy  -> ready (it moves again) | starting | stopped

All outlet calls are made on the event loop's thread. They never block and never raise.
"""

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from contracts.identity import engine_id
from contracts.lifecycle import FinishReason, HandOff, Phase, Role
from contracts.parsing import Detail, Parsing
from contracts.perf import LatencyModel
from contracts.wire import Attempt, Counts, Sampling, Stages

RefusalCode = Literal[
    "stale_leader", "stale_worker_epoch", "wrong_role", "draining", "full", "bad_request", "unhealthy"
]


class Refusal(Exception):
    """A job that this worker does not take; it becomes Rejected on the Control stream."""

    def __init__(self, code: RefusalCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class SwitchRefused(Exception):
    """The engine keeps its role and works on. The message says why.

    `busy`: only because work is left in it, perhaps of requests that have ended for everybody else; ask again.
    """

    def __init__(self, message: str, *, busy: bool = False) -> None:
        super().__init__(message)
        self.busy = busy


class SwitchFailed(Exception):
    """The engine has lost its role and has no other: it must be started again."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One engine request. `prompt` and `delivered` are packed u32 token ids (contracts.wire)."""

    attempt: Attempt
    phase: Phase
    gateway_id: str
    deadline_unix_ms: int
    prompt: bytes
    sampling: Sampling
    hand_off: HandOff | None = None  # None under UNIFIED, and for a job without a peer
    bootstrap_host: str = ""
    bootstrap_port: int = 0
    bootstrap_room: int = 0
    cache_salt: str = ""
    adapter: str = ""
    parsing: Parsing | None = None  # None = the answer is plain text
    traceparent: str = ""  # W3C context of the request's span; empty = not traced
    delivered: bytes = b""  # a continuation: the answer's tokens that the client already has
    delivered_chars: int = 0  # and how much of their text, code points
    payer: str = ""  # who pays, for the worker's journal (contracts.usage.AttemptRecord)
    link: str = ""  # contracts.links.Link between the two workers of a direct hand-off
    prompt_only: bool = False  # only the prompt is wanted: no token is told or counted (workers.assignments)
    placed: bytes = b""  # contracts.wire.Placed, for the gateway

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.prompt) // 4

    @property
    def num_delivered(self) -> int:
        """Tokens of the answer that the client already has."""
        return len(self.delivered) // 4

    @property
    def input(self) -> bytes:
        """What the engine computes before it samples: the prompt, and the answer so far."""
        return self.prompt + self.delivered

    @property
    def num_input_tokens(self) -> int:
        """Length of `input` in tokens: `Counts.prompt_tokens` of this job."""
        return len(self.prompt) // 4 + len(self.delivered) // 4

    @property
    def peerless(self) -> bool:
        """Whether this is one half of a hand-off that has no other half."""
        return self.hand_off is None and self.phase is not Phase.UNIFIED

    @property
    def fetches(self) -> bool:
        """Whether its KV cache comes from, or goes to, a worker that waits for it under the same bootstrap room."""
        return self.hand_off is HandOff.DIRECT and self.phase is not Phase.UNIFIED

    @property
    def computes(self) -> bool:
        """Whether the prompt is computed here, as far as it is not found in a cache or a store."""
        return self.phase is not Phase.DECODE or self.hand_off is HandOff.STORE

    @property
    def engine_id(self) -> str:
        """Name inside the engine: of fixed length, because SGLang aborts by prefix of the name."""
        return engine_id(self.attempt.rid, self.attempt.attempt, self.attempt.sample)


class End(msgspec.Struct, frozen=True, kw_only=True):
    """How one engine request ended."""

    reason: FinishReason
    counts: Counts
    stages: Stages
    overlapped_ms: float = 0.0  # of the hand-off, before `stages.transfer_ms`: while the prompt was still computed
    error: str = ""
    matched_stop: str = ""


class Outlet(Protocol):
    """Where an engine puts what one job yields."""

    def chunk(self, text: str, token_ids: Sequence[int], detail: Detail | None = None) -> None:
        """Take a text delta, the ids of the tokens sampled since the last chunk, and what is more than text.

        Text may be empty.
        """

    def prefilled(self, counts: Counts, stages: Stages) -> None:
        """Take the counts of a computed prompt, PREFILL only, before its KV cache is handed over."""

    def end(self, end: End) -> None:
        """Take the end of the job."""


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What does not change while an engine runs."""

    name: str  # sglang | timed | http
    role: Role  # in force in the engine itself
    simulated: bool
    dtype: str
    kv_dtype: str
    page_size: int  # tokens
    tp_size: int
    dp_size: int
    transfer_backend: str
    bootstrap_host: str
    bootstrap_port: int  # 0 unless the role is prefill
    kv_capacity_tokens: int
    max_running: int
    context_tokens: int  # longest prompt plus answer
    hand_offs: tuple[HandOff, ...]
    slowest_step_ms: float  # the longest time without visible progress that is still normal
    kv_bytes_per_token: int  # of the model's KV cache, all layers and ranks
    latency: LatencyModel | None = None  # what it costs, where the engine knows it
    switch_roles: frozenset[Role] = frozenset()  # what `switch` may change to, by the engine's own call
    tells_blocks: bool = False  # writes what it holds into the worker's KvTable
    sleeps: bool = False  # it is a workers.sleep.Sleeper
    role_is_label: bool = False  # any phase runs in any role (hand-off store): a role change needs no drain


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine does now."""

    num_running: int = 0
    num_waiting: int = 0
    num_computing: int = 0  # jobs that must make progress: not those waiting for a peer or for memory
    prefill_queue_tokens: int = 0
    kv_used_tokens: int = 0
    prefill_chunks_done: int = 0  # since start
    num_transfers: int = 0
    transfer_p50_ms: float = 0.0  # last 64 hand-offs
    num_waiting_decode_memory: int = 0
    num_prefill_waiting: int = 0  # for their turn to be computed
    num_prefill_bootstrap: int = 0  # prefill side: for the decode side to ask
    num_prefill_inflight: int = 0  # prefill side: computed, KV cache on its way
    num_decode_transfer: int = 0  # decode side: room reserved, KV cache on its way
    out_of_service: bool = False  # the engine itself knows that it can do nothing at the moment


class Engine(Protocol):
    """An inference engine in this process. The module's docstring is the life of one job.

    Life of the engine: `start` once, then `run` until it is cancelled; `submit`, `abort` and `load`
    only while `run` runs. When `run` ends every open job has got its end.
    """

    async def start(self, role: Role) -> EngineFacts:
        """Open what peers connect to and return the facts, real ports among them."""

    async def run(self) -> None:
        """Work until cancelled, then release everything. Raises when the engine is beyond use."""

    def submit(self, job: Job, outlet: Outlet) -> None:
        """Take a job, or raise Refusal."""

    def abort(self, job: Job) -> None:
        """Ask for the end of a job. Idempotent."""

    async def switch(self, role: Role) -> EngineFacts:
        """Take another role and return the facts in it. The prefix cache is lost.

        Raises:
            SwitchRefused: nothing has changed.
            SwitchFailed: the engine is beyond use.
        """

    def load(self) -> EngineLoad:
        """Return what the engine does now; cheap enough for ten calls a second."""
