"""The fault plan, as data. What each word of `do` means is in `benches.chaos.actions`."""

from collections.abc import Sequence

import msgspec

PREFILL, DECODE, UNIFIED = "prefill-0", "decode-0", "unified-0"
GATEWAY, BILLING = "gateway", "billing"
LEADER, STANDBY = "leader", "standby"  # which scheduler process that is, is looked up when the fault comes
VALKEY, POSTGRES = "valkey", "postgres"
CLOCKED = (GATEWAY, "scheduler", DECODE, BILLING)
"""Processes whose clock jumps. They run under libfaketime in those rounds alone: it costs them time."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that goes wrong, and what clients may see of it. Without a word here they see nothing."""

    group: str
    do: str
    on: tuple[str, ...] = ()
    hold_s: float = 0.0  # from its begin to its end; 0 = it is no state
    amount: float = 0.0  # seconds of a delay or of a clock's jump
    refuses: bool = False  # new requests may be answered with 503
    fails: bool = False  # running answers may end with an error event; they cost nothing
    cuts: bool = False  # streams of the process concerned may break
    frees: bool = False  # an answer may be free: it was settled as that of a dead gateway, which then woke up
    outage: bool = False  # recovery counts from its end: nothing can stand in meanwhile, or it is a long change
    death: bool = False  # of one process: the bar of two seconds holds

    @property
    def name(self) -> str:
        """What it is called in tables and by `--only`."""
        amount = f" {self.amount:+g} s" if self.amount else ""
        return f"{self.group}: {self.do} {' and '.join(self.on)}{amount}".rstrip()


def _deaths() -> list[Fault]:
    kinds = (LEADER, STANDBY, PREFILL, DECODE, UNIFIED, BILLING)
    return [
        *(Fault(group="process", do="kill", on=(kind,), death=True) for kind in kinds),
        Fault(group="process", do="kill", on=(GATEWAY,), cuts=True, death=True),
        Fault(group="process", do="kill", on=(PREFILL, DECODE), death=False),
        Fault(group="process", do="memory ends", on=(DECODE,), hold_s=2, death=True),
        *(Fault(group="process", do="freeze", on=(kind,), hold_s=2) for kind in (*kinds, GATEWAY)),
        Fault(group="process", do="freeze", on=(GATEWAY,), hold_s=7, cuts=True, fails=True, frees=True),
        *(Fault(group="process", do="restart", on=(kind,)) for kind in (LEADER, PREFILL, DECODE, UNIFIED, BILLING)),
        Fault(group="process", do="restart", on=(GATEWAY,), cuts=True, fails=True, refuses=True),
    ]


def _redis() -> list[Fault]:
    return [
        Fault(group="redis", do="kill", on=(VALKEY,), refuses=True, outage=True),
        Fault(group="redis", do="freeze", on=(VALKEY,), hold_s=1.5, refuses=True, outage=True),
        Fault(group="redis", do="restart", on=(VALKEY,), refuses=True, outage=True),
        Fault(group="redis", do="fail over", on=(VALKEY,), refuses=True, outage=True),
        Fault(group="redis", do="slow", on=("all", VALKEY), hold_s=3, amount=0.05, refuses=True),
        Fault(group="redis", do="memory full", on=(VALKEY,), hold_s=1.5, refuses=True, outage=True),
    ]


def _postgres() -> list[Fault]:
    return [
        Fault(group="postgres", do="kill", on=(POSTGRES,)),
        Fault(group="postgres", do="freeze", on=(POSTGRES,), hold_s=2),
        Fault(group="postgres", do="restart", on=(POSTGRES,)),
        Fault(group="postgres", do="slow", on=("all", POSTGRES), hold_s=3, amount=0.2),
        Fault(group="postgres", do="lock tables", on=(POSTGRES,), hold_s=2),
    ]


def _links() -> list[Fault]:
    pairs = (
        (GATEWAY, PREFILL), (GATEWAY, DECODE), (GATEWAY, UNIFIED),
        (LEADER, PREFILL), (LEADER, DECODE), (LEADER, UNIFIED),
        (PREFILL, DECODE),
    )  # fmt: skip
    callers = (GATEWAY, LEADER, STANDBY, PREFILL, DECODE, UNIFIED, BILLING)
    return [
        *(Fault(group="link", do="cut", on=pair, hold_s=3) for pair in pairs),
        *(Fault(group="link", do="flap", on=pair, hold_s=3) for pair in pairs),
        *(Fault(group="link", do="cut", on=(one, VALKEY), hold_s=2, refuses=one == GATEWAY) for one in callers),
        *(Fault(group="link", do="slow", on=(one, VALKEY), hold_s=2, amount=0.1) for one in callers),
        *(Fault(group="link", do="cut", on=(one, POSTGRES), hold_s=2) for one in (GATEWAY, BILLING)),
        *(Fault(group="link", do="slow", on=(one, POSTGRES), hold_s=2, amount=0.3) for one in (GATEWAY, BILLING)),
    ]


def _disks() -> list[Fault]:
    return [
        Fault(group="disk", do="disk full", on=("journals",), hold_s=2),
        Fault(group="disk", do="disk full", on=(VALKEY,), hold_s=2, refuses=True, outage=True),
        Fault(group="disk", do="disk full", on=(POSTGRES,), hold_s=2),
    ]


def _others() -> list[Fault]:
    return [
        *(Fault(group="clock", do="jump", on=(one,), hold_s=3, amount=s) for one in CLOCKED for s in (120.0, -120.0)),
        Fault(group="engine", do="hang", on=(DECODE,), hold_s=4),
        Fault(group="engine", do="hang", on=(PREFILL,), hold_s=4),
        Fault(group="engine", do="lose_hand_off", on=(PREFILL,), hold_s=2),
        Fault(group="engine", do="corrupt_kv", on=(PREFILL,), hold_s=2),
        Fault(group="config", do="roll catalogue", on=("all",), cuts=True, fails=True, refuses=True, outage=True),
        Fault(group="config", do="pin ratio", on=("all",), hold_s=2),
        *(
            Fault(group="upgrade", do="old version", on=(one,), outage=True)
            for one in (LEADER, STANDBY, DECODE, PREFILL, BILLING)
        ),
        Fault(group="upgrade", do="old version", on=(GATEWAY,), cuts=True, fails=True, refuses=True, outage=True),
    ]


PLAN: Sequence[Fault] = (*_deaths(), *_redis(), *_postgres(), *_links(), *_disks(), *_others())
SHORT: Sequence[str] = (
    "process: kill leader", "process: kill gateway", "process: kill decode-0", "process: freeze prefill-0",
    "redis: kill valkey", "postgres: kill postgres", "link: cut billing and valkey", "engine: hang decode-0",
)  # fmt: skip
"""What `make e2e` runs: one of most kinds, in this order."""
