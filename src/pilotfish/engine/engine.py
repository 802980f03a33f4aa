"""The engine: propose, forward, accept, commit.

It composes the scheduler (which sequences, how many tokens, which pages), the runner (batch to logits), a proposer (a
speculation scheme) and the sampler. It is not thread-safe: one thread calls it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral

from pilotfish.config import EngineConfig
from pilotfish.engine.request import Completion, Request
from pilotfish.engine.scheduler import Row, ScheduledRow, Scheduler
from pilotfish.errors import RequestError
from pilotfish.kv import PagePool
from pilotfish.models import ModelConfig
from pilotfish.runner import Runner, Segment
from pilotfish.sampling import LogitsRow, SampleResult, SamplerState, sample
from pilotfish.speculation import Proposal, Proposer, accept_chain
from pilotfish.text import Detokenizer, StopStringMatcher, Tokenizer
from pilotfish.types import CompletionOutput, RequestOutput, RequestStats, SamplingParams

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
    """

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0


class Engine:
    """Serves many requests at once.

    Use :func:`pilotfish.engine.load_engine` to build one from a model's name.

    Args:
        config: resolved settings.
        model_config: of the target.
        tokenizer: of the target.
        runner: batch to logits.
        pool: pages of target and draft.
        proposer: the speculation scheme.
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert config.max_model_len is not None
        self.config = config
        self.model_config = model_config
        self.tokenizer = tokenizer
        self.runner = runner
        self.pool = pool
        self.proposer = proposer
        self.stats = EngineStats()
        self.max_model_len = config.max_model_len
        self.scheduler = Scheduler(
            pool, max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens
        )
        self._clock = clock
        self._seeds = random.Random(config.seed)
        self._num_arrivals = 0
        self._requests: dict[str, Request] = {}
        self._completions: dict[Row, Completion] = {}

    @property
    def has_unfinished(self) -> bool:
        """Whether :meth:`step` has anything to do."""
        return bool(self._requests)

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
        prompt_ids = self._check_request(request_id, prompt_token_ids, params)
        stats = RequestStats(arrival_time=self._clock())
        output = RequestOutput(request_id, prompt, prompt_ids, outputs=[], stats=stats)
        request = Request(params, output)
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed % 2**64
        request.completions = [self._make_completion(request, seed, index) for index in range(params.n)]
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
        """
        scheduled = self.scheduler.schedule()
        if not scheduled:
            return []
        proposal = self.proposer.propose(scheduled)
        logits = self.runner.forward(_segments(scheduled, proposal))
        chosen = sample(logits, self._logits_rows(scheduled, proposal), self.runner.ops, self.config.logprobs_mode)
        return self._commit(scheduled, proposal, chosen)

    def _logits_rows(self, scheduled: Sequence[ScheduledRow], proposal: Proposal) -> list[LogitsRow]:
        """One row of logits per draft and one for the bonus token, each with the history before it."""
        return [
            LogitsRow(self._completions[item.row].sampler, drafts[:position])
            for item, drafts in zip(scheduled, proposal.tokens, strict=True)
            if item.samples
            for position in range(len(drafts) + 1)
        ]

    def _commit(
        self, scheduled: Sequence[ScheduledRow], proposal: Proposal, chosen: SampleResult
    ) -> list[RequestOutput]:
        """Accept drafts, hand out tokens, record what the KV cache now holds."""
        now = self._clock()
        self.stats.num_steps += 1
        self.stats.num_preemptions = self.scheduler.num_preemptions
        progressed: dict[str, RequestOutput] = {}
        first = 0  # of the sequence's rows in `chosen`
        for item, drafts in zip(scheduled, proposal.tokens, strict=True):
            completion = self._completions[item.row]
            self._count_prompt(item, completion, now)
            num_computed = item.start + item.num_tokens
            if not item.samples:
                self.scheduler.commit(item.row, num_computed)
                continue
            last = first + len(drafts) + 1
            verdict = accept_chain(drafts, chosen.token_ids[first:last])
            logprobs = None if chosen.logprobs is None else chosen.logprobs[first:last]
            first = last
            had_tokens = bool(completion.output.token_ids)
            taken = completion.append([*drafts[: verdict.num_accepted], verdict.bonus], logprobs)
            # The bonus token has no KV yet; drafts cut off by a stop have one that no one will read.
            self.scheduler.commit(item.row, num_computed + min(verdict.num_accepted, taken))
            self._count_tokens(completion, taken, now)
            output = completion.request.output
            progressed[output.request_id] = output
            if not had_tokens and completion.output.index == 0:
                self.scheduler.add((c.row for c in completion.request.completions[1:]), first=True)
            if completion.is_finished:
                self._retire(completion)
        return list(progressed.values())

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

    def _count_tokens(self, completion: Completion, taken: int, now: float) -> None:
        self.stats.num_generation_tokens += taken
        stats = completion.request.output.stats
        if stats.first_token_time is None:
            stats.first_token_time = now
        stats.last_token_time = now
        if completion.output.index == 0:
            stats.num_steps += 1
            stats.token_times.extend([now] * taken)

    def _make_completion(self, request: Request, seed: int, index: int) -> Completion:
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

    def _check_request(self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams) -> list[int]:
        """The prompt as a list of plain ints, or a RequestError."""
        if request_id in self._requests:
            raise RequestError(
                f"request_id={request_id!r} is in use by a request under way. Choose another.", "request_id"
            )
        prompt_ids = list(prompt_token_ids)
        vocab_size, limit = self.model_config.vocab_size, self.max_model_len
        if not prompt_ids:
            raise RequestError("The prompt is empty: it must have at least one token.", "prompt")
        for token_id in prompt_ids:
            if not _is_token_id(token_id, vocab_size):
                allowed = f"this model's ids are integers from 0 to {vocab_size - 1}"
                raise RequestError(f"The prompt has the token id {token_id!r}: {allowed}.", "prompt")
        if len(prompt_ids) >= limit:
            raise RequestError(
                f"The prompt has {len(prompt_ids)} tokens; the context (max_model_len) is {limit} tokens and must "
                f"also hold the output, so a prompt may have at most {limit - 1}. Shorten it or raise max_model_len.",
                "prompt",
            )
        if params.max_tokens is not None and len(prompt_ids) + params.max_tokens > limit:
            raise RequestError(
                f"max_tokens={params.max_tokens} after a prompt of {len(prompt_ids)} tokens needs "
                f"{len(prompt_ids) + params.max_tokens} tokens; the context (max_model_len) is {limit}. "
                f"Lower max_tokens to at most {limit - len(prompt_ids)}, or set it to None to run to the end.",
                "max_tokens",
            )
        return [int(token_id) for token_id in prompt_ids]


def _is_token_id(value: object, vocab_size: int) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral) and 0 <= int(value) < vocab_size


def _segments(scheduled: Sequence[ScheduledRow], proposal: Proposal) -> list[Segment]:
    """What the runner computes: each row's tokens of this step followed by its drafts."""
    segments = []
    for item, drafts in zip(scheduled, proposal.tokens, strict=True):
        row = item.row
        tokens = row.token_ids[item.start : item.start + item.num_tokens]
        tokens.extend(drafts)
        segments.append(Segment(row.index, tokens, item.start, row.pages, len(drafts) + 1 if item.samples else 0))
    return segments
