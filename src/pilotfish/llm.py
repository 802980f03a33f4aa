"""The offline API: ``LLM("smollm2-135m").generate("Once upon a time")``.

An :class:`LLM` has an engine and drives it: it turns prompts and conversations into requests, steps until they are
done, and hands their outputs back in order. It is not thread-safe.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, TypedDict, Unpack

from pilotfish.config import BackendName, DTypeName, EngineConfig, IsaName, LogprobsMode, SpeculationChoice
from pilotfish.engine.engine import Engine
from pilotfish.engine.load import load_engine
from pilotfish.errors import ConfigError, RequestError
from pilotfish.text import Message, Tokenizer
from pilotfish.types import RequestOutput, RequestStats, SamplingParams

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

__all__ = ["LLM", "EngineSettings", "StreamPiece"]

Prompt = str | Sequence[int]
"""A text, or its token ids."""

Conversation = Sequence[Message]


class EngineSettings(TypedDict, total=False):
    """The keywords of :class:`LLM`: every field of :class:`pilotfish.config.EngineConfig`, with its defaults."""

    dtype: DTypeName
    backend: BackendName
    isa: IsaName
    threads: int | None
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int
    kv_cache_memory: int | None
    kv_cache_fraction: float
    enable_prefix_caching: bool
    logprobs_mode: LogprobsMode
    speculation: SpeculationChoice
    seed: int | None


@dataclass(frozen=True, slots=True)
class StreamPiece:
    """What one step added to one completion.

    Attributes:
        text: new text; may be empty while a character or a possible stop string is incomplete.
        token_ids: new tokens, one or (with speculation) more.
        index: of the completion, below ``SamplingParams.n``.
        output: the request and all of its output so far; later steps update the same object.
    """

    text: str
    token_ids: list[int]
    index: int
    output: RequestOutput


@dataclass(slots=True)
class _Job:
    """One prompt on its way: its tokens, or the error that keeps it from being served."""

    request_id: str
    prompt: str | None
    token_ids: list[int]
    params: SamplingParams
    error: RequestError | None = None
    output: RequestOutput | None = None

    @property
    def result(self) -> RequestOutput:
        if self.output is not None:
            return self.output
        stats = RequestStats(arrival_time=time.monotonic())
        return RequestOutput(self.request_id, self.prompt, self.token_ids, [], stats, finished=True, error=self.error)


class LLM:
    """A model with an engine, for programs that want text from prompts.

    Args:
        model: a Hugging Face folder or id, a ``.gguf`` file, or a built-in name.
        use_cache: keep the converted copy of a GGUF file for the next load.
        progress: called with what is being loaded and the fraction of it that is done.
        **settings: fields of :class:`pilotfish.config.EngineConfig`, e.g. ``dtype="float32"``, ``threads=4``.

    Raises:
        ConfigError: a setting that is unknown or cannot work.
        CheckpointError: a model that cannot be found, read or run.
        BackendError: a backend that this machine cannot run.
    """

    def __init__(
        self,
        model: str = "smollm2-135m",
        *,
        use_cache: bool = True,
        progress: Callable[[str, float], None] | None = None,
        **settings: Unpack[EngineSettings],
    ) -> None:
        known = [field.name for field in fields(EngineConfig)]
        unknown = [name for name in settings if name not in known]
        if unknown:
            raise ConfigError(f"{unknown[0]}: is not a setting of LLM; settings are {', '.join(known)}")
        config = EngineConfig(**settings)
        self._attach(load_engine(model, config, use_cache=use_cache, progress=progress))

    @classmethod
    def from_engine(cls, engine: Engine) -> LLM:
        """An LLM over an engine that is already there."""
        llm = cls.__new__(cls)
        llm._attach(engine)
        return llm

    def _attach(self, engine: Engine) -> None:
        self.engine = engine
        self._counter = itertools.count()
        self._jobs: dict[str, _Job] = {}  # under way, by request id

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Complete prompts.

        Args:
            prompts: a text, a list of texts, or a list of lists of token ids. A flat list of token ids is one prompt.
            sampling_params: one for all prompts, or one for each. None: ``SamplingParams()``, which stops after 16
                tokens.
            use_tqdm: show a progress bar on stderr.

        Returns:
            One output a prompt, in order. A prompt *in a list* that cannot be served gets an output whose ``error`` is
            set, and the others are served.

        Raises:
            RequestError: the one prompt (not in a list) cannot be served, or ``sampling_params`` has a wrong length.
        """
        if _is_prompt(prompts):
            return self._run([self._job(prompts, sampling_params)], single=True, show_progress=use_tqdm)
        _check_list("prompts", prompts, "a string, or a list of strings or of lists of token ids")
        params = _params_list(sampling_params, len(prompts), "prompts")
        jobs = [self._job(prompt, p) for prompt, p in zip(prompts, params, strict=True)]
        return self._run(jobs, single=False, show_progress=use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answer conversations, each put through the model's chat template.

        Args:
            messages: one conversation (a list of ``{"role": ..., "content": ...}``), or a list of them.
            sampling_params: as in :meth:`generate`.
            use_tqdm: as in :meth:`generate`.

        Returns:
            One output a conversation, in order; errors as in :meth:`generate`.

        Raises:
            RequestError: the one conversation cannot be served, e.g. because the model has no chat template.
        """
        if _is_conversation(messages):
            return self._run([self._chat_job(messages, sampling_params)], single=True, show_progress=use_tqdm)
        _check_list("messages", messages, "a list of messages, or a list of such lists")
        params = _params_list(sampling_params, len(messages), "conversations")
        jobs = [self._chat_job(conversation, p) for conversation, p in zip(messages, params, strict=True)]
        return self._run(jobs, single=False, show_progress=use_tqdm)

    def stream(
        self, prompt: Prompt | Conversation, sampling_params: SamplingParams | None = None
    ) -> Generator[StreamPiece, None, None]:
        """Complete one prompt, or answer one conversation, and yield its output as it comes.

        The request starts with the first piece that is asked for. Closing the iterator, or dropping it, aborts the
        request. Other calls of this LLM may run between two pieces; they advance the stream too.

        Args:
            prompt: a text, token ids, or a conversation.
            sampling_params: None: ``SamplingParams()``.

        Raises:
            RequestError: the prompt cannot be served; when the first piece is asked for.
        """
        job = (
            self._chat_job(prompt, sampling_params) if _is_conversation(prompt) else self._job(prompt, sampling_params)
        )
        try:
            self._start(job)
            if job.error is not None:
                raise job.error
            sent: dict[int, tuple[int, int]] = {}  # characters and tokens of each completion that are yielded
            while True:
                finished = job.output is not None and job.output.finished
                yield from _new_pieces(job, sent)
                if finished:
                    return
                self._step()
        finally:
            self._drop(job)

    def _job(self, prompt: object, params: object) -> _Job:
        job = _Job(f"request-{next(self._counter)}", None, [], _checked_params(params))
        try:
            if isinstance(prompt, str):
                job.prompt = prompt
                job.token_ids = self.tokenizer.encode(prompt)
            elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
                job.token_ids = list(prompt)
            else:
                raise RequestError(f"prompt={prompt!r}: must be a string or a list of token ids", "prompt")
        except RequestError as error:
            job.error = error
        return job

    def _chat_job(self, conversation: object, params: object) -> _Job:
        job = _Job(f"request-{next(self._counter)}", None, [], _checked_params(params))
        try:
            job.token_ids = self.tokenizer.apply_chat_template(conversation)  # type: ignore[arg-type]  # it checks
            job.prompt = self.tokenizer.decode(job.token_ids, skip_special_tokens=False)
        except RequestError as error:
            job.error = error
        return job

    def _run(self, jobs: Sequence[_Job], *, single: bool, show_progress: bool) -> list[RequestOutput]:
        try:
            for job in jobs:
                self._start(job)
                if single and job.error is not None:
                    raise job.error
            with _ProgressBar(len(jobs), show_progress) as bar:
                while True:
                    unfinished = [job for job in jobs if job.request_id in self._jobs]
                    bar.update(jobs, num_finished=len(jobs) - len(unfinished))
                    if not unfinished:
                        return [job.result for job in jobs]
                    self._step()
        finally:
            for job in jobs:
                self._drop(job)

    def _start(self, job: _Job) -> None:
        if job.error is not None:
            return
        try:
            self.engine.add_request(job.request_id, job.token_ids, job.params, job.prompt)
        except RequestError as error:
            job.error = error
        else:
            self._jobs[job.request_id] = job

    def _step(self) -> None:
        for output in self.engine.step():
            job = self._jobs.get(output.request_id)
            if job is not None:
                job.output = output
                if output.finished:
                    del self._jobs[output.request_id]

    def _drop(self, job: _Job) -> None:
        """Abort the job if it is still under way: its caller is gone."""
        if self._jobs.pop(job.request_id, None) is not None:
            self.engine.abort(job.request_id)


class _ProgressBar:
    """Finished prompts and tokens per second, on stderr; nothing at all unless it is asked for."""

    def __init__(self, total: int, show: bool) -> None:
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._began = time.monotonic()
        if show:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            self._progress = Progress(
                TextColumn("prompts"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[speed]:.0f} tokens/s"),
                TimeElapsedColumn(),
                console=Console(stderr=True),
            )
            self._task = self._progress.add_task("prompts", total=total, speed=0.0)

    def __enter__(self) -> _ProgressBar:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def update(self, jobs: Sequence[_Job], num_finished: int) -> None:
        if self._progress is None or self._task is None:
            return
        outputs = [completion for job in jobs if job.output is not None for completion in job.output.outputs]
        num_tokens = sum(len(completion.token_ids) for completion in outputs)
        elapsed = max(time.monotonic() - self._began, 1e-9)
        self._progress.update(self._task, completed=num_finished, speed=num_tokens / elapsed)


def _new_pieces(job: _Job, sent: dict[int, tuple[int, int]]) -> Iterator[StreamPiece]:
    """What the job's completions have beyond ``sent``, which is brought up to date."""
    if job.output is None:
        return
    for completion in job.output.outputs:
        characters, tokens = sent.get(completion.index, (0, 0))
        text, token_ids = completion.text[characters:], completion.token_ids[tokens:]
        if text or token_ids:
            sent[completion.index] = (len(completion.text), len(completion.token_ids))
            yield StreamPiece(text, token_ids, completion.index, job.output)


def _is_prompt(prompts: object) -> bool:
    """A text, or a list of token ids that is not empty (an empty list is no prompts)."""
    if isinstance(prompts, str):
        return True
    return isinstance(prompts, Sequence) and len(prompts) > 0 and all(isinstance(item, int) for item in prompts)


def _is_conversation(messages: object) -> bool:
    """A list that begins with a message; a list of lists is a list of conversations."""
    return isinstance(messages, Sequence) and len(messages) > 0 and isinstance(messages[0], Mapping)


def _check_list(name: str, value: object, allowed: str) -> None:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise RequestError(f"{name}={value!r}: must be {allowed}", name)


def _checked_params(params: object) -> SamplingParams:
    if params is None:
        return SamplingParams()
    if isinstance(params, SamplingParams):
        return params
    raise RequestError(f"sampling_params={params!r}: must be a SamplingParams", "sampling_params")


def _params_list(params: object, count: int, what: str) -> list[object]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or isinstance(params, str):
        raise RequestError(f"sampling_params={params!r}: must be a SamplingParams or a list", "sampling_params")
    if len(params) != count:
        raise RequestError(
            f"sampling_params has {len(params)} entries for {count} {what}: give one for each, or one for all",
            "sampling_params",
        )
    return list(params)
