"""Builds ``tokenizer.json`` and ``tokenizer_config.json`` from a GGUF file's metadata.

A GGUF stores the vocabulary, its merges and the *name* of the pre-tokenizer; how text is cut before the merges apply
is only in the code that reads it. The rules here are those of the models' own ``tokenizer.json``. A name that is not
listed is refused: a wrong cut gives plausible, wrong tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from pilotfish.errors import CheckpointError, UnsupportedModelError
from pilotfish.models.weights.gguf_reader import GGUFFile

__all__ = ["build_tokenizer", "tokenizer_config"]

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_PUNCTUATION_AND_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# Padding rows that the converter adds to a vocabulary shorter than the embedding.
_PADDING_TOKEN = re.compile(r"\[PAD\d+\]")


@dataclass(frozen=True, slots=True)
class _ByteLevelKind:
    """How a byte-level BPE vocabulary cuts text.

    Attributes:
        split: regular expression of the pieces; None: GPT-2's, which is the ByteLevel pre-tokenizer's own.
        single_digits: cut every numeric character off before ``split``.
        nfc: normalise to NFC first.
        ignore_merges: a piece that is a token is taken whole, whatever the merges give.
        add_bos: what files without ``tokenizer.ggml.add_bos_token`` mean.
    """

    split: str | None = None
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_LLAMA3 = _ByteLevelKind(
    split=rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_PUNCTUATION_AND_SPACE}", ignore_merges=True, add_bos=True
)
_QWEN2_SPLIT = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_PUNCTUATION_AND_SPACE}"

_BYTE_LEVEL_KINDS: Mapping[str, _ByteLevelKind] = {
    "gpt-2": _ByteLevelKind(),
    "smollm": _ByteLevelKind(single_digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _ByteLevelKind(split=_QWEN2_SPLIT, nfc=True),
    "deepseek-r1-qwen": _ByteLevelKind(split=_QWEN2_SPLIT),
}


def build_tokenizer(gguf: GGUFFile) -> Tokenizer:
    """The tokenizer that the file describes.

    Raises:
        UnsupportedModelError: a tokenizer model or pre-tokenizer that is not known.
        CheckpointError: no tokenizer, or one whose parts do not fit each other.
    """
    model = gguf.metadata.get("tokenizer.ggml.model")
    tokens = _list(gguf, "tokenizer.ggml.tokens")
    types = _list(gguf, "tokenizer.ggml.token_type", len(tokens), default=[int(TokenType.NORMAL)] * len(tokens))
    try:
        if model == "gpt2":
            tokenizer = _byte_level(gguf, tokens, types)
        elif model == "llama":
            tokenizer = _sentencepiece(gguf, tokens, types)
        else:
            raise UnsupportedModelError(
                f"{gguf.path}: tokenizer.ggml.model={model!r} is not supported: only 'gpt2' (byte-level BPE) and "
                "'llama' (SentencePiece BPE) are"
            )
    except CheckpointError:
        raise
    except Exception as error:  # the Rust library raises plain Exception for merges that the vocabulary lacks
        raise CheckpointError(
            f"{gguf.path}: the tokenizer's tokens and merges do not fit each other: {error}"
        ) from error
    # Control tokens keep their place in the vocabulary: adding them only makes the text match them whole.
    control, user_defined = int(TokenType.CONTROL), int(TokenType.USER_DEFINED)
    pairs = list(zip(tokens, types, strict=True))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token, kind in pairs if kind == control])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token, kind in pairs if kind == user_defined])
    _add_bos_and_eos(gguf, tokenizer, tokens)
    return tokenizer


def tokenizer_config(gguf: GGUFFile) -> dict[str, Any]:
    """The ``tokenizer_config.json`` beside the tokenizer: named special tokens, context length, chat template."""
    tokens = _list(gguf, "tokenizer.ggml.tokens")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": gguf.metadata.get(f"{gguf.metadata['general.architecture']}.context_length"),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = _token_id(gguf, key, tokens)
        if token_id is not None:
            config[f"{name}_token"] = tokens[token_id]
    template = gguf.metadata.get("tokenizer.chat_template")
    if template:
        config["chat_template"] = template
    return config


def _byte_level(gguf: GGUFFile, tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    kind = _byte_level_kind(gguf)
    if kind is None:
        name = gguf.metadata.get("tokenizer.ggml.pre")
        raise UnsupportedModelError(
            f"{gguf.path}: tokenizer.ggml.pre={name!r} is not supported; supported are {', '.join(_BYTE_LEVEL_KINDS)}"
        )
    merges = [_merge(gguf, line) for line in _list(gguf, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(BPE(vocab=_vocab(tokens, types), merges=merges, ignore_merges=kind.ignore_merges))
    steps: list[Any] = []
    if kind.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if kind.split is not None:
        steps.append(pre_tokenizers.Split(Regex(kind.split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind.split is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if kind.nfc:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _byte_level_kind(gguf: GGUFFile) -> _ByteLevelKind | None:
    name = gguf.metadata.get("tokenizer.ggml.pre")
    return _BYTE_LEVEL_KINDS.get(name) if isinstance(name, str) else None


def _sentencepiece(gguf: GGUFFile, tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    vocab = _vocab(tokens, types)
    if "tokenizer.ggml.merges" in gguf.metadata:
        merges = [_merge(gguf, line) for line in _list(gguf, "tokenizer.ggml.merges")]
    else:
        merges = _merges_by_score(vocab, _list(gguf, "tokenizer.ggml.scores", len(tokens)), types)
    unknown = _token_id(gguf, "unknown", tokens)
    tokenizer = Tokenizer(
        BPE(
            vocab=vocab,
            merges=merges,
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces: list[Any] = [normalizers.Replace(" ", "▁")]
    decode: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if gguf.metadata.get("tokenizer.ggml.add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend("▁"))
        decode.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(decode)
    return tokenizer


def _merges_by_score(vocab: Mapping[str, int], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """SentencePiece joins the pair whose union has the best score: every way to cut a token, best token first."""
    normal = int(TokenType.NORMAL)
    best_first = sorted((-scores[id], id, token) for token, id in vocab.items() if types[id] == normal)
    return [
        (token[:cut], token[cut:])
        for _, _, token in best_first
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]


def _vocab(tokens: Sequence[str], types: Sequence[int]) -> dict[str, int]:
    unused = int(TokenType.UNUSED)
    return {
        token: index
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind != unused or not _PADDING_TOKEN.fullmatch(token)
    }


def _merge(gguf: GGUFFile, line: str) -> tuple[str, str]:
    left, space, right = line.partition(" ")
    if not space or not left or not right:
        raise CheckpointError(f"{gguf.path}: tokenizer.ggml.merges has the entry {line!r}: must be two tokens")
    return left, right


def _add_bos_and_eos(gguf: GGUFFile, tokenizer: Tokenizer, tokens: Sequence[str]) -> None:
    kind = None if gguf.metadata["tokenizer.ggml.model"] == "llama" else _byte_level_kind(gguf)
    # Every SentencePiece model that llama.cpp converts begins with BOS unless the file says otherwise.
    add_bos = gguf.metadata.get("tokenizer.ggml.add_bos_token", kind is None or kind.add_bos)
    ends = {
        "bos": _token_id(gguf, "bos", tokens) if add_bos else None,
        "eos": _token_id(gguf, "eos", tokens) if gguf.metadata.get("tokenizer.ggml.add_eos_token") else None,
    }
    bos, eos = ("" if id is None else tokens[id] for id in ends.values())
    if not bos and not eos:
        return
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[part for part in (bos, "$A", eos) if part],
        # Pairs are never encoded here; the format wants the rule all the same.
        pair=[part for part in (bos, "$A", eos, bos and f"{bos}:1", "$B:1", eos and f"{eos}:1") if part],
        special_tokens=[(tokens[id], id) for id in ends.values() if id is not None],
    )


def _token_id(gguf: GGUFFile, name: str, tokens: Sequence[str]) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    token_id = gguf.metadata.get(key)
    if token_id is None:
        return None
    if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
        raise CheckpointError(f"{gguf.path}: {key}={token_id!r}: must be from 0 to {len(tokens) - 1}")
    return token_id


def _list(gguf: GGUFFile, key: str, length: int | None = None, default: list[Any] | None = None) -> list[Any]:
    values = gguf.metadata.get(key, default)
    if not isinstance(values, list):
        raise CheckpointError(f"{gguf.path}: {key} is missing or not a list: the file has no whole tokenizer")
    if length is not None and len(values) != length:
        raise CheckpointError(f"{gguf.path}: {key} has {len(values)} entries for {length} tokens")
    return values
