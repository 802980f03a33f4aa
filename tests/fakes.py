"""A model-free engine: the real scheduler, pages, sampler and text over a runner that checks every page it reads."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pilotfish.config import EngineConfig, Speculation
from pilotfish.engine.engine import Engine
from pilotfish.kv import PagePool
from pilotfish.models import ModelConfig
from pilotfish.ops.reference import TorchOps
from pilotfish.runner import BatchBuilder, Segment
from pilotfish.sampling import LogitsRow, sample
from pilotfish.speculation import CommittedRow, DraftRow, NoProposer, Proposal, Proposer
from pilotfish.speculation.draft import DraftProposer

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

    Args:
        builder: of its batches.
        num_pages: of its KV pool.
        page_size: tokens a page.
        eos_bias: added to the logit of EOS.
        error: the share of histories after which its logits are others: a draft that knows less than the target.
        vocab_size: logits it gives; beyond the target's they are large, as padding must never be chosen.

    Attributes:
        num_tokens: of each forward pass so far.
    """

    def __init__(
        self,
        builder: BatchBuilder,
        num_pages: int,
        page_size: int,
        eos_bias: float = 0.0,
        error: float = 0.0,
        vocab_size: int = VOCAB_SIZE,
    ) -> None:
        self.ops = TorchOps(torch.float32)
        self.num_tokens: list[int] = []
        self._error = error
        self._vocab_size = vocab_size
        self._builder = builder
        self._page_size = page_size
        self._eos_bias = eos_bias
        self.page_size = page_size
        self._kv: NDArray[np.int64] = np.full(num_pages * page_size, -1)

    @property
    def features(self) -> torch.Tensor:
        """Nothing: its proposers read none."""
        return torch.empty(self.num_tokens[-1], 0)

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
            first = kv_len - segments[s].num_logits
            rows += [next_logits(history[: position + 1], self._error) for position in range(first, kv_len)]
        if not rows:
            return torch.empty(0, self._vocab_size)
        logits = torch.from_numpy(np.stack(rows))
        logits[:, EOS] += self._eos_bias
        padding = torch.full((len(rows), max(0, self._vocab_size - VOCAB_SIZE)), 99.0)
        return torch.cat([logits[:, : self._vocab_size], padding], dim=1)


def next_logits(history: NDArray[np.int64], error: float = 0.0) -> NDArray[np.float32]:
    """Logits [V] that depend on every token of ``history`` and on their order. Not to be written to.

    After a share ``error`` of all histories they are others, but not all others.
    """
    return _logits_after(history.astype(np.int64).tobytes(), error)


@lru_cache(1 << 14)
def _logits_after(history: bytes, error: float) -> NDArray[np.float32]:
    digest = hashlib.blake2b(history, digest_size=8).digest()
    rng = np.random.default_rng(int.from_bytes(digest, "little"))
    noise = rng.standard_normal(VOCAB_SIZE, dtype=np.float32)
    if error and rng.random() < error:
        noise = noise * np.float32(0.6) + rng.standard_normal(VOCAB_SIZE, dtype=np.float32)
    return noise * 3


class GuessProposer:
    """Knows what the target will choose, without any KV, and says so as often as it is told to.

    Args:
        hit_rate: share of drafts that are right. 1: as many as there is room for; below: a random number of them.
        eos_bias: of the target.
    """

    def __init__(self, hit_rate: float, eos_bias: float = 0.0) -> None:
        self._hit_rate = hit_rate
        self._eos_bias = eos_bias
        self._random = random.Random(0)
        self._ops = TorchOps(torch.float32)
        self.num_drafts = 0

    def propose(self, rows: Sequence[DraftRow]) -> Proposal:
        drafts = [self._guess(row) for row in rows]
        self.num_drafts += sum(map(len, drafts))
        return Proposal(drafts, [None] * len(rows))

    def observe(self, rows: Sequence[CommittedRow], features: torch.Tensor) -> None:
        pass

    def _guess(self, row: DraftRow) -> list[int]:
        count = row.max_drafts if self._hit_rate == 1.0 else self._random.randint(0, row.max_drafts)
        drafts: list[int] = []
        for _ in range(count):
            if self._random.random() < self._hit_rate:
                drafts.append(self._right(row, drafts))
            else:
                drafts.append(self._random.randrange(VOCAB_SIZE))
        return drafts

    def _right(self, row: DraftRow, drafts: list[int]) -> int:
        logits = torch.from_numpy(next_logits(np.array([*row.token_ids, *drafts])).copy())[None]
        logits[:, EOS] += self._eos_bias
        return sample(logits, [LogitsRow(row.sampler, tuple(drafts))], self._ops).token_ids[0]


