"""The Helm chart, rendered by Helm itself and checked against Kubernetes' own schemas. No cluster has run it."""

import asyncio
import json
import re

import asyncpg
import helm_python
import kubernetes_validate
import msgspec
import pytest
import yaml
from helm_chart import CUSTOM, FOLDER, named, of_kind, pods, rendered, told
from typer.testing import CliRunner

from billing.settings import Settings as Billing
from contracts.environment import from_env
from gateway.settings import Settings as Gateway
from pdgate.cli import app
from scheduler.fleet.agent import AgentFleet
from scheduler.fleet.choice import fleet_of
from scheduler.fleet.kubernetes_agent import Settings as Agent
from scheduler.fleet.kubernetes_objects import MAX_WORKERS, PER_HOUR, TEMPLATE
from scheduler.settings import Settings as Scheduler
from tests.processes import REPOSITORY
from workers.configured_engine import sglang_options_of
from workers.health import ALIVE, READY
from workers.roles import DRAIN_CAP_S
from workers.settings import Settings as Worker

OLDEST, NEWEST = "1.30", "1.37"
PROCESSES = {"gateway": Gateway, "scheduler": Scheduler, "billing": Billing, "workers": Worker}
PREFIX = {"gateway": "GATEWAY_", "scheduler": "SCHEDULER_", "billing": "BILLING_", "workers": "WORKER_"}
CLUSTER = {
    "redis-url": "redis://:p@redis:6379/0",
    "database-url": "postgresql://pdgate:p@postgres/pdgate",
    "cache-salt-key": "salt",
    "peer-token": "what-peers-show-each-other",
    "billing-admin-token": "token",
    "stripe-api-key": "sk_test_1",
    "stripe-webhook-secrets": "whsec_1,whsec_2",
    "metadata.name": "pdgate-abc",
    "spec.nodeName": "node-7",
    "status.podIP": "10.1.2.3",
}
EVERYTHING = {
    "otlpEndpoint": "http://otel:4317",
    "imagePullSecrets": [{"name": "registry"}],
    "gateway": {
        "autoscaling": {
            "metrics": [
                {
                    "type": "Pods",
                    "pods": {
                        "metric": {"name": "pdgate_gateway_streams"},
                        "target": {"type": "AverageValue", "averageValue": "1k"},
                    },
                }
            ]
        },
        "trustedProxies": ["10.0.0.0/8"],
        "env": {"GATEWAY_MAX_STREAMS": 4096},
    },
    "workerDefaults": {"tolerations": [], "capabilities": ["IPC_LOCK"]},
    "workers": [
        {"name": "big-p", "pool": "big", "role": "prefill", "replicas": 2, "modelPath": "big", "nodes": 4, "zone": "a"},
        {"name": "big-d", "pool": "big", "role": "decode", "modelPath": "big", "managed": True, "spot": True,
         "maxWorkers": 24, "perHourNano": 2_500_000_000,
         "engineOptions": {"tp_size": 8}, "profile": "pair"},
        {"name": "tiny-u", "pool": "tiny", "role": "unified", "replicas": 0, "modelPath": "t", "engine": "timed"},
    ],
    "fleet": {"enabled": True},
    "route": {"hostnames": ["llm.example.org"]},
    "networkPolicy": {"clients": [{"ipBlock": {"cidr": "192.0.2.0/24"}}]},
    "serviceMonitor": {"labels": {"release": "prometheus"}},
}  # fmt: skip


@pytest.fixture(scope="module", params=["as it comes", "with everything"])
def objects(request):
    return rendered({} if request.param == "as it comes" else EVERYTHING)


