"""Whether two versions of calcvm compute the same bits: ``python -m bench.bits TREE`` compares TREE with this tree.

A process per tree computes digests of the results of every row of the table on every example, in both float types, and of
the losses and weights of 100 training steps of some networks.  It also records the heap bytes of the zoo.  Each process uses
the rows and examples of its tree.  Differences are printed; the exit status is 1 if there are any.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
STEPS = 100
IMAGES = {"lenet": ((1, 28, 28), 16), "resnet18": ((3, 32, 32), 4), "mobilenet_v2": ((3, 32, 32), 4)}
ZOO = ("lenet", "alexnet", "vgg16", "googlenet", "resnet18", "resnet50", "mobilenet_v2")


def digest(arrays: Iterator[np.ndarray] | Sequence[np.ndarray]) -> str:
    found = hashlib.sha256()
    for array in arrays:
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:16]


# ---------------------------------------------------------------- in one process per tree
def rows() -> Iterator[tuple[str, str]]:
    """Results of each row on each example, by one worker."""
    from calcvm.ops import OPS
    from tests import rowrun

    for spec in OPS.values():
        for dtype in ("float32", "float64"):
            for k, case in enumerate(rowrun.cases(spec, dtype)):
                for row, values in rowrun._row_runs(case):
                    made = rowrun._run(case, row, values)
                    yield f"row {row.name} {dtype} example {k}", digest([made[name] for name in sorted(made)])


def networks() -> Iterator[tuple[str, str]]:
    """Losses and weights of training, by one worker and by two."""
    import calcvm as cv
    from calcvm import nn

    def trained(net: Any, shape: tuple[int, ...], batch: int, workers: int, steps: int) -> str:
        model = cv.Model(
            net, input_shape=shape, loss="softmax_cross_entropy", optimizer=cv.Adam(1e-3), batch_size=batch,
            workers=workers, seed=0,
        )  # fmt: skip
        rng = np.random.default_rng(0)
        x, y = rng.random((batch, *shape), np.float32), rng.integers(0, 3, batch)
        losses = np.array([model.step(x, y) for _ in range(steps)])
        return digest([losses, *model.parameters.values(), model.predict(x)])

    layers = (
        nn.Linear(32) >> nn.BatchNorm() >> nn.ReLU() >> nn.Dropout(0.2) >> nn.Linear(16) >> nn.GELU() >> nn.Linear(3)
    )
    for workers in (1, 2):
        yield f"layers, {workers} worker(s)", trained(layers, (20,), 37, workers, STEPS)
        for name, (shape, batch) in IMAGES.items():
            net = getattr(cv.zoo, name)(3)
            yield f"{name}, {workers} worker(s)", trained(net, shape, batch, workers, STEPS if name == "lenet" else 5)


def heaps() -> Iterator[tuple[str, str]]:
    """Heap bytes of the zoo, planned for speed and in a budget."""
    import calcvm as cv

    for name in ZOO:
        size = (1, 28, 28) if name == "lenet" else (3, 224, 224)
        graph = cv.build_graph(getattr(cv.zoo, name)(), size, "softmax_cross_entropy", cv.SGD(0.1))
        whole = cv.plan(graph, batch_size=8, workers=1, accumulate=True)
        yield f"heap of {name}, batch 8", f"{whole.heap_bytes:,}"
        if name == "resnet18":
            less = cv.plan(graph, batch_size=8, workers=1, accumulate=True, memory=int(0.8 * whole.heap_bytes))
            yield f"heap of {name}, batch 8, in 80 %", f"{less.heap_bytes:,}, {less.overhead!r}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", nargs="?", help="the other version (none: print this one's digests)")
    other = parser.parse_args().tree
    if other is None:
        json.dump(dict([*rows(), *networks(), *heaps()]), sys.stdout)
        return 0
    found = []
    for tree in (ROOT, Path(other).resolve()):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree / "src"), str(tree)])}
        made = subprocess.run([sys.executable, __file__], cwd=tree, env=environment, capture_output=True, text=True)
        if made.returncode:
            raise SystemExit(f"{tree}: {made.stderr}")
        found.append(json.loads(made.stdout))
    ours, theirs = found
    for name in [*theirs, *(name for name in ours if name not in theirs)]:
        if ours.get(name) != theirs.get(name):
            print(f"{name}: {ours.get(name, 'not there')}, in the other tree {theirs.get(name, 'not there')}")
    same = sum(ours.get(name) == theirs[name] for name in theirs)
    print(f"{same} of {len(theirs)} are the same")
    return int(same < len(theirs) or len(ours) > len(theirs))


if __name__ == "__main__":
    sys.exit(main())
