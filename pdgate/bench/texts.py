"""Prompts of a wanted length in tokens, made of pieces: the same piece is the same text, wherever it stands.

Nothing is assumed of the endpoint's tokenizer. Two probes with known numbers of words and the usage that the server
reports for them say how many tokens a word is, and how many the chat template adds.
"""

import random
from functools import lru_cache
from typing import Final

import msgspec

USUAL_TOKENS_PER_WORD: Final = 1.1  # when an endpoint reports no usage; the report then says "estimated"
_TEXT: Final = """
the of and to in is you that it he was for on are as with his they at be this have from or one had by word but not
what all were we when your can said there use an each which she do how their if will up other about out many then them
these so some her would make like him into time has look two more write go see number no way could people my than
first water been call who oil its now find long down day did get come made may part over new sound take only little
work know place year live me back give most very after thing our just name good sentence man think say great where
help through much before line right too mean old any same tell boy follow came want show also around form three small
set put end does another well large must big even such because turn here why ask went men read need land different
home us move try kind hand picture again change off play spell air away animal house point page letter mother answer
found study still learn should world high every near add food between own below country plant last school father keep
tree never start
"""
_WORDS: Final = tuple(_TEXT.split())


class Piece(msgspec.Struct, frozen=True):
    """A part of a prompt. Pieces with one seed begin alike, whatever their lengths."""

    seed: str
    tokens: int


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """What the endpoint's tokenizer makes of words."""

    tokens_per_word: float = USUAL_TOKENS_PER_WORD
    template_tokens: float = 0.0  # that the endpoint adds to a prompt
    measured: bool = False


class Author:
    """Writes pieces."""

    def __init__(self, scale: Scale, *, salt: str) -> None:
        """With another salt every text is another: nothing of an earlier run is in the server's caches."""
        self.scale = scale
        self._salt = salt
        self._words = lru_cache(maxsize=8192)(self._fresh)

    def text(self, pieces: tuple[Piece, ...], *, template: bool = True) -> str:
        """Return the text of pieces, so long that with the template it has their sum of tokens."""
        counts = [max(1, round(piece.tokens / self.scale.tokens_per_word)) for piece in pieces]
        if template and counts:
            counts[-1] = max(1, counts[-1] - round(self.scale.template_tokens / self.scale.tokens_per_word))
        return " ".join(self._words(piece.seed, count) for piece, count in zip(pieces, counts, strict=True))

    def _fresh(self, seed: str, count: int) -> str:
        return words(f"{self._salt}/{seed}", count)


def words(seed: str, count: int) -> str:
    """Return `count` words that follow from the seed."""
    # seeds of text, not of secrets
    return " ".join(random.Random(seed).choices(_WORDS, k=count))  # noqa: S311


def scale_of(few: tuple[int, int], many: tuple[int, int]) -> Scale:
    """Return the line through two probes, each of so many words and so many tokens.

    A tokenizer that gives no sensible line (no more tokens for more words) leaves the usual scale.
    """
    slope = (many[1] - few[1]) / (many[0] - few[0])
    if not 0.2 <= slope <= 20:
        return Scale()
    return Scale(tokens_per_word=slope, template_tokens=max(0.0, few[1] - slope * few[0]), measured=True)
