from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import tokenizers as small
from toka_async.text.automaton import Automaton
from toka_async.text.detokenize import Detokenizer
from toka_async.text.stop import StopFilter, StopMatch, StopStrings, StopWatch, first_stop_token, window_stop
from toka_async.text.tokenizer import Tokenizer
from toka_async.text.vocabulary import Vocabulary

Builder = Callable[[], Tokenizer]


@cache
def vocabulary(build: Builder) -> Vocabulary:
    return Vocabulary(build())


def found_by_search(
    stops: StopStrings, tokenizer: Tokenizer, ids: Sequence[int], min_tokens: int, continues: bool
) -> int | None:
    """Decode after every token, and search the whole text."""
    detokenizer, text, allowed = Detokenizer(tokenizer, continues=continues), "", 0
    for count, token_id in enumerate(ids, start=1):
        text += detokenizer.push([token_id])
        if count <= min_tokens:
            allowed = len(text)
        elif any(string in text[max(0, allowed - len(string) + 1) :] for string in stops.strings):
            return count
    return None


def found_by_window(
    stops: StopStrings, tokenizer: Tokenizer, ids: Sequence[int], min_tokens: int, continues: bool, build: Builder
) -> int | None:
    """Look at the last ids after each token that the mask has, as the engine does."""
    mask = stops.completion_mask(vocabulary(build))
    for count, token_id in enumerate(ids, start=1):
        window = ids[max(0, count - stops.window) : count]
        if mask[token_id] and count > min_tokens:
            found = window_stop(stops, tokenizer, window, count, continues=continues, min_tokens=min_tokens)
            if found is not None:
                return found
    return None


def draw_ids(data: st.DataObject, tokenizer: Tokenizer) -> list[int]:
    """Ids of texts and random ones; never so many special ones in a row that a window is too short."""
    text = data.draw(st.sampled_from([*small.CORPUS, "Question: the answer", "é😀é"]))
    real = tokenizer.encode(text, add_special_tokens=False)
    random = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12))
    return [*random[:6], *real[: data.draw(st.integers(0, 30))], *random[6:]]


def draw_stops(data: st.DataObject, text: str) -> StopStrings:
    """Parts of `text`, and others."""
    strings = data.draw(st.lists(st.sampled_from(["the", "Question:", "�", "�a", " ", "好", "\n"]), max_size=2))
    for _ in range(data.draw(st.integers(0 if strings else 1, 2))):
        start = data.draw(st.integers(0, max(0, len(text) - 1)))
        strings.append(text[start : start + data.draw(st.integers(1, 8))] or "x")
    return StopStrings(strings, include=data.draw(st.booleans()))


@pytest.mark.parametrize("build", small.ALL)
@settings(max_examples=60)
@given(data=st.data())
def test_mask_and_window_find_what_a_full_search_finds(build: Builder, data: st.DataObject) -> None:
    tokenizer = build()
    ids, continues = draw_ids(data, tokenizer), bool(data.draw(st.booleans()))
    stops = draw_stops(data, tokenizer.decode(ids, continues=continues))
    min_tokens = data.draw(st.sampled_from([0, 0, 1, 5]))
    expected = found_by_search(stops, tokenizer, ids, min_tokens, continues)
    assert found_by_window(stops, tokenizer, ids, min_tokens, continues, build) == expected
    assert first_stop_token(stops, tokenizer, ids, continues=continues, min_tokens=min_tokens) == expected


