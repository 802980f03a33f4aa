"""Which head drafts: a model's own, one that is named, or none; and what is said where it does not fit."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from helpers import TINY_VOCAB_SIZE
from helpers_heads import head_config, random_weights, write_head
from pilotfish.cli.app import run as run_cli
from pilotfish.cli.info import model_info
from pilotfish.cli.options import ModelOptions
from pilotfish.config import Auto, Eagle, EngineConfig, Mtp, Ngram
from pilotfish.engine import Engine, load_engine
from pilotfish.errors import CheckpointError, ConfigError
from pilotfish.models.checkpoint import Checkpoint, resolve_model
from pilotfish.models.heads import HeadKind
from pilotfish.speculation import DraftRow, NoProposer, find_head
from pilotfish.speculation.heads import HeadProposer
from pilotfish.speculation.lookup import LookupFirstProposer
from pilotfish.speculation.ngram import NgramProposer
from pilotfish.types import SamplingParams
from plain_heads import deepseek_tensors, mimo_tensors


@pytest.fixture
def target(tiny_checkpoints: Mapping[str, Path], tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    shutil.copytree(tiny_checkpoints["llama3"], folder)
    vocabulary = models.WordLevel({f"t{i}": i for i in range(TINY_VOCAB_SIZE)}, unk_token="t2")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(vocabulary)).save_pretrained(folder)
    return folder


def add_head(folder: Path, target: Path, kind: HeadKind = "mtp", **settings: Any) -> str:
    config = head_config(str(target), kind, **settings)
    return write_head(folder, config, random_weights(config))


def load(target: Path, **settings: Any) -> Engine:
    config = EngineConfig(
        **{"dtype": "float32", "backend": "torch", "threads": 1, "kv_cache_memory": 4 << 20} | settings
    )
    return load_engine(str(target), config)


def edit_config(folder: Path | str, **changes: Any) -> None:
    file = Path(folder) / "config.json"
    content = json.loads(file.read_text())
    content["target"] |= changes
    file.write_text(json.dumps(content))


def test_auto_is_ngram_where_the_model_has_no_head(target: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pilotfish"):
        engine = load(target)
    assert engine.config.speculation == Ngram() and isinstance(engine.proposer, NgramProposer)
    assert "speculation=ngram: the model has no draft head of its own" in caplog.text


@pytest.mark.parametrize(("name", "kind"), [("head", "mtp"), ("mtp", "mtp"), ("head", "eagle"), ("head", "eagle3")])
def test_auto_takes_the_head_in_the_models_folder(
    target: Path, name: str, kind: HeadKind, caplog: pytest.LogCaptureFixture
) -> None:
    folder = add_head(target / name, target, kind)
    with caplog.at_level(logging.INFO, "pilotfish"):
        engine = load(target)
    assert engine.config.speculation == (Mtp(head=folder) if kind == "mtp" else Eagle(head=folder))
    assert isinstance(engine.proposer, LookupFirstProposer) and engine.scheduler.draft_has_kv
    assert f"the model's own head, {folder}" in caplog.text
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True))
    while engine.has_unfinished:
        engine.step()
    assert engine.stats.speculation.num_drafted > 0


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MiMoForCausalLM"])
def test_auto_takes_the_mtp_layers_in_the_models_own_files(target: Path, architecture: str) -> None:
    """DeepSeek's names behind a Llama, MiMo's behind a Qwen2 with MiMo's class."""
    of_mimo = architecture == "MiMoForCausalLM"
    config = replace(head_config(str(target), "mtp"), first_row=False, hidden_first=of_mimo)
    tensors = dict(load_file(target / "model.safetensors"))
    content = json.loads((target / "config.json").read_text())
    content |= {"architectures": [architecture], "num_nextn_predict_layers": 1}
    if of_mimo:
        content |= {"attention_bias": True, "model_type": "mimo"}
        shape = replace(config.shape, architecture="qwen2", attention_bias=True)
        config = replace(config, shape=shape)
        sizes = {"q": shape.num_q_heads, "k": shape.num_kv_heads, "v": shape.num_kv_heads}
        for layer in range(content["num_hidden_layers"]):
            for name, heads in sizes.items():
                bias = torch.randn(heads * shape.head_dim)
                tensors[f"model.layers.{layer}.self_attn.{name}_proj.bias"] = bias
    weights = random_weights(config)
    own = mimo_tensors(weights) if of_mimo else deepseek_tensors(weights, content["num_hidden_layers"])
    save_file({name: x.contiguous() for name, x in (tensors | own).items()}, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(content))

    engine = load(target)
    assert engine.config.speculation == Mtp(head=str(target))
    assert model_info(ModelOptions(model=str(target)))["draft_head"] == str(target)
    head: Any = engine.proposer.runner.head  # type: ignore[attr-defined]
    assert head.config.hidden_first == of_mimo
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True))
    while engine.has_unfinished:
        engine.step()
    assert engine.stats.speculation.num_drafted > 0
    separate = add_head(target / "head", target, "eagle")
    assert load(target).config.speculation == Eagle(head=separate), "a folder of its own comes first"


