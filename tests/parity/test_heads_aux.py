"""Auxiliary states of the target against transformers' ``output_hidden_states``, and the runners' features."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch
import transformers
from torch import Tensor

from helpers import BACKENDS, ISAS, TINY_VOCAB_SIZE, Backend, make_batch, pages_for
from pilotfish.attention.native import NativeAttention
from pilotfish.models import AuxStates, Model, build_model, expected_tensors
from pilotfish.models.checkpoint import load_weights, resolve_model
from pilotfish.ops.native import NativeOps
from pilotfish.runner import BatchBuilder, EagerRunner, Runner
from pilotfish.runner.batch import Segment
from pilotfish.runner.recorded import RecordedRunner

TOKENS = torch.randint(TINY_VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(3)).tolist()


def load(folder: Path, backend: Backend) -> Model:
    checkpoint = resolve_model(str(folder), dtype="float32")
    return build_model(checkpoint.config, load_weights(checkpoint, expected_tensors(checkpoint.config)), backend.ops)


@torch.no_grad()
def expected_states(folder: Path) -> list[Tensor]:
    """The states that enter layers 0 to N - 1, and the one after the final norm."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return [state[0] for state in model(torch.tensor([TOKENS]), output_hidden_states=True).hidden_states]


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("name", BACKENDS)
def test_aux_states_are_those_that_enter_the_layers(name: str, tiny_checkpoint: Path) -> None:
    backend = Backend(name, torch.float32)
    model = load(tiny_checkpoint, backend)
    expected = expected_states(tiny_checkpoint)
    attention = backend.attention(model.config, 8)
    batch = make_batch([TOKENS], pages_for([40], 16), 16)
    plain = model.forward(batch, attention.plan(batch))

    aux = AuxStates([2, 1, 3])
    hidden = model.forward(batch, attention.plan(batch), aux)
    assert torch.equal(hidden, plain)
    states = aux.states(backend.ops).chunk(3, dim=-1)
    assert_close(states[0], expected[2])
    assert_close(states[1], expected[1])
    # What leaves the last layer, transformers shows after the norm only.
    norm = load_weights(resolve_model(str(tiny_checkpoint), dtype="float32"), expected_tensors(model.config))
    normed = backend.ops.rms_norm(states[2].contiguous(), norm["model.norm.weight"], model.config.rms_norm_eps)
    assert_close(normed, expected[3])
    assert_close(hidden, expected[3])


def test_layers_that_are_not_there() -> None:
    for layers in ((), (1, 1), (0, 1)):
        with pytest.raises(ValueError, match="must be different layer ids of at least 1"):
            AuxStates(layers)


def test_a_layer_behind_the_last(tiny_checkpoints: dict[str, Path]) -> None:
    backend = Backend("torch", torch.float32)
    model = load(tiny_checkpoints["llama3"], backend)
    attention = backend.attention(model.config, 8)
    batch = make_batch([TOKENS], pages_for([40], 16), 16)
    aux = AuxStates([1, 4])
    model.forward(batch, attention.plan(batch), aux)
    with pytest.raises(ValueError, match="the model has no state that enters layer 4"):
        aux.states(backend.ops)


@pytest.mark.parametrize("aux_layers", [(), (1, 3)])
@pytest.mark.parametrize("runner_name", ["eager", "recorded"] if ISAS else ["eager"])
def test_features_of_runners(runner_name: str, aux_layers: tuple[int, ...], tiny_checkpoint: Path) -> None:
    """Of each step's tokens, in segment order; the same as the model's own."""
    backend = Backend("native" if runner_name == "recorded" else "torch", torch.float32)
    model = load(tiny_checkpoint, backend)
    attention = backend.attention(model.config, 8)
    builder = BatchBuilder(max_tokens=64, max_seqs=4, max_model_len=64, page_size=16)
    runner: Runner
    if runner_name == "eager":
        runner = EagerRunner(model, backend.ops, attention, builder, aux_layers=aux_layers)
    else:
        pool, ops = cast(NativeAttention, attention), cast(NativeOps, backend.ops)
        runner = RecordedRunner(model, ops, pool, builder, max_logits=8, aux_layers=aux_layers)

    batch = make_batch([TOKENS], [[0, 1, 2]], 16)
    fresh = backend.attention(model.config, 8)
    aux = AuxStates(aux_layers) if aux_layers else None
    expected = model.forward(batch, fresh.plan(batch), aux)
    if aux is not None:
        expected = aux.states(backend.ops)

    pages = [[5, 2, 7], [1, 6, 3]]
    first = [Segment(0, TOKENS[:25], 0, pages[0], 1), Segment(1, TOKENS[:9], 0, pages[1], 1)]
    runner.forward(first)
    assert torch.equal(runner.features, torch.cat([expected[:25], expected[:9]]))
    runner.forward([Segment(1, TOKENS[9:12], 9, pages[1], 2), Segment(0, TOKENS[25:], 25, pages[0], 1)])
    assert torch.equal(runner.features, torch.cat([expected[9:12], expected[25:]]))
