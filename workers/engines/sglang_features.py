"""What SGLang is asked for besides plain tokens, and what it would answer by dying or hanging; pure."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from contracts.parsing import Grammar, TokenLogprob
from contracts.wire import Sampling
from workers.engine import Job, Refusal

MAX_TOP_LOGPROBS: Final = 20
MAX_GRAMMAR_CHARACTERS: Final = 64 * 1024
MAX_GRAMMAR_DEPTH: Final = 64  # of brackets: compiling 400 nested objects takes the engine 11 s
_SEEDS: Final = 2**63


class ParserNames(msgspec.Struct, frozen=True):
    """The parsers that the engine has."""

    tools: frozenset[str]
    reasoning: frozenset[str]


def bad(parameter: str, message: str) -> Refusal:
    """Return the refusal of one request parameter; a message that begins with a quoted name is about it."""
    return Refusal("bad_request", f"'{parameter}': {message}")


def check_features(job: Job, *, vocabulary: int, parsers: ParserNames, adapters: Mapping[str, str]) -> None:
    """Refuse by name what SGLang fails on late, or dies of. Raises Refusal."""
    sampling, parsing = job.sampling, job.parsing
    for token_id in sampling.logit_bias:
        if not 0 <= token_id < vocabulary:
            raise bad("logit_bias", f"token id {token_id} is outside the vocabulary of {vocabulary}")
    if sampling.top_logprobs is not None and not 0 <= sampling.top_logprobs <= MAX_TOP_LOGPROBS:
        raise bad("top_logprobs", f"{sampling.top_logprobs} is not within 0 and {MAX_TOP_LOGPROBS}")
    if (sampling.min_tokens or 0) > sampling.max_tokens:
        raise bad("min_tokens", f"{sampling.min_tokens} is more than the {sampling.max_tokens} tokens of the answer")
    if sampling.grammar is not None:
        check_size(sampling.grammar.text, "response_format")
    if job.adapter and job.adapter not in adapters:
        raise bad("model", f"this worker has no adapter {job.adapter!r}")
    if parsing is None:
        return
    check_size(parsing.tools, "tools")
    if parsing.tool_parser and parsing.tool_parser not in parsers.tools:
        raise bad("tools", f"the engine has no tool parser {parsing.tool_parser!r}")
    if parsing.reasoning_parser and parsing.reasoning_parser not in parsers.reasoning:
        raise bad("model", f"the engine has no reasoning parser {parsing.reasoning_parser!r}")


def check_size(text: str, parameter: str) -> None:
    """Refuse a grammar that would keep the engine busy with compiling it. Raises Refusal."""
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        raise bad(parameter, f"{len(text)} characters; the engine takes {MAX_GRAMMAR_CHARACTERS}")
    depth = deepest = 0
    for character in text:
        if character in "{[(":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "}])":
            depth -= 1
    if deepest > MAX_GRAMMAR_DEPTH:
        raise bad(parameter, f"it is nested {deepest} deep; the engine takes {MAX_GRAMMAR_DEPTH}")


def feature_params(sampling: Sampling, *, sample: int) -> dict[str, Any]:
    """Return SGLang's sampling parameters for what goes beyond plain sampling; empty for a plain request.

    Samples of one request share its seed, so each gets one of its own: the first one the seed itself.
    """
    params: dict[str, Any] = {}
    if sampling.seed is not None and sample:
        params["sampling_seed"] = (sampling.seed + sample + _SEEDS) % (2 * _SEEDS) - _SEEDS
    if sampling.logit_bias:
        params["logit_bias"] = {str(token_id): bias for token_id, bias in sampling.logit_bias.items()}
    if sampling.stop_token_ids:
        params["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.grammar is not None:
        params |= grammar_params(sampling.grammar)
    return params


def grammar_params(grammar: Grammar) -> dict[str, str]:
    """Return SGLang's sampling parameter for a grammar."""
    if grammar.kind == "json_object":
        return {"json_schema": '{"type": "object"}'}
    return {grammar.kind: grammar.text}


def constraint_params(constraint: tuple[str, Any] | None, *, single: bool) -> dict[str, Any]:
    """Return the sampling parameters for what SGLang's tool parser wants the answer to match.

    `single`: the answer ends with its first call.
    """
    if constraint is None:
        return {}
    kind, value = constraint
    if kind == "full_assistant_ebnf":
        return {"ebnf": value, "ebnf_full_assistant": True}
    if hasattr(value, "model_dump"):
        value = value.model_dump(by_alias=True)
    if kind == "structural_tag" and "structures" in value:
        value = _triggered_tags(value, single=single)
    return {kind: value if isinstance(value, str) else json.dumps(value)}


def _triggered_tags(legacy: Mapping[str, Any], *, single: bool) -> dict[str, Any]:
    """Return XGrammar's own form of the older structural tag: it can stop after a call, and bound the blanks.

    Without bounds small models fill the arguments with blanks until their last token.
    """
    tags = [
        {
            "type": "tag",
            "begin": structure["begin"],
            "content": {
                "type": "json_schema",
                "json_schema": structure.get("schema") or {},
                "max_whitespace_cnt": 1,
            },
            "end": structure["end"],
        }
        for structure in legacy["structures"]
    ]
    return {
        "type": "structural_tag",
        "format": {
            "type": "triggered_tags",
            "triggers": legacy["triggers"],
            "tags": tags,
            "at_least_one": bool(legacy.get("at_least_one")),
            "stop_after_first": single,
        },
    }


def logprob_arguments(sampling: Sampling) -> dict[str, Any]:
    """Return the request's arguments for log probabilities of the answer's tokens; empty when none are wanted."""
    if sampling.top_logprobs is None:
        return {}
    return {"return_logprob": True, "logprob_start_len": -1, "top_logprobs_num": sampling.top_logprobs}


def logprobs_of(
    meta: Mapping[str, Any], num_tokens: int, token_bytes: Callable[[int], bytes]
) -> tuple[TokenLogprob, ...]:
    """Return the log probabilities of the last `num_tokens` tokens of one output."""
    sampled: Sequence[Any] = meta.get("output_token_logprobs") or ()
    alternatives: Sequence[Any] = meta.get("output_top_logprobs") or ()
    if not num_tokens:
        return ()
    sampled, alternatives = sampled[-num_tokens:], alternatives[-num_tokens:]
    tops = [*alternatives, *[None] * (len(sampled) - len(alternatives))]
    return tuple(
        TokenLogprob(
            id=entry[1],
            logprob=entry[0],
            token=token_bytes(entry[1]),
            top=tuple(TokenLogprob(id=i, logprob=p, token=token_bytes(i)) for p, i, *_ in top or ()),
        )
        for entry, top in zip(sampled, tops, strict=True)
    )
