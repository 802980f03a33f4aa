"""Random draft heads, what they compute in plain torch, and their tensors in the layouts of other projects.

The plain implementation shares no code with Pilotfish: whole sequences, dense attention, float32.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from pilotfish.attention import AttentionBackend, KVShape
from pilotfish.attention.native import NativeAttention
from pilotfish.attention.reference import ReferenceAttention
from pilotfish.models import ModelConfig
from pilotfish.models.heads import DraftHead, HeadConfig, build_head, head_tensors
from pilotfish.ops import Ops
from pilotfish.ops.native import NativeOps

HIDDEN, VOCAB, DRAFT_VOCAB = 48, 199, 64


def head_shape(architecture: str = "llama", num_layers: int = 1, **changes: Any) -> ModelConfig:
    """The layer's shape of a tiny head; Qwen3's query heads are wider than its residual stream."""
    return replace(
        ModelConfig(
            architecture=architecture,  # type: ignore[arg-type]
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=80,
            num_layers=num_layers,
            num_q_heads=4,
            num_kv_heads=2,
            head_dim=20 if architecture == "qwen3" else 12,
            rms_norm_eps=1e-5,
            rope_theta=500.0,
            max_position_embeddings=256,
            tie_word_embeddings=False,
            attention_bias=architecture == "qwen2",
        ),
        **changes,
    )


def head_config(kind: str, architecture: str = "llama", num_modules: int = 1, **changes: Any) -> HeadConfig:
    """A tiny head's contract, over the whole vocabulary unless ``draft_vocab_size`` says otherwise."""
    values: dict[str, Any] = {"own_lm_head": kind == "eagle3", "first_row": kind == "mtp"}
    values |= {"target_hidden_size": HIDDEN, "draft_vocab_size": VOCAB} | changes
    return HeadConfig(kind=kind, shape=head_shape(architecture, num_modules), **values)  # type: ignore[arg-type]


