"""Decoding: tokens a second at several batch sizes and prompt lengths, beside transformers in the same run.

    python benchmarks/decode.py [--model smollm2-135m] [--batches 1,8,32] [--prompts 32,512] [--json]

Rounds alternate between the two, so that what else the machine does hits both; figures are medians of rounds, the
speedup is the median of the rounds' ratios. A step's time is split into native kernels and everything else (scheduling,
batch assembly, sampling's host side, detokenising). ``bandwidth`` is the weights' bytes over a step's time, as a
fraction of what reading memory gives on the same threads. ``--rows`` measures how a step's cost grows with the number
of rows of one sequence, which is what verifying a draft costs.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
from common import PilotfishRunner, TransformersRunner, median, report, seconds
from rich.progress import track

from pilotfish import _native
from pilotfish.config import EngineConfig
from pilotfish.engine import Engine
from pilotfish.runner import Segment
from pilotfish.runner.recorded import RecordedRunner


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--prompts", default="32,512")
    parser.add_argument("--rows", default="", help="measure a step of this many rows instead, e.g. 1,2,4,8,16")
    parser.add_argument("--context", type=int, default=128, help="tokens before the rows of --rows")
    parser.add_argument("--steps", type=int, default=32, help="tokens a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    batches = [int(size) for size in args.batches.split(",")]

    config = EngineConfig(
        dtype=args.dtype,
        isa=args.isa,
        threads=args.threads,
        max_num_seqs=max(batches),
        backend="native",
        speculation=None,
    )
    ours = PilotfishRunner(args.model, config)
    engine = ours.engine
    runner = engine.runner
    assert isinstance(runner, RecordedRunner) and engine.config.threads is not None
    facts: dict[str, Any] = {
        "model": args.model,
        "dtype": args.dtype,
        "isa": runner.ops.isa,
        "threads": engine.config.threads,
        "rounds": args.rounds,
        "read_bandwidth_gb_per_second": read_bandwidth(engine.config.threads) / 1e9,
    }
    if args.rows:
        counts = [int(rows) for rows in args.rows.split(",")]
        report("decode, rows of one sequence", row_costs(engine, counts, args.context, args.rounds), facts, args.json)
        return

    theirs = TransformersRunner(args.model, getattr(torch, args.dtype), engine.config.threads)
    results = []
    for prompt_len in (int(length) for length in args.prompts.split(",")):
        for batch in batches:
            results.append(measure(ours, theirs, batch, prompt_len, args, facts["read_bandwidth_gb_per_second"] * 1e9))
    report("decode", results, facts, args.json)


def measure(
    ours: PilotfishRunner, theirs: TransformersRunner, batch: int, prompt_len: int, args: Any, bandwidth: float
) -> dict[str, Any]:
    """One batch size and prompt length: rounds of ``args.steps`` tokens of each engine, in turn."""
    runner = ours.engine.runner
    assert isinstance(runner, RecordedRunner)
    text = ours.prompt(prompt_len + batch)
    prompts = [text[i : i + prompt_len] for i in range(batch)]
    ours_s, theirs_s, kernel_s = [], [], []
    rounds = [False, *[True] * args.rounds]
    for measured in track(rounds, description=f"batch {batch}, prompt {prompt_len}", disable=not sys.stderr.isatty()):
        # A first token comes with the prompt; batches whose prompts take several steps begin when all have started.
        ours.start(prompts, max_tokens=args.steps + 1 + batch)
        before = runner.native_ns
        elapsed = seconds(lambda: [ours.engine.step() for _ in range(args.steps)])
        native = (runner.native_ns - before) / 1e9
        ours.finish()
        tokens, cache = theirs.prefill(prompts)
        other = seconds(lambda t=tokens, c=cache: theirs.decode(t, c, args.steps))
        if measured:
            ours_s.append(elapsed / args.steps)
            kernel_s.append(native / args.steps)
            theirs_s.append(other / args.steps)
    step = median(ours_s)
    weights = sum(p.numel() * p.element_size() for p in theirs.model.parameters())
    return {
        "prompt": prompt_len,
        "batch": batch,
        "step_ms": step * 1e3,
        "kernels_ms": median(kernel_s) * 1e3,
        "other_percent": 100 * median([1 - k / s for k, s in zip(kernel_s, ours_s, strict=True)]),
        "bandwidth": weights / step / bandwidth,
        "tokens_per_second": batch / step,
        "transformers_tokens_per_second": batch / median(theirs_s),
        "speedup": median([b / a for a, b in zip(ours_s, theirs_s, strict=True)]),
    }


def row_costs(engine: Engine, counts: list[int], context: int, rounds: int) -> list[dict[str, Any]]:
    """Time of one forward pass and logits for the last n rows of one sequence, counts in turn within each round."""
    runner = engine.runner
    pages = engine.pool.allocate(engine.pool.pages_for(context + max(counts)))
    assert pages is not None
    tokens = list(range(100, 100 + context))
    for start in range(0, context, 256):
        runner.forward([Segment(0, tokens[start : start + 256], start, pages, 0)])
    times: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(rounds * 4):
        for count in counts:
            segment = Segment(0, list(range(200, 200 + count)), context, pages, min(count, engine.config.max_num_seqs))
            start_s = time.perf_counter()
            runner.forward([segment])
            times[count].append(time.perf_counter() - start_s)
    engine.pool.release(pages)
    one = times[counts[0]]
    return [
        {
            "rows": count,
            "step_ms": median(times[count]) * 1e3,
            "cost": median([t / o for t, o in zip(times[count], one, strict=True)]),
        }
        for count in counts
    ]


def read_bandwidth(threads: int) -> float:
    """Bytes a second that this many threads read from memory: the best of several passes over 512 MB."""
    team, buffer = _native.Team(threads), _native.HugeBuffer(512 << 20)
    buffer.array().fill(1)  # pages that were never written are not in memory
    return max(buffer.num_bytes / seconds(lambda: _native.read_all(team, buffer)) for _ in range(9))


if __name__ == "__main__":
    main()
