"""The timed engine's language: text as a pure function of prompt, seed and position.

The prompt's *KV* is a 16-byte digest of its token ids. It is what a timed prefill worker hands over,
so a decode worker that got a wrong hand-off, or none, cannot produce the right text.
"""

import hashlib
from collections.abc import Sequence

from contracts.wire import pack_ids, unpack_ids

KV_BYTES = 16
NO_KV = bytes(KV_BYTES)
FIRST_ID = 32
_MASK = 2**64 - 1
_SEED = 2**63 - 1
_WEYL = 0x9E3779B97F4A7C15  # odd, 2^64 / golden ratio
_MIX = 0xBF58476D1CE4E5B9  # splitmix64

_STEMS = """
river stone light window garden winter paper market silver morning bridge letter engine shadow harbour copper
meadow signal forest candle travel number island summer valley method answer circle distance north café naïve
über mirror orchard pattern quiet record season timber union violet weather yellow amber basin cedar delta
ember fabric gravel hollow ivory jasmine kettle lantern marble needle olive pebble quarry ribbon saddle temple
"""
WORDS: tuple[str, ...] = tuple(f" {stem}{tail}" for tail in ("", "s", ",", ".") for stem in _STEMS.split())  # 4 x 64
IDS: tuple[tuple[int], ...] = tuple((FIRST_ID + i,) for i in range(len(WORDS)))


def kv_of(prompt: bytes) -> bytes:
    """Return the 16 bytes that stand for the KV cache of a packed prompt."""
    return hashlib.blake2b(prompt, digest_size=KV_BYTES).digest()


def state_of(kv: bytes, seed: int) -> int:
    """Return the 64-bit state from which every position's word follows."""
    return int.from_bytes(hashlib.blake2b(kv + seed.to_bytes(8, "little", signed=True), digest_size=8).digest())


def word_at(state: int, position: int) -> int:
    """Return the index into WORDS and IDS of the token at `position`."""
    mixed = (state + position * _WEYL) & _MASK
    return (((mixed ^ (mixed >> 30)) * _MIX) & _MASK) >> 56


def replayed(state: int, delivered: bytes) -> tuple[str, int]:
    """Return the text of an answer's packed first tokens, and the state to go on from.

    Tokens that this state would not have sampled lead to another state: a continuation from wrong tokens
    goes on with wrong text.
    """
    words = [token - FIRST_ID for token in unpack_ids(delivered)]
    if words != [word_at(state, position) for position in range(len(words))]:
        state = state_of(kv_of(delivered), state & _SEED)
    return "".join(WORDS[word] if 0 <= word < len(WORDS) else "?" for word in words), state


def expected_words(prompt_ids: Sequence[int], num_tokens: int, *, seed: int = 0) -> list[int]:
    """Return the word indices that the engine samples for a prompt."""
    state = state_of(kv_of(pack_ids(prompt_ids)), seed)
    return [word_at(state, position) for position in range(num_tokens)]


def expected_text(prompt_ids: Sequence[int], num_tokens: int, *, seed: int = 0) -> str:
    """Return the text of an answer of `num_tokens` tokens: what a test compares with."""
    return "".join(WORDS[word] for word in expected_words(prompt_ids, num_tokens, seed=seed))


def expected_ids(prompt_ids: Sequence[int], num_tokens: int, *, seed: int = 0) -> list[int]:
    """Return the token ids of an answer of `num_tokens` tokens."""
    return [IDS[word][0] for word in expected_words(prompt_ids, num_tokens, seed=seed)]


def safe_split(text: str, stops: tuple[str, ...]) -> tuple[int, str | None]:
    """Return how much of `text` may be sent, and the stop string that ends it, if one is whole.

    Without a whole stop string, what could still become one is held back.
    """
    found = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    if found:
        return min(found, key=lambda hit: hit[0])
    held = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), held, -1):
            if text.endswith(stop[:length]):
                held = length
                break
    return len(text) - held, None
