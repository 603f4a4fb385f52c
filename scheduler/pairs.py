"""Which prefill and decode workers of a pool may be paired: they fit, and a KV cache has gone from one to the other.

Life of a pair:

1. Both workers are up and fit (policy.pairing): UNPROBED. It takes no traffic.
2. The leader sends a tiny request through both, by the ordinary hand-off: PROBING, at most `MAX_AT_ONCE` at a time. It
   is not metered and reaches no gateway.
3. Both sides say that it went well: OPEN. Otherwise FAILED, and probed again after a pause that doubles.
4. A hand-off that failed in traffic (`doubt`) makes it UNPROBED again.
5. Either worker gone, dead, or in another life: forgotten.

A worker that cannot answer probes (an older version) is taken at its word.
"""

import enum
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import structlog

from contracts.identity import new_rid, new_room, rid_bytes
from contracts.lifecycle import HandOff, Phase, Role
from contracts.v1 import worker_pb2 as pb
from contracts.wire import PHASE_TO_PB, Sampling, pack_ids, sampling_to_pb
from scheduler.policy.pairing import Unpaired, unpaired
from scheduler.worker import Standing, Worker

log = structlog.get_logger()

PROBE_CAPABILITY: Final = "probe"
MAX_AT_ONCE: Final = 16
DEADLINE_S: Final = 10.0
ANSWER_S: Final = 2.0  # beyond the deadline, for the answer to arrive
PAUSE_FIRST_S: Final = 0.5
PAUSE_LAST_S: Final = 30.0
_PROMPT: Final = pack_ids(range(1, 9))
_SAMPLING: Final = sampling_to_pb(Sampling(max_tokens=2, temperature=0.0, ignore_eos=True))

PairKey = tuple[str, str]
"""Worker ids: prefill, decode."""
Send = Callable[[Worker, pb.ControlCommand], bool]


class PairState(enum.StrEnum):
    """How far a pair is trusted."""

    UNPROBED = "unprobed"
    PROBING = "probing"
    OPEN = "open"
    FAILED = "failed"


class Pair:
    """Two workers, in one life of each, and what is known of the link between them."""

    def __init__(self, prefill: Worker, decode: Worker, *, trusted: bool) -> None:
        self.prefill, self.decode = prefill, decode
        self.state = PairState.OPEN if trusted else PairState.UNPROBED
        self.trusted = trusted  # cannot be probed
        self.error = ""
        self.probe_ms = 0.0  # of the last one that went well: from accepted to ended on the decode side
        self.due_s = 0.0
        self.rid = ""
        self.answered: set[Phase] = set()
        self.expires_s = 0.0
        self.pause_s = PAUSE_FIRST_S
        self.over_budget = False  # closed for its errors or its latency, not for want of a probe
        self.full = False  # one side had no free slot when the probe was sent

    @property
    def ids(self) -> PairKey:
        """The pair's name."""
        return self.prefill.worker_id, self.decode.worker_id


