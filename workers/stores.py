"""What the settings say about the store of KV pages, for each engine, and who sweeps it."""

from pathlib import Path

from contracts.environment import SettingsError
from contracts.lifecycle import HandOff, StoreKind
from workers.engines.sglang_store import StoreOptions
from workers.engines.timed_store import PAGE_TOKENS, TimedStore
from workers.settings import Settings
from workers.store_sweeper import StoreSweeper


def store_scope(settings: Settings, revision: str) -> str:
    """Return what keeps the KV pages of this pool's weights apart from all others in a store."""
    return f"{settings.pool}-{revision}"


def timed_store_of(settings: Settings, revision: str) -> TimedStore | None:
    """Return the timed engine's store; None when the settings name none. Raises SettingsError."""
    if settings.hand_off is HandOff.STORE and not settings.store_dir:
        raise SettingsError("WORKER_STORE_DIR: must be set for hand-off store; the timed engine stores in a folder")
    if not settings.store_dir:
        return None
    scope = store_scope(settings, revision)
    return TimedStore(
        scope,
        folder=Path(settings.store_dir) / scope,
        page_kv_bytes=PAGE_TOKENS * settings.kv_bytes_per_token,
    )


def store_options_of(settings: Settings, revision: str) -> StoreOptions | None:
    """Return where SGLang's KV pages go; None under the direct hand-off. Raises SettingsError."""
    if settings.hand_off is HandOff.DIRECT:
        return None
    needed = {
        StoreKind.FILE: ("STORE_DIR", settings.store_dir),
        StoreKind.MOONCAKE: ("STORE_MASTER", settings.store_master),
    }
    name, value = needed[settings.store]
    if not value:
        raise SettingsError(f"WORKER_{name}: must be set for hand-off store and WORKER_STORE={settings.store}")
    scope = store_scope(settings, revision)
    return StoreOptions(
        kind=settings.store.value,
        scope=scope,
        folder=Path(settings.store_dir) / scope,
        master=settings.store_master,
        protocol=settings.store_protocol,
        host=settings.bootstrap_host,
        segment_bytes=settings.store_segment_bytes,
    )


def sweeper_of(settings: Settings) -> StoreSweeper | None:
    """Return what keeps the file store within its bytes; None where there is none."""
    in_files = settings.engine == "timed" or (settings.hand_off is HandOff.STORE and settings.store is StoreKind.FILE)
    if not settings.store_dir or not in_files:
        return None
    return StoreSweeper(Path(settings.store_dir), settings.store_max_bytes)
