"""Outputs as JSON and as a line of statistics."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from pilotfish.types import CompletionOutput, Logprob, RequestOutput

__all__ = ["output_json", "stats_line", "to_json"]


def output_json(output: RequestOutput, token_text: Callable[[int], str]) -> dict[str, Any]:
    """The object that ``generate --json`` prints.

    ``text``, ``token_ids`` and ``finish_reason`` are completion 0's; ``completion_tokens`` counts all completions.
    ``choices`` lists them where there are several. ``logprobs`` is there if the request asked for it.
    """
    completions = [_completion_json(completion, token_text) for completion in output.outputs]
    stats = output.stats
    result = {
        **completions[0],
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": sum(len(completion.token_ids) for completion in output.outputs),
        "stats": {
            "ttft_ms": stats.ttft_ms,
            "itl_ms_p50": stats.itl_ms_p50,
            "tokens_per_second": stats.tokens_per_second,
            "num_steps": stats.num_steps,
            "speculation": stats.speculation.as_dict(),
        },
    }
    if len(completions) > 1:
        result["choices"] = [{"index": i, **completion} for i, completion in enumerate(completions)]
    return result


def to_json(value: Any) -> str:
    """JSON on one line; numbers that JSON cannot write (NaN, infinities) become null."""
    return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)


def stats_line(output: RequestOutput) -> str:
    """Such as "48 tokens, TTFT 35 ms, 78.3 tokens/s".

    With speculation also "2.10 tokens a step (2.60 with drafts, 53% of drafts accepted)": the first figure counts every
    step of completion 0, the second those that verified a draft.
    """
    stats = output.stats
    num_tokens = sum(len(completion.token_ids) for completion in output.outputs)
    parts = [f"{num_tokens} token{'' if num_tokens == 1 else 's'}"]
    if stats.ttft_ms is not None:
        parts.append(f"TTFT {stats.ttft_ms:.0f} ms")
    if stats.tokens_per_second is not None:
        each = " each" if len(output.outputs) > 1 else ""
        parts.append(f"{stats.tokens_per_second:.1f} tokens/s{each}")
    if stats.speculation.scheme != "none":
        parts.append(_speculation_text(output))
    return ", ".join(parts)


def _speculation_text(output: RequestOutput) -> str:
    stats, speculation = output.stats, output.stats.speculation
    per_step = len(output.outputs[0].token_ids) / max(stats.num_steps, 1)
    length = speculation.mean_accepted_length
    if length is None:
        detail = f"{speculation.scheme} proposed no draft"
    else:
        rate = speculation.num_accepted / speculation.num_drafted
        detail = f"{length:.2f} with drafts, {rate:.0%} of drafts accepted"
    return f"{per_step:.2f} tokens a step ({detail})" + ("" if speculation.exact else ", LOSSY verification")


def _completion_json(completion: CompletionOutput, token_text: Callable[[int], str]) -> dict[str, Any]:
    result: dict[str, Any] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
    }
    if completion.logprobs is not None:
        result["logprobs"] = [
            {
                **_logprob_json(token, entries[token], token_text),
                "top": [_logprob_json(t, entry, token_text) for t, entry in _by_rank(entries)],
            }
            for token, entries in zip(completion.token_ids, completion.logprobs, strict=True)
        ]
    return result


def _by_rank(entries: dict[int, Logprob]) -> list[tuple[int, Logprob]]:
    return sorted(entries.items(), key=lambda item: item[1].rank)


def _logprob_json(token: int, entry: Logprob, token_text: Callable[[int], str]) -> dict[str, Any]:
    text = token_text(token) if entry.decoded_token is None else entry.decoded_token
    return {"token_id": token, "token": text, "logprob": entry.logprob, "rank": entry.rank}


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value
