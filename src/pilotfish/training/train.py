"""The training loop: batches, steps, log, validation, checkpoints, and the head that comes out."""

from __future__ import annotations

import ctypes
import json
import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pilotfish.errors import CheckpointError, ConfigError
from pilotfish.models.checkpoint import Checkpoint
from pilotfish.training.data import Batch, make_batch, plan_batches, split_validation
from pilotfish.training.distributed import World
from pilotfish.training.evaluate import Accuracy
from pilotfish.training.loss import StepLoss
from pilotfish.training.options import TrainOptions
from pilotfish.training.setup import prepare, usable_samples
from pilotfish.training.state import (
    LOG_FILE,
    Progress,
    check_out,
    cut_log,
    forget_run,
    load_state,
    save_state,
)
from pilotfish.training.store import CaptureReader, Sample
from pilotfish.training.validate import choose_samples

__all__ = ["Report", "TrainResult", "train"]

logger = logging.getLogger(__name__)

_VALIDATION_STEPS = 5
"""Drafts in a row that validation looks at, or as many as are trained if that is more."""

_TRIM_STEPS = 8
"""Steps between two :func:`_trim_heap`. It costs a twentieth of a step, and memory grows fast between two."""


@dataclass(frozen=True, slots=True)
class Report:
    """What is told after each step.

    Attributes:
        step: steps done, of ``num_steps``.
        num_steps: of the whole run.
        epoch: from 0.
        loss: of this step, over all processes.
        accuracy: share of each draft's rows that have the target's most likely token, among the draft vocabulary.
        tokens_per_s: captured tokens, prompts included, since the last report; of all processes.
        validation: what the engine's code just measured on held-out samples, or None.
    """

    step: int
    num_steps: int
    epoch: int
    loss: float
    accuracy: list[float]
    tokens_per_s: float
    validation: Accuracy | None


@dataclass(frozen=True, slots=True)
class TrainResult:
    """How a run ended.

    Attributes:
        step: steps done.
        num_steps: of the whole run.
        validation: the last, or None where there was none since this process started or resumed it. Process 0's.
    """

    step: int
    num_steps: int
    validation: Accuracy | None

    @property
    def complete(self) -> bool:
        return self.step == self.num_steps


def train(
    checkpoint: Checkpoint,
    reader: CaptureReader,
    options: TrainOptions,
    out: Path,
    *,
    world: World | None = None,
    resume: bool = False,
    overwrite: bool = False,
    save_every_s: float = 300.0,
    validate_every: int | None = None,
    report: Callable[[Report], None] = lambda report: None,
) -> TrainResult:
    """Train a head and write it to ``out`` (``config.json``, ``model.safetensors``), beside the run's log and state.

    Ctrl-C ends the run after the step it is in, with everything saved. Under ``torchrun`` every process calls this.

    Args:
        checkpoint: the target.
        reader: text captured from it.
        options: of the run.
        out: folder; made if it is not there.
        world: this process among those that train together (:meth:`World.join`); None: it is alone.
        resume: go on from the state in ``out``, which must be of the same options and data.
        overwrite: replace the run that ``out`` holds. Its head stays until the first save.
        save_every_s: seconds between two saves.
        validate_every: steps between two validations; None: at the end of each epoch. There is one at the run's end.
            Each runs the engine's code on a bounded part of the held-out samples, in process 0.
        report: called after each step, in process 0.

    Raises:
        ConfigError: options that do not fit the target, the data or what is resumed, or an ``out`` that holds a run
            and neither ``resume`` nor ``overwrite``.
        CheckpointError: the capture or the saved state cannot be used: names the file, or the sample whose states are
            not finite.
    """
    world = world or World()
    check_out(out, resume=resume, overwrite=overwrite)
    if world.rank == 0:
        _warn_of_incomplete(reader)
    run = _Run(checkpoint, reader, options, out, world, report)
    if resume:
        run.load()
    elif world.rank == 0:
        forget_run(out)
    if run.progress.step < run.num_steps:
        with _stop_signal() as stop:
            run.loop(stop, save_every_s, validate_every)
    else:
        run.validate()  # nothing is left to do, but perhaps this: training is saved before it is validated
    run.save()
    if world.size > 1:
        # Nobody leaves before process 0 has written everything: one that fails on leaving would have it killed. And it
        # does fail where gloo's threads, which outlive the group, still hold a tensor when Python ends.
        dist.barrier()
    return TrainResult(run.progress.step, run.num_steps, run.validation)


def _warn_of_incomplete(reader: CaptureReader) -> None:
    for folder, manifest in zip(reader.folders, reader.manifests, strict=True):
        if not manifest.complete:
            whole = "" if manifest.num_prompts is None else f" of {manifest.num_prompts}"
            logger.warning(
                "The capture in %s is incomplete: %d%s samples. Training uses these; pilotfish capture, with the "
                "options that it was begun with, goes on with it.",
                folder,
                manifest.num_samples,
                whole,
            )


