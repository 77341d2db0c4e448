"""Command line: ``python -m bench all|WORKLOAD|report [--quick] [--who NAME,...]``."""

import argparse
import sys
from importlib import import_module

from bench import report
from bench.peers import CONTESTANTS

WORKLOADS = ("mlp", "gemm", "coldstart", "fleet", "switching", "exploration", "estimators", "paper")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Time calcvm beside its peers.")
    parser.add_argument("what", choices=["all", *WORKLOADS, "report"])
    parser.add_argument("--quick", action="store_true", help="a smoke run: few shapes and turns, nothing stored")
    parser.add_argument("--who", default="", help=f"of mlp, the contestants: {','.join(CONTESTANTS)}")
    args = parser.parse_args()
    correct = True
    for name in WORKLOADS if args.what == "all" else [args.what]:
        if name == "mlp":
            correct &= import_module("bench.mlp").main(args.quick, [w for w in args.who.split(",") if w])
        elif name != "report":
            correct &= import_module(f"bench.{name}").main(args.quick)
    if not args.quick:
        report.main()
    return 0 if correct else 1


if __name__ == "__main__":
    sys.exit(main())
