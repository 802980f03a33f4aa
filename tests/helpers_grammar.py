"""Tokenizers for tests of structured output: one of 32 tokens for the engines of :mod:`fakes`, and two of all bytes."""

from __future__ import annotations

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer
from transformers import PreTrainedTokenizerFast

from fakes import EOS, VOCAB_SIZE
from pilotfish.text import Tokenizer

_CHARACTERS = [*'{}[]":,abcx012-true', "Ã", "©", "Ġ"]  # the last three stand for bytes of é, and for a blank
_JOINED = ['{"', '":', '",', '"}', "tr", "ue", "true", "ab", "]}"]


def json_tokenizer() -> Tokenizer:
    """Byte-level BPE of 31 tokens that JSON is made of, and EOS."""
    tokens = [*dict.fromkeys([*_CHARACTERS, *_JOINED])]
    tokens += [chr(ord("d") + i) for i in range(EOS - len(tokens))]
    assert len(tokens) == EOS
    merges = [("{", '"'), ('"', ":"), ('"', ","), ('"', "}"), ("t", "r"), ("u", "e"), ("tr", "ue"), ("a", "b"),
              ("]", "}")]  # fmt: skip
    vocab = {token: i for i, token in enumerate(tokens)} | {"</s>": EOS}
    return _byte_level(vocab, merges, ["</s>"])


def byte_level_tokenizer() -> Tokenizer:
    """Byte-level BPE of all bytes, then ``</s>`` (256), ``<|im_end|>``, ``<|x|>`` and ``<tool>``, a token of text."""
    vocab = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {"</s>": 256, "<|im_end|>": 257}
    return _byte_level(vocab, [], ["</s>", "<|im_end|>", "<|x|>"], ["<tool>"])


def sentencepiece_tokenizer() -> Tokenizer:
    """SentencePiece BPE with byte tokens (3 to 258) after ``<unk>``, ``<s>`` and ``</s>``, and a few words."""
    pieces = ["▁", *"{}:,abcdefg", '"', '▁"', "▁a", "ab", "▁ab", '":']
    merges = [("▁", '"'), ("▁", "a"), ("a", "b"), ("▁", "ab"), ('"', ":")]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *pieces]
    rust = RustTokenizer(
        models.BPE(
            vocab={name: i for i, name in enumerate(names)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    rust.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    rust.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    rust.add_special_tokens([AddedToken(name, normalized=False) for name in names[:3]])
    return Tokenizer(
        PreTrainedTokenizerFast(tokenizer_object=rust, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    )


def _byte_level(
    vocab: dict[str, int], merges: list[tuple[str, str]], special: list[str], added: list[str] | None = None
) -> Tokenizer:
    rust = RustTokenizer(models.BPE(vocab=vocab, merges=merges))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    rust.add_tokens([AddedToken(name, normalized=False) for name in added or []])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="</s>"))


assert VOCAB_SIZE == EOS + 1
