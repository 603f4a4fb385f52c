"""No traffic and no cost, however odd, makes a decision fail or a number that is none."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.lifecycle import HandOff, Role
from contracts.perf import DecodeCost, LatencyModel, PrefillCost, TransferCost
from contracts.slo import SloTarget
from scheduler.policy.cluster import ClusterView, Compatibility, RequestView, WorkerView
from scheduler.policy.demand import DemandWindow
from scheduler.policy.fairness import TokenWeights
from scheduler.policy.lengths import LengthModel
from scheduler.policy.outlook import Outlook, ScoringLimits
from scheduler.policy.queueing import Fleet, Split
from scheduler.policy.ratio import Mode, decide
from scheduler.policy.scoring import score
from scheduler.policy.sight import Donor, RatioLimits, RatioState, Sight
from scheduler.policy.sizing import Asked, moments, size_up

cost = st.one_of(st.just(0.0), st.floats(1e-9, 1e3))
latencies = st.builds(
    LatencyModel,
    prefill=st.builds(PrefillCost, fixed_ms=cost, per_token_ms=cost, per_token_pair_ms=cost),
    decode=st.builds(DecodeCost, fixed_ms=cost, per_request_ms=cost, per_kv_token_ms=cost),
    transfer=st.builds(
        TransferCost, fixed_ms=cost, bytes_per_ms=st.floats(1.0, 1e9), kv_bytes_per_token=st.integers(0, 10**6)
    ),
    kv_capacity_tokens=st.integers(1, 10**6),
)
milliseconds = st.one_of(st.none(), st.floats(0.1, 1e5))
targets = st.builds(SloTarget, ttft_ms=milliseconds, tpot_ms=milliseconds, itl_p99_ms=milliseconds, e2e_ms=milliseconds)
arrivals = st.lists(st.tuples(st.floats(0, 5), st.integers(1, 100_000), st.integers(1, 10_000)), max_size=60)
workers = st.lists(st.sampled_from(Role), max_size=9)


@settings(max_examples=150, deadline=None)
@given(latency=latencies, target=targets, gaps=arrivals, roles=workers)
def test_every_tick_answers_with_numbers(latency, target, gaps, roles):
    lengths, window, now_s = LengthModel(), DemandWindow(), 0.0
    for gap_s, prompt, output in gaps:
        now_s += gap_s
        asked = Asked(
            model="m", tenant="t", tier="default", target=target, arrived_ms=now_s * 1000, prompt_tokens=prompt,
            max_tokens=output,
        )  # fmt: skip
        window.observe(now_s, size_up(asked, lengths, latency, TokenWeights()).sample)
    now_s += 10
    demand = window.demand(now_s, lambda kind: moments(lengths, kind))
    counts = {role: roles.count(role) for role in Role}
    split = Split(prefill=counts[Role.PREFILL], decode=counts[Role.DECODE], unified=counts[Role.UNIFIED])
    donors = [Donor(worker_id=f"w{i}", role=role, drain_s=1.0) for i, role in enumerate(roles)]
    sight = Sight(split=split, moving=False, donors=donors, demand=demand, past=window.segments)
    for hand_off in HandOff:
        fleet = Fleet(latency=latency, target=target)
        _, decision = decide(RatioState(), sight, fleet, RatioLimits.of(hand_off), mode=Mode.AUTO, now_s=now_s)
        assert math.isfinite(decision.gain)
        assert decision.now is None or math.isfinite(decision.now.goodput_rps)


@settings(max_examples=150, deadline=None)
@given(latency=latencies, target=targets, roles=workers, queued=st.integers(0, 10**6), prompt=st.integers(1, 10**5))
def test_every_placement_answers(latency, target, roles, queued, prompt):
    fits = Compatibility("r", "", 16, "")
    view = ClusterView.of(
        tuple(
            WorkerView(
                worker_id=f"w{i}", epoch=1, role=role, ready=True, pairs_with=fits, max_running=8,
                hand_offs=frozenset(HandOff), context_tokens=10**6, kv_capacity_tokens=10**6, num_requests=i,
                queued_prefill_tokens=queued,
            )
            for i, role in enumerate(roles)
        )
    )  # fmt: skip
    outlook = Outlook(latency=latency, target=target, output_tokens=10.0, promised_output_tokens=10)
    answer = score(RequestView(prompt_tokens=prompt, max_tokens=100), view, ScoringLimits(), outlook)
    assert answer.reason
