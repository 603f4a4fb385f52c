"""Objects of Kubernetes that are workers: what their labels say, how they are, and the copy that makes one. Pure.

A worker is a Deployment, or a LeaderWorkerSet when it takes several machines.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from datetime import datetime
from typing import Any, Final

import msgspec

from contracts.lifecycle import Role
from scheduler.fleet.protocol import Instance, InstanceState, WorkerSpec

Manifest = Mapping[str, Any]

TEMPLATE: Final = "pdgate.dev/template"
"""Label, "true" on what is only copied."""
WORKER: Final = "pdgate.dev/worker"
POOL: Final = "pdgate.dev/pool"
ROLE: Final = "pdgate.dev/role"
ZONE: Final = "pdgate.dev/zone"
SPOT: Final = "pdgate.dev/spot"
MAX_WORKERS: Final = "pdgate.dev/max-workers"
"""Annotation of templates: workers of the pool in the zone."""
PER_HOUR: Final = "pdgate.dev/per-hour-nano"
LAUNCH: Final = "pdgate.dev/launch"
"""Annotation of copies: digest of the template's pods as they were."""
_DOWN: Final = frozenset(
    {"CrashLoopBackOff", "ErrImagePull", "ImagePullBackOff", "InvalidImageName", "RunContainerError"}
)


class Kind(msgspec.Struct, frozen=True):
    """A kind of object that runs workers, as its path has it."""

    group: str
    version: str
    plural: str


KINDS: Final = (Kind("apps", "v1", "deployments"), Kind("leaderworkerset.x-k8s.io", "v1", "leaderworkersets"))


class Found(msgspec.Struct, frozen=True):
    """One object of the namespace."""

    kind: Kind
    manifest: Manifest

    @property
    def name(self) -> str:
        """Its name in the namespace."""
        return str(self.manifest["metadata"]["name"])

    @property
    def is_spot(self) -> bool:
        """Whether it is on capacity that may be taken away."""
        return self.label(SPOT) == "true"

    @property
    def going(self) -> bool:
        """Whether it was deleted and waits for its pods."""
        return self.manifest["metadata"].get("deletionTimestamp") is not None

    def label(self, name: str) -> str:
        """Return a label; empty without it."""
        return str((self.manifest["metadata"].get("labels") or {}).get(name, ""))

    def note(self, name: str) -> str:
        """Return an annotation; empty without it."""
        return str((self.manifest["metadata"].get("annotations") or {}).get(name, ""))


class Worker(msgspec.Struct, frozen=True):
    """One worker: its object, and how its pods are."""

    found: Found
    instance: Instance


