"""What a stack says when it is ready."""

import shlex
from collections.abc import Sequence
from pathlib import Path

import msgspec

from contracts.scaling import Scaling
from pdgate.layout import Layout
from pdgate.roster import EngineKind, Options
from pdgate.screen import duration


def greeting(
    options: Options,
    layout: Layout,
    *,
    model: str,
    key: str | None,
    sign_in: str,
    after_s: float,
    scaling: Scaling | None = None,
    prometheus: tuple[Path, int],
) -> Sequence[str]:
    """Return the lines, the last of them a `curl` that works when pasted.

    Args:
        options: what was started.
        layout: where variables and logs are.
        model: public name of the first model.
        key: the demo key in plain text, None without the demo.
        sign_in: token of the operator's one-time link.
        after_s: seconds since the start.
        scaling: of its pool, if that scales.
        prometheus: its configuration for this stack, and how many processes it scrapes.
    """
    counts = ", ".join(
        f"{count} {role}"
        for role, count in (("prefill", options.prefill), ("decode", options.decode), ("unified", options.unified))
        if count
    )
    if scaling is not None:
        counts = f"workers by demand, {'none' if scaling.to_zero else 'the floors'} to {scaling.max_workers}"
    engine = "SGLang on CPU" if options.engine is EngineKind.SGLANG else "timed engine: SIMULATED TEXT"
    question = {
        "model": model,
        "temperature": 0,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
    }
    body = shlex.quote(msgspec.json.encode(question).decode())
    return [
        "",
        f"Ready after {duration(after_s)}: {model} ({engine}; {counts}). Ctrl-C stops everything.",
        f"Variables: {layout.env_file}   Logs: {layout.logs}",
        f"URL: {options.url}/v1",
        f"Key: {key or 'none yet; make one with `pdgate orgs create` and `pdgate keys create`'}",
        f"Portal: {options.url}/portal/invite/{sign_in}",
        "  signs the operator in, once and within a day; `pdgate orgs invite` makes another link.",
        f"Metrics of {prometheus[1]} processes, with alerts: prometheus --config.file={prometheus[0]}",
        "",
        f"curl {options.url}/v1/chat/completions -H 'Content-Type: application/json' \\",
        f"  -H 'Authorization: Bearer {key or '$PDGATE_ADMIN_KEY'}' \\",
        f"  -d {body}",
        "",
    ]
