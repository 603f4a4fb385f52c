"""What the timed engine says of itself."""

from typing import Final

from contracts.lifecycle import HandOff, Role
from contracts.perf import LatencyModel
from workers.engine import EngineFacts
from workers.engines.timed_store import PAGE_TOKENS

CHUNK_TOKENS: Final = 2048


def facts_of(
    role: Role,
    latency: LatencyModel,
    *,
    bootstrap: tuple[str, int],
    hand_offs: tuple[HandOff, ...],
    role_is_label: bool,
    tells_blocks: bool,
) -> EngineFacts:
    """Return the facts of an engine that plays a latency model. `bootstrap`: host and port, ("", 0) without."""
    longest = latency.decode.step_ms(latency.max_running, latency.kv_capacity_tokens)
    return EngineFacts(
        name="timed",
        role=role,
        simulated=True,
        dtype="none",
        kv_dtype="none",
        page_size=PAGE_TOKENS,
        tp_size=1,
        dp_size=1,
        transfer_backend="timed",
        bootstrap_host=bootstrap[0],
        bootstrap_port=bootstrap[1],
        kv_capacity_tokens=latency.kv_capacity_tokens,
        kv_bytes_per_token=latency.transfer.kv_bytes_per_token,
        max_running=latency.max_running,
        context_tokens=latency.kv_capacity_tokens,
        hand_offs=hand_offs,
        latency=latency,
        slowest_step_ms=longest + latency.prefill.ms(CHUNK_TOKENS, latency.kv_capacity_tokens),
        switch_roles=frozenset(Role) - {role} if not role_is_label else frozenset(),
        sleeps=latency.weights is not None,
        role_is_label=role_is_label,
        tells_blocks=tells_blocks,
    )