@pytest.mark.parametrize("build", small.ALL)
@settings(max_examples=60)
@given(data=st.data())
def test_a_watched_sample_gets_the_answers_of_each_window(build: Builder, data: st.DataObject) -> None:
    tokenizer = build()
    ids = draw_ids(data, tokenizer) * data.draw(st.sampled_from([1, 1, 3]))
    stops = draw_stops(data, tokenizer.decode(ids, continues=True) + "the the")
    min_tokens = data.draw(st.sampled_from([0, 0, 1, 5]))
    mask = stops.completion_mask(vocabulary(build))
    watch = StopWatch(stops, tokenizer, min_tokens=min_tokens)
    for count, token_id in enumerate(ids, start=1):
        if mask[token_id] and count > min_tokens:
            window = ids[max(0, count - stops.window) : count]
            expected = window_stop(stops, tokenizer, window, count, continues=True, min_tokens=min_tokens)
            assert watch.check(window, count) == expected
            if expected is not None:
                return


def test_a_watched_sample_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = small.byte_level()
    stops, (token_id,) = StopStrings(["x" * 500 + "y"]), tokenizer.encode("x", add_special_tokens=False)
    looked, find = [], Automaton.find

    def counted(self: Automaton, state: int, text: str, start: int = 0) -> tuple[int, int]:
        looked.append(len(text) - start)
        return find(self, state, text, start)

    monkeypatch.setattr(Automaton, "find", counted)
    watch = StopWatch(stops, tokenizer)
    for count in range(1000, 1500):
        assert watch.check([token_id] * stops.window, count) is None
    assert sum(looked) == stops.window + 498


@given(data=st.data())
def test_streamed_text_equals_cut_text(data: st.DataObject) -> None:
    text = data.draw(st.text("ab", max_size=30))
    strings = data.draw(st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4))
    stops = StopStrings(strings, include=data.draw(st.booleans()))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    early: bool = data.draw(st.booleans())
    min_end = cuts[0] if cuts and early else 0
    match = stops.find(text, min_end=min_end)
    expected = text if match is None else text[: match.cut]

    stream, sent = StopFilter(stops), ""
    for low, high in zip([0, *cuts], [*cuts, len(text)], strict=True):
        piece, stopped = stream.push(text[low:high], may_stop=high > min_end)
        sent += piece
        assert expected.startswith(sent)
        assert stopped == (match is not None and high >= match.end)
    sent += stream.finish()
    assert sent == expected
    assert stream.stopped == (match is not None)


def first_match(text: str, strings: Sequence[str], min_end: int) -> tuple[int, str] | None:
    """The definition: the first end after `min_end` of a string, the longest of those that end there."""
    for end in range(min_end + 1, len(text) + 1):
        if ended := [string for string in strings if text[:end].endswith(string)]:
            return end, max(ended, key=len)
    return None


WORDS = st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=5)