_DEFAULTS: dict[str, Any] = {
    "max_model_len": 48, "max_num_seqs": 4, "max_num_batched_tokens": 16, "seed": 0, "speculation": None
}  # fmt: skip


def make_engine(
    *,
    num_pages: int = 64,
    page_size: int = 4,
    eos_bias: float = 0.0,
    proposer: Proposer | None = None,
    draft: dict[str, Any] | None = None,
    make_proposer: Callable[[EngineConfig, int], Proposer] | None = None,
    runner_class: type[PageCheckingRunner] | None = None,
    tokenizer: Any = None,
    **settings: Any,
) -> Engine:
    """An engine over :class:`PageCheckingRunner`.

    Args:
        num_pages: in the pool.
        page_size: tokens a page.
        eos_bias: see :class:`PageCheckingRunner`.
        proposer: the scheme at work; needs ``speculation`` among the settings, whatever scheme that names.
        draft: in its place a :class:`DraftProposer` with a runner of its own: ``error`` and ``vocab_size`` as of
            :class:`PageCheckingRunner` (none: equal to the target), ``num_tokens`` and ``max_len`` as of the proposer.
        make_proposer: makes a scheme that keeps KV in the pages, given settings and number of pages.
        runner_class: of the target, with the arguments of :class:`PageCheckingRunner`, which is what None is.
        tokenizer: None: a :class:`LetterTokenizer`.
        **settings: fields of :class:`EngineConfig`.
    """
    config = EngineConfig(**_DEFAULTS | settings, page_size=page_size, kv_cache_memory=1, threads=1)
    if draft is not None:
        proposer = make_draft(config, num_pages, eos_bias, **draft)
    if make_proposer is not None:
        proposer = make_proposer(config, num_pages)
    runner = (runner_class or PageCheckingRunner)(make_builder(config), num_pages, page_size, eos_bias)
    return Engine(
        config=config,
        model_config=tiny_model_config(),
        tokenizer=tokenizer or LetterTokenizer(),
        runner=runner,
        pool=PagePool(num_pages, page_size, enable_prefix_caching=config.enable_prefix_caching),
        proposer=proposer or NoProposer(),
        draft_has_kv=draft is not None or make_proposer is not None,
    )


def make_draft(
    config: EngineConfig,
    num_pages: int,
    eos_bias: float = 0.0,
    *,
    error: float = 0.0,
    vocab_size: int = VOCAB_SIZE,
    num_tokens: int | None = None,
    max_len: int | None = None,
    cls: type[DraftProposer] = DraftProposer,
) -> DraftProposer:
    """A draft over a KV pool of its own with the target's page numbers: see :func:`make_engine`."""
    builder = make_builder(config, config.max_step_tokens + config.max_num_seqs)
    runner = PageCheckingRunner(builder, num_pages, config.page_size, eos_bias, error, vocab_size)
    settings, limit = config.speculation, max_len or config.max_model_len
    assert isinstance(settings, Speculation) and limit is not None
    num_tokens = min(vocab_size, VOCAB_SIZE) if num_tokens is None else num_tokens
    return cls(runner, VOCAB_SIZE, np.arange(num_tokens), limit, with_probs=settings.verify == "rejection")


def make_builder(config: EngineConfig, max_tokens: int | None = None) -> BatchBuilder:
    assert config.max_model_len is not None
    return BatchBuilder(
        max_tokens=max_tokens or config.max_step_tokens,
        max_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        page_size=config.page_size,
    )


def tiny_model_config() -> ModelConfig:
    return ModelConfig(
        architecture="llama", vocab_size=VOCAB_SIZE, hidden_size=8, intermediate_size=8, num_layers=1, num_q_heads=1,
        num_kv_heads=1, head_dim=8, rms_norm_eps=1e-5, rope_theta=10000.0, rope_scaling=None,
        max_position_embeddings=48, tie_word_embeddings=True, attention_bias=False, eos_token_ids=(EOS,),
        bos_token_id=None,
    )  # fmt: skip