class Pairs:
    """All pairs of one pool. The leader calls `tick`; a standby only keeps the list."""

    def __init__(
        self,
        workers: Callable[[], Iterable[Worker]],
        send: Send,
        *,
        now_s: Callable[[], float] = time.monotonic,
        now_unix_ms: Callable[[], int] = lambda: int(time.time() * 1000),
    ) -> None:
        self._workers = workers
        self._send = send
        self._now_s = now_s
        self._now_unix_ms = now_unix_ms
        self._pairs: dict[PairKey, Pair] = {}
        self._misfits: Counter[Unpaired] = Counter()
        self._by_rid: dict[bytes, Pair] = {}
        self.barred: frozenset[PairKey] = frozenset()
        """Pairs that fit and take no traffic."""
        self.over_budget: frozenset[PairKey] = frozenset()
        """Those of them whose link broke its budget."""

    def __iter__(self) -> Iterator[Pair]:
        return iter(tuple(self._pairs.values()))

    def find(self, prefill_id: str, decode_id: str) -> Pair | None:
        """Return what is known of a pair that fits."""
        return self._pairs.get((prefill_id, decode_id))

    def counts(self) -> Counter[str]:
        """Return how many pairs are in each state, and how many do not fit, by reason."""
        counts = Counter(pair.state.value for pair in self._pairs.values())
        counts.update({why.value: number for why, number in self._misfits.items()})
        return counts

    def look(self) -> None:
        """Compare with the workers as they are: new pairs, and pairs whose workers are not these any more."""
        fit: dict[PairKey, tuple[Worker, Worker]] = {}
        self._misfits.clear()
        up = [w for w in self._workers() if w.standing in (Standing.UP, Standing.SUSPECT)]
        for prefill in (w for w in up if w.role is Role.PREFILL):
            for decode in (w for w in up if w.role is Role.DECODE):
                why = unpaired(prefill.view(), decode.view())
                if why is None:
                    fit[prefill.worker_id, decode.worker_id] = (prefill, decode)
                else:
                    self._misfits[why] += 1
        for ids, pair in list(self._pairs.items()):
            if fit.get(ids) != (pair.prefill, pair.decode):
                self._forget(pair)
        for ids, (prefill, decode) in fit.items():
            if ids not in self._pairs:
                self._pairs[ids] = Pair(prefill, decode, trusted=not (_answers(prefill) and _answers(decode)))
        self._bar()

    def doubt(
        self, prefill: Worker, decode: Worker, why: str, *, pause_s: float = 0.0, over_budget: bool = False
    ) -> None:
        """A hand-off between these two failed, or took too long: no traffic until a probe has gone through.

        The probe comes after `pause_s`. `over_budget`: not the first time (policy.links).
        """
        pair = self._pairs.get((prefill.worker_id, decode.worker_id))
        if pair is None or pair.trusted or (pair.state is not PairState.OPEN and not over_budget):
            return
        self._end_probe(pair)
        log.warning("pair_in_doubt", prefill=prefill.worker_id, decode=decode.worker_id, why=why)
        pair.state, pair.error, pair.due_s = PairState.UNPROBED, why, self._now_s() + pause_s if pause_s else 0.0
        pair.over_budget = over_budget
        self._bar()

    def heard(self, worker: Worker, result: pb.ProbeResult) -> bool:
        """Take one side's answer; return whether a pair has opened."""
        pair = self._by_rid.get(result.id.rid)
        if pair is None or pair.state is not PairState.PROBING or worker not in (pair.prefill, pair.decode):
            return False
        if not result.ok:
            self._failed(pair, f"{worker.worker_id}: {result.error or 'failed'}")
            return False
        phase = Phase.PREFILL if worker is pair.prefill else Phase.DECODE
        pair.answered.add(phase)
        if phase is Phase.DECODE:
            pair.probe_ms = result.ms
        if len(pair.answered) < 2:
            return False
        self._end_probe(pair)
        pair.state, pair.error, pair.pause_s, pair.over_budget = PairState.OPEN, "", PAUSE_FIRST_S, False
        self._bar()
        log.info("pair_open", prefill=pair.ids[0], decode=pair.ids[1], probe_ms=round(pair.probe_ms, 1))
        return True

    def tick(self, leader_epoch: int) -> None:
        """Send the probes that are due, and give up on those without an answer."""
        now_s = self._now_s()
        for pair in self:
            if pair.state is PairState.PROBING and pair.expires_s <= now_s:
                self._failed(pair, "no answer")
        running = sum(pair.state is PairState.PROBING for pair in self._pairs.values())
        for pair in self:
            if running >= MAX_AT_ONCE:
                return
            waits = pair.state in (PairState.UNPROBED, PairState.FAILED) and pair.due_s <= now_s
            if waits and pair.prefill.ready and pair.decode.ready and self._begin(pair, leader_epoch):
                running += 1

    def stop(self) -> None:
        """The term is over: what is under way is nobody's."""
        for pair in self:
            if pair.state is PairState.PROBING:
                self._end_probe(pair)
                pair.state = PairState.UNPROBED

    # -- inside ----------------------------------------------------------------------------------------

    def _begin(self, pair: Pair, leader_epoch: int) -> bool:
        rid = new_rid(self._now_unix_ms())
        room = new_room()
        registration = pair.prefill.registration
        pair.full = any(w.num_requests >= w.registration.max_running for w in (pair.prefill, pair.decode))
        for worker, phase in ((pair.decode, Phase.DECODE), (pair.prefill, Phase.PREFILL)):  # decode first, as always
            submit = pb.Submit(
                id=pb.AttemptId(rid=rid_bytes(rid), attempt=1),
                leader_epoch=leader_epoch,
                worker_epoch=worker.epoch,
                phase=PHASE_TO_PB[phase],
                deadline_unix_ms=self._now_unix_ms() + int(DEADLINE_S * 1000),
                prompt=_PROMPT,
                sampling=_SAMPLING,
                bootstrap_host=registration.bootstrap_host,
                bootstrap_port=registration.bootstrap_port,
                bootstrap_room=room,
                cache_salt=rid,  # so that no cache takes the place of the transfer
                hand_off=HandOff.DIRECT.value,
            )
            if not self._send(worker, pb.ControlCommand(probe=pb.Probe(submit=submit))):
                return False
        pair.state = PairState.PROBING
        pair.rid = rid
        pair.answered.clear()
        pair.expires_s = self._now_s() + DEADLINE_S + ANSWER_S
        self._by_rid[rid_bytes(rid)] = pair
        return True

    def _failed(self, pair: Pair, error: str) -> None:
        self._end_probe(pair)
        if pair.full and error.endswith("deadline"):
            pair.state = PairState.UNPROBED  # it may only have waited for a slot
            return
        pair.state, pair.error = PairState.FAILED, error
        pair.due_s = self._now_s() + pair.pause_s
        pair.pause_s = min(PAUSE_LAST_S, 2 * pair.pause_s)
        self._bar()
        log.warning("pair_probe_failed", prefill=pair.ids[0], decode=pair.ids[1], error=error)

    def _end_probe(self, pair: Pair) -> None:
        if pair.rid:
            self._by_rid.pop(rid_bytes(pair.rid), None)
            pair.rid = ""

    def _forget(self, pair: Pair) -> None:
        self._end_probe(pair)
        del self._pairs[pair.ids]

    def _bar(self) -> None:
        self.barred = frozenset(ids for ids, pair in self._pairs.items() if pair.state is not PairState.OPEN)
        self.over_budget = frozenset(ids for ids, pair in self._pairs.items() if pair.over_budget)


def _answers(worker: Worker) -> bool:
    registration = worker.registration
    return PROBE_CAPABILITY in registration.capabilities and HandOff.DIRECT in registration.hand_offs
