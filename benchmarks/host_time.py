"""The host's share of a step that speculation costs: propose, accept, commit.

    python benchmarks/host_time.py [--model smollm2-135m] [--batches 1,16] [--layers 8] [--head DIR] [--steps 100]
        [--json]

Wall time of each part less the time in native kernels within it (the draft's forward passes, the sampler's argmax), as
a percentage of the whole step. ``commit`` hands out tokens and text and tells the scheme, which prepares its next step.
``plain`` is the same with no scheme: what plain decoding pays for choosing and handing out tokens. Figures are medians
over steps.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from common import PilotfishRunner, median, report

from pilotfish.config import DraftModel, EngineConfig, Mtp, Ngram, Speculation
from pilotfish.engine import Engine
from pilotfish.engine import engine as engine_module
from pilotfish.runner.recorded import RecordedRunner
from pilotfish.runner.recorded_head import RecordedHeadRunner

_PARTS = ("propose", "accept", "commit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--head", default=None, help="also an MTP head: its folder")
    parser.add_argument("--num-drafts", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    batches = [int(batch) for batch in args.batches.split(",")]
    schemes: dict[str, Speculation | None] = {
        "plain": None,
        "ngram": Ngram(num_drafts=args.num_drafts),
        f"draft layers:{args.layers}": DraftModel(layers=args.layers, num_drafts=args.num_drafts),
    }
    if args.head is not None:
        schemes["mtp"] = Mtp(head=args.head, num_drafts=args.num_drafts)
    rows = []
    for name, speculation in schemes.items():
        config = EngineConfig(
            dtype=args.dtype,
            threads=args.threads,
            max_num_seqs=max(batches),
            backend="native",
            kv_cache_fraction=0.15,
            speculation=speculation,
        )
        ours = PilotfishRunner(args.model, config)
        rows += [measure(ours, name, batch, args) for batch in batches]
    facts = {key: getattr(args, key) for key in ("model", "dtype", "num_drafts", "prompt", "steps")}
    report("host time of speculation, % of a step", rows, facts, args.json)


@dataclass(slots=True)
class Clock:
    """Host seconds of the parts of the step under way: wall time less time in native kernels."""

    runners: list[RecordedRunner | RecordedHeadRunner]
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_PARTS, 0.0))

    def native_s(self) -> float:
        # Both models share one set of ops, whose own kernels must not be counted twice.
        eager = self.runners[0].ops.eager_ns
        return (sum(runner.native_ns - eager for runner in self.runners) + eager) / 1e9

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any) -> Any:
            start, native = time.perf_counter(), self.native_s()
            result = call(*args)
            self.parts[part] += time.perf_counter() - start - (self.native_s() - native)
            return result

        return wrapper


def measure(ours: PilotfishRunner, scheme: str, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """Decode ``args.steps`` steps with every part timed."""
    engine = ours.engine
    clock = Clock(recorded_runners(engine))
    text = ours.prompt(args.prompt + batch)
    # Each step may emit num_drafts + 1 tokens; rows must not finish while they are timed.
    room = args.steps * (args.num_drafts + 1) + batch + 1
    ours.start([text[i : i + args.prompt] for i in range(batch)], max_tokens=room)
    plain = engine.proposer.propose, engine_module.verify, engine._commit
    steps: list[dict[str, float]] = []
    engine.proposer.propose = clock.timed("propose", plain[0])  # type: ignore[method-assign]
    engine_module.verify = clock.timed("accept", plain[1])
    engine._commit = clock.timed("commit", plain[2])  # type: ignore[method-assign]
    try:
        for _ in range(args.steps):
            clock.parts = dict.fromkeys(_PARTS, 0.0)
            start = time.perf_counter()
            engine.step()
            steps.append({**clock.parts, "step": time.perf_counter() - start})
    finally:
        del engine.proposer.propose, engine._commit
        engine_module.verify = plain[1]
    for request_id in list(engine._requests):
        engine.abort(request_id)
    shares = {part: 100 * median([step[part] / step["step"] for step in steps]) for part in _PARTS}
    total = 100 * median([sum(step[part] for part in _PARTS) / step["step"] for step in steps])
    return {
        "scheme": scheme,
        "batch": batch,
        "step_ms": 1e3 * median([step["step"] for step in steps]),
        **{f"{part}_percent": share for part, share in shares.items()},
        "together_percent": total,
        "host_us_per_row": 1e6 * median([sum(step[part] for part in _PARTS) for step in steps]) / batch,
    }


def recorded_runners(engine: Engine) -> list[RecordedRunner | RecordedHeadRunner]:
    """The target's runner and, where there is one, the draft's or head's."""
    runners = [engine.runner, getattr(engine.proposer, "runner", getattr(engine.proposer, "_runner", None))]
    return [runner for runner in runners if isinstance(runner, (RecordedRunner, RecordedHeadRunner))]


if __name__ == "__main__":
    main()
