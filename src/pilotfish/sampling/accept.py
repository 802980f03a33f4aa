"""Which drafts are kept: pure functions over the target's choices, or over the distributions p and q.

A chain is K drafts, each the guess for the position after the one before it; the target has K + 1 rows, row j seeing
the first j drafts. A tree is N nodes in topological order, node i the guess for the position after ``parents[i]`` (-1:
after the committed tokens); the target has N + 1 rows, row 0 for the root and row i + 1 for what follows node i.

Coupled rules compare tokens. Rejection rules keep the target's distribution exactly whatever q is, provided q is the
very distribution that the draft was drawn from (Leviathan et al., arXiv:2211.17192, and Chen et al.,
arXiv:2302.01318): any q is exact, a wrong q is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Verdict", "accept_chain", "accept_tree", "reject_chain", "reject_tree", "threshold_chain"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target said of one sequence's drafts.

    Attributes:
        path: indices of the accepted drafts, in order; for a chain 0, 1, ...
        bonus: the target's own next token; None if it is yet to be drawn from ``residual``.
        residual: the distribution of the bonus token, [V], where a rejection rule gives one.
    """

    path: tuple[int, ...]
    bonus: int | None = None
    residual: Tensor | None = None

    @property
    def num_accepted(self) -> int:
        return len(self.path)


def accept_chain(drafts: Sequence[int], choices: Sequence[int]) -> Verdict:
    """Coupled: keep drafts while they equal what the target chose at their position.

    The target's choice is its argmax under the position's own noise, so the tokens that come out are those of plain
    decoding, whatever was proposed (Daliri, Musco, Suresh, "Coupling without communication and drafter-invariant
    speculative decoding").

    Args:
        drafts: K tokens.
        choices: K + 1 tokens that the target chose.
    """
    assert len(choices) == len(drafts) + 1
    count = 0
    while count < len(drafts) and drafts[count] == choices[count]:
        count += 1
    return Verdict(tuple(range(count)), choices[count])


def accept_tree(parents: Sequence[int], tokens: Sequence[int], choices: Sequence[int]) -> Verdict:
    """Coupled, for a tree: from the root, follow the child that equals the target's choice as long as there is one.

    Args:
        parents: of each of the N nodes, -1 for children of the root.
        tokens: of each node.
        choices: N + 1 tokens that the target chose.
    """
    assert len(choices) == len(tokens) + 1 == len(parents) + 1
    path: list[int] = []
    at = -1
    while True:
        wanted = choices[at + 1]
        child = next((i for i, p in enumerate(parents) if p == at and tokens[i] == wanted), None)
        if child is None:
            return Verdict(tuple(path), wanted)
        path.append(child)
        at = child


def reject_chain(drafts: Sequence[int], p: Tensor, q: Tensor | None, uniforms: Sequence[float]) -> Verdict:
    """Rejection: keep draft d with probability min(1, p(d) / q(d)), else the bonus comes from norm(max(p - q, 0)).

    Args:
        drafts: K tokens.
        p: the target's distributions, [K + 1, V].
        q: the distributions that the drafts were drawn from, [K, V]; None: each draft was certain (one-hot).
        uniforms: K numbers in (0, 1), independent of the drafts.
    """
    for j, draft in enumerate(drafts):
        row = p[j]
        drawn_with = 1.0 if q is None else float(q[j, draft])
        # u < p / q without the division: a draft that q cannot draw is never accepted for it.
        if uniforms[j] * drawn_with < float(row[draft]):
            continue
        if q is None:
            residual = row.clone()
            residual[draft] = 0.0
        else:
            residual = (row - q[j]).clamp_(min=0.0)
        return Verdict(tuple(range(j)), residual=_normalised(residual, row))
    return Verdict(tuple(range(len(drafts))), residual=p[len(drafts)])


def reject_tree(parents: Sequence[int], tokens: Sequence[int], p: Tensor, uniforms: Sequence[float]) -> Verdict:
    """Rejection for a tree whose nodes were chosen, not drawn (each certain, siblings different).

    Children are tried in order; each is kept with its probability in what is left of p, and leaves p if it is not
    (multi-round rejection, Miao et al., arXiv:2305.09781, for one-hot proposals).

    Args:
        parents: of each of the N nodes, -1 for children of the root.
        tokens: of each node.
        p: the target's distributions, [N + 1, V].
        uniforms: one number in (0, 1) a node.
    """
    path: list[int] = []
    at = -1
    while True:
        left = p[at + 1].clone()
        for i, parent in enumerate(parents):
            if parent != at:
                continue
            if uniforms[i] < float(left[tokens[i]]):
                path.append(i)
                break
            left[tokens[i]] = 0.0
            left = _normalised(left, p[at + 1])
        else:
            return Verdict(tuple(path), residual=left)
        at = path[-1]


def threshold_chain(drafts: Sequence[int], p: Tensor, choices: Sequence[int], threshold: float) -> Verdict:
    """LOSSY: keep drafts while each has at least ``threshold`` probability, then take the target's own choice.

    The output is not distributed as the target's: for research only.

    Args:
        drafts: K tokens.
        p: the target's distributions, [K + 1, V].
        choices: K + 1 tokens that the target chose.
        threshold: in (0, 1].
    """
    count = 0
    while count < len(drafts) and float(p[count, drafts[count]]) >= threshold:
        count += 1
    return Verdict(tuple(range(count)), choices[count])


def _normalised(weights: Tensor, fallback: Tensor) -> Tensor:
    """Weights over their sum. Nothing is left only where rounding made p and q equal: then p itself is right."""
    total = weights.sum()
    return weights / total if float(total) > 0.0 else torch.clone(fallback)
