"""What a client has of one sample, over all attempts: from here another worker can go on."""

from collections.abc import Iterable, Sequence

from contracts.wire import Continue
from gateway.gaps import Gaps
from gateway.terms import Terms


class Delivered:
    """Token ids and length of the text that reached the gateway. Written by the slot of the current attempt."""

    __slots__ = ("gaps", "ids", "num_before", "num_chars")

    def __init__(self, gaps: Gaps | None = None) -> None:
        self.gaps = gaps  # measured only for requests with a target for them
        self.ids = bytearray()  # packed u32 (contracts.wire.pack_ids)
        self.num_chars = 0  # code points
        self.num_before = 0  # tokens of attempts before the current one

    @property
    def num_tokens(self) -> int:
        """Tokens of all attempts."""
        return len(self.ids) // 4

    def continued(self) -> None:
        """Take notice that the current attempt is over and another one goes on."""
        self.num_before = self.num_tokens


def the_rest(
    terms: Terms,
    lost_attempt: int,
    delivered: Sequence[Delivered],
    *,
    done: Iterable[int],
    unreachable: tuple[str, ...],
) -> Continue:
    """Return the entry that asks for the rest of an answer; `done` are samples that are whole."""
    any_token = any(sample.num_tokens for sample in delivered)
    return Continue(
        rid=terms.rid,
        gateway_id=terms.gateway_id,
        lost_attempt=lost_attempt,
        delivered=tuple(bytes(sample.ids) for sample in delivered) if any_token else (),
        delivered_chars=tuple(sample.num_chars for sample in delivered) if any_token else (),
        done=tuple(sorted(done)),
        unreachable=unreachable,
    )
