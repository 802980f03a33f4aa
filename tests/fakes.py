"""A model-free engine: the real scheduler, pages, sampler and text over a runner that checks every page it reads."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pilotfish.config import EngineConfig
from pilotfish.engine.engine import Engine
from pilotfish.kv import PagePool
from pilotfish.models import ModelConfig
from pilotfish.ops.reference import TorchOps
from pilotfish.runner import BatchBuilder, Segment
from pilotfish.speculation import NoProposer, Proposer

VOCAB_SIZE = 32
EOS = 31


class LetterTokenizer:
    """Token i is the i-th letter; EOS is special. The part of ``pilotfish.text.Tokenizer`` that the engine uses."""

    vocab_size = VOCAB_SIZE
    special_ids = frozenset({EOS})

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join("" if t == EOS and skip_special_tokens else self.token_text(t) for t in token_ids)

    def token_text(self, token_id: int) -> str:
        return "</s>" if token_id == EOS else chr(ord("a") + token_id)


class PageCheckingRunner:
    """A stand-in for a model whose "KV" is the token itself.

    It writes tokens to slots as a model writes KV, then reads each sequence's history back *through its pages*. The
    logits are a pseudo-random function of that history, so a page that was lost, shared wrongly or overwritten changes
    the output.
    """

    def __init__(self, builder: BatchBuilder, num_pages: int, page_size: int, eos_bias: float = 0.0) -> None:
        self.ops = TorchOps(torch.float32)
        self.num_tokens: list[int] = []
        self._builder = builder
        self._page_size = page_size
        self._eos_bias = eos_bias
        self.page_size = page_size
        self._kv: NDArray[np.int64] = np.full(num_pages * page_size, -1)

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        size = self._builder.build(segments)
        batch = self._builder.batch(size)
        self.num_tokens.append(batch.num_tokens)
        slots = batch.slots.numpy()
        assert len(set(slots.tolist())) == len(slots), "two tokens of one step share a slot"
        self._kv[slots] = batch.token_ids.numpy()
        rows: list[NDArray[np.float32]] = []
        for s in range(batch.num_seqs):
            pages = batch.pages[batch.page_start[s] : batch.page_start[s + 1]].numpy()
            kv_len, query_start = int(batch.kv_len[s]), batch.query_start.tolist()
            in_pages = (pages[:, None] * self._page_size + np.arange(self._page_size)).reshape(-1)[:kv_len]
            history = self._kv[in_pages]
            query_len = query_start[s + 1] - query_start[s]
            assert batch.positions[query_start[s] : query_start[s + 1]].tolist() == [*range(kv_len - query_len, kv_len)]
            rows += [next_logits(history[: position + 1]) for position in range(kv_len - query_len, kv_len)]
        logits = torch.from_numpy(np.stack(rows))[self._builder.logits_rows(size.num_logits).long()]
        logits[:, EOS] += self._eos_bias
        return logits


def next_logits(history: NDArray[np.int64]) -> NDArray[np.float32]:
    """Logits [V] that depend on every token of ``history`` and on their order."""
    digest = hashlib.blake2b(history.astype(np.int64).tobytes(), digest_size=8).digest()
    noise = np.random.default_rng(int.from_bytes(digest, "little")).standard_normal(VOCAB_SIZE, dtype=np.float32)
    return noise * 3


def make_engine(
    *, num_pages: int = 64, page_size: int = 4, eos_bias: float = 0.0, proposer: Proposer | None = None, **settings: Any
) -> Engine:
    """An engine over :class:`PageCheckingRunner`. ``settings`` are fields of :class:`EngineConfig`."""
    config = EngineConfig(
        **{"max_model_len": 48, "max_num_seqs": 4, "max_num_batched_tokens": 16, "seed": 0} | settings,
        page_size=page_size, kv_cache_memory=1, threads=1,
    )  # fmt: skip
    assert config.max_model_len is not None
    builder = BatchBuilder(
        max_tokens=config.max_num_batched_tokens,
        max_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        page_size=page_size,
    )
    return Engine(
        config=config,
        model_config=tiny_model_config(),
        tokenizer=LetterTokenizer(),  # type: ignore[arg-type]
        runner=PageCheckingRunner(builder, num_pages, page_size, eos_bias),
        pool=PagePool(num_pages, page_size, enable_prefix_caching=config.enable_prefix_caching),
        proposer=proposer or NoProposer(),
    )


def tiny_model_config() -> ModelConfig:
    return ModelConfig(
        architecture="llama", vocab_size=VOCAB_SIZE, hidden_size=8, intermediate_size=8, num_layers=1, num_q_heads=1,
        num_kv_heads=1, head_dim=8, rms_norm_eps=1e-5, rope_theta=10000.0, rope_scaling=None,
        max_position_embeddings=48, tie_word_embeddings=True, attention_bias=False, eos_token_ids=(EOS,),
        bos_token_id=None,
    )  # fmt: skip
