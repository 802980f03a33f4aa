"""Capture: the target writes answers, and its hidden states are kept.

The engine runs as it does for any user, with a proposer that proposes nothing and keeps what the target computed. So
states are those that a head will see when it is served.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pilotfish.config import EngineConfig
from pilotfish.engine import Engine, load_engine
from pilotfish.errors import ConfigError, RequestError
from pilotfish.models.checkpoint import Progress, resolve_model
from pilotfish.models.heads import target_stamp
from pilotfish.prompts import Message, json_lines, read_data, read_prompt, without_answer
from pilotfish.runner import Runner
from pilotfish.speculation import CommittedRow, DraftRow, Proposal, Scheme
from pilotfish.text import Tokenizer
from pilotfish.training.folder import check_folder
from pilotfish.training.store import CaptureReader, CaptureWriter, Manifest, Sample, is_capture
from pilotfish.types import RequestOutput, SamplingParams

__all__ = ["Capture", "CaptureOptions", "CapturePrompt", "LoadedPrompts", "StateKeeper", "load_prompts"]

_QUEUED = 2
"""Requests waiting for each row that runs: enough that no row is ever empty, few enough to stop soon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureOptions:
    """How answers come about.

    Attributes:
        temperature: of the answers; 0 is greedy.
        max_tokens: most tokens of an answer.
        max_prompt_tokens: longer prompts are left out, and those that leave no room in the context.
        keep_answers: learn the answers in the data instead of writing new ones.
        seed: a prompt's seed is this plus its line number, so that a capture that was interrupted goes on as it began.
        limit: most prompts.
        aux_layers: also keep the states that enter these layers (EAGLE-3).
        shard_tokens: tokens in a shard, at least.
    """

    temperature: float = 0.0
    max_tokens: int = 256
    max_prompt_tokens: int = 1024
    keep_answers: bool = False
    seed: int = 0
    limit: int | None = None
    aux_layers: tuple[int, ...] = ()
    shard_tokens: int = 100_000

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_prompt_tokens", "shard_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit={self.limit}: must be at least 1, or left out for all prompts")
        if len(set(self.aux_layers)) < len(self.aux_layers):
            raise ConfigError(f"aux_layers={','.join(map(str, self.aux_layers))}: must be different layers")
        try:
            self.params(0, self.max_tokens)
        except RequestError as error:  # now, and not when the folder holds a capture with these options
            raise ConfigError(str(error)) from None

    def params(self, row: int, room: int) -> SamplingParams:
        """How the answer to line ``row`` of the data is chosen, of at most ``room`` tokens."""
        if self.keep_answers:
            return SamplingParams(max_tokens=1)
        return SamplingParams(temperature=self.temperature, max_tokens=min(self.max_tokens, room), seed=self.seed + row)

    @property
    def sampling(self) -> dict[str, Any]:
        """What decides the captured text, for the manifest."""
        names = ["keep_answers", "max_prompt_tokens", "limit"]
        if not self.keep_answers:
            names += ["temperature", "max_tokens", "seed"]
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class CapturePrompt:
    """One line of the data: its tokens, and with kept answers which of them are the answers'.

    Attributes:
        row: line number, from 0.
        source: the line's ``source`` or ``category``, or "".
        token_ids: prompt, or prompt and answers.
        loss_mask: 1 for tokens of given answers.
    """

    row: int
    source: str
    token_ids: list[int]
    loss_mask: list[int]


@dataclass(frozen=True, slots=True)
class LoadedPrompts:
    """The prompts of a file that can be used, in its order, and how many others it has.

    Attributes:
        prompts: to be used.
        num_too_long: have more tokens than was allowed.
        num_without_answer: have no answer to learn, where given answers are wanted.
    """

    prompts: list[CapturePrompt]
    num_too_long: int
    num_without_answer: int


def load_prompts(
    path: Path, tokenizer: Tokenizer, max_prompt_tokens: int, *, keep_answers: bool = False, limit: int | None = None
) -> LoadedPrompts:
    """The prompts of a JSON-lines file; its lines are as :func:`pilotfish.prompts.read_prompt` takes them.

    Args:
        path: of the file.
        tokenizer: the target's.
        max_prompt_tokens: longer prompts are left out.
        keep_answers: given answers are part of the prompt, and are to be learnt; else a last answer is left out.
        limit: most prompts; the file is read no further.

    Raises:
        ConfigError: the file cannot be read, has no prompts, or a line is none; names the line.
    """
    prompts: list[CapturePrompt] = []
    num_too_long = num_without_answer = 0
    for number, item in json_lines(read_data(path), str(path)):
        if limit is not None and len(prompts) >= limit:
            break
        place = f"{path}:{number}"
        try:
            token_ids, mask = _tokenize(item, tokenizer, keep_answers, place)
        except RequestError as error:
            raise ConfigError(f"{place}: {error}") from error
        if not token_ids:
            raise ConfigError(f"{place}: has no tokens")
        if len(token_ids) > max_prompt_tokens:
            num_too_long += 1
        elif keep_answers and not any(mask):
            num_without_answer += 1
        else:
            source = str(item.get("source") or item.get("category") or "")
            prompts.append(CapturePrompt(number - 1, source, token_ids, mask))
    if not prompts and not num_too_long and not num_without_answer:
        raise ConfigError(f"data={str(path)!r}: has no prompts")
    return LoadedPrompts(prompts, num_too_long, num_without_answer)


