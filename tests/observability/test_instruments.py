"""What telemetry promises: declared labels, a bounded number of series, and no harm to who records."""

import ast
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from observability.instrument import MAX_VALUES_PER_LABEL
from observability.metrics import COUNTERS, GAUGES, HISTOGRAMS, Instruments
from observability.telemetry import Telemetry

NEVER_A_LABEL = {"org", "organisation", "tenant", "project", "key", "key_id", "rid", "request_id", "worker", "address"}


def series(instruments: Instruments, name: str) -> dict[tuple[tuple[str, str], ...], float]:
    families = {family.name: family for family in instruments.registry.collect()}
    samples = families[name].samples
    return {tuple(sorted(s.labels.items())): s.value for s in samples if not s.name.endswith(("_created", "_bucket"))}


def test_ten_thousand_invented_model_names_make_a_bounded_number_of_series() -> None:
    instruments = Instruments()
    for number in range(10_000):
        instruments.requests.add(1, {"route": "/v1/chat/completions", "status": "404", "model": f"invented-{number}"})
        instruments.ttft(1.0, model=f"invented-{number}", tier="default")
    counted = series(instruments, "pdgate_requests")
    assert len(counted) == MAX_VALUES_PER_LABEL + 1
    other = (("model", "other"), ("route", "/v1/chat/completions"), ("status", "404"))
    assert counted[other] == 10_000 - MAX_VALUES_PER_LABEL
    assert sum(counted.values()) == 10_000
    assert len(series(instruments, "pdgate_time_to_first_token_seconds")) == MAX_VALUES_PER_LABEL + 1
    assert instruments.faults.total == 2 * (10_000 - MAX_VALUES_PER_LABEL)


def test_a_label_that_is_not_declared_is_left_out_and_counted() -> None:
    instruments = Instruments()
    instruments.refusals.add(1, {"reason": "rate_limited", "org": "acme"})
    assert list(series(instruments, "pdgate_refusals")) == [(("pool", ""), ("reason", "rate_limited"), ("status", ""))]
    faults = series(instruments, "pdgate_telemetry_faults")
    assert faults == {(("fault", "undeclared_label"), ("instrument", "refusals")): 1.0}


def test_a_gauge_whose_source_fails_is_counted_and_takes_no_other_away() -> None:
    instruments = Instruments()
    instruments.observe("pdgate_streams", lambda: [(1 // len(()), {})])
    instruments.observe("pdgate_leader", lambda: [(1.0, {"pool": "a"})])
    assert series(instruments, "pdgate_leader") == {(("pool", "a"),): 1.0}
    assert series(instruments, "pdgate_streams") == {}
    assert series(instruments, "pdgate_telemetry_faults") == {  # one for each scrape
        (("fault", "source_failed"), ("instrument", "streams")): 2.0
    }


def test_a_gauge_must_be_declared() -> None:
    with pytest.raises(ValueError, match="pdgate_invented is not declared"):
        Instruments().observe("pdgate_invented", list)


def test_several_sources_of_one_gauge_add_up() -> None:
    instruments = Instruments()
    for value in (2.0, 3.0):
        instruments.observe("pdgate_streams", lambda value=value: [(value, {})])
    assert series(instruments, "pdgate_streams") == {(): 5.0}


def test_latencies_are_recorded_in_seconds_and_carry_a_trace_as_exemplar() -> None:
    telemetry = Telemetry()
    telemetry.instruments.ttft(1500, model="m", tier="default", trace_id="4bf92f3577b34da6a3ce929d0e0e4736")
    plain, media_type = telemetry.exposition()
    assert media_type.startswith("text/plain")
    line = 'pdgate_time_to_first_token_seconds_sum{model="m",tier="default"} 1.5'
    assert line in plain.decode().splitlines()
    openmetrics, media_type = telemetry.exposition("application/openmetrics-text; version=1.0.0")
    assert media_type.startswith("application/openmetrics-text")
    exemplar = r'le="2\.0".*# \{trace_id="4bf92f3577b34da6a3ce929d0e0e4736"\} 1\.5'
    assert re.search(exemplar, openmetrics.decode())


def test_every_process_shows_memory_descriptors_and_cpu() -> None:
    text, _ = Telemetry().exposition()
    names = {family.name for family in text_string_to_metric_families(text.decode())}
    assert {"process_resident_memory_bytes", "process_open_fds", "process_cpu_seconds"} <= names


def test_no_label_names_a_tenant_a_request_or_an_address() -> None:
    for declared in (*COUNTERS.values(), *HISTOGRAMS.values(), *GAUGES.values()):
        assert not NEVER_A_LABEL & set(declared.labels), declared.name
        assert declared.help.endswith("."), declared.name


RECORDED_AS = {  # histograms, by the method of Instruments that records them
    "time_to_first_token_seconds": "ttft", "time_per_output_token_seconds": "tpot",
    "request_duration_seconds": "duration", "phase_seconds": "phase", "settlement_lag_seconds": "settlement_lag",
    "queue_wait_seconds": "queue_wait", "kv_transfer_latency_seconds": "transfer", "drain_seconds": "drain",
    "switch_seconds": "switch", "event_loop_lag_seconds": "event_loop_lag",
    "cold_start_seconds": "cold_start",
}  # fmt: skip


def calls_in_the_services() -> tuple[set[str], set[str]]:
    """Return what is called on instruments in the four services, and every string given to a call of `observe`."""
    repository = Path(__file__).parents[2]
    used, observed = set(), set()
    for package in ("gateway", "scheduler", "workers", "billing", "observability"):
        for file in (repository / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if not isinstance(node, ast.Call):
                    continue
                called = ast.unparse(node.func)
                if "instruments." in called:
                    used.add(called.rpartition("instruments.")[2])
                if called.endswith("observe") and node.args and isinstance(node.args[0], ast.Constant):
                    observed.add(node.args[0].value)
    return used, observed


def test_every_declared_instrument_is_recorded_somewhere() -> None:
    used, observed = calls_in_the_services()
    names = {"request_slo": "slo"}
    assert {f"{names.get(name, name)}.add" for name in COUNTERS} - used == set()
    assert {RECORDED_AS[name] for name in HISTOGRAMS} - used == set()
    assert set(GAUGES) - observed == set()
