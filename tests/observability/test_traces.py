"""One request as one trace over every process, received by a real OTLP collector."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from observability.tracing import Ratios, Tracer, begin, child_id, read
from tests.conftest import CATALOG
from tests.processes import Stack, until

CALLER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
SECRET = "a prompt that nobody may find in a trace"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps every span it gets, with the service it came from."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[tuple[str, object]] = []
        self.raw = b""

    def Export(self, request, context):  # noqa: N802 - the name is OTLP's
        with self._lock:
            self.raw += request.SerializeToString()
            for group in request.resource_spans:
                service = next(a.value.string_value for a in group.resource.attributes if a.key == "service.name")
                for scope in group.scope_spans:
                    self._spans += [(service, span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def of(self, trace_hex: str) -> dict[str, tuple[str, object]]:
        """Return the spans of one trace by `service/name`."""
        with self._lock:
            found = [(service, span) for service, span in self._spans if span.trace_id.hex() == trace_hex]
        return {f"{service.removeprefix('pdgate-')}/{span.name}": (service, span) for service, span in found}

    def traces(self) -> set[str]:
        with self._lock:
            return {span.trace_id.hex() for _, span in self._spans}


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    kept = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(kept, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield kept, f"http://127.0.0.1:{port}"
    server.stop(1)


def attributes(span) -> dict[str, object]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


@pytest.fixture
async def traced(stack_folder: Path, redis_url, database_url, models_dir, collector):
    catalog_file = stack_folder / "models.toml"
    catalog_file.write_text(CATALOG + "\n[models.tiny.tiers.flex]  # a target that nothing can meet\nttft_ms = 0.001\n")
    stack = Stack(
        folder=stack_folder,
        redis_url=redis_url,
        database_url=database_url,
        catalog_file=catalog_file,
        models_dir=models_dir,
    )
    stack.otlp_endpoint = collector[1]
    await stack.seed()
    stack.add_gateway()
    stack.add_scheduler()
    stack.add_billing()
    stack.add_worker("prefill-0", role="prefill", environ={"WORKER_STEP_MS": "1", "WORKER_TRANSFER_MS": "5"})
    stack.add_worker("decode-0", role="decode", environ={"WORKER_STEP_MS": "1", "WORKER_TRANSFER_MS": "5"})
    stack.start()
    await stack.ready()
    yield stack
    stack.stop()


async def ask(stack: Stack, headers: dict[str, str], **fields: str) -> httpx.Response:
    body = {"model": "tiny", "messages": [{"role": "user", "content": SECRET}], "max_tokens": 20, **fields}
    async with httpx.AsyncClient(base_url=stack.url, timeout=30) as client:
        return await client.post(
            "/v1/chat/completions", json=body, headers={"authorization": f"Bearer {stack.api_key}", **headers}
        )


async def test_a_request_is_one_trace_from_the_caller_to_the_ledger(traced: Stack, collector) -> None:
    kept, _ = collector
    answer = await ask(traced, {"traceparent": CALLER})
    assert answer.status_code == 200, answer.text
    trace = CALLER.split("-")[1]
    wanted = {"gateway/chat tiny", "scheduler/schedule", "billing/bill"}
    wanted |= {"worker/prefill", "worker/kv_transfer", "worker/decode"}
    try:
        await until(lambda: wanted <= set(kept.of(trace)), 60)
    except TimeoutError:
        pytest.fail(f"no span of {wanted - set(kept.of(trace))}; billing says:\n{traced.log('billing')[-2000:]}")
    spans = {name: span for name, (_, span) in kept.of(trace).items()}
    root = spans["gateway/chat tiny"]
    assert root.parent_span_id.hex() == CALLER.split("-")[2]
    for name in wanted - {"gateway/chat tiny", "worker/kv_transfer"}:
        assert spans[name].parent_span_id == root.span_id, name
    assert [link.span_id for link in spans["worker/decode"].links] == [spans["worker/prefill"].span_id]
    sides = {spans["worker/prefill"].span_id, spans["worker/decode"].span_id}
    assert spans["worker/kv_transfer"].parent_span_id in sides
    told = attributes(root)
    usage = answer.json()["usage"]
    assert told["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert told["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 20
    assert told["gen_ai.request.model"] == "tiny"
    assert told["pdgate.request.id"] == answer.headers["x-request-id"]
    assert (told["pdgate.path"], told["pdgate.outcome"]) == ("pd", "finished")
    assert attributes(spans["scheduler/schedule"])["pdgate.worker.decode"] == "decode-0"
    assert attributes(spans["billing/bill"])["pdgate.cost_nano"] == told["pdgate.cost_nano"]
    assert root.start_time_unix_nano <= spans["worker/prefill"].start_time_unix_nano
    assert spans["worker/prefill"].end_time_unix_nano <= spans["worker/decode"].end_time_unix_nano
    assert SECRET.encode() not in kept.raw
    assert traced.api_key.encode() not in kept.raw


async def test_an_unsampled_request_is_kept_only_when_it_misses_its_targets(traced: Stack, collector) -> None:
    kept, _ = collector
    unsampled = CALLER[:-2] + "00"
    assert (await ask(traced, {"traceparent": unsampled})).status_code == 200
    missed = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
    answer = await ask(traced, {"traceparent": f"00-{missed}-00f067aa0ba902b7-00"}, service_tier="flex")
    assert answer.status_code == 200
    await until(lambda: "gateway/chat tiny" in kept.of(missed), 30)
    spans = kept.of(missed)
    assert {service for service, _ in spans.values()} == {"pdgate-gateway"}
    assert {"gateway/prefill", "gateway/decode"} <= set(spans)
    assert attributes(spans["gateway/chat tiny"][1])["pdgate.sampled"] == "tail"
    assert CALLER.split("-")[1] not in kept.traces()


def test_the_sampled_share_follows_the_tier_and_the_callers_decision_holds() -> None:
    ratios = Ratios.parse("0.1, priority=1, batch=0")
    counts = {
        tier: sum(begin(None, ratio=ratios.of(tier)).sampled for _ in range(5000))
        for tier in ("default", "priority", "batch")
    }
    assert counts["priority"] == 5000
    assert counts["batch"] == 0
    assert 350 < counts["default"] < 650  # 500 expected, 7 standard deviations either way
    parent = read(CALLER)
    assert parent is not None
    assert begin(parent, ratio=0).sampled
    assert begin(parent, ratio=0).trace_id == parent.trace_id


@pytest.mark.parametrize("text", ["", "priority=0.5", "2", "0.1,batch=-1", "half"])
def test_shares_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"share"):
        Ratios.parse(text)


@pytest.mark.parametrize(
    "header", ["", "garbage", CALLER.upper(), CALLER + "-00", "ff" + CALLER[2:], CALLER.replace("4bf9", "")]
)
def test_a_header_that_is_no_trace_context_is_none(header: str) -> None:
    assert read(header) is None


def test_parts_of_a_request_agree_on_their_names_without_talking() -> None:
    request = begin(None, ratio=1)
    names = ["prefill-1-0", "decode-1-0", "prefill-2-0", "schedule-1", "bill"]
    assert len({child_id(request, name) for name in names}) == len(names)
    assert child_id(request, "bill") == child_id(begin(request, ratio=1).__class__(
        trace_id=request.trace_id, span_id=request.span_id, sampled=True), "bill")  # fmt: skip


async def test_a_collector_that_is_away_costs_a_request_nothing() -> None:
    tracer = Tracer("gateway", "test", endpoint="http://127.0.0.1:9")
    own = begin(None, ratio=1)
    for _ in range(5000):  # more than the queue holds: what is over is dropped
        tracer.emit("x", own, parent_id=None, start_unix_ms=0, end_unix_ms=1, attributes={})
    async with asyncio.timeout(20):
        await asyncio.to_thread(tracer.close)
