"""The incremental detokenizer against one-shot decoding, for byte-level BPE and for SentencePiece with byte tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pilotfish.text.detokenizer import Detokenizer

TEXTS = [
    "plain words, and more of them.",
    "naïve café — déjà vu",
    "人工智能正在改变世界。",
    "ok 😀👩‍👩‍👧‍👦 end 🇫🇷!",
    "mixed: a😀b 你c好 \u0627\u0644\u0639\u0631\u0628\u064a\u0629",
    "line\nbreak\ttab  two  spaces ",
]


class Decoder:
    """A ``tokenizers`` tokenizer as the detokenizer's protocol, counting the tokens it decodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.num_decoded = 0

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self.num_decoded += len(token_ids)
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids


def byte_level() -> Decoder:
    """Ids 0 to 255 are single bytes (in the alphabet's order), then merges that end inside characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(alphabet)}
    merges = []
    for text in ("😀", "你", "ab"):
        symbols = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)[0][0]
        merges.append((symbols[0], symbols[1]))
        vocab[symbols[:2]] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return Decoder(tokenizer)


def sentence_piece() -> Decoder:
    """Words with "▁" for the space before them, letters, and byte tokens for everything else (as in Llama 2)."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁w", "▁and", "▁end", "ok", "你"]
    pieces += [c for c in map(chr, range(33, 127)) if c != "<"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁", "w")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<eos>"])
    return Decoder(tokenizer)


DECODERS = {"byte_level": byte_level(), "sentence_piece": sentence_piece()}


def split(ids: list[int], cuts: list[int]) -> list[list[int]]:
    borders = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[a:b] for a, b in itertools.pairwise(borders)]


def stream(decoder: Decoder, pieces: list[list[int]], **options: object) -> list[str]:
    detokenizer = Detokenizer(decoder, **options)  # type: ignore[arg-type]
    return [*(detokenizer.push(piece) for piece in pieces), detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", DECODERS)
def test_token_by_token_gives_whole_characters_and_the_same_text(kind: str, text: str) -> None:
    decoder = DECODERS[kind]
    ids = decoder.ids(text)
    pieces = stream(decoder, [[i] for i in ids])
    assert "".join(pieces) == decoder.decode(ids) == text
    assert all("\ufffd" not in piece for piece in pieces)


@given(
    text=st.text(alphabet=st.sampled_from("ab 你好😀é\n"), max_size=24), cuts=st.lists(st.integers(0, 99), max_size=9)
)
@pytest.mark.parametrize("kind", DECODERS)
@settings(max_examples=60, deadline=None)
def test_any_cut_gives_the_same_text(kind: str, text: str, cuts: list[int]) -> None:
    decoder = DECODERS[kind]
    ids = decoder.ids(text)
    pieces = stream(decoder, split(ids, cuts))
    assert "".join(pieces) == decoder.decode(ids)
    assert all("\ufffd" not in piece for piece in pieces)


@given(ids=st.lists(st.integers(0, 259), max_size=60), cuts=st.lists(st.integers(0, 99), max_size=20))
@settings(max_examples=150, deadline=None)
def test_broken_bytes_equal_the_one_shot_text(ids: list[int], cuts: list[int]) -> None:
    decoder = DECODERS["byte_level"]
    assert "".join(stream(decoder, split(ids, cuts))) == decoder.decode(ids)
    assert "".join(stream(decoder, [[i] for i in ids])) == decoder.decode(ids)


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("missing", [1, 2])
def test_an_unfinished_character_ends_in_the_replacement_of_one_shot_decoding(kind: str, missing: int) -> None:
    decoder = DECODERS[kind]
    ids = decoder.ids("ok 🤖")[:-missing]
    pieces = stream(decoder, [[i] for i in ids])
    assert "".join(pieces) == decoder.decode(ids)
    assert pieces[-1].endswith("\ufffd")
    assert all("\ufffd" not in piece for piece in pieces[:-1])


@pytest.mark.parametrize("kind", DECODERS)
def test_special_tokens_are_skipped_or_kept_and_do_not_eat_spaces(kind: str) -> None:
    decoder = DECODERS[kind]
    eos = decoder.tokenizer.token_to_id("<eos>")
    ids = [*decoder.ids("a and"), eos, eos, *decoder.ids("b w w")]
    for skip in (True, False):
        pieces = stream(decoder, [[i] for i in ids], skip_special_tokens=skip)
        assert "".join(pieces) == decoder.decode(ids, skip_special_tokens=skip)
        assert ("<eos>" in "".join(pieces)) is not skip


def test_context_keeps_the_leading_space_of_the_first_word() -> None:
    decoder = DECODERS["sentence_piece"]
    prompt, output = decoder.ids("you and"), [decoder.tokenizer.token_to_id("▁w")]
    assert "".join(stream(decoder, [output])) == "w"
    assert "".join(stream(decoder, [output], context=prompt)) == " w"


def test_context_that_ends_inside_a_character_is_not_used() -> None:
    decoder = DECODERS["byte_level"]
    ids = decoder.ids("你")
    assert "".join(stream(decoder, [ids[1:], decoder.ids("ab")], context=ids[:1])) == decoder.decode(
        [*ids[1:], *decoder.ids("ab")]
    )


@pytest.mark.parametrize(
    "ids",
    [
        pytest.param([10] * 2000, id="text"),
        pytest.param([200] * 2000, id="broken bytes"),
        pytest.param([259] * 2000, id="special tokens"),
    ],
)
def test_cost_is_linear(ids: list[int]) -> None:
    decoder = byte_level()
    pieces = stream(decoder, [[i] for i in ids])
    assert decoder.num_decoded < 20 * len(ids)
    assert "".join(pieces) == decoder.decode(ids)
