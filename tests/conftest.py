"""Service fixtures: real Valkey, real PostgreSQL built by our migrations, a tiny model catalogue."""

import json
import shutil
import signal
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import asyncpg
import pytest
from redis.asyncio import Redis
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from contracts.catalog import Catalog, read_catalog
from migrations.upgrade import upgrade
from pdgate.services import start_postgres, start_valkey
from tests.engines import Engines, running_engines

REPOSITORY = Path(__file__).parent.parent

CATALOG = """
currency = "EUR"

[models.tiny]
tokenizer = "tiny"
aliases = ["tiny-alias"]
context_tokens = 2048
default_max_tokens = 256

[models.tiny.price]
prefill_computed = "0.10"
prefill_cached = "0.02"
decode = "0.40"

[models.tiny.tiers.default]
ttft_ms = 2000
tpot_ms = 100
"""

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def pytest_configure() -> None:
    """End a run that is asked to end by SIGTERM as Ctrl-C ends it: with its services stopped."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of a file in one process under `-n`, and all that need the real engines in one, too.

    In one process those with real engines come last, and of them those on the engines that the whole run shares, which
    stay until its end: so no two sets of engines are there at once, and none while something else is measured. Under
    `-n` they are one group in the same order, which xdist hands out by its number of tests.
    """
    items.sort(key=_engines_last)
    for item in items:
        group = "engine" if item.get_closest_marker("engine") else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))


def _engines_last(item: pytest.Item) -> int:
    if not item.get_closest_marker("engine"):
        return 0
    definitions = item._fixtureinfo.name2fixturedefs.get("engines", ()) if isinstance(item, pytest.Function) else ()
    return 2 if any(definition.scope == "session" for definition in definitions[-1:]) else 1


@pytest.fixture(scope="session")
def service_folder() -> Iterator[Path]:
    """A short folder that PostgreSQL's unprivileged user can reach."""
    folder = Path(tempfile.mkdtemp(prefix="pdgate-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def valkey_url(service_folder: Path) -> Iterator[str]:
    service = start_valkey(service_folder / "valkey")
    yield service.url
    service.stop()


@pytest.fixture
async def redis_url(valkey_url: str) -> str:
    """URL of an empty Valkey."""
    client = Redis.from_url(valkey_url)
    await client.flushall()
    await client.aclose()
    return valkey_url


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = Redis.from_url(redis_url)
    yield client
    await client.aclose()


@pytest.fixture(scope="session")
def postgres_url(service_folder: Path) -> Iterator[str]:
    service = start_postgres(service_folder / "pg", durable=False)
    upgrade(service.url)
    yield service.url
    service.stop()


@pytest.fixture
async def database_url(postgres_url: str) -> str:
    """URL of a migrated database without rows."""
    connection = await asyncpg.connect(postgres_url)
    try:
        tables = await connection.fetch(
            "SELECT format('%I.%I', n.nspname, c.relname) AS name FROM pg_class c JOIN pg_namespace n"
            " ON n.oid = c.relnamespace WHERE n.nspname IN ('tenancy', 'billing') AND c.relkind IN ('r', 'p')"
            " AND NOT c.relispartition AND c.relname <> 'alembic_version' AND c.relname <> 'account'"
        )
        if tables:
            await connection.execute(f"TRUNCATE {', '.join(row['name'] for row in tables)} RESTART IDENTITY CASCADE")
    finally:
        await connection.close()
    return postgres_url


def tiny_tokenizer() -> Tokenizer:
    """Return a byte-level BPE trained on the project's own text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [file.read_text() for file in sorted((REPOSITORY / "contracts").glob("*.py"))]
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


@pytest.fixture(scope="session")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tokenizer `tiny`: byte-level BPE trained on the project's own text."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = tiny_tokenizer()
    (folder / "tiny").mkdir()
    tokenizer.save(str(folder / "tiny" / "tokenizer.json"))
    config = {"chat_template": CHATML, "eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    (folder / "tiny" / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def catalog_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("catalog") / "models.toml"
    file.write_text(CATALOG)
    return file


@pytest.fixture(scope="session")
def catalog(catalog_file: Path) -> Catalog:
    return read_catalog(catalog_file)


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """The real prefill, decode and unified workers; booted once per run."""
    with running_engines(tmp_path_factory.mktemp("engines")) as workers:
        yield workers
