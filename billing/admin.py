"""The Admin service: every write of money, over gRPC. Protobuf stops here.

Each call is one transaction. What a caller did wrong is INVALID_ARGUMENT with the sentence that says what would be
right; a database that is away is UNAVAILABLE. A shared token in the metadata says who may call.
"""

import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import grpc
import structlog
from redis.exceptions import RedisError
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing import invoices, sharing
from billing.budgets import THRESHOLDS, Budget, Budgets, remove_budget, set_budget
from billing.collection import Collector
from billing.collection_book import set_customer
from billing.corrections import Wanted, correct
from billing.credits import NewGrant, grant, lock_organisation
from billing.invoice_book import Invoice, State, find_invoice, tenants_to_invoice_across_tenants
from billing.moments import moment, unix_ms
from billing.payments import MANUAL, BadEvent, PaymentUnavailable
from billing.periods import Period, month_before, month_named
from billing.price_preview import Proposal, preview_price
from billing.prices import Terms, check_price, price_of, set_price
from billing.profiles import Profile, Seller, set_profile, set_seller
from billing.rerating import Change, Rerating, rerate
from billing.slo_credits import Promise, promise
from contracts.credentials import Certificates, Credentials
from contracts.rating import PPM, Meter
from contracts.units import Nano, NanoPerMillion
from contracts.v1 import billing_pb2 as pb
from contracts.v1 import billing_pb2_grpc

log: Final = structlog.get_logger()

_STOP_S: Final = 1.0


