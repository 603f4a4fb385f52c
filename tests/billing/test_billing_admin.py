"""The Admin service and the commands that call it: writes, refusals, documents, dead letters."""

import asyncio
import csv
import io
import json
import uuid
from datetime import UTC, datetime, timedelta

import grpc
import pytest
from billing_rig import usage_event
from structlog.testing import capture_logs
from typer.testing import CliRunner

from billing.admin import Admin, admin_server
from billing.budgets import Budgets
from billing.periods import month_of
from contracts import keys
from contracts.identity import shard_of
from contracts.rating import Tokens
from contracts.v1 import billing_pb2 as pb
from contracts.v1 import billing_pb2_grpc
from contracts.wire import FIELD, Change, decode_change
from pdgate.cli import app

ORG = "org_acme"
TOKEN = "t0ken"
CENT = 10_000_000
MONTH = month_of(datetime.now(UTC))
LATER_MS = int((MONTH.end + timedelta(hours=3)).timestamp() * 1000)


@pytest.fixture
async def served(rig, database_url, redis_url, catalog_file, monkeypatch):
    """The service, its address in Redis, and the command line's environment. The clock is after the month's end."""
    admin = Admin(rig.engine, Budgets(rig.engine, rig.redis), currency="EUR", now_ms=lambda: LATER_MS)
    for name, value in {
        "DATABASE_URL": database_url, "REDIS_URL": redis_url, "PDGATE_CATALOG": str(catalog_file),
        "PDGATE_ADMIN_TOKEN": TOKEN,
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    # The service logs in this process, whose output the command's runner takes.
    with capture_logs():
        async with admin_server(admin, listen="127.0.0.1:0", token=TOKEN) as address:
            await rig.redis.set(keys.BILLING_ADMIN, address)
            yield address


async def run(*words, code=0):
    done = await asyncio.to_thread(CliRunner().invoke, app, words)
    assert done.exit_code == code, done.output or done.exception
    return json.loads(done.output) if "--json" in words else done.output


async def test_calls_without_the_token_are_refused(served):
    async with grpc.aio.insecure_channel(served) as channel:
        stub = billing_pb2_grpc.AdminStub(channel)
        for metadata in ((), (("authorization", "Bearer wrong"),)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.SetBudget(pb.Budget(), metadata=metadata, timeout=5)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_price_is_set_listed_previewed_and_used_to_re_rate(rig, served):
    await rig.bill(usage_event(tokens=Tokens(decode=1_000_000)))  # 0.40
    (made,) = await run(
        "prices", "set", "tiny", "--computed", "0.10", "--cached", "0.02", "--decode", "0.20", "--batch", "50%",
        "--shared", "0.05", "--minimum", "0.000001", "--tier", "default", "--json",
    )  # fmt: skip
    assert (made["decode"], made["batch"], made["tier"], made["minimum"]) == ("0.2", "50%", "default", "0.000001")
    period = ("--version", "2", "--from", f"{MONTH.start:%Y-%m-%d}", "--to", f"{MONTH.end:%Y-%m-%d}")
    (seen,) = await run("prices", "preview", "tiny", *period, "--json")
    assert (seen["old"], seen["new"], seen["difference"]) == ("0.4", "0.2", "-0.2")
    words = ("prices", "rerate", "tiny", *period, "--reason", "agreed", "--key", str(uuid.uuid4()), "--json")
    assert await run(*words) == [seen]
    assert await run(*words) == []
    assert "no price version 9" in await run("prices", "preview", "tiny", *period[2:], "--version", "9", code=2)
    refused = await run("prices", "set", "tiny", "--computed", "1", "--cached", "1", "--decode", "1",
                        "--from", "2020-01-01", code=2)  # fmt: skip
    assert "cannot start in the past" in refused.replace("\n", " ").replace("│", "").replace("  ", " ")


async def test_a_month_from_credit_to_paid_invoice_by_the_command_line(rig, served, tmp_path):
    await run("invoices", "seller", "--legal-name", "Seller GmbH", "--tax-id", "DE9", "--address", "Weg 1, Berlin")
    await run("invoices", "buyer", "--org", ORG, "--legal-name", "Acme SÀRL", "--tax", "20%", "--tax-name", "TVA")
    (credit,) = await run("credits", "grant", "1.00", "--org", ORG, "--key", "pi_1", "--json")
    assert (credit["kind"], credit["left"]) == ("paid", "1")
    await run("credits", "grant", "1.00", "--org", ORG, "--key", "pi_1")
    await rig.bill(usage_event(tokens=Tokens(decode=25_000 * 300)))  # 3.00
    name = MONTH.name
    (draft,) = await run("invoices", "close", name, "--json")
    assert (draft["state"], draft["total"], draft["due"]) == ("draft", "3.60", "2.60")
    assert await run("invoices", "close", name, "--json") == []
    (issued,) = await run("invoices", "issue", draft["id"], "--org", ORG, "--json")
    assert issued["number"].startswith("INV-")
    (noted,) = await run("invoices", "credit-note", draft["id"], "0.50", "--org", ORG, "--reason", "outage", "--json")
    assert noted["number"].startswith("CN-")
    (paid,) = await run("invoices", "pay", draft["id"], "2.00", "--org", ORG, "--reference", "b1", "--json")
    assert paid["state"] == "paid"
    listed = await run("invoices", "list", "--org", ORG, "--json")
    assert {(one["kind"], one["number"]) for one in listed} == {
        ("invoice", issued["number"]),
        ("credit_note", noted["number"]),
    }
    file = tmp_path / "invoice.csv"
    await run("invoices", "export", draft["id"], str(file), "--org", ORG)
    rows = list(csv.DictReader(io.StringIO(file.read_text())))
    assert [(row["kind"], row["amount"]) for row in rows] == [
        ("usage", "3.00"), ("subtotal", "3.00"), ("tax", "0.60"), ("total", "3.60"), ("credits", "-1.00"),
        ("due", "2.60"),
    ]  # fmt: skip
    pdf = tmp_path / "invoice.pdf"
    await run("invoices", "export", draft["id"], str(pdf), "--org", ORG)
    first = pdf.read_bytes()
    assert first.startswith(b"%PDF-")
    await run("invoices", "export", draft["id"], str(pdf), "--org", ORG)
    assert pdf.read_bytes() == first, "the same invoice is the same file"
    shown = json.loads(await run("invoices", "show", draft["id"], "--org", ORG))
    assert shown["buyer"]["legal_name"] == "Acme SÀRL"
    assert "has no invoice" in str(
        (await asyncio.to_thread(CliRunner().invoke, app, ("invoices", "show", draft["id"], "--org", "x"))).exception
    )


async def test_a_budget_set_by_the_command_line_is_in_redis_when_the_command_returns(rig, served):
    await run("budgets", "set", "5", "--org", ORG, "--key", "key_1")
    hash_key = keys.budget(ORG, "key", "key_1")
    assert await rig.redis.hget(hash_key, "limit") == b"5000000000"
    told = await rig.redis.xrange(keys.CHANGES)
    assert decode_change(told[-1][1][FIELD.encode()]) == Change(kind="budget", id=ORG, state=""), (
        "every gateway hears it"
    )
    (row,) = await run("budgets", "list", "--org", ORG, "--json")
    assert (row["scope"], row["amount"], row["thresholds"]) == ("key", "5", [50, 80, 100])
    assert "removed" in await run("budgets", "remove", "--org", ORG, "--key", "key_1")
    assert await rig.redis.hget(hash_key, "limit") is None
    assert await rig.redis.xlen(keys.CHANGES) == len(told) + 1


async def test_dead_letters_are_listed_shown_and_delivered_again(rig, served):
    lost = usage_event(model="unpriced")
    await rig.bill(usage_event(), lost)
    await rig.redis.xadd(keys.usage_stream(shard_of(ORG)), {FIELD: b"\xc1"})
    await rig.consume(rig.consumer(), 1)
    listed = await run("usage", "dead-letters", "list", "--json")
    assert {one["reason"].partition(":")[0] for one in listed} == {"no_price", "undecodable"}
    (one,) = await run("usage", "dead-letters", "list", "--reason", "no_price", "--json")
    shown = json.loads(await run("usage", "dead-letters", "show", one["id"]))
    assert shown["content"]["rid"] == lost.rid
    await run("prices", "set", "unpriced", "--computed", "1", "--cached", "1", "--decode", "1", "--from", "2020-01-01")
    assert await run("usage", "dead-letters", "redrive", one["id"], "--json") == {"redriven": 1}
    await rig.consume(rig.consumer(), 1)
    assert await rig.scalar("SELECT count(*) FROM billing.request") == 2
    assert len(await run("usage", "dead-letters", "list", "--json")) == 1
    await run("usage", "dead-letters", "redrive", code=2)


async def test_the_command_corrects_once_and_says_what_it_did(rig, served):
    event = usage_event()
    await rig.bill(event)
    words = ("usage", "correct", event.rid, "--decode", "57", "--reason", "recount", "--json")
    done = await run(*words)
    assert (done["changed"], done["old_tokens"], done["new_tokens"]) == (True, [100, 30, 50], [100, 30, 57])
    assert (done["old_cost"], done["new_cost"]) == ("0.0000306", "0.0000334")
    assert (await run(*words))["changed"] is False
    assert "at least one count" in await run("usage", "correct", event.rid, "--reason", "x", code=2)
    assert "no billed request" in await run(
        "usage", "correct", usage_event().rid, "--decode", "1", "--reason", "x", code=2
    )
