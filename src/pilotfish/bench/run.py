"""Every scheme over every batch of prompts, in turn, so that what else the machine does hits them all."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pilotfish.bench.questions import Question
from pilotfish.bench.records import Group, Measured, Run
from pilotfish.engine import Engine
from pilotfish.text import Tokenizer
from pilotfish.types import RequestOutput, SamplingParams

__all__ = ["BASELINE", "Planned", "Prompt", "encode_prompts", "measure", "plan_groups", "run_batch", "warm_up"]

BASELINE = "none"
"""The scheme that others are compared with."""

_WARM_UP_TOKENS = 8
_WARM_UP_PROMPT = 8


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question's first turn as token ids."""

    question: Question
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Planned:
    """A group before it runs."""

    batch: int
    category: str
    index: int
    prompts: list[Prompt]

    @property
    def key(self) -> tuple[int, str, int]:
        return self.batch, self.category, self.index


def encode_prompts(
    questions: Sequence[Question], tokenizer: Tokenizer, max_prompt_len: int
) -> tuple[list[Prompt], list[Question]]:
    """First turns as token ids, through the chat template where the model has one.

    Args:
        questions: what to ask.
        tokenizer: of the target.
        max_prompt_len: longest prompt that leaves room for the output, in tokens.

    Returns:
        The prompts, and the questions that are too long.
    """
    prompts, too_long = [], []
    for question in questions:
        text = question.turns[0]
        if tokenizer.has_chat_template:
            token_ids = tokenizer.apply_chat_template([{"role": "user", "content": text}])
        else:
            token_ids = tokenizer.encode(text)
        if len(token_ids) <= max_prompt_len:
            prompts.append(Prompt(question, token_ids))
        else:
            too_long.append(question)
    return prompts, too_long


def plan_groups(prompts: Sequence[Prompt], batches: Sequence[int]) -> list[Planned]:
    """Batches of prompts, each of one category and of exactly the size asked for.

    A category's last batch is filled up with its first prompts again, so that a batch of 16 means 16 everywhere.
    Groups of different sizes alternate, so that a run that is cut short has something of each.
    """
    categories: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        categories.setdefault(prompt.question.category, []).append(prompt)
    planned = []
    for batch in batches:
        for category, members in categories.items():
            for index in range(-(-len(members) // batch)):
                chosen = [members[i % len(members)] for i in range(index * batch, (index + 1) * batch)]
                planned.append(Planned(batch, category, index, chosen))
    return sorted(planned, key=lambda group: group.index * group.batch)  # stable: sizes, then categories, in order


def run_batch(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> tuple[float, list[RequestOutput]]:
    """Serve all prompts at once. Seconds from the first arrival to the last token, and the outputs in order.

    Raises:
        RequestError: a prompt cannot be served. The engine is idle then, as it is after any other exception.
    """
    names = [f"bench-{i}" for i in range(len(prompts))]
    outputs: dict[str, RequestOutput] = {}
    start = time.perf_counter()
    try:
        for name, prompt in zip(names, prompts, strict=True):
            engine.add_request(name, prompt, params)
        while engine.has_unfinished:
            outputs.update((output.request_id, output) for output in engine.step())
    except BaseException:
        for name in names:
            engine.abort(name)
        raise
    return time.perf_counter() - start, [outputs[name] for name in names]


def warm_up(engine: Engine, params: SamplingParams) -> None:
    """First use costs once what must not count for any scheme: pages never touched, sleeping threads.

    The prompt repeats itself, so that every scheme proposes something and its verification runs too.
    """
    room = min(_WARM_UP_TOKENS, engine.max_model_len - 1)
    few = SamplingParams(temperature=params.temperature, max_tokens=room, ignore_eos=True, seed=0)
    prompt = [0] * min(_WARM_UP_PROMPT, engine.max_model_len - room)
    run_batch(engine, [prompt] * engine.config.max_num_seqs, few)


def measure(
    engines: Mapping[str, Engine], planned: Sequence[Planned], params: SamplingParams, done: Collection[object] = ()
) -> Iterator[Group]:
    """Run the groups one after another, yielding each when every scheme has had its turn.

    The order of schemes rotates from group to group, so that none always runs first.

    Args:
        engines: by scheme's name; each serves ``batch`` requests at once.
        planned: what to run.
        params: of every request.
        done: keys of groups to leave out.
    """
    schemes = list(engines)
    for number, group in enumerate(planned):
        if group.key in done:
            continue
        turn = number % len(schemes)
        results = {
            scheme: run_batch(engines[scheme], [prompt.token_ids for prompt in group.prompts], params)
            for scheme in (*schemes[turn:], *schemes[:turn])
        }
        plain = [output.outputs[0].token_ids for output in results[BASELINE][1]] if BASELINE in results else None
        yield Group(group.batch, group.category, group.index, [
            Run(scheme, results[scheme][0], _records(group, results[scheme][1], plain)) for scheme in schemes
        ])  # fmt: skip


def _records(group: Planned, outputs: Sequence[RequestOutput], plain: list[list[int]] | None) -> list[Measured]:
    records = []
    for i, (prompt, output) in enumerate(zip(group.prompts, outputs, strict=True)):
        identical = None if plain is None else output.outputs[0].token_ids == plain[i]
        records.append(Measured.of(prompt.question.question_id, output, identical))
    return records
