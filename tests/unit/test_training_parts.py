"""The trainer's ops, attention and loss against plain torch, values and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pilotfish.attention import ForwardBatch, KVShape, RopeTable
from pilotfish.ops.reference import TorchOps
from pilotfish.training.attention import ChainAttention
from pilotfish.training.loss import Distillation, Teacher
from pilotfish.training.ops import TrainOps


def _gradients(result: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    weights = torch.linspace(-1, 1, result.numel()).view(result.shape)
    return list(torch.autograd.grad((result.float() * weights).sum(), inputs))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("name", ["rms_norm", "head_norm", "add_rms_norm", "silu_mul", "linear", "concat", "add"])
def test_ops_compute_what_the_reference_computes_and_so_do_their_gradients(
    name: str, dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(0)
    rows = 700  # more than a block of rows
    x = torch.randn(rows, 256).to(dtype).requires_grad_()
    y = torch.randn(rows, 256).to(dtype).requires_grad_()
    weight = torch.randn(256, requires_grad=True)
    matrix = torch.randn(64, 256, requires_grad=True)

    def compute(ops: TorchOps | TrainOps) -> tuple[Tensor, list[Tensor]]:
        match name:
            case "rms_norm":
                return ops.rms_norm(x, weight.to(dtype), 1e-5), [x, weight]
            case "head_norm":
                return ops.rms_norm(x.view(rows, 4, 64), weight[:64].to(dtype), 1e-5), [x, weight]
            case "add_rms_norm":
                normed, residual = ops.add_rms_norm(x, y, weight.to(dtype), 1e-5)
                return torch.cat([normed, residual]), [x, y, weight]
            case "silu_mul":
                return ops.silu_mul(torch.cat([x, y], -1)), [x, y]
            case "linear":
                return ops.linear(x, ops.pack_linear(matrix), out_dtype=torch.float32), [x, matrix]
            case "concat":
                # The reference has these two as plain torch.
                joined = torch.cat([x, y], -1) if isinstance(ops, TorchOps) else ops.concat([x, y])
                return joined, [x, y]
            case _:
                return x + y if isinstance(ops, TorchOps) else ops.add(x, y), [x, y]

    expected, inputs = compute(TorchOps(dtype))
    result, _ = compute(TrainOps(dtype))
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(_gradients(result, inputs), _gradients(expected, inputs), strict=True):
        scale = theirs.abs().mean().item()
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * scale)


def _batch(lengths: list[int]) -> ForwardBatch:
    total = sum(lengths)
    start = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return ForwardBatch(
        token_ids=torch.zeros(total, dtype=torch.int32),
        positions=torch.cat([torch.arange(n, dtype=torch.int32) for n in lengths]),
        slots=torch.arange(total, dtype=torch.int32),
        query_start=start,
        kv_len=torch.tensor(lengths, dtype=torch.int32),
        page_start=start,
        pages=torch.arange(total, dtype=torch.int32),
    )


def _rotated(x: Tensor, position: int, rope: RopeTable) -> Tensor:
    first, second = x.chunk(2, -1)
    cos, sin = rope.cos[position], rope.sin[position]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _attend(q: Tensor, keys: list[Tensor], values: list[Tensor], group: int) -> Tensor:
    """One row: q [Hq, D], keys and values [Hkv, D] each."""
    k = torch.stack(keys, 1).repeat_interleave(group, 0)  # [Hq, L, D]
    v = torch.stack(values, 1).repeat_interleave(group, 0)
    scores = torch.einsum("hd,hld->hl", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("hl,hld->hd", scores.softmax(-1), v).flatten()


def test_chain_attention_is_attention_over_true_rows_and_the_chains_own() -> None:
    torch.manual_seed(1)
    heads, kv_heads, dim, group = 4, 2, 8, 2
    lengths, rows = [5, 1, 7], torch.tensor([2, 3, 6, 8, 9, 12])  # none of the second sample; 12 ends the last
    angles = torch.arange(20).unsqueeze(1) * torch.rand(dim // 2)
    rope = RopeTable(angles.cos(), angles.sin())
    starts = [0, 5, 6]
    steps = [[torch.randn(n, h * dim, requires_grad=True) for h in (heads, kv_heads, kv_heads)] for n in (13, 6, 6)]
    shape = KVShape(
        num_layers=1, num_kv_heads=kv_heads, num_q_heads=heads, head_dim=dim, page_size=1, dtype=torch.float32
    )
    batch = _batch(lengths)
    plan = ChainAttention(shape).plan(batch)
    results = [plan.run(0, *steps[0], rope)]
    chains = plan.chains(rows)
    for k in (1, 2):
        results.append(chains.step(batch.positions[rows] + k).run(0, *steps[k], rope))

    def part(step: int, which: int, row: int, position: int | None) -> Tensor:
        x = steps[step][which][row].view(-1, dim)
        return x if position is None else _rotated(x, position, rope)

    expected: list[Tensor] = []
    sample_of = [s for s, n in enumerate(lengths) for _ in range(n)]
    for step in range(3):
        outputs = []
        for i in range(steps[step][0].shape[0]):
            text_row = i if step == 0 else int(rows[i])
            start = starts[sample_of[text_row]]
            position = text_row - start
            keys = [part(0, 1, start + p, p) for p in range(position + 1)]
            values = [part(0, 2, start + p, None) for p in range(position + 1)]
            for k in range(1, step + 1):
                keys.append(part(k, 1, i, position + k))
                values.append(part(k, 2, i, None))
            outputs.append(_attend(part(step, 0, i, position + step), keys, values, group))
        expected.append(torch.stack(outputs))
    inputs = [x for step in steps for x in step]
    for result, reference in zip(results, expected, strict=True):
        torch.testing.assert_close(result, reference, rtol=1e-5, atol=1e-5)
    ours, theirs = (_gradients(torch.cat(outputs), inputs) for outputs in (results, expected))
    for gradient, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-4, atol=1e-5)


def test_attention_of_training_refuses_texts_with_a_past() -> None:
    batch = _batch([3])
    shape = KVShape(num_layers=1, num_kv_heads=1, num_q_heads=1, head_dim=2, page_size=1, dtype=torch.float32)
    batch.kv_len[0] = 4
    with pytest.raises(ValueError, match="whole texts"):
        ChainAttention(shape).plan(batch)


def _naive_loss(out: Tensor, lm_head: Tensor, hidden: Tensor, kind: str, hidden_weight: float) -> Tensor:
    """Rows' losses, by the definitions."""
    target, mine = (hidden @ lm_head.detach().T).log_softmax(-1), (out @ lm_head.T).log_softmax(-1)
    kl = (target.exp() * (target - mine)).sum(-1)
    if kind == "lk":
        alpha = torch.minimum(target.exp(), mine.exp()).sum(-1)
        mix = torch.exp(-3 * alpha.detach())
        kl = mix * kl + (1 - mix) * (1 - alpha)
    return 0.7 * kl + hidden_weight * F.smooth_l1_loss(out, hidden, reduction="none").mean(-1)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("kind", ["kl", "lk"])
