"""Arrivals as they came, played again as a fluid: real bursts outlast what their variance can say. Pure."""

from collections.abc import Sequence


def in_time_of_course(
    course: Sequence[tuple[int, float]], *, servers: float, slack_ms: float, own_ms: Sequence[float] = ()
) -> float:
    """Return the share (0 to 1) of requests whose work, as it came, waits no longer than the slack.

    Work beyond what the servers can do within the slack is given up, as the order of the queue does: the longest
    prompts are the first that cannot be in time, so fewer requests are lost than their share of the work. Where all
    are short beside the slack, it is a matter of chance who is late, and the share of requests is that of the work.

    Args:
        course: requests and their work in ms, second by second.
        servers: how many work on it; any positive number.
        slack_ms: what a request may wait.
        own_ms: their computing times at evenly spaced quantiles, shortest first; without it all count as equal.
    """
    most_ms = max(0.0, slack_ms) * servers
    done_ms = 1000 * servers
    queue_ms = lost = 0.0
    sorted_out = min(1.0, 2 * max(own_ms, default=0.0) / max(slack_ms, 1.0))  # how well the order tells them apart
    for number, work_ms in course:
        queue_ms += work_ms - done_ms
        if queue_ms <= 0:
            queue_ms = 0.0
        elif queue_ms > most_ms:
            share = min(1.0, (queue_ms - most_ms) / work_ms)
            lost += number * (sorted_out * _given_up(share, own_ms) + (1 - sorted_out) * share)
            queue_ms = most_ms
    return 1 - lost / sum([number for number, _ in course]) if lost else 1.0


def _given_up(work_share: float, own_ms: Sequence[float]) -> float:
    """Return the share of requests, the longest first, that makes up a share of their work (both 0 to 1)."""
    left_ms = work_share * sum(own_ms)
    if left_ms <= 0:
        return work_share
    given_up = 0.0
    for ms in reversed(own_ms):
        if ms >= left_ms:
            return (given_up + left_ms / ms) / len(own_ms)
        left_ms -= ms
        given_up += 1
    return 1.0
