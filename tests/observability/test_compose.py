"""`compose.yaml`: valid, safe, and its commands with its environment really serve a request."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from compose_spec import PyCompose

from contracts.environment import from_env
from tests.processes import REPOSITORY, Stack, free_port, until

SECRETS = {
    "POSTGRES_PASSWORD": "p",
    "REDIS_PASSWORD": "r",
    "PDGATE_PEER_TOKEN": "peers-of-the-compose-file",
    "PDGATE_CACHE_SALT_KEY": "s",
    "GRAFANA_PASSWORD": "g",
}
WANTED = {"gateway": 2, "scheduler": 2, "prefill": 2, "decode": 2, "unified": 1, "billing": 1}
PREFIX = {"gateway": "GATEWAY_", "scheduler": "SCHEDULER_", "billing": "BILLING_", "workers": "WORKER_"}


def interpolated(text: str) -> str:
    """Fill `${NAME}`, `${NAME:-default}` and `${NAME:?message}` in, as Docker Compose does."""

    def value(match: re.Match[str]) -> str:
        name, _, default = match[1].partition(":-")
        return SECRETS.get(name.partition(":?")[0], default)

    return re.sub(r"\$\{([^}]+)\}", value, text)


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return yaml.safe_load(interpolated((REPOSITORY / "compose.yaml").read_text()))


def test_it_follows_the_compose_specification(compose: dict[str, Any]) -> None:
    plain = {key: value for key, value in compose.items() if not key.startswith("x-")}
    parsed = PyCompose.from_yaml(yaml.safe_dump(plain))
    parsed.validate()
    assert set(parsed.service_names()) == set(compose["services"])


def test_it_has_two_of_everything_that_may_be_lost(compose: dict[str, Any]) -> None:
    names = list(compose["services"])
    for service, number in WANTED.items():
        assert len([n for n in names if re.fullmatch(rf"{service}(-\d)?", n)]) == number, service
    assert {"postgres", "redis", "prometheus", "grafana", "otel-collector"} <= set(names)


def test_services_have_limits_pinned_images_and_health_checks(
    compose: dict[str, Any],
) -> None:
    for name, service in compose["services"].items():
        assert service["deploy"]["resources"]["limits"]["memory"], name
        assert service["image"].startswith("pdgate-") or re.search(r":v?\d+\.\d+", service["image"]), name
        if name not in {"init", "models", "otel-collector"}:
            assert service["healthcheck"]["test"], name
        for other, how in dict(service.get("depends_on") or {}).items():
            assert how["condition"] in {"service_healthy", "service_completed_successfully"}, (name, other)


def test_it_holds_no_secret_and_refuses_to_start_without_them() -> None:
    text = (REPOSITORY / "compose.yaml").read_text()
    for name in SECRETS:
        for use in re.findall(rf"\$\{{{name}[^}}]*\}}", text):
            assert ":?" in use, f"{use} would start with an empty secret"
    example = (REPOSITORY / "deploy" / "env.example").read_text()
    for name in SECRETS:
        assert re.search(rf"^{name}=$", example, re.MULTILINE)


def test_redis_keeps_money_and_valkey_never_evicts(compose: dict[str, Any]) -> None:
    command = " ".join(compose["services"]["redis"]["command"])
    assert "--appendonly yes" in command
    assert "--maxmemory-policy noeviction" in command


def test_every_variable_is_a_setting_of_its_process(compose: dict[str, Any]) -> None:
    from billing.settings import Settings as Billing
    from gateway.settings import Settings as Gateway
    from scheduler.settings import Settings as Scheduler
    from workers.settings import Settings as Worker

    settings = {"gateway": Gateway, "scheduler": Scheduler, "billing": Billing, "workers": Worker}
    for service in compose["services"].values():
        command = service.get("command")
        module = command[-1] if isinstance(command, list) else None
        if module in settings:
            from_env(settings[module], PREFIX[module], {k: str(v) for k, v in service["environment"].items()})


def test_prometheus_scrapes_every_process_of_it(compose: dict[str, Any]) -> None:
    config = yaml.safe_load((REPOSITORY / "observability" / "prometheus.yml").read_text())
    scraped = set()
    for job in config["scrape_configs"]:
        for static in job.get("static_configs", []):
            scraped |= {target.partition(":")[0] for target in static["targets"]}
        for names in job.get("dns_sd_configs", []):
            scraped |= set(names["names"])
    ours = {
        name
        for name, service in compose["services"].items()
        if isinstance(service.get("command"), list) and service["command"][-1] in PREFIX
    }
    assert scraped == ours


def test_dockerfiles_run_as_nobody_special_and_the_gateways_has_no_torch() -> None:
    for file in (REPOSITORY / "deploy" / "docker").glob("*.Dockerfile"):
        users = re.findall(r"^USER (\S+)$", file.read_text(), re.MULTILINE)
        assert users, file.name
        assert all(int(user) >= 10_000 for user in users), file.name
    base = (REPOSITORY / "requirements" / "base.txt").read_text()
    assert not re.search(r"^(torch|sglang|transformers)\b", base, re.MULTILINE)


@pytest.mark.e2e
def test_dockerfiles_please_the_linter() -> None:
    files = [str(file) for file in (REPOSITORY / "deploy" / "docker").glob("*.Dockerfile")]
    assert len(files) == 3
    subprocess.run([shutil.which("hadolint") or str(Path(sys.executable).with_name("hadolint")), *files], check=True)


# -- the same commands as processes ------------------------------------------------------------------------------


class Local:
    """Turns what a service is told into what works on this machine: hosts, ports and folders."""

    def __init__(self, folder: Path, stack: Stack) -> None:
        self._folder = folder
        self._stack = stack
        self.ports: dict[tuple[str, str], int] = {}

    def environment(self, name: str, given: dict[str, str]) -> dict[str, str]:
        told = {}
        for key, value in given.items():
            text = str(value)
            if key.endswith("_REDIS_URL"):
                text = self._stack.redis_url
            elif key.endswith("_DATABASE_URL"):
                text = self._stack.database_url
            elif key.endswith("_LISTEN"):
                self.ports[name, key] = free_port()
                text = f"127.0.0.1:{self.ports[name, key]}"
            elif key.endswith("_CATALOG"):
                text = str(self._stack.catalog_file)
            elif key.endswith(("_ADVERTISE", "_BOOTSTRAP_HOST")):
                text = "127.0.0.1"
            elif key.endswith("_OTLP_ENDPOINT"):
                continue
            text = text.replace("/var/lib/pdgate", str(self._folder / name))
            text = text.replace("/models/smollm2", str(self._stack.models_dir / "tiny"))
            told[key] = text.replace("/models", str(self._stack.models_dir)) if text == "/models" else text
        (self._folder / name).mkdir(exist_ok=True)
        return told


def started(command: list[str], environment: dict[str, str], folder: Path) -> subprocess.Popen[bytes]:
    with folder.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, *command[1:]],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


@pytest.fixture
async def composed(
    compose, stack_folder: Path, redis_url, database_url, catalog_file, models_dir
) -> Iterator[tuple[Stack, Local]]:
    stack = Stack(
        folder=stack_folder,
        redis_url=redis_url,
        database_url=database_url,
        catalog_file=catalog_file,
        models_dir=models_dir,
    )
    await stack.seed()
    local = Local(stack_folder, stack)
    running: dict[str, subprocess.Popen[bytes]] = {}
    for name, service in compose["services"].items():
        command = service.get("command")
        if not isinstance(command, list) or command[-1] not in PREFIX or "gpu" in (service.get("profiles") or []):
            continue
        environment = local.environment(name, service["environment"])
        if command[-1] == "workers":
            environment |= {"WORKER_ENGINE": "timed", "WORKER_POOL": "tiny"}
        running[name] = started(command, environment, stack_folder / name)
    stack.processes = running
    stack.gateway_port = local.ports["gateway-1", "GATEWAY_LISTEN"]
    yield stack, local
    stack.stop()


@pytest.mark.e2e
async def test_the_commands_of_the_file_serve_a_request_through_either_gateway(composed: tuple[Stack, Local]) -> None:
    stack, local = composed
    await stack.ready(90)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    for name in ("gateway-1", "gateway-2"):
        url = f"http://127.0.0.1:{local.ports[name, 'GATEWAY_LISTEN']}"
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            await until(lambda client=client: _ready(client), 30)
            answer = await client.post(
                "/v1/chat/completions", json=body, headers={"authorization": f"Bearer {stack.api_key}"}
            )
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] == 8
    async with httpx.AsyncClient(timeout=5) as client:
        for (name, setting), port in local.ports.items():
            if setting.endswith("METRICS_LISTEN"):
                text = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
                assert "process_resident_memory_bytes" in text, name
    assert {name for name, process in stack.processes.items() if process.poll() is not None} == set()


async def _ready(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/readyz")).status_code == 200
    except httpx.TransportError:
        return False


def test_init_makes_the_operators_key_once(tmp_path: Path, redis_url: str, database_url: str) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "DATABASE_URL": database_url,
        "REDIS_URL": redis_url,
        "PDGATE_DATA": str(tmp_path / "data"),
        "PDGATE_CATALOG": str(REPOSITORY / "models.toml"),
    }
    command = [sys.executable, "-m", "pdgate.cli", "init", "--json"]
    first, second = (
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout for _ in range(2)
    )
    assert '"PDGATE_ADMIN_KEY"' in first
    assert first == second
    assert (tmp_path / "data" / "env").stat().st_mode & 0o077 == 0