class Admin(billing_pb2_grpc.AdminServicer):
    """The calls. Their documentation is in contracts/v1/billing.proto."""

    def __init__(
        self,
        engine: AsyncEngine,
        budgets: Budgets,
        *,
        currency: str,
        collector: Collector | None = None,
        now_ms: Callable[[], int] = lambda: int(time.time() * 1000),
    ) -> None:
        self._engine = engine
        self._budgets = budgets
        self._currency = currency
        self._collector = collector
        self._now_ms = now_ms

    async def SetPrice(self, request: pb.PriceVersion, context: Any) -> pb.PriceSet:  # noqa: N802 - gRPC's name
        """Add a version to the price book."""
        async with self._transaction(context) as conn:
            made = await set_price(
                conn,
                model=request.model,
                meters=_meters(request),
                from_ms=request.from_ms or None,
                to_ms=request.to_ms or None,
                organisation=request.organisation or None,
                terms=_terms(request),
                set_by=request.by,
            )
        log.info("price_set", model=request.model, version=made.price.version, by=request.by)
        return pb.PriceSet(version=made.price.version, from_ms=made.from_ms)

    async def PreviewPrice(self, request: pb.PriceProposal, context: Any) -> pb.PricePreview:  # noqa: N802
        """Play a price on usage of the past."""
        price = request.price
        async with self._transaction(context, read_only=True) as conn:
            period = month_before(self._now())
            if request.from_ms or request.to_ms:
                period = Period(moment(request.from_ms), moment(request.to_ms))
            check_price(_meters(price), _terms(price))
            proposed = Proposal(
                price=price_of(price.model, _meters(price), _terms(price), version=0),
                organisation=price.organisation or None,
                from_at=period.start,
                to_at=period.end,
            )
            changes = await preview_price(conn, proposed)
        return pb.PricePreview(
            from_ms=unix_ms(period.start), to_ms=unix_ms(period.end), changes=[_change(one) for one in changes]
        )

    async def Rerate(self, request: pb.Rerating, context: Any) -> pb.Rerated:  # noqa: N802
        """Rate usage of the past again."""
        async with self._transaction(context) as conn:
            wanted = Rerating(
                id=uuid.UUID(request.id),
                model=request.model,
                price_version=request.price_version,
                organisation=request.organisation or None,
                from_at=moment(request.from_ms),
                to_at=moment(request.to_ms),
                reason=request.reason,
                made_by=request.by,
            )
            changes = await rerate(conn, wanted, now=self._now())
        log.info("rerated", id=request.id, model=request.model, reason=request.reason, by=request.by)
        return pb.Rerated(changes=[_change(one) for one in changes])

    async def Correct(self, request: pb.NewCorrection, context: Any) -> pb.Corrected:  # noqa: N802
        """Set what one request's counts are."""
        async with self._transaction(context) as conn:
            given = {meter.value: getattr(request, meter.value) for meter in Meter if request.HasField(meter.value)}
            wanted = Wanted(
                id=uuid.UUID(request.id),
                request_id=uuid.UUID(request.request_id),
                reason=request.reason,
                made_by=request.by,
                **given,
            )
            done = await correct(conn, wanted, now=self._now())
        log.info("corrected", request_id=request.request_id, nano=done.new_cost - done.old_cost, by=request.by)
        return pb.Corrected(
            changed=done.changed,
            organisation=done.organisation,
            old_counts=pb.Counts(**{meter.value: done.old.of(meter) for meter in Meter}),
            new_counts=pb.Counts(**{meter.value: done.new.of(meter) for meter in Meter}),
            old_cost=done.old_cost,
            new_cost=done.new_cost,
        )

    async def Grant(self, request: pb.NewGrant, context: Any) -> pb.Granted:  # noqa: N802
        """Give credit."""
        new = NewGrant(
            kind=request.kind,
            amount=request.amount,
            idempotency=request.idempotency,
            priority=request.priority if request.HasField("priority") else 100,
            expires_at=moment(request.expires_ms) if request.expires_ms else None,
            note=request.note,
            granted_by=request.by,
        )
        async with self._transaction(context) as conn:
            grant_id, first = await grant(conn, request.organisation, new, at=self._now())
        await self._sync(request.organisation)
        return pb.Granted(id=str(grant_id), repeated_call=not first)

    async def SetBudget(self, request: pb.Budget, context: Any) -> pb.Done:  # noqa: N802
        """Set a scope's monthly budget."""
        async with self._transaction(context) as conn:
            budget = Budget(
                organisation=request.organisation,
                scope=request.scope,
                scope_id=request.scope_id,
                amount=request.amount,
                hard=not request.soft,
                thresholds=tuple(request.thresholds) or THRESHOLDS,
                set_by=request.by,
            )
            await set_budget(conn, budget)
        await self._sync(request.organisation)
        return pb.Done(changed=True)

    async def RemoveBudget(self, request: pb.BudgetScope, context: Any) -> pb.Done:  # noqa: N802
        """Remove a scope's budget."""
        async with self._transaction(context) as conn:
            changed = await remove_budget(conn, request.organisation, request.scope, request.scope_id)
        try:
            await self._budgets.drop(request.organisation, request.scope, request.scope_id)
            await self._budgets.announce(request.organisation)
        except RedisError as error:
            await context.abort(
                grpc.StatusCode.UNAVAILABLE, f"removed, but Redis does not know it: call again ({error})"
            )
        return pb.Done(changed=changed)

    async def SetProfile(self, request: pb.Profile, context: Any) -> pb.Done:  # noqa: N802
        """Replace an organisation's billing data."""
        names = set(Profile.__struct_fields__) - {"tax_ppm", "terms_days", "time_zone"}
        profile = Profile(
            **{name: getattr(request, name) for name in names},
            tax_ppm=request.tax_ppm,
            time_zone=request.time_zone or "UTC",
            terms_days=request.terms_days if request.HasField("terms_days") else 14,
        )
        async with self._transaction(context) as conn:
            await set_profile(conn, profile)
        await self._sync(request.organisation)
        return pb.Done(changed=True)

    async def SetSeller(self, request: pb.Seller, context: Any) -> pb.Done:  # noqa: N802
        """Replace the seller."""
        seller = Seller(**{name: getattr(request, name) for name in Seller.__struct_fields__})
        async with self._transaction(context) as conn:
            await set_seller(conn, seller)
        return pb.Done(changed=True)

    async def Promise(self, request: pb.SloPromise, context: Any) -> pb.Done:  # noqa: N802
        """Promise an attainment."""
        promised = Promise(
            model=request.model,
            tier=request.tier,
            effective_from=moment(request.from_ms or self._now_ms()),
            attainment_ppm=request.attainment_ppm,
            credit_ppm=request.credit_ppm,
            set_by=request.by,
        )
        async with self._transaction(context) as conn:
            await promise(conn, promised)
        return pb.Done(changed=True)

    async def CloseMonth(self, request: pb.Month, context: Any) -> pb.Invoices:  # noqa: N802
        """Close a month, one transaction per organisation; a call that broke off is called again."""
        made: list[Invoice] = []
        async with self._transaction(context) as conn:
            period = month_named(request.month)
            tenants = [request.organisation] if request.organisation else None
            if tenants is None:
                tenants = list(await tenants_to_invoice_across_tenants(conn, period))
        for tenant in tenants:
            async with self._transaction(context) as conn:
                now = self._now()
                one = await invoices.close_period(conn, tenant, period, currency=self._currency, now=now)
                if request.issue:
                    one = await invoices.issue(conn, tenant, one.id, now=now)
            made.append(await self._settled(one, context))
        return pb.Invoices(invoices=[_state(one) for one in made])

    async def Issue(self, request: pb.InvoiceRef, context: Any) -> pb.InvoiceState:  # noqa: N802
        """Give a draft its number."""
        async with self._transaction(context) as conn:
            found = await invoices.issue(conn, request.organisation, uuid.UUID(request.id), now=self._now())
        return _state(await self._settled(found, context))

    async def WriteOff(self, request: pb.InvoiceRef, context: Any) -> pb.InvoiceState:  # noqa: N802
        """Void an issued invoice."""
        async with self._transaction(context) as conn:
            found = await invoices.write_off(conn, request.organisation, uuid.UUID(request.id), now=self._now())
        return _state(await self._settled(found, context))

    async def Pay(self, request: pb.Payment, context: Any) -> pb.InvoiceState:  # noqa: N802
        """Record a payment."""
        async with self._transaction(context) as conn:
            found = await invoices.pay(
                conn,
                request.organisation,
                uuid.UUID(request.id),
                provider=request.provider or MANUAL,
                reference=request.reference,
                amount_cents=request.amount_cents,
                recorded_by=request.by,
                now=self._now(),
            )
        await self._sync(request.organisation)
        return _state(await self._settled(found, context))

    async def CreditNote(self, request: pb.NewCreditNote, context: Any) -> pb.InvoiceState:  # noqa: N802
        """Give back part of an invoice."""
        async with self._transaction(context) as conn:
            about = uuid.UUID(request.id)
            refundable = 0
            if request.refund and self._collector is not None:
                await lock_organisation(conn, request.organisation)
                refundable = await self._collector.refundable(conn, about)
            found = await invoices.credit_note(
                conn,
                request.organisation,
                about,
                amount_cents=request.amount_cents,
                reason=request.reason,
                idempotency=request.idempotency,
                now=self._now(),
                refund_cents=refundable,
            )
            if self._collector is not None:
                await self._collector.note_made(conn, found, min(refundable, found.credits_cents))
        await self._sync(request.organisation)
        return _state(await self._settled(found, context))

    async def SetPaymentCustomer(self, request: pb.PaymentCustomer, context: Any) -> pb.Done:  # noqa: N802
        """Say which buyer of the provider an organisation is."""
        async with self._transaction(context) as conn:
            if self._collector is None or not request.reference:
                raise ValueError("needs a payment provider (BILLING_STRIPE_API_KEY) and its id of the buyer")
            await set_customer(conn, request.organisation, self._collector.provider, request.reference)
        return pb.Done(changed=True)

    async def ProviderEvent(self, request: pb.ProviderMessage, context: Any) -> pb.Done:  # noqa: N802
        """Record what a payment provider says by itself."""
        collector = self._collector
        if collector is None or request.provider != collector.provider:
            words = f"no payment provider {request.provider!r} is set up here"
            return await context.abort(grpc.StatusCode.NOT_FOUND, words)  # type: ignore[no-any-return]
        try:
            changed = await collector.told(request.body, request.signature)
        except BadEvent as error:
            log.warning("payment_event_refused", provider=request.provider, error=str(error))
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except PaymentUnavailable as error:
            log.info("payment_event_waits", provider=request.provider, why=str(error))
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        except (SQLAlchemyError, OSError) as error:
            log.warning("admin_failed", error=f"{type(error).__name__}: {error}")
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"the database does not answer: {type(error).__name__}")
        return pb.Done(changed=changed)

    async def CreateShareGroup(self, request: pb.ShareGroup, context: Any) -> pb.ShareGroupMade:  # noqa: N802
        """Create a share group."""
        async with self._transaction(context) as conn:
            group_id = await sharing.create_group(conn, name=request.name, by=request.by)
        return pb.ShareGroupMade(id=group_id)

    async def Consent(self, request: pb.ShareConsent, context: Any) -> pb.Done:  # noqa: N802
        """Join or leave a share group."""
        async with self._transaction(context) as conn:
            await sharing.say(conn, request.organisation, request.group_id, consents=request.consents, by=request.by)
            members = await sharing.members_of_across_tenants(conn, request.group_id)
        for member in members:  # it may be in force for the others from now on, or no more
            await self._sync(member.organisation)
        return pb.Done(changed=True)

    async def _settled(self, found: Invoice, context: Any) -> Invoice:
        """Let the provider do what the invoice needs; outside of a transaction, since it is a call to somebody else."""
        if self._collector is None or found.state is State.DRAFT:
            return found
        try:
            await self._collector.settle(found.organisation, found.id)
        except (SQLAlchemyError, OSError) as error:  # what was asked for is done; the job asks the provider again
            log.warning("payment_waits", invoice=found.number, error=f"{type(error).__name__}: {error}")
            return found
        async with self._transaction(context) as conn:
            return await find_invoice(conn, found.organisation, found.id) or found

    @asynccontextmanager
    async def _transaction(
        self, context: grpc.aio.ServicerContext[Any, Any], *, read_only: bool = False
    ) -> AsyncIterator[AsyncConnection]:
        """Give a transaction; what goes wrong in it ends the call with the status that fits.

        `read_only`: of one moment, and the database refuses to write in it.
        """
        try:
            async with self._engine.connect() as conn:
                if read_only:
                    await conn.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
                async with conn.begin():
                    yield conn
        except (ValueError, OverflowError) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except (SQLAlchemyError, OSError) as error:
            log.warning("admin_failed", error=f"{type(error).__name__}: {error}")
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"the database does not answer: {type(error).__name__}")

    async def _sync(self, tenant: str) -> None:
        """Make Redis and every gateway know; when Redis is away the regular job does it later."""
        try:
            await self._budgets.sync(now=self._now(), tenant=tenant)
            await self._budgets.announce(tenant)
            # What was settled between the look at the books and the limit: from the limit on settle.lua charges it.
            await self._budgets.sync(now=self._now(), tenant=tenant)
        except (RedisError, SQLAlchemyError, OSError) as error:
            log.warning("budgets_wait", tenant=tenant, error=f"{type(error).__name__}: {error}")

    def _now(self) -> datetime:
        return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=self._now_ms())


