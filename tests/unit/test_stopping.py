"""Where a sequence ends, and that its text, tokens and stream agree about it, for every way tokenizers decode."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from backend.api import FinishReason, RequestError, TokenLogprob
from backend.model_source import resolve_model
from backend.stopping import (
    Finish,
    IncrementalDetokenizer,
    OutputAssembler,
    StopCriteria,
    StopStringMatcher,
    TextDecoder,
)

CORPUS = [
    "The quick brown fox jumps over the lazy dog, again and again; then it sleeps.",
    "Größe, naïve, façade — “quoted”. Привет мир. 日本語のテキスト。 한국어 🙂🙃🏳️‍🌈 ﷽",
    "def f(x):\n    return x + 1  # two  spaces\n\n\tEND.",
]
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens(["<tool>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def byte_level() -> PreTrainedTokenizerFast:
    """As GPT-2, Llama 3, Qwen and SmolLM2 do it: tokens are bytes, characters may be spread over several."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=360, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return wrap(tokenizer)


def byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama 2, Mistral and Gemma do it: words carry their space in front, unknown characters are byte tokens."""
    entries = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁▁"]
    entries += ["▁the", "▁fox", "es", ".", "▁a", "b", "é", "日本", "\ufffd"]
    vocab = {entry: i for i, entry in enumerate(entries)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return wrap(tokenizer)


def small(decoder: Any, entries: list[str]) -> PreTrainedTokenizerFast:
    vocab = {entry: i for i, entry in enumerate(["[UNK]", *entries])}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token="[UNK]"))
    if decoder is not None:
        tokenizer.decoder = decoder
    return wrap(tokenizer)


@cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    match kind:
        case "byte-level":
            return byte_level()
        case "byte-fallback":
            return byte_fallback()
        case "metaspace":
            return small(decoders.Metaspace(), ["▁", "▁the", "fox", "▁▁", ".", "<0x41>", "<0x0A>"])
        case "wordpiece":
            return small(decoders.WordPiece(), ["the", "fox", "##es", ".", "##", "'", "s"])
        case "word-end":
            return small(decoders.BPEDecoder(), ["the</w>", "fo", "x</w>", ".</w>", "</w>"])
        case _:
            return small(None, ["the", "fox", "."])


KINDS = ["byte-level", "byte-fallback", "metaspace", "wordpiece", "word-end", "plain"]
kinds = st.sampled_from(KINDS)


def ids_of(kind: str, **sizes: int) -> st.SearchStrategy[list[int]]:
    """Random token ids, also special ones and some beyond the vocabulary (a padded model can produce them)."""
    tokenizer = tokenizer_of(kind)
    anything = st.integers(0, len(tokenizer) + 3)
    texts = ["".join(CORPUS), "🙂🙃🏳️‍🌈 日本語 naïve"]
    real = st.sampled_from([tokenizer.encode(text, add_special_tokens=False) for text in texts])
    cut = st.tuples(real, st.integers(0, 30), st.integers(0, 60)).map(lambda part: part[0][part[1] : part[2]])
    pieces = st.one_of(st.lists(anything, max_size=12), cut)
    joined = st.lists(pieces, max_size=4).map(lambda parts: [token for part in parts for token in part])
    return joined.filter(lambda ids: sizes.get("min_size", 0) <= len(ids))


def decode(tokenizer: Any, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


# --------------------------------------------------------------------------------------------------- token criteria


def test_stop_tokens_and_length() -> None:
    criteria = StopCriteria(max_new=4, eos_ids=frozenset({2, 3}), stop_token_ids=frozenset({9}))
    assert [criteria.check_token(token, 0) for token in (1, 2, 3, 9)] == [
        None,
        Finish(STOP, 2),
        Finish(STOP, 3),
        Finish(STOP, 9),
    ]
    assert criteria.check_token(1, 2) is None
    assert criteria.check_token(1, 3) == Finish(LENGTH)
    assert criteria.check_token(2, 3) == Finish(STOP, 2)
    assert StopCriteria(max_new=1).check_token(5, 0) == Finish(LENGTH)


def test_ignored_eos_still_lets_stop_tokens_end() -> None:
    criteria = StopCriteria(
        max_new=9, eos_ids=frozenset({2}), stop_token_ids=frozenset({7}), ignore_eos=True, min_tokens=2
    )
    assert criteria.ending_ids == {7}
    assert criteria.check_token(2, 5) is None
    assert criteria.check_token(7, 5) == Finish(STOP, 7)


def test_no_token_ends_a_sequence_before_min_tokens() -> None:
    criteria = StopCriteria(max_new=9, eos_ids=frozenset({2}), stop_token_ids=frozenset({7}), min_tokens=3)
    assert criteria.ending_ids == {2, 7}
    assert [criteria.check_token(2, index) for index in range(4)] == [None] * 3 + [Finish(STOP, 2)]


# --------------------------------------------------------------------------------------------------- detokenisation


@settings(max_examples=400, deadline=None)
@given(st.data(), kinds)
def test_pieces_are_always_the_text_so_far(data: st.DataObject, kind: str) -> None:
    tokenizer, ids = tokenizer_of(kind), data.draw(ids_of(kind))
    detokenizer, shown = IncrementalDetokenizer(TextDecoder(tokenizer)), ""
    texts = []
    for count, token in enumerate(ids, 1):
        shown += detokenizer.push(token)
        texts.append(shown)
        assert shown + detokenizer.pending == decode(tokenizer, ids[:count])
    final = shown + detokenizer.flush()
    assert final == decode(tokenizer, ids)
    assert all(final.startswith(text) for text in texts)
    assert detokenizer.pending == ""


def test_unseen_tokens_do_not_become_the_context_of_a_leading_space() -> None:
    tokenizer = tokenizer_of("byte-fallback")
    the, fox, special = tokenizer.convert_tokens_to_ids(["▁the", "▁fox", "</s>"])
    detokenizer = IncrementalDetokenizer(TextDecoder(tokenizer))
    ids = [the, *[special, len(tokenizer) + 1] * 20, fox]
    assert "".join(detokenizer.push(token) for token in ids) == "the fox" == decode(tokenizer, ids)


@given(st.text(max_size=60))
def test_valid_text_never_shows_a_replacement_character(text: str) -> None:
    assume("\ufffd" not in text)
    tokenizer = tokenizer_of("byte-level")
    detokenizer = IncrementalDetokenizer(TextDecoder(tokenizer))
    pieces = [detokenizer.push(token) for token in tokenizer.encode(text, add_special_tokens=False)]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
def test_texts_of_single_tokens_make_up_the_text(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    decoder = TextDecoder(tokenizer)
    given, text = {
        "byte-level": (CORPUS[0], CORPUS[0]),
        "byte-fallback": ("▁the▁foxes▁▁▁a.", " the foxes   a."),
    }[kind]
    ids = tokenizer.encode(given, add_special_tokens=False)
    assert "".join(map(decoder.token_text, ids)) == text
    special = tokenizer.convert_tokens_to_ids("</s>")
    assert decoder.token_text(special) == "</s>"
    assert decoder.token_text(len(tokenizer) + 1) == ""


class CountingTokenizer:
    """Counts the tokens that are decoded."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.decoded = 0

    def decode(self, token_ids: list[int], **options: bool) -> Any:
        self.decoded += len(token_ids)
        return self._tokenizer.decode(token_ids, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@pytest.mark.parametrize("kind", KINDS)
def test_work_a_token_does_not_grow(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    ordinary = [i % len(tokenizer) for i in range(0, 7 * 3000, 7)]
    broken = tokenizer.convert_tokens_to_ids("<0xE2>" if kind == "byte-fallback" else "â") or 0
    for ids in (ordinary, [broken] * 3000):
        counting = CountingTokenizer(tokenizer)
        detokenizer = IncrementalDetokenizer(TextDecoder(counting))
        shown = "".join(detokenizer.push(token) for token in ids) + detokenizer.flush()
        assert shown == decode(tokenizer, ids)
        assert counting.decoded < 25 * len(ids)


@pytest.mark.model
def test_pieces_of_the_packaged_model() -> None:
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("smollm2").location, local_files_only=True)
    decoder = TextDecoder(tokenizer)
    for step in (1, 7, 613, 4099):
        ids = [(i * step) % (len(tokenizer) + 5) for i in range(700)]
        ids += tokenizer.encode("".join(CORPUS))
        detokenizer = IncrementalDetokenizer(decoder)
        shown = ""
        for count, token in enumerate(ids, 1):
            shown += detokenizer.push(token)
            if count % 50 == 0:
                assert shown + detokenizer.pending == decode(tokenizer, ids[:count])
        assert shown + detokenizer.flush() == decode(tokenizer, ids)


# ----------------------------------------------------------------------------------------------------- stop strings

few_letters = st.text("ab", min_size=1, max_size=8)


def first_match(pieces: list[str], stops: list[str], min_tokens: int) -> tuple[str, str, int] | None:
    """By looking at every position: text before the match, stop string, number of pieces."""
    text = "".join(pieces)
    ends = [sum(map(len, pieces[:count])) for count in range(len(pieces) + 1)]
    for end in range(1, len(text) + 1):
        count = next(i for i, limit in enumerate(ends) if limit >= end)
        found = max((stop for stop in stops if text[:end].endswith(stop)), key=len, default="")
        if found and count >= min_tokens:
            return text[: end - len(found)], found, count
    return None


@settings(max_examples=500)
@given(
    st.lists(st.text("ab", max_size=6), max_size=16),
    st.lists(few_letters, min_size=1, max_size=4),
    st.integers(0, 8),
)
def test_matcher_equals_a_search_of_the_whole_text(
    pieces: list[str], stops: list[str], min_tokens: int
) -> None:
    matcher, shown = StopStringMatcher(stops, min_tokens), ""
    expected = first_match(pieces, stops, min_tokens)
    for count, piece in enumerate(pieces, 1):
        text, stop = matcher.push(piece, count)
        shown += text
        if stop is not None:
            assert (shown, stop, count) == expected
            return
        if expected:
            assert expected[0].startswith(shown)
    assert expected is None
    assert shown + matcher.flush() == "".join(pieces)


@given(
    st.text("ab", max_size=20), st.lists(few_letters, min_size=1, max_size=3), st.lists(st.integers(0, 20))
)
def test_the_cut_does_not_depend_on_the_division_into_tokens(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    def run(pieces: list[str]) -> tuple[str, str | None]:
        matcher, shown = StopStringMatcher(stops), ""
        for count, piece in enumerate(pieces, 1):
            released, stop = matcher.push(piece, count)
            shown += released
            if stop is not None:
                return shown, stop
        return shown + matcher.flush(), None

    borders = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    assert run([text]) == run([text[a:b] for a, b in pairwise(borders)])


def test_a_stop_string_that_overlaps_itself_is_not_missed() -> None:
    for stop in ("aabaaab", "aabaaac", "abababb", "aaab"):
        for before in ("", "a", "aa", "aab", "aaba", "aabaa", "abab", "ababab", "aabaaabaa"):
            end = (before + stop).index(stop) + len(stop)
            matcher = StopStringMatcher([stop])
            steps = [matcher.push(char, count) for count, char in enumerate((before + stop)[:end], 1)]
            assert "".join(step.text for step in steps) == (before + stop)[: end - len(stop)]
            assert [step.stop for step in steps] == [None] * (end - 1) + [stop]


def test_text_is_held_back_only_while_it_can_begin_a_stop_string() -> None:
    matcher = StopStringMatcher(["END.", "\n\n"])
    steps = [matcher.push(piece, i) for i, piece in enumerate(["so E", "ND", "ing\n", "x\n", "\ny"], 1)]
    assert [step.text for step in steps] == ["so ", "", "ENDing", "\nx", ""]
    assert [step.stop for step in steps] == [None] * 4 + ["\n\n"]


def test_pending_text_counts_and_counts_once() -> None:
    assert StopStringMatcher(["\n"]).push("a", 1, pending="\nb") == ("a", "\n")
    matcher = StopStringMatcher(["\n"], min_tokens=2)
    assert matcher.push("a", 1, pending="\n") == ("a", None)  # complete at one token: too early
    assert matcher.push("\nb", 2) == ("\nb", None)
    assert matcher.push("c\n", 3) == ("c", "\n")
    changed = StopStringMatcher(["\n"])
    assert changed.push("a", 1, pending="\ufffd") == ("a", None)
    assert changed.push("\n", 2) == ("", "\n")


# --------------------------------------------------------------------------------------------------------- assembly


def assemble(
    tokenizer: Any, ids: list[int], criteria: StopCriteria, stops: tuple[str, ...] = (), stream: bool = True
) -> OutputAssembler:
    """Run one sequence; checks that its pieces agree with its result."""
    output = OutputAssembler(tokenizer and TextDecoder(tokenizer), criteria, stops, stream=stream)
    pieces = []
    for token in ids:
        pieces.append(output.push(token, TokenLogprob(token, -1.0)))
        assert pieces[-1].finish == output.finish
        if output.finish:
            break
    else:
        pieces.append(output.end(FinishReason.CANCELLED))
    assert "".join(piece.text for piece in pieces) == output.text
    assert [token for piece in pieces for token in piece.token_ids] == output.token_ids
    assert [entry.token_id for entry in output.logprobs] == output.token_ids
    assert output.token_ids == ids[: len(output.token_ids)]
    return output


@settings(max_examples=300, deadline=None)
@given(st.data(), kinds)
def test_stop_strings_cut_text_and_tokens_at_the_same_place(data: st.DataObject, kind: str) -> None:
    tokenizer, ids = tokenizer_of(kind), data.draw(ids_of(kind, min_size=1))
    text = decode(tokenizer, ids)
    length = st.integers(1, 5)
    stops = data.draw(
        st.lists(
            st.one_of(
                st.tuples(st.integers(0, max(0, len(text) - 1)), length).map(
                    lambda p: text[p[0] : p[0] + p[1]]
                ),
                st.sampled_from([" the", "\n\n", "fox", "es.", "日本"]),
            ),
            min_size=1,
            max_size=3,
        )
    )
    stops = [stop for stop in stops if stop and "\ufffd" not in stop]
    assume(stops)
    output = assemble(
        tokenizer, ids, StopCriteria(max_new=len(ids) + 1), tuple(stops), data.draw(st.booleans())
    )
    for count in range(1, len(ids) + 1):
        whole = decode(tokenizer, ids[:count])
        if match := first_match([whole], stops, 0):
            assert (output.text, output.finish, len(output.token_ids)) == (
                match[0],
                Finish(STOP, match[1]),
                count,
            )
            return
    assert output.finish == Finish(FinishReason.CANCELLED)
    assert output.text == text


@settings(max_examples=200, deadline=None)
@given(st.data(), kinds, st.booleans())
def test_the_text_is_the_same_with_and_without_a_stream(
    data: st.DataObject, kind: str, ignore_eos: bool
) -> None:
    tokenizer, ids = tokenizer_of(kind), data.draw(ids_of(kind, min_size=1))
    criteria = StopCriteria(
        max_new=data.draw(st.integers(1, 40)),
        eos_ids=frozenset(data.draw(st.lists(st.sampled_from(ids), max_size=1))),
        stop_token_ids=frozenset(data.draw(st.lists(st.sampled_from(ids), max_size=1))),
        ignore_eos=ignore_eos,
    )
    streamed, whole = (assemble(tokenizer, ids, criteria, stream=stream) for stream in (True, False))
    assert (streamed.text, streamed.token_ids, streamed.finish) == (whole.text, whole.token_ids, whole.finish)
    assert whole.finish is not None
    shown = whole.token_ids[:-1] if whole.finish.reason is STOP else whole.token_ids
    assert whole.text == decode(tokenizer, shown)


def test_an_ending_token_has_no_text_even_if_it_is_an_ordinary_word() -> None:
    tokenizer = tokenizer_of("plain")
    the, fox, dot = tokenizer.convert_tokens_to_ids(["the", "fox", "."])
    output = assemble(tokenizer, [the, fox, dot], StopCriteria(max_new=9, stop_token_ids=frozenset({dot})))
    assert output.text == "the fox"
    assert output.token_ids == [the, fox, dot]
    assert output.finish == Finish(STOP, dot)


def test_a_stop_string_wins_over_the_length_limit() -> None:
    tokenizer = tokenizer_of("plain")
    the, fox = tokenizer.convert_tokens_to_ids(["the", "fox"])
    output = assemble(tokenizer, [the, fox], StopCriteria(max_new=2), (" fox",))
    assert (output.text, output.finish) == ("the", Finish(STOP, " fox"))
    held = assemble(tokenizer, [the, fox], StopCriteria(max_new=2), ("foxes",))
    assert (held.text, held.finish) == ("the fox", Finish(LENGTH))


def test_a_newline_of_a_byte_fallback_tokenizer_stops_at_once() -> None:
    tokenizer = tokenizer_of("byte-fallback")
    the, newline, fox = tokenizer.convert_tokens_to_ids(["▁the", "<0x0A>", "▁fox"])
    output = assemble(tokenizer, [the, newline, fox], StopCriteria(max_new=9), ("\n",))
    assert (output.text, output.token_ids) == ("the", [the, newline])
    late = assemble(tokenizer, [the, newline, fox, newline], StopCriteria(max_new=9, min_tokens=3), ("\n",))
    assert (late.text, late.token_ids) == ("the\n fox", [the, newline, fox, newline])


def test_a_stop_string_in_a_long_run_of_bytes_is_never_shown() -> None:
    tokenizer = tokenizer_of("byte-fallback")
    letter, newline, the = tokenizer.convert_tokens_to_ids(["<0x41>", "<0x0A>", "▁the"])
    ids = [letter] * 300 + [newline] * 10
    for ending, criteria in (
        ([the], StopCriteria(max_new=999)),
        ([the], StopCriteria(max_new=999, stop_token_ids=frozenset({the}))),
        ([], StopCriteria(max_new=310)),
        ([], StopCriteria(max_new=999)),
    ):
        output = assemble(tokenizer, ids + ending, criteria, ("\n",))
        assert (output.text, output.finish) == ("A" * 300, Finish(STOP, "\n"))


def test_without_a_tokenizer_there_are_tokens_only() -> None:
    output = OutputAssembler(None, StopCriteria(max_new=2), stream=True)
    assert output.push(5) == ("", (5,), None)
    assert output.push(6) == ("", (6,), Finish(LENGTH))
    assert output.text == ""
    with pytest.raises(RequestError, match="stop_token_ids"):
        OutputAssembler(None, StopCriteria(max_new=2), ("x",))


def test_an_early_end_releases_what_was_held_back() -> None:
    tokenizer = tokenizer_of("plain")
    the, fox = tokenizer.convert_tokens_to_ids(["the", "fox"])
    output = OutputAssembler(tokenizer, StopCriteria(max_new=9), ("fox and hounds",), stream=True)
    assert output.push(the) == ("the", (the,), None)
    assert output.push(fox) == (" ", (fox,), None)
    assert output.end(FinishReason.DEADLINE) == ("fox", (), Finish(FinishReason.DEADLINE))
    assert output.end(FinishReason.CANCELLED) == ("", (), Finish(FinishReason.DEADLINE))
    with pytest.raises(ValueError, match="after the end"):
        output.push(the)
