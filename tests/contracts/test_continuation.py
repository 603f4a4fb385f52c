import pytest

from contracts.continuation import forbidden_by
from contracts.parsing import Grammar, Parsing
from contracts.wire import Sampling


def forbids(*, parsing=None, num_samples=1, num_delivered=3, **sampling):
    return forbidden_by(
        Sampling(max_tokens=10, **sampling), parsing, num_samples=num_samples, num_delivered=num_delivered
    )


@pytest.mark.parametrize(
    ("sampling", "name"),
    [
        ({"grammar": Grammar("regex", "a+")}, "response_format"),
        ({"frequency_penalty": 0.1}, "frequency_penalty"),
        ({"presence_penalty": -0.1}, "presence_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"min_tokens": 4}, "min_tokens"),
        ({"num_samples": 2}, "n"),
        ({"num_samples": 2, "temperature": 0.7}, "n"),
        ({"parsing": Parsing(tool_parser="hermes", tools="[]", tool_name="f")}, "tool_choice"),
        ({"parsing": Parsing(tool_parser="hermes", tools="[]", tool_choice="required")}, "tool_choice"),
    ],
)
def test_state_that_ids_do_not_hold_forbids_to_continue(sampling, name):
    assert forbids(**sampling) == name


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 1.0, "seed": 3, "num_samples": 2},
        {"temperature": 0.0, "num_samples": 2},
        {"min_tokens": 3, "repetition_penalty": 1.0, "frequency_penalty": 0.0},
        {"logit_bias": {1: 2.0}, "top_logprobs": 5, "stop": ("a",), "stop_token_ids": (7,)},
        {"parsing": Parsing(tool_parser="hermes", tools="[]", reasoning_parser="qwen3")},
    ],
)
def test_what_follows_from_the_ids_may_continue(sampling):
    assert forbids(**sampling) is None
