"""Helpers that several test files share: forward batches, tiny checkpoints, greedy loops over a bare model.

Import as ``from helpers import ...`` (pytest puts this folder on the path).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import transformers
from torch import Tensor

from pilotfish import _native
from pilotfish.attention import AttentionBackend, ForwardBatch, KVShape
from pilotfish.attention.native import NativeAttention
from pilotfish.attention.reference import ReferenceAttention
from pilotfish.models import Model, ModelConfig
from pilotfish.ops import Ops
from pilotfish.ops.native import NativeOps
from pilotfish.ops.reference import TorchOps

TINY_VOCAB_SIZE = 199  # no multiple of any block size
TINY_MAX_LEN = 256

_TINY = {
    "vocab_size": TINY_VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": TINY_MAX_LEN,
    "initializer_range": 0.3,  # sharp attention and logits that differ; 0.02 would hide errors
    "attn_implementation": "eager",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}


def _tiny_llama(tied: bool) -> transformers.PreTrainedModel:
    config = transformers.LlamaConfig(
        **_TINY,
        tie_word_embeddings=tied,
        # An original context this short puts kept, blended and divided frequencies into 6 rotary pairs.
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    )
    return transformers.LlamaForCausalLM(config)


def _tiny_llama_linear() -> transformers.PreTrainedModel:
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**_TINY, tie_word_embeddings=True, rope_parameters=rope)
    )


def _tiny_qwen2() -> transformers.PreTrainedModel:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_TINY, tie_word_embeddings=True))


def _tiny_qwen3() -> transformers.PreTrainedModel:
    # 4 heads of 20 are 80 wide, the residual stream 48.
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_TINY, head_dim=20, tie_word_embeddings=False))


TINY_MODELS: Mapping[str, Callable[[], transformers.PreTrainedModel]] = {
    "llama3": lambda: _tiny_llama(tied=True),
    "llama3-untied": lambda: _tiny_llama(tied=False),
    "llama-linear": _tiny_llama_linear,
    "qwen2": _tiny_qwen2,
    "qwen3": _tiny_qwen3,
}
"""Kinds of tiny random models, each built by transformers' own class. ``write_tiny_checkpoint`` saves one."""


def write_tiny_checkpoint(kind: str, folder: Path, seed: int = 0) -> Path:
    """Save the tiny random model ``kind`` (a key of ``TINY_MODELS``) as config.json and model.safetensors, float32."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = TINY_MODELS[kind]().float()
        with torch.no_grad():
            # Fresh norms are all ones and fresh biases all zeros: a model that forgot them would pass.
            for name, parameter in model.named_parameters():
                if name.endswith("norm.weight"):
                    parameter.uniform_(0.5, 1.5)
                elif name.endswith("bias"):
                    parameter.normal_(std=0.5)
    model.save_pretrained(folder)
    return folder


def pages_for(lengths: Sequence[int], page_size: int, shuffle_seed: int | None = 0) -> list[list[int]]:
    """Disjoint page lists that hold ``lengths`` tokens each; shuffled, for contiguous pages would hide errors."""
    counts = [-(-length // page_size) for length in lengths]
    order = torch.arange(sum(counts))
    if shuffle_seed is not None:
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(shuffle_seed))
    return [part.tolist() for part in order.split(counts)]


def make_batch(
    token_ids: Sequence[Sequence[int]],
    pages: Sequence[Sequence[int]],
    page_size: int,
    past: Sequence[int] | None = None,
    positions: Sequence[Sequence[int]] | None = None,
    tree_mask: Tensor | None = None,
) -> ForwardBatch:
    """The ForwardBatch of new tokens for each sequence.

    Args:
        token_ids: [S] lists of this pass's new tokens.
        pages: [S] lists of pages, each long enough for past and new tokens; those beyond the need are left out.
        page_size: tokens a page.
        past: [S] KV entries that each sequence already has. None: none.
        positions: [S] lists for rope. None: they count on from ``past``. Slots count on from ``past`` in any case.
        tree_mask: see ForwardBatch.
    """
    past = [0] * len(token_ids) if past is None else past
    slots: list[int] = []
    default_positions: list[int] = []
    used_pages: list[int] = []
    query_start, kv_len, page_start = [0], [], [0]
    for new, own_pages, start in zip(token_ids, pages, past, strict=True):
        length = start + len(new)
        num_pages = -(-length // page_size)
        assert num_pages <= len(own_pages), f"{length} tokens do not fit into {len(own_pages)} pages of {page_size}"
        slots += [own_pages[i // page_size] * page_size + i % page_size for i in range(start, length)]
        default_positions += range(start, length)
        used_pages += own_pages[:num_pages]
        query_start.append(query_start[-1] + len(new))
        kv_len.append(length)
        page_start.append(len(used_pages))
    flat_positions = default_positions if positions is None else [p for row in positions for p in row]

    def int32(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    return ForwardBatch(
        token_ids=int32([t for row in token_ids for t in row]),
        positions=int32(flat_positions),
        slots=int32(slots),
        query_start=int32(query_start),
        kv_len=int32(kv_len),
        page_start=int32(page_start),
        pages=int32(used_pages),
        tree_mask=tree_mask,
    )


def tree_bits(parents: Sequence[int], words: int = 1) -> Tensor:
    """uint64 [N, words] of one tree: node i's ancestors and itself. ``parents[i] < i``, or -1 for a root."""
    rows: list[int] = []
    for i, parent in enumerate(parents):
        rows.append((rows[parent] if parent >= 0 else 0) | 1 << i)
    split = [[row >> (64 * w) & (1 << 64) - 1 for w in range(words)] for row in rows]
    return torch.tensor(split, dtype=torch.uint64)


