"""Command line: ``python -m bench.paper [--quick] [--data DIR] [--only SECTION]``."""

import argparse
import sys

from bench import report
from bench.paper import EXPERIMENTS, main

parser = argparse.ArgumentParser(prog="python -m bench.paper", description="The experiments of the CalcGraph paper.")
parser.add_argument("--quick", action="store_true", help="a smoke run: few rounds and models, nothing stored")
parser.add_argument("--data", help="folder of MNIST's files (train-images-idx3-ubyte, ...)")
parser.add_argument("--only", choices=list(EXPERIMENTS), help="one experiment, nothing stored")
args = parser.parse_args()
correct = main(args.quick, args.data, args.only)
if not (args.quick or args.only):
    report.main()
sys.exit(0 if correct else 1)
