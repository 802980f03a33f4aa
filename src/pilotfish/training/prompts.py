"""Prompts that the target writes itself, for training text where there is no data of one's own.

A chat model that is given its template up to where the user's words begin goes on with what a user might say: its own
idea of what it will be asked (Magpie, Xu et al., arXiv:2406.08464).
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass

from pilotfish.engine import Engine
from pilotfish.errors import ConfigError, RequestError
from pilotfish.text import Tokenizer
from pilotfish.types import SamplingParams

__all__ = ["PromptOptions", "user_prefix", "write_prompts"]

_MARK = "\u2980pilotfish\u2980"
"""Stands for the user's words in the template: nothing that a template could hold itself."""

_MOST_IN_VAIN = 1000
"""Attempts in a row that may bring nothing new."""

_QUEUED = 2
"""Requests waiting for each row that runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """How prompts are written.

    Attributes:
        temperature: high enough that no two are alike.
        top_p: leaves out the tail, in which a small model loses its thread.
        max_tokens: a prompt that is not at its end by then is left out.
        seed: attempt number N has the seed ``seed + N``.
        begin: every prompt begins with this, to get prompts of a kind.
    """

    temperature: float = 1.0
    top_p: float = 0.95
    max_tokens: int = 256
    seed: int = 0
    begin: str = ""

    def __post_init__(self) -> None:
        if not self.temperature > 0.0:
            raise ConfigError(f"temperature={self.temperature}: must be above 0, or all prompts would be the same one")
        self.params(0)

    def params(self, attempt: int) -> SamplingParams:
        """Of one attempt."""
        return SamplingParams(
            temperature=self.temperature, top_p=self.top_p, max_tokens=self.max_tokens, seed=self.seed + attempt
        )


def user_prefix(tokenizer: Tokenizer) -> list[int]:
    """Token ids of the chat template up to where the first user's words begin.

    Raises:
        ConfigError: the model has no chat template, or one that does not hold the user's words as they are.
    """
    try:
        token_ids = tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], add_generation_prompt=False)
    except RequestError as error:
        raise ConfigError(f"model: cannot write prompts: {error}") from error
    before, mark, _ = tokenizer.decode(token_ids, skip_special_tokens=False).partition(_MARK)
    if not mark or not before:
        raise ConfigError("model: cannot write prompts: its chat template says nothing before the user's words")
    return tokenizer.encode(before, add_special_tokens=False)


def write_prompts(
    engine: Engine, options: PromptOptions, first_attempt: int = 0, known: Iterable[str] = ()
) -> Generator[tuple[int, str]]:
    """Prompts, in the order of their attempts, each different from those before it and from ``known``.

    There is no end of them, as long as one of the next 1,000 attempts brings one.

    Args:
        engine: of the target.
        options: how.
        first_attempt: go on from there.
        known: prompts of earlier attempts.

    Yields:
        The number of the attempt, and the prompt.

    Raises:
        ConfigError: see :func:`user_prefix`; or attempts have become vain.
    """
    tokenizer = engine.tokenizer
    prefix = [*user_prefix(tokenizer), *tokenizer.encode(options.begin, add_special_tokens=False)]
    seen = set(known)
    done: dict[int, str] = {}
    in_vain = num_unfinished = 0
    next_attempt = first_out = first_attempt
    try:
        while True:
            while next_attempt - first_out < _QUEUED * engine.config.max_num_seqs:
                engine.add_request(f"prompt-{next_attempt}", prefix, options.params(next_attempt))
                next_attempt += 1
            for output in engine.step():
                if output.finished:
                    completion = output.outputs[0]
                    whole = completion.finish_reason == "stop"
                    done[int(output.request_id.removeprefix("prompt-"))] = (
                        (options.begin + completion.text).strip() if whole else ""
                    )
            while first_out in done:
                text = done.pop(first_out)
                if text and text not in seen:
                    seen.add(text)
                    in_vain = num_unfinished = 0
                    yield first_out, text
                else:
                    in_vain += 1
                    num_unfinished += not text
                    if in_vain == _MOST_IN_VAIN:
                        raise _in_vain(options, len(seen), num_unfinished)
                first_out += 1
    finally:
        for attempt in range(first_out, next_attempt):
            engine.abort(f"prompt-{attempt}")


def _in_vain(options: PromptOptions, num_known: int, num_unfinished: int) -> ConfigError:
    return ConfigError(
        f"temperature={options.temperature}, top_p={options.top_p}, max_tokens={options.max_tokens}: the last "
        f"{_MOST_IN_VAIN} attempts brought no new prompt: {_MOST_IN_VAIN - num_unfinished} were among the {num_known} "
        f"that there are, {num_unfinished} were empty or not at their end by max_tokens. Raise what is low"
    )
