"""Acceptance rules: coupled ones compare tokens, rejection ones keep the target's distribution exactly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from distributions import chi_square, fits, total_variation
from pilotfish.sampling.accept import Verdict, accept_chain, accept_tree, reject_chain, reject_tree, threshold_chain

V = 5
NUM_TRIALS = 6_000


def row(*weights: float) -> Tensor:
    return torch.tensor(weights) / sum(weights)


def rows_of(row: Tensor) -> Tensor:
    """A distribution for every token before it: the row turned by as many places, [V, V]."""
    return torch.stack([row.roll(before) for before in range(V)])


PAIRS = {
    "near": (row(5, 3, 2, 1, 1), row(4, 4, 2, 2, 1)),
    "far": (row(1, 1, 2, 8, 4), row(9, 6, 1, 1, 1)),
    "q has zeros": (row(3, 3, 2, 1, 1), row(1, 0, 3, 0, 2)),
    "p has zeros": (row(0, 3, 0, 2, 1), row(2, 2, 2, 2, 2)),
    "disjoint": (row(0, 3, 0, 2, 0), row(1, 0, 1, 0, 1)),
    "equal": (row(5, 3, 2, 1, 1), row(5, 3, 2, 1, 1)),
}
"""p and q of the first position; those of the second depend on the first token: see ``rows_of``."""


def joint(p: Tensor) -> dict[tuple[int, int], float]:
    """Of the first two tokens."""
    second = rows_of(p)
    return {(a, b): float(p[a] * second[a, b]) for a in range(V) for b in range(V)}


class Draws:
    """A seeded source of tokens and uniform numbers."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(1)
        self._uniforms: list[float] = []

    def uniform(self) -> float:
        if not self._uniforms:
            self._uniforms = torch.rand(50_000, generator=self._generator).tolist()
        return self._uniforms.pop()

    def token(self, probs: Sequence[float]) -> int:
        left = self.uniform()
        for token, probability in enumerate(probs):
            left -= probability
            if left < 0:
                return token
        return max(token for token, probability in enumerate(probs) if probability > 0)


def first_two(
    p: Tensor, drafts_of: Callable[[Draws], tuple[list[int], Tensor | None]], trials: int = NUM_TRIALS
) -> Counter[tuple[int, int]]:
    """How often each pair of tokens came first, from chains of two drafts and plain draws after them."""
    draws, second = Draws(), rows_of(p)
    second_rows = second.tolist()
    counts: Counter[tuple[int, int]] = Counter()
    for _ in range(trials):
        drafts, q = drafts_of(draws)
        rows = torch.stack([p, second[drafts[0]], second[drafts[1]]])
        verdict = reject_chain(drafts, rows, q, [draws.uniform(), draws.uniform()])
        assert verdict.bonus is None and verdict.residual is not None
        tokens = [*(drafts[i] for i in verdict.path), draws.token(verdict.residual.tolist())]
        if len(tokens) == 1:
            tokens.append(draws.token(second_rows[tokens[0]]))
        counts[tokens[0], tokens[1]] += 1
    return counts


def sampled(q: Tensor, reported: Tensor | None = None) -> Callable[[Draws], tuple[list[int], Tensor | None]]:
    """Drafts drawn from q (``rows_of`` it for the second), which is reported unless another is."""
    reported = q if reported is None else reported
    first, second, second_reported = q.tolist(), rows_of(q).tolist(), rows_of(reported)

    def draw(draws: Draws) -> tuple[list[int], Tensor]:
        token = draws.token(first)
        return [token, draws.token(second[token])], torch.stack([reported, second_reported[token]])

    return draw


@pytest.mark.parametrize("name", PAIRS)
def test_rejection_of_sampled_drafts_keeps_the_distribution(name: str) -> None:
    p, q = PAIRS[name]
    counts = first_two(p, sampled(q))
    assert fits(counts, joint(p)), (chi_square(counts, joint(p)), total_variation(counts, joint(p)))


