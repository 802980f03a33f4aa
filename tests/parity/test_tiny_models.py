"""Tiny random models against transformers' eager implementation, in float32: however a sequence is cut into passes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from helpers import (
    BACKENDS,
    ISAS,
    TINY_MAX_LEN,
    TINY_VOCAB_SIZE,
    Backend,
    greedy,
    make_batch,
    pages_for,
    tree_bits,
)
from pilotfish.attention import AttentionBackend
from pilotfish.models import Model, ModelConfig, build_model, expected_tensors
from pilotfish.ops.reference import TorchOps

PAGE_SIZE = 16
RELATIVE_TOLERANCE = 1e-4  # of the largest logit


@dataclass(frozen=True)
class Pair:
    model: Model
    reference: transformers.PreTrainedModel
    backend: Backend

    def attention(self, num_pages: int = 64) -> AttentionBackend:
        return self.backend.attention(self.model.config, num_pages, PAGE_SIZE)

    @torch.no_grad()
    def expected(self, tokens: Sequence[int]) -> Tensor:
        return self.reference(torch.tensor([list(tokens)])).logits[0]


def read_config(folder: Path) -> ModelConfig:
    return ModelConfig.from_hf(json.loads((folder / "config.json").read_text()), str(folder))


@pytest.fixture(scope="module", params=BACKENDS)
def pair(request: pytest.FixtureRequest, tiny_checkpoint: Path) -> Pair:
    config = read_config(tiny_checkpoint)
    backend = Backend(request.param, torch.float32)
    model = build_model(config, load_file(tiny_checkpoint / "model.safetensors"), backend.ops)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tiny_checkpoint, dtype=torch.float32, attn_implementation="eager"
    )
    return Pair(model, reference, backend)


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(TINY_VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_logits_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == torch.float32
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= RELATIVE_TOLERANCE * expected.abs().max()


def run_chunks(pair: Pair, tokens: Sequence[int], chunk_lens: Sequence[int]) -> Tensor:
    """Logits of every token, computed in passes of the given lengths."""
    assert sum(chunk_lens) == len(tokens)
    attention = pair.attention()
    pages = pages_for([len(tokens)], PAGE_SIZE)
    logits, past = [], 0
    for length in chunk_lens:
        batch = make_batch([tokens[past : past + length]], pages, PAGE_SIZE, [past])
        logits.append(pair.model.logits(pair.model.forward(batch, attention.plan(batch))))
        past += length
    return torch.cat(logits)


def test_prefill_matches_at_every_position(pair: Pair) -> None:
    tokens = prompt(TINY_MAX_LEN)  # the whole context: the last row of the rotary table is used
    assert_logits_close(run_chunks(pair, tokens, [len(tokens)]), pair.expected(tokens))


@pytest.mark.parametrize("chunk_lens", [[64, 37], [1, 100], [100, 1], [15, 17, 3, 66], [16, 16, 16, 53]])
def test_chunked_prefill_matches(pair: Pair, chunk_lens: list[int]) -> None:
    tokens = prompt(101)
    assert_logits_close(run_chunks(pair, tokens, chunk_lens), pair.expected(tokens))


def test_decode_token_by_token_matches(pair: Pair) -> None:
    tokens = prompt(70)
    assert_logits_close(run_chunks(pair, tokens, [20] + [1] * 50), pair.expected(tokens))


def test_results_do_not_depend_on_how_a_sequence_is_cut(pair: Pair) -> None:
    tokens = prompt(75)
    whole = run_chunks(pair, tokens, [75])
    assert torch.equal(run_chunks(pair, tokens, [30, 1, 1, 5, 38]), whole)
    assert torch.equal(run_chunks(pair, tokens, [1] * 75), whole)


def test_batch_of_unequal_lengths_matches_and_equals_alone(pair: Pair) -> None:
    """Prefill, chunk and decode of five sequences in the same passes."""
    sequences = [prompt(length, seed) for seed, length in enumerate([1, 90, 16, 33, 64])]
    first = [1, 40, 15, 32, 50]
    attention = pair.attention()
    pages = pages_for([len(tokens) for tokens in sequences], PAGE_SIZE)
    steps = [
        make_batch([t[:n] for t, n in zip(sequences, first, strict=True)], pages, PAGE_SIZE),
        make_batch([t[n:] for t, n in zip(sequences, first, strict=True)][1:], pages[1:], PAGE_SIZE, first[1:]),
    ]
    outputs: list[list[Tensor]] = [[] for _ in sequences]
    for batch, members in zip(steps, [range(5), range(1, 5)], strict=True):
        logits = pair.model.logits(pair.model.forward(batch, attention.plan(batch)))
        for s, part in zip(members, torch.split(logits, batch.query_start.diff().tolist()), strict=True):
            outputs[s].append(part)
    for tokens, parts in zip(sequences, outputs, strict=True):
        assert_logits_close(torch.cat(parts), pair.expected(tokens))
        assert torch.equal(torch.cat(parts), run_chunks(pair, tokens, [len(tokens)]))


def test_greedy_decoding_matches_generate(pair: Pair) -> None:
    prompts = [prompt(length, seed) for seed, length in enumerate([3, 40, 17])]
    outputs = greedy(pair.model, pair.attention(), prompts, 24)
    for tokens, output in zip(prompts, outputs, strict=True):
        expected = pair.reference.generate(
            torch.tensor([tokens]), max_new_tokens=24, min_new_tokens=24, do_sample=False, eos_token_id=None
        )
        assert output == expected[0, len(tokens) :].tolist()


def test_tree_nodes_see_their_ancestors_only(pair: Pair) -> None:
    """Each node's logits equal those of its own root path decoded as a plain sequence."""
    context = prompt(45)
    parents = [-1, 0, 0, 1, 1, 2, 3]
    nodes = prompt(len(parents), seed=1)
    paths: list[list[int]] = []
    for i, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), i])

    attention = pair.attention()
    pages = pages_for([len(context) + len(nodes)], PAGE_SIZE)
    batch = make_batch([context], pages, PAGE_SIZE)
    pair.model.forward(batch, attention.plan(batch))
    positions = [[len(context) + len(path) - 1 for path in paths]]
    batch = make_batch([nodes], pages, PAGE_SIZE, [len(context)], positions, tree_bits(parents))
    logits = pair.model.logits(pair.model.forward(batch, attention.plan(batch)))

    expected = [pair.expected(context + [nodes[i] for i in path])[-1] for path in paths]
    assert_logits_close(logits, torch.stack(expected))


