"""Stop strings: the streaming matcher against a search of the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotfish.text.stop import StopStringMatcher


def one_shot(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The definition: the shortest prefix of the text that ends in a stop string, cut at the longest such string."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[:end] if include else text[: end - len(longest)], longest
    return text, None


def run(pieces: list[str], stops: list[str], include: bool) -> tuple[list[str], str | None]:
    matcher = StopStringMatcher(stops, include_stop=include)
    out = []
    for piece in pieces:
        text, matched = matcher.push(piece)
        out.append(text)
        if matched is not None:
            return out, matched
    return [*out, matcher.flush()], None


@given(
    pieces=st.lists(st.text(alphabet="ab😀", max_size=5), max_size=12),
    stops=st.lists(st.text(alphabet="ab😀", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
)
@settings(max_examples=400, deadline=None)
def test_pieces_equal_the_one_shot_search(pieces: list[str], stops: list[str], include: bool) -> None:
    out, matched = run(pieces, stops, include)
    assert ("".join(out), matched) == one_shot("".join(pieces), stops, include)


@given(
    pieces=st.lists(st.text(alphabet="ab", min_size=1, max_size=3), max_size=10),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=2),
)
@settings(max_examples=200, deadline=None)
def test_holds_back_exactly_what_may_become_a_stop_string(pieces: list[str], stops: list[str]) -> None:
    matcher = StopStringMatcher(stops)
    seen = given_out = ""
    for piece in pieces:
        text, matched = matcher.push(piece)
        if matched is not None:
            return
        seen, given_out = seen + piece, given_out + text
        held = seen[len(given_out) :]
        candidates = [
            n for n in range(len(seen) + 1) for s in stops if n < len(s) and s.startswith(seen[len(seen) - n :])
        ]
        assert seen.startswith(given_out)
        assert len(held) == max(candidates)


def test_stop_string_across_tokens_names_the_token_that_completes_it() -> None:
    matcher = StopStringMatcher(["</s>", "STOP"])
    results = [matcher.push(piece) for piece in ["one ", "S", "T", "x ST", "OP tail"]]
    assert results == [("one ", None), ("", None), ("", None), ("STx ", None), ("", "STOP")]


def test_included_stop_string_ends_the_text() -> None:
    matcher = StopStringMatcher(["\n\n"], include_stop=True)
    assert matcher.push("a\n") == ("a", None)
    assert matcher.push("\nb") == ("\n\n", "\n\n")


def test_flush_gives_the_held_text() -> None:
    matcher = StopStringMatcher(["abc"])
    assert matcher.push("xab") == ("x", None)
    assert matcher.flush() == "ab"
    assert matcher.flush() == ""


def test_unsearched_text_does_not_match_but_may_begin_a_match() -> None:
    matcher = StopStringMatcher(["ab"])
    assert matcher.push("ab a", search=False) == ("ab ", None)
    assert matcher.push("b!") == ("", "ab")


@pytest.mark.parametrize("include", [False, True])
def test_long_repetitive_stop_string_is_linear(include: bool) -> None:
    stop = "a" * 5000 + "b"
    out, matched = run(["a" * 20000, "a" * 5000, "b"], [stop], include)
    assert matched == stop
    assert len("".join(out)) == (25001 if include else 20000)