@pytest.mark.parametrize("drafts", [[0, 1], [3, 3], [4, 0]])
@pytest.mark.parametrize("name", ["near", "far", "p has zeros"])
def test_rejection_of_certain_drafts_keeps_the_distribution(name: str, drafts: list[int]) -> None:
    p, _ = PAIRS[name]
    counts = first_two(p, lambda _: (drafts, None))
    assert fits(counts, joint(p)), (chi_square(counts, joint(p)), total_variation(counts, joint(p)))


@pytest.mark.parametrize(
    ("name", "reported"),
    [
        ("near", PAIRS["near"][0]),  # claims to be the target
        ("near", row(4, 3, 3, 2, 1)),  # two entries changed places in part
        ("far", PAIRS["far"][1].sqrt() / PAIRS["far"][1].sqrt().sum()),  # another temperature
        ("q has zeros", row(1, 1, 3, 1, 2)),  # before truncation
    ],
)
def test_a_planted_wrong_q_is_caught(name: str, reported: Tensor) -> None:
    """The tests above would see a q that is not the one that drafts were drawn from."""
    p, q = PAIRS[name]
    counts = first_two(p, sampled(q, reported))
    statistic, critical = chi_square(counts, joint(p))
    assert statistic > critical
    assert not fits(counts, joint(p))


def test_drafts_reported_as_certain_though_they_were_drawn_are_exact_too_but_not_the_other_way_round() -> None:
    """A one-hot q is the draft's own distribution given the draft; a sampled q for a fixed draft is a lie."""
    p, q = PAIRS["near"]
    second = rows_of(q).tolist()

    def drawn_but_certain(draws: Draws) -> tuple[list[int], None]:
        token = draws.token(q.tolist())
        return [token, draws.token(second[token])], None

    assert fits(first_two(p, drawn_but_certain), joint(p))
    assert not fits(first_two(p, lambda _: ([0, 1], torch.stack([q, q]))), joint(p))


def test_equal_distributions_accept_every_draft() -> None:
    p, q = PAIRS["equal"]
    draws = Draws()
    for _ in range(200):
        drafts, reported = sampled(q)(draws)
        rows = torch.stack([p, rows_of(p)[drafts[0]], rows_of(p)[drafts[1]]])
        verdict = reject_chain(drafts, rows, reported, [1 - 2**-24, 1 - 2**-24])
        assert verdict.path == (0, 1) and torch.equal(verdict.residual, rows[2])  # type: ignore[arg-type]


def test_acceptance_probability_is_the_overlap() -> None:
    """Theorem of Leviathan et al.: the rate is the sum of min(p, q)."""
    p, q = PAIRS["near"]
    draws, accepted = Draws(), 0
    for _ in range(NUM_TRIALS):
        drafts, reported = sampled(q)(draws)
        assert reported is not None
        verdict = reject_chain(drafts[:1], torch.stack([p, p]), reported[:1], [draws.uniform()])
        accepted += verdict.num_accepted
    overlap = float(torch.minimum(p, q).sum())
    assert accepted / NUM_TRIALS == pytest.approx(overlap, abs=4 * (overlap * (1 - overlap) / NUM_TRIALS) ** 0.5)


def test_no_drafts_leave_the_targets_own_distribution() -> None:
    p = PAIRS["near"][0][None]
    assert torch.equal(reject_chain([], p, None, []).residual, p[0])  # type: ignore[arg-type]
    assert torch.equal(reject_tree([], [], p, []).residual, p[0])  # type: ignore[arg-type]
    assert accept_chain([], [3]) == Verdict((), 3)
    assert accept_tree([], [], [3]) == Verdict((), 3)


def test_a_draft_that_takes_all_of_p_leaves_p_where_rounding_rejects_it() -> None:
    certain = row(0, 1, 0, 0, 0)
    verdict = reject_chain([1], torch.stack([certain, certain]), None, [1.0])
    assert verdict.path == () and torch.equal(verdict.residual, certain)  # type: ignore[arg-type]


#      root -> 0 -> 2 -> 4
#           -> 1 -> 3       (siblings differ)
PARENTS = [-1, -1, 0, 1, 2]


