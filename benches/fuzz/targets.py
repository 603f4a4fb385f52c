"""What strangers' bytes reach first, as functions of bytes: anything but the documented refusal is a fault.

Each target has seeds, from which `make fuzz` goes on by coverage (atheris) and `tests/security/test_fuzz_targets.py`
by some thousand mutations.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
from google.protobuf.message import DecodeError

from contracts.catalog import Model, PriceText
from contracts.errors import BadRequest, ServingError
from contracts.identity import new_rid, rid_bytes
from contracts.parsing import detail_from_pb
from contracts.rating import Price, Tokens
from contracts.usage import Outcome, UsageEvent
from contracts.v1 import worker_pb2 as pb
from contracts.wire import (
    Abort,
    Change,
    Refused,
    counts_from_pb,
    decode_change,
    decode_inbox,
    decode_notice,
    encode,
    pack_ids,
    stages_from_pb,
)
from gateway.auth import bearer
from gateway.batch_lines import LineChecker
from gateway.numerals import whole_number
from gateway.schemas.chat import ChatRequest, decode_chat
from gateway.schemas.completions import decode_completion
from gateway.schemas.conversation import for_template
from gateway.schemas.files import decode_batch
from gateway.schemas.messages import chat_of as chat_of_message
from gateway.schemas.messages import decode_count, decode_messages
from gateway.schemas.responses import chat_of as chat_of_response
from gateway.schemas.responses import decode_responses
from gateway.schemas.tokens import decode_detokenize, decode_tokenize
from gateway.schemas.tools import biases_of, parsing_of
from gateway.targets import read_max_wait, read_targets
from observability.tracing import read as read_traceparent
from workers.control import job_of
from workers.engine import Refusal

_RID: Final = new_rid(1_780_000_000_000)
_MODEL: Final = Model(
    tokenizer="tiny",
    context_tokens=8192,
    price=PriceText(prefill_computed="1", prefill_cached="1", decode="1"),
    tool_parser="qwen25",
    reasoning_parser="qwen3",
)
_VOCABULARY: Final = 1000
_HELLO: Final = b'"messages": [{"role": "user", "content": "h\xc3\xb6"}]'
_TOOL: Final = b'{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}'


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """One entry for bytes."""

    run: Callable[[bytes], Any]
    seeds: Sequence[bytes]
    refusals: tuple[type[Exception], ...]
    """How it says no."""

    def __call__(self, data: bytes) -> bool:
        """Give it the bytes; return whether it took them. Raises whatever is not a refusal."""
        try:
            self.run(data)
        except self.refusals:
            return False
        return True


def _use(chat: ChatRequest) -> None:
    """Do with a chat request what the gateway does before it knows its tokens."""
    chat.sampling(16, _MODEL, logit_bias=biases_of(chat.logit_bias, vocabulary=_VOCABULARY))
    parsing_of(
        chat.model,
        _MODEL,
        tools=chat.tools,
        choice=chat.tool_choice,
        parallel=chat.parallel_tool_calls,
        reasoning_open=False,
    )
    msgspec.json.encode([for_template(message) for message in chat.messages])


def _chat(data: bytes) -> None:
    _use(decode_chat(data))


def _completion(data: bytes) -> None:
    request = decode_completion(data)
    request.prompts()
    request.sampling(16, _MODEL)


def _messages(data: bytes) -> None:
    _use(chat_of_message(decode_messages(data)))


def _responses(data: bytes) -> None:
    chat, _ = chat_of_response(decode_responses(data), [])
    _use(chat)


def _plain_bodies(data: bytes) -> None:
    last: BadRequest | None = None
    for decode in (decode_count, decode_tokenize, decode_detokenize, decode_batch):
        try:
            decode(data)
        except BadRequest as error:
            last = error
    if last is not None:
        raise last


def _lines(data: bytes) -> None:
    checker = LineChecker("/v1/chat/completions", max_line_bytes=1000)
    for number, line in enumerate(data.split(b"\n"), start=1):
        checker.check(number, line)
    checker.ended()


def _headers(data: bytes) -> None:
    text = data.decode("latin-1")  # what an HTTP header is
    read_traceparent(text)
    whole_number(text, most=10**9)
    for read in (read_targets, read_max_wait, bearer):
        with contextlib.suppress(ServingError):
            read(text)


def _submit(data: bytes) -> None:
    job_of(pb.Submit.FromString(data))


def _report(data: bytes) -> None:
    report = pb.ControlReport.FromString(data)
    counts_from_pb(report.final.counts)
    stages_from_pb(report.final.stages)


def _batch(data: bytes) -> None:
    for detail in pb.StepBatch.FromString(data).details:
        detail_from_pb(detail)


def _submit_seed() -> bytes:
    message = pb.Submit(
        id=pb.AttemptId(rid=rid_bytes(_RID), attempt=1),
        phase=1,
        gateway_id="g",
        prompt=pack_ids([1, 2, 3]),
        sampling=pb.Sampling(max_tokens=3, stop=["x"], temperature=0.5),
        hand_off="direct",
    )
    message.sampling.grammar.kind, message.sampling.grammar.text = "regex", "a+"
    message.parsing.tool_choice = "auto"
    return message.SerializeToString()


def _report_seed() -> bytes:
    final = pb.Final(id=pb.AttemptId(rid=rid_bytes(_RID), attempt=1), counts=pb.Counts(prompt_tokens=3))
    return pb.ControlReport(final=final).SerializeToString()


def _batch_seed() -> bytes:
    batch = pb.StepBatch(worker_epoch=1, seq=1, handle=[1], text=["a"], num_tokens=[1], token_ids=pack_ids([1]))
    detail = batch.details.add(entry=0, reasoning="r")
    detail.logprobs.add(id=1, logprob=-0.5, token=b"\xc3")
    return batch.SerializeToString()


def _usage_seed() -> bytes:
    price = Price(version=1, model="m", prefill_computed=1, prefill_cached=1, decode=1)
    event = UsageEvent(
        rid=_RID, org="o", project="p", key_id="k", model="m", pool="m", tier="default", outcome=Outcome.FINISHED,
        tokens=Tokens(prefill_computed=3, prefill_cached=0, decode=2), price=price, cost=5,
    )  # fmt: skip
    return encode(event)


_MSGPACK: Final = (msgspec.MsgspecError, ValueError)

TARGETS: Final[Mapping[str, Target]] = {
    "chat": Target(
        run=_chat,
        refusals=(BadRequest,),
        seeds=(
            b'{"model": "m", ' + _HELLO + b"}",
            b'{"model": "m", ' + _HELLO + b', "tools": [' + _TOOL + b'], "tool_choice": "required", "stop": ["a"]}',
            b'{"model": "m", ' + _HELLO + b', "logit_bias": {"5": 1.5}, "logprobs": true, "top_logprobs": 2, "n": 2}',
            b'{"model": "m", ' + _HELLO + b', "response_format": {"type": "json_schema", "json_schema": {"name": "a",'
            b' "schema": {"type": "object"}}}, "stream": true, "stream_options": {"include_usage": true}}',
            (
                b'{"model": "m", "messages": [{"role": "assistant", "content": null, "tool_calls": [{"id": "c", "type":'
                b' "function", "function": {"name": "f", "arguments": "{\\"a\\": 1}"}}]}, {"role": "tool",'
                b' "tool_call_id": "c", "content": [{"type": "text", "text": "x"}]}]}'
            ),
        ),
    ),
    "completion": Target(
        run=_completion,
        refusals=(BadRequest,),
        seeds=(
            b'{"model": "m", "prompt": "a", "echo": true, "max_tokens": 5}',
            b'{"model": "m", "prompt": [[1, 2], [3]], "n": 2, "stop": "x"}',
        ),
    ),
    "messages": Target(
        run=_messages,
        refusals=(BadRequest,),
        seeds=(
            b'{"model": "m", "max_tokens": 5, "system": [{"type": "text", "text": "s"}], ' + _HELLO + b"}",
            (
                b'{"model": "m", "max_tokens": 5, "tools": [{"name": "f", "input_schema": {"type": "object"}}],'
                b' "tool_choice": {"type": "tool", "name": "f"}, "messages": [{"role": "assistant", "content": ['
                b'{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}, {"role": "user", "content": ['
                b'{"type": "tool_result", "tool_use_id": "t", "content": "x"}]}]}'
            ),
        ),
    ),
    "responses": Target(
        run=_responses,
        refusals=(BadRequest,),
        seeds=(
            b'{"model": "m", "input": "a", "instructions": "b", "max_output_tokens": 5}',
            (
                b'{"model": "m", "input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}, {"type":'
                b' "function_call", "call_id": "c", "name": "f", "arguments": "{}"}, {"type": "function_call_output",'
                b' "call_id": "c", "output": "x"}], "tools": [{"type": "function", "name": "f", "parameters": {}}],'
                b' "text": {"format": {"type": "json_object"}}, "reasoning": {"effort": "low"}}'
            ),
        ),
    ),
    "bodies": Target(
        run=_plain_bodies,
        refusals=(BadRequest,),
        seeds=(
            b'{"model": "m", ' + _HELLO + b"}",
            b'{"model": "m", "prompt": "a", "add_special_tokens": false}',
            b'{"model": "m", "tokens": [1, 2]}',
            b'{"input_file_id": "file-1", "endpoint": "/v1/chat/completions", "completion_window": "24h"}',
        ),
    ),
    "lines": Target(
        run=_lines,
        refusals=(),
        seeds=(
            (
                b'{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m"}}\n'
                b'{"custom_id": "b", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m"}}'
            ),
        ),
    ),
    "headers": Target(
        run=_headers,
        refusals=(),
        seeds=(
            b"ttft=800ms,tpot=40ms,e2e=1.5s",
            b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            b"20s",
            b"Bearer pdg_abc",
            b"0012",
        ),
    ),
    "inbox": Target(run=decode_inbox, refusals=_MSGPACK, seeds=(encode(Abort(rid=_RID, reason="left")),)),
    "notice": Target(
        run=decode_notice, refusals=_MSGPACK, seeds=(encode(Refused(rid=_RID, code="no_worker", message="m")),)
    ),
    "change": Target(
        run=decode_change, refusals=(msgspec.DecodeError,), seeds=(encode(Change(kind="key", id="k", state="revoked")),)
    ),
    "usage": Target(run=msgspec.msgpack.Decoder(UsageEvent).decode, refusals=_MSGPACK, seeds=(_usage_seed(),)),
    "submit": Target(run=_submit, refusals=(Refusal, DecodeError), seeds=(_submit_seed(),)),
    "report": Target(run=_report, refusals=(DecodeError,), seeds=(_report_seed(),)),
    "batch": Target(run=_batch, refusals=(DecodeError,), seeds=(_batch_seed(),)),
}
