"""What `pdgate up` starts for a pool whose engines share their KV pages."""

from pathlib import Path

import pytest

from contracts.catalog import read_catalog
from contracts.lifecycle import StoreKind
from pdgate.layout import Layout
from pdgate.roster import EngineKind, Options, Roster
from pdgate.scraping import Scraping
from tests.conftest import CATALOG


def specs_of(tmp_path: Path, model_lines: str, engine: EngineKind) -> dict:
    file = tmp_path / "models.toml"
    file.write_text(CATALOG.replace("context_tokens = 2048", f"context_tokens = 2048\n{model_lines}"))
    layout = Layout(data=tmp_path, engine=tmp_path / "engine", models=tmp_path / "models")
    roster = Roster(
        Options(engine=engine),
        layout,
        file,
        redis_url="unix:///r",
        database_url="postgresql:///d",
        inherited={},
        store_ports=(7001, 7002),
        scraping=Scraping(tmp_path / "prometheus"),
    )
    return {spec.name: spec for spec in roster.workers(read_catalog(file), {"tiny": tmp_path / "tiny"}, {})}


@pytest.mark.parametrize("engine", list(EngineKind))
def test_a_file_store_is_one_folder_for_all_workers(tmp_path: Path, engine: EngineKind):
    specs = specs_of(tmp_path, 'hand_off = "store"', engine)
    assert set(specs) == {"prefill-1", "decode-1"}
    for spec in specs.values():
        assert spec.env["WORKER_HAND_OFF"] == "store"
        assert spec.env["WORKER_STORE"] == StoreKind.FILE
        assert spec.env["WORKER_STORE_DIR"] == str(tmp_path / "kv-store")


def test_mooncake_gets_its_master_and_every_worker_its_address(tmp_path: Path):
    specs = specs_of(tmp_path, 'hand_off = "store"\nstore = "mooncake"', EngineKind.SGLANG)
    assert next(iter(specs)) == "mooncake-master"
    assert "--rpc_port=7001" in specs["mooncake-master"].argv
    assert "--metrics_port=7002" in specs["mooncake-master"].argv
    assert {specs[name].env["WORKER_STORE_MASTER"] for name in ("prefill-1", "decode-1")} == {"127.0.0.1:7001"}


def test_the_direct_hand_off_needs_no_store(tmp_path: Path):
    specs = specs_of(tmp_path, 'store = "mooncake"', EngineKind.SGLANG)
    assert set(specs) == {"prefill-1", "decode-1"}
    assert "WORKER_STORE_DIR" not in specs["decode-1"].env