@asynccontextmanager
async def admin_server(
    admin: Admin, *, listen: str, token: str, certificates: Certificates | None = None
) -> AsyncIterator[str]:
    """Serve while the context lasts; gives the address, with the port that was chosen for 0."""
    credentials = Credentials(token=token, certificates=certificates, what="billing token")
    server = credentials.server()
    billing_pb2_grpc.add_AdminServicer_to_server(admin, server)  # type: ignore[no-untyped-call]
    port = credentials.listen(server, listen)
    await server.start()
    try:
        yield f"{listen.rpartition(':')[0]}:{port}"
    finally:
        await server.stop(_STOP_S)


def _meters(price: pb.PriceVersion) -> dict[Meter, NanoPerMillion]:
    return {meter: NanoPerMillion(getattr(price, meter.value)) for meter in Meter}


def _terms(price: pb.PriceVersion) -> Terms:
    return Terms(
        tier=price.tier or None,
        prefill_shared=NanoPerMillion(price.prefill_shared) if price.HasField("prefill_shared") else None,
        batch_ppm=price.batch_ppm if price.HasField("batch_ppm") else PPM,
        minimum=Nano(price.minimum),
    )


def _change(one: Change) -> pb.Change:
    return pb.Change(
        organisation=one.organisation,
        meter=one.meter,
        requests=one.requests,
        old_cost=one.old_cost,
        new_cost=one.new_cost,
    )


def _state(found: Invoice) -> pb.InvoiceState:
    return pb.InvoiceState(
        organisation=found.organisation,
        id=str(found.id),
        number=found.number or "",
        state=found.state.value,
        total_cents=found.total_cents,
        due_cents=found.due_cents,
    )
