"""An engine that plays a latency model: no model, no GPU, the same states and failures.

One step loop serves all requests (no task per request):

1. *Plan*: waiting requests are admitted while KV room and slots last; the oldest prompt gets a chunk of
   at most `CHUNK_TOKENS`; every running request will get one token.
2. The step takes what the latency model says for that chunk, that batch and those resident KV tokens.
3. *Finish*: a completed prompt yields its first token (UNIFIED) or is handed over (PREFILL); every
   running request gets one token; when KV runs out the newest request waits again.

The hand-off is real: a decode worker asks the prefill worker's bootstrap port for its room and derives
its text from the bytes it gets (timed_link, timed_text).
"""

import asyncio
from collections import deque

from contracts.lifecycle import FinishReason, HandOff, Phase, Role
from contracts.perf import LatencyModel
from workers.engine import EngineFacts, EngineLoad, Job, Outlet, Refusal, SwitchFailed, SwitchRefused
from workers.engines.faults import BUSY_SWITCH, DROP_KV, FAIL_SWITCH, HANG, LOSE_HAND_OFF, REFUSE_SWITCH, Faults
from workers.engines.prefix_cache import PrefixCache
from workers.engines.timed_details import check_details, detailed
from workers.engines.timed_facts import CHUNK_TOKENS, facts_of
from workers.engines.timed_link import Address, Frame, Kind, Links, Wire
from workers.engines.timed_request import TimedRequest
from workers.engines.timed_store import PAGE_TOKENS, TimedStore
from workers.engines.timed_text import NO_KV, kv_of
from workers.kv_table import KvTable

RESERVED_OUTPUT_TOKENS = 256  # room that admission keeps for an answer; more is taken as it grows
MAX_WAITING = 2048
HANG_POLL_S = 0.02