def greedy(
    model: Model, attention: AttentionBackend, prompts: Sequence[Sequence[int]], num_tokens: int
) -> list[list[int]]:
    """Batch-greedy decoding by a bare model: one prefill of all prompts, then one token a sequence and step."""
    pages = pages_for([len(prompt) + num_tokens for prompt in prompts], attention.page_size)
    outputs: list[list[int]] = [[] for _ in prompts]
    new = [list(prompt) for prompt in prompts]
    past = [0] * len(prompts)
    for _ in range(num_tokens):
        batch = make_batch(new, pages, attention.page_size, past)
        hidden = model.forward(batch, attention.plan(batch))
        tokens = model.logits(hidden[batch.query_start[1:].long() - 1]).argmax(-1).tolist()
        past = batch.kv_len.tolist()
        new = [[token] for token in tokens]
        for output, token in zip(outputs, tokens, strict=True):
            output.append(token)
    return outputs


ISAS: Sequence[str] = _native.supported_isas()
"""Instruction sets of the native kernels that this machine runs."""

BACKENDS: Sequence[str] = ("torch", "native") if ISAS else ("torch",)
"""Names of the backends that this machine runs: see ``Backend``."""


class Backend:
    """The ops of one of ``BACKENDS``, and attention pools for them."""

    def __init__(self, name: str, dtype: torch.dtype, *, isa: str | None = None, num_threads: int = 2) -> None:
        self.name = name
        self.ops: Ops
        if name == "native":
            self.ops = NativeOps(dtype, _native.Team(num_threads, spin_us=50), isa)
        else:
            assert name == "torch"
            self.ops = TorchOps(dtype)

    def attention(
        self, config: ModelConfig, num_pages: int, page_size: int = 16, first_key: int = 0
    ) -> AttentionBackend:
        """A KV pool for a model of this config, for batches as large as the pool."""
        shape = KVShape(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            num_q_heads=config.num_q_heads,
            head_dim=config.head_dim,
            page_size=page_size,
            dtype=self.ops.dtype,
        )
        if isinstance(self.ops, NativeOps):
            size = num_pages * page_size
            return NativeAttention(
                self.ops, shape, num_pages, max_tokens=size, max_seqs=num_pages, max_kv_len=size, first_key=first_key
            )
        return ReferenceAttention(shape, num_pages, first_key)