def test_helm_finds_no_fault_in_it():
    found = helm_python.lint(str(FOLDER))
    assert found["errors"] == []
    assert [m["error"] for m in found["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_every_object_follows_the_schemas_of_kubernetes(objects, version):
    for found in objects:
        if found["kind"] in CUSTOM:
            msgspec.convert(found, CUSTOM[found["kind"]])
            for _, pod in pods([found]):
                alone = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", **pod["metadata"]}}
                kubernetes_validate.validate({**alone, "spec": pod["spec"]}, version, strict=True)
        else:
            kubernetes_validate.validate(found, version, strict=True)


def test_every_variable_is_a_setting_of_its_process(objects):
    seen = set()
    for name, pod in pods(objects):
        variables = [variable["name"] for variable in pod["spec"]["containers"][0]["env"]]
        assert len(set(variables)) == len(variables), name
        assert all(isinstance(word, str) for word in pod["spec"]["containers"][0]["command"]), name
        module = pod["spec"]["containers"][0]["command"][-1]
        if module not in PROCESSES:
            continue
        environment = told(pod, CLUSTER)
        settings = from_env(PROCESSES[module], PREFIX[module], environment)
        seen.add(module)
        if isinstance(settings, Billing):
            assert settings.admin_listen == "10.1.2.3:9200"  # gateways find it in Redis and call it there
            assert settings.stripe_webhook_secrets == ("whsec_1", "whsec_2")
        if isinstance(settings, Worker):
            assert (settings.id, settings.advertise, settings.node) == ("pdgate-abc", "10.1.2.3", "node-7")
    assert seen == set(PROCESSES)


def test_secrets_are_named_and_never_held(objects):
    assert of_kind(objects, "Secret") == []
    wanted = {
        (ref["name"], ref["key"], ref.get("optional", False))
        for _, pod in pods(objects)
        for variable in pod["spec"]["containers"][0]["env"]
        if (ref := variable.get("valueFrom", {}).get("secretKeyRef"))
    }
    assert wanted == {
        ("pdgate", "redis-url", False),
        ("pdgate", "database-url", False),
        ("pdgate", "cache-salt-key", False),
        ("pdgate", "peer-token", False),
        ("pdgate", "billing-admin-token", True),
        ("pdgate", "stripe-api-key", True),
        ("pdgate", "stripe-webhook-secrets", True),
    }


def test_no_pod_is_anybody_special_or_may_ask_the_api_server(objects):
    for name, pod in pods(objects):
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"], name
        assert spec["automountServiceAccountToken"] is False, name
        for container in spec["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False, name
            assert container["securityContext"]["capabilities"]["drop"] == ["ALL"], name
            assert container["resources"]["limits"]["memory"], name
            assert container["resources"]["requests"]["cpu"], name


def test_a_grace_period_is_longer_than_all_that_happens_in_it(objects):
    for name, pod in pods(objects):
        container = pod["spec"]["containers"][0]
        variables = {v["name"]: v.get("value") for v in container["env"]}
        grace = pod["spec"].get("terminationGracePeriodSeconds", 30)
        if "GATEWAY_LISTEN" in variables:
            waits = container["lifecycle"]["preStop"]["sleep"]["seconds"]
            assert grace == waits + int(variables["GATEWAY_SHUTDOWN_GRACE_S"]) + 15
        elif "WORKER_LISTEN" in variables:
            assert float(variables["WORKER_DRAIN_S"]) == DRAIN_CAP_S, name
            assert grace == DRAIN_CAP_S + 15, name


def test_probes_ask_what_the_processes_answer(objects):
    for name, pod in pods(objects):
        container = pod["spec"]["containers"][0]
        if container["name"] == "worker" and "follower" not in name:
            assert container["livenessProbe"]["grpc"]["service"] in ALIVE
            assert container["startupProbe"]["grpc"]["service"] in ALIVE
            assert container["readinessProbe"]["grpc"]["service"] == READY
            probe = container["startupProbe"]
            assert probe["periodSeconds"] * probe["failureThreshold"] == 1200
        elif container["name"] == "gateway":
            assert container["livenessProbe"]["httpGet"]["path"] == "/livez"
            assert container["readinessProbe"]["httpGet"]["path"] == "/readyz?every_model=false"
    ports = {p["name"] for _, pod in pods(objects) for p in pod["spec"]["containers"][0].get("ports", [])}
    assert ports == {"http", "metrics", "admin", "grpc", "bootstrap", "bootstrap-2"}


def matches(selector: dict, labels: dict) -> bool:
    return selector.items() <= labels.items()


def test_every_selector_finds_its_pods_and_no_others(objects):
    made = dict(pods(objects))
    labels = {name: pod["metadata"]["labels"] for name, pod in made.items()}

    def found(selector):
        return {name for name, have in labels.items() if matches(selector, have)}

    for deployment in of_kind(objects, "Deployment"):
        name = deployment["metadata"]["name"]
        assert found(deployment["spec"]["selector"]["matchLabels"]) == {name}
    for budget in of_kind(objects, "PodDisruptionBudget"):
        name = budget["metadata"]["name"]
        assert {n.partition(" ")[0] for n in found(budget["spec"]["selector"]["matchLabels"])} == {name}
    guarded = {b["metadata"]["name"] for b in of_kind(objects, "PodDisruptionBudget")}
    assert guarded == {n.partition(" ")[0] for n in made if "migrations" not in n}
    for service in of_kind(objects, "Service"):
        behind = found(service["spec"]["selector"])
        assert behind
        for name in behind:
            target = service["spec"]["ports"][0]["targetPort"]
            assert target in {p["name"] for p in made[name]["spec"]["containers"][0]["ports"]}


def test_prometheus_scrapes_every_process_under_the_name_that_the_alerts_know(objects):
    services = {s["metadata"]["name"]: s for s in of_kind(objects, "Service")}
    jobs = set()
    for monitor in of_kind(objects, "ServiceMonitor"):
        selector = monitor["spec"]["selector"]["matchLabels"]
        (service,) = [s for s in services.values() if matches(selector, s["metadata"]["labels"])]
        assert service["spec"]["ports"][0]["name"] == monitor["spec"]["endpoints"][0]["port"]
        jobs.add(service["metadata"]["labels"][monitor["spec"]["jobLabel"]])
    config = yaml.safe_load((REPOSITORY / "observability" / "prometheus.yml").read_text())
    assert jobs == {job["job_name"] for job in config["scrape_configs"]}


def test_alerts_and_dashboards_are_those_of_the_repository(objects):
    rules = {r["metadata"]["name"]: r["spec"] for r in of_kind(objects, "PrometheusRule")}
    for file in (REPOSITORY / "observability" / "rules").glob("*.yml"):
        assert rules[f"pdgate-{file.stem}"] == yaml.safe_load(file.read_text())
    boards = {k: v for m in of_kind(objects, "ConfigMap") for k, v in m["data"].items() if k.endswith(".json")}
    for file in (REPOSITORY / "observability" / "dashboards" / "json").glob("*.json"):
        assert boards.pop(file.name) == file.read_text()
    assert boards == {}


def peers(rules, direction):
    """Return who may, by component or pool, on which ports; an empty set of ports is every port."""
    allowed = {}
    for rule in rules:
        ports = frozenset(str(p["port"]) for p in rule.get("ports", []))
        for peer in rule.get(direction, []):
            labels = peer.get("podSelector", {}).get("matchLabels", {})
            who = labels.get("pdgate.dev/pool") or labels.get("app.kubernetes.io/component") or "outside"
            allowed.setdefault(who, set()).add(ports)
    return allowed


def test_network_policies_let_through_what_the_architecture_draws_and_no_more(objects):
    policies = {p["metadata"]["name"]: p["spec"] for p in of_kind(objects, "NetworkPolicy")}
    everybody = {name: pod["metadata"]["labels"] for name, pod in pods(objects) if "migrations" not in name}
    for name, labels in everybody.items():
        assert [p for p in policies.values() if matches(p["podSelector"]["matchLabels"], labels)], name
    assert all(set(p["policyTypes"]) == {"Ingress", "Egress"} for p in policies.values())
    worker = next(spec for name, spec in policies.items() if "workers" in name)
    pool = worker["podSelector"]["matchLabels"]["pdgate.dev/pool"]
    assert peers(worker["ingress"], "from") == {
        pool: {frozenset()},
        "gateway": {frozenset({"grpc"})},
        "scheduler": {frozenset({"grpc"})},
        "outside": {frozenset({"metrics"})},
    }
    assert peers(policies["pdgate-gateway"]["egress"], "to") == {
        "worker": {frozenset({"grpc"})},
        "billing": {frozenset({"admin"})},
    }
    assert set(peers(policies["pdgate-scheduler"]["ingress"], "from")) == {"outside"}


def test_migrations_run_before_anything_else_and_find_their_catalogue(objects):
    job = named(objects, "Job", "pdgate-migrations")
    catalog = named(objects, "ConfigMap", "pdgate-migrations")
    for found in (job, catalog):
        assert found["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    weights = [int(o["metadata"]["annotations"]["helm.sh/hook-weight"]) for o in (catalog, job)]
    assert weights == sorted(weights)
    assert len(set(weights)) == 2
    assert catalog["data"]["models.toml"].strip() == (REPOSITORY / "models.toml").read_text().strip()
    assert job["spec"]["template"]["spec"]["containers"][0]["command"] == ["pdgate", "init", "--no-keys"]


def test_the_catalogue_of_the_installation_takes_the_place_of_the_charts():
    catalog = 'currency = "USD"\n'
    objects = rendered({"catalog": catalog})
    for name in ("pdgate-catalog", "pdgate-migrations"):
        assert named(objects, "ConfigMap", name)["data"]["models.toml"] == catalog
    digest = "pdgate.dev/catalog"
    before, after = (
        {name: pod["metadata"].get("annotations", {}).get(digest) for name, pod in pods(o)}
        for o in (rendered(), objects)
    )
    assert all(before[name] != after[name] for name in before if "migrations" not in name)


def test_a_worker_on_several_machines_knows_its_rank_and_where_the_first_one_is(catalog):
    objects = rendered(EVERYTHING)
    group = named(objects, "LeaderWorkerSet", "pdgate-big-p")["spec"]
    assert (group["replicas"], group["leaderWorkerTemplate"]["size"]) == (2, 4)
    ranks = {}
    for name, pod in pods([named(objects, "LeaderWorkerSet", "pdgate-big-p")]):
        command = pod["spec"]["containers"][0]["command"]
        assert command[0] == "env"
        options = command[1].partition("=")[2]
        for variable, value in (("LWS_LEADER_ADDRESS", "big-p-0.big-p"), ("LWS_WORKER_INDEX", str(len(ranks)))):
            options = options.replace(f"$({variable})", value)
        settings = from_env(Worker, "WORKER_", told(pod, CLUSTER) | {"WORKER_ENGINE_OPTIONS": options})
        ranks[name] = sglang_options_of(settings, catalog).further
    assert list(ranks.values()) == [
        {"nnodes": 4, "node_rank": rank, "dist_init_addr": "big-p-0.big-p:20000"} for rank in (0, 1)
    ]
    follower = dict(pods(objects))["pdgate-big-p (follower)"]["spec"]["containers"][0]
    assert not {"livenessProbe", "readinessProbe", "startupProbe"} & set(follower)  # it answers only its leader


def test_pools_of_the_fleet_are_templates_and_zones_bind_machines_and_setting():
    objects = rendered(EVERYTHING)
    template = named(objects, "Deployment", "pdgate-big-d")
    assert template["spec"]["replicas"] == 0
    assert template["metadata"]["labels"][TEMPLATE] == template["spec"]["selector"]["matchLabels"][TEMPLATE] == "true"
    assert template["metadata"]["annotations"] == {MAX_WORKERS: "24", PER_HOUR: "2500000000"}
    assert named(objects, "Deployment", "pdgate-tiny-u")["spec"]["replicas"] == 0
    leader = dict(pods(objects))["pdgate-big-p (leader)"]
    assert leader["spec"]["nodeSelector"] == {"topology.kubernetes.io/zone": "a"}
    assert told(leader, CLUSTER)["WORKER_ZONE"] == "a"
    assert leader["metadata"]["labels"]["pdgate.dev/zone"] == "a"


def test_the_fleets_agent_alone_may_ask_the_api_server_and_only_for_what_it_calls():
    assert of_kind(rendered(), "Role", "ServiceAccount") == []
    objects = rendered(EVERYTHING)
    scheduler, agent = dict(pods(objects))["pdgate-scheduler"]["spec"]["containers"]
    mounts = {c["name"]: {m["name"] for m in c["volumeMounts"]} for c in (scheduler, agent)}
    assert mounts["fleet"] == {"fleet", "token"}
    assert "token" not in mounts["scheduler"]
    assert agent["command"][-1] == "scheduler.fleet.kubernetes_agent"
    values = {v["name"]: v.get("value", "llm") for v in agent["env"]}
    settings = from_env(Agent, "KUBEFLEET_", values)
    assert (str(settings.socket), settings.release) == ("/run/pdgate/fleet/socket", "pdgate")
    told_to_scheduler = from_env(Scheduler, "SCHEDULER_", told({"spec": {"containers": [scheduler]}}, CLUSTER))
    assert (told_to_scheduler.fleet, told_to_scheduler.fleet_address) == ("kubernetes", str(settings.socket))
    assert isinstance(fleet_of(told_to_scheduler.fleet, told_to_scheduler.fleet_address), AgentFleet)
    (role,) = of_kind(objects, "Role")
    allowed = {(group, what, verb) for rule in role["rules"] for group in rule["apiGroups"]
               for what in rule["resources"] for verb in rule["verbs"]}  # fmt: skip
    assert allowed == {
        *(("apps", "deployments", verb) for verb in ("list", "create", "delete")),
        *(("leaderworkerset.x-k8s.io", "leaderworkersets", verb) for verb in ("list", "create", "delete")),
        *(("", "pods", verb) for verb in ("list", "delete")),
        ("", "pods/log", "get"),
    }


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"gatway": {}}, "gatway"),
        ({"workers": [{"name": "x", "pool": "p", "role": "prefil", "replicas": 1, "modelPath": "m"}]}, "role"),
        ({"workers": [{"name": "x", "pool": "p", "role": "decode", "modelPath": "m"}]}, "replicas"),
        ({"gateway": {"preStopSeconds": 0}}, "preStopSeconds"),
        ({"models": {"volume": {"emptyDir": {}, "hostPath": {"path": "/m"}}}}, "volume"),
    ],
)
def test_values_that_cannot_be_meant_are_refused_by_name(values, message):
    with pytest.raises(helm_python.HelmError, match=message):
        rendered(values)


