"""Draft heads for tests: random ones, and ones that are fitted to a target in a second and guess well.

H hidden size, D draft vocabulary, N positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from pilotfish.config import EngineConfig
from pilotfish.engine import load_engine
from pilotfish.models.checkpoint import resolve_model
from pilotfish.models.heads import HeadConfig, HeadKind, head_tensors, save_head, target_stamp
from pilotfish.speculation import CommittedRow, NoProposer, Scheme
from pilotfish.types import SamplingParams


def head_config(target: str, kind: HeadKind, *, num_modules: int = 1, num_tokens: int | None = None) -> HeadConfig:
    """A head of the target's shape; ``eagle3`` reads three layers and has an output head of its own."""
    checkpoint = resolve_model(target)
    config = checkpoint.config
    n = config.num_layers
    return HeadConfig(
        kind=kind,
        shape=replace(config, num_layers=num_modules),
        target_hidden_size=config.hidden_size,
        draft_vocab_size=num_tokens or config.vocab_size,
        aux_layers=(1, max(n // 2, 2), n) if kind == "eagle3" else (),
        recycles="pre_norm" if kind == "eagle3" else "post_norm",
        first_row=kind == "mtp",
        fc_bias=kind == "eagle",
        own_lm_head=kind == "eagle3",
        target=target_stamp(checkpoint),
    )


def random_weights(config: HeadConfig, scale: float = 0.3, seed: int = 0) -> dict[str, Tensor]:
    """Of every tensor of the head. Norms are not all ones: a head that forgot one would pass."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in head_tensors(config).items():
        if "norm" in name.rsplit(".", 2)[-2]:
            weights[name] = torch.rand(shape, generator=generator) + 0.5
        else:
            weights[name] = torch.randn(shape, generator=generator) * scale
    return weights


def write_head(folder: Path, config: HeadConfig, weights: Mapping[str, Tensor], ids: Sequence[int] = ()) -> str:
    """Save a head; ``ids`` are in its draft vocabulary, which others fill up."""
    token_ids = None
    if config.draft_vocab_size < config.shape.vocab_size:
        order = torch.randperm(config.shape.vocab_size, generator=torch.Generator().manual_seed(1)).tolist()
        chosen = list(dict.fromkeys([*ids, *order]))[: config.draft_vocab_size]
        token_ids = torch.tensor(sorted(chosen))
    save_head(folder, config, weights, token_ids, torch.float32)
    return str(folder)


Written = list[tuple[list[int], Tensor]]
"""Texts and the target's states [N, H] of all their positions but the last: see :func:`write_texts`."""


class _Keeper(NoProposer):
    """Keeps the target's states of every position, by sequence."""

    def __init__(self) -> None:
        self.states: dict[int, tuple[Sequence[int], list[Tensor]]] = {}

    def observe(self, rows: Sequence[CommittedRow], features: Tensor) -> None:
        for row in rows:
            if row.start == 0:  # also again, after it was preempted
                self.states[id(row.token_ids)] = row.token_ids, []
            _, states = self.states[id(row.token_ids)]
            states.append(features[row.offset : row.offset + row.num_computed - row.start].clone())


def write_texts(target: str, prompts: Sequence[Sequence[int]], num_tokens: int) -> Written:
    """Each prompt with the target's greedy continuation, and its states."""
    keeper = _Keeper()
    config = EngineConfig(dtype="float32", speculation=None, enable_prefix_caching=False, kv_cache_memory=64 << 20,
                          max_model_len=256)  # fmt: skip
    engine = load_engine(target, config, scheme=Scheme(model=None, start=lambda _: keeper))
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True))
    while engine.has_unfinished:
        engine.step()
    return [(list(tokens), torch.cat(states)) for tokens, states in keeper.states.values()]


def fitted_weights(config: HeadConfig, target: str, texts: Written) -> dict[str, Tensor]:
    """A head whose projection is fitted to the target's states by least squares.

    Its layer adds little, so it guesses as a linear map of token and state does; but enough that its KV matters.
    """
    assert config.kind != "eagle3"
    checkpoint = resolve_model(target, dtype="float32")
    tensors = checkpoint.tensors()
    table, norm = (tensors[f"model.{name}.weight"].float() for name in ("embed_tokens", "norm"))
    weights = random_weights(config, scale=0.02)
    inputs, wanted = [], []
    for tokens, states in texts:
        embedded, before, after = table[tokens[1 : len(states)]], states[:-1], states[1:]
        if config.kind == "mtp":
            embedded, before, after = _normed(embedded), _normed(before), after / norm
        inputs.append(torch.cat([embedded, before], dim=1))
        wanted.append(after)
    x, y = torch.cat(inputs), torch.cat(wanted)
    ridge = 1e-3 * x.square().sum() / x.shape[1] * torch.eye(x.shape[1])
    projection = torch.linalg.solve(x.T @ x + ridge, x.T @ y).T.contiguous()
    if config.kind == "eagle":
        return weights | {"fc.weight": projection, "fc.bias": torch.zeros(projection.shape[0])}
    ones = torch.ones(config.shape.hidden_size)
    for module in range(config.num_modules):
        prefix = f"modules.{module}"
        weights |= {f"{prefix}.enorm.weight": ones, f"{prefix}.hnorm.weight": ones, f"{prefix}.norm.weight": norm}
        weights[f"{prefix}.eh_proj.weight"] = projection
    return {name: weight.clone() for name, weight in weights.items()}  # a file holds no tensor twice


def _normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-6)
