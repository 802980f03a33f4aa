"""Every kind of head against a plain float32 implementation: accepted rows, recycled rows, chains, any backend."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from helpers import BACKENDS, ISAS, Backend, make_batch
from pilotfish.attention import RopeTable
from pilotfish.errors import ConfigError
from pilotfish.models.heads import DraftHead, HeadConfig, build_head
from pilotfish.ops.native import NativeOps
from pilotfish.ops.recorder import record
from pilotfish.ops.reference import TorchOps
from plain_heads import (
    DRAFT_VOCAB,
    VOCAB,
    PlainHead,
    head_attention,
    head_config,
    make_head,
    random_table,
    random_token_ids,
    random_weights,
)

PAGES = [[3, 1, 2]]
TOLERANCE = 1e-4  # of the largest value, in float32

CONFIGS: dict[str, Callable[[], HeadConfig]] = {
    "mtp": lambda: head_config("mtp"),
    "mtp-qwen2": lambda: head_config("mtp", "qwen2"),
    "mtp-qwen3": lambda: head_config("mtp", "qwen3"),
    "mtp-hidden-first": lambda: head_config("mtp", hidden_first=True),
    "mtp-pre-norm": lambda: head_config("mtp", recycles="pre_norm"),
    "mtp-no-first-row": lambda: head_config("mtp", first_row=False),
    "mtp-slice": lambda: head_config("mtp", draft_vocab_size=DRAFT_VOCAB),
    "mtp-own-embedding": lambda: head_config("mtp", own_embedding=True),
    "eagle": lambda: head_config("eagle"),
    "eagle-bias": lambda: head_config("eagle", fc_bias=True),
    "eagle-qwen2": lambda: head_config("eagle", "qwen2", fc_bias=True),
    "eagle-slice": lambda: head_config("eagle", draft_vocab_size=DRAFT_VOCAB),
    "eagle3": lambda: head_config("eagle3", aux_layers=(1, 2, 3), recycles="pre_norm", draft_vocab_size=DRAFT_VOCAB),
    "eagle3-qwen3": lambda: head_config("eagle3", "qwen3", aux_layers=(3, 1), recycles="pre_norm"),
    "eagle3-3.1": lambda: head_config("eagle3", aux_layers=(1, 2, 3), fc_norm=True, draft_vocab_size=DRAFT_VOCAB),
    "eagle3-wider-target": lambda: head_config("eagle3", aux_layers=(1, 2), fc_norm=True, target_hidden_size=56),
    "eagle3-norm-before-residual": lambda: head_config("eagle3", aux_layers=(2,), norm_before_residual=True),
    "eagle3-one-state": lambda: head_config("eagle3", draft_vocab_size=DRAFT_VOCAB),
    "eagle3-shared-lm-head": lambda: head_config("eagle3", own_lm_head=False, draft_vocab_size=DRAFT_VOCAB),
}


def ids_of(config: HeadConfig) -> Tensor | None:
    return random_token_ids() if config.draft_vocab_size < VOCAB else None


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    assert actual.shape == expected.shape
    assert (actual.float() - expected.float()).abs().max() <= tolerance * expected.abs().max()


def random_tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def random_features(config: HeadConfig, count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, config.feature_size, generator=torch.Generator().manual_seed(seed))


def shifted(config: HeadConfig, states: Tensor) -> Tensor:
    """[T - 1, H] states of positions 0.. -> those that rows 0 (or 1) to T - 1 read."""
    return torch.cat([torch.zeros(1, states.shape[1]), states]) if config.first_row else states


class Sequence:
    """Runs a head over one sequence by any backend, in passes of any length."""

    def __init__(self, head: DraftHead, backend: Backend) -> None:
        self.head = head
        self.backend = backend
        self.attention = head_attention(backend.ops, head.config)
        self.length = 0 if head.config.first_row else 1

    def run(self, tokens: list[int], states: Tensor, module: int = 0) -> tuple[Tensor, Tensor]:
        batch = make_batch([tokens], PAGES, 16, [self.length])
        states = states.to(self.backend.ops.dtype)
        out, recycled = self.head.forward(batch, states, self.attention.plan(batch), module)
        return self.head.logits(out, module), recycled


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return Backend(request.param, torch.float32)


@pytest.mark.parametrize("name", CONFIGS)
def test_accepted_rows_and_recycled_rows(name: str, backend: Backend) -> None:
    """A prompt in two passes with the target's states, then three drafts that read the head's own."""
    config = CONFIGS[name]()
    weights, table, ids = random_weights(config), random_table(1), ids_of(config)
    plain = PlainHead(config, weights, table, ids)
    sequence = Sequence(make_head(config, weights, backend.ops, table, ids), backend)
    tokens = random_tokens(30)
    features = random_features(config, len(tokens) - 1)

    fused = sequence.head.fuse(features)
    assert_close(fused, plain.fuse(features))
    states = shifted(config, fused)
    rows = tokens if config.first_row else tokens[1:]

    first_logits, _ = sequence.run(rows[:17], states[:17])
    sequence.length += 17
    logits, recycled = sequence.run(rows[17:], states[17:])
    sequence.length += len(rows) - 17
    expected, expected_recycled = plain.forward(rows, shifted(config, plain.fuse(features)))
    assert_close(torch.cat([first_logits, logits]), expected)
    assert_close(recycled, expected_recycled[17:])

    plain_states, drafts = shifted(config, plain.fuse(features)), []
    for draft in random_tokens(3, seed=5):
        drafts.append(draft)
        logits, recycled = sequence.run([draft], recycled[-1:])
        sequence.length += 1
        plain_states = torch.cat([plain_states, expected_recycled[-1:]])
        expected, expected_recycled = plain.forward([*rows, *drafts], plain_states)
        assert_close(logits, expected[-1:])
        assert_close(recycled, expected_recycled[-1:])


def test_a_chain_of_modules(backend: Backend) -> None:
    """Row j of module m reads what module m - 1 recycled in row j - 1; each module has a KV layer of its own."""
    config = head_config("mtp", num_modules=3)
    weights, table = random_weights(config), random_table(1)
    plain = PlainHead(config, weights, table)
    sequence = Sequence(make_head(config, weights, backend.ops, table), backend)
    tokens = random_tokens(20)
    states = expected_states = shifted(config, random_features(config, len(tokens) - 1))
    for module in range(3):
        logits, recycled = sequence.run(tokens, states, module)
        expected, expected_recycled = plain.forward(tokens, expected_states, module)
        assert_close(logits, expected)
        states = shifted(config, recycled[:-1])
        expected_states = shifted(config, expected_recycled[:-1])


def test_without_a_first_row_key_0_is_never_seen(backend: Backend) -> None:
    """Whatever lies in slot 0, which such a head never writes."""
    config = head_config("eagle")
    head = make_head(config, random_weights(config), backend.ops, random_table(1))
    tokens, features = random_tokens(10), random_features(config, 9)
    clean, dirty = Sequence(head, backend), Sequence(head, backend)
    dirty.length = 0
    dirty.run(tokens[:1], features[:1])  # writes slot 0
    dirty.length = 1
    assert torch.equal(clean.run(tokens[1:], features)[0], dirty.run(tokens[1:], features)[0])


def test_forward_leaves_its_states_alone(backend: Backend) -> None:
    """They may be the caller's buffer, and residuals are added to in place."""
    for name in ("mtp", "eagle", "eagle3-one-state"):
        config = CONFIGS[name]()
        head = make_head(config, random_weights(config), backend.ops, random_table(1), ids_of(config))
        states = random_features(config, 9)
        before = states.clone()
        Sequence(head, backend).run(random_tokens(9), states)
        assert torch.equal(states, before)


