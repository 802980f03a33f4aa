"""Tokenizers built from GGUF metadata cut and merge text as the original ones do."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import pytest
from gguf import TokenType
from tokenizers import Tokenizer

from helpers_gguf import Vocabulary, byte_level_vocabulary, tiny_model, write_gguf
from pilotfish.errors import CheckpointError, UnsupportedModelError
from pilotfish.models.weights.gguf_reader import GGUFFile
from pilotfish.models.weights.gguf_tokenizer import build_tokenizer, tokenizer_config

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # SWIG types without __module__
    import sentencepiece

TEXTS = (
    "hello  hello hellohello",
    "Hello, world! It's 12345 + 1234.",
    "  1 2  12\n\n\t3",
    "naïve café, e\u0301, ½ Ⅷ ٣",
    "日本語 🐟👩‍🚀",
    "a\x00b\r\nc",
    "",
    " ",
)

CORPUS = (
    "The pilot fish swims ahead of the shark. Pilot fish eat the shark's parasites, and the shark does not eat them. "
    "A small, fast draft swims ahead of a large target; the target checks what the draft proposes. "
    "Speculation changes nothing but time: the tokens are the target's own. 1 2 3 4 5 10 20 30 400 500."
)


def build(vocabulary: Vocabulary, tmp_path: Path) -> Tokenizer:
    model = tiny_model("llama", hidden_size=32, intermediate_size=32, num_hidden_layers=1, vocab_size=1000)
    with GGUFFile.open(write_gguf(tmp_path / "m.gguf", model, vocabulary=vocabulary)) as gguf:
        return build_tokenizer(gguf)


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    """What the pre-tokenizer cuts ``text`` into, as text."""
    normalized = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
    return [tokenizer.decoder.decode([piece]) for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normalized)]


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "deepseek-r1-qwen"])
@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_text_comes_back(pre: str, text: str, tmp_path: Path) -> None:
    tokenizer = build(byte_level_vocabulary(pre), tmp_path)
    expected = tokenizer.normalizer.normalize_str(text) if pre == "qwen2" else text
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == expected


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["It", "'s", " 12345", "  ", " ok", "...", "\n", "\n", "I", "'", "M"]),
        ("smollm", ["It", "'s", " ", "1", "2", "3", "4", "5", "  ", " ok", "...", "\n", "\n", "I", "'", "M"]),
        ("llama-bpe", ["It", "'s", " ", "123", "45", "  ", " ok", "...\n\n", "I", "'M"]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", "5", "  ", " ok", "...\n\n", "I", "'M"]),
    ],
)
def test_pre_tokenizers_cut_as_their_models_do(pre: str, expected: list[str], tmp_path: Path) -> None:
    assert pieces(build(byte_level_vocabulary(pre), tmp_path), "It's 12345   ok...\n\nI'M") == expected


def test_digits_are_cut_before_spaces_join_them(tmp_path: Path) -> None:
    # GPT-2's rule alone gives ' ', ' 1': the second space goes with the digit, and 'ĠĠ' is never found.
    tokens = build(byte_level_vocabulary("smollm"), tmp_path).encode("  1").tokens
    assert tokens == ["ĠĠ", "1"]
    assert build(byte_level_vocabulary("gpt-2"), tmp_path).encode("  1").tokens == ["Ġ", "Ġ1"]


def test_merges_apply_in_order(tmp_path: Path) -> None:
    tokenizer = build(byte_level_vocabulary("gpt-2"), tmp_path)
    assert tokenizer.encode("hello hello 12345").tokens == ["hello", "Ġhello", "Ġ", "1234", "5"]
    assert tokenizer.encode(" 13").tokens == ["Ġ1", "3"]


def test_llama3_takes_whole_tokens_whatever_the_merges_give(tmp_path: Path) -> None:
    base = byte_level_vocabulary("llama-bpe", {"ggml.add_bos_token": False})
    vocabulary = Vocabulary(
        model="gpt2",
        pre="llama-bpe",
        tokens=[*base.tokens, "fish"],  # no merges lead to it
        types=[*base.types, TokenType.NORMAL],
        merges=base.merges,
        settings=base.settings,
    )
    assert build(vocabulary, tmp_path).encode("fish").tokens == ["fish"]


def test_control_and_user_defined_tokens_are_whole(tmp_path: Path) -> None:
    tokenizer = build(byte_level_vocabulary(), tmp_path)
    encoded = tokenizer.encode("<|im_start|>hello<think><|im_end|>")
    assert encoded.ids[0] == 1
    assert encoded.tokens == ["<|im_start|>", "hello", "<think>", "<|im_end|>"]
    assert tokenizer.decode(encoded.ids) == "hello<think>"  # user-defined tokens are text, control tokens are not
    assert tokenizer.get_vocab_size() == len(byte_level_vocabulary().tokens)


@pytest.mark.parametrize(
    ("pre", "settings", "expected"),
    [
        ("smollm", {"ggml.add_bos_token": True}, [1, "hello"]),
        ("smollm", {"ggml.add_bos_token": True, "ggml.add_eos_token": True}, [1, "hello", 2]),
        ("smollm", {"ggml.add_eos_token": True}, ["hello", 2]),
        ("smollm", {}, ["hello"]),
    ],
)
def test_bos_and_eos(pre: str, settings: dict[str, bool], expected: list[Any], tmp_path: Path) -> None:
    tokenizer = build(byte_level_vocabulary(pre, settings), tmp_path)
    hello = tokenizer.token_to_id("hello")
    assert tokenizer.encode("hello").ids == [hello if token == "hello" else token for token in expected]
    assert tokenizer.encode("hello", add_special_tokens=False).ids == [hello]


@pytest.mark.parametrize(("pre", "adds_bos"), [("llama-bpe", True), ("qwen2", False), ("smollm", False)])
def test_bos_of_files_that_do_not_say(pre: str, adds_bos: bool, tmp_path: Path) -> None:
    base = byte_level_vocabulary(pre)
    settings = {key: value for key, value in base.settings.items() if key != "ggml.add_bos_token"}
    vocabulary = Vocabulary(
        model="gpt2", pre=pre, tokens=base.tokens, types=base.types, merges=base.merges, settings=settings
    )
    ids = build(vocabulary, tmp_path).encode("hello").ids
    assert (ids[0] == 1) is adds_bos


def test_padding_tokens_are_no_text(tmp_path: Path) -> None:
    base = byte_level_vocabulary()
    vocabulary = Vocabulary(
        model="gpt2",
        pre="llama-bpe",
        tokens=[*base.tokens, "[PAD271]"],
        types=[*base.types, TokenType.UNUSED],
        merges=base.merges,
        settings=base.settings,
    )
    assert build(vocabulary, tmp_path).token_to_id("[PAD271]") is None


def test_tokenizer_config(tmp_path: Path) -> None:
    vocabulary = byte_level_vocabulary(settings={"ggml.padding_token_id": 0})
    with GGUFFile.open(write_gguf(tmp_path / "m.gguf", tiny_model("llama"), vocabulary=vocabulary)) as gguf:
        config = tokenizer_config(gguf)
    assert (config["bos_token"], config["eos_token"], config["pad_token"]) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
    )
    assert "unk_token" not in config
    assert config["model_max_length"] == 128
    assert config["chat_template"] == vocabulary.settings["chat_template"]


def trained_sentencepiece() -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([CORPUS] * 3),
        model_writer=model,
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["<sep>"],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def sentencepiece_vocabulary(processor: sentencepiece.SentencePieceProcessor) -> Vocabulary:
    """As llama.cpp's converter writes a SentencePiece model."""
    ids = range(processor.vocab_size())

    def kind(index: int) -> TokenType:
        if processor.is_unknown(index):
            return TokenType.UNKNOWN
        if processor.is_control(index):
            return TokenType.CONTROL
        if processor.is_byte(index):
            return TokenType.BYTE
        return TokenType.USER_DEFINED if processor.id_to_piece(index) == "<sep>" else TokenType.NORMAL

    return Vocabulary(
        model="llama",
        tokens=[processor.id_to_piece(index) for index in ids],
        types=[kind(index) for index in ids],
        scores=[processor.get_score(index) for index in ids],
        settings={"ggml.bos_token_id": 1, "ggml.eos_token_id": 2, "ggml.unknown_token_id": 0},
    )


