"""Structured outputs with speculation: valid, and the same as without it.

    python benchmarks/structured.py [--scheme auto|ngram|draft] [--per-schema 10] [--max-tokens 96]

Asks for outputs of twenty schemas at several temperatures, each with a seed, with speculation and without. Every output
must fit its schema, by ``jsonschema``, or have been cut off by ``max_tokens``; every pair must be equal. Prints a table
and exits with 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jsonschema
from rich.console import Console
from rich.table import Table
from structured_schemas import SCHEMAS

from pilotfish import LLM, RequestOutput, SamplingParams, StructuredOutputs
from pilotfish.config import DraftModel, Ngram, SpeculationChoice

TEMPERATURES = (0.0, 0.5, 0.8, 1.0, 1.3)

SCHEMES: dict[str, SpeculationChoice] = {
    "auto": "auto",
    "ngram": Ngram(num_drafts=4, min_ngram=1),
    "draft": DraftModel(layers=12, num_drafts=4),
}


def main() -> int:
    args = parse_args()
    llm = LLM(
        args.model, speculation=SCHEMES[args.scheme], max_model_len=1024, max_num_seqs=args.batch, threads=args.threads
    )
    rows, failures = [], []
    for name, (question, schema) in SCHEMAS.items():
        asked = [
            SamplingParams(
                temperature=TEMPERATURES[i % len(TEMPERATURES)],
                seed=i,
                max_tokens=args.max_tokens,
                structured_outputs=StructuredOutputs(json=schema),
            )
            for i in range(args.per_schema)
        ]
        messages = [
            [{"role": "user", "content": f"{question} Answer with JSON, number {i}."}] for i in range(len(asked))
        ]
        with_drafts = llm.chat(messages, asked)
        plain = llm.chat(messages, [replace(params, speculate=False) for params in asked])
        row, problems = judge(name, schema, with_drafts, plain)
        rows.append(row)
        failures += problems
    report(rows, failures)
    return int(bool(failures) or not rows)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--scheme", choices=list(SCHEMES), default="auto")
    parser.add_argument("--per-schema", type=int, default=10)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--threads", type=int, default=None)
    return parser.parse_args()


def judge(
    name: str, schema: dict[str, Any], with_drafts: Sequence[RequestOutput], plain: Sequence[RequestOutput]
) -> tuple[dict[str, Any], list[str]]:
    """A line of the table, and what is wrong."""
    problems: list[str] = []
    num_valid = num_cut = num_equal = 0
    for ours, theirs in zip(with_drafts, plain, strict=True):
        problem = problem_of(ours, schema)
        completion = ours.outputs[0] if ours.outputs else None
        if problem is not None:
            problems.append(f"{name}: {problem}")
        elif completion is not None and completion.finish_reason == "length":
            num_cut += 1
        else:
            num_valid += 1
        if [c.token_ids for c in ours.outputs] == [c.token_ids for c in theirs.outputs]:
            num_equal += 1
        else:
            texts = [[c.text for c in output.outputs] for output in (ours, theirs)]
            problems.append(f"{name}: {texts[0]} with speculation, {texts[1]} without")
    stats = [output.stats.speculation for output in with_drafts]
    steps = sum(s.num_steps for s in stats)
    return {
        "schema": name,
        "outputs": len(with_drafts),
        "valid": num_valid,
        "cut off": num_cut,
        "equal": num_equal,
        "drafted": sum(s.num_drafted for s in stats),
        "accepted": sum(s.num_accepted for s in stats),
        "tokens a step": round(sum(s.num_emitted for s in stats) / steps, 2) if steps else None,
    }, problems


def problem_of(output: RequestOutput, schema: dict[str, Any]) -> str | None:
    """What is wrong with one output; None if it fits the schema or was cut off."""
    if output.error is not None:
        return str(output.error)
    completion = output.outputs[0]
    if completion.finish_reason == "length":
        return None
    if completion.finish_reason != "stop":
        return f"finish_reason={completion.finish_reason!r}"
    try:
        jsonschema.validate(json.loads(completion.text), schema, cls=jsonschema.Draft202012Validator)
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{completion.text!r}: {error}"
    return None


def report(rows: Sequence[dict[str, Any]], failures: Sequence[str]) -> None:
    console = Console()
    table = Table(title="Structured outputs with speculation")
    for title in rows[0]:
        table.add_column(title, justify="left" if title == "schema" else "right")
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row.values()))
    console.print(table)
    totals = {key: sum(row[key] for row in rows) for key in ("outputs", "valid", "cut off", "equal")}
    console.print(
        f"{totals['outputs']} outputs: {totals['valid']} valid, {totals['cut off']} cut off by max_tokens, "
        f"{totals['equal']} equal without speculation; {len(failures)} failures",
        highlight=False,
    )
    for failure in failures[:10]:
        console.print(f"  {failure}", highlight=False, markup=False)


if __name__ == "__main__":
    sys.exit(main())
