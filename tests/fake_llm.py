"""An LLM without a model, over the engine of :mod:`fakes`: text in, text out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fakes import LetterTokenizer, make_engine
from pilotfish.errors import RequestError
from pilotfish.llm import LLM


class Letters(LetterTokenizer):
    """Text in, too: the letters a to z, and a chat template that puts conversations behind one another."""

    has_chat_template = True

    def for_context(self, max_model_len: int) -> Letters:
        return self

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if not text.isascii():
            raise RequestError("letters only", "prompt")
        return [ord(letter) - ord("a") for letter in text]

    def apply_chat_template(
        self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        return self.encode(
            "".join(f"{message['role'][0]}{message['content']}" for message in messages) + "a" * add_generation_prompt
        )


def make_llm(**settings: Any) -> LLM:
    """``settings`` are those of :func:`fakes.make_engine`."""
    engine = make_engine(**settings)
    engine.tokenizer = Letters()  # type: ignore[assignment]
    return LLM.from_engine(engine)