@pytest.mark.parametrize("tokens", [[0, 1, 2, 0, 3], [3, 4, 3, 4, 1], [2, 0, 1, 1, 1]])
@pytest.mark.parametrize("name", ["near", "far", "p has zeros"])
def test_rejection_of_a_tree_keeps_the_distribution(name: str, tokens: list[int]) -> None:
    p, _ = PAIRS[name]
    second = rows_of(p)
    rows = torch.stack([p, *(second[token] for token in tokens)])
    draws = Draws()
    counts: Counter[tuple[int, int]] = Counter()
    for _ in range(NUM_TRIALS):
        verdict = reject_tree(PARENTS, tokens, rows, [draws.uniform() for _ in tokens])
        assert verdict.residual is not None
        assert all(PARENTS[child] == at for at, child in zip((-1, *verdict.path), verdict.path, strict=False))
        out = [*(tokens[i] for i in verdict.path), draws.token(verdict.residual.tolist())]
        if len(out) == 1:
            out.append(draws.token(second[out[0]].tolist()))
        counts[out[0], out[1]] += 1
    assert fits(counts, joint(p)), (chi_square(counts, joint(p)), total_variation(counts, joint(p)))


def test_a_second_sibling_is_tried_against_what_the_first_left_of_p() -> None:
    p = row(2, 2, 1, 0, 0)
    rows = torch.stack([p, p, p])
    # 0.6 rejects token 0 (0.4); of what is left, token 1 has 2 / 3.
    assert reject_tree([-1, -1], [0, 1], rows, [0.6, 0.6]).path == (1,)
    verdict = reject_tree([-1, -1], [0, 1], rows, [0.6, 0.7])
    assert verdict.path == () and verdict.residual is not None
    torch.testing.assert_close(verdict.residual, row(0, 0, 1, 0, 0))


tokens = st.integers(0, 2)


@given(st.lists(st.tuples(tokens, tokens), max_size=8), tokens)
def test_a_coupled_chain_is_plain_decoding(pairs: list[tuple[int, int]], last: int) -> None:
    drafts, choices = [d for d, _ in pairs], [*(c for _, c in pairs), last]
    verdict = accept_chain(drafts, choices)
    n = verdict.num_accepted
    assert drafts[:n] == choices[:n] and verdict.bonus == choices[n]
    assert n == len(drafts) or drafts[n] != choices[n]
    chain = [i - 1 for i in range(len(drafts))]
    assert accept_tree(chain, drafts, choices) == verdict, "a chain is a tree with one branch"


@given(st.data(), st.lists(tokens, min_size=12, max_size=12))
def test_a_coupled_tree_follows_the_targets_choices(data: st.DataObject, choices: list[int]) -> None:
    parents: list[int] = []
    node_tokens: list[int] = []
    for i in range(data.draw(st.integers(0, 11))):
        parents.append(data.draw(st.integers(-1, i - 1)))
        node_tokens.append(data.draw(tokens))
    choices = choices[: len(parents) + 1]
    verdict = accept_tree(parents, node_tokens, choices)
    at = -1
    for node in verdict.path:
        assert parents[node] == at and node_tokens[node] == choices[at + 1]
        at = node
    assert verdict.bonus == choices[at + 1]
    assert not any(p == at and t == verdict.bonus for p, t in zip(parents, node_tokens, strict=True))


@pytest.mark.parametrize(("threshold", "accepted"), [(0.05, 3), (0.1, 3), (0.2, 1), (0.5, 1), (0.51, 0), (1.0, 0)])
def test_threshold_keeps_likely_drafts_whatever_the_target_chose(threshold: float, accepted: int) -> None:
    p = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4], [0.125, 0.0, 0.0, 0.875], [0.25] * 4])
    p[1, 0] = 0.125  # exact in float32, as 0.1 is not
    verdict = threshold_chain([0, 0, 0], p, [1, 2, 3, 3], threshold)
    assert verdict.path == tuple(range(accepted))
    assert verdict.bonus == [1, 2, 3, 3][accepted]
