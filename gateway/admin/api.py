"""The one place that builds the admin API."""

from litestar.handlers import HTTPRouteHandler
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from contracts.credentials import Credentials, certificates_of
from gateway.admin.audit_routes import audit_routes
from gateway.admin.callers import Callers
from gateway.admin.fleet_routes import FleetDesk, fleet_routes
from gateway.admin.key_routes import key_routes
from gateway.admin.members import Members, invite_routes, member_routes, service_account_routes
from gateway.admin.model_routes import ModelDesk, model_admin_routes
from gateway.admin.money import Money, Noted
from gateway.admin.money_routes import budget_routes, credit_routes, invoice_routes
from gateway.admin.name_routes import NameDesk, name_routes
from gateway.admin.organisations import Organisations, hold_routes, organisation_routes, project_routes
from gateway.admin.price_routes import price_routes
from gateway.admin.text_routes import TextDesk, text_routes
from gateway.admin.worker_orders import WorkerOrders, order_routes
from gateway.fleet import Fleet
from gateway.model_book import Additions
from gateway.models import Models
from gateway.portal.portal import Portal
from gateway.service_accounts import ServiceAccounts
from gateway.settings import Settings
from gateway.text_book import TextBook


class AdminApi:
    """The parts of the admin API, which the portal's pages use too. Building it connects to nothing."""

    def __init__(
        self,
        settings: Settings,
        engine: AsyncEngine,
        redis: Redis,
        *,
        callers: Callers,
        portal: Portal,
        models: Models,
        fleet: Fleet,
        additions: Additions,
    ) -> None:
        self._engine = engine
        self._redis = redis
        self._callers = callers
        self._transport = portal.transport
        self.organisations = Organisations(engine, redis, portal.links, portal.factors, portal.transport)
        self.accounts = ServiceAccounts(engine)
        self.members = Members(
            portal.people,
            portal.links,
            portal.sessions,
            self.accounts,
            portal.factors,
            self.organisations.tenants,
            redis,
        )
        billing = Credentials(
            token=settings.billing_admin_token,
            certificates=certificates_of(
                "GATEWAY_", ca=settings.tls_ca, cert=settings.tls_cert, key=settings.tls_key, name=settings.tls_name
            ),
        )
        self.money = Noted(engine, Money(redis, credentials=billing))
        self.fleet = FleetDesk(engine, redis, models, fleet, settings.decision_log)
        self.models = ModelDesk(
            engine, redis, self.fleet, holds=self.organisations.holds, additions=additions, noted=self.money
        )
        self.texts = TextDesk(TextBook(engine), redis)
        self.names = NameDesk(engine, redis, models)
        self.orders = WorkerOrders(engine, redis, fleet, models.catalog)

    def routes(self) -> list[HTTPRouteHandler]:
        """Return every handler under `/admin/v1`."""
        callers = self._callers
        return [
            *organisation_routes(callers, self.organisations),
            *project_routes(callers, self.organisations),
            *hold_routes(callers, self.organisations),
            *member_routes(callers, self.members, self._transport),
            *invite_routes(callers, self.members, self._transport),
            *service_account_routes(callers, self.members),
            *key_routes(callers, self.organisations, self.accounts, self._redis),
            *budget_routes(callers, self.organisations, self.money),
            *credit_routes(callers, self.money),
            *invoice_routes(callers, self.money),
            *price_routes(callers, self.money),
            *audit_routes(callers, self._engine),
            *text_routes(callers, self.texts),
            *model_admin_routes(callers, self.organisations, self.models),
            *fleet_routes(callers, self.fleet),
            *name_routes(callers, self.names),
            *order_routes(callers, self.orders),
        ]
