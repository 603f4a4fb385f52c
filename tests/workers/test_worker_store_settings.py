"""What the settings of a store become for each engine."""

import json
from pathlib import Path

import msgspec
import pytest

from contracts.environment import SettingsError
from contracts.lifecycle import HandOff, Role, StoreKind
from workers.engines.sglang_options import SglangOptions, arguments, environment
from workers.engines.sglang_store import StoreOptions
from workers.settings import Settings
from workers.stores import store_options_of, sweeper_of, timed_store_of

SETTINGS = Settings(
    id="w", pool="tiny", role=Role.PREFILL, engine="sglang", redis_url="unix:///r", catalog="models.toml"
)


def settings(**changes) -> Settings:
    return msgspec.structs.replace(SETTINGS, hand_off=HandOff.STORE, **changes)


def options(store: StoreOptions | None) -> SglangOptions:
    return SglangOptions(
        role=Role.PREFILL, model_path="m", bootstrap_host="127.0.0.1", bootstrap_port=0, peer_timeout_s=15, store=store
    )


@pytest.mark.parametrize(
    ("kind", "accelerator", "layout"),
    [("file", False, "layer_first"), ("mooncake", False, "page_first_direct"), ("mooncake", True, "page_first")],
)
def test_an_engine_with_a_store_is_unified_whatever_its_label(kind: str, accelerator: bool, layout: str):
    store = store_options_of(settings(store=StoreKind(kind), store_dir="/pages", store_master="h:1"), "r1")
    given = arguments(options(store), accelerator=accelerator, bootstrap_port=0)
    assert "disaggregation_mode" not in given
    assert (given["hicache_storage_backend"], given["hicache_mem_layout"]) == (kind, layout)
    assert given["hicache_write_policy"] == "write_through"
    extra = json.loads(given["hicache_storage_backend_extra_config"])
    if kind == "mooncake":
        assert (extra["extra_backend_tag"], extra["master_server_address"]) == ("tiny-r1", "h:1")
        assert extra["global_segment_size"] == 2**30


def test_the_folder_is_one_of_its_pool_and_revision():
    store = store_options_of(settings(store_dir="/pages"), "r1")
    variables = environment(options(store), accelerator=True, inherited={})
    assert variables["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] == "/pages/tiny-r1"
    assert store_options_of(settings(store_dir="/pages"), "r2").folder == Path("/pages/tiny-r2")


def test_a_store_without_a_place_stops_the_worker_with_the_settings_name():
    with pytest.raises(SettingsError, match="WORKER_STORE_DIR"):
        store_options_of(settings(), "r1")
    with pytest.raises(SettingsError, match="WORKER_STORE_MASTER"):
        store_options_of(settings(store=StoreKind.MOONCAKE, store_dir="/pages"), "r1")
    with pytest.raises(SettingsError, match="WORKER_STORE_DIR"):
        timed_store_of(settings(engine="timed"), "r1")


def test_only_a_folder_is_swept(tmp_path: Path):
    assert sweeper_of(settings(store_dir=str(tmp_path))) is not None
    assert sweeper_of(settings(store=StoreKind.MOONCAKE, store_dir=str(tmp_path))) is None
    assert sweeper_of(SETTINGS) is None
    assert store_options_of(SETTINGS, "r1") is None