@contextmanager
def _stop_signal() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed. A second one interrupts at once."""
    stopped: list[bool] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def stop(*_: object) -> None:
        stopped.append(True)
        signal.signal(signal.SIGINT, previous)

    previous = signal.signal(signal.SIGINT, stop)
    try:
        yield lambda: bool(stopped)
    finally:
        signal.signal(signal.SIGINT, previous)


class _Run:
    """A run's parts and its state."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        reader: CaptureReader,
        options: TrainOptions,
        out: Path,
        world: World,
        report: Callable[[Report], None],
    ) -> None:
        self.options, self.out, self.world, self.report = options, out, world, report
        self.reader = reader
        usable = usable_samples(reader)
        train_on, held_out = split_validation(len(usable), options.validation, options.seed)
        self.samples, self.held_out = usable[train_on], usable[held_out]
        if not len(self.samples):
            raise ConfigError(f"validation={options.validation}: leaves none of {len(usable)} samples to train on")
        self.student = prepare(checkpoint, reader, options)
        self.parameters = list(self.student.parameters.values())
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in self.parameters if p.ndim > 1], "weight_decay": options.weight_decay},
                {"params": [p for p in self.parameters if p.ndim <= 1], "weight_decay": 0.0},
            ],
            lr=options.learning_rate,
            betas=(0.9, 0.95),
            fused=True,
        )
        lengths = [len(world.share(self._plan(epoch))) for epoch in range(options.epochs)]
        if not all(lengths):
            raise ConfigError(
                f"batch_tokens={options.batch_tokens}: an epoch has fewer batches than there are processes "
                f"({world.size})"
            )
        self.num_steps = min(sum(lengths), options.max_steps or sum(lengths))
        self.progress = Progress()
        self.validate_on = choose_samples(reader, self.held_out)
        self.validation: Accuracy | None = None
        self._validated: dict[str, Any] = {}
        world.equalise(p.data for p in self.parameters)
        out.mkdir(parents=True, exist_ok=True)

    def _plan(self, epoch: int) -> list[list[int]]:
        return plan_batches(
            self.samples, self.reader.lengths, self.options.batch_tokens, seed=self.options.seed, epoch=epoch
        )

    def loop(self, stop: Callable[[], bool], save_every_s: float, validate_every: int | None) -> None:
        """Go on to the end, or until ``stop``."""
        state = self.progress
        saved = last = time.monotonic()
        while state.step < self.num_steps:
            batches = self.world.share(self._plan(state.epoch))
            for indices in batches[state.batch :]:
                stopping = self._step(indices, stop())
                state.batch += 1
                if state.step % _TRIM_STEPS == 0:
                    _trim_heap()
                epoch_ends = state.batch == len(batches)
                ends = state.step == self.num_steps
                self._log_step(time.monotonic() - last)
                due = ends or (epoch_ends if validate_every is None else state.step % validate_every == 0)
                if due or time.monotonic() - saved > save_every_s:
                    self.save()
                    saved = time.monotonic()
                self._report(self.validate() if due else None)
                last = time.monotonic()
                if stopping or ends:
                    return
            state.epoch, state.batch = state.epoch + 1, 0

    def _step(self, indices: list[int], stop: bool) -> bool:
        """One optimizer step. True if any process wants to stop."""
        options, state = self.options, self.progress
        rate = _learning_rate(state.step, self.num_steps, options)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        batch = self._batch(indices)
        total, losses = self.student.teach(batch)
        total.backward()
        stopping = self.world.average_gradients(self.parameters, stop)
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, options.clip))
        if not math.isfinite(norm):
            self._check_states(indices)
            raise ConfigError(
                f"learning_rate={options.learning_rate}: training diverged at step {state.step} (gradient norm {norm})"
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        state.step += 1
        self._record(batch, float(total.detach()), losses, rate, norm)
        return stopping

    def _batch(self, indices: list[int]) -> Batch:
        samples = [self.reader[index] for index in indices]
        student = self.student
        if not student.use_aux:
            samples = [replace(sample, aux=None) for sample in samples]
        return make_batch(samples, steps=student.steps, first_row=student.first_row, dtype=student.dtype)

    def _check_states(self, indices: list[int]) -> None:
        """See that it was not the capture which made a gradient infinite.

        Raises:
            CheckpointError: a sample of the step has states that are not finite; with several processes, of any of
                theirs: the one that has it names it.
        """
        bad = next((i for i in indices if not _is_finite(self.reader[i], self.student.use_aux)), None)
        if self.world.sums([bad is not None])[0] == 0:
            return
        if bad is None:
            raise CheckpointError("data: another process has read states that are not finite, and says where")
        raise CheckpointError(
            f"{self.reader.place(bad)} has hidden states that are not finite numbers (NaN or inf): capture "
            "this text again, or leave it out"
        )

    def _record(self, batch: Batch, total: float, losses: list[StepLoss], rate: float, norm: float) -> None:
        """Sum up a step over the processes, and log it."""
        values = [total, batch.num_tokens, len(batch.rows)]
        for loss in losses:
            values += [loss.num_correct, loss.num_rows, loss.divergence, loss.distance]
        total, tokens, supervised, *steps = self.world.sums(values)
        size = self.world.size
        self.progress.tokens += int(tokens)
        self.progress.supervised += int(supervised)
        self._entry: dict[str, Any] = {
            "step": self.progress.step,
            "epoch": self.progress.epoch,
            "loss": total / size,
            "learning_rate": rate,
            "gradient_norm": norm,
            "tokens": int(tokens),
            "supervised": int(supervised),
            "accuracy": [c / max(n, 1) for c, n in zip(steps[0::4], steps[1::4], strict=True)],
            "divergence": [d / size for d in steps[2::4]],
            "distance": [d / size for d in steps[3::4]],
        }

    def _log_step(self, seconds: float) -> None:
        self.progress.seconds += seconds
        entry = self._entry
        entry["tokens_per_s"] = entry["tokens"] / max(seconds, 1e-9)
        entry["seconds"] = self.progress.seconds
        self._log(entry)

    def _report(self, validation: Accuracy | None) -> None:
        entry = self._entry
        if self.world.rank == 0:
            self.report(
                Report(
                    self.progress.step,
                    self.num_steps,
                    self.progress.epoch,
                    entry["loss"],
                    entry["accuracy"],
                    entry["tokens_per_s"],
                    validation,
                )
            )

    def validate(self) -> Accuracy | None:
        """In process 0; the others wait for it in the next step."""
        if not self.validate_on or self.world.rank != 0:
            return None
        start = time.monotonic()
        steps = max(self.student.steps, _VALIDATION_STEPS)
        self.validation = accuracy = self.student.evaluate(self.reader, self.validate_on, steps)
        entry = {"num_samples": len(self.validate_on), **accuracy.as_dict()}
        self._log({"step": self.progress.step, "validation": {**entry, "seconds": time.monotonic() - start}})
        self._validated = {"step": self.progress.step, **entry}
        return accuracy

    def _log(self, entry: dict[str, Any]) -> None:
        if self.world.rank == 0:
            with (self.out / LOG_FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")

    def save(self) -> None:
        """What was trained, and the state to go on from."""
        if self.world.rank == 0:
            self.student.save(self.out, self._summary())
            save_state(self.out, self._identity(), self.progress, self.student.parameters, self.optimizer)

    def load(self) -> None:
        """Go on from the saved state."""
        self.progress = load_state(self.out, self._identity(), self.student.parameters, self.optimizer)
        if self.world.rank == 0:
            cut_log(self.out / LOG_FILE, self.progress.step)

    def _identity(self) -> dict[str, Any]:
        """What decides the run's numbers."""
        lengths = self.reader.lengths[self.samples]
        data = [len(self.samples), int(lengths.sum()), int((self.samples * lengths).sum())]
        return {**asdict(self.options), "processes": self.world.size, "data": data}

    def _summary(self) -> dict[str, Any]:
        state, manifests = self.progress, self.reader.manifests
        summary: dict[str, Any] = {
            "options": asdict(self.options),
            "steps": state.step,
            "num_steps": self.num_steps,
            "processes": self.world.size,
            "seconds": round(state.seconds, 1),
            "tokens_seen": state.tokens,
            "supervised_seen": state.supervised,
            "num_samples": len(self.samples),
            "num_tokens": int(self.reader.lengths[self.samples].sum()),
            "num_supervised": int(self.reader.num_supervised[self.samples].sum()),
            "data": [dict(manifest.data) for manifest in manifests],
            "sampling": [dict(manifest.sampling) for manifest in manifests],
        }
        if self._validated:
            summary["validation"] = self._validated
        return summary


def _trim_heap() -> None:
    """Give freed memory back to the system, where the C library can (glibc).

    No two batches are of the same size, so a step's tensors leave holes that the next one's do not fit: without this a
    process grows to three times what a step needs.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _is_finite(sample: Sample, use_aux: bool) -> bool:
    """Whether all states that a head is taught from are finite."""
    states = [sample.hidden] if sample.aux is None or not use_aux else [sample.hidden, sample.aux]
    return all(bool(state.isfinite().all()) for state in states)


def _learning_rate(step: int, num_steps: int, options: TrainOptions) -> float:
    """Linear warm-up, then half a cosine down to 0 at the run's end."""
    warmup = max(1, round(num_steps * options.warmup))
    if step < warmup:
        return options.learning_rate * (step + 1) / warmup
    return options.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(num_steps - warmup, 1)))
