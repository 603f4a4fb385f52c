"""Least squares with bounds, small enough for plain Python: a dozen unknowns, thousands of rows."""

from collections.abc import Sequence

SWEEPS = 4000
TOLERANCE = 1e-10


def solve_bounded(
    rows: Sequence[Sequence[float]],
    targets: Sequence[float],
    weights: Sequence[float],
    *,
    low: Sequence[float],
    high: Sequence[float],
    prior: Sequence[float] | None = None,
    pull: float = 0.0,
) -> list[float]:
    """Return the coefficients that minimise the weighted squared error within the bounds.

    Args:
        rows: the design, one row per measurement.
        targets: the measurements.
        weights: weight of each row's error (not squared).
        low: lower bound of each coefficient.
        high: upper bound of each coefficient.
        prior: where coefficients are pulled to; zero if not given.
        pull: strength of that pull, in units of each coefficient's own curvature; 0 = none.
    """
    size = len(low)
    normal = [[0.0] * size for _ in range(size)]
    right = [0.0] * size
    for row, target, weight in zip(rows, targets, weights, strict=True):
        square = weight * weight
        for i, value in enumerate(row):
            if value:
                scaled = square * value
                right[i] += scaled * target
                line = normal[i]
                for j in range(i, size):
                    line[j] += scaled * row[j]
    for i in range(size):
        for j in range(i):
            normal[i][j] = normal[j][i]
    start = list(prior) if prior is not None else [0.0] * size
    for i in range(size):
        extra = pull * normal[i][i]
        normal[i][i] += extra
        right[i] += extra * start[i]
    return _descend(normal, right, low, high, start)


def robust_fit(
    rows: Sequence[Sequence[float]], targets: Sequence[float], weights: Sequence[float], *, rounds: int = 8
) -> list[float]:
    """Return non-negative coefficients that minimise the mean absolute relative error (reweighted squares).

    Errors below 5 % count as squares, so that a few exact rows cannot take the fit over.
    """
    size = len(rows[0])
    low, high = [0.0] * size, [float("inf")] * size
    current = [w / t for w, t in zip(weights, targets, strict=True)]
    found = solve_bounded(rows, targets, current, low=low, high=high)
    for _ in range(rounds - 1):
        errors = [abs(predict(found, row) / target - 1) for row, target in zip(rows, targets, strict=True)]
        current = [w / t * max(e, 0.05) ** -0.5 for w, t, e in zip(weights, targets, errors, strict=True)]
        found = solve_bounded(rows, targets, current, low=low, high=high)
    return found


def predict(coefficients: Sequence[float], row: Sequence[float]) -> float:
    """Return the row's value under the coefficients."""
    return sum(c * v for c, v in zip(coefficients, row, strict=True))


def _descend(
    normal: list[list[float]],
    right: list[float],
    low: Sequence[float],
    high: Sequence[float],
    start: Sequence[float],
) -> list[float]:
    """Coordinate descent on the normal equations: each step is the exact minimum along one coefficient."""
    size = len(right)
    x = [min(max(s, lo), hi) for s, lo, hi in zip(start, low, high, strict=True)]
    for _ in range(SWEEPS):
        moved = 0.0
        for i in range(size):
            curvature = normal[i][i]
            if curvature <= 0:
                continue
            gradient = right[i] - sum(n * v for n, v in zip(normal[i], x, strict=True))
            better = min(max(x[i] + gradient / curvature, low[i]), high[i])
            moved = max(moved, abs(better - x[i]) * curvature**0.5)
            x[i] = better
        if moved < TOLERANCE:
            break
    return x
