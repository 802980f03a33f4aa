"""Validation: held-out text, replayed by the code that will serve what is being trained.

K steps, L tokens of a sample, R of its rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pilotfish.config import EngineConfig
from pilotfish.engine.backend import choose_backend, make_ops
from pilotfish.engine.config import Machine
from pilotfish.engine.runners import RunnerFactory
from pilotfish.models import Model, kv_shape
from pilotfish.models.heads import DraftHead
from pilotfish.ops import Ops
from pilotfish.runner import Runner, Segment
from pilotfish.training.evaluate import OVERALL, Accuracy, SampleHits, evaluate_capture, evaluation_runner
from pilotfish.training.store import CaptureReader

__all__ = ["choose_samples", "engine_ops", "head_accuracy", "model_accuracy"]

_MAX_SAMPLES = 256
_MAX_ROWS = 16384
_NUM_SEQS = 32
_PASS_TOKENS = 1024
_SPAN = 256


def choose_samples(reader: CaptureReader, held_out: NDArray[np.int64]) -> list[int]:
    """The held-out samples to validate with: at most 256, and about 16,384 tokens to be learnt, spread evenly.

    The engine's code goes row by row: all of a large capture's would take minutes.
    """
    if not len(held_out):
        return []
    mean = float(reader.num_supervised[held_out].mean())
    count = max(1, min(len(held_out), _MAX_SAMPLES, int(_MAX_ROWS / mean)))
    return [int(held_out[i * len(held_out) // count]) for i in range(count)]


def engine_ops(dtype: torch.dtype) -> Ops:
    """The engine's ops: native where this machine runs them, else the reference.

    Its threads are half of torch's: they wait for each other by spinning, and training seldom has the machine to
    itself. On 2 busy CPUs a validation with 2 threads took 3 times as long as with 1.
    """
    config = EngineConfig()
    backend, threads = choose_backend(config), torch.get_num_threads()
    if backend == "native":
        threads = max(1, min(threads, Machine.detect().num_cpus) // 2)
    return make_ops(replace(config, backend=backend, threads=threads), dtype)


def head_accuracy(head: DraftHead, ops: Ops, reader: CaptureReader, indices: Iterable[int], num_steps: int) -> Accuracy:
    """Of a draft head, see :func:`pilotfish.training.evaluate.evaluate_capture`.

    Args:
        head: built with ``ops``, for the positions of the longest sample at least.
        ops: the engine's.
        reader: the captured text.
        indices: of the samples.
        num_steps: K.
    """
    max_len = int(reader.lengths.max())
    runner = evaluation_runner(head, ops, max_seqs=_NUM_SEQS, max_tokens=_PASS_TOKENS, max_len=max_len)
    with _torch_aside(ops):
        results = evaluate_capture(runner, reader, indices, num_steps, max_seqs=_NUM_SEQS, max_tokens=_PASS_TOKENS)
    return results[OVERALL]


def model_accuracy(
    model: Model,
    ops: Ops,
    reader: CaptureReader,
    indices: Iterable[int],
    num_steps: int,
    token_ids: Tensor | None = None,
) -> Accuracy:
    """Of a draft LLM, by the engine's runner; arguments as of :func:`head_accuracy`.

    ``token_ids``, int64 [D], is what its logits are of; None: of all tokens.

    A chain that embeds the text's tokens reads them as the text itself is read: step k of row j is row j + k. So a
    sample is one prefill.
    """
    max_len = int(reader.lengths.max())
    runner, pages = _model_runner(model, ops, max_len)
    result = Accuracy.zeros(num_steps)
    padding = np.zeros(num_steps, np.bool_)
    for index in indices:
        tokens, learnt = reader.token_ids(index), reader.loss_mask(index).astype(np.bool_)
        positions = np.flatnonzero(learnt[1:])
        if not len(positions):
            continue
        with _torch_aside(ops):
            predicted = _predictions(runner, tokens, int(positions[0]), pages)
        if token_ids is not None:
            predicted = np.where(predicted < 0, -1, token_ids.numpy()[predicted])
        right = learnt & (predicted == tokens)
        ahead = positions[:, None] + 1 + np.arange(num_steps)
        known = np.logical_and.accumulate(np.concatenate([learnt, padding])[ahead], axis=1)
        result.add(SampleHits(index, positions, known, known & np.concatenate([right, padding])[ahead]))
    return result


@contextmanager
def _torch_aside(ops: Ops) -> Iterator[None]:
    """One torch thread while native kernels compute: it only copies small tensors, and its threads spin, too."""
    threads = torch.get_num_threads()
    if ops.name != "torch":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _model_runner(model: Model, ops: Ops, max_len: int) -> tuple[Runner, list[int]]:
    """A runner for one sequence, and the pages of its KV pool."""
    config = EngineConfig(
        backend="torch" if ops.name == "torch" else "native",
        max_model_len=max_len,
        max_num_seqs=1,
        max_num_batched_tokens=_SPAN,
        speculation=None,
    )
    kv = kv_shape(model.config, config.page_size, ops.dtype)
    pages = list(range(-(-max_len // config.page_size)))
    return RunnerFactory(config, ops, len(pages)).runner(model, kv, _SPAN, _SPAN), pages


def _predictions(runner: Runner, token_ids: NDArray[np.int32], first: int, pages: list[int]) -> NDArray[np.int64]:
    """The most likely token at each position behind ``first``, given all tokens before it: [L], -1 up to ``first``."""
    result = np.full(len(token_ids), -1, np.int64)
    last = len(token_ids) - 1
    for start in range(0, last, _SPAN):
        end = min(start + _SPAN, last)
        wanted = max(0, end - max(start, first))
        logits = runner.forward([Segment(0, token_ids[start:end].tolist(), start, pages, wanted)])
        if wanted:
            result[end - wanted + 1 : end + 1] = runner.ops.argmax(logits).numpy()
    return result
