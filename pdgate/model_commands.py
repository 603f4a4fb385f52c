"""`pdgate models add|remove`: what the admin API does with models, from the command line."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import httpx
import msgspec
import typer

from pdgate.connection import admin_key, data_folder, gateway_url
from pdgate.layout import layout_of
from pdgate.output import AsJson, show
from pdgate.plan.hardware import accelerators, find_accelerator
from pdgate.plan.workload import WorkloadError
from pdgate.preflight import CannotStart
from workers.profile import Profile, ProfileError, read_profile

_TIMEOUT_S = 60.0
_GB = 1_000_000_000

ModelName = Annotated[str, typer.Argument(help="Public name or alias.")]


class AddedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A model that was added, as it is printed."""

    model: str
    pool: str
    folder: str
    context_tokens: int
    workers: str
    missing: str  # what it still lacks to serve; empty = nothing


def add_model(  # noqa: PLR0917 - options have names
    model: Annotated[str, typer.Argument(metavar="HF_ID|PATH", help="A folder, or the id of one that was downloaded.")],
    profile: Annotated[str, typer.Option(help="How workers run the engine: a name of workers/profiles.")] = "",
    prefill: Annotated[int, typer.Option(min=0, help="Prefill workers that `pdgate up` runs for it.")] = 1,
    decode: Annotated[int, typer.Option(min=0, help="Decode workers.")] = 1,
    unified: Annotated[int, typer.Option(min=0, help="Workers that do both.")] = 0,
    name: Annotated[str, typer.Option(help="Public name; by default the folder's, in small letters.")] = "",
    price: Annotated[str, typer.Option(help="COMPUTED,CACHED,DECODE per million tokens; by default the book's.")] = "",
    alias: Annotated[list[str] | None, typer.Option(help="Another name for it; may be repeated.")] = None,
    context: Annotated[int | None, typer.Option(help="Longest context, tokens; by default the model's own.")] = None,
    hand_off: Annotated[str, typer.Option(help="direct or store.")] = "direct",
    accelerator: Annotated[str, typer.Option(help="What its workers run on, as `pdgate plan` names it: H100.")] = "",
    tool_parser: Annotated[str, typer.Option(help="SGLang's name for the format of its tool calls.")] = "",
    reasoning_parser: Annotated[str, typer.Option(help="Likewise for its reasoning.")] = "",
    ttft_ms: Annotated[float, typer.Option(help="Target of the tier `default`.")] = 2000.0,
    tpot_ms: Annotated[float, typer.Option(help="Target of the tier `default`.")] = 100.0,
    as_json: AsJson = False,
) -> None:
    """Add a model while everything runs. Refused with the reason when weights, memory or price are missing."""
    folder = model_folder(model, layout_of(data_folder()).models)
    asked: dict[str, Any] = {
        "name": name or folder.name.lower(),
        "folder": str(folder),
        "prefill": prefill,
        "decode": decode,
        "unified": unified,
        "profile": profile,
        "aliases": list(alias or ()),
        "hand_off": hand_off,
        "tool_parser": tool_parser,
        "reasoning_parser": reasoning_parser,
        "ttft_ms": ttft_ms,
        "tpot_ms": tpot_ms,
    }
    if context is not None:
        asked["context_tokens"] = context
    if price:
        asked["price"] = _price(price)
    memory_gb = _worker_memory_gb(profile, accelerator)
    if memory_gb is not None:
        asked["worker_memory_gb"] = memory_gb
    made = call("POST", "/admin/v1/models", asked)["value"]
    row = AddedRow(
        model=made["id"],
        pool=made["pool"],
        folder=made["folder"],
        context_tokens=made["context_tokens"],
        workers=", ".join(f"{made[role]} {role}" for role in ("prefill", "decode", "unified") if made[role]),
        missing=made["missing"],
    )
    show([row], as_json=as_json)


def remove_model(model: ModelName) -> None:
    """Remove a model that was added. Refused, with who they are, while somebody uses it: pause it first."""
    gone = call("DELETE", f"/admin/v1/models/{model}")
    typer.echo(f"{gone['id']} is removed")


def call(method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """Return what the admin API answers. Raises CannotStart with the API's own sentence when it refuses."""
    url = gateway_url()
    headers = {"authorization": f"Bearer {admin_key()}"}
    try:
        answer = httpx.request(method, f"{url}{path}", json=body, headers=headers, timeout=_TIMEOUT_S, trust_env=False)
    except httpx.TransportError as error:
        raise CannotStart(f"the gateway on {url} does not answer ({error}): is `pdgate up` running?") from None
    if answer.is_success:
        return answer.json()
    try:
        refusal = answer.json()["error"]
        said = f"{refusal['message']} ({refusal['code']})"
    except (ValueError, KeyError, TypeError):
        said = f"the gateway answered {answer.status_code}"
    raise CannotStart(said)


def model_folder(model: str, models_dir: Path, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of a path or of a Hugging Face id: in the models folder, or in the hub's own cache.

    Raises:
        CannotStart: there is none; the message says how to get it.
    """
    for folder in (Path(model), models_dir / model, models_dir / model.rpartition("/")[2]):
        if (folder / "config.json").is_file():
            return folder.absolute()
    home = Path(environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cached = Path(environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{model.replace('/', '--')}"
    try:
        revision = (cached / "refs" / "main").read_text().strip()
    except OSError:
        revision = ""
    if revision and (cached / "snapshots" / revision / "config.json").is_file():
        return cached / "snapshots" / revision
    target = models_dir / model.rpartition("/")[2]
    raise CannotStart(
        f"there is no model {model!r} here (no_weights): give a folder, or fetch it with"
        f" `hf download {model} --local-dir {target}`"
    )


def _price(text: str) -> Mapping[str, str]:
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 3:
        raise typer.BadParameter("write COMPUTED,CACHED,DECODE, such as 0.10,0.02,0.40", param_hint="--price")
    return dict(zip(("prefill_computed", "prefill_cached", "decode"), parts, strict=True))


def _worker_memory_gb(profile: str, accelerator: str) -> float | None:
    """Return what the devices of a worker have together; None = it runs in this machine's own memory.

    Raises:
        CannotStart: an unknown profile or accelerator, or a profile without the accelerators that it is for.
    """
    found: Profile | None = None
    try:
        found = read_profile(profile) if profile else None
        if not accelerator:
            if found is not None:
                raise CannotStart(
                    f"the profile {profile!r} is for {found.hardware}: say which with --accelerator (no_memory)"
                )
            return None
        gpu = find_accelerator(accelerator, accelerators())
    except (ProfileError, WorkloadError) as error:
        raise CannotStart(str(error)) from None
    common = found.common if found is not None else {}
    return int(common.get("tp_size", 1)) * int(common.get("pp_size", 1)) * gpu.memory_bytes / _GB
