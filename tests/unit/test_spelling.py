"""What a vocabulary says of a text's length in tokens: never more than it has, and nothing where it cannot be known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from pilotfish.text.spelling import Spelling

MERGES = [("a", "a"), ("aa", "aa"), ("Ġ", "Ġ"), ("Ġ", "a")]
LACKING = "\x04é"  # characters of whose bytes the vocabulary has none, or not all


def byte_level(lacking: str = "") -> Tokenizer:
    """Tokens of up to 4 bytes, without tokens for the last bytes of ``lacking``'s characters."""
    spelled = [pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(c)[0][0][-1] for c in lacking]
    alphabet = sorted({*pre_tokenizers.ByteLevel.alphabet()} - {*spelled})
    vocab = {token: i for i, token in enumerate([*alphabet, *map("".join, MERGES)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\s+"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.add_special_tokens([AddedToken("<|é|>", normalized=False)])
    return tokenizer


def spelling_of(tokenizer: Tokenizer) -> Spelling:
    spelling = Spelling.from_json(tokenizer.to_str())
    assert spelling is not None
    return spelling


@pytest.mark.parametrize("lacking", ["", LACKING])
def test_no_text_has_fewer_tokens(lacking: str) -> None:
    tokenizer = byte_level(lacking)
    spelling = spelling_of(tokenizer)
    assert spelling.max_bytes == len("<|é|>".encode()) and len(spelling.dropped) == len(lacking)

    @given(text=st.text(st.sampled_from("aé \n\x04🐟"), max_size=40) | st.text(max_size=40), times=st.integers(1, 5))
    def check(text: str, times: int) -> None:
        for some in (text * times, f"<|é|>{text}" * times):
            assert spelling.min_tokens(some) <= len(tokenizer.encode(some, add_special_tokens=False).ids)

    check()


def test_the_bound_is_reached_by_the_longest_token_and_by_dropped_bytes() -> None:
    tokenizer = byte_level(LACKING)
    for text, count in (("<|é|>" * 7, 7), ("\x04" * 100, 0), ("", 0)):
        assert len(tokenizer.encode(text).ids) == count
        assert spelling_of(tokenizer).min_tokens(text) in (count, count - 1)  # one byte of each é is dropped
    assert spelling_of(tokenizer).min_tokens("x" * 601) == 101


def _normalizer(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.NFC()


def _strip(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens([AddedToken("<s>", lstrip=True)])


def _removed(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def _whitespace(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()


def _none(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = None  # type: ignore[assignment]


@pytest.mark.parametrize("change", [_normalizer, _strip, _removed, _whitespace, _none])
def test_nothing_is_known_where_tokens_may_stand_for_more_than_their_bytes(
    change: Callable[[Tokenizer], None],
) -> None:
    tokenizer = byte_level()
    assert Spelling.from_json(tokenizer.to_str()) is not None
    change(tokenizer)
    assert Spelling.from_json(tokenizer.to_str()) is None


def test_other_models_are_not_known() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert Spelling.from_json(tokenizer.to_str()) is None