def random_weights(config: HeadConfig, seed: int = 0) -> dict[str, Tensor]:
    """Random tensors of a head: norms and biases that are not what they are in a fresh module."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in head_tensors(config).items():
        values = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            weights[name] = 0.5 * values if name.endswith("bias") else 1.0 + 0.2 * values
        else:
            weights[name] = values * 1.5 * shape[-1] ** -0.5
    return weights


def random_token_ids(size: int = DRAFT_VOCAB, seed: int = 0) -> Tensor:
    """A draft vocabulary: ascending ids of the target, int64."""
    return torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[:size].sort().values


def random_table(seed: int, rows: int = VOCAB) -> Tensor:
    """A random embedding or output head, [rows, H]."""
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(seed)) * HIDDEN**-0.5


def make_head(
    config: HeadConfig, weights: Mapping[str, Tensor], ops: Ops, table: Tensor, token_ids: Tensor | None = None
) -> DraftHead:
    """A head whose target has ``table`` as its embedding and as its output head."""
    rows = table if token_ids is None else table[token_ids]
    return build_head(
        config, weights, ops, embedding=ops.pack_linear(table), lm_head=ops.pack_linear(rows), token_ids=token_ids
    )


def head_attention(ops: Ops, config: HeadConfig, num_pages: int = 16, page_size: int = 16) -> AttentionBackend:
    """A KV pool for a head."""
    shape, first_key = config.shape, 0 if config.first_row else 1
    kv = KVShape(
        num_layers=config.num_modules,
        num_kv_heads=shape.num_kv_heads,
        num_q_heads=shape.num_q_heads,
        head_dim=shape.head_dim,
        page_size=page_size,
        dtype=ops.dtype,
    )
    if not isinstance(ops, NativeOps):
        return ReferenceAttention(kv, num_pages, first_key)
    size = num_pages * page_size
    return NativeAttention(
        ops, kv, num_pages, max_tokens=size, max_seqs=num_pages, max_kv_len=size, first_key=first_key
    )


class PlainHead:
    """A head in plain torch: one sequence, all rows at once."""

    def __init__(
        self, config: HeadConfig, weights: Mapping[str, Tensor], table: Tensor, token_ids: Tensor | None = None
    ) -> None:
        self.config = config
        self.weights = weights
        self.embedding = weights.get("embed_tokens.weight", table)
        self.lm_head = weights.get("lm_head.weight", table if token_ids is None else table[token_ids])

    def fuse(self, features: Tensor) -> Tensor:
        if not self.config.aux_layers:
            return features
        parts = list(features.chunk(len(self.config.aux_layers), dim=-1))
        if self.config.fc_norm:
            parts = [self._norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)]
        return torch.cat(parts, -1) @ self.weights["fc.weight"].T

    def forward(self, tokens: Sequence[int], states: Tensor, module: int = 0) -> tuple[Tensor, Tensor]:
        """Rows 0 or 1 to the end: ``tokens`` and ``states`` are those of the rows; returns (logits, recycled)."""
        w, kind = self.weights, self.config.kind
        emb = self.embedding[torch.tensor(list(tokens))]
        if kind == "mtp":
            p = f"modules.{module}."
            pair = [self._norm(emb, f"{p}enorm"), self._norm(states, f"{p}hnorm")]
            x = self._cat(pair) @ w[f"{p}eh_proj.weight"].T
            x = self._layer(self._norm(x, f"{p}layer.input_layernorm"), x, f"{p}layer.")
            out = self._norm(x, f"{p}norm")
        elif kind == "eagle":
            x = F.linear(self._cat([emb, states]), w["fc.weight"], w.get("fc.bias"))
            out = x = self._layer(x, x, "layer.")
        else:
            normed = self._norm(states, "hidden_norm")
            pair = [self._norm(emb, "layer.input_layernorm"), normed]
            x = self._layer(self._cat(pair), normed if self.config.norm_before_residual else states, "layer.")
            out = self._norm(x, "norm")
        return out @ self.lm_head.T, (out if self.config.recycles == "post_norm" else x)

    def _cat(self, pair: list[Tensor]) -> Tensor:
        return torch.cat(pair[::-1] if self.config.hidden_first else pair, -1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.config.shape.rms_norm_eps)

    def _layer(self, x: Tensor, residual: Tensor, prefix: str) -> Tensor:
        w, s, rows = self.weights, self.config.shape, x.shape[0]
        q, k, v = (
            F.linear(x, w[f"{prefix}self_attn.{n}_proj.weight"], w.get(f"{prefix}self_attn.{n}_proj.bias"))
            .view(rows, -1, s.head_dim)
            .transpose(0, 1)
            for n in "qkv"
        )
        if s.architecture == "qwen3":
            q, k = self._norm(q, f"{prefix}self_attn.q_norm"), self._norm(k, f"{prefix}self_attn.k_norm")
        first = 0 if self.config.first_row else 1
        angles = torch.outer(
            torch.arange(first, first + rows).float(), s.rope_theta ** -(torch.arange(0, s.head_dim, 2) / s.head_dim)
        )
        turns = torch.polar(torch.ones_like(angles), angles)

        def rotate(y: Tensor) -> Tensor:
            halves = y.unflatten(-1, (2, -1)).transpose(-1, -2).contiguous()
            return torch.view_as_real(torch.view_as_complex(halves) * turns).transpose(-1, -2).flatten(-2)

        group = s.num_q_heads // s.num_kv_heads
        k, v = rotate(k).repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        attended = F.scaled_dot_product_attention(rotate(q), k, v, is_causal=True).transpose(0, 1).flatten(1)
        x = residual + attended @ w[f"{prefix}self_attn.o_proj.weight"].T
        normed = self._norm(x, f"{prefix}post_attention_layernorm")
        gate, up = normed @ w[f"{prefix}mlp.gate_proj.weight"].T, normed @ w[f"{prefix}mlp.up_proj.weight"].T
        return x + (F.silu(gate) * up) @ w[f"{prefix}mlp.down_proj.weight"].T


def write_files(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """A checkpoint's ``config.json`` and ``model.safetensors``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def eagle_tensors(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """EAGLE-1's names."""
    return {name.replace("layer.", "layers.0.", 1): weight for name, weight in weights.items()}


def eagle3_tensors(weights: Mapping[str, Tensor], layer: str = "midlayer") -> dict[str, Tensor]:
    """EAGLE-3's names; ``layer`` is ``midlayer`` (SafeAILab, SpecForge) or ``layers.0`` (ModelOpt, Speculators)."""
    renamed = {}
    for name, weight in weights.items():
        name = f"{layer}.{name}" if name.startswith("hidden_norm.") else name
        renamed[f"{layer}.{name[len('layer.') :]}" if name.startswith("layer.") else name] = weight
    return renamed


def vocabulary_tensors(token_ids: Tensor) -> dict[str, Tensor]:
    """``d2t``: what to add to a draft id; ``t2d``: which of the target's ids are drafted."""
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[token_ids] = True
    return {"d2t": token_ids - torch.arange(len(token_ids)), "t2d": t2d}


def deepseek_tensors(weights: Mapping[str, Tensor], num_layers: int) -> dict[str, Tensor]:
    """DeepSeek's names of MTP modules behind a target of ``num_layers`` layers."""
    renamed = {}
    for name, weight in weights.items():
        _, m, part = name.split(".", 2)
        part = "shared_head.norm.weight" if part == "norm.weight" else part.removeprefix("layer.")
        renamed[f"model.layers.{num_layers + int(m)}.{part}"] = weight
    return renamed


def mimo_tensors(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """MiMo's names."""
    parts = {"enorm": "token_layernorm", "hnorm": "hidden_layernorm"}
    parts |= {"eh_proj": "input_proj", "norm": "final_layernorm"}
    renamed = {}
    for name, weight in weights.items():
        _, m, part = name.split(".", 2)
        first, rest = part.split(".", 1)
        part = rest if first == "layer" else f"{parts[first]}.{rest}"
        renamed[f"model.mtp_layers.{m}.{part}"] = weight
    return renamed
