"""Writes small GGUF files: llama.cpp's side of the conversion, stated independently of the code under test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from gguf import TokenType
from tokenizers.pre_tokenizers import ByteLevel

_CONFIGS: Mapping[str, Any] = {
    "llama": transformers.LlamaConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
}

_PARTS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The tokenizer's part of a GGUF file's metadata."""

    model: str
    tokens: Sequence[str]
    types: Sequence[TokenType]
    pre: str | None = None
    merges: Sequence[str] | None = None
    scores: Sequence[float] | None = None
    settings: Mapping[str, int | bool | str] = field(default_factory=dict)

    def write(self, writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model(self.model)
        writer.add_token_list(list(self.tokens))
        writer.add_token_types([int(kind) for kind in self.types])
        if self.pre is not None:
            writer.add_tokenizer_pre(self.pre)
        if self.merges is not None:
            writer.add_token_merges(list(self.merges))
        if self.scores is not None:
            writer.add_token_scores(list(self.scores))
        for key, value in self.settings.items():
            if isinstance(value, bool):
                writer.add_bool(f"tokenizer.{key}", value)
            elif isinstance(value, int):
                writer.add_uint32(f"tokenizer.{key}", value)
            else:
                writer.add_string(f"tokenizer.{key}", value)


CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('Unknown role ' + message['role']) }}{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level_vocabulary(
    pre: str | None = "smollm", settings: Mapping[str, int | bool | str] | None = None
) -> Vocabulary:
    """All 256 bytes, a few merges, three control tokens and a user-defined one; 1 is BOS, 2 is EOS."""
    merges = ["Ġ Ġ", "h e", "l l", "he ll", "hell o", "Ġ hello", "1 2", "Ġ 1", "12 3", "123 4", "Ċ Ċ"]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>"]
    normal = [*sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in merges)]
    return Vocabulary(
        model="gpt2",
        pre=pre,
        tokens=[*special, *normal],
        types=[TokenType.CONTROL] * 3 + [TokenType.USER_DEFINED] + [TokenType.NORMAL] * len(normal),
        merges=merges,
        settings={
            "ggml.bos_token_id": 1,
            "ggml.eos_token_id": 2,
            "ggml.add_bos_token": False,
            "chat_template": CHAT_TEMPLATE,
            **(settings or {}),
        },
    )


def tiny_model(architecture: str, *, tied: bool = True, **changes: Any) -> transformers.PreTrainedModel:
    """A random float32 model of transformers' own class, with rows of 256 so that K-quants fit."""
    settings: dict[str, Any] = {
        "vocab_size": 288,
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "tie_word_embeddings": tied,
        "initializer_range": 0.1,
    }
    if architecture == "qwen3":
        settings["head_dim"] = 32  # 4 heads of 32 are not the residual stream's 256
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = _CONFIGS[architecture](**(settings | changes))
        model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 1:
                    parameter.copy_(torch.rand_like(parameter) + (0.5 if "norm" in name else -0.5))
    return model


def tensors_of(model: transformers.PreTrainedModel) -> dict[str, npt.NDArray[np.float32]]:
    """The model's tensors as a checkpoint has them: no ``lm_head.weight`` where it is tied."""
    tied = model.config.tie_word_embeddings
    state = model.state_dict().items()
    return {name: tensor.numpy() for name, tensor in state if not (tied and name == "lm_head.weight")}


def gguf_name(name: str) -> str:
    """llama.cpp's name of a Hugging Face tensor."""
    part, _, suffix = name.rpartition(".")
    if not part.startswith("model.layers."):
        return f"{_PARTS[part]}.{suffix}"
    _, _, layer, rest = part.split(".", 3)
    return f"blk.{layer}.{_PARTS[rest]}.{suffix}"


def permuted(weight: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Row i of a head's first half goes to 2i, row i of its second half to 2i + 1: one row at a time."""
    head_dim = weight.shape[0] // num_heads
    result = np.empty_like(weight)
    for row in range(weight.shape[0]):
        head, within = divmod(row, head_dim)
        half, index = divmod(within, head_dim // 2)
        result[head * head_dim + 2 * index + half] = weight[row]
    return result


def write_gguf(
    path: Path,
    model: transformers.PreTrainedModel,
    *,
    kind: Kind = Kind.F32,
    encoded: Mapping[str, npt.NDArray[np.uint8]] | None = None,
    vocabulary: Vocabulary | None = None,
    extra: Mapping[str, npt.NDArray[np.float32]] | None = None,
    strings: Mapping[str, str] | None = None,
    integers: Mapping[str, int] | None = None,
    floats: Mapping[str, float] | None = None,
    leave_out: Sequence[str] = (),
) -> Path:
    """Write ``model`` as llama.cpp's converter does: matrices as ``kind``, vectors as F32.

    Args:
        encoded: blocks of ``kind`` to write in place of a Hugging Face tensor's values.
        extra: more tensors, by GGUF name.
        strings, integers, floats: more metadata.
        leave_out: Hugging Face names of tensors that the file lacks.
    """
    config = model.config
    architecture = config.model_type
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if architecture == "qwen3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    for key, text in (strings or {}).items():
        writer.add_string(key, text)
    for key, number in (integers or {}).items():
        writer.add_uint32(key, number)
    for key, value in (floats or {}).items():
        writer.add_float32(key, value)
    (vocabulary or byte_level_vocabulary()).write(writer)
    for name, values in tensors_of(model).items():
        if name in leave_out:
            continue
        if encoded is not None and name in encoded:
            writer.add_tensor(gguf_name(name), encoded[name], raw_dtype=kind)
            continue
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = permuted(values, heads)
        if values.ndim == 1:
            writer.add_tensor(gguf_name(name), values)
        else:
            writer.add_tensor(gguf_name(name), gguf.quantize(values, kind), raw_dtype=kind)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
