"""The few REST verbs of Kubernetes that the fleet uses, in memory, and what its controllers would do: processes here.

It is no Kubernetes. What is real: the official client's HTTP, the schemas that objects are checked against, the chart's
own templates, and the workers' processes. What is played: the controllers, the scheduler of pods, the kubelet.
"""

import asyncio
import contextlib
import itertools
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import kubernetes_validate
import msgspec
from aiohttp import web

from tests.deploy.helm_chart import LeaderWorkerSet, told

NAMESPACE = "llm"
SECRETS = {"redis-url": "redis://r", "peer-token": "t"}
Manifest = dict[str, Any]


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def selects(selector: str, labels: dict[str, str]) -> bool:
    for term in filter(None, selector.split(",")):
        name, differs, value = term.partition("!=")
        if differs:
            if labels.get(name) == value:
                return False
            continue
        name, equals, value = term.partition("=")
        if name not in labels or (equals and labels[name] != value):
            return False
    return True


class Pod:
    """A pod, and the process in its container."""

    def __init__(self, name: str, template: Manifest, *, node: str, log: Path) -> None:
        self.name = name
        self.labels = template["metadata"]["labels"]
        self.template = template
        self.node = node
        self.log = log
        self.restarts = 0
        self.state: Manifest = {"waiting": {"reason": "ContainerCreating"}}
        self.process: asyncio.subprocess.Process | None = None
        self.deleted_at: str | None = None
        self.grace_s: float = template["spec"].get("terminationGracePeriodSeconds", 30)
        self.ending = asyncio.Event()
        self.hurry = asyncio.Event()

    def manifest(self) -> Manifest:
        meta: Manifest = {"name": self.name, "namespace": NAMESPACE, "labels": self.labels}
        if self.deleted_at:
            meta |= {"deletionTimestamp": self.deleted_at, "deletionGracePeriodSeconds": int(self.grace_s)}
        status: Manifest = {"phase": "Running" if "running" in self.state else "Pending"}
        if self.node:
            container = {"name": "worker", "image": "i", "imageID": "i", "ready": True}
            status["containerStatuses"] = [{**container, "restartCount": self.restarts, "state": self.state}]
        else:
            no_room = {"reason": "Unschedulable", "message": "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."}
            status["conditions"] = [{"type": "PodScheduled", "status": "False", **no_room}]
        spec = {"containers": [{"name": "worker", "image": "i"}], "nodeName": self.node or None}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec, "status": status}

    def delete(self, grace_s: float | None) -> None:
        if grace_s is not None:
            self.grace_s = min(grace_s, self.grace_s)
        self.deleted_at = self.deleted_at or now()
        self.ending.set()
        self.hurry.set()

    async def run(self) -> None:
        """What a kubelet does: start it, start it again ever more slowly, end it when it is deleted."""
        pause_s, shorts = 0.1, 0
        while not self.ending.is_set() and self.node:
            (container,) = self.template["spec"]["containers"]
            values = {**SECRETS, "metadata.name": self.name, "spec.nodeName": self.node, "status.podIP": "127.0.0.1"}
            environment = {"PATH": os.environ["PATH"], **told(self.template, values)}
            with self.log.open("ab") as output:
                self.process = await asyncio.create_subprocess_exec(
                    *container["command"], env=environment, stdout=output, stderr=output
                )
            began = asyncio.get_running_loop().time()
            self.state = {"running": {"startedAt": now()}}
            async with asyncio.TaskGroup() as tasks:
                ending = tasks.create_task(self._end())
                await self.process.wait()
                ending.cancel()
            if self.ending.is_set():
                break
            self.restarts += 1
            shorts = shorts + 1 if asyncio.get_running_loop().time() - began < 5 else 0
            reason = "CrashLoopBackOff" if shorts > 1 else "Waiting"
            self.state = {"waiting": {"reason": reason, "message": f"back-off {pause_s} s restarting failed container"}}
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self.ending.wait()
            pause_s = min(5.0, pause_s * 3)
        await self.ending.wait()

    async def _end(self) -> None:
        await self.ending.wait()
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        began = asyncio.get_running_loop().time()
        while (left_s := self.grace_s - (asyncio.get_running_loop().time() - began)) > 0:
            self.hurry.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self.hurry.wait()
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()