def test_what_all_schemes_have_is_passed_on(target: Path) -> None:
    auto = Auto(num_drafts=2, verify="rejection", decode_only_batches=True)
    assert load(target, speculation=auto).config.speculation == Ngram(
        num_drafts=2, verify="rejection", decode_only_batches=True
    )
    folder = add_head(target / "head", target)
    assert load(target, speculation=auto).config.speculation == Mtp(
        head=folder, num_drafts=2, verify="rejection", decode_only_batches=True
    )


@pytest.mark.parametrize("kind", ["mtp", "eagle", "eagle3"])
def test_auto_takes_the_scheme_of_the_head_that_is_named(
    target: Path, tmp_path: Path, kind: HeadKind, caplog: pytest.LogCaptureFixture
) -> None:
    add_head(target / "head", target)  # which the named one comes before
    folder = add_head(tmp_path / "other", target, kind)
    scheme = Mtp if kind == "mtp" else Eagle
    with caplog.at_level(logging.INFO, "pilotfish"):
        assert load(target, speculation=Auto(head=folder)).config.speculation == scheme(head=folder)
    assert f"speculation={scheme.scheme}: the head that is named, {folder}" in caplog.text
    settings = {"p_min": 0.5, "lookup": 0, "num_drafts": 2}
    engine = load(target, speculation=Auto(head=folder, **settings))
    assert engine.config.speculation == scheme(head=folder, **settings)
    edit_config(folder, embedding_sha256="0" * 64)
    with pytest.raises(CheckpointError, match="embedding_sha256"):
        load(target, speculation=Auto(head=folder))
    engine = load(target, speculation=Auto(head=folder, allow_mismatch=True))
    assert engine.config.speculation == scheme(head=folder, allow_mismatch=True)


@pytest.mark.parametrize("kind", ["mtp", "eagle"])
def test_a_benchmark_measures_a_head_that_is_named_by_its_kind(target: Path, tmp_path: Path, kind: HeadKind) -> None:
    folder = add_head(tmp_path / "other", target, kind)
    data, out = tmp_path / "data.jsonl", tmp_path / "out.json"
    data.write_text('{"question_id": 1, "category": "a", "turns": ["t5"]}\n')
    asked = ["--model", str(target), "--head", folder, "--scheme", "none", "--data", str(data), "--json", str(out)]
    assert run_cli(["bench", *asked, "--max-tokens", "6", "--backend", "torch", "--threads", "1"]) == 0
    content = json.loads(out.read_text())
    overall = {item["scheme"]: item for item in content["summary"] if item["category"] == "overall"}
    assert [*overall] == ["none", kind] and overall[kind]["num_identical"] == 1
    assert content["settings"]["schemes"]["auto"]["head"] == folder


