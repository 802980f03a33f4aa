"""Thread teams, programs, and recordings of ops: a replay equals the eager call, bit for bit, for every row count."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch import Tensor

from helpers import make_batch, pages_for
from pilotfish import _native
from pilotfish.attention import AttentionBackend, ForwardBatch, KVShape, RopeTable
from pilotfish.attention.native import NativeAttention
from pilotfish.attention.reference import ReferenceAttention
from pilotfish.errors import BackendError, ConfigError
from pilotfish.ops import Linear
from pilotfish.ops.native import NativeOps, fastest_path
from pilotfish.ops.recorder import Recorder, Workspace, record

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, LAYERS = 48, 6, 2, 16, 16, 3


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


class TinyDecoder:
    """Two-norm decoder layers written in ops, as the models are."""

    def __init__(self, ops: NativeOps) -> None:
        self.ops = ops
        generator = torch.Generator().manual_seed(5)

        def linear(n: int, k: int) -> Linear:
            return ops.pack_linear(torch.randn(n, k, generator=generator) / k**0.5)

        self.embed = linear(101, HIDDEN)
        self.qkv = [linear((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN) for _ in range(LAYERS)]
        self.out = [linear(HIDDEN, HEADS * HEAD_DIM) for _ in range(LAYERS)]
        self.gate_up = [linear(140, HIDDEN) for _ in range(LAYERS)]
        self.down = [linear(HIDDEN, 70) for _ in range(LAYERS)]
        self.norm = torch.ones(HIDDEN, dtype=ops.dtype)
        self.head_norm = torch.full((HEAD_DIM,), 0.5, dtype=ops.dtype)
        angles = torch.arange(64).unsqueeze(1) * torch.linspace(0.1, 1.0, HEAD_DIM // 2)
        self.rope = RopeTable(angles.cos(), angles.sin())

    def forward(self, batch: ForwardBatch, attention: object) -> Tensor:
        ops, rows = self.ops, batch.num_tokens
        residual = ops.embedding(batch.token_ids, self.embed)
        x = ops.rms_norm(residual, self.norm, 1e-5)
        for layer in range(LAYERS):
            qkv = ops.linear(x, self.qkv[layer])
            q, k, v = qkv.split([HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM], dim=1)
            q = ops.rms_norm(q.view(rows, HEADS, HEAD_DIM), self.head_norm, 1e-5).view(rows, -1)
            x = ops.linear(attention.run(layer, q, k, v, self.rope), self.out[layer])  # type: ignore[attr-defined]
            x, residual = ops.add_rms_norm(x, residual, self.norm, 1e-5)
            x = ops.linear(ops.silu_mul(ops.linear(x, self.gate_up[layer])), self.down[layer])
            x, residual = ops.add_rms_norm(x, residual, self.norm, 1e-5)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        return self.ops.linear(hidden, self.embed, torch.float32)


def kv_shape(dtype: torch.dtype) -> KVShape:
    return KVShape(LAYERS, KV_HEADS, HEADS, HEAD_DIM, PAGE_SIZE, dtype)


def make_attention(ops: NativeOps, first_key: int = 0) -> NativeAttention:
    return NativeAttention(ops, kv_shape(ops.dtype), 6, max_tokens=40, max_seqs=3, max_kv_len=64, first_key=first_key)


def prompts(*lengths: int) -> ForwardBatch:
    """New sequences of these lengths; sequence s has the pages 2 s and 2 s + 1, in reverse order."""
    positions = torch.cat([torch.arange(n, dtype=torch.int32) for n in lengths])
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int()
    pages = torch.tensor([[2 * s + 1, 2 * s] for s in range(len(lengths))], dtype=torch.int32)
    page = pages[sequence.long(), (positions // PAGE_SIZE).long()]
    starts = int32(0, *torch.tensor(lengths).cumsum(0).tolist())
    return ForwardBatch(
        token_ids=(positions * 7 + sequence * 13 + 1) % 101,
        positions=positions,
        slots=page * PAGE_SIZE + positions % PAGE_SIZE,
        query_start=starts,
        kv_len=int32(*lengths),
        page_start=torch.arange(len(lengths) + 1, dtype=torch.int32) * 2,
        pages=pages.flatten(),
    )


def full_buffers() -> ForwardBatch:
    sizes = {"token_ids": 40, "positions": 40, "slots": 40, "query_start": 4, "kv_len": 3, "page_start": 4, "pages": 6}
    return ForwardBatch(**{name: torch.zeros(size, dtype=torch.int32) for name, size in sizes.items()})


def write(target: ForwardBatch, batch: ForwardBatch) -> None:
    for name in ("token_ids", "positions", "slots", "query_start", "kv_len", "page_start", "pages"):
        source = getattr(batch, name)
        getattr(target, name)[: source.shape[0]] = source


def test_team_runs_every_thread_again_after_sleep() -> None:
    """With no spinning, workers sleep between jobs; none may be lost. Two callers at once take turns."""
    team = _native.Team(3, spin_us=0)
    ops = NativeOps(torch.float32, team)
    weight = torch.randn(96, 32)  # one unit for each thread: a lost thread leaves a hole
    packed = ops.pack_linear(weight)
    errors: list[float] = []

    def work(seed: int) -> None:
        x = torch.randn(2, 32, generator=torch.Generator().manual_seed(seed))
        for _ in range(200):
            errors.append(float((ops.linear(x, packed) - x @ weight.T).abs().max()))

    callers = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(errors) == 400
    assert max(errors) < 1e-4


def test_team_refuses_no_threads() -> None:
    with pytest.raises(ValueError, match="num_threads=0"):
        _native.Team(0)


def test_program_counts_time_and_commands() -> None:
    team = _native.Team(2)
    ops = NativeOps(torch.float32, team)
    packed = ops.pack_linear(torch.randn(64, 64))
    x, y, out = torch.randn(4, 64), torch.zeros(4, 64), torch.zeros(4, dtype=torch.int32)
    program = _native.Program(team, ops.isa)
    program.linear(x.data_ptr(), 64, packed.data, y.data_ptr(), 64, "float32")
    program.argmax(y.data_ptr(), 64, 64, out.data_ptr())
    assert len(program) == 2
    assert program.native_ns == 0
    program.run(3)
    first = program.native_ns
    assert first > 0
    assert program.profile_ns == {"linear": 0, "argmax": 0}
    program.set_profile(True)
    program.run(3)
    profile = program.profile_ns
    assert profile["linear"] > 0
    assert profile["argmax"] > 0
    assert sum(profile.values()) <= program.native_ns - first
    assert torch.equal(out[:3], ops.linear(x, packed).argmax(1).int()[:3])
    assert y[3].eq(0).all()  # the fourth row was not asked for


def test_program_refuses_an_isa_that_does_not_run() -> None:
    with pytest.raises(ValueError, match=r"isa 'vax': this machine runs"):
        _native.Program(_native.Team(1), "vax")


def test_the_fastest_path_is_one_of_the_machines_and_needs_no_more_than_was_asked() -> None:
    isas = _native.supported_isas()
    for level, isa in enumerate(isas):
        path = fastest_path(isa)
        assert path in isas[: level + 1]
        assert path == isa or (isa == "avx512_bf16" and not _native.fast_dpbf16())
    assert fastest_path("auto") == fastest_path(None) == fastest_path(isas[-1])
    with pytest.raises(BackendError, match="this CPU runs"):
        fastest_path("mmx")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("isa", _native.supported_isas())
@pytest.mark.parametrize("first_key", [0, 1])
def test_replay_equals_eager(isa: str, dtype: torch.dtype, first_key: int) -> None:
    ops = NativeOps(dtype, _native.Team(2), isa)
    model = TinyDecoder(ops)
    attention = make_attention(ops, first_key)
    buffers, rows = full_buffers(), torch.zeros(5, dtype=torch.int32)
    plan = attention.plan(buffers)
    arrays = [buffers.token_ids, buffers.positions, buffers.slots]
    body = record(ops, lambda: model.forward(buffers, plan), rows=40, inputs=arrays, keep=[plan])
    head = record(ops, lambda: model.logits(ops.gather_rows(body.output, rows)), rows=5, inputs=[body.output, rows])
    fresh = make_attention(ops, first_key)
    for lengths in [(1,), (3, 1), (20, 17, 3), (2,), (32, 8)]:
        batch = prompts(*lengths)
        want = model.forward(batch, fresh.plan(batch))
        assert want.isfinite().all()
        write(buffers, batch)
        plan.resize(batch.num_tokens, batch.num_seqs)
        got = body.run(batch.num_tokens)
        assert torch.equal(got, want), lengths
        last = batch.query_start[1:] - 1
        rows[: len(lengths)] = last
        assert torch.equal(head.run(len(lengths)), model.logits(want[last.long()])), lengths


def test_workspace_is_reused_and_stays_small() -> None:
    """A deep chain needs memory for what is alive at once, not for its length."""
    ops = NativeOps(torch.float32, _native.Team(1))
    packed = ops.pack_linear(torch.eye(64))
    start = torch.randn(128, 64)
    addresses = set()

    def chain() -> Tensor:
        x = start
        for _ in range(50):
            x = ops.linear(x, packed)
            addresses.add(x.data_ptr())
        return x

    recording = record(ops, chain, rows=128, inputs=[start])
    assert len(addresses) == 2  # each step reads one and writes the other
    assert torch.equal(recording.run(100), start[:100])


def test_workspace_holds_a_block_while_a_view_lives() -> None:
    workspace = Workspace()
    whole = workspace.empty((10, 10), torch.float32)
    before = whole.data_ptr()
    view = whole[3:, 2:].T
    del whole
    assert workspace.empty((10, 10), torch.float32).data_ptr() != before
    del view
    gc.collect()
    assert workspace.num_free_bytes == workspace.num_bytes
    assert workspace.empty((10, 10), torch.float32).data_ptr() == before


def test_workspace_joins_free_neighbours() -> None:
    workspace = Workspace()
    pieces = [workspace.empty((1 << 20,), torch.uint8) for _ in range(8)]
    first = pieces[0].data_ptr()
    for i in (1, 3, 5, 7, 0, 2, 6, 4):
        pieces[i] = torch.empty(0)
    assert workspace.empty((8 << 20,), torch.uint8).data_ptr() == first


def test_recording_refuses_what_it_cannot_replay() -> None:
    ops = NativeOps(torch.float32, _native.Team(1))
    packed = ops.pack_linear(torch.randn(8, 8))
    x = torch.randn(4, 8)
    with pytest.raises(ValueError, match="no recorded op computed"):
        record(ops, lambda: ops.linear(ops.linear(x, packed) + 1, packed), rows=4, inputs=[x])
    with pytest.raises(ValueError, match="no recorded op computed"):
        record(ops, lambda: ops.linear(x, packed), rows=4, inputs=[])
    with pytest.raises(ValueError, match="no recorded op computed"):
        record(ops, lambda: ops.linear(x, packed) * 2, rows=4, inputs=[x])
    with pytest.raises(ValueError, match="would not be recorded"):
        record(ops, lambda: ops.silu_mul(ops.linear(x, packed)[:, ::2]), rows=4, inputs=[x])
    with pytest.raises(ValueError, match="has 3 rows; this recording is of 4"):
        record(ops, lambda: ops.linear(x[:3], packed), rows=4, inputs=[x])
    recording = record(ops, lambda: ops.linear(x, packed), rows=4, inputs=[x])
    with pytest.raises(ValueError, match="takes 0 to 4"):
        recording.run(5)


def test_ops_are_eager_again_after_a_failed_recording() -> None:
    ops = NativeOps(torch.float32, _native.Team(1))
    eager = ops.sink
    recorder = Recorder(ops, 1, [])
    seen = []

    def fail() -> Tensor:
        seen.append(ops.sink)
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"), ops.recording(recorder):
        fail()
    assert seen == [recorder]
    assert ops.sink is eager


def test_attention_refuses_bad_shapes() -> None:
    ops = NativeOps(torch.float32, _native.Team(1))
    sizes = {"max_tokens": 4, "max_seqs": 2, "max_kv_len": 32}
    with pytest.raises(ConfigError, match=r"page_size=24.*multiple of 16"):
        NativeAttention(ops, KVShape(1, 1, 1, 16, 24, torch.float32), 2, **sizes)
    with pytest.raises(ConfigError, match="bfloat16"):
        NativeAttention(ops, KVShape(1, 1, 1, 16, 16, torch.bfloat16), 2, **sizes)
    with pytest.raises(ConfigError, match="3 query heads, 2 KV heads"):
        NativeAttention(ops, KVShape(1, 2, 3, 16, 16, torch.float32), 2, **sizes)
    attention = make_attention(ops)
    with pytest.raises(ValueError, match="41 tokens"):
        attention.plan(prompts(20, 21))
    batch = prompts(2)
    batch.kv_len[0] = 65
    with pytest.raises(ValueError, match="max_kv_len=64"):
        attention.plan(batch)


def test_attention_refuses_another_first_key() -> None:
    ops = NativeOps(torch.float32, _native.Team(1))
    for first_key in (-1, 2):
        with pytest.raises(ValueError, match=rf"first_key={first_key}: must be 0 .* or 1"):
            make_attention(ops, first_key)


def test_first_key_backends_agree_where_position_0_has_no_row() -> None:
    """As a head without a row 0 runs: in passes from position 1 on, over pages whose first slot another used."""
    ops = NativeOps(torch.float32, _native.Team(2))
    lengths, generator = [20, 2, 17], torch.Generator().manual_seed(1)
    pages = pages_for(lengths, PAGE_SIZE)
    whole = make_batch([[0] * n for n in lengths], pages, PAGE_SIZE)
    wide = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    qkv, used = (torch.randn(sum(lengths), wide, generator=generator) for _ in range(2))
    used[:, -KV_HEADS * HEAD_DIM :] *= 1e30  # values that show who looks at them
    angles = torch.arange(64).unsqueeze(1) * torch.linspace(0.1, 1.0, HEAD_DIM // 2)
    rope = RopeTable(angles.cos(), angles.sin())

    def run(backend: AttentionBackend, batch: ForwardBatch, rows: Tensor) -> Tensor:
        q, k, v = rows.clone().split([HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM], dim=1)
        return backend.plan(batch).run(1, q, k, v, rope)

    def passes(backend: AttentionBackend) -> list[Tensor]:
        run(backend, whole, used)
        outputs, past = [], [1, 1, 1]
        for upto in ([17, 1, 5], lengths):
            new = [[0] * (b - a) for a, b in zip(past, upto, strict=True)]
            own = [
                qkv[start + a : start + b] for start, a, b in zip(whole.query_start.tolist(), past, upto, strict=False)
            ]
            outputs.append(run(backend, make_batch(new, pages, PAGE_SIZE, past), torch.cat(own)))
            past = upto
        return outputs

    native = passes(make_attention(ops, first_key=1))
    reference = passes(ReferenceAttention(kv_shape(torch.float32), 6, first_key=1))
    for ours, theirs in zip(native, reference, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert all(x.abs().max() > 1e20 for x in passes(make_attention(ops)))  # with first_key=0 it is looked at


def test_copy_slots_moves_keys_and_values() -> None:
    """A sequence whose second page is copied from elsewhere attends as if it had been written there."""
    ops = NativeOps(torch.float32, _native.Team(2))
    model = TinyDecoder(ops)
    attention = make_attention(ops)
    whole = prompts(20)
    want = model.forward(whole, attention.plan(whole))
    # Page 5 gets the sequence's tokens 16 to 18; its last token is computed again over it.
    source = whole.slots[16:19]
    target = int32(*(5 * PAGE_SIZE + i for i in range(3)))
    attention.copy_slots(source, target)
    last = ForwardBatch(
        token_ids=whole.token_ids[19:],
        positions=whole.positions[19:],
        slots=int32(5 * PAGE_SIZE + 3),
        query_start=int32(0, 1),
        kv_len=int32(20),
        page_start=int32(0, 2),
        pages=int32(1, 5),
    )
    assert torch.equal(model.forward(last, attention.plan(last)), want[19:])
