"""One row of every tenant table for an organisation, made from the tables' own definitions."""

import datetime as dt
import time
import uuid
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.ext.asyncio import AsyncConnection

import billing.money_tables
import billing.tables
import gateway.batch_tables
import gateway.people_tables
import gateway.tables
import gateway.text_tables
from billing.partitions import ensure_partitions
from contracts.identity import at_ms, new_rid

CHOSEN: dict[str, dict[str, Any]] = {
    "tenancy.organisation": {"texts_since": dt.datetime(2000, 1, 1, tzinfo=dt.UTC)},
    "tenancy.api_key": {"state": "active"},
    "tenancy.hold": {"kind": "org", "mode": "suspended"},
    "tenancy.membership": {"role": "owner"},
    "tenancy.link": {"kind": "invite", "role": "viewer"},
    "tenancy.batch": {"status": "completed"},
    "billing.price": {"source": "admin", "version": 1},
    "billing.usage_record": {"meter": "decode", "billable": True},
    "billing.usage_hourly": {"meter": "decode"},
    "billing.credit_grant": {"kind": "paid", "amount": 1},
    "billing.budget": {"scope": "org", "thresholds": [50]},
    "billing.invoice": {"kind": "invoice", "state": "draft"},
    "billing.rerating_line": {"meter": "decode"},
    "billing.collection": {"state": "open"},
}
LATER = {"billing.ledger_entry"}  # in balanced pairs
INSTALLATIONS = {"billing.seller", "billing.invoice_number"}  # of no tenant

MAKERS: tuple[tuple[type[Any], Callable[["Seeds"], Any]], ...] = (
    (sa.Uuid, lambda _: uuid.uuid4()),
    (sa.DateTime, lambda seeds: seeds.at),
    (sa.Boolean, lambda _: True),
    (sa.Integer, lambda _: 1),
    (sa.Double, lambda _: 1.0),
    (sa.LargeBinary, lambda _: uuid.uuid4().bytes),
    (JSONB, lambda _: {}),
    (ARRAY, lambda _: []),
)

TABLES = {
    f"{table.schema}.{table.name}": table
    for metadata in (gateway.tables.METADATA, billing.tables.METADATA)
    for table in metadata.sorted_tables
}


class Seeds:
    """What one organisation has: by table, the row that was put there."""

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.rid = new_rid(int(time.time() * 1000))
        self.at = dt.datetime.fromtimestamp(at_ms(self.rid) / 1000, dt.UTC)
        self.rows: dict[str, dict[str, Any]] = {}

    async def plant(self, db: AsyncConnection) -> None:
        await ensure_partitions(db, self.at.date(), days=1)
        await db.execute(sa.text("SET LOCAL session_replication_role = replica"))  # nothing but rows is tested
        for name, table in TABLES.items():
            if name in INSTALLATIONS or name in LATER:
                continue
            values = self._values(name, table)
            made = (await db.execute(sa.insert(table).values(values).returning(*table.c))).mappings().one()
            self.rows[name] = dict(made)
        entry = TABLES["billing.ledger_entry"]
        accounts = [{"code": f"{self.tenant}/{self.rid}/{n}", "kind": "x", "organisation": self.tenant} for n in (1, 2)]
        ids = (
            (await db.execute(sa.insert(TABLES["billing.account"]).values(accounts).returning(sa.column("id"))))
            .scalars()
            .all()
        )
        transaction = self.rows["billing.ledger_transaction"]["id"]
        pair = [{"transaction_id": transaction, "account_id": ids[n], "amount": (1, -1)[n]} for n in (0, 1)]
        await db.execute(sa.insert(entry).values(pair))

    def _values(self, name: str, table: sa.Table) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for column in table.c:
            if isinstance(column.server_default, sa.Identity) or column.identity is not None:
                continue
            value = self._value(name, column)
            if value is not None:
                values[column.name] = value
        return values | CHOSEN.get(name, {})

    def _value(self, name: str, column: sa.Column[Any]) -> Any:  # noqa: PLR0911 - a table of cases
        for key in column.foreign_keys:
            parent = self.rows.get(f"{key.column.table.schema}.{key.column.table.name}")
            if parent is not None:
                return parent[key.column.name]
        if column.name in ("organisation", "organisation_id") or (name, column.name) in (
            ("tenancy.organisation", "id"),
            ("tenancy.hold", "id"),
        ):
            return self.tenant
        if (name, column.name) == ("billing.account", "code"):  # accounts outlive a test
            return f"{self.tenant}/{self.rid}"
        if column.name == "request_id":
            return uuid.UUID(self.rid)
        if column.name == "at" and name.startswith("billing."):
            return self.at
        if column.nullable or column.server_default is not None:
            return None
        makes = next((make for kind, make in MAKERS if isinstance(column.type, kind)), None)
        return makes(self) if makes is not None else f"{column.name}-of-{self.tenant}"
