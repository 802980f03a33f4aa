"""The engine: propose, forward, accept, commit.

It composes the scheduler (which sequences, how many tokens, which pages), the runner (batch to logits), a proposer (a
speculation scheme) and the sampler. It is not thread-safe: one thread calls it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pilotfish.config import EngineConfig
from pilotfish.engine.request import Completion, Request, checked_prompt
from pilotfish.engine.scheduler import Row, ScheduledRow, Scheduler
from pilotfish.errors import RequestError
from pilotfish.grammar import GrammarCompiler, GrammarMatcher
from pilotfish.kv import PagePool
from pilotfish.models import ModelConfig
from pilotfish.runner import Runner, Segment
from pilotfish.sampling import Constraint, SamplerState
from pilotfish.speculation import Candidate, CommittedRow, DraftRow, Outcome, Proposal, Proposer, verify
from pilotfish.text import Detokenizer, StopStringMatcher, Tokenizer
from pilotfish.types import (
    CompletionOutput,
    RequestOutput,
    RequestStats,
    SamplingParams,
    SpeculationStats,
    StructuredOutputs,
)

__all__ = ["Engine", "EngineStats"]

_TEXT_CONTEXT = 8
"""Prompt tokens that the detokenizer sees before the output, so that a first word keeps its leading space."""


@dataclass(slots=True)
class EngineStats:
    """What the engine has done so far.

    Attributes:
        num_steps: forward passes of the target.
        num_prompt_tokens: prompt tokens computed (cached ones and recomputed ones are not counted).
        num_generation_tokens: tokens that requests received.
        num_preemptions: rows that lost their pages.
        prefix_cache_queries: prompt tokens looked up in the prefix cache.
        prefix_cache_hits: prompt tokens found there.
        speculation: what became of all drafts.
    """

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    speculation: SpeculationStats = field(default_factory=SpeculationStats)


class Engine:
    """Serves many requests at once.

    Use :func:`pilotfish.engine.load_engine` to build one from a model's name.

    Args:
        config: resolved settings.
        model_config: of the target.
        tokenizer: of the target.
        runner: batch to logits.
        pool: pages of target and draft.
        proposer: the speculation scheme at work.
        draft_has_kv: it keeps KV of its own in the pages.
        clock: monotonic seconds, for the requests' timings.
    """

    def __init__(
        self,
        *,
        config: EngineConfig,
        model_config: ModelConfig,
        tokenizer: Tokenizer,
        runner: Runner,
        pool: PagePool,
        proposer: Proposer,
        draft_has_kv: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert config.max_model_len is not None
        self.config = config
        self._settings = config.scheme_settings
        self.model_config = model_config
        self.tokenizer = tokenizer
        self.runner = runner
        self.pool = pool
        self.proposer = proposer
        self.stats = EngineStats(speculation=self._speculation_stats())
        self.max_model_len = config.max_model_len
        self.scheduler = Scheduler(
            pool,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            draft_has_kv=draft_has_kv,
            decode_only_drafts=self._settings is not None and self._settings.decode_only_batches,
        )
        self._grammars = GrammarCompiler(tokenizer, model_config.vocab_size, model_config.eos_token_ids)
        self._clock = clock
        self._seeds = random.Random(config.seed)
        self._num_arrivals = 0
        self._requests: dict[str, Request] = {}
        self._completions: dict[Row, Completion] = {}

    @property
    def has_unfinished(self) -> bool:
        """Whether :meth:`step` has anything to do."""
        return bool(self._requests)

    def compile_structured_outputs(self, structured: StructuredOutputs) -> None:
        """Compile what a request asks for, so that :meth:`add_request` finds it done. Any thread may call this.

        Raises:
            RequestError: it is invalid, or uses what is not supported.
        """
        self._grammars.compile(structured)

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        prompt: str | None = None,
    ) -> None:
        """Queue a request.

        Args:
            request_id: its name; must not be in use.
            prompt_token_ids: at least one token, and room for one more within ``max_model_len``.
            params: how to choose its tokens.
            prompt: the prompt's text, for the output only.

        Raises:
            RequestError: it cannot be served. Nothing has changed then.
        """
        if request_id in self._requests:
            raise RequestError(
                f"request_id={request_id!r} is in use by a request under way. Choose another.", "request_id"
            )
        vocab_size = self.model_config.vocab_size
        prompt_ids = checked_prompt(prompt_token_ids, params, max_model_len=self.max_model_len, vocab_size=vocab_size)
        structured = params.structured_outputs
        grammar = None if structured is None else self._grammars.compile(structured)
        stats = RequestStats(arrival_time=self._clock(), speculation=self._speculation_stats())
        output = RequestOutput(request_id, prompt, prompt_ids, outputs=[], stats=stats)
        request = Request(params, output)
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed % 2**64
        constraints: Sequence[GrammarMatcher | None] = [None] * params.n
        if grammar is not None:
            constraints = grammar.matchers(params.n, params.stop_token_ids or (), ignore_eos=params.ignore_eos)
        request.completions = [
            self._make_completion(request, seed, index, constraint) for index, constraint in enumerate(constraints)
        ]
        output.outputs = [completion.output for completion in request.completions]
        self._requests[request_id] = request
        self._completions.update((completion.row, completion) for completion in request.completions)
        self.scheduler.add([request.completions[0].row])

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now. Its output so far, with ``finish_reason="abort"``; None if it is not under way."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        for completion in request.completions:
            if not completion.is_finished:
                completion.output.finish_reason = "abort"
                self._retire(completion)
        request.output.finished = True
        return request.output

    def step(self) -> list[RequestOutput]:
        """Advance every scheduled sequence by one forward pass of the target.

        Returns:
            The requests that got tokens, each with all of its output so far. The objects are updated by later steps.
            One whose grammar could not be followed any longer is finished, with ``error`` set.
        """
        scheduled = self.scheduler.schedule(self._drafts_wanted)
        if not scheduled:
            return []
        rows = [self._draft_row(item) for item in scheduled]
        proposal = self.proposer.propose(rows).within_constraints(rows)
        logits = self.runner.forward(_segments(scheduled, proposal))
        candidates = self._candidates(scheduled, proposal)
        outcomes = verify(logits, candidates, self._settings, self.runner.ops, self.config.logprobs_mode)
        return self._commit(scheduled, proposal, outcomes)

    def _drafts_wanted(self, row: Row) -> int:
        """Most drafts that a decoding row can use: the bonus token comes after them, within ``max_tokens``."""
        settings, completion = self._settings, self._completions[row]
        params = completion.request.params
        if settings is None or not params.speculate:
            return 0
        wanted = settings.num_drafts if params.num_drafts is None else min(params.num_drafts, settings.num_drafts)
        return min(wanted, completion.max_tokens - len(completion.output.token_ids) - 1)

    def _draft_row(self, item: ScheduledRow) -> DraftRow:
        row = item.row
        return DraftRow(row.index, row.token_ids, row.pages, self._completions[row].sampler, item.max_drafts)

    def _candidates(self, scheduled: Sequence[ScheduledRow], proposal: Proposal) -> list[Candidate]:
        return [
            Candidate(self._completions[item.row].sampler, drafts, probs)
            for item, drafts, probs in zip(scheduled, proposal.tokens, proposal.probs, strict=True)
            if item.samples
        ]

    def _commit(
        self, scheduled: Sequence[ScheduledRow], proposal: Proposal, outcomes: Sequence[Outcome]
    ) -> list[RequestOutput]:
        """Hand out tokens, record what the KV cache now holds, tell the proposer."""
        now = self._clock()
        self.stats.num_steps += 1
        self.stats.num_preemptions = self.scheduler.num_preemptions
        progressed: dict[str, RequestOutput] = {}
        committed: list[CommittedRow] = []
        remaining = iter(outcomes)
        offset = 0
        for item, drafts in zip(scheduled, proposal.tokens, strict=True):
            row, completion = item.row, self._completions[item.row]
            index, pages = row.index, row.pages  # given up where the sequence finishes
            self._count_prompt(item, completion, now)
            num_computed = item.start + item.num_tokens
            if item.samples:
                outcome = next(remaining)
                had_tokens = bool(completion.output.token_ids)
                taken = completion.append(outcome.token_ids, outcome.logprobs, outcome.num_accepted)
                # The bonus token has no KV yet; drafts cut off by a stop have one that no one will read.
                num_computed += min(outcome.num_accepted, taken)
                self._count_tokens(completion, len(drafts), outcome, taken, now)
                progressed[completion.request.output.request_id] = completion.request.output
                self._check_constraint(completion)
                if not had_tokens and completion.output.index == 0:
                    self.scheduler.add((c.row for c in completion.request.completions[1:]), first=True)
            self.scheduler.commit(row, num_computed)
            committed.append(
                CommittedRow(
                    index, row.token_ids, pages, item.start, offset, num_computed, len(drafts), completion.is_finished
                )
            )
            offset += item.num_tokens + len(drafts)
            if completion.is_finished:
                self._retire(completion)
        self.proposer.observe(committed, self.runner.features)
        for output in progressed.values():
            if output.error is not None:
                self.abort(output.request_id)
        return list(progressed.values())

    def _check_constraint(self, completion: Completion) -> None:
        """Mark the request of a completion whose grammar cannot be followed any longer."""
        constraint = completion.sampler.constraint
        if constraint is not None and constraint.error is not None:
            completion.output.finish_reason = "abort"
            completion.request.output.error = RequestError(
                f"structured_outputs: the grammar cannot be followed any longer: {constraint.error}. Simplify it.",
                "structured_outputs",
            )

    def _speculation_stats(self) -> SpeculationStats:
        settings = self._settings
        if settings is None:
            return SpeculationStats()
        return SpeculationStats(settings.scheme, settings.num_drafts, exact=settings.verify != "threshold")

    def _retire(self, completion: Completion) -> None:
        """Give back what a finished completion holds, and close its request after the last one."""
        self.scheduler.remove(completion.row)
        del self._completions[completion.row]
        request = completion.request
        if request.is_finished:
            request.output.finished = True
            self._requests.pop(request.output.request_id, None)

    def _count_prompt(self, item: ScheduledRow, completion: Completion, now: float) -> None:
        row, stats = item.row, completion.request.output.stats
        stats.num_preemptions = sum(c.row.num_preemptions for c in completion.request.completions)
        if completion.output.token_ids or row.num_preemptions:
            return
        if stats.first_scheduled_time is None:
            stats.first_scheduled_time = now
        if item.start == row.num_cached:
            self.stats.prefix_cache_queries += row.num_prompt
            self.stats.prefix_cache_hits += row.num_cached
            if completion.output.index == 0:
                stats.num_cached_tokens = row.num_cached
        self.stats.num_prompt_tokens += item.num_tokens

    def _count_tokens(self, completion: Completion, num_drafts: int, outcome: Outcome, taken: int, now: float) -> None:
        self.stats.num_generation_tokens += taken
        stats = completion.request.output.stats
        # Of a run that a stop cut short, only the drafts that were emitted count.
        cut = taken <= outcome.num_accepted
        for target in (stats.speculation, self.stats.speculation):
            target.record(taken if cut else num_drafts, min(outcome.num_accepted, taken), taken)
        if stats.first_token_time is None:
            stats.first_token_time = now
        stats.last_token_time = now
        if completion.output.index == 0:
            stats.num_steps += 1
            stats.token_times.extend([now] * taken)

    def _make_completion(self, request: Request, seed: int, index: int, constraint: Constraint | None) -> Completion:
        params, prompt_ids = request.params, request.output.prompt_token_ids
        row = Row(self._num_arrivals, list(prompt_ids), len(prompt_ids))
        self._num_arrivals += 1
        eos = frozenset(self.model_config.eos_token_ids)
        stop = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else eos)
        room = self.max_model_len - len(prompt_ids)
        return Completion(
            request=request,
            row=row,
            sampler=SamplerState(
                params,
                seed=seed,
                sample_index=index,
                prompt_token_ids=prompt_ids,
                vocab_size=self.model_config.vocab_size,
                eos_token_ids=self.model_config.eos_token_ids,
                constraint=constraint,
            ),
            output=CompletionOutput(index, logprobs=None if params.logprobs is None else []),
            tokenizer=self.tokenizer,
            detokenizer=Detokenizer(
                self.tokenizer, skip_special_tokens=params.skip_special_tokens, context=prompt_ids[-_TEXT_CONTEXT:]
            ),
            stop_strings=StopStringMatcher(params.stop_strings, include_stop=params.include_stop_str_in_output),
            max_tokens=room if params.max_tokens is None else params.max_tokens,
            stop_token_ids=stop,
            eos_token_ids=eos - frozenset(params.stop_token_ids or ()),
        )


def _segments(scheduled: Sequence[ScheduledRow], proposal: Proposal) -> list[Segment]:
    """What the runner computes: each row's tokens of this step followed by its drafts."""
    segments = []
    for item, drafts in zip(scheduled, proposal.tokens, strict=True):
        row = item.row
        tokens = row.token_ids[item.start : item.start + item.num_tokens]
        tokens.extend(drafts)
        segments.append(Segment(row.index, tokens, item.start, row.pages, len(drafts) + 1 if item.samples else 0))
    return segments