def is_label(value: str) -> bool:
    """Return whether Kubernetes takes a text as a label's value."""
    return bool(re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", value))


def room(templates: Sequence[Found], workers: Mapping[str, Worker], *, spot: bool) -> dict[str, int]:
    """Return by zone how many more workers the templates allow; none where one waits for a machine."""
    most: dict[str, int] = {}
    for one in templates:
        if one.is_spot == spot:
            zone = one.label(ZONE)
            most[zone] = max(most.get(zone, 0), int(one.note(MAX_WORKERS) or 0))
    for worker in workers.values():
        zone = worker.found.label(ZONE)
        if zone in most and worker.found.is_spot == spot:
            most[zone] = 0 if worker.instance.message.startswith("Unschedulable") else max(0, most[zone] - 1)
    return most


def digest_of(template: Manifest) -> str:
    """Return what is equal for templates whose pods are equal."""
    pods = [pod["spec"] for pod in _pod_templates(template)]
    return hashlib.sha256(msgspec.json.encode(pods, order="sorted")).hexdigest()[:12]


def outdated(worker: Found, templates: Sequence[Found]) -> bool:
    """Whether the templates from which a worker could be copied now are all other than the one that it is a copy of."""
    same = [
        one
        for one in templates
        if one.kind == worker.kind
        and one.label(ROLE) == worker.label(ROLE)
        and one.label(ZONE) == worker.label(ZONE)
        and one.is_spot == worker.is_spot
    ]
    launch = worker.note(LAUNCH)
    return bool(launch and same) and all(digest_of(one.manifest) != launch for one in same)


def copy_of(template: Manifest, spec: WorkerSpec) -> dict[str, Any]:
    """Return the object of one worker: its template with one replica, its own labels and its id, owned by it."""
    body = deepcopy(dict(template))
    body.pop("status", None)
    meta = body["metadata"]
    labels = {**meta.get("labels", {}), WORKER: spec.worker_id}
    labels.pop(TEMPLATE, None)
    body["metadata"] = {
        "name": spec.worker_id,
        "namespace": meta.get("namespace"),
        "labels": labels,
        "annotations": {LAUNCH: digest_of(template)},
    }
    if "uid" in meta:  # without the template, and so without the release, there are no workers
        owner = {"apiVersion": body["apiVersion"], "kind": body["kind"], "name": meta["name"], "uid": meta["uid"]}
        body["metadata"]["ownerReferences"] = [owner]
    body["spec"]["replicas"] = 1
    selector = body["spec"].get("selector")  # of a Deployment; a LeaderWorkerSet makes its own
    if selector is not None:
        selector["matchLabels"].pop(TEMPLATE, None)
        selector["matchLabels"][WORKER] = spec.worker_id
    for pod in _pod_templates(body):
        own = pod["metadata"]["labels"]
        own.pop(TEMPLATE, None)
        own[WORKER] = spec.worker_id
        for container in pod["spec"]["containers"]:
            for variable in container.get("env", []):
                if variable["name"] == "WORKER_ID":
                    variable.pop("valueFrom", None)
                    variable["value"] = spec.worker_id
    return body


def _pod_templates(body: Manifest) -> list[dict[str, Any]]:
    spec = body["spec"]
    group = spec.get("leaderWorkerTemplate")
    if group is None:
        return [spec["template"]]
    return [group[name] for name in ("leaderTemplate", "workerTemplate") if name in group]


def instance_of(one: Found, pods: Sequence[Manifest]) -> Instance:
    """Return how a worker is, by its pods: all of them, for a worker on several machines."""
    spec = WorkerSpec(
        worker_id=one.label(WORKER),
        pool=one.label(POOL),
        role=Role(one.label(ROLE)),
        zone=one.label(ZONE),
        spot=one.is_spot,
    )
    seen = [_seen(pod) for pod in pods]
    order = (InstanceState.FAILED, InstanceState.PLACING, InstanceState.RUNNING)
    worst = min(
        seen, key=lambda pod: order.index(pod.state), default=_Seen(InstanceState.PLACING, message="no pod yet")
    )
    state = InstanceState.STOPPING if one.going else worst.state
    reclaimed = [pod.going_unix_ms for pod in seen if pod.going_unix_ms is not None]
    leader = seen[0] if seen else worst
    return Instance(
        spec=spec,
        state=state,
        zone=one.label(ZONE),
        node=leader.node,
        asked_unix_ms=_unix_ms(one.manifest["metadata"].get("creationTimestamp")) or 0,
        running_unix_ms=worst.running_unix_ms if state is InstanceState.RUNNING else None,
        restarts=sum(pod.restarts for pod in seen),
        reclaimed_unix_ms=min(reclaimed) if reclaimed and not one.going else None,
        message="" if state is InstanceState.RUNNING else worst.message,
    )


class _Seen(msgspec.Struct, frozen=True):
    """One pod."""

    state: InstanceState
    node: str = ""
    running_unix_ms: int | None = None
    restarts: int = 0
    going_unix_ms: int | None = None
    """When it will be gone: somebody else evicts it, a reclaimed machine for instance."""
    message: str = ""


def _seen(pod: Manifest) -> _Seen:
    status, node = pod.get("status") or {}, (pod.get("spec") or {}).get("nodeName") or ""
    going = _unix_ms(pod["metadata"].get("deletionTimestamp"))
    containers = status.get("containerStatuses") or []
    restarts = sum(container.get("restartCount", 0) for container in containers)
    for container in containers:
        how = container.get("state") or {}
        if running := how.get("running"):
            return _Seen(InstanceState.RUNNING, node, _unix_ms(running.get("startedAt")), restarts, going)
        waiting = how.get("waiting") or {}
        reason = waiting.get("reason") or "Waiting"
        state = InstanceState.FAILED if reason in _DOWN else InstanceState.PLACING
        return _Seen(state, node, None, restarts, going, f"{reason}: {waiting.get('message') or 'no more is said'}")
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            message = f"{condition.get('reason')}: {condition.get('message') or 'no more is said'}"
            return _Seen(InstanceState.PLACING, node, None, restarts, going, message)
    return _Seen(InstanceState.PLACING, node, None, restarts, going, "its container is not there yet")


def _unix_ms(at: Any) -> int | None:
    """Return Kubernetes' time, RFC 3339 or parsed already."""
    if at is None:
        return None
    moment = at if isinstance(at, datetime) else datetime.fromisoformat(str(at))
    return int(moment.timestamp() * 1000)
