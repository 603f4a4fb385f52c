"""The engine requests behind one answer: those of its current attempt, and what earlier attempts left."""

from collections.abc import Sequence

from contracts.lifecycle import Phase
from gateway.slots import Slot


class Parts:
    """Slots by sample. Each knows its generation, which has these: `clear` opens the circle."""

    def __init__(self) -> None:
        self.streams: dict[int, Slot] = {}  # decode or unified
        self.prefills: dict[int, Slot] = {}
        self.whole: dict[int, Slot] = {}  # samples that earlier attempts finished
        self._prompts: list[Slot] = []  # of earlier attempts: who may know the prompt's meters

    def add(self, slot: Slot) -> None:
        """Take one of the current attempt."""
        (self.prefills if slot.phase is Phase.PREFILL else self.streams)[slot.sample] = slot

    @property
    def current(self) -> tuple[Slot, ...]:
        """All of the current attempt."""
        return (*self.streams.values(), *self.prefills.values())

    @property
    def answers(self) -> dict[int, Slot]:
        """Decode or unified ones, those of samples that earlier attempts finished included."""
        return self.whole | self.streams

    @property
    def prompts(self) -> Sequence[Slot]:
        """Who may know the prompt's meters, the first attempt first."""
        current = self.prefills.get(0) or self.streams.get(0)
        return (*self._prompts, current) if current is not None else self._prompts

    @property
    def is_continued(self) -> bool:
        """Whether an earlier attempt may have the prompt's meters."""
        return bool(self._prompts)

    def fence_off(self) -> None:
        """End the current attempt: what still comes of it is not heard."""
        for slot in self.current:
            slot.muted = True
        self.streams.clear()
        self.prefills.clear()

    def continued(self) -> None:
        """End the current attempt, but keep the samples that are whole and who knows the prompt's meters."""
        self._prompts = list(self.prompts)
        self.whole |= {s: slot for s, slot in self.streams.items() if slot.reason is not None and slot.reason.complete}
        self.fence_off()

    def counted(self, num_samples: int, *, has_prefill: bool) -> bool:
        """Return whether all have said their final counts, or will not be heard any more."""
        if len(self.streams) + len(self.whole) < num_samples:
            return False
        if any(slot.reason is None and not slot.muted for slot in self.streams.values()):
            return False
        if not has_prefill:
            return True
        first = self.prefills.get(min(self.prefills, default=0))
        return first is not None and (first.reason is not None or first.muted)

    def clear(self) -> None:
        """Forget all, when the request is closed: in a circle they would wait for the garbage collector."""
        for slots in (self.streams, self.prefills, self.whole):
            slots.clear()
        self._prompts.clear()
