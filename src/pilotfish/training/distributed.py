"""Data-parallel training under ``torchrun``: each process takes its share of the batches, gradients are averaged."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["World"]


@dataclass(frozen=True, slots=True)
class World:
    """This process among those of the run.

    Attributes:
        rank: from 0; process 0 writes files.
        size: 1 without ``torchrun``.
    """

    rank: int = 0
    size: int = 1

    @classmethod
    def join(cls) -> World:
        """Join the processes that ``torchrun`` started, by its environment; alone without it."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls()
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        return cls(dist.get_rank(), dist.get_world_size())

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        if self.size > 1:
            dist.destroy_process_group()

    def share(self, batches: Sequence[list[int]]) -> list[list[int]]:
        """This process's batches; as many for each, the last few of an epoch are left out for that."""
        count = len(batches) // self.size
        return list(batches[self.rank : count * self.size : self.size])

    def equalise(self, tensors: Iterable[Tensor]) -> None:
        """Make process 0's values everyone's."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def average_gradients(self, parameters: Sequence[Tensor], stop: bool) -> bool:
        """Average gradients over the processes, in place. True if ``stop`` is set in any of them."""
        if self.size == 1:
            return stop
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        buffer = torch.cat([*(g.flatten() for g in gradients), torch.tensor([float(stop)])])
        dist.all_reduce(buffer)
        parts = buffer[:-1].div_(self.size).split([g.numel() for g in gradients])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        return bool(buffer[-1] > 0)

    def sums(self, values: Sequence[float]) -> list[float]:
        """Sums over the processes."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor)
        return [float(value) for value in tensor]
