"""Heads in other projects' layouts: names, shapes and fields as their engines read them, and back without a change."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from helpers import TINY_VOCAB_SIZE, write_tiny_checkpoint
from pilotfish.cli.app import run as run_cli
from pilotfish.errors import ConfigError
from pilotfish.models import build_model, expected_tensors
from pilotfish.models.checkpoint import Checkpoint, load_weights, resolve_model
from pilotfish.models.heads import DraftHead, HeadConfig, head_tensors, load_head, save_head, target_stamp
from pilotfish.ops.reference import TorchOps
from pilotfish.runner import Segment
from pilotfish.training.evaluate import evaluation_runner
from pilotfish.training.export import export_head

H, V, D, N = 48, TINY_VOCAB_SIZE, 40, 3
Q, KV, I = 48, 24, 80  # noqa: E741  # widths of the query and key projections, and of the MLP
LAYER = {
    "self_attn.o_proj.weight": (H, Q),
    "post_attention_layernorm.weight": (H,),
    "mlp.gate_proj.weight": (I, H),
    "mlp.up_proj.weight": (I, H),
    "mlp.down_proj.weight": (H, I),
}
ATTENTION = {"self_attn.q_proj.weight": (Q, H), "self_attn.k_proj.weight": (KV, H), "self_attn.v_proj.weight": (KV, H)}
WIDE_ATTENTION = {name: (rows, 2 * H) for name, (rows, _) in ATTENTION.items()}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = write_tiny_checkpoint("llama3", tmp_path_factory.mktemp("target"))
    return resolve_model(str(folder), dtype="float32")


def head_config(target: Checkpoint, **changes: Any) -> HeadConfig:
    shape = replace(target.config, num_layers=changes.pop("num_modules", 1), tie_word_embeddings=False)
    fields = {
        "kind": "eagle3", "shape": shape, "target_hidden_size": H, "draft_vocab_size": D, "first_row": False,
        "target": target_stamp(target),
    }  # fmt: skip
    return HeadConfig(**{**fields, **changes})


def make_head(folder: Path, config: HeadConfig) -> Path:
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=generator) * 0.2 + (1.0 if len(shape) == 1 and "bias" not in name else 0.0)
        for name, shape in head_tensors(config).items()
    }
    ids = torch.randperm(V, generator=generator)[: config.draft_vocab_size].sort().values
    save_head(folder, config, weights, ids if config.draft_vocab_size < V else None)
    return folder


def load(folder: Path, target: Checkpoint, ops: TorchOps) -> DraftHead:
    model = build_model(target.config, load_weights(target, expected_tensors(target.config)), ops)
    return load_head(folder, checkpoint=target, model=model, ops=ops)


def run(head: DraftHead, ops: TorchOps) -> list[Tensor]:
    """Logits after 11 true rows of each module, and after a row that reads what the last module recycled."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(V, (13,), generator=generator).tolist()
    runner = evaluation_runner(head, ops, max_seqs=1, max_tokens=16, max_len=16)
    states = runner.fuse(torch.randn(11, head.config.feature_size, generator=generator))
    results = []
    for module in range(head.config.num_modules):
        step = runner.forward([Segment(0, tokens[1:12], 1, [0], 11)], states, module)
        results.append(step.logits)
        states = step.states
    return [*results, runner.forward([Segment(0, tokens[12:], 12, [0], 1)], states[-1:].clone(), module).logits]


def export(tmp_path: Path, target: Checkpoint, form: Any, **changes: Any) -> tuple[Path, Path]:
    head, out = make_head(tmp_path / "head", head_config(target, **changes)), tmp_path / "out"
    export_head(head, target, form, out, num_drafts=3)
    return head, out


