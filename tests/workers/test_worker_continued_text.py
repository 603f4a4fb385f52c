"""Where an answer goes on that another worker began: every cut of it, at every token and character."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from contracts.identity import new_rid
from contracts.lifecycle import Phase
from contracts.parsing import Detail, ToolCallDelta
from contracts.wire import Attempt, Sampling, pack_ids
from workers.engine import Job
from workers.engines.continued_text import ContinuedText, Seam

TEXT = "naïve über 日本語 🎉🎊 fin"


def byte_tokenizer() -> Tokenizer:
    """One token per byte: every character beyond ASCII is split between tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


TOKENIZER = byte_tokenizer()
PROMPT = TOKENIZER.encode("Say it.").ids


def job(ids: list[int], chars: int, stop: tuple[str, ...] = ()) -> Job:
    return Job(
        attempt=Attempt(new_rid(1), 2),
        phase=Phase.UNIFIED,
        gateway_id="gw",
        deadline_unix_ms=0,
        prompt=pack_ids(PROMPT),
        sampling=Sampling(max_tokens=1000, stop=stop),
        delivered=pack_ids(ids),
        delivered_chars=chars,
    )


def rest(ids: list[int], cut: int, chars: int, stop: tuple[str, ...] = (), *, at_once: int = 1) -> tuple[str, str]:
    """What a worker says that takes over after `cut` tokens: (its text, the stop string that ended it)."""
    text = ContinuedText(job(ids[:cut], chars, stop), PROMPT, ids[:cut], TOKENIZER.decode)
    seam = Seam(chars)
    out = [seam.after(piece, None)[0] for piece in text.replay()]
    for start in range(cut, len(ids), at_once):
        out.append(seam.after(text.take(ids[start : start + at_once]), None)[0])
        if text.stopped_by:
            return "".join(out), text.stopped_by
    out.append(seam.after(text.take((), last=True), None)[0])
    return "".join(out), text.stopped_by


def whole_characters(ids: list[int]) -> int:
    """How much of these tokens a careful worker has sent: everything but a split character."""
    return len(TOKENIZER.decode(ids).rstrip("\N{REPLACEMENT CHARACTER}"))


@pytest.mark.parametrize("at_once", [1, 2, 7])
def test_at_every_cut_the_two_halves_are_the_whole(at_once: int):
    ids = TOKENIZER.encode(TEXT).ids
    for cut in range(len(ids) + 1):
        chars = whole_characters(ids[:cut])
        assert TEXT[:chars] + rest(ids, cut, chars, at_once=at_once)[0] == TEXT, (cut, chars)


@settings(deadline=None)
@given(text=st.text(max_size=30), cut=st.integers(0, 200), held=st.integers(0, 40))
def test_whatever_was_held_back_is_sent_and_nothing_twice(text: str, cut: int, held: int):
    ids = TOKENIZER.encode(text).ids
    cut = min(cut, len(ids))
    chars = max(0, whole_characters(ids[:cut]) - held)
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert text[:chars] + rest(ids, cut, chars)[0] == text


def test_a_stop_string_over_the_cut_ends_the_answer():
    text = "one two STOP three"
    ids = TOKENIZER.encode(text).ids
    for cut in range(len("one two STO") + 1):
        for chars in {min(cut, len("one two ")), 0}:  # a careful worker has sent no part of the stop string
            said, stop = rest(ids, cut, chars, ("STOP", "never"))
            assert (text[:chars] + said, stop) == ("one two ", "STOP"), (cut, chars)


def test_of_two_stop_strings_the_first_in_the_text_counts():
    ids = TOKENIZER.encode("abcdef").ids
    assert rest(ids, 1, 1, ("def", "bc")) == ("", "bc")


def test_a_token_that_ended_the_answer_is_not_read_out():
    ids = TOKENIZER.encode("over").ids
    text = ContinuedText(job(ids[:2], 2), PROMPT, ids[:2], TOKENIZER.decode)
    assert list(text.replay()) == ["o", "v"]
    assert text.take(ids[2:], last=True, hidden=ids[-1]) == "e"


def test_a_split_character_at_the_very_end_is_told_as_such():
    ids = TOKENIZER.encode("aé").ids
    assert rest(ids[:-1], 1, 1)[0] == "\N{REPLACEMENT CHARACTER}"


def test_the_seam_counts_reasoning_text_and_calls_in_the_order_of_a_chunk():
    call = ToolCallDelta(index=0, id="call_1", name="get", arguments='{"a":')
    chunk = Detail(reasoning="why", tool_calls=(call,))
    flat = len("why" + "so" + "get" + '{"a":')
    pieces = []
    skips = [n for n in range(flat + 1) if not len("whysog") <= n < len("whysoget")]  # names come whole
    for skip in skips:
        text, detail = Seam(skip).after("so", chunk)
        left = detail.num_chars if detail else 0
        pieces.append(left + len(text))
    assert pieces == [flat - skip for skip in skips]


def test_a_call_that_the_client_knows_by_name_goes_on_with_its_arguments():
    seam = Seam(len("get") + len('{"a'))
    first = Detail(tool_calls=(ToolCallDelta(index=0, id="call_1", name="get"),))
    assert seam.after("", first) == ("", None)
    second = Detail(tool_calls=(ToolCallDelta(index=0, arguments='{"a": 1}'),))
    assert seam.after("", second) == ("", Detail(tool_calls=(ToolCallDelta(index=0, arguments='": 1}'),)))