class TimedEngine:
    """A simulated engine; see workers.engine.Engine for the calls."""

    def __init__(
        self,
        latency: LatencyModel,
        *,
        bootstrap_host: str = "127.0.0.1",
        bootstrap_port: int = 0,
        hand_off_timeout_s: float = 5.0,
        switch_s: float = 0.1,
        restart_s: float = 5.0,
        hand_off: HandOff = HandOff.DIRECT,
        store: TimedStore | None = None,
        faults: Faults | None = None,
        kv: KvTable | None = None,
    ) -> None:
        """With a `store` and `hand_off` direct both hand-offs are offered."""
        self.num_steps = 0
        self._hand_offs = (HandOff.DIRECT, HandOff.STORE) if store and hand_off is HandOff.DIRECT else (hand_off,)
        self._label_only = hand_off is HandOff.STORE
        self._store = store or TimedStore("") if HandOff.STORE in self._hand_offs else None
        self._latency = latency
        self._host = bootstrap_host
        self._port = bootstrap_port
        self._timeout_s = hand_off_timeout_s
        self._switch_s = switch_s
        self._restart_s = restart_s
        self._faults = faults or Faults()
        self._role = Role.UNIFIED
        self._loop: asyncio.AbstractEventLoop
        self._server: asyncio.Server | None = None
        self._links: Links | None = None
        self._wake = asyncio.Event()
        self._kv = kv
        self._cache = PrefixCache(PAGE_TOKENS, kv, latency.kv_capacity_tokens)
        self._requests: dict[str, TimedRequest] = {}
        self._waiting: deque[TimedRequest] = deque()  # for KV room and a slot
        self._prompts: deque[TimedRequest] = deque()  # admitted, to be computed
        self._fetching: dict[int, TimedRequest] = {}  # by room: decode side, KV not here yet
        self._rooms: dict[int, TimedRequest] = {}  # by room: prefill side
        self._asks: dict[int, tuple[Wire, Kind]] = {}  # by room: what the decode side said last
        self._running: list[TimedRequest] = []
        self._kv_used = 0
        self._chunks_done = 0
        self._transfers: deque[float] = deque(maxlen=64)

    # -- Engine ----------------------------------------------------------------------------------------

    async def start(self, role: Role) -> EngineFacts:
        """Listen on the bootstrap port when the role is prefill, and return the facts."""
        self._loop = asyncio.get_running_loop()
        await self._take_role(role)
        return self._facts()

    async def switch(self, role: Role) -> EngineFacts:
        """Take another role; to or from unified takes the time of a restart."""
        busy = bool(self._requests) or self._faults.has(BUSY_SWITCH)
        if busy or self._faults.has(REFUSE_SWITCH):
            raise SwitchRefused("not idle" if busy else "refused, as it was told to", busy=busy)
        await asyncio.sleep(self._restart_s if Role.UNIFIED in (role, self._role) else self._switch_s)
        if self._faults.has(FAIL_SWITCH):
            raise SwitchFailed("the rebuild failed, as it was told to")
        self._empty_cache()
        await self._take_role(role)
        return self._facts()

    async def sleep(self) -> None:
        """Take the time in which the weights would leave; the KV cache is gone."""
        await self._move_weights()
        self._empty_cache()

    async def wake(self) -> None:
        """Take the time in which the weights would come back."""
        await self._move_weights()

    async def _move_weights(self) -> None:
        weights = self._latency.weights
        await asyncio.sleep(weights.ms / 1000 if weights is not None else 0.0)

    def _empty_cache(self) -> None:
        self._cache = PrefixCache(PAGE_TOKENS, self._kv, self._latency.kv_capacity_tokens)
        if self._kv is not None:
            self._kv.clear()

    async def _take_role(self, role: Role) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        if role is Role.PREFILL and not self._label_only:
            self._server = await self._loop.create_server(
                lambda: Wire(self._on_ask, self._on_asker_lost), self._host, self._port
            )
            self._port = self._server.sockets[0].getsockname()[1]
        self._role = role

    def _facts(self) -> EngineFacts:
        return facts_of(
            self._role,
            self._latency,
            bootstrap=(self._host, self._port) if self._server is not None else ("", 0),
            hand_offs=self._hand_offs,
            role_is_label=self._label_only,
            tells_blocks=self._kv is not None,
        )

    async def run(self) -> None:
        """Step until cancelled; then every open request ends with ABORTED."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._links = Links(tasks, on_frame=self._on_answer, on_down=self._on_peer_down)
                await self._step_forever()
        finally:
            if self._links is not None:
                self._links.close()
                self._links = None
            if self._server is not None:
                self._server.close()
            for request in list(self._requests.values()):
                self._end(request, FinishReason.ABORTED)

    def submit(self, job: Job, outlet: Outlet) -> None:
        """Queue a job."""
        request = TimedRequest(job, detailed(job, outlet), accepted_s=self._loop.time())
        if job.hand_off is not None and job.hand_off not in self._hand_offs:
            raise Refusal("bad_request", f"the timed engine has no hand-off {job.hand_off}")
        if job.adapter:
            raise Refusal("bad_request", "'model': the simulated engine has no adapters")
        check_details(job.sampling)
        if request.kv_wanted(RESERVED_OUTPUT_TOKENS) > self._latency.kv_capacity_tokens:
            capacity = self._latency.kv_capacity_tokens
            raise Refusal("bad_request", f"{request.num_prompt} prompt tokens; the KV cache holds {capacity}")
        if len(self._waiting) >= MAX_WAITING:
            raise Refusal("full", f"{MAX_WAITING} requests wait")
        self._requests[job.engine_id] = request
        self._waiting.append(request)
        if job.phase is Phase.PREFILL and job.fetches:
            self._rooms[job.bootstrap_room] = request
        self._admit()
        if request.kv == 0 and job.phase is Phase.DECODE and job.fetches:
            self._tell_prefill(request, Kind.WAITING)
        self._wake.set()

    def abort(self, job: Job) -> None:
        """End a job in whatever state it is."""
        request = self._requests.get(job.engine_id)
        if request is not None and not self._faults.has(HANG):
            self._end(request, FinishReason.ABORTED)

    def load(self) -> EngineLoad:
        """Return the queue lengths."""
        computing = len(self._running) + len(self._prompts)
        transfers = sorted(self._transfers)
        is_decode = self._role is Role.DECODE
        return EngineLoad(
            num_running=computing + len(self._fetching),
            num_waiting=len(self._waiting),
            num_computing=computing,
            prefill_queue_tokens=sum(r.uncomputed for r in (*self._prompts, *self._waiting)) if not is_decode else 0,
            kv_used_tokens=self._kv_used,
            prefill_chunks_done=self._chunks_done,
            num_transfers=len(self._fetching) or sum(r.computed for r in self._rooms.values()),
            transfer_p50_ms=transfers[len(transfers) // 2] if transfers else 0.0,
            num_waiting_decode_memory=len(self._waiting) if is_decode else 0,
            num_prefill_waiting=0 if is_decode else len(self._waiting) + len(self._prompts),
            num_prefill_bootstrap=sum(r.computed and room not in self._asks for room, r in self._rooms.items()),
            num_prefill_inflight=sum(r.computed and room in self._asks for room, r in self._rooms.items()),
            num_decode_transfer=len(self._fetching),
        )

    # -- steps -----------------------------------------------------------------------------------------

    async def _step_forever(self) -> None:
        ends_s = self._loop.time()
        while True:
            if not self._running and not self._prompts:
                self._wake.clear()
                await self._wake.wait()
                ends_s = self._loop.time()
                continue
            prompt = self._prompts[0] if self._prompts else None
            chunk = min(prompt.uncomputed, CHUNK_TOKENS) if prompt else 0
            step_ms = self._step_ms(prompt, chunk)
            # A late step is not made up for by a burst of short ones.
            now_s = self._loop.time()
            ends_s = max(ends_s + step_ms / 1000, now_s)
            await asyncio.sleep(ends_s - now_s)
            while self._faults.has(HANG):  # noqa: ASYNC110 - a fault file has no event
                await asyncio.sleep(HANG_POLL_S)
            self._finish_step(prompt, chunk)

    def _step_ms(self, prompt: TimedRequest | None, chunk: int) -> float:
        ms = 0.0
        if prompt is not None:
            prompt.start(self._loop.time())
            ms += self._latency.prefill.ms(chunk, prompt.num_prompt - prompt.uncomputed) + prompt.load_ms
            prompt.load_ms = 0.0
        if self._running:
            ms += self._latency.decode.step_ms(len(self._running), self._kv_used)
        return ms

    def _finish_step(self, prompt: TimedRequest | None, chunk: int) -> None:
        self.num_steps += 1
        running = tuple(self._running)
        self._kv_used += len(running)
        for request in running:
            if not request.open:  # an overflow of its outbox ended it a moment ago
                self._kv_used -= 1
            elif request.step():
                self._finish(request)
        if prompt is not None and prompt.open:
            prompt.uncomputed -= chunk
            self._chunks_done += 1
            if prompt.uncomputed == 0:
                self._prompts.popleft()
                self._computed(prompt)
        while self._kv_used > self._latency.kv_capacity_tokens and len(self._running) > 1:
            self._retract(self._running[-1])
        self._admit()

    def _finish(self, request: TimedRequest) -> None:
        assert request.reason is not None
        self._end(request, request.reason)

    def _computed(self, request: TimedRequest) -> None:
        job = request.job
        self._cache.computed(job)
        if self._store is not None:
            self._store.add(job.input, job.cache_salt)
        request.computed = True
        if job.phase is not Phase.PREFILL:
            self._begin(request, kv_of(job.prompt) if request.intact else NO_KV)
            return
        request.prefilled(self._loop.time())
        self._hand_over(request)

    def _begin(self, request: TimedRequest, kv: bytes) -> None:
        """Give the first token and join the running batch."""
        finished = request.begin(kv, self._loop.time())
        self._kv_used += request.num_output
        if finished:
            self._finish(request)
        elif request.open:
            self._running.append(request)
            self._wake.set()

    # -- KV room ---------------------------------------------------------------------------------------

    def _admit(self) -> None:
        capacity = self._latency.kv_capacity_tokens
        while self._waiting:
            request = self._waiting[0]
            busy = len(self._running) + len(self._prompts) + len(self._fetching)
            wanted = request.kv_wanted(RESERVED_OUTPUT_TOKENS)
            if busy >= self._latency.max_running or (self._kv_used and self._kv_used + wanted > capacity):
                return
            self._waiting.popleft()
            request.kv = request.num_prompt + request.num_output
            self._kv_used += request.kv
            self._cache.shrink_to(capacity - self._kv_used)
            if request.begun:
                self._running.append(request)
            elif request.job.computes:
                self._look_up(request)
                self._prompts.append(request)
            elif request.job.fetches:
                request.start(self._loop.time())
                self._fetching[request.job.bootstrap_room] = request
                self._tell_prefill(request, Kind.READY)
            else:
                request.start(self._loop.time())
                self._begin(request, NO_KV)

    def _look_up(self, request: TimedRequest) -> None:
        """Find what is computed already, here or in the store."""
        job = request.job
        request.cached = self._cache.match(job.input, job.cache_salt)
        if self._store is not None:
            stored, intact = self._store.match(job.input, job.cache_salt)
            if stored > request.cached:
                request.stored = stored - request.cached
                request.fetch(self._latency.transfer.ms(stored - request.cached), self._loop.time())
                request.cached, request.intact = stored, intact and not self._faults.has(DROP_KV)
        request.uncomputed = request.num_prompt - request.cached

    def _retract(self, request: TimedRequest) -> None:
        self._running.remove(request)
        self._release(request)
        self._waiting.appendleft(request)

    def _release(self, request: TimedRequest) -> None:
        if request.kv:
            self._kv_used -= request.num_prompt + request.num_output if request.begun else request.kv
            request.kv = 0

    def _end(self, request: TimedRequest, reason: FinishReason, error: str = "", *, tell_peer: bool = True) -> None:
        """Take a request out of every queue, free its room, tell its peer, and end it."""
        if not request.open:
            return
        job = request.job
        del self._requests[job.engine_id]
        self._release(request)
        if request in self._running:
            self._running.remove(request)
        elif request in self._prompts:
            self._prompts.remove(request)
        elif request in self._waiting:
            self._waiting.remove(request)
        if not job.fetches:
            pass
        elif job.phase is Phase.DECODE and not request.begun:
            self._fetching.pop(job.bootstrap_room, None)
            if tell_peer:
                self._tell_prefill(request, Kind.RELEASED)
        elif job.phase is Phase.PREFILL:
            self._rooms.pop(job.bootstrap_room, None)
            ask = self._asks.pop(job.bootstrap_room, None)
            if ask and not reason.complete:
                ask[0].send(Frame(Kind.FAILED, job.bootstrap_room))
        request.end(reason, self._loop.time(), error)
        self._wake.set()

    # -- hand-off, prefill side --------------------------------------------------------------------------

    def _hand_over(self, request: TimedRequest) -> None:
        """Send the KV cache when the prompt is computed and the decode side has room."""
        if not request.job.fetches:
            self._end(request, FinishReason.STOP)
            return
        room = request.job.bootstrap_room
        wire, said = self._asks.get(room, (None, None))
        if wire is None:
            self._arm(request, "no decode worker asked for the KV cache")
        elif said is Kind.WAITING:
            request.disarm()  # waiting for the peer's memory is no hand-off time
            wire.send(Frame(Kind.COMPUTED, room))
        else:
            wire.send(Frame(Kind.COMPUTED, room))
            self._arm(request, "the KV hand-off timed out")
            if not self._faults.has(LOSE_HAND_OFF):
                transfer_s = self._latency.transfer.ms(request.num_prompt) / 1000
                self._loop.call_later(transfer_s, self._transferred, request, wire)

    def _transferred(self, request: TimedRequest, wire: Wire) -> None:
        if request.open:
            wire.send(Frame(Kind.KV, request.job.bootstrap_room, self._faults.payload(kv_of(request.job.prompt))))
            self._note_transfer(request)
            self._end(request, FinishReason.STOP)

    def _on_ask(self, wire: Wire, frame: Frame) -> None:
        request = self._rooms.get(frame.room)
        if frame.kind is Kind.RELEASED:
            self._asks.pop(frame.room, None)
            if request is not None:
                self._end(request, FinishReason.HAND_OFF, "the decode worker gave up")
            return
        self._asks[frame.room] = (wire, frame.kind)
        if request is None:
            self._loop.call_later(self._timeout_s, self._refuse_unknown_room, frame.room)
        elif request.computed:
            self._hand_over(request)

    def _refuse_unknown_room(self, room: int) -> None:
        if room not in self._rooms and (ask := self._asks.pop(room, None)):
            ask[0].send(Frame(Kind.FAILED, room))

    def _on_asker_lost(self, wire: Wire) -> None:
        for room in [room for room, ask in self._asks.items() if ask[0] is wire]:
            del self._asks[room]
            if (request := self._rooms.get(room)) is not None:
                self._end(request, FinishReason.HAND_OFF, "the decode worker is gone")

    # -- hand-off, decode side ---------------------------------------------------------------------------

    def _tell_prefill(self, request: TimedRequest, kind: Kind) -> None:
        if self._links is not None:
            address = (request.job.bootstrap_host, request.job.bootstrap_port)
            self._links.send(address, Frame(kind, request.job.bootstrap_room))

    def _on_answer(self, wire: Wire, frame: Frame) -> None:
        del wire
        request = self._fetching.get(frame.room)
        if request is None:
            return
        if frame.kind is Kind.COMPUTED:
            request.transfer_from_s = self._loop.time()
            self._arm(request, "the KV hand-off timed out")
        elif frame.kind is Kind.KV and frame.kv not in (kv_of(request.job.prompt), NO_KV):
            # As a transport's checksum finds it. (NO_KV stands for a payload that nothing can tell from a good one.)
            self._end(request, FinishReason.HAND_OFF, "the KV cache arrived damaged", tell_peer=False)
        elif frame.kind is Kind.KV:
            del self._fetching[frame.room]
            request.disarm()
            self._note_transfer(request)
            self._begin(request, frame.kv)
        elif frame.kind is Kind.FAILED:
            self._end(
                request, FinishReason.HAND_OFF, "the prefill worker has no KV cache for this room", tell_peer=False
            )

    def _on_peer_down(self, address: Address) -> None:
        for request in list(self._requests.values()):
            job = request.job
            fetches = job.phase is Phase.DECODE and not request.begun and job.fetches
            if fetches and (job.bootstrap_host, job.bootstrap_port) == address:
                self._end(request, FinishReason.HAND_OFF, "the prefill worker is gone", tell_peer=False)

    # -- both sides --------------------------------------------------------------------------------------

    def _note_transfer(self, request: TimedRequest) -> None:
        request.note_transfer(self._loop.time())
        self._transfers.append(request.transfer_ms)

    def _arm(self, request: TimedRequest, error: str) -> None:
        request.arm(self._loop.call_later(self._timeout_s, self._end, request, FinishReason.HAND_OFF, error))
