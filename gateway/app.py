"""The one place that builds a gateway: its parts, its owned tasks and the Litestar application."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from typing import Final

import structlog
from litestar.exceptions import HTTPException
from litestar.handlers import HTTPRouteHandler
from litestar.openapi import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.types import ASGIApp
from redis.asyncio import BlockingConnectionPool, Redis
from sqlalchemy.ext.asyncio import create_async_engine

from contracts.additions import live
from contracts.beat import beat
from contracts.catalog import Catalog
from contracts.credentials import credentials_of
from contracts.environment import asyncpg_url
from contracts.errors import ServingError
from contracts.resp import RespConnection
from contracts.settlement import SettlementScripts
from gateway.admin.api import AdminApi
from gateway.admin.callers import Callers
from gateway.admission import Admission
from gateway.answers import Answers, keep_server_send
from gateway.application import Application
from gateway.auth import DATABASE_ERRORS, Authenticator
from gateway.batch_endpoints import LineKeys, begin_line
from gateway.batch_runner import BatchRunner
from gateway.batches import Batches
from gateway.changes import Announcer, HoldBook, Watcher
from gateway.chat import Chat
from gateway.completions import Completions
from gateway.errors import Edge
from gateway.files import Files
from gateway.fleet import Fleet
from gateway.guard import Guard
from gateway.holds import Holds
from gateway.idempotency import Idempotency
from gateway.inbox import Inbox
from gateway.journal import Journal
from gateway.lease import Lease
from gateway.lengths import Lengths
from gateway.live_answers import LiveAnswers
from gateway.lookup import Lookup
from gateway.messages import Messages
from gateway.methods import answer_head
from gateway.model_book import Additions, ModelBook
from gateway.model_views import ModelViews
from gateway.models import Models
from gateway.names import NameBook
from gateway.notices import Notices
from gateway.openapi import describe_errors
from gateway.outage import Outage
from gateway.outward import Outward
from gateway.parquet import ParquetExports
from gateway.patience import Patience
from gateway.portal.portal import Portal
from gateway.portal.views import view_routes
from gateway.portal.views.account import Account
from gateway.portal.views.controls import FleetControls
from gateway.portal.views.desk import Desk
from gateway.portal.views.playground import playground_routes
from gateway.prices import Prices
from gateway.prompt import PromptWorkshop
from gateway.purse import Purse
from gateway.records import Records
from gateway.response_book import ResponseBook
from gateway.responses import Responses
from gateway.routes.chat import chat_routes
from gateway.routes.completions import completion_routes
from gateway.routes.files import batch_routes, file_routes
from gateway.routes.health import health_routes
from gateway.routes.messages import message_routes
from gateway.routes.models import model_routes
from gateway.routes.organization import organization_routes
from gateway.routes.payments import payment_routes
from gateway.routes.prefixes import prefix_routes
from gateway.routes.requests import request_routes
from gateway.routes.responses import response_routes
from gateway.routes.tokens import token_routes
from gateway.settings import Settings
from gateway.settlement import Settlement
from gateway.starter import Starter
from gateway.table import LiveTable
from gateway.tenants import NoSuchTenant, Tenants
from gateway.text_book import TextBook
from gateway.texts import Texts
from gateway.traces import Traces
from gateway.usage_reports import UsageReports
from gateway.warming import Warming
from observability.loop_lag import watch_loop_lag
from observability.telemetry import Telemetry
from observability.tracing import Tracer

log = structlog.get_logger()

DRAIN_S: Final = 0.8
_RESTART_S: Final = 0.5
_TICK_S: Final = 1.0
_REDIS_CONNECTIONS: Final = 8
_REDIS_TIMEOUT_S: Final = 2.0


class Gateway:
    """The parts of one gateway process. Building it connects to nothing."""

    def __init__(self, settings: Settings, catalog: Catalog, telemetry: Telemetry, *, gateway_id: str) -> None:
        self.settings = settings
        self.gateway_id = gateway_id
        catalog, live_models = live(catalog)
        self.catalog = catalog
        self.redis = _redis(settings.redis_url)
        # What happens per request goes over connections that pipeline; what is rare goes over redis-py.
        self.requests = RespConnection(settings.redis_url, timeout_s=_REDIS_TIMEOUT_S)
        self._settling = RespConnection(settings.redis_url, timeout_s=_REDIS_TIMEOUT_S)
        self._notified = RespConnection(settings.redis_url, timeout_s=2 * _REDIS_TIMEOUT_S)
        self.engine = create_async_engine(
            asyncpg_url(settings.database_url),
            pool_size=4,
            max_overflow=4,
            pool_timeout=2.0,
            hide_parameters=True,  # errors are logged, and may hold a prompt
            connect_args={"timeout": 2.0, "command_timeout": 5.0},
        )
        self.table = LiveTable()
        self.tracer = Tracer("gateway", gateway_id, endpoint=settings.otlp_endpoint)
        self.workshop = PromptWorkshop(threads=settings.tokenizer_threads)
        self.prices = Prices(self.engine)
        self.fleet = Fleet(
            self.redis,
            self.requests,
            catalog,
            self.table,
            gateway_id=gateway_id,
            period_s=settings.discovery_s,
            link_check_s=settings.link_check_s,
            credentials=credentials_of("GATEWAY_", settings),
        )
        self.models = Models(catalog, settings.models_dir, prices=self.prices, fleet=self.fleet, workshop=self.workshop)
        self.holds = Holds()
        self.auth = Authenticator(
            Tenants(self.engine),
            self.redis,
            self.requests,
            max_entries=settings.key_cache_entries,
            now_s=time.monotonic,
        )
        self.guard = Guard(self.auth, self.holds, trusted_proxies=settings.trusted_proxies)
        self.inbox = Inbox(self.requests)
        traces = Traces(self.tracer, settings.trace_ratios)
        self.settlement = Settlement(
            self._settling,
            Journal(settings.journal_dir, gateway_id, max_bytes=settings.journal_max_bytes),
            Records(telemetry.instruments, traces),
            max_waiting=settings.settlements_in_memory,
        )
        self.lengths = Lengths()
        self.purse = Purse(SettlementScripts(self.requests))
        self.texts = Texts(TextBook(self.engine), telemetry.instruments, max_text_bytes=settings.text_max_bytes)
        self.starter = Starter(
            settings,
            gateway_id=gateway_id,
            guard=self.guard,
            models=self.models,
            prices=self.prices,
            admission=Admission(
                SettlementScripts(self.requests),
                lengths=self.lengths,
                outage=Outage(per_key=settings.outage_requests_per_key, per_process=settings.outage_requests),
                instruments=telemetry.instruments,
                caught_up=self.settlement.caught_up,
                gateway_id=self.gateway_id,
            ),
            fleet=self.fleet,
            inbox=self.inbox,
            table=self.table,
            effects=Outward(self.fleet, self.inbox, self.settlement, purse=self.purse, lengths=self.lengths),
            traces=traces,
            texts=self.texts,
        )
        self.chat = Chat(self.starter, catalog=catalog, models=self.models, workshop=self.workshop)
        self.warming = Warming(
            self.starter,
            catalog=catalog,
            models=self.models,
            workshop=self.workshop,
            chat=self.chat,
            fleet=self.fleet,
        )
        self.completions = Completions(self.starter, catalog=catalog, models=self.models, workshop=self.workshop)
        self.messages = Messages(self.starter, self.chat, catalog=catalog)
        self.response_book = ResponseBook(self.redis, gateway_id=gateway_id, ttl_s=settings.response_ttl_s)
        self.responses = Responses(self.starter, self.chat, self.response_book, catalog=catalog, gateway_id=gateway_id)
        self.lookup = Lookup(self.table, self.redis, self.engine, currency=catalog.currency)
        self.files = Files(self.engine, max_organisation_bytes=settings.max_files_bytes)
        self.batches = Batches(self.engine, runner=gateway_id)
        self.batch_runner = BatchRunner(
            self.engine,
            self.batches,
            self.files,
            LineKeys(self.auth, self.starter),
            {
                "/v1/chat/completions": begin_line(self.chat.start),
                "/v1/completions": begin_line(self.completions.start),
                "/v1/responses": begin_line(self.responses.start),
                "/v1/messages": begin_line(self.messages.start),
            },
            self.lookup.was_paid,
            max_lines_at_once=settings.batch_lines_at_once,
            max_line_bytes=settings.max_body_bytes,
        )
        self.usage_reports = UsageReports(self.engine, currency=catalog.currency)
        self.parquet = ParquetExports(self.usage_reports)
        self.answers = Answers(telemetry.instruments)
        self.live_answers = LiveAnswers(self.requests)
        self.portal = Portal(settings, self.engine, self.redis)
        self.additions = Additions(ModelBook(self.engine), self.redis, live_models)
        self.admin = AdminApi(
            settings,
            self.engine,
            self.redis,
            callers=Callers(self.guard, self.portal.door, Tenants(self.engine)),
            portal=self.portal,
            models=self.models,
            fleet=self.fleet,
            additions=self.additions,
        )
        self._changed = RespConnection(settings.redis_url, timeout_s=2 * _REDIS_TIMEOUT_S)
        self._watcher = Watcher(
            self._changed,
            HoldBook(self.engine),
            Announcer(self.engine, self.redis),
            auth=self.auth,
            holds=self.holds,
            table=self.table,
            names=self.models.names,
            name_book=NameBook(self.engine),
            additions=self.additions,
            texts=self.texts,
        )
        self._notices = Notices(self._notified, self.table, self.fleet, gateway_id=gateway_id)
        self._lease = Lease(self.requests, gateway_id=gateway_id, address=settings.listen)
        self._instruments = telemetry.instruments
        self._instruments.observe("pdgate_streams", lambda: [(len(self.table), {})])
        self._instruments.observe("pdgate_settlements_waiting", lambda: [(self.settlement.num_waiting, {})])
        self._instruments.observe("pdgate_settlements_journalled", lambda: [(self.settlement.num_journalled, {})])

    def stop_streams(self) -> None:
        """Take no more requests and break off those that run."""
        self.starter.stopping = True
        for generation in self.table:
            generation.gateway_stops()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run all owned tasks; at the end settle what is left, then let go of everything."""
        self.settlement.recover()
        loops: dict[str, Callable[[], Awaitable[None]]] = {
            "lease": self._lease.run,
            "fleet": self.fleet.run,
            "prices": self.prices.run,
            "models": self.models.run,
            "notices": self._notices.run,
            "changes": self._watcher.run,
            "holds": self._watcher.reload,
            "names": self._watcher.reload_names,
            "additions": self.additions.run,
            "inbox": self.inbox.run,
            "settlement": self.settlement.run,
            "purse": self.purse.run,
            "answers": self.answers.run,
            "live-answers": self.live_answers.run,
            "responses": self.response_book.run,
            "batches": self.batch_runner.run,
            "texts": self.texts.run,
            "files": self.files.run,
            "ticks": self._tick,
            "loop-lag": lambda: watch_loop_lag(self._instruments),
        }
        # The consumer of this context is the server, not a caller's code, so the scope may span the yield.
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(_keep(name, run), name=name) for name, run in loops.items()]
            try:
                yield
            finally:
                await self._drain()
                await _end(running)
        await self.batch_runner.release()
        self.settlement.close()
        await self._lease.release()
        self.workshop.close()
        self.parquet.close()
        self.portal.close()
        await self.redis.aclose()
        for connection in (self.requests, self._settling, self._notified, self._changed):
            connection.close()
        await self.engine.dispose()
        await asyncio.to_thread(self.tracer.close)

    async def _drain(self) -> None:
        self.stop_streams()
        for generation in self.table:
            generation.close_now()
        await self.settlement.drain(DRAIN_S)
        await self.texts.drain(DRAIN_S / 2)

    async def _tick(self) -> None:
        settings = self.settings
        patience = Patience(
            first_token_s=settings.first_token_s,
            first_token_s_per_1000=settings.first_token_s_per_1000,
            between_tokens_s=settings.between_tokens_s,
        )
        while True:
            await beat(_TICK_S)
            now_s = time.monotonic()
            for generation in self.table:
                generation.tick(now_s, patience)


