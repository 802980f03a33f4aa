"""Draft vocabularies: what their ids must be, and the file beside a draft LLM's weights that has them.

Other engines do not read it and draft with the whole vocabulary, of which the rest was not trained.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from pilotfish.errors import CheckpointError

__all__ = ["DRAFT_VOCAB_FILE", "are_draft_ids", "read_draft_vocab", "write_draft_vocab"]

DRAFT_VOCAB_FILE = "draft_vocab.json"
"""A list of ids, ascending."""


def are_draft_ids(ids: Sequence[int], vocab_size: int) -> bool:
    """Whether there is one at least, all are of the target's ``vocab_size`` tokens, and they ascend."""
    return len(ids) > 0 and ids[0] >= 0 and ids[-1] < vocab_size and all(a < b for a, b in pairwise(ids))


def read_draft_vocab(folder: Path, vocab_size: int) -> Tensor | None:
    """int64 [D], the ids; None where the folder names none: the whole vocabulary.

    Raises:
        CheckpointError: a file that holds something else.
    """
    file = folder / DRAFT_VOCAB_FILE
    if not file.is_file():
        return None
    try:
        ids = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error
    if not isinstance(ids, list) or any(type(i) is not int for i in ids) or not are_draft_ids(ids, vocab_size):
        raise CheckpointError(f"{file}: must be a list of different token ids from 0 to {vocab_size - 1}, ascending")
    return torch.tensor(ids, dtype=torch.int64)


def write_draft_vocab(folder: Path, token_ids: Sequence[int]) -> None:
    """Write ``token_ids``, ascending."""
    (folder / DRAFT_VOCAB_FILE).write_text(json.dumps(list(token_ids)) + "\n", encoding="utf-8")
