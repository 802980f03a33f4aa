"""A draft LLM of the target's first layers, trained to say at once what the target says after all of them.

It is an ordinary model: it starts as those layers with the target's final norm and output head, learns the target's
distribution at the captured positions, and is saved as a Hugging Face folder. Embedding and output head stay the
target's.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from pilotfish.errors import ConfigError
from pilotfish.models import Model, ModelConfig, build_model, expected_tensors, kv_shape
from pilotfish.models.checkpoint import Checkpoint, load_weights
from pilotfish.models.draft_vocab import DRAFT_VOCAB_FILE, write_draft_vocab
from pilotfish.training.attention import ChainAttention
from pilotfish.training.chain import LossMean, row_weights
from pilotfish.training.data import Batch
from pilotfish.training.evaluate import Accuracy
from pilotfish.training.loss import Distillation, StepLoss, Teacher
from pilotfish.training.ops import TrainOps
from pilotfish.training.store import CaptureReader
from pilotfish.training.validate import engine_ops, model_accuracy

__all__ = ["DraftStudent", "draft_student"]

_FROZEN = ("model.embed_tokens.weight", "lm_head.weight")
_SUMMARY = "training.json"
_WEIGHT_FILES = (".safetensors", ".bin", ".index.json")


@dataclass(slots=True)
class DraftStudent:
    """The draft.

    Attributes:
        config: the target's with fewer layers.
        source: the target's folder, whose other files are the draft's too.
        ops: differentiable.
        frozen: embedding and output head by name, in the ops' dtype.
        lm_head: [D, H], rows of the output head that it drafts with.
        token_ids: int64 [D], which; None: all.
        distillation: the loss of a row.
        mean: over what rows' losses are averaged.
        max_model_len: of the longest sample.
    """

    config: ModelConfig
    source: Path
    ops: TrainOps
    frozen: dict[str, Tensor]
    lm_head: Tensor
    token_ids: Tensor | None
    distillation: Distillation
    mean: LossMean
    max_model_len: int
    parameters: dict[str, Tensor]
    dtype: torch.dtype
    steps: int = 1
    first_row: bool = True
    use_aux: bool = False

    def teach(self, batch: Batch) -> tuple[Tensor, list[StepLoss]]:
        teacher = Teacher.of(batch.taught, self.lm_head, keep_probs=self.distillation.kind == "lk")
        step = batch.steps[0]
        weights = row_weights(step, batch.num_samples, self.mean)
        loss = self.distillation(self._outputs(batch), self.lm_head, teacher, step.teachers, weights)
        return loss.loss, [loss]

    def evaluate(self, reader: CaptureReader, indices: Iterable[int], num_steps: int) -> Accuracy:
        """On captured text. What the engine accepts while it drafts with it: ``pilotfish bench --scheme draft``."""
        ops = engine_ops(self.dtype)
        model = build_model(self.config, self._saved(), ops, self.max_model_len)
        if self.token_ids is not None:
            model = model.with_lm_head(ops.pack_linear(self.lm_head.to(ops.dtype)))
        return model_accuracy(model, ops, reader, indices, num_steps, self.token_ids)

    def _saved(self) -> dict[str, Tensor]:
        tensors = {**self.parameters, **self.frozen}
        return {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}

    def _outputs(self, batch: Batch) -> Tensor:
        """States of the rows that are taught: [R, H]."""
        attention = ChainAttention(kv_shape(self.config, page_size=1, dtype=self.dtype))
        model: Model = build_model(self.config, {**self.parameters, **self.frozen}, self.ops, self.max_model_len)
        return model.forward(batch.text, attention.plan(batch.text)).index_select(0, batch.rows)

    def save(self, out: Path, training: Mapping[str, Any]) -> None:
        """A folder as transformers writes it, in bfloat16, and the summary beside it."""
        out.mkdir(parents=True, exist_ok=True)
        for file in self.source.iterdir():
            if file.is_file() and not file.name.endswith(_WEIGHT_FILES) and file.name != "config.json":
                shutil.copyfile(file, out / file.name)
        config = json.loads((self.source / "config.json").read_text(encoding="utf-8"))
        config["num_hidden_layers"] = self.config.num_layers
        if config.get("layer_types"):
            config["layer_types"] = config["layer_types"][: self.config.num_layers]
        scratch = out / ".writing"
        scratch.write_bytes(save(self._saved(), metadata={"format": "pt"}))
        os.replace(scratch, out / "model.safetensors")
        config["dtype" if "dtype" in config else "torch_dtype"] = "bfloat16"
        if self.token_ids is None:
            (out / DRAFT_VOCAB_FILE).unlink(missing_ok=True)
        else:
            write_draft_vocab(out, self.token_ids.tolist())
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (out / _SUMMARY).write_text(json.dumps(dict(training), indent=2) + "\n", encoding="utf-8")


def draft_student(
    checkpoint: Checkpoint,
    num_layers: int,
    token_ids: Tensor | None,
    ops: TrainOps,
    distillation: Distillation,
    mean: LossMean,
    max_model_len: int,
) -> DraftStudent:
    """The target's first ``num_layers`` layers, to be trained.

    Raises:
        ConfigError: the target has not so many layers.
    """
    target = checkpoint.config
    if not 1 <= num_layers < target.num_layers:
        raise ConfigError(f"layers={num_layers}: must be from 1 to {target.num_layers - 1}, below the target's layers")
    config = replace(target, num_layers=num_layers)
    # Read as the target is, of which these are a part.
    weights = load_weights(checkpoint, expected_tensors(target))
    wanted = expected_tensors(config)
    frozen = {name: weights[name].to(ops.dtype) for name in _FROZEN if name in wanted}
    lm_head = frozen[_FROZEN[0] if target.tie_word_embeddings else _FROZEN[1]]
    return DraftStudent(
        config=config,
        source=checkpoint.path,
        ops=ops,
        frozen=frozen,
        lm_head=lm_head if token_ids is None else lm_head[token_ids],
        token_ids=token_ids,
        distillation=distillation,
        mean=mean,
        max_model_len=max_model_len,
        parameters={
            name: weights[name].detach().float().clone().requires_grad_() for name in wanted if name not in _FROZEN
        },
        dtype=ops.dtype,
    )
