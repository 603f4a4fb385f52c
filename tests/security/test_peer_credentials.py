"""Nobody on the network gives work to a worker, or hears of it, without the installation's token or certificate."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from contracts.credentials import Credentials, certificates_of, credentials_of, is_loopback
from contracts.environment import Secret, SettingsError, from_env
from contracts.lifecycle import Role
from contracts.v1 import worker_pb2 as pb
from contracts.v1 import worker_pb2_grpc
from contracts.wire import WorkerRef
from gateway.attach import WorkerLink
from gateway.table import LiveTable
from pdgate import check_peers
from scheduler.control import ControlStream
from tests.processes import until
from tests.security.authority import Authority
from tests.workers.peers import running_worker
from workers.health import READY
from workers.probe import ask
from workers.settings import Settings

TOKEN = "a-token-of-the-installation"
OTHER = "another-installations-token"
REFUSED = grpc.StatusCode.UNAUTHENTICATED
DEADLINE_S = 10


async def knock(address: str, method: str, credentials: Credentials) -> grpc.StatusCode:
    """Open one call and say hello; OK = the worker answered."""
    async with asyncio.timeout(6 * DEADLINE_S):
        code = await knock_once(address, method, credentials)
        while code is grpc.StatusCode.INTERNAL:  # grpc.aio's own, when a refusal comes while hello is being sent
            code = await knock_once(address, method, credentials)
    return code


async def knock_once(address: str, method: str, credentials: Credentials) -> grpc.StatusCode:
    async with credentials.channel(address) as channel:
        worker, health = worker_pb2_grpc.WorkerStub(channel), health_pb2_grpc.HealthStub(channel)
        with_token = {"metadata": credentials.metadata, "timeout": DEADLINE_S}
        try:
            if method == "Check":
                await health.Check(health_pb2.HealthCheckRequest(), **with_token)
            elif method == "Watch":
                await anext(aiter(health.Watch(health_pb2.HealthCheckRequest(), **with_token)))
            elif method == "Control":
                call = worker.Control(**with_token)
                await call.write(pb.ControlCommand(hello=pb.Hello(scheduler_id="s", leader_epoch=7, v=1)))
                assert (await call.read()).WhichOneof("report") == "inventory"
            else:
                call = worker.Attach(**with_token)
                await call.write(pb.AttachCommand(hello=pb.AttachHello(gateway_id="g", worker_epoch=1, v=1)))
                await call.read()  # nothing to tell, so only an end comes: that of the deadline, or a refusal
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return await call.code() if method in ("Control", "Attach") else REFUSED
    return grpc.StatusCode.OK


@pytest.mark.parametrize("method", ["Control", "Attach", "Check", "Watch"])
@pytest.mark.parametrize("shown", ["", OTHER, TOKEN[:-1], TOKEN + "x"])
async def test_each_call_without_the_token_is_refused(method: str, shown: str):
    async with running_worker(Role.UNIFIED, credentials=Credentials(token=TOKEN)) as worker:
        assert await knock(worker.address, method, Credentials(token=shown)) is REFUSED


async def test_who_shows_the_token_is_served_and_who_does_not_is_told_of_once():
    with capture_logs() as logs:
        async with running_worker(Role.UNIFIED, credentials=Credentials(token=TOKEN)) as worker:
            for _ in range(3):
                assert await knock(worker.address, "Control", Credentials(token=OTHER)) is REFUSED
            assert await knock(worker.address, "Control", Credentials(token=TOKEN)) is grpc.StatusCode.OK
    told = [line for line in logs if line["event"] == "peer_refused"]
    assert [(line["peer"], line["why"]) for line in told] == [("ipv4:127.0.0.1", "the peer token is wrong")]
    assert TOKEN not in str(logs)
    assert OTHER not in str(logs)


async def test_a_token_is_changed_without_a_gap():
    """Each process accepts old and new while any still shows the old one."""
    async with running_worker(Role.UNIFIED, credentials=Credentials(token=f"{TOKEN},{OTHER}")) as worker:
        for shown in (TOKEN, OTHER, f"{OTHER},{TOKEN}"):
            assert await knock(worker.address, "Check", Credentials(token=shown)) is grpc.StatusCode.OK


async def test_probes_that_cannot_show_a_token_reach_health_and_nothing_else():
    async with running_worker(Role.UNIFIED, credentials=Credentials(token=TOKEN, open_health=True)) as worker:
        assert await knock(worker.address, "Check", Credentials()) is grpc.StatusCode.OK
        assert await knock(worker.address, "Control", Credentials()) is REFUSED


async def test_a_gateway_and_a_scheduler_with_a_wrong_token_say_so():
    class Owner:
        def inventory_received(self, _):
            raise AssertionError("the worker must not talk to this one")

        report_received = inventory_received

        def stream_lost(self) -> None:
            pass

    def told(logs) -> list:
        return [line for line in logs if line["event"] == "worker_refuses_us"]

    async with running_worker(Role.UNIFIED, credentials=Credentials(token=TOKEN)) as worker:
        wrong = Credentials(token=OTHER)
        ref = WorkerRef(worker_id="w", epoch=1, address=worker.address)
        link = WorkerLink(ref, gateway_id="g", table=LiveTable(), credentials=wrong)
        stream = ControlStream(worker.address, "s", retry_s=0.01, credentials=wrong)
        for run in (link.run(), stream.run(Owner())):
            with capture_logs() as logs:
                async with asyncio.TaskGroup() as tasks:
                    running = tasks.create_task(run)
                    await until(lambda logs=logs: told(logs), DEADLINE_S)
                    running.cancel()
            assert "peer token is missing or wrong" in told(logs)[0]["reason"]
            assert OTHER not in str(logs)


# -- certificates ----------------------------------------------------------------------------------------------


def shown_by(
    authority: Authority, who: str, *hosts: str, believes: Authority | None = None, name: str = "", **more
) -> Credentials:
    files = authority.sign(who, *hosts)
    ca = str(believes.file) if believes else files["tls_ca"]
    certificates = certificates_of("X_", ca=ca, cert=files["tls_cert"], key=files["tls_key"], name=name)
    return Credentials(certificates=certificates, **more)


async def test_with_certificates_both_sides_are_known_by_their_authority(tmp_path):
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs", "somebody else")
    async with running_worker(Role.UNIFIED, credentials=shown_by(ours, "worker", token=TOKEN)) as worker:

        async def answer(credentials: Credentials) -> grpc.StatusCode:
            return await knock(worker.address, "Control", credentials)

        assert await answer(shown_by(ours, "gateway", token=TOKEN)) is grpc.StatusCode.OK
        assert await answer(shown_by(ours, "gateway")) is REFUSED  # the token is asked for besides
        unknown = grpc.StatusCode.UNAVAILABLE
        assert await answer(Credentials(token=TOKEN)) is unknown  # no TLS at all
        assert await answer(shown_by(theirs, "thief", believes=ours, token=TOKEN)) is unknown  # not of our authority
        assert await answer(shown_by(ours, "gateway", believes=theirs, token=TOKEN)) is unknown  # we do not know them


async def test_a_server_that_shows_another_host_is_not_believed_unless_a_name_is_agreed(tmp_path):
    ours = Authority(tmp_path)
    async with running_worker(Role.UNIFIED, credentials=shown_by(ours, "worker", "workers.internal")) as worker:
        assert await knock(worker.address, "Control", shown_by(ours, "one")) is grpc.StatusCode.UNAVAILABLE
        agreed = shown_by(ours, "two", name="workers.internal")
        assert await knock(worker.address, "Control", agreed) is grpc.StatusCode.OK


# -- settings --------------------------------------------------------------------------------------------------


def settings(**more: str) -> Settings:
    given = {"ID": "w", "POOL": "p", "ROLE": "unified", "ENGINE": "timed", "REDIS_URL": "redis://x", "CATALOG": "c"}
    return from_env(Settings, "WORKER_", {f"WORKER_{name}": value for name, value in {**given, **more}.items()})


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"LISTEN": "0.0.0.0:9001"}, "WORKER_PEER_TOKEN: must be set"),
        ({"LISTEN": "[::]:9001"}, "WORKER_PEER_TOKEN: must be set"),
        ({"LISTEN": "prefill-1:9001"}, "WORKER_PEER_TOKEN: must be set"),
        ({"PEER_TOKEN": "short"}, "WORKER_PEER_TOKEN: a token of fewer"),
        ({"PEER_TOKEN": f"{TOKEN},short"}, "WORKER_PEER_TOKEN: a token of fewer"),
        ({"PEER_TOKEN": "with a space in the middle"}, "WORKER_PEER_TOKEN: may hold printable"),
        ({"TLS_CA": "/nowhere/ca.pem"}, "WORKER_TLS_CA: "),
        ({"TLS_NAME": "workers"}, "WORKER_TLS_NAME: means nothing"),
    ],
)
def test_settings_that_protect_nothing_stop_the_process_with_their_name(given: dict[str, str], named: str):
    asked = settings(**given)
    with pytest.raises(SettingsError, match=named) as refusal:
        credentials_of("WORKER_", asked, listen=asked.listen)
    assert given.get("PEER_TOKEN", "?") not in str(refusal.value)


def test_half_of_the_files_is_not_enough(tmp_path):
    files = Authority(tmp_path).sign("worker")
    for lacking in files:
        given = {name.upper(): file for name, file in files.items() if name != lacking}
        with pytest.raises(SettingsError, match=f"WORKER_{lacking.upper()}: must be set too"):
            credentials_of("WORKER_", settings(**given))
    empty = tmp_path / "empty.pem"
    empty.touch()
    with pytest.raises(SettingsError, match=r"WORKER_TLS_KEY: .* holds no PEM"):
        credentials_of("WORKER_", settings(**{n.upper(): f for n, f in files.items()} | {"TLS_KEY": str(empty)}))


def test_only_what_this_machine_alone_can_reach_needs_no_token():
    reach = {"127.0.0.1:0": True, "127.3.4.5:1": True, "localhost:1": True, "[::1]:1": True, "unix:/x": True}
    reach |= {"0.0.0.0:1": False, "10.0.0.1:1": False, "[::]:1": False, "worker:1": False, ":1": False}
    assert {listen: is_loopback(listen) for listen in reach} == reach
    assert credentials_of("WORKER_", settings()).asks is False
    assert TOKEN not in repr(settings(PEER_TOKEN=TOKEN))


# -- the doctor ------------------------------------------------------------------------------------------------


class Known:
    """As much of a registration as the doctor reads."""

    def __init__(self, worker_id: str, address: str) -> None:
        self.worker_id, self.address = worker_id, address


async def test_the_doctor_finds_workers_that_take_work_from_anybody(monkeypatch):
    monkeypatch.setattr(check_peers, "is_loopback", lambda _: False)
    monkeypatch.setattr(check_peers, "_ANSWER_S", 0.5)
    async with (
        running_worker(Role.UNIFIED) as naked,
        running_worker(Role.DECODE, credentials=Credentials(token=Secret(TOKEN))) as careful,
    ):
        (check,) = await check_peers.peer_checks([Known("careful", careful.address)])
        assert check.ok, check
        workers = [Known("naked", naked.address), Known("careful", careful.address), Known("gone", "127.0.0.1:1")]
        (check,) = await check_peers.peer_checks(workers)
    assert not check.ok
    assert check.found == "1 closed, 1 open, 1 not reached from here"
    assert "who reaches naked can" in check.change


async def test_a_probe_shows_what_the_worker_wants(tmp_path):
    ours = Authority(tmp_path)
    async with running_worker(Role.DECODE, credentials=shown_by(ours, "worker", token=TOKEN)) as worker:
        shown = shown_by(ours, "probe", token=TOKEN)
        answers = [await ask(worker.address, shown, service) for service in (READY, "pdgate.prefill")]
        assert answers == [True, False]
        assert not await ask(worker.address, Credentials(token=TOKEN), READY)
