"""The chart as Helm renders it, and the parts of custom resources that it uses, as their definitions have them."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Literal

import helm_python
import msgspec
import yaml

from tests.processes import REPOSITORY

FOLDER = REPOSITORY / "deploy" / "helm" / "pdgate"
Manifest = dict[str, Any]


def rendered(values: Mapping[str, Any] | None = None, *, name: str = "pdgate") -> list[Manifest]:
    """Return every object that `helm install` would send, hooks among them; nobody changes them."""
    return _rendered(json.dumps(values or {}), name)


@cache
def _rendered(values: str, name: str) -> list[Manifest]:
    with helm_python.Chart.load(FOLDER) as chart:
        files = chart.render(json.loads(values), name=name, namespace="llm")
    objects = []
    for path in sorted(files):
        if path.endswith(".yaml"):
            objects += [found for found in yaml.safe_load_all(files[path]) if found]
    return objects


def of_kind(objects: Sequence[Manifest], *kinds: str) -> list[Manifest]:
    return [found for found in objects if found["kind"] in kinds]


def named(objects: Sequence[Manifest], kind: str, name: str) -> Manifest:
    (found,) = [o for o in objects if o["kind"] == kind and o["metadata"]["name"] == name]
    return found


def pods(objects: Sequence[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Give every pod template and the name of what makes it."""
    for found in objects:
        name, spec = found["metadata"]["name"], found.get("spec", {})
        if found["kind"] in {"Deployment", "Job"}:
            yield name, spec["template"]
        elif found["kind"] == "LeaderWorkerSet":
            group = spec["leaderWorkerTemplate"]
            yield f"{name} (leader)", group["leaderTemplate"]
            yield f"{name} (follower)", group["workerTemplate"]


def told(pod: Manifest, values: Mapping[str, str]) -> dict[str, str]:
    """Return a container's environment as Kubernetes makes it: fields, secrets and `$(NAME)` filled in."""
    container = pod["spec"]["containers"][0]
    environment: dict[str, str] = {}
    for variable in container["env"]:
        source = variable.get("valueFrom")
        if source is None:
            value = re.sub(r"\$\((\w+)\)", lambda name: environment[name[1]], variable["value"])
        elif "fieldRef" in source:
            value = values[source["fieldRef"]["fieldPath"]]
        else:
            value = values[source["secretKeyRef"]["key"]]
        environment[variable["name"]] = value
    return environment


# -- custom resources ----------------------------------------------------------------------------------------------
# No package ships their definitions, so what the chart uses of them is written down here, and nothing else passes.


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Metadata(_Strict):
    name: str
    labels: dict[str, str]
    annotations: dict[str, str] = {}


class ParentRef(_Strict):
    name: str
    namespace: str | None = None
    sectionName: str | None = None  # noqa: N815


class Path(_Strict):
    type: Literal["Exact", "PathPrefix", "RegularExpression"]
    value: str


class Match(_Strict):
    path: Path


class Timeouts(_Strict):
    request: str
    backendRequest: str  # noqa: N815


class Backend(_Strict):
    name: str
    port: int


class RouteRule(_Strict):
    matches: list[Match]
    timeouts: Timeouts
    backendRefs: list[Backend]  # noqa: N815


class RouteSpec(_Strict):
    parentRefs: list[ParentRef]  # noqa: N815
    rules: list[RouteRule]
    hostnames: list[str] = []


class HttpRoute(_Strict):
    """gateway.networking.k8s.io/v1, of the standard channel since 1.2."""

    apiVersion: Literal["gateway.networking.k8s.io/v1"]  # noqa: N815
    kind: Literal["HTTPRoute"]
    metadata: Metadata
    spec: RouteSpec


class Labels(_Strict):
    matchLabels: dict[str, str]  # noqa: N815


class Endpoint(_Strict):
    port: str
    path: str
    interval: str


class MonitorSpec(_Strict):
    jobLabel: str  # noqa: N815
    selector: Labels
    endpoints: list[Endpoint]


class ServiceMonitor(_Strict):
    apiVersion: Literal["monitoring.coreos.com/v1"]  # noqa: N815
    kind: Literal["ServiceMonitor"]
    metadata: Metadata
    spec: MonitorSpec


class Rule(_Strict):
    expr: str
    alert: str = ""
    record: str = ""
    for_: str = msgspec.field(default="", name="for")
    keep_firing_for: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class RuleGroup(_Strict):
    name: str
    rules: list[Rule]
    interval: str = ""


class RuleSpec(_Strict):
    groups: list[RuleGroup]


class PrometheusRule(_Strict):
    apiVersion: Literal["monitoring.coreos.com/v1"]  # noqa: N815
    kind: Literal["PrometheusRule"]
    metadata: Metadata
    spec: RuleSpec


class GroupRollout(_Strict):
    maxUnavailable: int  # noqa: N815
    maxSurge: int  # noqa: N815


class GroupStrategy(_Strict):
    type: Literal["RollingUpdate"]
    rollingUpdateConfiguration: GroupRollout  # noqa: N815


class Group(_Strict):
    size: int
    restartPolicy: Literal["RecreateGroupOnPodRestart", "None"]  # noqa: N815
    leaderTemplate: Manifest  # noqa: N815
    workerTemplate: Manifest  # noqa: N815


class GroupSpec(_Strict):
    rolloutStrategy: GroupStrategy  # noqa: N815
    leaderWorkerTemplate: Group  # noqa: N815
    replicas: int = 1


class LeaderWorkerSet(_Strict):
    apiVersion: Literal["leaderworkerset.x-k8s.io/v1"]  # noqa: N815
    kind: Literal["LeaderWorkerSet"]
    metadata: Metadata
    spec: GroupSpec


CUSTOM = {
    "HTTPRoute": HttpRoute,
    "ServiceMonitor": ServiceMonitor,
    "PrometheusRule": PrometheusRule,
    "LeaderWorkerSet": LeaderWorkerSet,
}
