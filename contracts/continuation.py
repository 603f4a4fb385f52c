"""Which answers can be continued by another worker after their tokens were delivered, and which cannot.

A new worker gets prompt and delivered token ids. What depends on nothing else goes on as if nothing had
happened: greedy or seeded sampling (a seed counts positions, not calls), biases, log probabilities,
stop strings and parsers, which are replayed over the delivered ids. State that the engine cannot
rebuild from them is lost.
"""

from contracts.parsing import Parsing
from contracts.wire import Sampling


def forbidden_by(sampling: Sampling, parsing: Parsing | None, *, num_samples: int, num_delivered: int) -> str | None:
    """Return the name of the parameter that forbids to continue after `num_delivered` tokens, or None."""
    is_greedy = sampling.temperature == 0.0 or sampling.top_k == 1
    calls_by_grammar = parsing is not None and (parsing.tool_name or parsing.tool_choice == "required")
    lost = {
        "response_format": sampling.grammar is not None,
        "tool_choice": calls_by_grammar,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "repetition_penalty": sampling.repetition_penalty not in (None, 1.0),
        "min_tokens": (sampling.min_tokens or 0) > num_delivered,
        "n": num_samples > 1 and sampling.seed is None and not is_greedy,
    }
    return next((name for name, is_lost in lost.items() if is_lost), None)
