"""Time of all linear layers of a SmolLM2-135M-shaped model, with cold weights: the cost that decides a step's.

    python benchmarks/linear.py [--isa amx ...] [--rows 1 16 512 ...] [--threads 2] [--repeats 15] [--json FILE]

Every measurement walks through all layers and the output head (269 MB in bfloat16), so that each weight comes from
memory as it does in a real step. All cases, torch's linear layers and a plain read of as many bytes take turns within
each repeat; minima and medians are over the repeats. Rows above 64 leave the head out, as prefill does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from pilotfish import _native
from pilotfish.ops import Linear
from pilotfish.ops.native import NativeOps

HIDDEN, QKV, INTERMEDIATE, VOCAB, LAYERS = 576, 960, 1536, 49152, 30
SHAPES = [(QKV, HIDDEN), (HIDDEN, HIDDEN), (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)] * LAYERS
HEAD = (VOCAB, HIDDEN)
MAX_ROWS_WITH_HEAD = 64


def make_weights() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(n, k, generator=generator) * k**-0.5).bfloat16() for n, k in [*SHAPES, HEAD]]


def native_case(ops: NativeOps, weights: list[Linear], rows: int, x: Tensor, out: Tensor) -> Callable[[], object]:
    program = _native.Program(ops.team, ops.isa)
    for w in weights if rows <= MAX_ROWS_WITH_HEAD else weights[:-1]:
        dtype = "float32" if w.out_features == VOCAB else "bfloat16"
        program.linear(x.data_ptr(), w.in_features, w.data, out.data_ptr(), w.out_features, dtype)
    return lambda: program.run(rows)


def torch_case(weights: list[Tensor], rows: int, x: Tensor) -> Callable[[], object]:
    inputs = {k: x.flatten()[: rows * k].view(rows, k) for k in (HIDDEN, INTERMEDIATE)}
    used = weights if rows <= MAX_ROWS_WITH_HEAD else weights[:-1]

    def run() -> None:
        for w in used:
            torch.nn.functional.linear(inputs[w.shape[1]], w)

    return run


def measure(cases: dict[str, Callable[[], object]], repeats: int) -> dict[str, dict[str, float]]:
    """Minimum and median milliseconds of each case, the cases taking turns."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for run in cases.values():
        run()
    for _ in range(repeats):
        for name, run in cases.items():
            start = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: {"min_ms": min(t), "median_ms": statistics.median(t)} for name, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", nargs="+", default=_native.supported_isas(), choices=_native.supported_isas())
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 512])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--no-torch", action="store_true", help="leave torch's linear layers out")
    parser.add_argument("--json", type=Path, help="write all figures to this file ('-': standard output only)")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    team = _native.Team(args.threads)
    weights = make_weights()
    num_bytes = sum(w.numel() * w.element_size() for w in weights)
    max_rows = max(args.rows)
    x = torch.randn(max_rows, INTERMEDIATE, generator=torch.Generator().manual_seed(1)).bfloat16()
    # Huge pages, as the recorder's workspace has: scattered 4 KB pages would cost TLB misses of the caller's making.
    workspace = _native.HugeBuffer(max(min(max_rows, MAX_ROWS_WITH_HEAD) * VOCAB * 4, max_rows * 2 * INTERMEDIATE * 2))
    out = torch.from_numpy(workspace.array())
    buffer = _native.HugeBuffer(num_bytes)
    buffer.array()[:] = 1  # pages that were never written are all the same page

    cases: dict[str, Callable[[], object]] = {"read": lambda: _native.read_all(team, buffer)}
    first = NativeOps(torch.bfloat16, team, args.isa[0])
    packed = [first.pack_linear(w) for w in weights]  # the layout is the same for all instruction sets
    for isa in args.isa:
        ops = NativeOps(torch.bfloat16, team, isa)
        cases |= {f"{isa}/{rows}": native_case(ops, packed, rows, x, out) for rows in args.rows}
    if not args.no_torch:
        cases |= {f"torch/{rows}": torch_case(weights, rows, x) for rows in args.rows}
    with torch.inference_mode():
        results = measure(cases, args.repeats)

    report = {"threads": args.threads, "repeats": args.repeats, "weight_bytes": num_bytes, "results": results}
    if args.json is not None:
        text = json.dumps(report, indent=2)
        if str(args.json) == "-":
            sys.stdout.write(text + "\n")
            return
        args.json.write_text(text + "\n")
    print_table(results, args.rows, num_bytes)


def print_table(results: dict[str, dict[str, float]], rows: list[int], num_bytes: int) -> None:
    read = results["read"]
    bandwidth = num_bytes / read["min_ms"] / 1e6
    print(
        f"read {num_bytes / 1e6:.0f} MB: {read['min_ms']:.1f} ms ({bandwidth:.1f} GB/s), median {read['median_ms']:.1f}"
    )
    print("milliseconds, minimum/median" + "".join(f"{r:>15}" for r in rows))
    for kind in dict.fromkeys(name.split("/")[0] for name in results if "/" in name):
        cells = [results[f"{kind}/{r}"] for r in rows]
        print(f"{kind:28}" + "".join(f"{c['min_ms']:>8.1f}/{c['median_ms']:<6.1f}" for c in cells))


if __name__ == "__main__":
    main()
