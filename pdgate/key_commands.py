"""`pdgate keys`."""

import asyncio
import datetime as dt
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from gateway.bounds import Bounds
from gateway.ids import hash_key
from gateway.limits import NO_LIMITS, Limits
from gateway.scopes import NO_SCOPES, Scopes, WrongNetwork, check_scopes
from gateway.targets import read_targets
from gateway.tenants import ApiKey, KeyKnown, NoSuchTenant, Tenants
from pdgate.connection import open_database
from pdgate.output import AsJson, show, show_json
from pdgate.preflight import CannotStart
from pdgate.tenant_commands import BoundsRow, find_org, operator, publish, read_bounds, when

keys = typer.Typer(help="API keys of an organisation.", no_args_is_help=True)

Org = Annotated[str, typer.Option("--org", help="Id or name of the organisation.")]
KeyId = Annotated[str, typer.Argument(help="Id of the key: key_…")]
ProjectId = Annotated[str, typer.Option(help="Id of the project; the organisation's first one if absent.")]


class KeyRow(msgspec.Struct, frozen=True, kw_only=True):
    """A key as it is printed: never the secret."""

    id: str
    name: str
    prefix: str
    state: str
    admin: bool
    rotate: bool  # made elsewhere: somebody else may know it
    organisation: str
    project: str
    created: str
    expires: str | None


class NewKey(msgspec.Struct, frozen=True, kw_only=True):
    """A fresh key with its secret, which is shown once."""

    id: str
    key: str
    organisation: str
    project: str


class ImportedKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line of an import: a key in plain, or its SHA-256 in hex, with its limits and scopes."""

    key: str | None = None
    sha256: str | None = None
    name: str = "imported"
    limits: Limits = NO_LIMITS
    scopes: Scopes = NO_SCOPES

    @property
    def hash(self) -> bytes:
        """Return the SHA-256. Raises ValueError."""
        if (self.key is None) == (self.sha256 is None):
            raise ValueError("one of 'key' and 'sha256' is wanted")
        hashed = hash_key(self.key) if self.key is not None else bytes.fromhex(self.sha256 or "")
        if len(hashed) != 32:
            raise ValueError("'sha256' has 64 hexadecimal digits")
        return hashed


@keys.command("create")
def create_key(
    *,
    org: Org,
    name: Annotated[str, typer.Option(help="Name of the key, shown in lists.")] = "default",
    project: ProjectId = "",
    concurrent: Annotated[int | None, typer.Option(min=1, help="Most requests at once.")] = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=1, help="Most requests a minute.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(min=1, help="Most prompt and generated tokens.")] = None,
    prompt_tokens_per_minute: Annotated[int | None, typer.Option(min=1)] = None,
    uncached_prompt_tokens_per_minute: Annotated[int | None, typer.Option(min=1)] = None,
    generated_tokens_per_minute: Annotated[int | None, typer.Option(min=1)] = None,
    expires_in_days: Annotated[int | None, typer.Option(min=1, help="Days until the key stops to work.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="Only this model; may be repeated.")] = None,
    endpoint: Annotated[list[str] | None, typer.Option(help="Only this path; may be repeated.")] = None,
    network: Annotated[list[str] | None, typer.Option(help="Only from this network (CIDR); may be repeated.")] = None,
    tier: Annotated[list[str] | None, typer.Option(help="Only this service tier beside default.")] = None,
    strictest_ttft_ms: Annotated[float | None, typer.Option(help="Strictest TTFT a request may ask for.")] = None,
    strictest_tpot_ms: Annotated[float | None, typer.Option(help="Strictest TPOT a request may ask for.")] = None,
    slo: Annotated[str, typer.Option(help="Targets in place of the tier's, such as ttft=800ms,e2e=20s.")] = "",
    local_models: Annotated[
        bool | None, typer.Option(help="Whether a route's local model may stand in for its primary.")
    ] = None,
    sees_workers: Annotated[bool, typer.Option(help="Answers name the workers.")] = False,
    hash_identifiers: Annotated[bool, typer.Option(help="Store safety identifiers as keyed hashes.")] = False,
    admin: Annotated[bool, typer.Option(help="May use the admin API.")] = False,
    as_json: AsJson = False,
) -> None:
    """Create a key and print its secret, which is stored nowhere."""
    limits = Limits(
        concurrent_requests=concurrent,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        prompt_tokens_per_minute=prompt_tokens_per_minute,
        uncached_prompt_tokens_per_minute=uncached_prompt_tokens_per_minute,
        generated_tokens_per_minute=generated_tokens_per_minute,
    )
    scopes = Scopes(
        models=_only(model),
        endpoints=_only(endpoint),
        networks=_only(network),
        tiers=_only(tier),
        strictest_ttft_ms=strictest_ttft_ms,
        strictest_tpot_ms=strictest_tpot_ms,
        slo=read_targets(slo),
        local_models=local_models,
        sees_workers=sees_workers,
        hashes_identifiers=hash_identifiers,
    )
    expires = dt.datetime.now(dt.UTC) + dt.timedelta(days=expires_in_days) if expires_in_days else None

    async def run() -> NewKey:
        async with open_database() as database:
            tenants = Tenants(database)
            tenant, chosen = await _place(tenants, org, project)
            key, secret = await tenants.create_key(
                tenant,
                chosen,
                name=name,
                is_admin=admin,
                limits=limits,
                scopes=check_scopes(scopes),
                expires_at=expires,
                actor=operator(),
            )
            await publish(database)
            return _new_key(key, secret)

    try:
        made = asyncio.run(run())
    except (NoSuchTenant, WrongNetwork) as error:
        raise CannotStart(str(error)) from None
    _show_secret(made, as_json=as_json)


@keys.command("list")
def list_keys(org: Org, as_json: AsJson = False) -> None:
    """List an organisation's keys, revoked ones included."""

    async def run() -> list[KeyRow]:
        async with open_database() as database:
            tenants = Tenants(database)
            organisation = await find_org(tenants, org)
            return [_key_row(key) for key in await tenants.list_keys(organisation.id)]

    show(asyncio.run(run()), as_json=as_json)


