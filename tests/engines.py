"""Engines of :mod:`fakes`, plain and speculating, and what their outputs are compared with."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from fakes import VOCAB_SIZE, GuessProposer, make_builder, make_engine
from fakes_heads import FakeHead, StateCheckingHeadRunner, StateRunner
from pilotfish.config import EngineConfig, Ngram, Speculation
from pilotfish.engine.engine import Engine
from pilotfish.speculation.heads import HeadProposer
from pilotfish.speculation.lookup import LookupFirstProposer
from pilotfish.speculation.ngram import NgramProposer
from pilotfish.types import RequestOutput, SamplingParams

KS = [1, 2, 5, 8]
HEADS: dict[str, dict[str, Any]] = {
    "head": {},
    "near head": {"error": 0.4},
    "chain of 2": {"num_modules": 2},
    "chain of 3": {"num_modules": 3},
    "eagle": {"first_row": False, "num_aux": 3},
}
"""Heads that draft, with arguments of :func:`make_head`: always right but for ``near head``."""

SCHEMES = ["random", "guess", "oracle", "ngram", "equal", "near", *HEADS]
"""Drafts that are: random; right by half; always right; looked up; a draft model's that is the target, or nearly; a
head's."""

ALWAYS_RIGHT = ["oracle", "equal", *(name for name in HEADS if name != "near head")]


def engine_with(scheme: str | None, k: int = 5, *, eos_bias: float = 0.0, **kwargs: Any) -> Engine:
    """``scheme`` is one of ``SCHEMES``; None is plain decoding."""
    if scheme is None:
        return make_engine(eos_bias=eos_bias, **kwargs)
    settings = {name: kwargs.pop(name) for name in ("verify", "decode_only_batches") if name in kwargs}
    kwargs["speculation"] = Ngram(num_drafts=k, **settings)  # the scheme's own settings do not matter below
    if scheme in HEADS:
        options = HEADS[scheme] | kwargs.pop("head", {})
        num_aux = options.get("num_aux", 0)
        kwargs["runner_class"] = type("AuxRunner", (StateRunner,), {"num_aux": num_aux})
        kwargs["make_proposer"] = lambda config, num_pages: make_head(config, num_pages, eos_bias, **options)
    elif scheme in ("equal", "near"):
        kwargs.setdefault("draft", {"error": 0.4 if scheme == "near" else 0.0})
    elif scheme == "ngram":
        kwargs["proposer"] = NgramProposer(3, 1)
    else:
        kwargs["proposer"] = GuessProposer({"random": 0.0, "guess": 0.5, "oracle": 1.0}[scheme], eos_bias)
    return make_engine(eos_bias=eos_bias, **kwargs)


def make_head(
    config: EngineConfig,
    num_pages: int,
    eos_bias: float = 0.0,
    *,
    error: float = 0.0,
    p_min: float = 0.0,
    lookup: int = 0,
    **head: Any,
) -> HeadProposer | LookupFirstProposer:
    """A proposer over a runner that checks what it is given; ``head`` are arguments of :class:`FakeHead`."""
    builder = make_builder(config, config.max_step_tokens + config.max_num_seqs)
    runner = StateCheckingHeadRunner(FakeHead(**head), builder, num_pages, eos_bias, error)
    assert isinstance(config.speculation, Speculation)
    proposer = HeadProposer(runner, VOCAB_SIZE, with_probs=config.speculation.verify == "rejection", p_min=p_min)
    return LookupFirstProposer(NgramProposer(max(lookup, 4), lookup), proposer) if lookup else proposer


def run(engine: Engine) -> dict[str, RequestOutput]:
    done = {}
    while engine.has_unfinished:
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output
    return done


def one(engine: Engine, prompt: list[int], params: SamplingParams) -> RequestOutput:
    engine.add_request("one", prompt, params)
    return run(engine)["one"]


def plain(prompt: list[int], params: SamplingParams, **kwargs: Any) -> RequestOutput:
    return one(engine_with(None, **kwargs), prompt, params)


def summary(output: RequestOutput) -> list[tuple[Any, ...]]:
    return [(c.token_ids, c.text, c.finish_reason, c.stop_reason, c.logprobs) for c in output.outputs]


def params(**kwargs: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 8, "temperature": 0.0} | kwargs)


def check_statistics(output: RequestOutput) -> None:
    """Drafts, accepted ones and tokens are counted for what was handed out and for nothing else."""
    stats = output.stats.speculation
    for c in output.outputs:
        assert len(c.is_draft) == len(c.text_ends) == len(c.token_ids)
        assert all(a <= b for a, b in pairwise(c.text_ends))
        assert not c.token_ids or c.text_ends[-1] == len(c.text)
        assert c.logprobs is None or len(c.logprobs) == len(c.token_ids)
    assert stats.num_accepted == sum(sum(c.is_draft) for c in output.outputs)
    assert sum(stats.drafted_at) == stats.num_drafted and sum(stats.accepted_at) == stats.num_accepted
    # A step gives accepted drafts and one token more, or it was cut off within the drafts.
    assert 0 <= stats.num_accepted + stats.num_steps - stats.num_emitted <= len(output.outputs)
    assert stats.num_emitted <= sum(len(c.token_ids) for c in output.outputs)
    assert all(a <= d for a, d in zip(stats.accepted_at, stats.drafted_at, strict=True))
    assert all(a >= b for a, b in pairwise(stats.accepted_at))
    if len(output.outputs) == 1 and output.outputs[0].finish_reason != "abort":
        c = output.outputs[0]
        assert output.stats.num_steps == len(c.token_ids) - (stats.num_emitted - stats.num_steps)
        assert len(output.stats.token_times) == len(c.token_ids)