@settings(max_examples=300)
@given(text=st.text("abc", max_size=40), strings=WORDS, data=st.data())
def test_a_stream_ends_where_the_definition_says_and_holds_no_more_than_it_must(
    text: str, strings: list[str], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    min_end = data.draw(st.sampled_from([0, *cuts]))
    expected = first_match(text, strings, min_end)
    found = StopStrings(strings).find(text, min_end=min_end)
    assert (None if found is None else (found.end, found.string)) == expected
    stream, sent = StopFilter(StopStrings(strings)), ""
    for low, high in zip([0, *cuts], [*cuts, len(text)], strict=True):
        piece, stopped = stream.push(text[low:high], may_stop=high > min_end)
        sent += piece
        if stopped:
            assert expected is not None
            assert low <= expected[0] <= high
            assert (stream.string, sent) == (expected[1], text[: expected[0] - len(expected[1])])
            return
        beginnings = [size for string in strings for size in range(len(string)) if text[:high].endswith(string[:size])]
        assert sent == text[: high - max(beginnings)]
    assert expected is None
    assert sent + stream.finish() == text


@given(strings=WORDS, text=st.text("abc", max_size=60))
def test_the_steps_of_the_automaton_are_few(strings: list[str], text: str) -> None:
    """Each step but the last of a character makes the state shorter, and only the last makes it longer, by one."""
    automaton, state, depth = Automaton(strings), 0, {0: 0}
    for parent, children in enumerate(automaton.children):
        depth |= dict.fromkeys(children.values(), depth[parent] + 1)
    for char in text:
        following = automaton.next(state, char)
        assert depth[following] <= depth[state] + 1
        state = following
    assert all(depth[each] < depth[place] for place, each in enumerate(automaton.shorter) if place)


def test_the_match_that_ends_first_counts() -> None:
    assert StopStrings(["later", "ab"]).find("x ab later") == StopMatch("ab", 2, 4, 2)
    assert StopStrings(["b", "ab"]).find("xab") == StopMatch("ab", 1, 3, 1)
    assert StopStrings(["abcd", "bc"]).find("abcd") == StopMatch("bc", 1, 3, 1)
    assert StopStrings(["ab"], include=True).find("xab!") == StopMatch("ab", 1, 3, 3)
    assert StopStrings(["ab"]).find("ab ab", start=1) == StopMatch("ab", 3, 5, 3)
    assert StopStrings(["aa"]).find("aaa", min_end=2) == StopMatch("aa", 1, 3, 1)
    assert StopStrings(["ab"]).find("a b") is None


def test_a_stop_string_across_tokens_is_cut_at_its_first_character() -> None:
    tokenizer = small.byte_fallback()
    stops, ids = StopStrings(["é好"]), tokenizer.encode("he é好 the", add_special_tokens=False)
    count = first_stop_token(stops, tokenizer, ids)
    assert count is not None
    text = tokenizer.decode(ids[:count])
    match = stops.find(text)
    assert match is not None
    assert text[: match.cut] == "he "
    assert not tokenizer.decode(ids[: count - 1]).endswith("é好")


def test_skipped_tokens_do_not_interrupt_a_stop_string() -> None:
    tokenizer, end = small.byte_level(), small.byte_level().eos_token_id
    assert end is not None
    ids = [*tokenizer.encode("Ques"), *[end] * 20, *tokenizer.encode("tion:")]
    stops = StopStrings(["Question:"])
    assert first_stop_token(stops, tokenizer, ids) == len(ids)
    assert first_stop_token(stops, tokenizer, ids, skip_special_tokens=False) is None
    assert window_stop(stops, tokenizer, ids[-stops.window :], len(ids)) is None  # more than SLACK


def test_the_window_may_begin_inside_of_a_character() -> None:
    tokenizer = small.byte_fallback()
    ids = [3 + byte for byte in ("好" * 20 + "�x").encode()]
    stops = StopStrings(["�"])
    windows = [ids[max(0, count - stops.window) : count] for count in range(1, 61)]
    found = [window_stop(stops, tokenizer, window, count) for count, window in enumerate(windows, start=1)]
    assert found == [None] * 60
    assert window_stop(stops, tokenizer, ids[:63][-stops.window :], 63) == 63


def test_the_mask_is_small_and_covers_padded_ids() -> None:
    build = small.byte_level
    mask = StopStrings(["Question:"]).completion_mask(vocabulary(build), size=400)
    tails = [b"Question:"[begin:] for begin in range(1, 9)]
    pieces = [build().token_bytes(i) for i in range(build().vocab_size)]
    expected = [b"Question:" in piece or any(piece.startswith(tail) for tail in tails) for piece in pieces]
    assert mask.tolist() == expected + [False] * (400 - len(expected))
    assert 0 < sum(expected) < 20


def test_the_mask_of_a_long_string() -> None:
    """Which would take half a minute if every tail of the string were looked at."""
    index = vocabulary(small.byte_level)
    mask = StopStrings(["ab" * 200_000]).completion_mask(index)
    assert mask.any()
    assert mask.tolist() == StopStrings(["ab" * 200]).completion_mask(index).tolist()


@pytest.mark.parametrize("strings", [[], [""], ["a", ""], ["\ud800"]])
def test_bad_strings_are_refused(strings: list[str]) -> None:
    with pytest.raises(ValueError, match="stop"):
        StopStrings(strings)
