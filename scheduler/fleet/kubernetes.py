"""The fleet of a Kubernetes namespace: one Deployment, or LeaderWorkerSet, for each worker.

The chart's worker pools that are `managed` stand at zero replicas: they are templates, one for each pool, role and
zone.

1. `start` copies the template that fits under the worker's own name, with one replica and the worker's id. The labels
   of the copy say what was asked, so the namespace itself is the list of workers.
2. Kubernetes keeps it running: a process that ends is started again by the kubelet, a pod whose machine is lost is made
   anew elsewhere by its controller.
3. `stop` deletes the copy in the foreground: it is listed, STOPPING, until its pods are gone. They get the grace that
   was asked, in place of the template's own.

Room is what the template allows, and none in a zone where a pod of the pool waits for a machine already. The machines'
own room is not looked at: with a cluster autoscaler it is no bound.
"""

import asyncio
import math
import re
from collections import OrderedDict
from collections.abc import Awaitable, Mapping, Sequence
from importlib import import_module
from typing import Any, Final, TypeVar

import msgspec
import structlog

from contracts.units import Nano
from scheduler.fleet.kubernetes_objects import (
    KINDS,
    PER_HOUR,
    POOL,
    ROLE,
    TEMPLATE,
    WORKER,
    ZONE,
    Found,
    Manifest,
    Worker,
    copy_of,
    instance_of,
    is_label,
    outdated,
    room,
)
from scheduler.fleet.protocol import (
    Capacity,
    FleetError,
    FleetUnreachable,
    Instance,
    InstanceState,
    NoRoom,
    Price,
    WorkerSpec,
)

log = structlog.get_logger()

_CALL_S: Final = 4.5  # below the agent's, so that the caller hears why
_REQUEST_S: Final = 4.0
_LAST_WORDS: Final = 500
_LINES: Final = 2_000
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?")
_NOT_FOUND, _CONFLICT = 404, 409

T = TypeVar("T")


