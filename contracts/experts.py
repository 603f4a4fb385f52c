"""Which experts of a mixture the tokens of a worker hit, and what follows from it. Pure.

Hits are token counts by layer and expert, layer after layer. A token hits as many experts of a layer as the model
routes it to.
"""

from collections.abc import Sequence


def imbalance(hits: Sequence[float], num_experts: int) -> float:
    """Return the busiest expert's hits over the mean of its layer, as the mean of all layers that have hits.

    1.0 = all alike; `num_experts` = all tokens at one expert; 0.0 = no hits.
    """
    ratios = [max(layer) * num_experts / total for layer in _layers(hits, num_experts) if (total := sum(layer))]
    return sum(ratios) / len(ratios) if ratios else 0.0


def distance(one: Sequence[float], other: Sequence[float], num_experts: int) -> float:
    """Return how differently two groups of tokens hit the experts, 0.0 (alike) to 1.0 (no expert in common).

    The total variation distance between the two shares of each layer, as the mean of the layers that both have hits in.
    """
    gaps = []
    for mine, theirs in zip(_layers(one, num_experts), _layers(other, num_experts), strict=True):
        if (total := sum(mine)) and (their_total := sum(theirs)):
            gaps.append(sum(abs(a / total - b / their_total) for a, b in zip(mine, theirs, strict=True)) / 2)
    return sum(gaps) / len(gaps) if gaps else 0.0


def _layers(hits: Sequence[float], num_experts: int) -> list[Sequence[float]]:
    if num_experts < 1 or len(hits) % num_experts:
        raise ValueError(f"{len(hits)} hits are no whole layers of {num_experts} experts")
    return [hits[at : at + num_experts] for at in range(0, len(hits), num_experts)]