def _redis(url: str) -> Redis:
    """Return a client whose callers wait for a connection instead of failing when all are in use.

    With a socket timeout redis-py sends through `asyncio.wait_for`, which on Python 3.11 can lose a cancellation;
    callers have an `asyncio.timeout` of their own.
    """
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=_REDIS_CONNECTIONS,
        timeout=_REDIS_TIMEOUT_S,
        socket_timeout=None,
        socket_connect_timeout=1.0,
    )
    return Redis.from_pool(pool)


async def _end(running: Collection[asyncio.Task[None]]) -> None:
    """Cancel tasks until they end: `wait_for` of Python 3.11, inside redis-py, can swallow a cancellation."""
    pending = set(running)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=0.2)


async def _keep(name: str, run: Callable[[], Awaitable[None]]) -> None:
    """Run a loop; after a fault of ours log it and begin again, since streams depend on the others."""
    while True:
        try:
            await run()
        except Exception:
            log.exception("loop_failed", loop=name)
            await asyncio.sleep(_RESTART_S)
        else:
            return


def create_app(gateway: Gateway, telemetry: Telemetry) -> ASGIApp:
    """Return the HTTP application of a gateway that is running.

    The gateway's own tasks are not in Litestar's lifespan: the server ends it only when every connection is
    closed, and a client that sends half a request would keep everything from being settled.
    """
    edge = Edge(telemetry.instruments)
    app = Application(
        route_handlers=[*describe_errors(_routes(gateway, telemetry)), gateway.portal.router(_views(gateway, edge))],
        exception_handlers={
            ServingError: edge.serving_error,
            HTTPException: edge.http_error,
            NoSuchTenant: edge.no_such_tenant,
            **dict.fromkeys(DATABASE_ERRORS, edge.database_error),
            Exception: edge.unexpected,
        },
        openapi_config=OpenAPIConfig(
            title="pdgate",
            version="1",
            description="OpenAI-compatible gateway with phase-split billing.",
            path="/schema",
            render_plugins=[JsonRenderPlugin(path=["/", "/openapi.json"])],
        ),
        logging_config=None,
    )
    once = Idempotency(
        keep_server_send(app),
        auth=gateway.auth,
        connection=gateway.requests,
        live=gateway.live_answers,
        gateway_id=gateway.gateway_id,
        max_body_bytes=gateway.settings.max_body_bytes,
        body_timeout_s=gateway.settings.body_timeout_s,
        timeout_s=gateway.settings.request_timeout_s,
    )
    return answer_head(once)