def contents(out: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")


def check_equal_logits(head: Path, out: Path, target: Checkpoint) -> None:
    ops = TorchOps(torch.float32)
    before, after = load(head, target, ops), load(out, target, ops)
    for a, b in zip(run(before, ops), run(after, ops), strict=True):
        # A layout without a draft vocabulary has the other tokens' logits too.
        torch.testing.assert_close(a, b if b.shape == a.shape else b[:, before.token_ids], rtol=0, atol=0)


AUX = {"aux_layers": (1, 2, 3)}
ROUND_TRIPS = {
    "eagle3-vllm": [AUX, {}, {**AUX, "recycles": "pre_norm"}, {"norm_before_residual": True}, {"own_lm_head": True},
                    {**AUX, "fc_norm": True}, {"draft_vocab_size": V}, {"aux_layers": (1, 3)},
                    {"own_embedding": True}],
    "eagle3-sglang": [AUX, {}, {**AUX, "fc_norm": True, "recycles": "pre_norm"}, {"own_lm_head": True}],
    "speculators": [AUX, {**AUX, "fc_norm": True, "norm_before_residual": True}, {**AUX, "own_lm_head": True}],
    "eagle-vllm": [{"kind": "eagle"}, {"kind": "eagle", "draft_vocab_size": V}],
    "eagle-sglang": [{"kind": "eagle"}, {"kind": "eagle", "fc_bias": True}],
    "deepseek-mtp": [{"kind": "mtp"}, {"kind": "mtp", "own_embedding": True, "num_modules": 2},
                     {"kind": "mtp", "num_modules": 2, "draft_vocab_size": V}],
    "pilotfish": [AUX, {"kind": "mtp", "first_row": True}, {"kind": "eagle", "fc_bias": True}],
}  # fmt: skip


@pytest.mark.parametrize(("form", "changes"), [(form, c) for form, cases in ROUND_TRIPS.items() for c in cases])
def test_an_exported_head_loads_back_with_equal_logits(
    form: str, changes: dict[str, Any], tmp_path: Path, target: Checkpoint
) -> None:
    head, out = export(tmp_path, target, form, **changes)
    check_equal_logits(head, out, target)


def test_a_head_with_the_state_first_exports_to_deepseek_names(tmp_path: Path, target: Checkpoint) -> None:
    head, out = export(tmp_path, target, "deepseek-mtp", kind="mtp", hidden_first=True)
    ours, theirs = load_file(head / "model.safetensors"), contents(out)[1]
    a, b = ours["modules.0.eh_proj.weight"], theirs[f"model.layers.{N}.eh_proj.weight"]
    assert torch.equal(a[:, :H], b[:, H:]) and torch.equal(a[:, H:], b[:, :H])


def prefixed(prefix: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


EAGLE3 = {"norm.weight": (H,), "lm_head.weight": (D, H), "d2t": (D,), "t2d": (V,)}
MIDLAYER = {**LAYER, **WIDE_ATTENTION, "input_layernorm.weight": (H,), "hidden_norm.weight": (H,)}
MTP = {
    **LAYER, **ATTENTION, "input_layernorm.weight": (H,), "enorm.weight": (H,), "hnorm.weight": (H,),
    "eh_proj.weight": (H, 2 * H), "shared_head.norm.weight": (H,),
}  # fmt: skip
EAGLE = {"fc.weight": (H, 2 * H), **prefixed("layers.0", {**LAYER, **ATTENTION})}
LAYOUTS = {
    "eagle3-vllm": (AUX, {**EAGLE3, **prefixed("midlayer", MIDLAYER), "fc.weight": (H, 3 * H)}),
    "eagle3-sglang": ({}, {**EAGLE3, **prefixed("midlayer", MIDLAYER)}),
    "speculators": (
        {**AUX, "fc_norm": True},
        {**EAGLE3, **prefixed("layers.0", MIDLAYER), "fc.weight": (H, 3 * H), "embed_tokens.weight": (V, H),
         **{f"fc_norm.{i}.weight": (H,) for i in range(3)}},
    ),
    "eagle-vllm": ({"kind": "eagle"}, EAGLE),
    "eagle-sglang": ({"kind": "eagle"}, {**EAGLE, "fc.bias": (H,)}),
    "deepseek-mtp": (
        {"kind": "mtp", "num_modules": 2},
        {**prefixed(f"model.layers.{N}", MTP), **prefixed(f"model.layers.{N + 1}", MTP)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", LAYOUTS)
def test_tensors_have_the_documented_names_and_shapes(form: str, tmp_path: Path, target: Checkpoint) -> None:
    changes, expected = LAYOUTS[form]
    _, tensors = contents(export(tmp_path, target, form, **changes)[1])
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected
    buffers = {"d2t": torch.int64, "t2d": torch.bool}
    assert all(tensor.dtype == buffers.get(name, torch.bfloat16) for name, tensor in tensors.items())


def test_d2t_holds_offsets_and_t2d_the_same_tokens(tmp_path: Path, target: Checkpoint) -> None:
    head, out = export(tmp_path, target, "eagle3-vllm")
    ids = load_file(head / "model.safetensors")["token_ids"]
    _, tensors = contents(out)
    assert torch.equal(torch.arange(D) + tensors["d2t"], ids)
    assert torch.equal(tensors["t2d"].nonzero().flatten(), ids)


def test_each_engine_gets_layer_ids_as_it_counts(tmp_path: Path, target: Checkpoint) -> None:
    vllm, _ = contents(export(tmp_path / "a", target, "eagle3-vllm", aux_layers=(1, 2, 3))[1])
    sglang, _ = contents(export(tmp_path / "b", target, "eagle3-sglang", aux_layers=(1, 2, 3))[1])
    speculators, _ = contents(export(tmp_path / "c", target, "speculators", aux_layers=(1, 2, 3))[1])
    ids = "eagle_aux_hidden_state_layer_ids"
    assert vllm[ids] == speculators[ids] == [1, 2, 3] and ids not in vllm["eagle_config"]
    assert sglang["eagle_config"][ids] == [0, 1, 2] and ids not in sglang


@pytest.mark.parametrize(
    ("form", "changes", "fields"),
    [
        ("eagle3-vllm", {"norm_before_residual": True}, {
            "architectures": ["LlamaForCausalLMEagle3"], "eagle_config": {"use_aux_hidden_state": False},
            "draft_vocab_size": D, "vocab_size": V, "num_hidden_layers": 1, "norm_output": True,
            "norm_before_residual": True, "tie_word_embeddings": False, "model_type": "llama",
            "torch_dtype": "bfloat16", "head_dim": 12, "rope_theta": 500.0,
        }),
        ("eagle3-sglang", {**AUX, "fc_norm": True, "recycles": "pre_norm"}, {
            "architectures": ["LlamaForCausalLMEagle3"], "fc_norm": True, "norm_output": False,
            "num_aux_hidden_states": 3, "target_hidden_size": H, "tie_word_embeddings": False,
        }),
        ("speculators", AUX, {
            "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "norm_before_residual": False,
            "norm_before_fc": False, "fc_norm": False, "norm_output": True, "target_hidden_size": None,
        }),
        ("eagle-vllm", {"kind": "eagle"}, {"architectures": ["LlamaForCausalLM"], "bias": False}),
        ("eagle-sglang", {"kind": "eagle"}, {"architectures": ["LlamaForCausalLMEagle"], "bias": True}),
        ("deepseek-mtp", {"kind": "mtp", "num_modules": 2}, {"num_hidden_layers": N, "num_nextn_predict_layers": 2}),
    ],
)  # fmt: skip
def test_config_fields(
    form: str, changes: dict[str, Any], fields: dict[str, Any], tmp_path: Path, target: Checkpoint
) -> None:
    config, _ = contents(export(tmp_path, target, form, **changes)[1])
    assert {name: config.get(name) for name in fields} == fields


def test_the_speculators_config_names_verifier_and_number_of_drafts(tmp_path: Path, target: Checkpoint) -> None:
    config, _ = contents(export(tmp_path, target, "speculators", **AUX)[1])
    inner = config["speculators_config"]
    assert inner["verifier"]["name_or_path"] == target.name and inner["algorithm"] == "eagle3"
    assert inner["proposal_methods"][0]["speculative_tokens"] == 3
    assert config["transformer_layer_config"]["hidden_size"] == H


def test_sglang_gets_a_token_map_of_an_eagle_head(tmp_path: Path, target: Checkpoint) -> None:
    head, out = export(tmp_path, target, "eagle-sglang", kind="eagle")
    token_map = torch.load(out / "token_map.pt", weights_only=True)
    assert token_map == load_file(head / "model.safetensors")["token_ids"].tolist()
    assert "--speculative-token-map FOLDER/token_map.pt" in (out / "README.md").read_text()


@pytest.mark.parametrize(("form", "flag"), [
    ("eagle3-vllm", '"method": "eagle3"'), ("eagle3-sglang", "--speculative-algorithm EAGLE3"),
    ("speculators", "vllm serve FOLDER"),
])  # fmt: skip
def test_the_readme_says_how_to_serve(form: str, flag: str, tmp_path: Path, target: Checkpoint) -> None:
    _, out = export(tmp_path, target, form, **AUX)
    text = (out / "README.md").read_text()
    assert flag in text and "3" in text and target.name in text


@pytest.mark.parametrize("form", ["eagle3-vllm", "eagle3-sglang", "speculators", "eagle-vllm", "eagle-sglang"])
def test_an_mtp_head_does_not_fit_an_eagle_container(form: str, tmp_path: Path, target: Checkpoint) -> None:
    with pytest.raises(
        ConfigError, match=r"of kind mtp, which can be exported as pilotfish, deepseek-mtp\..*[Tt]rain"
    ) as e:
        export(tmp_path, target, form, kind="mtp")
    assert "eh_proj" in str(e.value) or "norms" in str(e.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("form", "changes", "field"),
    [
        ("eagle3-vllm", {"hidden_first": True}, "hidden_first=True"),
        ("eagle3-sglang", {"norm_before_residual": True}, "norm_before_residual=True"),
        ("speculators", {}, r"aux_layers=\(\)"),
        ("speculators", {"aux_layers": (1, 3)}, r"aux_layers=\(1, 3\)"),
        ("eagle-vllm", {"kind": "eagle", "fc_bias": True}, "fc_bias=True.*eagle-sglang"),
        ("eagle-vllm", {"kind": "eagle", "own_lm_head": True}, "own_lm_head=True"),
        ("eagle3-sglang", {"own_embedding": True}, "own_embedding=True"),
        ("deepseek-mtp", {"kind": "mtp", "recycles": "pre_norm"}, "recycles='pre_norm'"),
        (
            "deepseek-mtp",
            {},
            "kind eagle3, which can be exported as pilotfish, eagle3-vllm, eagle3-sglang, speculators",
        ),
        ("gguf", {}, "must be one of pilotfish, eagle3-vllm"),
    ],
)
def test_what_a_layout_cannot_hold_is_refused(
    form: str, changes: dict[str, Any], field: str, tmp_path: Path, target: Checkpoint
) -> None:
    with pytest.raises(ConfigError, match=field):
        export(tmp_path, target, form, **changes)


def test_a_layer_that_the_engine_does_not_build_is_refused(tmp_path: Path, target: Checkpoint) -> None:
    shape = replace(target.config, num_layers=1, architecture="qwen2", attention_bias=True)
    with pytest.raises(ConfigError, match="a layer of qwen2"):
        export(tmp_path, target, "eagle3-vllm", shape=shape)


def test_an_occupied_folder_is_left_alone(tmp_path: Path, target: Checkpoint) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(ConfigError, match="not an empty folder"):
        export(tmp_path, target, "eagle3-vllm")


def test_notes_say_what_the_layout_does_not(tmp_path: Path, target: Checkpoint) -> None:
    def notes(name: str, **changes: Any) -> tuple[str, ...]:
        head = make_head(tmp_path / name, head_config(target, **changes))
        return export_head(head, target, "eagle3-vllm", tmp_path / f"{name}-out")

    assert notes("plain", recycles="pre_norm") == ()
    assert "norm_output" in notes("normed")[0]
    assert "position 0" in notes("row", recycles="pre_norm", first_row=True)[0]
    assert "position 0" in (tmp_path / "row-out" / "README.md").read_text()


def test_the_command(tmp_path: Path, target: Checkpoint, capsys: pytest.CaptureFixture[str]) -> None:
    head = make_head(tmp_path / "head", head_config(target, kind="mtp", first_row=True))
    args = ["export", str(head), "--model", target.name]
    assert run_cli([*args, "--format", "deepseek-mtp", "--out", str(tmp_path / "out")]) == 0
    err = " ".join(capsys.readouterr().err.split())
    assert "deepseek-mtp, 0." in err and err.count("note: ") == 3
    assert f"model.layers.{N}.eh_proj.weight" in contents(tmp_path / "out")[1]
    assert run_cli([*args, "--format", "eagle3-vllm", "--out", str(tmp_path / "other")]) == 2
    assert "of kind mtp" in capsys.readouterr().err
    assert run_cli([*args, "--format", "deepseek-mtp", "--out", str(tmp_path / "new"), "--num-drafts", "0"]) == 2
    assert "num_drafts=0" in capsys.readouterr().err


def test_the_command_reads_layer_ids_as_it_is_told(
    tmp_path: Path, target: Checkpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    head = make_head(tmp_path / "head", head_config(target, aux_layers=(1, 2), recycles="pre_norm"))
    args = ["--model", target.name, "--allow-mismatch", "--format"]
    assert run_cli(["export", str(head), *args, "eagle3-vllm", "--out", str(tmp_path / "vllm")]) == 0
    for convention, layers in ((None, [1, 2]), ("input", [1, 2]), ("output", [2, 3])):
        out = tmp_path / f"own-{convention}"
        told = [] if convention is None else ["--aux-convention", convention]
        args_of_own = ["export", str(tmp_path / "vllm"), *args, "pilotfish", "--out", str(out), *told]
        assert run_cli(args_of_own) == 0
        assert contents(out)[0]["aux_layers"] == layers
    assert run_cli(["export", str(head), *args, "pilotfish", "--out", str(out), "--aux-convention", "up"]) == 2
    assert "aux_convention='up': must be input or output" in capsys.readouterr().err
