"""What `/schema` says of `/admin/v1` is true for every caller: no server error, no undescribed answer, no other's row.

schemathesis asks what the description allows, with bodies that make sense and bodies that do not, about things that are
there. Each caller is a run of its own: nobody, keys of three kinds, and a session of each role.
"""

import asyncio
import json
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from contracts.environment import asyncpg_url
from contracts.identity import new_rid
from contracts.resp import redis_client
from gateway.portal.links import Links
from gateway.portal.people import add_member, add_person
from gateway.portal.roles import Role
from gateway.portal.sessions import Sessions
from gateway.service_accounts import ServiceAccounts
from gateway.tenants import Tenants, publish_key_state
from tests.conformance.foreign import clients_folder
from tests.processes import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

SCHEMATHESIS_S: Final = 300.0
EXAMPLES: Final = os.environ.get("PDGATE_EXAMPLES", "6")  # of each operation and caller; more looks harder
STATEFUL_EXAMPLES: Final = os.environ.get("PDGATE_EXAMPLES", "120")  # chains of calls
MADE: Final = {("POST /projects", "POST /keys"), ("POST /keys", "GET /keys/{key}")}  # a key in a project that was made
FOLLOWED: Final = {  # reached by a link from what was made
    *("PATCH /projects/{project}", "POST /keys", "GET /keys/{key}", "PATCH /keys/{key}", "DELETE /keys/{key}"),
    "POST /service_accounts",
}
CHECKS: Final = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
CALLERS: Final = ("nobody", "key", "admin key", "operator key", *(role.value for role in Role))
KNOWS_ALL: Final = ("operator key", Role.OPERATOR.value)
THEIRS: Final = "zzz-of-nobody-here"  # name of an organisation, a project and a key that only operators know


@pytest.fixture
async def stack(redis_url: str, database_url: str, catalog_file: Path, models_dir: Path) -> AsyncIterator[Stack]:
    folder = Path(tempfile.mkdtemp(prefix="pdgate-admin-"))
    stack = Stack(
        folder=folder, redis_url=redis_url, database_url=database_url, catalog_file=catalog_file, models_dir=models_dir
    )
    await stack.seed()
    stack.add_gateway()
    stack.add_scheduler()
    stack.add_billing()
    for role in ("prefill", "decode"):
        stack.add_worker(f"{role}-0", role=role)
    stack.environ("billing")["BILLING_ADMIN_TOKEN"] = "token-of-the-test"
    stack.environ("gateway")["GATEWAY_BILLING_ADMIN_TOKEN"] = "token-of-the-test"
    stack.start()
    try:
        await stack.ready()
        yield stack
    finally:
        stack.stop()
        shutil.rmtree(folder, ignore_errors=True)


async def known_things(stack: Stack) -> dict[str, str]:
    """What paths name, by parameter: things of the stack's organisation, so that calls come further than to a 404."""
    async with AsyncExitStack() as owned:
        engine = create_async_engine(asyncpg_url(stack.database_url))
        owned.push_async_callback(engine.dispose)
        tenants = Tenants(engine)
        project = await tenants.create_project(stack.org, "Walked")
        key, _ = await tenants.create_key(stack.org, project.id, "walked")
        account = await ServiceAccounts(engine).create(stack.org, project.id, "walked", actor="test")
        invite, _ = await Links(engine).invite(stack.org, "guest@example.org", Role.VIEWER, actor="test")
        async with engine.begin() as db:
            member = await add_person(db, email="walked@example.org", name="", password_hash=None)
            await add_member(db, stack.org, member.id, Role.VIEWER, actor="test")
    return {
        "organisation": stack.org,
        "project": project.id,
        "key": key.id,
        "account": account.id,
        "invite": invite.id,
        "person": member.id,
        "kind": "project",
        "kind_id": project.id,
        "request_id": new_rid(int(time.time() * 1000)),
        "worker": "prefill-0",
        "pool": "tiny",
        "model": "tiny",
    }


async def headers_of(stack: Stack, caller: str) -> dict[str, str]:
    """What a caller shows. Another organisation is there, with a name that nobody but operators may see."""
    async with AsyncExitStack() as owned:
        engine, redis = create_async_engine(asyncpg_url(stack.database_url)), redis_client(stack.redis_url)
        owned.push_async_callback(engine.dispose)
        owned.push_async_callback(redis.aclose)
        tenants = Tenants(engine)
        theirs = await tenants.create_organisation(THEIRS)
        await tenants.create_key(theirs.id, (await tenants.create_project(theirs.id, THEIRS)).id, THEIRS)
        if caller == "nobody":
            return {}
        if caller == "key":
            return {"authorization": f"Bearer {stack.api_key}"}
        if caller.endswith(" key"):
            org = stack.org
            if caller == "operator key":
                org = (await tenants.create_organisation("Operators", runs_fleet=True)).id
            project = await tenants.create_project(org, "Default")
            key, secret = await tenants.create_key(org, project.id, caller, is_admin=True)
            await publish_key_state(redis, key)
            return {"authorization": f"Bearer {secret}"}
        async with engine.begin() as db:
            operates = caller == Role.OPERATOR
            who = await add_person(db, email=f"{caller}@example.org", name="", password_hash=None, is_operator=operates)
            if not operates:
                await add_member(db, stack.org, who.id, Role(caller), actor="test")
        sessions = Sessions(redis)
        token = await sessions.begin(who.id, how="password")
        session = await sessions.find(token)
        assert session is not None
        return {"cookie": f"pdgate_session={token}", "x-csrf-token": session.csrf}


