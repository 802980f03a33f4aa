"""The README of an exported head: what the folder is and how its engine serves it."""

from __future__ import annotations

import json
from collections.abc import Sequence

from pilotfish.models.heads import TargetStamp

__all__ = ["readme"]

_ENGINES = {
    "eagle3-vllm": "vLLM",
    "eagle3-sglang": "SGLang",
    "speculators": "vLLM and the Speculators library",
    "eagle-vllm": "vLLM",
    "eagle-sglang": "SGLang",
    "deepseek-mtp": "tools that know DeepSeek's names",
}


def readme(
    target: TargetStamp, name: str, form: str, num_drafts: int, notes: Sequence[str], *, has_token_map: bool
) -> str:
    """Markdown. ``FOLDER`` stands for the folder, which its reader may have moved.

    Args:
        target: whose head it is.
        name: what other engines find the target by.
        form: the layout.
        num_drafts: recommended drafts a step.
        notes: what whoever serves it must know.
        has_token_map: there is a file ``token_map.pt``.
    """
    lines = [
        f"# Draft head of {name}",
        "",
        f"Written by `pilotfish export --format {form}` for {_ENGINES[form]}. It drafts for one target only: "
        f"{name}, {target.num_layers} layers, hidden size {target.hidden_size}, {target.vocab_size} tokens.",
    ]
    if target.embedding_sha256 is not None:
        lines += ["", f"SHA-256 of that target's embedding in bfloat16: `{target.embedding_sha256}`."]
    command = _command(name, form, num_drafts, has_token_map)
    lines += ["", "## Use it", "", "```sh", command, "```", "", "FOLDER is this folder."]
    for note in notes:
        lines += ["", note]
    return "\n".join(lines) + "\n"


def _command(target: str, form: str, num_drafts: int, has_token_map: bool) -> str:
    match form:
        case "eagle3-vllm" | "eagle-vllm":
            method = form.removesuffix("-vllm")
            settings = {"method": method, "model": "FOLDER", "num_speculative_tokens": num_drafts}
            return f"vllm serve {target} --speculative-config '{json.dumps(settings)}'"
        case "speculators":
            return "vllm serve FOLDER   # the target and the number of drafts are in its config.json"
        case "eagle3-sglang":
            return _sglang(target, "EAGLE3", num_drafts, "")
        case "eagle-sglang":
            token_map = " --speculative-token-map FOLDER/token_map.pt" if has_token_map else ""
            return _sglang(target, "EAGLE", num_drafts, token_map)
    return f"pilotfish generate --model {target} --head FOLDER 'Hello'"


def _sglang(target: str, algorithm: str, num_drafts: int, more: str) -> str:
    return (
        f"python -m sglang.launch_server --model-path {target} \\\n"
        f"    --speculative-algorithm {algorithm} --speculative-draft-model-path FOLDER \\\n"
        f"    --speculative-num-steps {num_drafts} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {num_drafts + 1}{more}"
    )
