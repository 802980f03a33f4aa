"""The prompts that the head shipped for smollm2-135m was trained on: given ones in shares, and ones it wrote itself.

    python benchmarks/shipped_head_data.py train_prompts.jsonl --out prompts

writes ``prompts/given.jsonl`` and ``prompts/own.jsonl`` (20 minutes on two cores; the same command goes on after
Ctrl-C). docs/training.md has what comes after it. Lines of the given file are objects with ``source`` and ``messages``.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

MODEL = "smollm2-135m"
NUM_GSM8K = 3000
"""Grade-school mathematics would be half of all tokens otherwise: its answers are long."""
NUM_T0, MAX_T0_CHARACTERS = 5200, 1800
NUM_SUMMARIES, MIN_SUMMARY_CHARACTERS = 1600, 600
NUM_GENERAL = 4200
GERMAN = ("Die", "Der", "Das", "In", "Es", "Er", "Sie", "Ein", "Wir", "Nach")
QUESTIONS = (
    *("Who", "What", "Where", "When", "How", "Which", "Why"),
    *("who", "what is the", "when did", "where is the", "how many"),
)

Row = dict[str, Any]


def given_prompts(rows: Iterable[Row]) -> list[Row]:
    """A mix that no source dominates; passages of the T0 prompts that are left over become texts to summarise."""
    rng = random.Random(0)
    by_source: dict[str, list[Row]] = {}
    for row in rows:
        by_source.setdefault(row["source"], []).append(row)
    for rows_of_source in by_source.values():
        rng.shuffle(rows_of_source)
    t0 = by_source.pop("t0", [])
    chosen = by_source.pop("gsm8k-train", [])[:NUM_GSM8K]
    chosen += [row for row in t0[:NUM_T0] if len(row["messages"][-1]["content"]) < MAX_T0_CHARACTERS]
    chosen += list(_summaries(t0[NUM_T0:]))[:NUM_SUMMARIES]
    chosen += [row for rows_of_source in by_source.values() for row in rows_of_source]
    rng.shuffle(chosen)
    return chosen


def _summaries(rows: Iterable[Row]) -> Iterator[Row]:
    seen = set()
    for row in rows:
        passage = max(re.split(r"\n+", row["messages"][-1]["content"]), key=len).strip()
        if len(passage) >= MIN_SUMMARY_CHARACTERS and passage[:80] not in seen:
            seen.add(passage[:80])
            messages = [{"role": "user", "content": f"Summarize: {passage}"}]
            yield {"id": row["id"], "source": "t0-summarize", "messages": messages}


def own_prompts(folder: Path) -> list[Row]:
    """Prompts that the model writes: of any kind, short questions, and German sentences to translate."""
    kinds = [("general", NUM_GENERAL, "", 256)]
    kinds += [("de", 90, f"Translate German to English: {word}", 96) for word in GERMAN]
    kinds += [("qa", 110, word, 96) for word in QUESTIONS]
    rows: list[Row] = []
    for number, (source, count, begin, max_tokens) in enumerate(kinds):
        file = folder / f"own-{number}.jsonl"
        options = {"num": count, "out": file, "seed": number * 1_000_000, "max-tokens": max_tokens}
        command = [sys.executable, "-m", "pilotfish", "prompts", MODEL, "--max-num-seqs", "96"]
        command += [f"--{name}={value}" for name, value in options.items()]
        subprocess.run(command + ([f"--begin={begin}"] if begin else []), check=True)
        rows += [row | {"source": source} for row in read(file)]
    random.Random(0).shuffle(rows)
    return rows


def read(file: Path) -> Iterator[Row]:
    with file.open(encoding="utf-8", newline="\n") as lines:
        for line in lines:
            yield json.loads(line)


def write(file: Path, rows: Iterable[Row]) -> None:
    rows = list(rows)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{file}: {len(rows):,} prompts, {dict(Counter(row['source'] for row in rows))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("given", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    write(arguments.out / "given.jsonl", given_prompts(read(arguments.given)))
    write(arguments.out / "own.jsonl", own_prompts(arguments.out))


if __name__ == "__main__":
    main()
