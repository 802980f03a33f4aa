"""ModelConfig reads config.json as transformers 4 and 5 write it, and refuses what the models do not compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from pilotfish.errors import CheckpointError, UnsupportedModelError
from pilotfish.models.config import LinearRopeScaling, Llama3RopeScaling, ModelConfig, read_token_ids

# As meta-llama/Llama-3.2-1B-Instruct has it (written by transformers 4.45).
LLAMA_3_2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}

# As Qwen/Qwen2.5-0.5B-Instruct has it (written by transformers 4.43).
QWEN_2_5: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def without(config: dict[str, Any], *fields: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in fields}


def test_llama_3_2() -> None:
    assert ModelConfig.from_hf(LLAMA_3_2, "config.json") == ModelConfig(
        architecture="llama",
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_q_heads=32,
        num_kv_heads=8,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=Llama3RopeScaling(
            factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
        ),
        max_position_embeddings=131072,
        tie_word_embeddings=True,
        attention_bias=False,
        eos_token_ids=(128001, 128008, 128009),
        bos_token_id=128000,
    )


def test_qwen_2_5() -> None:
    config = ModelConfig.from_hf(QWEN_2_5, "config.json")
    assert (config.architecture, config.head_dim, config.num_kv_heads) == ("qwen2", 64, 2)
    assert config.attention_bias
    assert (config.rope_theta, config.rope_scaling) == (1e6, None)
    assert config.eos_token_ids == (151645,)


@pytest.mark.parametrize(
    ("hf", "architecture"),
    [
        (transformers.LlamaConfig(architectures=["LlamaForCausalLM"]), "llama"),
        (transformers.Qwen2Config(architectures=["Qwen2ForCausalLM"], tie_word_embeddings=True), "qwen2"),
        (transformers.Qwen3Config(architectures=["Qwen3ForCausalLM"], head_dim=64), "qwen3"),
    ],
)
def test_what_transformers_saves(hf: Any, architecture: str, tmp_path: Path) -> None:
    hf.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 123456.0}
    hf.save_pretrained(tmp_path)
    saved = transformers.PreTrainedConfig.get_config_dict(tmp_path)[0]
    assert "rope_parameters" in saved
    config = ModelConfig.from_hf(saved, "config.json")
    assert config.architecture == architecture
    assert config.vocab_size == hf.vocab_size
    assert config.hidden_size == hf.hidden_size
    assert config.num_layers == hf.num_hidden_layers
    assert config.num_q_heads == hf.num_attention_heads
    assert config.num_kv_heads == hf.num_key_value_heads
    assert config.intermediate_size == hf.intermediate_size
    assert config.max_position_embeddings == hf.max_position_embeddings
    assert config.rms_norm_eps == hf.rms_norm_eps
    assert config.tie_word_embeddings == hf.tie_word_embeddings
    assert config.head_dim == getattr(hf, "head_dim", hf.hidden_size // hf.num_attention_heads)
    assert config.rope_theta == 123456.0
    assert config.rope_scaling == LinearRopeScaling(factor=2.0)


def test_fields_that_may_be_absent_have_transformers_defaults() -> None:
    optional = ("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "rope_scaling", "tie_word_embeddings")
    config = ModelConfig.from_hf(
        without(LLAMA_3_2, *optional, "max_position_embeddings", "eos_token_id"), "config.json"
    )
    reference = transformers.LlamaConfig()
    assert (config.num_kv_heads, config.head_dim) == (32, 64)
    assert config.rms_norm_eps == reference.rms_norm_eps
    assert config.rope_theta == reference.rope_parameters["rope_theta"]
    assert config.max_position_embeddings == reference.max_position_embeddings
    assert config.tie_word_embeddings is reference.tie_word_embeddings
    assert config.eos_token_ids == ()


def test_llama_3_1_says_type_for_rope_type() -> None:
    scaling = {"type" if key == "rope_type" else key: value for key, value in LLAMA_3_2["rope_scaling"].items()}
    assert ModelConfig.from_hf(LLAMA_3_2 | {"rope_scaling": scaling}, "x") == ModelConfig.from_hf(LLAMA_3_2, "x")


def test_generation_config_wins() -> None:
    generation = {"eos_token_id": [7, 5, 7], "bos_token_id": 3}
    config = ModelConfig.from_hf(QWEN_2_5, "config.json", generation)
    assert (config.eos_token_ids, config.bos_token_id) == ((7, 5), 3)
    config = ModelConfig.from_hf(QWEN_2_5, "config.json", {"temperature": 0.7})
    assert (config.eos_token_ids, config.bos_token_id) == ((151645,), 151643)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GemmaForCausalLM"]},
            "architecture GemmaForCausalLM is not supported; supported are Llama",
        ),
        ({"architectures": None, "model_type": "bert"}, "model_type='bert'.*Qwen3ForCausalLM"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config=\{'quant_method': 'gptq'\}.*GGUF"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported for llama: only 'silu'"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"use_sliding_window": True}, "use_sliding_window=True.*set it to false"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types="),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling of type 'dynamic' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_parameters of type 'yarn'.*'llama3'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "one set of rotary parameters"),
    ],
)
def test_what_is_not_computed_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"^some/config.json: .*{message}"):
        ModelConfig.from_hf(LLAMA_3_2 | changes, "some/config.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "hidden_size=None: must be an integer of at least 1"),
        ({"vocab_size": "many"}, "vocab_size='many'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True"),
        ({"num_key_value_heads": 5}, "num_attention_heads=32 is not a multiple of num_key_value_heads=5"),
        ({"head_dim": None, "hidden_size": 2047}, "hidden_size=2047 is not a multiple of num_attention_heads=32"),
        ({"head_dim": 65}, "head_dim=65: must be even"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan: must be a finite number above 0"),
        ({"rope_theta": -1}, "rope_theta=-1"),
        ({"rope_scaling": "linear"}, "rope_scaling='linear': must be an object"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor=None"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no': must be true or false"),
        ({"eos_token_id": "</s>"}, "eos_token_id='</s>': must be a token id"),
    ],
)
def test_malformed_fields_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"^some/config.json: {message}"):
        ModelConfig.from_hf(LLAMA_3_2 | changes, "some/config.json")


def test_attention_bias_is_always_there_in_qwen2() -> None:
    assert ModelConfig.from_hf(QWEN_2_5 | {"attention_bias": True}, "config.json").attention_bias


def test_token_ids() -> None:
    assert read_token_ids(None, "eos", "f") == ()
    assert read_token_ids(0, "eos", "f") == (0,)
    assert read_token_ids([3, 1, 3], "eos", "f") == (3, 1)
    for bad in (-1, True, [1, "2"], {"a": 1}):
        with pytest.raises(CheckpointError, match=r"^f: eos="):
            read_token_ids(bad, "eos", "f")
