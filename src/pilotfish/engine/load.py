"""From a model's name to a running engine."""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import replace

import torch

from pilotfish.attention import KVShape
from pilotfish.attention.reference import ReferenceAttention
from pilotfish.config import BackendName, EngineConfig
from pilotfish.engine.config import Machine, resolve
from pilotfish.engine.engine import Engine
from pilotfish.errors import BackendError, ConfigError
from pilotfish.kv import PagePool
from pilotfish.models import Model, ModelConfig, build_model, expected_tensors
from pilotfish.models.checkpoint import Checkpoint, Progress, load_weights, resolve_model
from pilotfish.ops import Ops
from pilotfish.ops.reference import TorchOps
from pilotfish.runner import BatchBuilder, EagerRunner, Runner
from pilotfish.speculation import Scheme, SpeculationContext, load_scheme
from pilotfish.text import Tokenizer

__all__ = ["load_engine"]

logger = logging.getLogger(__name__)


def load_engine(
    model: str,
    config: EngineConfig | None = None,
    *,
    use_cache: bool = True,
    progress: Progress | None = None,
    scheme: Scheme | None = None,
) -> Engine:
    """Load a model and build an engine around it.

    Args:
        model: a folder, a ``.gguf`` file, a built-in name or a Hugging Face id: see
            :func:`pilotfish.models.checkpoint.resolve_model`.
        config: settings; None takes the defaults.
        use_cache: keep the converted copy of a GGUF file for the next time.
        progress: told what is being done and how far it is.
        scheme: at work instead of the one that ``config.speculation`` names, for tools that watch what is computed.

    Raises:
        CheckpointError: the model cannot be found, read or run.
        ConfigError: settings that model or machine cannot meet.
        BackendError: the backend asked for does not run here.
    """
    config = config or EngineConfig()
    checkpoint = resolve_model(model, dtype=config.dtype, cache=use_cache, progress=progress)
    with closing(checkpoint):
        return _build_engine(checkpoint, config, use_cache, progress, scheme)


def _build_engine(
    checkpoint: Checkpoint,
    config: EngineConfig,
    use_cache: bool,
    progress: Progress | None,
    scheme: Scheme | None,
) -> Engine:
    config = replace(config, backend=_choose_backend(config), threads=_choose_threads(config, Machine.detect()))
    ops = _make_ops(config, checkpoint.dtype)
    target = _load_model(checkpoint, ops, config.max_model_len, progress)
    tokenizer = checkpoint.load_tokenizer()

    def load_draft(name: str) -> tuple[Model, Tokenizer]:
        with closing(resolve_model(name, dtype=config.dtype, cache=use_cache, progress=progress)) as draft:
            return _load_model(draft, ops, config.max_model_len, progress), draft.load_tokenizer()

    context = SpeculationContext(target, tokenizer, load_draft)
    if scheme is None:
        scheme = load_scheme(config.speculation, context)
    shapes = [_kv_shape(model.config, config.page_size, ops.dtype) for model in (target, scheme.model) if model]
    # After the weights, so that what is free is free for pages.
    page_bytes = sum(shape.bytes_per_page for shape in shapes)
    config = resolve(config, page_bytes, target.config.max_position_embeddings, Machine.detect())
    assert config.kv_cache_memory is not None
    pool = PagePool(
        config.kv_cache_memory // page_bytes, config.page_size, enable_prefix_caching=config.enable_prefix_caching
    )
    num_drafts = config.speculation.num_drafts if config.speculation is not None else 0
    max_logits = min(config.max_num_batched_tokens, config.max_num_seqs * (num_drafts + 1))
    runner = _make_runner(config, target, ops, shapes[0], pool.num_pages, config.max_num_batched_tokens, max_logits)
    draft_runner = None
    if scheme.model is not None:
        # A step's tokens, and a bonus token for each row.
        max_tokens = config.max_num_batched_tokens + config.max_num_seqs
        draft_runner = _make_runner(
            config, scheme.model, ops, shapes[1], pool.num_pages, max_tokens, config.max_num_seqs
        )
    return Engine(
        config=config,
        model_config=target.config,
        tokenizer=tokenizer,
        runner=runner,
        pool=pool,
        proposer=scheme.start(draft_runner),
        draft_has_kv=draft_runner is not None,
    )


def _load_model(checkpoint: Checkpoint, ops: Ops, max_model_len: int | None, progress: Progress | None) -> Model:
    weights = load_weights(checkpoint, expected_tensors(checkpoint.config))
    if progress is not None:
        progress("packing weights", 0.0)
    model = build_model(checkpoint.config, weights, ops, max_model_len)
    if progress is not None:
        progress("packing weights", 1.0)
    return model


def _kv_shape(config: ModelConfig, page_size: int, dtype: torch.dtype) -> KVShape:
    return KVShape(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        num_q_heads=config.num_q_heads,
        head_dim=config.head_dim,
        page_size=page_size,
        dtype=dtype,
    )


def _choose_threads(config: EngineConfig, machine: Machine) -> int:
    """The kernels' threads wait for each other by spinning: more of them than CPUs are slower by orders of magnitude.

    Raises:
        ConfigError: more threads than this process may use CPUs.
    """
    threads = config.threads or machine.num_cpus
    if threads > machine.num_cpus:
        raise ConfigError(
            f"threads={threads}: this process may use {machine.num_cpus} CPUs. Lower threads to at most that, or leave "
            "it out to use them all."
        )
    return threads


def _choose_backend(config: EngineConfig) -> BackendName:
    """The backend for ``auto``: native where this machine runs it.

    Raises:
        BackendError: native was asked for and does not run here.
    """
    if config.backend == "torch":
        return "torch"
    try:
        from pilotfish import _native
    except ImportError as error:
        reason = f"its extension module cannot be imported ({error}). Reinstall pilotfish with a C++20 compiler"
    else:
        if _native.supported_isas():
            return "native"
        reason = "its kernels need a CPU with AVX2 at least"
    if config.backend == "native":
        raise BackendError(f"backend='native' does not run here: {reason}, or use backend='torch'.")
    logger.warning("backend=torch, which is slow: native does not run here, %s.", reason)
    return "torch"


def _make_ops(config: EngineConfig, dtype: torch.dtype) -> Ops:
    assert config.threads is not None
    if config.backend == "torch":
        torch.set_num_threads(config.threads)
        return TorchOps(dtype)
    from pilotfish import _native
    from pilotfish.ops.native import NativeOps, fastest_path

    return NativeOps(dtype, _native.Team(config.threads), fastest_path(config.isa))


def _make_runner(
    config: EngineConfig, model: Model, ops: Ops, kv: KVShape, num_pages: int, max_tokens: int, max_logits: int
) -> Runner:
    assert config.max_model_len is not None
    limits = {"max_tokens": max_tokens, "max_seqs": config.max_num_seqs}
    builder = BatchBuilder(**limits, max_model_len=config.max_model_len, page_size=config.page_size)
    if config.backend == "torch":
        return EagerRunner(model, ops, ReferenceAttention(kv, num_pages), builder)
    from pilotfish.attention.native import NativeAttention
    from pilotfish.ops.native import NativeOps
    from pilotfish.runner.recorded import RecordedRunner

    assert isinstance(ops, NativeOps)
    attention = NativeAttention(ops, kv, num_pages, **limits, max_kv_len=config.max_model_len)
    return RecordedRunner(model, ops, attention, builder, max_logits=max_logits)
