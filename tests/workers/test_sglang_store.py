"""The real SGLang hands its KV cache over by a store: a folder, and a real Mooncake Store over TCP.

Each with its controls: pages that are garbled change the text, pages that are gone are computed again.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from contracts.lifecycle import FinishReason, Phase
from contracts.wire import counts_from_pb, pack_ids
from pdgate.libibverbs import library_environment
from pdgate.mooncake import master_command
from tests.engines import Engines, running_engines
from tests.processes import engine_python, free_port, until
from tests.workers.engine_client import LEADER_EPOCH, Client, client_of
from tests.workers.peers import new_attempt, submit_of

pytestmark = [pytest.mark.engine, pytest.mark.e2e, pytest.mark.timeout(840)]

GREEDY = {"temperature": 0.0, "max_tokens": 24}
LONG = [100 + 7 * i % 4000 for i in range(330)]  # 20 full pages of 16 tokens, and ten tokens more
PAGES = 20 * 16


class StoreClient:
    """Runs one request through both workers, as a scheduler does it."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.engines = client.engines

    async def one(self, role: str, phase: Phase, prompt: list[int], **fields):
        attempt = new_attempt()
        worker = getattr(self.engines, role)
        submit = submit_of(
            worker, prompt, attempt=attempt, phase=phase, epoch=LEADER_EPOCH, gateway_id=self.client.name, **fields
        )
        submit.hand_off = "store"
        await self.client.leaders[role].send(submit=submit)
        return await self.client.gateways[role].answer(attempt, phase, within_s=60)

    async def pair(self, prompt: list[int], **fields):
        """(prefill's answer, decode's answer), the second after the first."""
        first = await self.one("prefill", Phase.PREFILL, prompt, **fields)
        return first, await self.one("decode", Phase.DECODE, prompt, **fields)

    async def pair_that_finds(self, prompt: list[int], *, cache_salt: str, **fields):
        """The same, where decode finds pages: they are written behind, so the first may come before its pages do."""
        for number in range(20):  # each under a name of its own: what decode has computed it need not find
            first, second = await self.pair(prompt, cache_salt=f"{cache_salt}-{number}", **fields)
            if counts_from_pb(second.finished.counts).cached_tokens:
                break
        return first, second


@contextmanager
def mooncake_master(folder: Path) -> Iterator[str]:
    """A real master; yields host:port."""
    port, python = free_port(), Path(engine_python())
    environment = {**os.environ, **library_environment(python.parents[2] / "lib")}
    with (folder / "master.log").open("wb") as log:
        master = subprocess.Popen(
            master_command(python, port=port, metrics_port=free_port()), env=environment, stdout=log, stderr=log
        )
    try:
        yield f"127.0.0.1:{port}"
    finally:
        master.terminate()
        master.wait(10)


@pytest.fixture(scope="module", params=["file", "mooncake"])
def engines(request, tmp_path_factory) -> Iterator[Engines]:
    folder = tmp_path_factory.mktemp(f"store-{request.param}")
    environ = {"WORKER_HAND_OFF": "store", "WORKER_STORE": request.param}
    if request.param == "file":
        with running_engines(folder, environ={**environ, "WORKER_STORE_DIR": str(folder / "pages")}) as workers:
            yield workers
        return
    with mooncake_master(folder) as master:
        lent = {"WORKER_STORE_MASTER": master, "WORKER_STORE_SEGMENT_BYTES": str(2**27)}
        with running_engines(folder, environ={**environ, **lent}) as workers:
            yield workers


async def test_decode_finds_the_prompts_pages_and_says_what_one_engine_says(engines: Engines, record_property):
    """Then the controls, and what a tenant may see of another."""
    async with client_of(engines) as client:
        store = StoreClient(client)
        whole = await client.unified(LONG, **GREEDY)
        prefill, decode = await store.pair_that_finds(LONG, cache_salt="a", **GREEDY)
        computed, found = counts_from_pb(prefill.finished.counts), counts_from_pb(decode.finished.counts)
        assert (decode.ids, decode.text) == (whole.ids, whole.text)
        assert (computed.prompt_tokens, computed.cached_tokens, computed.completion_tokens) == (len(LONG), 0, 0)
        assert prefill.ids == []
        assert found.cached_tokens > 0
        assert found.cached_tokens <= PAGES
        assert (found.cached_store_tokens, found.cached_host_tokens) == (found.cached_tokens, 0)
        record_property("cached_on_decode", found.cached_tokens)
        foreign = await store.one("decode", Phase.DECODE, LONG, cache_salt="b", **GREEDY)
        assert counts_from_pb(foreign.finished.counts).cached_tokens == 0
        assert foreign.ids == whole.ids
        engines.faults.write_text("drop_kv")
        try:
            _, garbled = await store.pair_that_finds(LONG, cache_salt="garbled", **GREEDY)
        finally:
            engines.faults.unlink()
        assert counts_from_pb(garbled.finished.counts).cached_tokens > 0
        assert garbled.ids != whole.ids


async def test_an_answer_that_moves_in_mid_decode_finds_its_pages_and_goes_on(engines: Engines, record_property):
    """Measured as well: how much of prompt and answer the other worker finds."""
    sampling = {"temperature": 0.0, "max_tokens": 200, "ignore_eos": True, "cache_salt": "moves"}
    async with client_of(engines) as client:
        store = StoreClient(client)
        whole = await client.unified(LONG, **{**sampling, "cache_salt": ""})
        attempt = new_attempt()
        submit = submit_of(
            engines.decode,
            LONG,
            attempt=attempt,
            phase=Phase.DECODE,
            epoch=LEADER_EPOCH,
            gateway_id=client.name,
            **sampling,
        )
        submit.hand_off = "store"
        decode = client.gateways["decode"]
        await client.leaders["decode"].send(submit=submit)
        key = (attempt, 2)
        await decode.until(lambda: key in decode.answers and len(decode.answers[key].ids) >= 100)
        await decode.abort(attempt)
        first = await decode.answer(attempt, Phase.DECODE)
        assert first.reason is FinishReason.ABORTED
        await client.idle("decode")
        head = {"delivered": pack_ids(first.ids), "delivered_chars": len(first.text)}
        second = await store.one("prefill", Phase.UNIFIED, LONG, **head, **sampling)
    counts = counts_from_pb(second.finished.counts)
    record_property("cached_after_the_move", f"{counts.cached_tokens} of {counts.prompt_tokens}")
    assert (first.ids + second.ids, first.text + second.text) == (whole.ids, whole.text)
    assert counts.prompt_tokens == len(LONG) + len(first.ids)
    assert counts.cached_tokens >= PAGES


async def test_pages_that_are_gone_are_computed_again(engines: Engines):
    """The folder is emptied; or the owner of the memory that holds them is killed, which ends the use of this pair."""
    folder = engines.faults.parent / "pages"
    before = set(folder.rglob("*.bin"))
    async with client_of(engines) as client:
        store = StoreClient(client)
        whole = await client.unified(LONG, **GREEDY)
        await store.one("prefill", Phase.PREFILL, LONG, cache_salt="emptied", **GREEDY)
        if before:
            await until(lambda: len(set(folder.rglob("*.bin")) - before) >= PAGES // 16, 20)  # written behind
            for page in folder.rglob("*.bin"):
                page.unlink()
        else:
            engines.prefill.process.kill()
            engines.prefill.process.wait(20)
        again = await store.one("decode", Phase.DECODE, LONG, cache_salt="emptied", **GREEDY)
    assert again.ids == whole.ids
    assert again.reason is FinishReason.LENGTH
    if before:
        assert counts_from_pb(again.finished.counts).cached_tokens == 0