def test_sentencepiece_vocabulary_agrees_with_sentencepiece(tmp_path: Path) -> None:
    processor = trained_sentencepiece()
    tokenizer = build(sentencepiece_vocabulary(processor), tmp_path)
    texts = [*TEXTS, CORPUS, "the shark's draft", "pilotfish swims 12345", "Unseen wörds, ünd 🐟"]
    for text in texts:
        expected = processor.encode(text.replace("\x00", ""))
        ids = tokenizer.encode(text.replace("\x00", "")).ids
        assert ids == [1, *expected], text  # BOS is added where the file says nothing
        assert tokenizer.decode(ids) == text.replace("\x00", ""), text


def test_sentencepiece_without_space_prefix(tmp_path: Path) -> None:
    processor = trained_sentencepiece()
    base = sentencepiece_vocabulary(processor)
    settings = {**base.settings, "ggml.add_space_prefix": False, "ggml.add_bos_token": False}
    vocabulary = Vocabulary(model="llama", tokens=base.tokens, types=base.types, scores=base.scores, settings=settings)
    tokenizer = build(vocabulary, tmp_path)
    assert tokenizer.encode(" the shark").tokens[0].startswith("▁")
    assert not tokenizer.encode("the shark").tokens[0].startswith("▁")
    assert tokenizer.decode(tokenizer.encode(" the shark").ids) == " the shark"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": None}, r"tokenizer\.ggml\.pre=None is not supported; supported are gpt-2, smollm, llama-bpe"),
        ({"pre": "chameleon"}, "pre='chameleon' is not supported"),
        ({"model": "t5"}, r"tokenizer\.ggml\.model='t5' is not supported: only 'gpt2'"),
        ({"merges": ["h x y z"]}, "tokens and merges do not fit each other"),
        ({"merges": ["hello"]}, "merges has the entry 'hello': must be two tokens"),
        ({"merges": None}, r"tokenizer\.ggml\.merges is missing"),
        ({"types": [TokenType.NORMAL] * 3}, r"token_type has 3 entries for 271 tokens"),
        (
            {"settings": {"ggml.bos_token_id": 5000, "ggml.add_bos_token": True}},
            "bos_token_id=5000: must be from 0 to 270",
        ),
    ],
)
def test_broken_tokenizers(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    base = byte_level_vocabulary()
    fields = {name: getattr(base, name) for name in ("model", "pre", "tokens", "types", "merges", "settings")}
    with pytest.raises(CheckpointError, match=rf"m\.gguf: .*{message}") as caught:
        build(Vocabulary(**(fields | changes)), tmp_path)
    assert isinstance(caught.value, UnsupportedModelError) == ("not supported" in message)
