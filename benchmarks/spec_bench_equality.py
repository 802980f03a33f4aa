"""Greedy outputs with speculation equal plain ones, token for token, over a whole file of questions.

    python benchmarks/spec_bench_equality.py --data spec_bench.jsonl [--out FILE] [--batch 16] [--max-tokens 64]

Every batch of first turns runs plainly and then with each scheme. Prints the counts and the first difference; exits
with 1 if there is any. With ``--out`` each batch is kept as it ends, and a second call with the same settings goes on
behind the last one. ``make equality DATA=FILE`` runs it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.progress import track

from pilotfish.bench import Prompt, encode_prompts, load_questions, run_batch, take
from pilotfish.config import DraftModel, EngineConfig, Mtp, Ngram, Speculation
from pilotfish.engine import Engine, load_engine
from pilotfish.types import SamplingParams

PLAIN = "none"


def main() -> int:
    args = parse_args()
    schemes: dict[str, Speculation | None] = {
        PLAIN: None,
        "ngram": Ngram(num_drafts=args.num_drafts),
        f"draft layers:{args.layers}": DraftModel(layers=args.layers, num_drafts=args.num_drafts),
    }
    if args.head is not None:
        schemes["mtp"] = Mtp(head=args.head, num_drafts=args.num_drafts)
    settings = {name: str(value) for name, value in vars(args).items() if name != "out"}
    results = read_results(args.out, settings)
    engines = {name: load_engine(args.model, engine_config(args, scheme)) for name, scheme in schemes.items()}
    questions = take(load_questions(args.data), args.limit)
    max_prompt_len = engines[PLAIN].max_model_len - args.max_tokens
    prompts, too_long = encode_prompts(questions, engines[PLAIN].tokenizer, max_prompt_len)
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
    starts = range(0, len(prompts), args.batch)
    for start in track(list(starts), description="batches", disable=not sys.stderr.isatty()):
        if start // args.batch < len(results):
            continue
        results.append(compare(engines, prompts[start : start + args.batch], params))
        if args.out is not None:
            with args.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(results[-1], ensure_ascii=False) + "\n")
    return report(results, schemes, len(too_long))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=None, help="file of questions; default: the package's own")
    parser.add_argument("--out", type=Path, default=None, help="keep results here and go on from them")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--head", default=None, help="also an MTP head: its folder")
    parser.add_argument("--num-drafts", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--limit", type=int, default=None)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--isa", default="auto")
    return parser.parse_args()


def engine_config(args: argparse.Namespace, speculation: Speculation | None) -> EngineConfig:
    return EngineConfig(
        dtype=args.dtype,
        isa=args.isa,
        max_num_seqs=args.batch,
        # Several engines are loaded at once: each takes a share of what is free.
        kv_cache_fraction=0.15,
        speculation=speculation,
    )


def compare(engines: Mapping[str, Engine], prompts: Sequence[Prompt], params: SamplingParams) -> dict[str, Any]:
    """One batch: how many tokens, and for each scheme how many were accepted drafts and which outputs differ."""
    token_ids = [prompt.token_ids for prompt in prompts]
    result: dict[str, Any] = {"num_prompts": len(prompts), "schemes": {}}
    plain: list[list[int]] = []
    for name, engine in engines.items():
        _, outputs = run_batch(engine, token_ids, params)
        tokens = [output.outputs[0].token_ids for output in outputs]
        if name == PLAIN:
            plain = tokens
            result["num_tokens"] = sum(map(len, tokens))
            continue
        differences = [
            {"question_id": prompt.question.question_id, "plain": ours, "with": theirs}
            for prompt, ours, theirs in zip(prompts, plain, tokens, strict=True)
            if ours != theirs
        ]
        accepted = sum(output.stats.speculation.num_accepted for output in outputs)
        result["schemes"][name] = {"num_accepted": accepted, "differences": differences}
    return result


def read_results(path: Path | None, settings: Mapping[str, str]) -> list[dict[str, Any]]:
    """What an earlier call with these settings kept; the file begins with the settings."""
    if path is None:
        return []
    if not path.exists():
        path.write_text(json.dumps(settings) + "\n", encoding="utf-8")
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    # A line that an interruption cut has no end; it is measured again.
    whole = lines[:-1]
    if not whole or json.loads(whole[0]) != settings:
        sys.exit(f"{path}: was made with other settings. Use the same ones, or another file.")
    path.write_text("".join(line + "\n" for line in whole), encoding="utf-8")
    return [json.loads(line) for line in whole[1:]]


def report(results: Sequence[dict[str, Any]], schemes: Mapping[str, object], num_too_long: int) -> int:
    """Print the counts; 1 if anything differs or nothing was compared."""
    num_prompts = sum(result["num_prompts"] for result in results)
    num_tokens = sum(result["num_tokens"] for result in results)
    print(f"{num_prompts} prompts, {num_tokens} tokens of plain greedy decoding ({num_too_long} prompts too long)")
    failed = num_prompts == 0
    for name in schemes:
        if name == PLAIN:
            continue
        own = [result["schemes"][name] for result in results]
        differences = [difference for result in own for difference in result["differences"]]
        accepted = sum(result["num_accepted"] for result in own)
        print(f"{name}: {num_prompts - len(differences)} of {num_prompts} equal, {accepted} drafts accepted")
        if differences:
            failed = True
            first = differences[0]
            pairs = zip(first["plain"], first["with"], strict=False)
            shorter = min(len(first["plain"]), len(first["with"]))
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
            print(f"  first: question {first['question_id']}, token {at}:")
            print(f"    plain ... {first['plain'][max(0, at - 4) : at + 4]}")
            print(f"    {name} ... {first['with'][max(0, at - 4) : at + 4]}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