def test_settings_of_heads_are_for_the_models_own_too_and_need_one(
    target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    auto = Auto(p_min=0.5, lookup=0)
    with pytest.raises(ConfigError, match=r"p_min=0.5, lookup=0: of draft heads, .*takes ngram. .*--head FOLDER"):
        load(target, speculation=auto)
    folder = add_head(target / "head", target, "eagle3")
    assert load(target, speculation=auto).config.speculation == Eagle(head=folder, p_min=0.5, lookup=0)
    edit_config(folder, embedding_sha256="0" * 64)
    with pytest.raises(ConfigError, match="of draft heads"):
        load(target, speculation=auto)
    assert f"The head in {folder} is left out" in caplog.text
    allowed = load(target, speculation=Auto(allow_mismatch=True)).config.speculation
    assert allowed == Eagle(head=folder, allow_mismatch=True)


def test_none_is_plain_decoding_whatever_is_in_the_folder(target: Path) -> None:
    add_head(target / "head", target)
    assert isinstance(load(target, speculation=None).proposer, NoProposer)


def test_auto_leaves_out_a_head_that_does_not_fit_and_says_why(target: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = add_head(target / "head", target)
    edit_config(folder, embedding_sha256="0" * 64)
    engine = load(target)
    assert engine.config.speculation == Ngram()
    assert f"The head in {folder} is left out" in caplog.text and "embedding_sha256" in caplog.text


def test_a_head_that_is_named_must_fit_unless_a_mismatch_is_allowed(
    target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = add_head(tmp_path / "other", target)
    edit_config(folder, embedding_sha256="0" * 64)
    with pytest.raises(CheckpointError, match="embedding_sha256"):
        load(target, speculation=Mtp(head=folder))
    engine = load(target, speculation=Mtp(head=folder, allow_mismatch=True, lookup=0))
    assert isinstance(engine.proposer, HeadProposer) and "embedding_sha256" in caplog.text
    edit_config(folder, hidden_size=49)
    with pytest.raises(CheckpointError, match="hidden_size"):
        load(target, speculation=Mtp(head=folder, allow_mismatch=True))


def test_a_scheme_without_a_head_says_how_to_name_one(target: Path) -> None:
    for settings in (Mtp(), Eagle()):
        with pytest.raises(ConfigError, match=rf"scheme='{settings.scheme}': this model has no head .*--head FOLDER"):
            load(target, speculation=settings)
    with pytest.raises(CheckpointError, match="no such folder"):
        load(target, speculation=Mtp(head=str(target / "nothing")))


def test_a_head_of_another_kind_names_its_scheme(target: Path) -> None:
    add_head(target / "head", target, "eagle")
    with pytest.raises(ConfigError, match=r"of the kind eagle. Use Eagle"):
        load(target, speculation=Mtp())
    assert load(target, speculation=Eagle()).config.speculation == Eagle()
    shutil.rmtree(target / "head")
    add_head(target / "head", target)
    with pytest.raises(ConfigError, match=r"of the kind mtp. Use Mtp"):
        load(target, speculation=Eagle())


def test_a_shipped_head_is_for_the_built_in_name_alone(target: Path, tmp_path: Path) -> None:
    shipped = tmp_path / "shipped"
    add_head(shipped / "smollm2-135m", target)
    checkpoint: Checkpoint = resolve_model(str(target))
    assert find_head(checkpoint, shipped) is None
    built_in = replace(checkpoint, name="smollm2-135m")
    assert find_head(built_in, shipped) == shipped / "smollm2-135m"
    assert find_head(built_in, tmp_path / "nothing") is None
    add_head(target / "head", target)
    assert find_head(built_in, shipped) == target / "head", "the user's own comes first"


def test_info_names_the_head(target: Path) -> None:
    assert model_info(ModelOptions(model=str(target)))["draft_head"] is None
    folder = add_head(target / "head", target)
    assert model_info(ModelOptions(model=str(target)))["draft_head"] == folder


def test_the_heads_pool_counts_in_the_memory_of_pages(target: Path, tmp_path: Path) -> None:
    layer = 2 * 2 * 12 * 16 * 4  # keys and values, of two heads of 12, of 16 tokens in float32
    chain = add_head(tmp_path / "chain", target, num_modules=2)
    assert load(target, speculation=None, kv_cache_memory=60 * layer).pool.num_pages == 20
    engine = load(target, speculation=Mtp(head=chain), kv_cache_memory=60 * layer)
    assert engine.pool.num_pages == 12
    assert engine.proposer.runner.num_pages == 12  # type: ignore[attr-defined]


@pytest.mark.parametrize("lookup", [1, 3, 6])
def test_runs_of_the_length_that_is_asked_for_are_looked_up(lookup: int, target: Path) -> None:
    folder = add_head(target / "head", target)
    engine = load(target, speculation=Mtp(head=folder, lookup=lookup, num_drafts=3))
    tokens = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5, 6]
    for run in (lookup - 1, lookup):
        end = len(tokens) - 6 + run
        text = [*tokens[:7], 9, *tokens[7:end]]  # its last `run` tokens occurred before
        row = DraftRow(0, text, [], None, 3)  # type: ignore[arg-type]
        found = engine.proposer._lookup.propose([row]).tokens[0]  # type: ignore[attr-defined]
        assert found == ([] if run < lookup else text[run:][:3])


@pytest.mark.parametrize("value", ["automatic", "", Mtp, 3, {"scheme": "mtp"}])
def test_what_is_no_choice_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="must be a scheme's settings such as"):
        EngineConfig(speculation=value)


def test_settings_of_heads_are_checked() -> None:
    with pytest.raises(ConfigError, match="allow_mismatch"):
        Mtp(allow_mismatch="yes")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="num_drafts=0"):
        Eagle(num_drafts=0)
    with pytest.raises(ConfigError, match="lookup=-1"):
        Auto(lookup=-1)