async def schemathesis(
    stack: Stack,
    folder: Path,
    *,
    headers: dict[str, str],
    known: dict[str, str],
    phases: str,
    examples: str,
    paths: str = "^/admin/v1",
    mode: str = "all",
) -> str:
    """Run schemathesis on the admin API; return what it said. Its calls are in `calls.ndjson`. Fails on a finding."""
    lines = [f'"path.{name}" = "{value}"' for name, value in known.items()]
    # What it would infer of schemas without names are hundreds of guesses; what may follow is in the description.
    told = ["[parameters]", *lines, "[phases.stateful.inference]", "algorithms = []", ""]
    (folder / "schemathesis.toml").write_text("\n".join(told))
    argv = [str(clients_folder() / "bin" / "schemathesis"), "run", f"{stack.url}/schema/openapi.json"]
    for name, value in headers.items():
        argv += ["--header", f"{name}: {value}"]
    argv += [
        *("--checks", CHECKS, "--phases", phases, "--max-examples", examples, "--seed", "1"),
        *("--request-timeout", "30", "--include-path-regex", paths, "--mode", mode, "--generation-database", "none"),
        *("--suppress-health-check", "all", "--no-color", "--report", "ndjson", "--report-ndjson-path", "calls.ndjson"),
    ]
    process = await asyncio.create_subprocess_exec(
        *argv, cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(SCHEMATHESIS_S):
            stdout, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, stdout.decode()[-12_000:]
    return stdout.decode()


@pytest.mark.parametrize("caller", CALLERS)
async def test_schemathesis_finds_no_fault_in_the_admin_api(stack: Stack, tmp_path: Path, caller: str) -> None:
    headers = await headers_of(stack, caller)
    known = await known_things(stack)
    await schemathesis(
        stack, tmp_path, headers=headers, known=known, phases="examples,fuzzing,stateful", examples=EXAMPLES
    )
    if caller not in KNOWS_ALL:
        assert THEIRS not in (tmp_path / "calls.ndjson").read_text()


async def test_a_stateful_run_gets_changes_and_deletes_what_it_made_itself(stack: Stack, tmp_path: Path) -> None:
    headers = await headers_of(stack, "operator key")
    known = await known_things(stack)
    said = await schemathesis(
        stack,
        tmp_path,
        headers=headers,
        known={"organisation": known["organisation"]},
        phases="stateful",
        examples=STATEFUL_EXAMPLES,
        mode="positive",  # chains are of what succeeds
        paths=r"^/admin/v1/organisations/\{organisation\}/(projects|keys|service_accounts)",
    )
    followed = transitions(tmp_path / "calls.ndjson")
    assert followed >= MADE, (followed, said[-3000:])
    assert {now for _, now in followed} >= FOLLOWED, (followed, said[-3000:])


def transitions(report: Path) -> set[tuple[str, str]]:
    """Return the links that were followed to a success: method and path of what was there, and of what came then."""
    found = set()
    for line in report.read_text().splitlines():
        event = json.loads(line).get("ScenarioFinished")
        if event is None:
            continue
        cases, calls = event["recorder"]["cases"], event["recorder"]["interactions"]
        for name, case in cases.items():
            status = ((calls.get(name) or {}).get("response") or {}).get("status_code", 0)
            if case.get("is_transition_applied") and 200 <= status < 300:
                before, now = (cases[one]["value"] for one in (case["parent_id"], name))
                found.add((short(before), short(now)))
    return found


def short(case: dict[str, Any]) -> str:
    return f"{case['method']} {case['path'].removeprefix('/admin/v1/organisations/{organisation}')}"


async def test_every_operation_of_the_admin_api_describes_its_errors(stack: Stack) -> None:
    async with httpx.AsyncClient(base_url=stack.url) as client:
        described = (await client.get("/schema/openapi.json")).json()
    operations = [
        (f"{method} {path}", operation)
        for path, methods in described["paths"].items()
        if path.startswith("/admin/v1")
        for method, operation in methods.items()
    ]
    assert len(operations) >= 50
    for name, operation in operations:
        assert "default" in operation["responses"], name
        assert operation["operationId"], name
        assert any(status.startswith("2") for status in operation["responses"]), name
