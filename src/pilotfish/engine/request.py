"""A request inside the engine, and its completions: where tokens become text and where they end.

All endings are decided here, token by token, so that tokens, text, logprobs and statistics end at the same place
however many tokens a step brought.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral

from pilotfish.engine.scheduler import Row
from pilotfish.errors import RequestError, prompt_too_long, shown
from pilotfish.sampling import SamplerState, check_vocabulary
from pilotfish.text import Detokenizer, StopStringMatcher, Tokenizer
from pilotfish.types import CompletionOutput, FinishReason, Logprob, RequestOutput, SamplingParams

__all__ = ["Completion", "Request", "checked_prompt"]


@dataclass(eq=False, slots=True)
class Completion:
    """One of a request's ``n`` completions.

    Attributes:
        request: the request it belongs to.
        row: its sequence in the scheduler.
        sampler: its sampling parameters, noise and token history.
        max_tokens: most output tokens, by the request or by the context's end.
        stop_token_ids: tokens that end it, EOS included unless ignored.
        eos_token_ids: the EOS ones among them.
    """

    request: Request
    row: Row
    sampler: SamplerState
    output: CompletionOutput
    tokenizer: Tokenizer
    detokenizer: Detokenizer
    stop_strings: StopStringMatcher
    max_tokens: int
    stop_token_ids: frozenset[int]
    eos_token_ids: frozenset[int]

    @property
    def is_finished(self) -> bool:
        return self.output.finish_reason is not None

    @property
    def _searches(self) -> bool:
        """Whether a stop string may end here. As in vLLM, not within the text of the first ``min_tokens`` tokens."""
        min_tokens = self.request.params.min_tokens
        return min_tokens == 0 or len(self.output.token_ids) > min_tokens

    def append(
        self, token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob]] | None, num_drafts: int = 0
    ) -> int:
        """Take the tokens of one step in order, up to the first that ends the completion.

        Args:
            token_ids: the tokens.
            logprobs: of each token, for a completion that asked for them.
            num_drafts: how many of the first tokens are accepted drafts.

        Returns:
            How many were taken.
        """
        for count, token_id in enumerate(token_ids, start=1):
            if self.output.logprobs is not None:
                assert logprobs is not None
                self.output.logprobs.append(self._with_text(logprobs[count - 1]))
            self._append_one(token_id)
            self.output.is_draft.append(count <= num_drafts)
            self.output.text_ends.append(len(self.output.text))
            if self.is_finished:
                return count
        return len(token_ids)

    def _with_text(self, entry: dict[int, Logprob]) -> dict[int, Logprob]:
        text = self.tokenizer.token_text
        return {token: Logprob(item.logprob, item.rank, text(token)) for token, item in entry.items()}

    def _append_one(self, token_id: int) -> None:
        params, output = self.request.params, self.output
        self.row.token_ids.append(token_id)
        self.sampler.commit([token_id])
        output.token_ids.append(token_id)
        num_tokens = len(output.token_ids)

        constraint = self.sampler.constraint
        ended = constraint is not None and constraint.ended
        if ended or (token_id in self.stop_token_ids and num_tokens >= params.min_tokens):
            text = self.detokenizer.push([token_id]) if params.include_stop_str_in_output else ""
            self._finish("stop", None if token_id in self.eos_token_ids else token_id, text)
            return
        text = self.detokenizer.push([token_id])
        text, matched = self.stop_strings.push(text, search=self._searches)
        if matched is not None:
            output.finish_reason, output.stop_reason = "stop", matched
        output.text += text
        if num_tokens >= self.max_tokens and not self.is_finished:
            self._finish("length", None, "")

    def _finish(self, reason: FinishReason, stop_reason: int | str | None, text: str) -> None:
        """End here, and give out the text that was held back for a character or a stop string to complete."""
        output = self.output
        output.finish_reason, output.stop_reason = reason, stop_reason
        text, matched = self.stop_strings.push(text + self.detokenizer.flush(), search=self._searches)
        if matched is not None:
            output.finish_reason, output.stop_reason = "stop", matched
        else:
            text += self.stop_strings.flush()
        output.text += text


@dataclass(eq=False, slots=True)
class Request:
    """A request under way. Completion 0 computes the prompt; the others start when its pages can be shared."""

    params: SamplingParams
    output: RequestOutput
    completions: list[Completion] = field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        return all(completion.is_finished for completion in self.completions)


def checked_prompt(
    prompt_token_ids: Sequence[int], params: SamplingParams, *, max_model_len: int, vocab_size: int
) -> list[int]:
    """The prompt as a list of plain ints, of a request that an engine can serve.

    Args:
        prompt_token_ids: the prompt.
        params: how to choose its tokens.
        max_model_len: of the engine.
        vocab_size: of its model.

    Raises:
        RequestError: a token id that the model does not have, or prompt and output do not fit into the context.
    """
    prompt_ids = list(prompt_token_ids)
    if not prompt_ids:
        raise RequestError("The prompt is empty: it must have at least one token.", "prompt")
    for token_id in prompt_ids:
        if not _is_token_id(token_id, vocab_size):
            allowed = f"this model's ids are integers from 0 to {vocab_size - 1}"
            raise RequestError(f"The prompt has the token id {shown(token_id)}: {allowed}.", "prompt")
    check_vocabulary(params, vocab_size)
    room = max_model_len - len(prompt_ids)
    if room < 1:
        raise prompt_too_long(f"{len(prompt_ids)} tokens", max_model_len)
    if params.max_tokens is not None and params.max_tokens > room:
        raise RequestError(
            f"max_tokens={shown(params.max_tokens)} after a prompt of {len(prompt_ids)} tokens needs "
            f"{shown(len(prompt_ids) + params.max_tokens)} tokens; the context (max_model_len) is {max_model_len}. "
            f"Lower max_tokens to at most {room}, or raise max_model_len.",
            "max_tokens",
        )
    return [int(token_id) for token_id in prompt_ids]


def _is_token_id(value: object, vocab_size: int) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral) and 0 <= int(value) < vocab_size
