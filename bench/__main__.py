"""Command line: ``python -m bench all|WORKLOAD|gpu|report [--quick] [--who NAME,...] [--part NAME,...]``."""

import argparse
import sys
from importlib import import_module

from bench import gpu, report
from bench.harness import say
from bench.peers import CONTESTANTS

WORKLOADS = (
    "mlp", "gemm", "convolution", "operators", "images", "calls", "forms", "coldstart", "memory", "waterfall", "overhead", "batches", "busy", "fleet", "switching", "stores",
    "exploration", "estimators", "paper", "plain", "planner", "planning", "sequences",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Time calcvm beside its peers.")
    parser.add_argument("what", choices=["all", *WORKLOADS, "gpu", "report"], help="all: but gpu")
    parser.add_argument("--quick", action="store_true", help="a smoke run: few shapes and turns, nothing stored")
    parser.add_argument("--who", default="", help=f"of mlp and gpu, the contestants; of mlp: {','.join(CONTESTANTS)}")
    parser.add_argument("--part", default="", help=f"of gpu, the parts: {','.join(gpu.PARTS)}")
    args = parser.parse_args()
    who, correct = [w for w in args.who.split(",") if w], True
    if args.what == "gpu":
        return on_gpu(args.quick, [p for p in args.part.split(",") if p], who)
    for name in WORKLOADS if args.what == "all" else [args.what]:
        if name == "mlp":
            correct &= import_module("bench.mlp").main(args.quick, who)
        elif name != "report":
            correct &= import_module(f"bench.{name}").main(args.quick)
    if not args.quick:
        report.main()
    return 0 if correct else 1


def on_gpu(quick: bool, parts: list[str], who: list[str]) -> int:
    """Run `bench.gpu`; return 2 if there is no GPU."""
    try:
        status = 0 if gpu.main(quick, parts, who) else 1
    except gpu.NoGpu as error:
        say(f"{gpu.NOT_MEASURED} ({error})")
        status = 2
    if not quick:
        report.main()
    return status


if __name__ == "__main__":
    sys.exit(main())
