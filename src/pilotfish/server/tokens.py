"""``/tokenize`` and ``/detokenize``, in vLLM's shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pilotfish.errors import RequestError
from pilotfish.server.errors import bad_request, from_request_error
from pilotfish.server.host import EngineHost
from pilotfish.server.protocol.body import parse_json, validated
from pilotfish.server.protocol.prompts import chat_tokens, check_token_ids
from pilotfish.server.protocol.requests import DetokenizeRequest, TokenizeRequest

__all__ = ["Tokens"]


class Tokens:
    """Text to tokens and back.

    Args:
        host: of the engine whose tokenizer it is.
        check_model: raises for a model that is not served.
    """

    def __init__(self, host: EngineHost, check_model: Callable[[str | None], None]) -> None:
        self._host = host
        self._check_model = check_model

    def tokenize(self, raw: bytes) -> dict[str, Any]:
        """``POST /tokenize``.

        Raises:
            ApiError: 400 or 404.
        """
        request = validated(TokenizeRequest, parse_json(raw))
        self._check_model(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise bad_request("prompt and messages: send exactly one of them.", "prompt")
        tokenizer = self._host.tokenizer
        if request.messages is not None:
            token_ids = chat_tokens(tokenizer, request.messages, add_generation_prompt=request.add_generation_prompt)
        else:
            assert request.prompt is not None
            try:
                token_ids = tokenizer.encode(request.prompt, add_special_tokens=request.add_special_tokens)
            except RequestError as error:
                raise from_request_error(error) from None
        result: dict[str, Any] = {
            "count": len(token_ids),
            "max_model_len": self._host.max_model_len,
            "tokens": token_ids,
        }
        if request.return_token_strs:
            result["token_strs"] = [tokenizer.token_text(token_id) for token_id in token_ids]
        return result

    def detokenize(self, raw: bytes) -> dict[str, Any]:
        """``POST /detokenize``.

        Raises:
            ApiError: 400 or 404.
        """
        request = validated(DetokenizeRequest, parse_json(raw))
        self._check_model(request.model)
        tokenizer = self._host.tokenizer
        # Padding of the embedding has ids but no text.
        limit = min(self._host.vocab_size, tokenizer.vocab_size)
        token_ids = check_token_ids(request.tokens, limit, "tokens") if request.tokens else []
        return {"prompt": tokenizer.decode(token_ids, skip_special_tokens=False)}
