"""What is taught where: the trainer's chains against an engine-style run, and the alignment of labels and masks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers import make_batch as paged_batch
from pilotfish.attention import KVShape
from pilotfish.attention.reference import ReferenceAttention
from pilotfish.models import ModelConfig
from pilotfish.models.heads import DraftHead, HeadConfig, build_head, head_tensors
from pilotfish.ops import Ops
from pilotfish.ops.reference import TorchOps
from pilotfish.training.chain import HeadTrainer, chain_outputs
from pilotfish.training.data import Batch, make_batch
from pilotfish.training.loss import Distillation
from pilotfish.training.ops import TrainOps
from pilotfish.training.store import Sample

VOCAB, HIDDEN, STEPS = 61, 24, 4
PAGES = [[2, 0, 1]]


def _shape(architecture: str = "llama") -> ModelConfig:
    return ModelConfig(
        architecture=architecture,  # type: ignore[arg-type]
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=40,
        num_layers=1,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        rope_theta=100.0,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        attention_bias=architecture == "qwen2",
    )


def _config(kind: str, architecture: str = "llama", **changes: Any) -> HeadConfig:
    values: dict[str, Any] = {"draft_vocab_size": 40, "shape": _shape(architecture), **changes}
    return HeadConfig(kind=kind, target_hidden_size=HIDDEN, **values)  # type: ignore[arg-type]


CONFIGS = {
    "mtp": _config("mtp"),
    "mtp-qwen2": _config("mtp", "qwen2"),
    "mtp-qwen3": _config("mtp", "qwen3"),
    "mtp-no-first-row": _config("mtp", first_row=False),
    "chain of 2": _config("mtp", shape=replace(_shape(), num_layers=2)),
    "chain of 3": _config("mtp", shape=replace(_shape(), num_layers=3), first_row=False),
    "chain of all": _config("mtp", shape=replace(_shape(), num_layers=STEPS)),
    "eagle": _config("eagle", fc_bias=True),
    "eagle3": _config("eagle3", aux_layers=(1, 2), recycles="pre_norm", fc_norm=True, own_lm_head=True),
    "eagle3-one-state": _config("eagle3"),
}


def _weights(config: HeadConfig) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator) * 0.25 + (1.0 if "norm" in name else 0.0)
        for name, shape in head_tensors(config).items()
    }


def _table() -> Tensor:
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))


TOKEN_IDS = torch.tensor([i for i in range(VOCAB) if i % 3])[:40]


def _head(config: HeadConfig, weights: Mapping[str, Tensor], ops: Ops) -> DraftHead:
    table = _table()
    return build_head(
        config,
        weights,
        ops,
        embedding=ops.pack_linear(table),
        lm_head=ops.pack_linear(table[TOKEN_IDS]),
        token_ids=TOKEN_IDS,
    )


def _sample(length: int, seed: int, config: HeadConfig | None = None, prompt: int = 4) -> Sample:
    generator = torch.Generator().manual_seed(seed)
    mask = np.zeros(length, np.uint8)
    mask[prompt:] = 1
    num_aux = 0 if config is None else len(config.aux_layers)
    return Sample(
        token_ids=torch.randint(VOCAB, (length,), generator=generator).numpy().astype(np.int32),
        loss_mask=mask,
        hidden=torch.randn(length, HIDDEN, generator=generator),
        aux=torch.randn(length, HIDDEN * num_aux, generator=generator) if num_aux else None,
        row=seed,
        source="",
    )


def _engine_chain(head: DraftHead, sample: Sample, row: int, steps: int) -> list[Tensor]:
    """Logits of the drafts from text row ``row``, as the engine computes them: true rows first, then its own chain."""
    shape, first = head.config.shape, 0 if head.config.first_row else 1
    kv = KVShape(
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        num_q_heads=shape.num_q_heads,
        head_dim=shape.head_dim,
        page_size=16,
        dtype=torch.float32,
    )
    attention = ReferenceAttention(kv, 3, first_key=first)
    tokens = sample.token_ids.tolist()
    features = head.fuse((sample.hidden if sample.aux is None else sample.aux)[:row])
    states = torch.cat([torch.zeros(1, features.shape[1]), features]) if head.config.first_row else features
    batch = paged_batch([tokens[first : row + 1]], PAGES, 16, [first])
    logits, last, kept = [], shape.num_layers - 1, []
    for module in range(last + 1):
        out, recycled = head.forward(batch, states, attention.plan(batch), module)
        kept.append(recycled[-1:])
        logits += [] if module else [head.logits(out[-1:])]
        states = torch.cat([torch.zeros(1, HIDDEN), recycled[:-1]])
    for k in range(1, steps):
        batch = paged_batch([[tokens[row + k]]], PAGES, 16, [row + k])
        before, drafted = list(kept), False
        for module in range(min(k, last), last + 1):
            source = before[module - 1] if k <= last else before[last]
            out, kept[module] = head.forward(batch, source, attention.plan(batch), module)
            logits += [] if drafted else [head.logits(out)]
            drafted = True
    return logits


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_of_trainer_and_engine_are_equal(name: str) -> None:
    config = CONFIGS[name]
    weights = _weights(config)
    samples = [_sample(length, seed, config) for seed, length in enumerate((17, 40, 9))]
    batch = make_batch(samples, steps=STEPS, first_row=config.first_row, dtype=torch.float32)
    trained = _head(config, weights, TrainOps(torch.float32))
    outputs = [trained.logits(out) for out in chain_outputs(trained, batch)]
    engine = _head(config, weights, TorchOps(torch.float32))
    chain = 0
    for sample in samples:
        for row in range(3, len(sample.token_ids) - 1):  # the prompt has 4 tokens: row 3 predicts the first answer
            steps = min(STEPS, len(sample.token_ids) - 1 - row)
            for k, expected in enumerate(_engine_chain(engine, sample, row, steps)):
                torch.testing.assert_close(outputs[k][chain : chain + 1], expected, rtol=1e-3, atol=1e-3)
            chain += 1
    assert chain == batch.rows.shape[0]


def _check_alignment(batch: Batch, samples: list[Sample], first: int) -> None:
    """Each row and step against the definition, token by token."""
    starts = np.cumsum([0, *(len(s.token_ids) - 1 - first for s in samples)])
    place = [(s, j + first) for s, sample in enumerate(samples) for j in range(len(sample.token_ids) - 1 - first)]
    chains = [place[row] for row in batch.rows.tolist()]
    assert chains == [(s, j) for s, j in place if samples[s].loss_mask[j + 1]]
    for k, step in enumerate(batch.steps):
        wanted = [
            i for i, (s, j) in enumerate(chains)
            if j + k + 1 < len(samples[s].token_ids) and samples[s].loss_mask[j + 1 : j + k + 2].all()
        ]  # fmt: skip
        assert step.chains.tolist() == wanted, f"step {k}"
        inputs, positions = batch.chain_inputs(k)
        for i, teacher, number, label in zip(step.chains, step.teachers, step.samples, step.labels, strict=True):
            s, j = chains[int(i)]
            assert int(number) == s
            assert int(inputs[i]) == samples[s].token_ids[j + k]
            assert int(positions[i]) == j + k
            assert int(label) == samples[s].token_ids[j + k + 1]
            assert torch.equal(batch.taught[teacher], samples[s].hidden[j + k].float())
    for s, j in place:
        row = int(starts[s]) + j - first
        expected = samples[s].hidden[j - 1].float() if j else torch.zeros(HIDDEN)
        assert torch.equal(batch.features[row], expected)
        assert int(batch.text.token_ids[row]) == samples[s].token_ids[j]


def _holed_samples() -> list[Sample]:
    """Two answers with a question between, and an answer that ends with its sample."""
    samples = [_sample(14, 0), _sample(6, 1)]
    samples[0].loss_mask[:] = [0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 0]
    return samples


@pytest.mark.parametrize("first", [0, 1])
def test_rows_labels_masks_and_teachers_are_aligned(first: int) -> None:
    samples = _holed_samples()
    batch = make_batch(samples, steps=3, first_row=first == 0, dtype=torch.float32)
    _check_alignment(batch, samples, first)


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_mask_that_is_off_by_one_is_found(shift: int) -> None:
    samples = _holed_samples()
    planted = [
        Sample(s.token_ids, np.roll(s.loss_mask, shift), s.hidden, s.aux, s.row, s.source) for s in samples
    ]  # fmt: skip
    batch = make_batch(planted, steps=3, first_row=True, dtype=torch.float32)
    with pytest.raises(AssertionError):
        _check_alignment(batch, samples, 0)


@pytest.mark.parametrize("name", ["mtp", "eagle3"])
@pytest.mark.parametrize("kind", ["kl", "lk"])
def test_gradients_of_a_whole_step_are_those_of_the_plain_computation(name: str, kind: str) -> None:
    """Through all three steps: the recycled states and the chain's keys carry gradients too."""
    config = CONFIGS[name]
    samples = [_sample(length, seed, config) for seed, length in enumerate((8, 11))]
    batch = make_batch(samples, steps=3, first_row=True, dtype=torch.float32)
    parameters = {n: w.requires_grad_() for n, w in _weights(config).items()}
    ops = TrainOps(torch.float32)
    trainer = HeadTrainer(
        config=config,
        ops=ops,
        embedding=ops.pack_linear(_table()),
        lm_head=ops.pack_linear(_table()[TOKEN_IDS]),
        token_ids=TOKEN_IDS,
        distillation=Distillation(kind, 1.0, 0.5),  # type: ignore[arg-type]
        step_decay=0.7,
        mean="sample",
    )
    total, losses = trainer.teach(parameters, batch)
    total.backward()  # type: ignore[no-untyped-call]
    assert [loss.num_rows for loss in losses] == [11, 9, 7]
    weighed = sum(0.7**k * float(loss.loss.detach()) for k, loss in enumerate(losses))
    assert float(total.detach()) == pytest.approx(weighed)

    def loss_at(moved: Mapping[str, Tensor]) -> float:
        with torch.no_grad():
            return float(trainer.teach(moved, batch)[0].double())

    generator = torch.Generator().manual_seed(5)
    for parameter_name, parameter in parameters.items():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.abs().max() > 0, parameter_name
        if kind == "lk":
            continue  # its gradient holds lambda constant, and differences of the loss do not
        direction = torch.randn(parameter.shape, generator=generator)
        direction /= direction.norm()
        step = 2e-3
        moved = [loss_at({**parameters, parameter_name: parameter + sign * step * direction}) for sign in (1, -1)]
        expected = float((parameter.grad * direction).sum())
        slope = (moved[0] - moved[1]) / (2 * step)
        assert slope == pytest.approx(expected, rel=0.05, abs=0.02 * float(parameter.grad.norm())), parameter_name


def test_a_mean_over_samples_weighs_short_answers_as_much_as_long_ones() -> None:
    config = CONFIGS["mtp"]
    ops = TrainOps(torch.float32)
    lm_head = ops.pack_linear(_table()[TOKEN_IDS])

    def loss(samples: list[Sample], mean: str) -> float:
        trainer = HeadTrainer(
            config=config,
            ops=ops,
            embedding=ops.pack_linear(_table()),
            lm_head=lm_head,
            token_ids=TOKEN_IDS,
            distillation=Distillation(),
            mean=mean,  # type: ignore[arg-type]
        )
        batch = make_batch(samples, steps=1, first_row=True, dtype=torch.float32)
        return float(trainer.teach(_weights(config), batch)[0])

    short, long = _sample(6, 1), _sample(24, 2)
    of_short, of_long = loss([short], "token"), loss([long], "token")
    assert loss([short, long], "sample") == pytest.approx((of_short + of_long) / 2, rel=1e-4)
    assert loss([short, long], "token") == pytest.approx((2 * of_short + 20 * of_long) / 22, rel=1e-4)