def test_accepted_tree_path_can_be_compacted(pair: Pair) -> None:
    """After copy_slots moves an accepted path together, decoding goes on as if the path had been decoded plainly."""
    context, nodes, path = prompt(30), prompt(5, seed=1), [0, 2, 4]
    parents = [-1, 0, 0, 1, 2]
    attention = pair.attention()
    pages = pages_for([64], PAGE_SIZE)
    batch = make_batch([context], pages, PAGE_SIZE)
    pair.model.forward(batch, attention.plan(batch))
    depths = [[30, 31, 31, 32, 32]]
    batch = make_batch([nodes], pages, PAGE_SIZE, [30], depths, tree_bits(parents))
    pair.model.forward(batch, attention.plan(batch))
    attention.copy_slots(batch.slots[path], batch.slots[: len(path)])

    last = prompt(1, seed=2)
    batch = make_batch([last], pages, PAGE_SIZE, [30 + len(path)])
    logits = pair.model.logits(pair.model.forward(batch, attention.plan(batch)))
    assert_logits_close(logits, pair.expected(context + [nodes[i] for i in path] + last)[-1:])


@pytest.mark.parametrize("name", BACKENDS)
@torch.no_grad()
def test_bfloat16_is_as_near_to_float32_as_transformers_is(tiny_checkpoint: Path, name: str) -> None:
    """Both round to 8 bits after each op, in different places: ours rounds less often."""
    tokens = prompt(100)
    config = read_config(tiny_checkpoint)
    weights = {name: w.bfloat16() for name, w in load_file(tiny_checkpoint / "model.safetensors").items()}
    backend = Backend(name, torch.bfloat16)
    model, attention = build_model(config, weights, backend.ops), backend.attention(config, 8, PAGE_SIZE)
    batch = make_batch([tokens], pages_for([100], PAGE_SIZE), PAGE_SIZE)
    logits = model.logits(model.forward(batch, attention.plan(batch)))

    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tiny_checkpoint, dtype=torch.bfloat16, attn_implementation="eager"
    )
    rounded = reference(torch.tensor([tokens])).logits[0].float()
    exact = reference.float()(torch.tensor([tokens])).logits[0]  # float32 arithmetic on the same bfloat16 weights
    assert logits.dtype == torch.float32
    assert (logits - exact).square().mean() < (rounded - exact).square().mean()


@pytest.mark.parametrize("isa", ISAS)
@torch.no_grad()
def test_every_instruction_set_matches(tiny_checkpoint: Path, isa: str) -> None:
    """A prefill, a chunk and three decodes on kernels that this machine would not choose by itself."""
    config = read_config(tiny_checkpoint)
    backend = Backend("native", torch.float32, isa=isa)
    model = build_model(config, load_file(tiny_checkpoint / "model.safetensors"), backend.ops)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tiny_checkpoint, dtype=torch.float32, attn_implementation="eager"
    )
    pair, tokens = Pair(model, reference, backend), prompt(60)
    logits = run_chunks(pair, tokens, [37, 20, 1, 1, 1])
    assert_logits_close(logits, pair.expected(tokens))
    assert torch.equal(logits, run_chunks(pair, tokens, [60]))


def test_expected_tensors_are_those_of_the_checkpoint(tiny_checkpoints: Mapping[str, Path]) -> None:
    for folder in tiny_checkpoints.values():
        config = read_config(folder)
        shapes = {name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}
        assert expected_tensors(config) == shapes


def test_rope_table_ends_at_the_shorter_of_context_and_max_model_len(tiny_checkpoints: Mapping[str, Path]) -> None:
    folder = tiny_checkpoints["llama3"]
    config = read_config(folder)
    weights = load_file(folder / "model.safetensors")
    for max_model_len, rows in ((None, TINY_MAX_LEN), (100, 100), (10_000, TINY_MAX_LEN)):
        model = build_model(config, weights, TorchOps(torch.float32), max_model_len)
        assert model.rope.cos.shape == model.rope.sin.shape == (rows, config.head_dim // 2)
