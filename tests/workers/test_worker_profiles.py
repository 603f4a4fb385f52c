"""Engine profiles: SGLang itself takes every one of them, and refuses a role switch exactly where we say so."""

import json
import os
import subprocess

import pytest

from contracts.catalog import read_catalog
from contracts.environment import SettingsError
from contracts.lifecycle import Role
from tests.engines import tiny_model
from tests.processes import REPOSITORY, engine_python
from workers.configured_engine import sglang_options_of
from workers.engines.sglang_options import CPU_FOLDER
from workers.profile import ProfileError, profile_names, read_profile
from workers.settings import Settings


@pytest.mark.engine
@pytest.mark.timeout(240)
def test_sglang_takes_every_profile_and_refuses_the_role_switches_that_we_do_not_ask_for():
    environment = {
        **os.environ,
        "PYTHONPATH": f"{REPOSITORY}:{CPU_FOLDER}",
        "OMP_NUM_THREADS": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [engine_python(), "-m", "tests.workers.profile_arguments", tiny_model()],
        capture_output=True,
        cwd=REPOSITORY,
        env=environment,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert {(r["profile"], r["role"]) for r in results} == {
        (name, role) for name in profile_names() for role in read_profile(name).roles
    }
    for result in results:
        assert result["error"] == "", result
        assert result["ignored"] == [], result
        if result["refused_switch"]:
            assert not result["switchable"], result
    refused = {r["profile"] for r in results if r["refused_switch"]}
    assert refused == {"eagle3", "moe-deepseek", "moe-qwen3"}


def test_a_profile_gives_a_role_its_own_arguments_and_the_workers_options_win():
    profile = read_profile("moe-deepseek")
    assert profile.roles == (Role.PREFILL, Role.DECODE)
    assert profile.arguments(Role.PREFILL)["deepep_mode"] == "normal"
    assert profile.arguments(Role.DECODE)["deepep_mode"] == "low_latency"
    with pytest.raises(ProfileError, match="prefill, decode"):
        profile.arguments(Role.UNIFIED)


def test_both_sides_of_every_pair_agree_on_what_a_hand_off_needs():
    for name in profile_names():
        profile = read_profile(name)
        if profile.roles == (Role.UNIFIED,):
            continue
        prefill, decode = profile.arguments(Role.PREFILL), profile.arguments(Role.DECODE)
        for argument in ("page_size", "kv_cache_dtype", "disaggregation_transfer_backend", "speculative_algorithm"):
            assert prefill.get(argument) == decode.get(argument), (name, argument)


def settings(tmp_path, **fields) -> Settings:
    return Settings(
        id="w",
        pool="tiny",
        role=Role.DECODE,
        engine="sglang",
        redis_url="redis://127.0.0.1:1",
        catalog=str(tmp_path),
        model_path="/models/tiny",
        **fields,
    )


def test_the_workers_own_options_win_over_its_profile(tmp_path, catalog_file):
    catalog = read_catalog(catalog_file)
    chosen = settings(tmp_path, profile="pair", engine_options='{"tp_size": 2}')
    options = sglang_options_of(chosen, catalog)
    assert options.further["tp_size"] == 2
    assert options.further["page_size"] == 64


@pytest.mark.parametrize(("profile", "says"), [("nobody", "pair"), ("store", "unified")])
def test_a_profile_that_cannot_be_used_stops_the_worker_with_the_variables_name(tmp_path, catalog_file, profile, says):
    with pytest.raises(SettingsError, match=f"WORKER_PROFILE.*{says}"):
        sglang_options_of(settings(tmp_path, profile=profile), read_catalog(catalog_file))
