"""A recorded model computes, to the bit, what the same ops compute one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from helpers import ISAS, Backend
from helpers_heads import head_config, random_weights
from pilotfish.models import build_model, expected_tensors
from pilotfish.models.checkpoint import load_weights, resolve_model
from pilotfish.models.heads import HeadKind, build_head
from pilotfish.ops.native import NativeOps
from pilotfish.runner import BatchBuilder, EagerHeadRunner, EagerRunner, HeadRunner, Runner, Segment
from pilotfish.runner.recorded import RecordedRunner
from pilotfish.runner.recorded_head import RecordedHeadRunner

PAGE_SIZE, NUM_PAGES = 16, 24


def make_runners(folder: Path, dtype: torch.dtype, isa: str) -> tuple[Runner, Runner]:
    checkpoint = resolve_model(str(folder), dtype="float32" if dtype == torch.float32 else "bfloat16")
    config = checkpoint.config
    backend = Backend("native", dtype, isa=isa)
    model = build_model(config, load_weights(checkpoint, expected_tensors(config)), backend.ops)

    def parts() -> tuple[Any, BatchBuilder]:
        builder = BatchBuilder(max_tokens=64, max_seqs=4, max_model_len=128, page_size=PAGE_SIZE)
        return backend.attention(config, NUM_PAGES, PAGE_SIZE), builder

    return (
        EagerRunner(model, backend.ops, *parts()),
        RecordedRunner(model, cast(NativeOps, backend.ops), *parts(), max_logits=8),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("isa", ISAS)
def test_replay_equals_eager_calls(tiny_checkpoint: Path, dtype: torch.dtype, isa: str) -> None:
    eager, recorded = make_runners(tiny_checkpoint, dtype, isa)
    a, b, c = [0, 5], [3], [7, 1, 2]  # pages
    steps = [
        [Segment(0, [*range(20)], 0, a, 1)],
        [Segment(0, [9], 20, a, 1), Segment(1, [4, 5, 6], 0, b, 0), Segment(2, [*range(3, 40)], 0, c, 1)],
        [Segment(2, [8, 8, 8, 8], 37, c, 4), Segment(1, [1], 3, b, 1), Segment(0, [2], 21, a, 1)],
        [Segment(1, [7], 4, b, 0)],
    ]
    for step in steps:
        want, got = eager.forward(step), recorded.forward(step)
        assert torch.equal(want, got), "bits differ between eager calls and replay"
        assert got.shape[0] == sum(segment.num_logits for segment in step)


def make_head_runners(folder: Path, dtype: torch.dtype, isa: str, kind: HeadKind) -> tuple[HeadRunner, HeadRunner]:
    config = head_config(str(folder), kind, num_modules=2 if kind == "mtp" else 1)
    checkpoint = resolve_model(str(folder), dtype="float32")
    backend = Backend("native", dtype, isa=isa)
    model = build_model(checkpoint.config, load_weights(checkpoint, expected_tensors(checkpoint.config)), backend.ops)
    head = build_head(
        config, random_weights(config), backend.ops, embedding=model.embedding, lm_head=model.lm_head, token_ids=None
    )

    def parts() -> tuple[Any, BatchBuilder]:
        builder = BatchBuilder(max_tokens=64, max_seqs=4, max_model_len=128, page_size=PAGE_SIZE)
        return backend.attention(config.shape, NUM_PAGES, PAGE_SIZE, first_key=0 if config.first_row else 1), builder

    return (
        EagerHeadRunner(head, backend.ops, *parts()),
        RecordedHeadRunner(head, cast(NativeOps, backend.ops), *parts(), max_logits=8),
    )


@pytest.mark.parametrize("kind", ["mtp", "eagle", "eagle3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("isa", ISAS)
def test_replay_of_a_head_equals_eager_calls(
    tiny_checkpoint: Path, dtype: torch.dtype, isa: str, kind: HeadKind
) -> None:
    eager, recorded = make_head_runners(tiny_checkpoint, dtype, isa, kind)
    config = eager.head.config
    a, b, c = [0, 5], [3], [7, 1, 2]  # pages
    steps = [
        [Segment(0, [*range(20)], 1, a, 1)],
        [Segment(0, [9], 21, a, 1), Segment(1, [4, 5, 6], 1, b, 0), Segment(2, [*range(3, 40)], 1, c, 1)],
        [Segment(2, [8, 8, 8, 8], 38, c, 4), Segment(1, [1], 4, b, 1), Segment(0, [2], 22, a, 1)],
        [Segment(1, [7], 5, b, 0)],
    ]
    for i, segments in enumerate(steps):
        num_tokens = sum(len(segment.token_ids) for segment in segments)
        generator = torch.Generator().manual_seed(i)
        features = torch.randn(num_tokens, config.feature_size, generator=generator).to(dtype)
        states = eager.fuse(features).clone()
        assert torch.equal(recorded.fuse(features), states) and states.shape == (num_tokens, config.shape.hidden_size)
        for module in range(config.num_modules):
            want = eager.forward(segments, states, module)
            # The recording must neither need nor change what it was given.
            given = states.clone()
            got = recorded.forward(segments, given, module)
            assert torch.equal(given, states)
            assert torch.equal(want.logits, got.logits) and torch.equal(want.states, got.states)
            assert got.logits.shape == (sum(segment.num_logits for segment in segments), config.draft_vocab_size)
            states = want.states.clone()
