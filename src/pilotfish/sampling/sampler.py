"""Choosing one token for each row of logits, with one call of the op set whatever the mixture of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pilotfish.config import LogprobsMode
from pilotfish.ops.base import NoiseKeys, Ops
from pilotfish.sampling.logprobs import row_logprobs
from pilotfish.sampling.process import edit_row, process_logits, scale_row
from pilotfish.sampling.state import LogitsRow
from pilotfish.types import Logprob

__all__ = ["SampleResult", "logprobs_of", "noise_keys", "sample"]


@dataclass(frozen=True, slots=True)
class SampleResult:
    """One chosen token a row.

    Attributes:
        token_ids: [R].
        logprobs: [R], token id -> :class:`Logprob` (without decoded text) for rows that asked, None for the others;
            None altogether if no row asked.
    """

    token_ids: list[int]
    logprobs: list[dict[int, Logprob] | None] | None


def noise_keys(rows: Sequence[LogitsRow], device: torch.device | None = None) -> NoiseKeys:
    """Keys of the noise that each row's draw uses: (request seed, sample index, position of the drawn token)."""
    return NoiseKeys(
        seeds=torch.tensor([row.state.seed for row in rows], dtype=torch.int64, device=device),
        sample_indices=torch.tensor([row.state.sample_index for row in rows], dtype=torch.int32, device=device),
        positions=torch.tensor([row.position for row in rows], dtype=torch.int32, device=device),
    )


def sample(
    logits: Tensor, rows: Sequence[LogitsRow], ops: Ops, logprobs_mode: LogprobsMode | None = "raw_logprobs"
) -> SampleResult:
    """Choose a token for each row: the argmax where greedy, else ``argmax(log p + gumbel)``.

    A row's token depends on its own logits, parameters, history, seed and position only, so it is the same in any
    batch. ``log p`` needs no normalisation: a constant does not move an argmax.

    Args:
        logits: float32 [R, V]; may be overwritten.
        rows: [R], the place of each row.
        ops: gives ``argmax`` and ``noise_argmax``.
        logprobs_mode: what :attr:`SampleResult.logprobs` holds. None: nothing, whatever requests ask (drafts).

    Returns:
        The tokens, and log-probabilities for rows whose ``params.logprobs`` is not None.
    """
    if not rows:  # a step of prefill chunks only
        return SampleResult([], None)
    raw = logprobs_mode is not None and logprobs_mode.startswith("raw")
    reported: dict[int, NDArray[np.float32]] = {}  # row -> the logits that its log-probabilities are made of
    inverse_temperatures: list[float] = []
    for i, row in enumerate(rows):
        state = row.state
        wanted = logprobs_mode is not None and state.params.logprobs is not None
        if state.takes_argmax and not wanted:
            inverse_temperatures.append(0.0)
            continue
        changed = row.edits or state.truncates
        # Where only the temperature is left to apply, noise_argmax does it.
        inverse_temperatures.append(1.0 if state.truncates else state.inverse_temperature)
        if not (changed or wanted):
            continue
        values = logits[i].detach().cpu().numpy()
        if wanted and raw:
            reported[i] = values.copy() if changed else values
        if row.edits:
            edit_row(values, row)
        if state.truncates:
            scale_row(values, row)
        if changed and logits.device.type != "cpu":
            logits[i] = torch.from_numpy(values)
        if wanted and not raw:
            unscaled = not (state.truncates or state.greedy)
            reported[i] = values * np.float32(state.inverse_temperature) if unscaled else values

    token_ids = _choose(logits, rows, inverse_temperatures, ops)
    if logprobs_mode is None or not reported:
        return SampleResult(token_ids, None)
    normalise = logprobs_mode.endswith("logprobs")
    logprobs: list[dict[int, Logprob] | None] = [None] * len(rows)
    for i, values in reported.items():
        top_n = rows[i].state.params.logprobs or 0
        logprobs[i] = row_logprobs(values, token_ids[i], top_n, normalise=normalise)
    return SampleResult(token_ids, logprobs)


def logprobs_of(
    logits: Tensor, rows: Sequence[LogitsRow], token_ids: Sequence[int], logprobs_mode: LogprobsMode
) -> list[dict[int, Logprob]]:
    """Log-probabilities of tokens that were not chosen by :func:`sample`, as it would report them.

    Args:
        logits: float32 [R, V], not processed; overwritten by the processed modes.
        rows: [R].
        token_ids: of the first rows, at most R.
        logprobs_mode: what to report.
    """
    if logprobs_mode.startswith("processed"):
        logits = process_logits(logits, rows)
    normalise = logprobs_mode.endswith("logprobs")
    return [
        row_logprobs(values.cpu().numpy(), token, row.state.params.logprobs or 0, normalise=normalise)
        for values, row, token in zip(logits, rows, token_ids, strict=False)
    ]


def _choose(logits: Tensor, rows: Sequence[LogitsRow], inverse_temperatures: list[float], ops: Ops) -> list[int]:
    if not any(inverse_temperatures):
        chosen = ops.argmax(logits)
    else:
        scale = torch.tensor(inverse_temperatures, dtype=torch.float32, device=logits.device)
        chosen = ops.noise_argmax(logits, scale, noise_keys(rows, logits.device))
    return [int(token) for token in chosen.tolist()]
