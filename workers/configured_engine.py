"""The engine that the settings and the catalogue ask for."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from contracts.catalog import Catalog
from contracts.environment import SettingsError
from contracts.perf import DEFAULT_LATENCY
from workers.engine import Engine
from workers.engines.faults import Faults
from workers.engines.http import HttpEngine, HttpOptions
from workers.engines.sglang_options import SglangOptions
from workers.engines.timed import TimedEngine
from workers.expert_table import ExpertTable
from workers.kv_table import KvTable
from workers.profile import ProfileError, read_profile
from workers.settings import Settings
from workers.stores import store_options_of, timed_store_of


def build_engine(settings: Settings, catalog: Catalog, kv: KvTable, experts: ExpertTable, *, revision: str) -> Engine:
    """Return the configured engine. For sglang this spawns its processes and loads the model."""
    if settings.engine == "timed":
        faults = Faults(Path(settings.faults_file) if settings.faults_file else None)
        return TimedEngine(
            settings.latency,
            bootstrap_host=settings.bootstrap_host,
            bootstrap_port=settings.bootstrap_port,
            hand_off_timeout_s=settings.hand_off_timeout_s,
            switch_s=settings.switch_ms / 1000,
            restart_s=settings.restart_ms / 1000,
            hand_off=settings.hand_off,
            store=timed_store_of(settings, revision),
            faults=faults,
            kv=kv,
        )
    if settings.engine == "http":
        return http_engine(settings, catalog)
    # Here and not at the top: a timed worker runs where sglang and torch are not installed.
    from workers.engines.sglang import SglangEngine  # noqa: PLC0415

    return SglangEngine(sglang_options_of(settings, catalog, revision=revision), kv, experts)


def http_engine(settings: Settings, catalog: Catalog) -> HttpEngine:
    """Return an engine in front of a server that runs already.

    Raises:
        SettingsError: the server, its model or the tokenizer is not named, or `WORKER_HTTP_FIELDS` is no JSON object.
    """
    for name, value in (("URL", settings.http_url), ("MODEL", settings.http_model)):
        if not value:
            raise SettingsError(f"WORKER_HTTP_{name}: must be set for the http engine")
    file = Path(settings.model_path) / "tokenizer.json"
    if not file.is_file():
        raise SettingsError(f"WORKER_MODEL_PATH: the http engine needs {file}")
    try:
        fields = msgspec.json.decode(settings.http_fields, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise SettingsError(f"WORKER_HTTP_FIELDS: {error}") from None
    options = HttpOptions(
        url=settings.http_url,
        model=settings.http_model,
        key=settings.http_key,
        fields=fields,
        kv_capacity_tokens=settings.max_total_tokens or DEFAULT_LATENCY.kv_capacity_tokens,
        max_running=settings.max_running or DEFAULT_LATENCY.max_running,
        context_tokens=context_tokens_of(catalog, settings.pool),
    )
    return HttpEngine(options, Tokenizer.from_file(str(file)))


def sglang_options_of(settings: Settings, catalog: Catalog, *, revision: str = "") -> SglangOptions:
    """Return the sglang engine's part of the settings.

    Raises:
        SettingsError: `WORKER_ENGINE_OPTIONS` is no JSON object, or `WORKER_PROFILE` cannot be used.
    """
    try:
        further = msgspec.json.decode(settings.engine_options, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise SettingsError(f"WORKER_ENGINE_OPTIONS: {error}") from None
    variables: Mapping[str, str] = {}
    if settings.profile:
        try:
            profile = read_profile(settings.profile)
            variables, further = profile.environment, {**profile.arguments(settings.role), **further}
        except ProfileError as error:
            raise SettingsError(f"WORKER_PROFILE: {error}") from None
    return SglangOptions(
        role=settings.role,
        model_path=settings.model_path,
        bootstrap_host=settings.bootstrap_host,
        bootstrap_port=settings.bootstrap_port,
        peer_timeout_s=settings.peer_timeout_s,
        max_total_tokens=settings.max_total_tokens,
        max_running=settings.max_running,
        faults_file=settings.faults_file,
        tool_parsers=frozenset(
            model.tool_parser
            for name, model in catalog.models.items()
            if model.tool_parser and catalog.pool_of(name) == settings.pool
        ),
        reasoning_parser=next(
            (
                model.reasoning_parser
                for name, model in catalog.models.items()
                if model.reasoning_parser and catalog.pool_of(name) == settings.pool
            ),
            "",
        ),
        adapters={
            name: str(Path(settings.model_path).parent / folder)
            for name, folder in catalog.adapters_of(settings.pool).items()
        },
        store=store_options_of(settings, revision),
        sleeps=settings.sleeps,
        further=further,
        variables=variables,
    )


def context_tokens_of(catalog: Catalog, pool: str) -> int:
    """Return the longest context of the pool's models.

    Raises:
        SettingsError: the catalogue has no model in this pool.
    """
    contexts = [model.context_tokens for name, model in catalog.models.items() if catalog.pool_of(name) == pool]
    if not contexts:
        raise SettingsError(f"WORKER_POOL: the catalogue has no model in pool {pool!r}; it has {catalog.pools}")
    return max(contexts)