def _views(gateway: Gateway, edge: Edge) -> list[HTTPRouteHandler]:
    portal = gateway.portal
    desk = Desk(
        portal.door,
        portal.pages,
        gateway.engine,
        gateway.redis,
        gateway.catalog,
        lookup=gateway.lookup,
        fleet=gateway.fleet,
        prices=gateway.prices,
    )
    playground = playground_routes(desk, gateway.starter, gateway.chat, gateway.answers, gateway.auth, edge)
    admin = gateway.admin
    return view_routes(
        desk,
        playground,
        portal.people,
        portal.links,
        writer=admin.money,
        controls=FleetControls(admin.fleet, admin.orders, admin.organisations),
        account=Account(desk, portal.factors, portal.passwords, portal.tries),
        texts=admin.texts,
        models=admin.models,
        members=admin.members,
    )


def _routes(gateway: Gateway, telemetry: Telemetry) -> list[HTTPRouteHandler]:
    return [
        *chat_routes(gateway.starter, gateway.chat, gateway.answers),
        *completion_routes(gateway.starter, gateway.completions, gateway.answers),
        *message_routes(gateway.starter, gateway.messages, gateway.answers),
        *response_routes(gateway.starter, gateway.responses, gateway.response_book, gateway.guard, gateway.answers),
        *prefix_routes(gateway.starter, gateway.warming, gateway.answers),
        *file_routes(gateway.guard, gateway.files, max_file_bytes=gateway.settings.max_file_bytes),
        *batch_routes(gateway.starter, gateway.guard, gateway.files, gateway.batches, gateway.batch_runner),
        *token_routes(gateway.starter, gateway.models, gateway.workshop),
        *model_routes(gateway.guard, ModelViews(gateway.models, gateway.prices)),
        *request_routes(gateway.guard, gateway.lookup),
        *organization_routes(gateway.guard, gateway.usage_reports, gateway.parquet),
        *gateway.admin.routes(),
        *payment_routes(gateway.admin.money, body_timeout_s=gateway.settings.body_timeout_s),
        *health_routes(gateway.models, gateway.prices, gateway.fleet, telemetry.exposition),
    ]
