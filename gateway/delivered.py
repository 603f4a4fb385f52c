"""What a client has of one sample, over all attempts: from here another worker can go on."""

from gateway.gaps import Gaps


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
