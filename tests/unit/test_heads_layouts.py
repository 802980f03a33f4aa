"""Head checkpoints in every layout, written here as small files: what is read, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import make_batch
from pilotfish.errors import CheckpointError, UnsupportedModelError
from pilotfish.models import Model, build_model, expected_tensors
from pilotfish.models.checkpoint import Checkpoint, load_weights, resolve_model
from pilotfish.models.heads import AuxConvention, DraftHead, HeadConfig, load_head, open_head
from pilotfish.models.heads.layouts import default_aux_layers
from pilotfish.ops.reference import TorchOps
from plain_heads import (
    DRAFT_VOCAB,
    HIDDEN,
    VOCAB,
    deepseek_tensors,
    eagle3_tensors,
    eagle_tensors,
    head_attention,
    head_config,
    make_head,
    mimo_tensors,
    random_table,
    random_token_ids,
    random_weights,
    vocabulary_tensors,
    write_files,
)

OPS = TorchOps(torch.float32)
NUM_LAYERS = 3  # of the tiny targets

LAYER: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "rope_theta": 500.0,
    "max_position_embeddings": 32,  # of the training's texts: shorter than the target's context
    "torch_dtype": "float32",
}


@dataclass(frozen=True)
class Target:
    checkpoint: Checkpoint
    model: Model

    @property
    def embedding(self) -> Tensor:
        return self.checkpoint.tensors()["model.embed_tokens.weight"]

    @property
    def lm_head(self) -> Tensor:
        tied = self.checkpoint.config.tie_word_embeddings
        return self.embedding if tied else self.checkpoint.tensors()["lm_head.weight"]

    def load(self, folder: Path, **options: Any) -> DraftHead:
        return load_head(folder, checkpoint=self.checkpoint, model=self.model, ops=OPS, **options)


def open_target(folder: Path) -> Target:
    checkpoint = resolve_model(str(folder), dtype="float32")
    weights = load_weights(checkpoint, expected_tensors(checkpoint.config))
    return Target(checkpoint, build_model(checkpoint.config, weights, OPS))


@pytest.fixture(scope="module", params=["llama3", "llama3-untied"])
def target(request: pytest.FixtureRequest, tiny_checkpoints: Mapping[str, Path]) -> Target:
    return open_target(tiny_checkpoints[request.param])


@pytest.fixture(scope="module")
def tied(tiny_checkpoints: Mapping[str, Path]) -> Target:
    return open_target(tiny_checkpoints["llama3"])


def outputs(head: DraftHead) -> list[Tensor]:
    """Fused features, logits and recycled states of each module over some rows."""
    config, generator = head.config, torch.Generator().manual_seed(9)
    tokens = torch.randint(VOCAB, (20,), generator=generator).tolist()
    states = head.fuse(torch.randn(20, config.feature_size, generator=generator))
    attention = head_attention(OPS, config, 4)
    batch = make_batch([tokens], [[2, 1, 3]], 16, [0 if config.first_row else 1])
    results = [states]
    for module in range(config.num_modules):
        out, recycled = head.forward(batch, states, attention.plan(batch), module)
        results += [head.logits(out, module), recycled]
    return results


def assert_same(loaded: DraftHead, config: HeadConfig, weights: Mapping[str, Tensor], target: Target) -> None:
    """The loaded head computes what one built from the same parts does."""
    ids = loaded.token_ids
    rows = target.lm_head if ids is None else target.lm_head[ids]
    built = make_head(config, weights, OPS, target.embedding)
    built._lm_head = OPS.pack_linear(weights.get("lm_head.weight", rows))  # type: ignore[attr-defined]
    for actual, expected in zip(outputs(loaded), outputs(built), strict=True):
        assert torch.equal(actual, expected)


def assert_contract(loaded: HeadConfig, **expected: Any) -> None:
    assert {name: getattr(loaded, name) for name in expected} == expected


class TestEagle:
    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
    def test_loads(self, architecture: str, bias: bool, target: Target, tmp_path: Path) -> None:
        config = head_config("eagle", architecture, fc_bias=bias)
        weights = random_weights(config)
        name = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLMEagle", "qwen3": "EagleQwen3ForCausalLM"}
        written = LAYER | {"architectures": [name[architecture]], "head_dim": config.shape.head_dim}
        # SafeAILab's own files have no "bias" where it is there, and a copy of the target's embedding.
        written |= {} if bias else {"bias": False}
        write_files(tmp_path, written, eagle_tensors(weights) | {"embed_tokens.weight": target.embedding})
        head = target.load(tmp_path)
        assert_contract(head.config, kind="eagle", fc_bias=bias, first_row=False, hidden_first=False)
        assert_contract(head.config, recycles="post_norm", own_embedding=False, own_lm_head=False, aux_layers=())
        assert head.config.shape.architecture == architecture
        assert_same(head, config, weights, target)

    def test_positions_go_as_far_as_the_target(self, tied: Target, tmp_path: Path) -> None:
        weights = random_weights(head_config("eagle"))
        write_files(tmp_path, LAYER | {"architectures": ["LlamaForCausalLM"]}, eagle_tensors(weights))
        assert tied.load(tmp_path).rope.cos.shape[0] == 256
        assert tied.load(tmp_path, max_model_len=100).rope.cos.shape[0] == 100

    def test_an_embedding_of_its_own_is_used(self, tied: Target, tmp_path: Path) -> None:
        config = head_config("eagle", own_embedding=True, own_lm_head=True)
        weights = random_weights(config)
        write_files(tmp_path, LAYER | {"architectures": ["LlamaForCausalLM"]}, eagle_tensors(weights))
        head = tied.load(tmp_path)
        assert head.config.own_embedding and head.config.own_lm_head
        assert_same(head, config, weights, tied)

    def test_norms_that_the_layout_does_not_have_are_refused(self, tied: Target, tmp_path: Path) -> None:
        tensors = eagle_tensors(random_weights(head_config("eagle")))
        tensors["layers.0.input_layernorm.weight"] = torch.ones(HIDDEN)
        write_files(tmp_path, LAYER | {"architectures": ["LlamaForCausalLM"]}, tensors)
        with pytest.raises(CheckpointError, match=r"tensor layers\.0\.input_layernorm\.weight of shape \[48\] is not"):
            tied.load(tmp_path)


def eagle3_json(**changes: Any) -> dict[str, Any]:
    ids = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    base = LAYER | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT_VOCAB}
    return base | {"target_hidden_size": HIDDEN, "eagle_config": ids} | changes


class TestEagle3:
    @pytest.mark.parametrize("layer", ["midlayer", "layers.0", "model.layers.0"])
    @pytest.mark.parametrize("norms", [True, False])
    def test_loads(self, layer: str, norms: bool, target: Target, tmp_path: Path) -> None:
        recycles = "post_norm" if norms else "pre_norm"
        config = head_config(
            "eagle3", aux_layers=(1, 2, 3), recycles=recycles, fc_norm=norms, draft_vocab_size=DRAFT_VOCAB
        )
        weights, ids = random_weights(config), random_token_ids()
        tensors = eagle3_tensors(weights, layer) | vocabulary_tensors(ids)
        flags = {"fc_norm": True, "norm_output": True} if norms else {}
        write_files(tmp_path, eagle3_json(**flags), tensors | {"embed_tokens.weight": target.embedding})
        head = target.load(tmp_path)
        assert_contract(head.config, kind="eagle3", aux_layers=(1, 2, 3), fc_norm=norms, recycles=recycles)
        assert_contract(head.config, first_row=False, own_lm_head=True, own_embedding=False)
        assert head.token_ids is not None and torch.equal(head.token_ids, ids)
        assert open_head(tmp_path, target.checkpoint).config == head.config
        built = make_head(config, weights, OPS, target.embedding, ids)
        assert all(torch.equal(a, b) for a, b in zip(outputs(head), outputs(built), strict=True))

    def test_one_hidden_state(self, tied: Target, tmp_path: Path) -> None:
        """SGLang builds an fc and goes around it: a file may have one."""
        config = head_config("eagle3")
        weights = random_weights(config)
        written = eagle3_json(eagle_config={"use_aux_hidden_state": False}, norm_output=True, draft_vocab_size=VOCAB)
        for fc in ({}, {"fc.weight": torch.randn(HIDDEN, 3 * HIDDEN)}):
            write_files(tmp_path, written, eagle3_tensors(weights) | fc)
            head = tied.load(tmp_path)
            assert_contract(head.config, aux_layers=(), recycles="post_norm")
            assert head.token_ids is None
            assert_same(head, config, weights, tied)

    def test_a_copy_of_the_targets_rows_is_shared(self, target: Target, tmp_path: Path) -> None:
        config = head_config("eagle3", own_lm_head=False, draft_vocab_size=DRAFT_VOCAB, recycles="pre_norm")
        weights, ids = random_weights(config), random_token_ids()
        tensors = eagle3_tensors(weights) | vocabulary_tensors(ids) | {"lm_head.weight": target.lm_head[ids]}
        write_files(tmp_path, eagle3_json(eagle_config={"use_aux_hidden_state": False}), tensors)
        head = target.load(tmp_path)
        assert not head.config.own_lm_head
        built = make_head(config, weights, OPS, target.embedding, ids)
        built._lm_head = OPS.pack_linear(target.lm_head[ids])  # type: ignore[attr-defined]
        assert all(torch.equal(a, b) for a, b in zip(outputs(head), outputs(built), strict=True))

    def test_a_wider_target_is_refused_by_its_field(self, tied: Target, tmp_path: Path) -> None:
        config = head_config("eagle3", aux_layers=(1, 2), target_hidden_size=56)
        written = eagle3_json(
            target_hidden_size=56, draft_vocab_size=VOCAB, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1]}
        )
        write_files(tmp_path, written, eagle3_tensors(random_weights(config)))
        with pytest.raises(CheckpointError, match=r"target with hidden_size=56, but .* has 48"):
            tied.load(tmp_path)

    def test_draft_ids_are_offsets(self, tied: Target, tmp_path: Path) -> None:
        """target_id = draft_id + d2t[draft_id]."""
        config = head_config("eagle3", draft_vocab_size=4, recycles="pre_norm")
        tensors = eagle3_tensors(random_weights(config)) | {"d2t": torch.tensor([0, 2, 2, 100])}
        none = {"use_aux_hidden_state": False}
        write_files(tmp_path, eagle3_json(draft_vocab_size=4, eagle_config=none), tensors)
        ids = tied.load(tmp_path).token_ids
        assert ids is not None and ids.tolist() == [0, 3, 4, 103]

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"d2t": torch.zeros(DRAFT_VOCAB, dtype=torch.int64)}, "d2t and t2d name different tokens"),
            ({"d2t": torch.zeros(3, dtype=torch.int64)}, r"draft_vocab_size=64, but d2t has shape \[3\]"),
            ({"d2t": None, "t2d": None}, "draft_vocab_size=64 of 199 tokens, but no list says which"),
            (
                {"d2t": torch.arange(DRAFT_VOCAB).flip(0) * 2, "t2d": None},
                "must be 64 ascending ids from 0 to 198",
            ),
            ({"norm.weight": None}, r"tensor norm\.weight is missing"),
            ({"lm_head.weight": torch.zeros(5, HIDDEN)}, r"lm_head\.weight has shape \[5, 48\].* promises \[64, 48\]"),
            ({"midlayer.self_attn.q_norm.weight": torch.ones(12)}, r"q_norm\.weight of shape \[12\] is not part of"),
            ({"fc.weight": torch.zeros(HIDDEN, HIDDEN)}, r"fc\.weight has shape \[48, 48\].* promises \[48, 144\]"),
            ({"norm.weight": torch.ones(HIDDEN, dtype=torch.int8)}, r"norm\.weight has the dtype int8"),
        ],
    )
    def test_tensors_that_do_not_fit(
        self, changed: Mapping[str, Tensor | None], message: str, tied: Target, tmp_path: Path
    ) -> None:
        config = head_config("eagle3", aux_layers=(1, 2, 3), draft_vocab_size=DRAFT_VOCAB)
        tensors: dict[str, Any] = eagle3_tensors(random_weights(config)) | vocabulary_tensors(random_token_ids())
        tensors |= changed
        write_files(tmp_path, eagle3_json(), {name: t for name, t in tensors.items() if t is not None})
        with pytest.raises(CheckpointError, match=message):
            tied.load(tmp_path)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"norm_before_fc": True}, "norm_before_fc=True is not supported"),
            ({"architectures": ["FalconForCausalLMEagle3"]}, "FalconForCausalLMEagle3 is not supported"),
            ({"draft_vocab_size": "many"}, "draft_vocab_size='many': must be an integer"),
            ({"target_hidden_size": 0}, "target_hidden_size=0: must be an integer"),
            ({"num_hidden_layers": 2}, "num_layers=2: a head of kind eagle3 has one layer"),
            (
                {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ["1"]}},
                r"eagle_aux_hidden_state_layer_ids=\['1'\]: must be a list of layer ids",
            ),
            (
                {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 1]}},
                r"aux_layers=\[2, 2\]: must be different layer ids",
            ),
            (
                {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 7]}},
                r"num_layers=3, so there is no state that enters layer 8",
            ),
        ],
    )
    def test_configs_that_do_not_fit(self, changes: dict[str, Any], message: str, tied: Target, tmp_path: Path) -> None:
        config = head_config("eagle3", aux_layers=(1, 2, 3), draft_vocab_size=DRAFT_VOCAB)
        tensors = eagle3_tensors(random_weights(config)) | vocabulary_tensors(random_token_ids())
        write_files(tmp_path, eagle3_json(**changes), tensors)
        with pytest.raises(CheckpointError, match=message):
            tied.load(tmp_path)


class TestAuxConventions:
    """Ids in ``eagle_config`` count what leaves a layer, ids at the top level what enters it."""

    FIELD = "eagle_aux_hidden_state_layer_ids"

    def load(
        self, places: dict[str, Any], target: Target, folder: Path, convention: AuxConvention | None = None
    ) -> HeadConfig:
        config = head_config("eagle3", aux_layers=(1, 2, 3), draft_vocab_size=DRAFT_VOCAB)
        tensors = eagle3_tensors(random_weights(config)) | vocabulary_tensors(random_token_ids())
        write_files(folder, eagle3_json(**({"eagle_config": {}} | places)), tensors)
        return target.load(folder, aux_convention=convention).config

    def test_both_conventions_give_the_same_states(self, tied: Target, tmp_path: Path) -> None:
        leaves = self.load({"eagle_config": {self.FIELD: [0, 1, 2]}}, tied, tmp_path)
        enters = self.load({self.FIELD: [1, 2, 3]}, tied, tmp_path)
        both = self.load({self.FIELD: [1, 2, 3], "eagle_config": {self.FIELD: [0, 1, 2]}}, tied, tmp_path)
        assert leaves == enters == both
        assert leaves.aux_layers == (1, 2, 3)

    def test_the_caller_decides(self, tied: Target, tmp_path: Path) -> None:
        top, nested = {self.FIELD: [0, 1, 2]}, {"eagle_config": {self.FIELD: [1, 2, 3]}}
        assert self.load(top, tied, tmp_path, "output").aux_layers == (1, 2, 3)
        assert self.load(nested, tied, tmp_path, "input").aux_layers == (1, 2, 3)

    def test_two_lists_that_mean_different_states(self, tied: Target, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"=\[1, 2, 3\] at the top level .* \[1, 2, 3\] in eagle_config"):
            self.load({self.FIELD: [1, 2, 3], "eagle_config": {self.FIELD: [1, 2, 3]}}, tied, tmp_path)

    def test_without_ids(self, tied: Target, tmp_path: Path) -> None:
        """A target of 36 layers: inputs of (2, 18, 33), as vLLM has it. Three layers are too few for three states."""
        assert default_aux_layers(36) == (2, 18, 33)
        with pytest.raises(CheckpointError, match=r"aux_layers=\[2, 1, 0\]: must be different layer ids"):
            self.load({}, tied, tmp_path)


class TestSpeculators:
    def written(self, **changes: Any) -> dict[str, Any]:
        top = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "somebody/model"}},
            "draft_vocab_size": DRAFT_VOCAB,
            "norm_before_residual": True,
            "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
            "transformer_layer_config": LAYER | {"model_type": "llama"},
        }
        return {name: value for name, value in (top | changes).items() if value is not None}

    def test_loads(self, target: Target, tmp_path: Path) -> None:
        config = head_config(
            "eagle3", aux_layers=(1, 2, 3), recycles="pre_norm", norm_before_residual=True, draft_vocab_size=DRAFT_VOCAB
        )
        weights, ids = random_weights(config), random_token_ids()
        tensors = eagle3_tensors(weights, "layers.0") | vocabulary_tensors(ids)
        write_files(tmp_path, self.written(), tensors | {"embed_tokens.weight": target.embedding})
        head = target.load(tmp_path)
        assert_contract(head.config, aux_layers=(1, 2, 3), norm_before_residual=True, recycles="pre_norm")
        built = make_head(config, weights, OPS, target.embedding, ids)
        assert all(torch.equal(a, b) for a, b in zip(outputs(head), outputs(built), strict=True))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"speculators_model_type": "dflash"}, "speculators_model_type='dflash': only 'eagle3' is supported"),
            ({"norm_before_residual": None}, "norm_before_residual=None: must be true or false"),
            ({"transformer_layer_config": [1]}, r"transformer_layer_config=\[1\]: must be an object"),
            ({"norm_before_fc": True}, "norm_before_fc=True is not supported"),
        ],
    )
    def test_what_is_refused(self, changes: dict[str, Any], message: str, tied: Target, tmp_path: Path) -> None:
        config = head_config("eagle3", aux_layers=(1, 2, 3), draft_vocab_size=DRAFT_VOCAB)
        write_files(tmp_path, self.written(**changes), eagle3_tensors(random_weights(config), "layers.0"))
        with pytest.raises(CheckpointError, match=message):
            tied.load(tmp_path)


class TestMtpLayers:
    """DeepSeek's and GLM's layout: modules behind the target's own layers, in its file or alone."""

    def written(self, count: int = 1, **changes: Any) -> dict[str, Any]:
        base = LAYER | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": NUM_LAYERS}
        return base | {"num_nextn_predict_layers": count} | changes

    @pytest.mark.parametrize("count", [1, 2])
    @pytest.mark.parametrize("copies", [True, False])
    def test_loads(self, count: int, copies: bool, target: Target, tmp_path: Path) -> None:
        config = head_config("mtp", num_modules=count, first_row=False)
        weights = random_weights(config)
        tensors = deepseek_tensors(weights, NUM_LAYERS)
        if copies:
            for m in range(NUM_LAYERS, NUM_LAYERS + count):
                tensors[f"model.layers.{m}.embed_tokens.weight"] = target.embedding
                tensors[f"model.layers.{m}.shared_head.head.weight"] = target.lm_head
        write_files(tmp_path, self.written(count), tensors)
        head = target.load(tmp_path)
        assert_contract(head.config, kind="mtp", num_modules=count, first_row=False, recycles="post_norm")
        assert_contract(head.config, hidden_first=False, own_embedding=False, own_lm_head=False)
        assert_same(head, config, weights, target)

    def test_in_the_targets_own_folder(self, tied: Target, tmp_path: Path) -> None:
        """The folder is the model's and the head's; the model leaves the head's layers alone."""
        shape = replace(tied.checkpoint.config, num_layers=1)
        config = replace(head_config("mtp", first_row=False), shape=shape)
        weights = random_weights(config)
        stored = tied.checkpoint.tensors()
        own = json.loads((tied.checkpoint.path / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
        write_files(tmp_path, own, {**stored, **deepseek_tensors(weights, NUM_LAYERS)})
        target = open_target(tmp_path)
        assert target.model.config.num_layers == NUM_LAYERS
        assert_same(target.load(tmp_path), config, weights, target)

        write_files(tmp_path, own | {"num_nextn_predict_layers": 0}, {**stored, **deepseek_tensors(weights, 3)})
        with pytest.raises(CheckpointError, match=r"tensor model\.layers\.3\..* is not part of a llama model"):
            open_target(tmp_path)

    def test_transformers_options(self, tied: Target, tmp_path: Path) -> None:
        written = self.written(
            mtp_hidden_states_first=True, chain_hidden_post_norm=False, num_nextn_predict_layers=None
        )
        config = head_config("mtp", first_row=False, hidden_first=True, recycles="pre_norm")
        weights = random_weights(config)
        write_files(tmp_path, written | {"num_mtp_layers": 1}, deepseek_tensors(weights, NUM_LAYERS))
        head = tied.load(tmp_path)
        assert_contract(head.config, hidden_first=True, recycles="pre_norm")
        assert_same(head, config, weights, tied)

    def test_mimo(self, tied: Target, tmp_path: Path) -> None:
        config = head_config("mtp", "qwen2", first_row=False, hidden_first=True)
        weights = random_weights(config)
        write_files(tmp_path, self.written(architectures=["MiMoForCausalLM"]), mimo_tensors(weights))
        head = tied.load(tmp_path)
        assert_contract(head.config, kind="mtp", hidden_first=True, recycles="post_norm")
        assert_same(head, config, weights, tied)

    def test_an_output_head_of_its_own_is_used(self, tied: Target, tmp_path: Path) -> None:
        config = head_config("mtp", first_row=False, own_lm_head=True)
        weights = random_weights(config)
        tensors = deepseek_tensors({k: w for k, w in weights.items() if k != "lm_head.weight"}, NUM_LAYERS)
        tensors["model.layers.3.shared_head.head.weight"] = weights["lm_head.weight"]
        write_files(tmp_path, self.written(), tensors)
        head = tied.load(tmp_path)
        assert head.config.own_lm_head
        assert_same(head, config, weights, tied)

    @pytest.mark.parametrize(
        ("behind", "changes", "extra", "message"),
        [
            (5, {}, {}, r"must follow the target's num_layers=3, and the file has layers\.5\.eh_proj\.weight"),
            (3, {"num_nextn_predict_layers": 2}, {}, "num_nextn_predict_layers=2, but the file has 1 MTP layers"),
            (3, {"architectures": ["DeepseekV3ForCausalLM"]}, {}, "DeepseekV3ForCausalLM is not supported"),
            (3, {}, {"model.layers.3.mlp.gate.weight": torch.ones(2, 2)}, r"mlp\.gate\.weight of shape .* is not part"),
            (3, {"vocab_size": 300}, {}, "vocab_size=300, but .* has 199"),
        ],
    )
    def test_what_is_refused(
        self,
        behind: int,
        changes: dict[str, Any],
        extra: dict[str, Tensor],
        message: str,
        tied: Target,
        tmp_path: Path,
    ) -> None:
        tensors = deepseek_tensors(random_weights(head_config("mtp", first_row=False)), behind)
        write_files(tmp_path, self.written(**changes), tensors | extra)
        with pytest.raises(CheckpointError, match=message):
            tied.load(tmp_path)

    def test_modules_with_different_output_heads(self, tied: Target, tmp_path: Path) -> None:
        tensors = deepseek_tensors(random_weights(head_config("mtp", num_modules=2, first_row=False)), NUM_LAYERS)
        for m in (3, 4):
            tensors[f"model.layers.{m}.shared_head.head.weight"] = random_table(m)
        write_files(tmp_path, self.written(2), tensors)
        with pytest.raises(UnsupportedModelError, match="differ: the modules must share one"):
            tied.load(tmp_path)


def test_something_that_is_no_head(tied: Target, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="holds no draft head of a known layout"):
        tied.load(tied.checkpoint.path)
    with pytest.raises(CheckpointError, match="there is no such folder"):
        tied.load(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"holds no config\.json"):
        tied.load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="holds no weights"):
        tied.load(tmp_path)
