"""Which processes make up a stack, with the environment each is given. Pure."""

import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path

import msgspec

from contracts.additions import AddedModel
from contracts.catalog import Catalog, Model
from contracts.lifecycle import HandOff, Role, StoreKind
from contracts.scaling import Scaling
from pdgate.children import ChildSpec
from pdgate.engine import engine_python
from pdgate.layout import Layout
from pdgate.mooncake import master_command
from pdgate.scraping import Scraping
from pdgate.supervisor import STAGE_BEHIND, STAGE_GATEWAY
from scheduler.fleet.launch import WORKER_ID_MARK, Launch


class EngineKind(StrEnum):
    """What computes the tokens."""

    SGLANG = "sglang"
    TIMED = "timed"


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What `pdgate up` was asked for. The numbers of workers are per model pool."""

    engine: EngineKind = EngineKind.SGLANG
    prefill: int = 1
    decode: int = 1
    unified: int = 0
    host: str = "127.0.0.1"
    port: int = 8080
    demo: bool = True
    demo_week: bool = True

    @property
    def url(self) -> str:
        """Where the gateway answers."""
        return f"http://{self.host}:{self.port}"

    @property
    def workers(self) -> Sequence[tuple[Role, int]]:
        """Role and number within the role of each worker of a pool."""
        counts = ((Role.PREFILL, self.prefill), (Role.DECODE, self.decode), (Role.UNIFIED, self.unified))
        return [(role, number) for role, count in counts for number in range(1, count + 1)]


class Roster:
    """Builds the specifications of a stack's processes."""

    def __init__(
        self,
        options: Options,
        layout: Layout,
        catalog_file: Path,
        *,
        redis_url: str,
        database_url: str,
        inherited: Mapping[str, str],
        admin_token: str = "",
        peer_token: str = "",
        store_ports: tuple[int, int] = (0, 0),
        scraping: Scraping,
        fleet_socket: Path | None = None,
    ) -> None:
        """Take what all processes share.

        Args:
            options: what was asked for.
            layout: where files are.
            catalog_file: models.toml.
            redis_url: of the stack's Valkey.
            database_url: of the stack's PostgreSQL.
            inherited: environment of every process.
            admin_token: that billing's admin service asks for.
            peer_token: that processes show each other.
            store_ports: of Mooncake's master, for calls and for metrics; used by pools that store there.
            scraping: gives ports for metrics.
            fleet_socket: where the scheduler asks for workers of pools that scale; None = there are none.
        """
        self._fleet_socket = fleet_socket
        self._scraping = scraping
        self._options = options
        self._layout = layout
        self._catalog_file = str(catalog_file)
        self._redis_url = redis_url
        self._database_url = database_url
        self._inherited = inherited
        self._admin_token = admin_token
        self._peer_token = peer_token
        self._store_ports = store_ports

    @property
    def models(self) -> Path:
        """The models folder of the chosen engine."""
        return self._layout.models if self._options.engine is EngineKind.SGLANG else self._layout.timed_models

    def services(self) -> Sequence[ChildSpec]:
        """Return scheduler, billing and gateway, in the order to start them."""
        timers: dict[str, str] = {}
        check: dict[str, str] = {}
        self._scraping.found("gateway", "pdgate-gateway", f"{self._options.host}:{self._options.port}")
        if self._options.engine is EngineKind.SGLANG:  # two cores shared with the engine: be patient
            timers = {"SUSPECT_AFTER_S": "1", "DEAD_AFTER_S": "5"}
            check = {"LINK_CHECK_S": "5"}
        return [
            self._python(
                "scheduler",
                STAGE_BEHIND,
                {
                    "REDIS_URL": self._redis_url,
                    "PEER_TOKEN": self._peer_token,
                    "DECISION_LOG": self._inherited.get("SCHEDULER_DECISION_LOG", str(self._layout.decisions)),
                    **self._fleet(),
                    **self._metrics("scheduler"),
                    **timers,
                },
            ),
            self._python(
                "billing",
                STAGE_BEHIND,
                {
                    "REDIS_URL": self._redis_url,
                    "DATABASE_URL": self._database_url,
                    "ADMIN_TOKEN": self._admin_token,
                    **self._metrics("billing"),
                },
            ),
            self._python(
                "gateway",
                STAGE_GATEWAY,
                {
                    "LISTEN": f"{self._options.host}:{self._options.port}",
                    "REDIS_URL": self._redis_url,
                    "DATABASE_URL": self._database_url,
                    "MODELS_DIR": str(self.models),
                    "JOURNAL_DIR": str(self._layout.journal("gateway")),
                    "PEER_TOKEN": self._peer_token,
                    "BILLING_ADMIN_TOKEN": self._admin_token,
                    "DECISION_LOG": self._inherited.get("SCHEDULER_DECISION_LOG", str(self._layout.decisions)),
                    **check,
                },
            ),
        ]

    def _fleet(self) -> Mapping[str, str]:
        if self._fleet_socket is None:
            return {}
        simulated = "true" if self._options.engine is EngineKind.TIMED else "false"
        return {"FLEET": "local", "FLEET_ADDRESS": str(self._fleet_socket), "FLEET_SIMULATED": simulated}

    def _metrics(self, package: str) -> Mapping[str, str]:
        """Return where a service serves its metrics: as the environment says, else on a port of its own."""
        job, given = f"pdgate-{package}", self._inherited.get(f"{package.upper()}_METRICS_LISTEN")
        if given is not None:
            if given:
                self._scraping.found(package, job, given)
            return {"METRICS_LISTEN": given}
        return {"METRICS_LISTEN": self._scraping.listen(package, job)}

    def _python(self, package: str, stage: int, settings: Mapping[str, str]) -> ChildSpec:
        prefix = f"{package.upper()}_"
        named = {prefix + name: value for name, value in {**settings, "CATALOG": self._catalog_file}.items()}
        return ChildSpec(
            name=package,
            argv=(sys.executable, "-m", package),
            env={**self._inherited, **named},
            stage=stage,
        )

    def workers(
        self, catalog: Catalog, model_folders: Mapping[str, Path], extra_env: Mapping[str, str]
    ) -> Sequence[ChildSpec]:
        """Return the workers of pools that do not scale, and Mooncake's master where a pool stores its KV pages there.

        Args:
            catalog: names the pools.
            model_folders: folder to load, by tokenizer name.
            extra_env: what the engine needs, library paths for instance.
        """
        real = self._options.engine is EngineKind.SGLANG
        specs = []
        if real and any(_in_mooncake(model) for model in catalog.models.values()):
            port, metrics_port = self._store_ports
            argv = master_command(Path(self._python_of_workers), port=port, metrics_port=metrics_port)
            env = {**self._inherited, **extra_env}
            specs.append(ChildSpec(name="mooncake-master", argv=argv, env=env, stage=STAGE_BEHIND))
        for pool in catalog.pools:
            if catalog.scaling_of(pool) is not None:
                continue
            model = next(m for name, m in catalog.models.items() if catalog.pool_of(name) == pool)
            shared = {**extra_env, **self._shared(pool, model, model_folders)}
            for role, number in self._options.workers:
                name = f"{role}-{number}" if len(catalog.pools) == 1 else f"{pool}-{role}-{number}"
                specs.append(self._worker(name, role, shared))
        return specs

    def added_workers(self, added: AddedModel, extra_env: Mapping[str, str]) -> Sequence[ChildSpec]:
        """Return the workers of a model that was added beside the catalogue's file. `extra_env` as of `workers`."""
        folders = {added.model.tokenizer: Path(added.folder)}
        shared = {**extra_env, **self._shared(added.pool, added.model, folders)}
        if added.profile:
            shared["WORKER_PROFILE"] = added.profile
        return [self._worker(name, role, shared) for name, role in added.workers.items()]

    def _worker(self, name: str, role: Role, shared: Mapping[str, str]) -> ChildSpec:
        settings = {
            "WORKER_ID": name,
            "WORKER_ROLE": role.value,
            "WORKER_JOURNAL_DIR": str(self._layout.journal(name)),
            "WORKER_METRICS_LISTEN": self._scraping.listen(name, "pdgate-worker"),
        }
        env = {**self._inherited, **shared, **settings}
        return ChildSpec(name=name, argv=self._worker_argv, env=env, stage=STAGE_BEHIND)

    def launches(
        self, catalog: Catalog, model_folders: Mapping[str, Path], extra_env: Mapping[str, str]
    ) -> Mapping[str, Launch]:
        """Return how workers of pools that scale are started. Arguments as of `workers`."""
        found = {}
        for pool in catalog.pools:
            scaling = catalog.scaling_of(pool)
            if scaling is not None:
                model = next(m for name, m in catalog.models.items() if catalog.pool_of(name) == pool)
                own = {"WORKER_JOURNAL_DIR": str(self._layout.journal(WORKER_ID_MARK))}
                env = {**self._inherited, **extra_env, **self._shared(pool, model, model_folders), **own}
                found[pool] = _launch(self._worker_argv, env, scaling)
        return found

    @property
    def _python_of_workers(self) -> str:
        real = self._options.engine is EngineKind.SGLANG
        return str(engine_python(self._layout.engine)) if real else sys.executable

    @property
    def _worker_argv(self) -> tuple[str, ...]:
        return (self._python_of_workers, "-m", "workers")

    def _shared(self, pool: str, model: Model, model_folders: Mapping[str, Path]) -> Mapping[str, str]:
        """Return the settings that all workers of a pool have."""
        return {
            "WORKER_POOL": pool,
            "WORKER_ENGINE": self._options.engine.value,
            "WORKER_LISTEN": "127.0.0.1:0",
            "WORKER_PEER_TOKEN": self._peer_token,
            "WORKER_REDIS_URL": self._redis_url,
            "WORKER_CATALOG": self._catalog_file,
            "WORKER_MODEL_PATH": str(model_folders[model.tokenizer]),
            **self._hand_off(model),
        }

    def _hand_off(self, model: Model) -> Mapping[str, str]:
        settings = {"WORKER_HAND_OFF": model.hand_off.value}
        if model.hand_off is HandOff.STORE:
            settings |= {
                "WORKER_STORE": model.store.value,
                "WORKER_STORE_DIR": str(self._layout.kv_store),
                "WORKER_STORE_MASTER": f"127.0.0.1:{self._store_ports[0]}",
            }
        return settings


def _launch(argv: tuple[str, ...], env: Mapping[str, str], scaling: Scaling) -> Launch:
    return Launch(
        argv=argv,
        env=env,
        max_workers=scaling.max_workers,
        zones=scaling.zones or ("",),
        per_hour=scaling.price_nano,
    )


def _in_mooncake(model: Model) -> bool:
    return model.hand_off is HandOff.STORE and model.store is StoreKind.MOONCAKE