class InMemoryKubernetes:
    """The server. `full` names zones where no pod finds a machine."""

    def __init__(self, tasks: asyncio.TaskGroup, folder: Path, *, with_groups: bool = True) -> None:
        self._tasks = tasks
        self._folder = folder
        self._with_groups = with_groups
        self._numbers = itertools.count(1)
        self.objects: dict[tuple[str, str], Manifest] = {}
        self.pods: dict[str, Pod] = {}
        self.full: set[str] = set()
        self.down = False
        self.port = 0

    # -- the verbs -----------------------------------------------------------------------------------

    async def serve(self, request: web.Request) -> web.Response:
        if self.down:
            return self._failure(503, "etcd is away")
        path = request.path
        if pods := re.fullmatch(rf"/api/v1/namespaces/{NAMESPACE}/pods(?:/([^/]+)(/log)?)?", path):
            return await self._pods(request, pods[1], log=bool(pods[2]))
        group = re.fullmatch(
            rf"/apis/(apps|leaderworkerset\.x-k8s\.io)/v1/namespaces/{NAMESPACE}/(\w+)(?:/([^/]+))?", path
        )
        if group is None or (group[1] != "apps" and not self._with_groups):
            return self._failure(404, "the server could not find the requested resource")
        return await self._workloads(request, group[2], group[3])

    async def _workloads(self, request: web.Request, plural: str, name: str | None) -> web.Response:
        selector = request.query.get("labelSelector", "")
        if request.method == "GET":
            items = [
                o
                for (kind, _), o in self.objects.items()
                if kind == plural and selects(selector, o["metadata"]["labels"])
            ]
            return web.json_response({"apiVersion": "v1", "kind": "List", "metadata": {}, "items": items})
        if request.method == "POST":
            body = await request.json()
            if (plural, body["metadata"]["name"]) in self.objects:
                return self._failure(409, "already exists")
            try:
                self.create(plural, body)
            except (kubernetes_validate.ValidationError, msgspec.ValidationError) as error:
                return self._failure(422, str(error))
            return web.json_response(body, status=201)
        assert request.method == "DELETE"
        found = self.objects.get((plural, name or ""))
        if found is None:
            return self._failure(404, "not found")
        options = await request.json() if request.can_read_body else {}
        policy = request.query.get("propagationPolicy") or options.get("propagationPolicy")
        assert policy == "Foreground", "otherwise it would be gone before its pods"
        found["metadata"].setdefault("deletionTimestamp", now())
        for pod in self._pods_of(found):
            pod.delete(None)
        return web.json_response(found)

    async def _pods(self, request: web.Request, name: str | None, *, log: bool) -> web.Response:
        if name is None:
            selector = request.query.get("labelSelector", "")
            items = [pod.manifest() for pod in self.pods.values() if selects(selector, pod.labels)]
            return web.json_response({"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": items})
        pod = self.pods.get(name)
        if pod is None:
            return self._failure(404, "not found")
        if log:
            if pod.process is None:
                return self._failure(400, "container is waiting to start")
            lines = pod.log.read_text().splitlines(keepends=True)
            return web.Response(text="".join(lines[-int(request.query["tailLines"]) :]))
        assert request.method == "DELETE"
        pod.delete(float(request.query["gracePeriodSeconds"]))
        return web.json_response(pod.manifest())

    @staticmethod
    def _failure(code: int, message: str) -> web.Response:
        status = {"apiVersion": "v1", "kind": "Status", "status": "Failure", "message": message, "code": code}
        return web.json_response(status, status=code)

    # -- the controllers -----------------------------------------------------------------------------

    def create(self, plural: str, body: Manifest) -> None:
        """Take an object, as `kubectl create` would hand it in."""
        if plural == "deployments":
            kubernetes_validate.validate(body, "1.37", strict=True)
            assert selects_all(body["spec"]["selector"]["matchLabels"], body["spec"]["template"]["metadata"]["labels"])
        else:
            msgspec.convert({**body, "metadata": {k: body["metadata"][k] for k in ("name", "labels")}}, LeaderWorkerSet)
        self.take(plural, body)

    def take(self, plural: str, body: Manifest) -> None:
        """Take an object that is known to follow its schema."""
        body["metadata"] |= {"creationTimestamp": now(), "uid": f"u-{next(self._numbers)}", "namespace": NAMESPACE}
        self.objects[plural, body["metadata"]["name"]] = body
        if body["spec"]["replicas"]:
            self._tasks.create_task(self._control(plural, body))

    async def _control(self, plural: str, body: Manifest) -> None:
        """Keep the pods of one replica there, each made anew when it is deleted alone."""
        name, spec = body["metadata"]["name"], body["spec"]
        group = spec.get("leaderWorkerTemplate")
        templates = (
            {name: spec["template"]}
            if group is None
            else {f"{name}-0": group["leaderTemplate"]}
            | {f"{name}-0-{rank}": group["workerTemplate"] for rank in range(1, group["size"])}
        )
        async with asyncio.TaskGroup() as tasks:
            for pod_name, template in templates.items():
                tasks.create_task(self._keep(body, pod_name, template, numbered=group is None))
        del self.objects[plural, name]

    async def _keep(self, body: Manifest, name: str, template: Manifest, *, numbered: bool) -> None:
        while "deletionTimestamp" not in body["metadata"]:
            own = f"{name}-{next(self._numbers)}" if numbered else name
            zone = template["spec"].get("nodeSelector", {}).get("topology.kubernetes.io/zone", "")
            node = "" if zone in self.full else f"node-{zone or 1}"
            pod = self.pods[own] = Pod(own, template, node=node, log=self._folder / f"{own}.log")
            await pod.run()
            del self.pods[own]

    def _pods_of(self, body: Manifest) -> list[Pod]:
        worker = body["metadata"]["labels"]["pdgate.dev/worker"]
        return [pod for pod in self.pods.values() if pod.labels.get("pdgate.dev/worker") == worker]

    def pod_of(self, worker_id: str) -> Pod:
        return min(
            (p for p in self.pods.values() if p.labels.get("pdgate.dev/worker") == worker_id), key=lambda p: p.name
        )

    async def delete_all(self) -> None:
        for body in list(self.objects.values()):
            if body["spec"]["replicas"]:
                body["metadata"].setdefault("deletionTimestamp", now())
                for pod in self._pods_of(body):
                    pod.delete(0.1)


def selects_all(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


@asynccontextmanager
async def in_memory_kubernetes(folder: Path, **more: bool) -> AsyncIterator[InMemoryKubernetes]:
    async with asyncio.TaskGroup() as tasks:
        server = InMemoryKubernetes(tasks, folder, **more)
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", server.serve)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.port = runner.addresses[0][1]
        try:
            yield server
        finally:
            await server.delete_all()
            await runner.cleanup()
