"""A recorded model computes, to the bit, what the same ops compute one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from helpers import ISAS, Backend
from pilotfish.models import build_model, expected_tensors
from pilotfish.models.checkpoint import load_weights, resolve_model
from pilotfish.ops.native import NativeOps
from pilotfish.runner import BatchBuilder, EagerRunner, Runner, Segment
from pilotfish.runner.recorded import RecordedRunner

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