class SmoothPlan:
    """In place of attention, which has no gradients here: something that depends on q, k and v."""

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rope: RopeTable | None) -> Tensor:
        pairs = q.unflatten(-1, (2, -1, 12))  # [T, Hkv, group, D]
        return (pairs * k.unflatten(-1, (2, 1, 12)) + v.unflatten(-1, (2, 1, 12))).flatten(1)


@pytest.mark.parametrize("name", ["mtp", "eagle-bias", "eagle3-3.1", "eagle3-norm-before-residual"])
def test_gradients_reach_every_tensor(name: str) -> None:
    """One module serves the engine and the trainer: built from parameters, it is differentiable."""
    config = CONFIGS[name]()
    weights = {key: tensor.requires_grad_() for key, tensor in random_weights(config).items()}
    head = make_head(config, weights, TorchOps(torch.float32), random_table(1), ids_of(config))
    states = head.fuse(random_features(config, 9))
    out, recycled = head.forward(make_batch([random_tokens(9)], PAGES, 16), states, SmoothPlan())
    (head.logits(out).square().sum() + recycled.sum()).backward()
    assert not [key for key, tensor in weights.items() if tensor.grad is None or not tensor.grad.any()]


@pytest.mark.skipif(not ISAS, reason="native kernels do not run here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_native_recorded_equals_eager_and_agrees_with_torch(name: str, dtype: torch.dtype) -> None:
    config = CONFIGS[name]()
    weights, table, ids = random_weights(config), random_table(1), ids_of(config)
    reference, backend = Backend("torch", dtype), Backend("native", dtype)
    assert isinstance(backend.ops, NativeOps)
    ops = backend.ops
    head = make_head(config, weights, ops, table, ids)
    features = random_features(config, 12).to(dtype)

    fused = head.fuse(features)
    reference_head = make_head(config, weights, reference.ops, table, ids)
    tolerance = 1e-4 if dtype == torch.float32 else 4e-2
    assert_close(fused, reference_head.fuse(features), tolerance)
    tokens = random_tokens(12)
    logits, recycled = Sequence(head, backend).run(tokens, fused)
    expected, expected_recycled = Sequence(reference_head, reference).run(tokens, fused)
    assert_close(logits, expected, tolerance)
    assert_close(recycled, expected_recycled, tolerance)

    sequence = Sequence(head, backend)
    batch = make_batch([tokens], PAGES, 16, [sequence.length])
    plan, states = sequence.attention.plan(batch), fused.clone()
    recycled_in_place: list[Tensor] = []

    def forward() -> Tensor:
        out, other = head.forward(batch, states, plan)
        recycled_in_place.append(other)
        return out

    recorded = record(ops, forward, rows=12, inputs=[batch.token_ids, states], keep=[head, plan])
    recorded_logits = record(ops, lambda: head.logits(recorded.output), rows=12, inputs=[recorded.output], keep=[head])
    recorded.run(12)
    assert torch.equal(recorded_logits.run(12), logits)
    assert torch.equal(recycled_in_place[0], recycled)


@pytest.mark.skipif(not ISAS, reason="native kernels do not run here")
def test_fuse_is_recorded() -> None:
    config = CONFIGS["eagle3-3.1"]()
    backend = Backend("native", torch.float32)
    assert isinstance(backend.ops, NativeOps)
    head = make_head(config, random_weights(config), backend.ops, random_table(1), ids_of(config))
    features = random_features(config, 12)
    recorded = record(backend.ops, lambda: head.fuse(features), rows=12, inputs=[features], keep=[head])
    assert torch.equal(recorded.run(12), head.fuse(features))


def test_parts_that_do_not_fit_are_refused() -> None:
    ops = TorchOps(torch.float32)
    config = head_config("mtp", draft_vocab_size=DRAFT_VOCAB)
    weights, ids = random_weights(config), random_token_ids()
    table, rows = ops.pack_linear(random_table(1)), ops.pack_linear(random_table(2, DRAFT_VOCAB))

    def build(**changes: object) -> DraftHead:
        parts = {"embedding": table, "lm_head": rows, "token_ids": ids} | changes
        return build_head(config, weights, ops, **parts)  # type: ignore[arg-type]

    assert build().token_ids is not None
    with pytest.raises(ConfigError, match=r"lm_head is \[199, 48\]: a head of this config needs \[64, 48\]"):
        build(lm_head=table)
    with pytest.raises(ConfigError, match=r"embedding is None: .* needs \[199, 48\]"):
        build(embedding=None)
    with pytest.raises(ConfigError, match="draft_vocab_size=64 of 199 tokens, but no list says which"):
        build(token_ids=None)
    for wrong in (ids[1:], ids.flip(0), ids + 199, torch.cat([ids[:1], ids[:-1]])):
        with pytest.raises(ConfigError, match="must be 64 ascending ids from 0 to 198"):
            build(token_ids=wrong)


def test_a_draft_vocabulary_of_all_tokens_is_none() -> None:
    config = head_config("mtp")
    table = random_table(1)
    head = make_head(config, random_weights(config), TorchOps(torch.float32), table, torch.arange(VOCAB))
    assert head.token_ids is None


def test_rope_reaches_as_far_as_it_is_asked_for() -> None:
    config = head_config("mtp")
    ops = TorchOps(torch.float32)
    table = ops.pack_linear(random_table(1))
    parts = {"embedding": table, "lm_head": table, "token_ids": None}
    assert build_head(config, random_weights(config), ops, **parts, max_model_len=70).rope.cos.shape[0] == 70
    assert build_head(config, random_weights(config), ops, **parts).rope.cos.shape[0] == 256
