"""Plays traces in NVIDIA Dynamo's mocker for `benches.plan_mocker`. Runs in an environment of its own.

One JSON object a line comes in on stdin (trace, rate, workers, targets), one goes out on stdout (attainment, 0 to 1).
The environment: `benches.mocker`.
"""

import json
import sys
from typing import Any


def main() -> None:
    """Play what is asked until stdin ends."""
    for line in sys.stdin:
        print(json.dumps({"attainment": play(json.loads(line))}), flush=True)


def play(ask: dict[str, Any]) -> float:
    """Return the share of requests that met both targets; TPOT is a request's mean gap."""
    from dynamo._core import run_mocker_trace_replay  # noqa: PLC0415 (of the other environment)

    if ask["unified"]:
        engine = {"max_num_batched_tokens": ask["chunk_tokens"], "enable_prefix_caching": False}
        fleet = {"num_workers": ask["unified"], "extra_engine_args": {"engine": engine}}
    else:
        plain = {"enable_prefix_caching": False}
        fleet = {
            "num_prefill_workers": ask["prefill"],
            "num_decode_workers": ask["decode"],
            "prefill_engine_args": {"engine": plain | {"worker_type": "prefill"}},
            "decode_engine_args": {"engine": plain | {"worker_type": "decode"}},
        }
    result = run_mocker_trace_replay(
        [ask["trace"]],
        **fleet,
        trace_block_size=512,
        arrival_speedup_ratio=ask["rate_rps"],
        capture_per_request=True,
    )
    rows = result.per_request
    met = sum(
        r["ttft_ms"] <= ask["ttft_ms"] and (r["itl_ms"] or 0.0) <= ask["tpot_ms"]
        for r in rows
        if r["terminal_status"] == "completed"
    )
    return met / len(rows)


if __name__ == "__main__":
    main()