class KubernetesFleet:
    """Workers in one namespace, copied from the templates of one release of the chart."""

    def __init__(self, api: Any, *, namespace: str, release: str) -> None:
        """`api`: a kubernetes.aio.client.ApiClient. `release`: the chart's, by `app.kubernetes.io/instance`."""
        client = import_module("kubernetes.aio.client")  # not in the base environment
        self._api = api
        self._errors = (client.ApiException, OSError)
        self._objects: Any = client.CustomObjectsApi(api)  # its paths are those of every group, `apps` too
        self._core: Any = client.CoreV1Api(api)
        self._namespace = namespace
        self._release = f"app.kubernetes.io/instance={release}"
        self._last_words: OrderedDict[str, str] = OrderedDict()

    async def start(self, spec: WorkerSpec) -> Instance:
        """See Fleet."""
        return await self._call(self._start(spec), f"start {spec.worker_id!r}")

    async def stop(self, worker_id: str, *, grace_s: float) -> None:
        """See Fleet."""
        await self._call(self._stop(worker_id, math.ceil(grace_s)), f"stop {worker_id!r}")

    async def list(self, pool: str) -> Sequence[Instance]:
        """See Fleet."""
        workers = await self._call(self._workers(pool), f"list {pool!r}")
        templates = await self._call(self._find(f"{TEMPLATE}=true,{POOL}={pool}"), f"list {pool!r}") if workers else ()
        return [
            msgspec.structs.replace(one.instance, outdated=outdated(one.found, templates)) for one in workers.values()
        ]

    async def capacity(self, pool: str) -> Capacity:
        """See Fleet."""
        templates = await self._call(self._templates(pool), f"tell the room of {pool!r}")
        workers = await self._call(self._workers(pool), f"list {pool!r}")
        return Capacity(free=room(templates, workers, spot=False), free_spot=room(templates, workers, spot=True))

    async def price(self, pool: str) -> Price:
        """See Fleet. Of templates that differ the dearest counts."""
        prices: dict[bool, int] = {}
        for one in await self._call(self._templates(pool), f"tell the price of {pool!r}"):
            prices[one.is_spot] = max(prices.get(one.is_spot, 0), int(one.note(PER_HOUR) or 0))
        spot = prices.get(True)
        return Price(per_hour=Nano(prices.get(False, spot or 0)), spot_per_hour=None if spot is None else Nano(spot))

    async def logs(self, worker_id: str, *, max_bytes: int) -> str:
        """See Fleet. Of a worker that has ended only the agent that stopped it knows; Kubernetes keeps nothing."""
        return await self._call(self._logs(worker_id, max_bytes), f"tell the output of {worker_id!r}")

    async def _call(self, work: Awaitable[T], what: str) -> T:
        try:
            async with asyncio.timeout(_CALL_S):
                return await work
        except TimeoutError:
            raise FleetUnreachable(f"Kubernetes did not {what} within {_CALL_S} s") from None
        except self._errors as error:
            if _status(error) == _CONFLICT:
                raise FleetError(f"cannot {what}: an object of that name is there, and is no worker") from error
            raise FleetUnreachable(f"Kubernetes could not {what}: {_short(error)}") from error

    # -- what is done ----------------------------------------------------------------------------------

    async def _start(self, spec: WorkerSpec) -> Instance:
        if not _NAME.fullmatch(spec.worker_id):
            raise FleetError(f"{spec.worker_id!r} is no name of an object: lower case, digits and '-', at most 52")
        templates = await self._templates(spec.pool)
        zones = {one.label(ZONE) for one in templates}
        if spec.zone and spec.zone not in zones:
            raise FleetError(
                f"no zone {spec.zone!r} for pool {spec.pool!r}; there are {', '.join(sorted(zones)) or 'none'}"
            )
        fitting = [
            one
            for one in templates
            if one.label(ROLE) == spec.role and one.is_spot == spec.spot and spec.zone in ("", one.label(ZONE))
        ]
        if not fitting:
            raise FleetError(f"no template for {spec.role} workers of pool {spec.pool!r} (spot: {spec.spot})")
        workers = await self._workers(spec.pool)
        if (there := workers.get(spec.worker_id)) is not None:
            if there.instance.state is InstanceState.STOPPING:
                raise FleetError(f"worker {spec.worker_id!r} is still stopping")
            return there.instance
        free = room(templates, workers, spot=spec.spot)
        template = max(fitting, key=lambda one: free.get(one.label(ZONE), 0))
        if free.get(template.label(ZONE), 0) < 1:
            raise NoRoom(f"no room for worker {spec.worker_id!r} of pool {spec.pool!r} in {spec.zone or 'any zone'}")
        made = await self._objects.create_namespaced_custom_object(
            *self._place(template), copy_of(template.manifest, spec), _request_timeout=_REQUEST_S
        )
        log.info("worker_created", worker_id=spec.worker_id, kind=template.kind.plural, template=template.name)
        return instance_of(Found(template.kind, made), [])

    async def _stop(self, worker_id: str, seconds: int) -> None:
        if not is_label(worker_id):
            return
        for one in await self._find(f"{WORKER}={worker_id}"):
            await self._keep_last_words(worker_id)
            await self._unless_gone(
                self._objects.delete_namespaced_custom_object(
                    *self._place(one), one.name, propagation_policy="Foreground", _request_timeout=_REQUEST_S
                )
            )
            for pod in await self._pods(f"{WORKER}={worker_id}"):
                left = pod["metadata"].get("deletionGracePeriodSeconds")
                if left is None or left > seconds:  # only ever sooner
                    await self._unless_gone(
                        self._core.delete_namespaced_pod(
                            pod["metadata"]["name"],
                            self._namespace,
                            grace_period_seconds=seconds,
                            _request_timeout=_REQUEST_S,
                        )
                    )
            log.info("worker_asked_to_stop", worker_id=worker_id, grace_s=seconds)

    async def _logs(self, worker_id: str, max_bytes: int) -> str:
        if not is_label(worker_id):
            raise FleetError(f"{worker_id!r} is no worker's name")
        await self._keep_last_words(worker_id)
        text = self._last_words.get(worker_id)
        if text is not None:
            return text.encode()[-max_bytes:].decode(errors="replace")
        if await self._find(f"{WORKER}={worker_id}"):
            return ""
        raise FleetError(f"nothing is known of worker {worker_id!r}")

    async def _keep_last_words(self, worker_id: str) -> None:
        """Read the output of a worker's first pod, which is the leader of several; without one keep what there was."""
        pods = await self._pods(f"{WORKER}={worker_id}")
        for pod in sorted(pods, key=lambda pod: str(pod["metadata"]["name"]))[:1]:
            try:
                text: str = await self._core.read_namespaced_pod_log(
                    pod["metadata"]["name"], self._namespace, tail_lines=_LINES, _request_timeout=_REQUEST_S
                )
            except self._errors as error:
                log.debug("no_output", worker_id=worker_id, error=_short(error))  # it has not begun
                return
            self._last_words[worker_id] = text
            self._last_words.move_to_end(worker_id)
            while len(self._last_words) > _LAST_WORDS:
                self._last_words.popitem(last=False)

    # -- what is there ---------------------------------------------------------------------------------

    async def _templates(self, pool: str) -> Sequence[Found]:
        found = await self._find(f"{TEMPLATE}=true,{POOL}={pool}") if is_label(pool) else ()
        if not found:
            raise FleetError(f"no pool {pool!r} here: no template has the label {POOL}={pool}")
        return found

    async def _workers(self, pool: str) -> dict[str, Worker]:
        selector = f"{WORKER},{POOL}={pool}"
        objects = await self._find(selector) if is_label(pool) else ()
        pods: dict[str, list[Manifest]] = {}
        for pod in await self._pods(selector) if objects else ():
            pods.setdefault(pod["metadata"]["labels"][WORKER], []).append(pod)
        return {one.label(WORKER): Worker(one, instance_of(one, pods.get(one.label(WORKER), []))) for one in objects}

    async def _find(self, selector: str) -> Sequence[Found]:
        found: list[Found] = []
        for kind in KINDS:
            try:
                answer: Mapping[str, Any] = await self._objects.list_namespaced_custom_object(
                    kind.group,
                    kind.version,
                    self._namespace,
                    kind.plural,
                    label_selector=f"{self._release},{selector}",
                    _request_timeout=_REQUEST_S,
                )
            except self._errors as error:
                if _status(error) != _NOT_FOUND:
                    raise
                continue  # the cluster has no such kind
            found += [Found(kind, manifest) for manifest in answer["items"]]
        return found

    async def _pods(self, selector: str) -> Sequence[Manifest]:
        answer = await self._core.list_namespaced_pod(
            self._namespace, label_selector=f"{self._release},{selector}", _request_timeout=_REQUEST_S
        )
        return [self._api.sanitize_for_serialization(pod) for pod in answer.items]  # as Kubernetes writes it

    def _place(self, one: Found) -> tuple[str, str, str, str]:
        return one.kind.group, one.kind.version, self._namespace, one.kind.plural

    async def _unless_gone(self, deletion: Awaitable[Any]) -> None:
        try:
            await deletion
        except self._errors as error:
            if _status(error) != _NOT_FOUND:
                raise


def _status(error: BaseException) -> int | None:
    return getattr(error, "status", None)


def _short(error: BaseException) -> str:
    return f"{_status(error)} {getattr(error, 'reason', '')}" if _status(error) else f"{type(error).__name__}: {error}"