def test_release_names_lead_every_objects_name():
    for found in rendered(name="eu"):
        assert re.match(r"eu-pdgate(-|$)", found["metadata"]["name"]), found["metadata"]["name"]


async def test_init_without_keys_migrates_reads_prices_and_makes_nobody(database_url, redis_url, tmp_path, monkeypatch):
    for name, value in {
        "DATABASE_URL": database_url,
        "PDGATE_CATALOG": str(REPOSITORY / "models.toml"),
        "PDGATE_DATA": str(tmp_path / "data"),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("REDIS_URL", raising=False)
    for _ in range(2):
        result = await asyncio.to_thread(CliRunner().invoke, app, ["init", "--no-keys"])
        assert result.exit_code == 0, result.output
    connection = await asyncpg.connect(database_url)
    try:
        assert await connection.fetchval("SELECT count(*) FROM billing.price") == 1
        assert await connection.fetchval("SELECT count(*) FROM tenancy.organisation") == 0
    finally:
        await connection.close()
    assert not (tmp_path / "data").exists()


def test_the_schema_of_values_knows_every_value_that_there_is():
    schema = json.loads((FOLDER / "values.schema.json").read_text())
    values = yaml.safe_load((FOLDER / "values.yaml").read_text())
    assert set(values) <= set(schema["properties"])
    for key, part in values.items():
        known = schema["properties"][key].get("properties")
        if isinstance(part, dict) and known:
            assert set(part) == set(known), key
