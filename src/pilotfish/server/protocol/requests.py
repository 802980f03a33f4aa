"""The fields of each request, by name and JSON type. Ranges are checked by the engine's own parameters."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

__all__ = [
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "GenerationRequest",
    "SpeculationOptions",
    "StreamOptions",
    "TokenizeRequest",
]


_STRING: dict[str, Any] = {"type": "string"}
_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer"}}
_OBJECT: dict[str, Any] = {"type": "object"}


def _one_of(*schemas: dict[str, Any]) -> WithJsonSchema:
    """Describes a field that is checked by hand: Pydantic would name every alternative that a value is not."""
    return WithJsonSchema({"anyOf": list(schemas)})


_Prompt = Annotated[
    Any,
    _one_of(_STRING, _IDS, {"type": "array", "items": _STRING}, {"type": "array", "items": _IDS}),
]
_Stop = Annotated[Any, _one_of(_STRING, {"type": "array", "items": _STRING}, {"type": "null"})]
_JsonSchema = Annotated[Any, _one_of(_OBJECT, _STRING, {"type": "null"})]
_Message = Annotated[
    Any,
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "role": {"enum": ["system", "developer", "user", "assistant"]},
                "content": {"anyOf": [_STRING, {"type": "array", "items": _OBJECT}]},
            },
            "required": ["role", "content"],
        }
    ),
]


class _Object(BaseModel):
    """Nothing is converted and nothing unknown is let through."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Object):
    """What a stream carries beside text. ``include_obfuscation`` is taken and ignored."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class SpeculationOptions(_Object):
    """Speculation for one request: off, or with at most so many drafts a step."""

    enabled: bool = True
    num_drafts: int | None = None


class JsonSchemaFormat(_Object):
    """``response_format.json_schema``. ``name``, ``description`` and ``strict`` change nothing here: it is strict."""

    schema_: dict[str, Any] = Field(alias="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(_Object):
    """What form the answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOptions(_Object):
    """vLLM's ``structured_outputs``: exactly one of them."""

    json_: _JsonSchema = Field(default=None, alias="json", description="A JSON schema, as an object or as JSON text.")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = Field(default=None, description="A Lark grammar.")
    json_object: bool | None = None


class GenerationRequest(_Object):
    """What chat and completions have in common."""

    model: str | None = Field(default=None, description="A name of /v1/models; may be left out.")
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(default=None, description="Token id -> value from -100 to 100.")
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: _Stop = Field(default=None, description="A string, or a list of strings.")
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOptions | None = None
    guided_json: _JsonSchema = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    speculation: SpeculationOptions | None = None
    include_speculation_stats: bool = False


class ChatRequest(GenerationRequest):
    """``POST /v1/chat/completions``."""

    messages: list[_Message] = Field(description="Objects with role and content, oldest first.")
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None


class CompletionRequest(GenerationRequest):
    """``POST /v1/completions``."""

    prompt: _Prompt = Field(description="A text, its token ids, or a list of either.")
    logprobs: int | None = None
    best_of: int | None = None


class TokenizeRequest(_Object):
    """``POST /tokenize``: a prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[_Message] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(_Object):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: list[int]
