"""Prefill: tokens a second over a whole prompt, beside transformers in the same run.

    python benchmarks/prefill.py [--model smollm2-135m] [--lengths 128,512,2048] [--json]

Rounds alternate between the two, so that what else the machine does hits both; figures are medians.
"""

from __future__ import annotations

import argparse
import sys

import torch
from common import PilotfishRunner, TransformersRunner, median, report, seconds
from rich.progress import track

from pilotfish.config import EngineConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--lengths", default="128,512,2048")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    lengths = [int(length) for length in args.lengths.split(",")]

    # Without the prefix cache: every round computes its prompt.
    config = EngineConfig(
        dtype=args.dtype, threads=args.threads, max_num_seqs=1, enable_prefix_caching=False, speculation=None
    )
    ours = PilotfishRunner(args.model, config)
    threads = ours.engine.config.threads
    assert threads is not None
    theirs = TransformersRunner(args.model, getattr(torch, args.dtype), threads)
    rows = []
    for length in lengths:
        prompt = ours.prompt(length)
        times: dict[str, list[float]] = {"pilotfish": [], "transformers": []}
        for measured in track(
            [False, *[True] * args.rounds], description=f"{length} tokens", disable=not sys.stderr.isatty()
        ):
            ours_s = seconds(lambda p=prompt: ours.start([p], max_tokens=1))
            theirs_s = seconds(lambda p=prompt: theirs.prefill([p]))
            if measured:
                times["pilotfish"].append(ours_s)
                times["transformers"].append(theirs_s)
        ratios = [b / a for a, b in zip(times["pilotfish"], times["transformers"], strict=True)]
        rows.append(
            {
                "prompt": length,
                "pilotfish_ms": median(times["pilotfish"]) * 1e3,
                "transformers_ms": median(times["transformers"]) * 1e3,
                "pilotfish_tokens_per_second": length / median(times["pilotfish"]),
                "transformers_tokens_per_second": length / median(times["transformers"]),
                "speedup": median(ratios),
            }
        )
    facts = {"model": args.model, "dtype": args.dtype, "threads": threads, "rounds": args.rounds}
    report("prefill", rows, facts, args.json)


if __name__ == "__main__":
    main()
