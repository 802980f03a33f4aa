"""From a model's name to a running engine."""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import replace

import torch
from torch import Tensor

from pilotfish.attention import KVShape
from pilotfish.config import EngineConfig
from pilotfish.engine.backend import choose_backend, make_ops
from pilotfish.engine.config import Machine, resolve
from pilotfish.engine.engine import Engine
from pilotfish.engine.runners import RunnerFactory
from pilotfish.errors import ConfigError
from pilotfish.kv import PagePool
from pilotfish.models import Model, build_model, expected_tensors, kv_shape
from pilotfish.models.checkpoint import Checkpoint, Progress, load_weights, resolve_model
from pilotfish.models.draft_vocab import read_draft_vocab
from pilotfish.models.heads import DraftHead, load_head, pack_lm_head
from pilotfish.ops import Ops
from pilotfish.speculation import HeadScheme, Proposer, Scheme, SpeculationContext, find_head, load_scheme
from pilotfish.text import Tokenizer

__all__ = ["load_engine"]

logger = logging.getLogger(__name__)


def load_engine(
    model: str,
    config: EngineConfig | None = None,
    *,
    use_cache: bool = True,
    progress: Progress | None = None,
    scheme: Scheme | HeadScheme | None = None,
) -> Engine:
    """Load a model and build an engine around it.

    Args:
        model: a folder, a ``.gguf`` file, a built-in name or a Hugging Face id: see
            :func:`pilotfish.models.checkpoint.resolve_model`.
        config: settings; None takes the defaults.
        use_cache: keep the converted copy of a GGUF file for the next time.
        progress: told what is being done and how far it is.
        scheme: at work instead of the one that ``config.speculation`` names, for tools that watch what is computed.
            The settings say how many drafts it may propose; with ``auto`` it may propose none.

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
    scheme: Scheme | HeadScheme | None,
) -> Engine:
    config = replace(config, backend=choose_backend(config), threads=_choose_threads(config, Machine.detect()))
    ops = make_ops(config, checkpoint.dtype)
    target = _load_model(checkpoint, ops, config.max_model_len, progress)
    tokenizer = checkpoint.load_tokenizer()
    settings = config.scheme_settings
    if scheme is None:
        context = _speculation_context(checkpoint, target, tokenizer, ops, config, use_cache, progress)
        settings, scheme = load_scheme(config.speculation, context)
    target_kv = kv_shape(target.config, config.page_size, ops.dtype)
    draft_kv = _draft_kv_shape(scheme, config.page_size, ops.dtype)
    # After the weights, so that what is free is free for pages.
    page_bytes = target_kv.bytes_per_page + (draft_kv.bytes_per_page if draft_kv is not None else 0)
    config = replace(config, speculation=settings)
    config = resolve(config, page_bytes, target.config.max_position_embeddings, Machine.detect())
    assert config.kv_cache_memory is not None
    pool = PagePool(
        config.kv_cache_memory // page_bytes, config.page_size, enable_prefix_caching=config.enable_prefix_caching
    )
    max_logits = config.max_num_seqs + config.max_step_drafts
    runners = RunnerFactory(config, ops, pool.num_pages)
    return Engine(
        config=config,
        model_config=target.config,
        tokenizer=tokenizer,
        runner=runners.runner(target, target_kv, config.max_step_tokens, max_logits, scheme.aux_layers),
        pool=pool,
        proposer=_start(scheme, runners, draft_kv),
        draft_has_kv=draft_kv is not None,
    )


def _speculation_context(
    checkpoint: Checkpoint,
    target: Model,
    tokenizer: Tokenizer,
    ops: Ops,
    config: EngineConfig,
    use_cache: bool,
    progress: Progress | None,
) -> SpeculationContext:
    def load_draft(name: str) -> tuple[Model, Tokenizer, Tensor | None]:
        with closing(resolve_model(name, dtype=config.dtype, cache=use_cache, progress=progress)) as draft:
            model = _load_model(draft, ops, config.max_model_len, progress)
            token_ids = read_draft_vocab(draft.path, draft.config.vocab_size)
            if token_ids is not None:
                model = model.with_lm_head(pack_lm_head(draft.tensors(), draft.config, ops, token_ids))
            return model, draft.load_tokenizer(), token_ids

    def own_head() -> str | None:
        folder = find_head(checkpoint)
        return None if folder is None else str(folder)

    def load(name: str, allow_mismatch: bool) -> DraftHead:
        return load_head(
            name,
            checkpoint=checkpoint,
            model=target,
            ops=ops,
            max_model_len=config.max_model_len,
            allow_mismatch=allow_mismatch,
        )

    return SpeculationContext(target, tokenizer, load_draft, own_head, load)


def _start(scheme: Scheme | HeadScheme, runners: RunnerFactory, kv: KVShape | None) -> Proposer:
    """Give the scheme's draft a KV pool in the target's pages and a runner."""
    config = runners.config
    # A step's tokens, and a bonus token for each row.
    max_tokens = config.max_step_tokens + config.max_num_seqs
    if isinstance(scheme, HeadScheme):
        assert kv is not None
        return scheme.start(runners.head_runner(scheme.head, kv, max_tokens, config.max_num_seqs))
    if scheme.model is None:
        return scheme.start(None)
    assert kv is not None
    return scheme.start(runners.runner(scheme.model, kv, max_tokens, config.max_num_seqs))


def _load_model(checkpoint: Checkpoint, ops: Ops, max_model_len: int | None, progress: Progress | None) -> Model:
    weights = load_weights(checkpoint, expected_tensors(checkpoint.config))
    if progress is not None:
        progress("packing weights", 0.0)
    model = build_model(checkpoint.config, weights, ops, max_model_len)
    if progress is not None:
        progress("packing weights", 1.0)
    return model


def _draft_kv_shape(scheme: Scheme | HeadScheme, page_size: int, dtype: torch.dtype) -> KVShape | None:
    """Of the KV that the scheme keeps in the target's pages: a layer for each module of a head."""
    if isinstance(scheme, HeadScheme):
        return kv_shape(scheme.head.config.shape, page_size, dtype)
    return None if scheme.model is None else kv_shape(scheme.model.config, page_size, dtype)


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