def test_the_chunked_loss_and_its_gradients_are_the_naive_ones(kind: str, trained: bool) -> None:
    torch.manual_seed(2)
    lm_head = torch.randn(50, 16, requires_grad=trained)
    hidden = torch.randn(400, 16) * 2
    out = torch.randn(600, 16, requires_grad=True)
    index = torch.randint(400, (600,))
    weights = torch.rand(600)
    teacher = Teacher.of(hidden, lm_head.detach(), keep_probs=trained or kind == "lk")
    step = Distillation(kind, 0.7, 0.3)(out, lm_head, teacher, index, weights)  # type: ignore[arg-type]
    expected = (weights * _naive_loss(out, lm_head, hidden[index], kind, 0.3)).sum()
    torch.testing.assert_close(step.loss, expected, rtol=1e-5, atol=1e-5)
    inputs = [out, lm_head] if trained else [out]
    scale = torch.tensor(3.0)  # what comes after the loss multiplies its gradient
    for ours, theirs in zip(
        torch.autograd.grad(step.loss * scale, inputs), torch.autograd.grad(expected * scale, inputs), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    labels = (hidden @ lm_head.T).argmax(-1)[index]
    assert step.num_correct == int(((out @ lm_head.T).argmax(-1) == labels).sum())
    kl = F.kl_div(
        (out @ lm_head.T).log_softmax(-1),
        (hidden[index] @ lm_head.T).log_softmax(-1),
        reduction="none",
        log_target=True,
    )
    assert step.divergence == pytest.approx(float((weights * kl.sum(-1)).sum().detach()), rel=1e-4)


def test_a_head_that_agrees_with_its_teacher_has_no_loss() -> None:
    torch.manual_seed(3)
    lm_head, hidden = torch.randn(40, 8), torch.randn(30, 8)
    teacher = Teacher.of(hidden, lm_head, keep_probs=False)
    out = hidden.clone().requires_grad_()
    step = Distillation("kl", 1.0, 1.0)(out, lm_head, teacher, torch.arange(30), torch.full((30,), 1 / 30))
    assert step.loss.item() == pytest.approx(0.0, abs=1e-5)
    assert step.num_correct == 30
    (gradient,) = torch.autograd.grad(step.loss, [out])
    assert float(gradient.abs().max()) < 1e-6


def test_a_loss_that_needs_the_teachers_distribution_says_so() -> None:
    lm_head, hidden = torch.randn(4, 8), torch.randn(3, 8)
    teacher = Teacher.of(hidden, lm_head, keep_probs=False)
    with pytest.raises(ValueError, match="keep_probs"):
        Distillation("lk")(hidden.clone(), lm_head, teacher, torch.arange(3), torch.ones(3))