@keys.command("set")
def set_key(
    key_id: KeyId,
    org: Org,
    limits: Annotated[str, typer.Option(help="Its limits, JSON, in place of the old.")] = "{}",
    scopes: Annotated[str, typer.Option(help="Its scopes, JSON, in place of the old.")] = "{}",
    as_json: AsJson = False,
) -> None:
    """Set the limits and scopes of a key, from its next request on."""
    wanted = read_bounds(limits, scopes)

    async def run() -> BoundsRow:
        async with open_database() as database:
            organisation = await find_org(Tenants(database), org)
            try:
                bound = await Bounds(database).set_key(
                    organisation.id, key_id, limits=wanted[0], scopes=wanted[1], actor=operator()
                )
            except NoSuchTenant as error:
                raise CannotStart(str(error)) from None
            await publish(database)
            return BoundsRow(id=key_id, limits=wanted[0], scopes=wanted[1], keys=len(bound))

    show([asyncio.run(run())], as_json=as_json)


@keys.command("revoke")
def revoke_key(key_id: KeyId, org: Org, as_json: AsJson = False) -> None:
    """Revoke a key for good: new requests are refused from the moment this returns, running ones end."""

    async def run() -> KeyRow:
        async with open_database() as database:
            tenants = Tenants(database)
            organisation = await find_org(tenants, org)
            try:
                key = await tenants.revoke(organisation.id, key_id, actor=operator())
            except NoSuchTenant as error:
                raise CannotStart(str(error)) from None
            await publish(database)
            return _key_row(key)

    show([asyncio.run(run())], as_json=as_json)


@keys.command("rotate")
def rotate_key(
    key_id: KeyId,
    org: Org,
    overlap_hours: Annotated[float, typer.Option(min=0, help="Hours for which the old secret works too.")] = 24,
    as_json: AsJson = False,
) -> None:
    """Give a key a new secret and print it; the old one works on for the overlap."""

    async def run() -> NewKey:
        async with open_database() as database:
            tenants = Tenants(database)
            organisation = await find_org(tenants, org)
            try:
                key, secret = await tenants.rotate(
                    organisation.id, key_id, overlap=dt.timedelta(hours=overlap_hours), actor=operator()
                )
            except NoSuchTenant as error:
                raise CannotStart(str(error)) from None
            await publish(database)
            return _new_key(key, secret)

    _show_secret(asyncio.run(run()), as_json=as_json)


@keys.command("import")
def import_keys(
    file: Annotated[Path, typer.Argument(help="Lines of JSON: key or sha256, name, limits, scopes. '-' = stdin.")],
    org: Org,
    project: ProjectId = "",
    as_json: AsJson = False,
) -> None:
    """Take over keys that were made elsewhere, so that clients need not change; they are marked for rotation."""
    lines = _read_lines(file)

    async def run() -> list[KeyRow]:
        async with open_database() as database:
            tenants = Tenants(database)
            tenant, chosen = await _place(tenants, org, project)
            taken = [await _import(tenants, tenant, chosen, number, line) for number, line in lines]
            await publish(database)
            return [_key_row(key) for key in taken]

    show(asyncio.run(run()), as_json=as_json)


def _read_lines(file: Path) -> Sequence[tuple[int, ImportedKey]]:
    text = sys.stdin.read() if str(file) == "-" else file.read_text()
    lines: list[tuple[int, ImportedKey]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = msgspec.json.decode(line, type=ImportedKey)
            check_scopes(entry.scopes)
            _ = entry.hash
        except (msgspec.DecodeError, ValueError) as error:
            raise CannotStart(f"line {number}: {error}") from None
        lines.append((number, entry))
    return lines


async def _import(tenants: Tenants, org: str, project: str, number: int, entry: ImportedKey) -> ApiKey:
    prefix = f"{entry.key[:4]}…" if entry.key is not None and len(entry.key) > 12 else ""
    try:
        return await tenants.import_key(
            org,
            project,
            entry.name,
            key_hash=entry.hash,
            prefix=prefix,
            limits=entry.limits,
            scopes=entry.scopes,
            actor=operator(),
        )
    except (KeyKnown, NoSuchTenant) as error:
        raise CannotStart(f"line {number}: {error}; the lines before it are imported") from None


async def _place(tenants: Tenants, org: str, project: str) -> tuple[str, str]:
    organisation = await find_org(tenants, org)
    projects = await tenants.list_projects(organisation.id)
    return organisation.id, project or (projects[0].id if projects else "")


def _only(values: list[str] | None) -> tuple[str, ...] | None:
    return tuple(values) if values else None


def _new_key(key: ApiKey, secret: str) -> NewKey:
    return NewKey(id=key.id, key=secret, organisation=key.organisation_id, project=key.project_id)


def _show_secret(made: NewKey, *, as_json: bool) -> None:
    if as_json:
        show_json(made)
    else:
        typer.echo(f"{made.id} in {made.organisation}, {made.project}. The secret is shown this once:\n{made.key}")


def _key_row(key: ApiKey) -> KeyRow:
    return KeyRow(
        id=key.id,
        name=key.name,
        prefix=key.prefix,
        state=key.state,
        admin=key.is_admin,
        rotate=key.imported,
        organisation=key.organisation_id,
        project=key.project_id,
        created=when(key.created_at),
        expires=when(key.expires_at) if key.expires_at else None,
    )
