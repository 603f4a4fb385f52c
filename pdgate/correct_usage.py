"""`pdgate usage correct`: what a request's counts really were; the difference is posted as an adjustment."""

import uuid
from typing import Annotated

import msgspec
import typer

from contracts.v1 import billing_pb2 as pb
from pdgate.billing_admin import call, who
from pdgate.output import AsJson, show_json
from pdgate.usage import money

_COUNT = "Tokens; as they are now if absent."


class CorrectedRow(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints. Costs in currency units; lists are computed, cached and generated tokens."""

    request_id: str
    organisation: str
    changed: bool
    old_tokens: tuple[int, int, int]
    new_tokens: tuple[int, int, int]
    old_cost: str
    new_cost: str


def correct_usage(
    request_id: Annotated[str, typer.Argument(help="Id of a billed request, as `pdgate reconcile` lists it.")],
    reason: Annotated[str, typer.Option(help="Kept in the audit trail and printed on the invoice.")],
    prefill_computed: Annotated[int | None, typer.Option(min=0, help=_COUNT)] = None,
    prefill_cached: Annotated[int | None, typer.Option(min=0, help=_COUNT)] = None,
    decode: Annotated[int | None, typer.Option(min=0, help=_COUNT)] = None,
    key: Annotated[str, typer.Option(help="UUID of the correction: the same one again changes nothing.")] = "",
    as_json: AsJson = False,
) -> None:
    """Set a request's counts and post the difference; again changes nothing. What was billed stays as it is."""
    given = {"prefill_computed": prefill_computed, "prefill_cached": prefill_cached, "decode": decode}
    counts = {name: count for name, count in given.items() if count is not None}
    if not counts:
        raise typer.BadParameter("say at least one count, for example --decode 57")
    request = pb.NewCorrection(id=key or str(uuid.uuid4()), request_id=request_id, reason=reason, by=who(), **counts)
    done = call("Correct", request)
    row = CorrectedRow(
        request_id=request_id,
        organisation=done.organisation,
        changed=done.changed,
        old_tokens=_tokens(done.old_counts),
        new_tokens=_tokens(done.new_counts),
        old_cost=money(done.old_cost),
        new_cost=money(done.new_cost),
    )
    if as_json:
        show_json(row)
    elif done.changed:
        typer.echo(f"{request_id}: {row.old_tokens} -> {row.new_tokens} tokens, {row.old_cost} -> {row.new_cost}")
    else:
        typer.echo(f"{request_id} has these counts already: nothing changed")


def _tokens(counts: pb.Counts) -> tuple[int, int, int]:
    return counts.prefill_computed, counts.prefill_cached, counts.decode
