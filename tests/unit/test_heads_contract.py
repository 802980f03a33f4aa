"""Pilotfish's own head checkpoints: the contract, written and read back, and its check against a target."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from helpers import write_tiny_checkpoint
from pilotfish.errors import CheckpointError, ConfigError
from pilotfish.models import ModelConfig, build_model, expected_tensors
from pilotfish.models.checkpoint import Checkpoint, load_weights, resolve_model
from pilotfish.models.config import LinearRopeScaling, Llama3RopeScaling
from pilotfish.models.heads import (
    DraftHead,
    HeadConfig,
    TargetStamp,
    head_tensors,
    load_head,
    open_head,
    pack_lm_head,
    save_head,
    target_stamp,
)
from pilotfish.ops.reference import TorchOps
from plain_heads import DRAFT_VOCAB, VOCAB, head_config, head_shape, random_token_ids, random_weights

OPS = TorchOps(torch.float32)
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """A tiny target with a chat template."""
    folder = write_tiny_checkpoint("llama3", tmp_path / "target")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return resolve_model(str(folder), dtype="float32")


def load(folder: Path, checkpoint: Checkpoint, **options: Any) -> DraftHead:
    model = build_model(checkpoint.config, load_weights(checkpoint, expected_tensors(checkpoint.config)), OPS)
    return load_head(folder, checkpoint=checkpoint, model=model, ops=OPS, **options)


def save(folder: Path, checkpoint: Checkpoint, config: HeadConfig | None = None, **changes: Any) -> HeadConfig:
    """An MTP head over a draft vocabulary, made for the target but for ``changes`` in its stamp."""
    config = config or head_config("mtp", draft_vocab_size=DRAFT_VOCAB)
    config = replace(config, target=replace(target_stamp(checkpoint), **changes))
    ids = random_token_ids() if config.draft_vocab_size < VOCAB else None
    save_head(folder, config, random_weights(config), ids, torch.float32)
    return config


CONFIGS: dict[str, Callable[[], HeadConfig]] = {
    "mtp": lambda: head_config("mtp", "qwen3", num_modules=2, training={"steps": 7, "loss": [1.5, 0.5]}),
    "eagle": lambda: head_config("eagle", "qwen2", fc_bias=True, hidden_first=True, own_embedding=True),
    "eagle3": lambda: head_config("eagle3", aux_layers=(1, 3), fc_norm=True, draft_vocab_size=DRAFT_VOCAB),
    "eagle3-one-state": lambda: head_config("eagle3", recycles="pre_norm", norm_before_residual=True),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_head_comes_back_as_it_was_saved(name: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    config = save(tmp_path / "head", checkpoint, CONFIGS[name]())
    assert sorted(file.name for file in (tmp_path / "head").iterdir()) == ["config.json", "model.safetensors"]
    stored = open_head(tmp_path / "head", checkpoint)
    assert stored.config == config
    assert {key: tuple(tensor.shape) for key, tensor in stored.weights.items()} == head_tensors(config)
    assert all(torch.equal(tensor, stored.weights[key]) for key, tensor in random_weights(config).items())
    assert (stored.token_ids is not None) == (config.draft_vocab_size < VOCAB)
    head = load(tmp_path / "head", checkpoint)
    assert head.config == config


@pytest.mark.parametrize(
    "scaling",
    [
        LinearRopeScaling(factor=4.0),
        Llama3RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ],
)
def test_shapes_keep_their_rope(scaling: LinearRopeScaling | Llama3RopeScaling) -> None:
    shape = head_shape("qwen3", 3, rope_scaling=scaling, eos_token_ids=(5, 7), bos_token_id=0)
    assert ModelConfig.from_hf(json.loads(json.dumps(shape.to_hf())), "here") == shape


def test_files_are_bfloat16_and_small(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """What the target has is not stored: neither the embedding nor the rows of the output head."""
    config = head_config("mtp", draft_vocab_size=DRAFT_VOCAB)
    save_head(tmp_path / "head", config, random_weights(config), random_token_ids())
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    assert set(tensors) == {*head_tensors(config), "token_ids"}
    assert {tensor.dtype for name, tensor in tensors.items() if name != "token_ids"} == {torch.bfloat16}
    assert tensors["token_ids"].dtype == torch.int64


def test_save_replaces_a_head(checkpoint: Checkpoint, tmp_path: Path) -> None:
    save(tmp_path / "head", checkpoint, head_config("eagle"))
    config = save(tmp_path / "head", checkpoint, head_config("mtp"))
    assert open_head(tmp_path / "head", checkpoint).config == config


def test_save_refuses_other_tensors(tmp_path: Path) -> None:
    config = head_config("mtp", draft_vocab_size=DRAFT_VOCAB)
    weights, ids = random_weights(config), random_token_ids()
    wrong: list[dict[str, Tensor]] = [weights | {"more.weight": torch.ones(1)}, dict(list(weights.items())[1:])]
    for tensors in [*wrong, weights | {"modules.0.norm.weight": torch.ones(3)}]:
        with pytest.raises(ValueError, match="the config says"):
            save_head(tmp_path, config, tensors, ids)
    with pytest.raises(ValueError, match="token_ids must be given if it is a slice"):
        save_head(tmp_path, config, weights, None)
    assert not list(tmp_path.iterdir())


class TestStamp:
    def test_fields(self, checkpoint: Checkpoint) -> None:
        stamp = target_stamp(checkpoint)
        embedding = checkpoint.tensors()["model.embed_tokens.weight"].to(torch.bfloat16)
        assert stamp == TargetStamp(
            name="target",
            hidden_size=48,
            num_layers=3,
            vocab_size=VOCAB,
            embedding_sha256=hashlib.sha256(embedding.view(torch.uint8).numpy().tobytes()).hexdigest(),
            chat_template_sha256=hashlib.sha256(TEMPLATE.encode()).hexdigest(),
        )

    def test_the_hash_does_not_depend_on_the_stored_dtype(self, checkpoint: Checkpoint, tmp_path: Path) -> None:
        other = tmp_path / "bfloat16"
        other.mkdir()
        (other / "config.json").write_text((checkpoint.path / "config.json").read_text())
        tensors = {name: tensor.to(torch.bfloat16) for name, tensor in checkpoint.tensors().items()}
        save_file(tensors, other / "model.safetensors")
        assert target_stamp(resolve_model(str(other))).embedding_sha256 == target_stamp(checkpoint).embedding_sha256

    @pytest.mark.parametrize(
        ("files", "expected"),
        [
            ({}, None),
            ({"tokenizer_config.json": {"chat_template": TEMPLATE}}, TEMPLATE),
            ({"tokenizer_config.json": {"eos_token": "x"}}, None),
            (
                {
                    "tokenizer_config.json": {
                        "chat_template": [
                            {"name": "tool_use", "template": "other"},
                            {"name": "default", "template": TEMPLATE},
                        ]
                    }
                },
                TEMPLATE,
            ),
            ({"chat_template.json": {"chat_template": TEMPLATE}}, TEMPLATE),
        ],
    )
    def test_where_chat_templates_are(
        self, files: Mapping[str, Any], expected: str | None, checkpoint: Checkpoint
    ) -> None:
        (checkpoint.path / "chat_template.jinja").unlink()
        for name, content in files.items():
            (checkpoint.path / name).write_text(json.dumps(content))
        digest = None if expected is None else hashlib.sha256(expected.encode()).hexdigest()
        assert target_stamp(checkpoint).chat_template_sha256 == digest

    def test_a_name_is_a_name_and_no_path(self, checkpoint: Checkpoint) -> None:
        assert target_stamp(replace(checkpoint, name="smollm2-135m")).name == "smollm2-135m"
        assert target_stamp(replace(checkpoint, name="Qwen/Qwen3-0.6B")).name == "Qwen/Qwen3-0.6B"


class TestMismatch:
    @pytest.mark.parametrize("field", ["hidden_size", "num_layers", "vocab_size"])
    def test_sizes(self, field: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
        save(tmp_path / "head", checkpoint, **{field: 12345})
        got = getattr(target_stamp(checkpoint), field)
        for allow_mismatch in (False, True):
            with pytest.raises(CheckpointError, match=rf"target\.{field}=12345, but \S*target has {got}"):
                load(tmp_path / "head", checkpoint, allow_mismatch=allow_mismatch)

    def test_the_heads_own_sizes(self, checkpoint: Checkpoint, tmp_path: Path) -> None:
        config = head_config("mtp")
        shape = replace(config.shape, vocab_size=300)
        save(tmp_path / "head", checkpoint, replace(config, shape=shape, draft_vocab_size=300))
        with pytest.raises(CheckpointError, match=r"with vocab_size=300, but \S*target has 199"):
            load(tmp_path / "head", checkpoint)

    @pytest.mark.parametrize("field", ["embedding_sha256", "chat_template_sha256"])
    def test_hashes(self, field: str, checkpoint: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        save(tmp_path / "head", checkpoint, **{field: "00ff"})
        message = rf"target\.{field}=00ff, but \S*target has {getattr(target_stamp(checkpoint), field)}"
        with pytest.raises(CheckpointError, match=message + ".*--allow-mismatch"):
            load(tmp_path / "head", checkpoint)
        with caplog.at_level(logging.WARNING, "pilotfish"):
            load(tmp_path / "head", checkpoint, allow_mismatch=True)
        (record,) = caplog.records
        assert f"target.{field}=00ff" in record.getMessage()

    def test_a_target_without_the_template_that_the_head_learnt(self, checkpoint: Checkpoint, tmp_path: Path) -> None:
        save(tmp_path / "head", checkpoint)
        (checkpoint.path / "chat_template.jinja").unlink()
        with pytest.raises(CheckpointError, match=r"chat_template_sha256=\w{64}, but \S*target has None"):
            load(tmp_path / "head", checkpoint)

    def test_names_count_only_without_a_hash(
        self, checkpoint: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        save(tmp_path / "head", checkpoint, name="another")
        load(tmp_path / "head", checkpoint)
        save(tmp_path / "head", checkpoint, name="another", embedding_sha256=None)
        with pytest.raises(CheckpointError, match=r"target\.name=another, but \S*target has target"):
            load(tmp_path / "head", checkpoint)
        with caplog.at_level(logging.WARNING, "pilotfish"):
            load(tmp_path / "head", checkpoint, allow_mismatch=True)
        assert len(caplog.records) == 1

    def test_a_fitting_head_warns_of_nothing(
        self, checkpoint: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        save(tmp_path / "head", checkpoint)
        with caplog.at_level(logging.WARNING, "pilotfish"):
            load(tmp_path / "head", checkpoint, allow_mismatch=True)
        assert not caplog.records


class TestConfigFile:
    def test_everything_that_a_head_computes_must_be_said(self, checkpoint: Checkpoint, tmp_path: Path) -> None:
        save(tmp_path / "head", checkpoint)
        file = tmp_path / "head" / "config.json"
        whole = json.loads(file.read_text())
        names = [field.name for field in fields(HeadConfig) if field.name != "training"]
        assert {*names, "training", "format", "version"} == set(whole)
        for name in names:
            file.write_text(json.dumps({key: value for key, value in whole.items() if key != name}))
            with pytest.raises(CheckpointError, match=f"config.json: key '{name}' is missing"):
                load(tmp_path / "head", checkpoint)
        file.write_text(json.dumps({key: value for key, value in whole.items() if key != "training"}))
        assert load(tmp_path / "head", checkpoint).config.training == {}

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"version": 2}, "version=2: this Pilotfish reads version 1"),
            ({"colour": "red"}, "unknown key 'colour'; known are kind, shape"),
            ({"kind": None}, "key 'kind' is missing"),
            ({"kind": "medusa"}, "kind='medusa': must be one of mtp, eagle, eagle3"),
            ({"recycles": "both"}, "recycles='both': must be one of post_norm, pre_norm"),
            ({"first_row": 1}, "first_row=1: must be bool"),
            ({"target_hidden_size": "48"}, "target_hidden_size='48': must be int"),
            ({"draft_vocab_size": True}, "draft_vocab_size=True: must be int"),
            ({"draft_vocab_size": 200}, "draft_vocab_size=200: must be from 1 to the target's 199"),
            ({"aux_layers": "all"}, "aux_layers='all': must be tuple"),
            ({"aux_layers": [1, "2"]}, r"aux_layers=\[1, '2'\]: must be a list of layer ids"),
            ({"aux_layers": [1]}, r"aux_layers=\(1,\) is for heads of kind eagle3, and kind='mtp'"),
            ({"target": {"name": "x"}}, "target: key 'hidden_size' is missing"),
            ({"target": 3}, "target=3: must be an object"),
            ({"shape": []}, r"shape=\[\]: must be an object"),
            ({"shape": {"architectures": ["LlamaForCausalLM"]}}, "hidden_size=None: must be an integer"),
            ({"training": 1}, "training=1: must be an object"),
        ],
    )
    def test_what_is_refused(
        self, changes: dict[str, Any], message: str, checkpoint: Checkpoint, tmp_path: Path
    ) -> None:
        save(tmp_path / "head", checkpoint)
        file = tmp_path / "head" / "config.json"
        content = {name: value for name, value in (json.loads(file.read_text()) | changes).items() if value is not None}
        file.write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=message):
            open_head(tmp_path / "head", checkpoint)

    @pytest.mark.parametrize(
        ("kind", "changes", "message"),
        [
            ("eagle", {"recycles": "pre_norm"}, "recycles='pre_norm': a head of kind eagle has no final norm"),
            ("eagle", {"fc_norm": True}, "fc_norm=True is for heads of kind eagle3, and kind='eagle'"),
            ("mtp", {"fc_bias": True}, "fc_bias=True is for heads of kind eagle, and kind='mtp'"),
            ("mtp", {"target_hidden_size": 56}, r"target_hidden_size=56 and shape\.hidden_size=48: must be equal"),
            ("eagle3", {"fc_norm": True}, "fc_norm=True needs aux_layers"),
            ("eagle3", {"aux_layers": (0, 1)}, r"aux_layers=\[0, 1\]: must be different layer ids of at least 1"),
            ("eagle3", {"num_modules": 2}, r"shape\.num_layers=2: a head of kind eagle3 has one layer"),
        ],
    )
    def test_combinations_that_cannot_be(self, kind: str, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            head_config(kind, **changes)

    def test_token_ids_that_the_config_does_not_promise(self, checkpoint: Checkpoint, tmp_path: Path) -> None:
        config = save(tmp_path / "head", checkpoint)
        tensors = load_file(tmp_path / "head" / "model.safetensors")
        save_file({k: t for k, t in tensors.items() if k != "token_ids"}, tmp_path / "head" / "model.safetensors")
        with pytest.raises(CheckpointError, match="draft_vocab_size=64 of 199 tokens, but no list says which"):
            open_head(tmp_path / "head", checkpoint)
        save_head(tmp_path / "head", config, random_weights(config), random_token_ids() + 100)
        with pytest.raises(CheckpointError, match="must be 64 ascending ids from 0 to 198"):
            open_head(tmp_path / "head", checkpoint)


def test_pack_lm_head_takes_the_rows(tiny_checkpoints: Mapping[str, Path]) -> None:
    for kind, name in (("llama3", "model.embed_tokens.weight"), ("llama3-untied", "lm_head.weight")):
        checkpoint = resolve_model(str(tiny_checkpoints[kind]), dtype="float32")
        weight, ids = checkpoint.tensors()[name], random_token_ids()
        assert torch.equal(pack_lm_head(checkpoint.tensors(), checkpoint.config, OPS, ids).data, weight[ids])
        assert torch.equal(pack_lm_head(checkpoint.tensors(), checkpoint.config, OPS, None).data, weight)
