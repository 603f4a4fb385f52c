"""What a placed request looks like on the workers' Control streams."""

from collections.abc import Iterator

from contracts.lifecycle import HandOff, Phase
from contracts.links import Link, link_between
from contracts.parsing import parsing_to_pb
from contracts.settlement import encode_owner
from contracts.v1 import worker_pb2 as pb
from contracts.wire import PHASE_TO_PB, sampling_to_pb
from scheduler.book import Part, PartState, Request
from scheduler.worker import Worker


def submits(request: Request, leader_epoch: int, *, placed: bytes) -> Iterator[tuple[Part, pb.ControlCommand]]:
    """Yield one Submit per part of the current attempt that is not held, the decode side first.

    `placed` is the notice of the placement, which the gateway gets with the first tokens if not before.

    The decode side goes first so that its room waits for the KV cache, never the other way round.
    """
    submit = request.submit
    sampling = sampling_to_pb(submit.sampling)
    parsing = parsing_to_pb(submit.parsing) if submit.parsing is not None else None
    payer = encode_owner(submit.owner)
    prefill = next((part.worker for part in request.side(Phase.PREFILL)), None)
    for part in (*request.streaming_parts, *request.side(Phase.PREFILL)):
        if part.state is PartState.HELD:
            continue
        message = pb.Submit(
            id=attempt_id(request, part.sample),
            leader_epoch=leader_epoch,
            worker_epoch=part.worker.epoch,
            phase=PHASE_TO_PB[part.phase],
            gateway_id=submit.gateway_id,
            deadline_unix_ms=submit.deadline_unix_ms,
            prompt=submit.prompt,
            sampling=sampling,
            cache_salt=submit.cache_salt,
            adapter=submit.adapter,
            traceparent=submit.owner.traceparent,
            parsing=parsing,
            payer=payer if part.phase is not Phase.PREFILL else "",
            prompt_only=submit.warm_replica > 0,
            placed=placed if part.phase is not Phase.PREFILL else b"",
        )
        if request.delivered:
            message.delivered = request.delivered[part.sample]
            message.delivered_chars = request.delivered_chars[part.sample]
        if request.hand_off_now is not None:
            message.hand_off = request.hand_off_now.value
        if prefill is not None and request.hand_off_now is HandOff.DIRECT:
            _rendezvous(message, prefill, request.rooms[part.sample])
            message.link = _link(prefill, next(request.streaming_parts).worker)
        yield part, pb.ControlCommand(submit=message)


def abort(request: Request, reason: str) -> pb.ControlCommand:
    """Return the command that ends all samples of the current attempt on one worker."""
    return pb.ControlCommand(abort=pb.Abort(id=attempt_id(request, 0), all_samples=True, reason=reason))


def attempt_id(request: Request, sample: int) -> pb.AttemptId:
    """Return the name of one sample of the current attempt."""
    return pb.AttemptId(rid=request.rid_bytes, attempt=request.attempt, sample=sample)


def _link(prefill: Worker, decode: Worker) -> Link:
    giver, taker = prefill.registration, decode.registration
    return link_between(giver.node, giver.zone, taker.node, taker.zone)


def _rendezvous(message: pb.Submit, prefill: Worker, room: int) -> None:
    message.bootstrap_host = prefill.registration.bootstrap_host
    message.bootstrap_port = prefill.registration.bootstrap_port
    message.bootstrap_room = room