def _tokenize(
    item: Mapping[str, Any], tokenizer: Tokenizer, keep_answers: bool, place: str
) -> tuple[list[int], list[int]]:
    """Token ids and loss mask of one line."""
    prompt = read_prompt(item, place, as_text=not tokenizer.has_chat_template)
    if isinstance(prompt, str):
        token_ids = tokenizer.encode(prompt)
        # The first token is given, never predicted.
        return token_ids, [0, *[int(keep_answers)] * (len(token_ids) - 1)]
    if keep_answers:
        return _tokenize_answers(prompt, tokenizer)
    token_ids = tokenizer.apply_chat_template(without_answer(prompt, place))
    return token_ids, [0] * len(token_ids)


def _tokenize_answers(messages: Sequence[Message], tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """A conversation with its assistant's turns marked: each is what the template adds after the prompt before it.

    It ends with its EOS token: what templates write behind it, such as a newline, the target never generates.
    """
    token_ids = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    mask = [0] * len(token_ids)
    for i, message in enumerate(messages):
        if i == 0 or message.get("role") != "assistant":
            continue
        start = len(tokenizer.apply_chat_template(messages[:i]))
        end = len(tokenizer.apply_chat_template(messages[: i + 1], add_generation_prompt=False))
        turn = token_ids[start:end]
        length = next((j + 1 for j, token in enumerate(turn) if token in tokenizer.eos_token_ids), len(turn))
        mask[start : start + length] = [1] * length
    return token_ids, mask


class StateKeeper:
    """A proposer that proposes nothing and keeps the target's states of every sequence until it ends.

    Attributes:
        runner: the target's. Its states after the final norm are kept, and behind them its features if they are others.
    """

    runner: Runner

    def __init__(self) -> None:
        self._running: dict[int, tuple[Sequence[int], list[Tensor]]] = {}  # by row; the tokens tell a new sequence
        self._finished: dict[tuple[int, ...], list[Tensor]] = {}  # equal texts may end together

    def propose(self, rows: Sequence[DraftRow]) -> Proposal:
        return Proposal.empty(len(rows))

    def observe(self, rows: Sequence[CommittedRow], features: Tensor) -> None:
        for row in rows:
            tokens, chunks = self._running.get(row.index, (None, []))
            if tokens is not row.token_ids or row.start == 0:  # a new sequence, or one that is computed again
                chunks = []
                self._running[row.index] = (row.token_ids, chunks)
            rows_of = slice(row.offset, row.offset + row.num_computed - row.start)
            parts = [self.runner.hidden[rows_of]]
            if features.data_ptr() != self.runner.hidden.data_ptr():
                parts.append(features[rows_of])
            chunks.append(torch.cat(parts, dim=1).to(torch.bfloat16))
            if row.finished:
                del self._running[row.index]
                self._finished.setdefault(tuple(row.token_ids), []).append(torch.cat(chunks))

    def take(self, token_ids: Sequence[int]) -> Tensor:
        """The states of a sequence that has just ended: bfloat16 [L, H + F], zeros where none was computed."""
        key = tuple(token_ids)
        states = self._finished[key].pop()
        if not self._finished[key]:
            del self._finished[key]
        missing = len(token_ids) - len(states)
        return torch.cat([states, states.new_zeros(missing, states.shape[1])])


class Capture:
    """One capture under way. Iterate :meth:`run`.

    Args:
        model: the target, as for :func:`pilotfish.engine.load_engine`.
        data: the prompts' file.
        folder: where to; a capture that was interrupted there goes on.
        options: how answers come about.
        config: of the engine; speculation and prefix caching are switched off.
        progress: told how the model is loaded.

    Raises:
        ConfigError: the folder is none, or holds a capture of another target, data file or options; no prompt can be
            used; or see :func:`load_prompts`.
        CheckpointError: the model cannot be loaded.

    Attributes:
        loaded: the prompts, and how many were left out.
        longest_prompt: that may be used, in tokens.
    """

    def __init__(
        self,
        model: str,
        data: Path,
        folder: Path,
        options: CaptureOptions,
        config: EngineConfig,
        progress: Progress | None = None,
    ) -> None:
        check_folder(folder)
        if folder.is_dir() and any(folder.iterdir()) and not is_capture(folder):
            raise ConfigError(f"out={str(folder)!r}: is not empty and holds no capture to go on with. Choose another")
        self.options = options
        checkpoint = resolve_model(model, dtype=config.dtype, progress=progress)
        stamp = target_stamp(checkpoint)
        num_layers = checkpoint.config.num_layers
        if any(not 1 <= layer <= num_layers for layer in options.aux_layers):
            given = ",".join(map(str, options.aux_layers))
            raise ConfigError(f"aux_layers={given}: must be from 1 to {num_layers}, the target's layers")
        self.tokenizer = checkpoint.load_tokenizer()
        self._context = context = min(checkpoint.config.max_position_embeddings, config.max_model_len or sys.maxsize)
        self.longest_prompt = min(options.max_prompt_tokens, context - 1)
        self.loaded = load_prompts(
            data, self.tokenizer, self.longest_prompt, keep_answers=options.keep_answers, limit=options.limit
        )
        self.prompts = self.loaded.prompts
        if not self.prompts:
            raise ConfigError(
                f"data={str(data)!r}: no prompt can be used: {self.loaded.num_too_long} have more than "
                f"{self.longest_prompt} tokens (max_prompt_tokens={options.max_prompt_tokens}, and a context of "
                f"{context}), {self.loaded.num_without_answer} have no answer that keep_answers could learn"
            )
        self._hidden_size = stamp.hidden_size
        fresh = Manifest(
            target=asdict(stamp),
            dtype=config.dtype,
            aux_layers=options.aux_layers,
            sampling=options.sampling,
            data={"file": data.name, "sha256": hashlib.sha256(data.read_bytes()).hexdigest()},
            num_prompts=len(self.prompts),
        )
        folder.mkdir(parents=True, exist_ok=True)
        manifest = _resume(folder, fresh)
        done = set(CaptureReader([folder]).rows.tolist()) if manifest.shards else set()
        self.num_done = len(done)
        self._todo = [prompt for prompt in self.prompts if prompt.row not in done]
        self._writer = CaptureWriter(folder, manifest, options.shard_tokens)
        self._keeper = StateKeeper()
        self._model, self._config, self._progress = model, config, progress

    @property
    def manifest(self) -> Manifest:
        return self._writer.manifest

    def size_estimate(self) -> tuple[int, int]:
        """Most tokens that the whole capture can have, and their bytes on disk."""
        options = self.options
        num_tokens = sum(len(prompt.token_ids) for prompt in self.prompts)
        if not options.keep_answers:
            num_tokens += len(self.prompts) * options.max_tokens
        return num_tokens, num_tokens * (2 * self._hidden_size * (1 + len(options.aux_layers)) + 5)

    def run(self) -> Generator[Sample]:
        """Compute what is missing; yields every sample when it is complete. Closing the iterator keeps what is done."""
        longest = max(len(prompt.token_ids) for prompt in self.prompts) + self.options.max_tokens
        engine = load_engine(
            self._model,
            # A context that is given is not shortened to what the KV cache holds: prompts that need it would be refused
            # in the middle of the capture.
            replace(
                self._config,
                speculation=None,
                enable_prefix_caching=False,
                max_model_len=min(longest, self._context),
            ),
            progress=self._progress,
            scheme=Scheme(model=None, start=lambda _: self._keeper, aux_layers=self.options.aux_layers),
        )
        self._keeper.runner = engine.runner
        complete = False
        try:
            for sample in self._samples(engine):
                self._writer.add(sample)
                yield sample
            complete = True
        finally:
            self._writer.close(complete=complete)

    def _samples(self, engine: Engine) -> Iterator[Sample]:
        waiting = iter(self._todo)
        running: dict[str, CapturePrompt] = {}
        while True:
            for prompt in waiting:
                running[str(prompt.row)] = prompt
                params = self.options.params(prompt.row, engine.max_model_len - len(prompt.token_ids))
                engine.add_request(str(prompt.row), prompt.token_ids, params)
                if len(running) >= _QUEUED * engine.config.max_num_seqs:
                    break
            if not running:
                return
            for output in engine.step():
                if output.finished:
                    yield self._sample(running.pop(output.request_id), output)

    def _sample(self, prompt: CapturePrompt, output: RequestOutput) -> Sample:
        answer = output.outputs[0].token_ids
        states = self._keeper.take([*prompt.token_ids, *answer])
        if self.options.keep_answers:
            token_ids, mask = prompt.token_ids, prompt.loss_mask
            states = states[: len(token_ids)]
        else:
            token_ids = [*prompt.token_ids, *answer]
            mask = [*prompt.loss_mask, *[1] * len(answer)]
        hidden, aux = self._split(states)
        return Sample(
            np.asarray(token_ids, np.int32), np.asarray(mask, np.uint8), hidden, aux, prompt.row, prompt.source
        )

    def _split(self, states: Tensor) -> tuple[Tensor, Tensor | None]:
        hidden = states[:, : self._hidden_size].contiguous()
        return hidden, states[:, self._hidden_size :].contiguous() if self.options.aux_layers else None


def _resume(folder: Path, fresh: Manifest) -> Manifest:
    """The manifest to go on with: that of the folder, if it is of the same capture."""
    if not is_capture(folder):
        fresh.save(folder)
        return fresh
    found = Manifest.load(folder)
    for name in ("target", "dtype", "aux_layers", "sampling", "data"):
        ours, theirs = getattr(fresh, name), getattr(found, name)
        if ours != theirs:
            raise ConfigError(
                f"out={str(folder)!r}: holds a capture with {name}={theirs!r}; this one has {ours!r}. Choose another "
                "folder, or the same settings to go on with it."
            )
    return replace(found, num_prompts=fresh.num_prompts)
