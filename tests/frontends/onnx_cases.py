"""ONNX's own suite of cases by its own runner, and the table of docs/onnx.md that is made of its results.

python -m tests.frontends.onnx_cases            # run all, and write the table
python -m tests.frontends.onnx_cases PART       # those with PART in their names
python -m tests.frontends.onnx_cases --beside   # all, and by ONNX Runtime in the same process
"""

from __future__ import annotations

import csv
import sys
import unittest
import warnings
from collections import defaultdict
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.backend.test import BackendTest
from onnx.backend.test.loader import load_model_tests

import calcvm as cv
from calcvm.frontends.imported import Value
from calcvm.frontends.onnx_model import OnnxModel
from calcvm.frontends.onnx_reader import File, imported, looked_at
from calcvm.onnx import Backend

ROOT = Path(__file__).resolve().parents[2]
LEFT = Path(__file__).with_name("onnx_left.txt")  # cases that do not pass, and why
PAGE = ROOT / "docs" / "onnx.md"
BEGIN, END = "<!-- the table of cases -->", "<!-- the end of the table -->"
KINDS = {
    "Node": "operators",
    "Real": "real",
    "Simple": "simple",
    "PyTorchConverted": "pytorch-converted",
    "PyTorchOperator": "pytorch-operator",
}
TARGET = ROOT.parent / "shared" / "data" / "onnx" / "target_cases.csv"
STEP, SLOPES = 1e-6, 2  # of differences, and directions that are tried


def official(part: str = "", backend: type = Backend) -> dict[str, dict[str, str]]:
    """By kind and name, on a backend of ONNX: "" for a case that passes, or why it does not.  A skipped case does not pass."""
    suite, found = BackendTest(backend).test_suite, defaultdict(dict)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for test in _each(suite):
            name = test._testMethodName
            kind = KINDS[type(test).__name__.removeprefix("OnnxBackend").removesuffix("Test").removesuffix("Model")]
            if name.endswith("_cpu") and part in name:
                result = unittest.TestResult()
                test.run(result)
                told = [text for _, text in (*result.errors, *result.failures, *result.skipped)]
                found[kind][name.removesuffix("_cpu")] = told[0].strip().splitlines()[-1][:160] or "?" if told else ""
    return found


def _each(suite):
    for part in suite:
        yield from _each(part) if isinstance(part, unittest.TestSuite) else [part]


def cases(names=None):
    """The cases of single operators: name, operator, and the case of onnx."""
    for case in load_model_tests(kind="node"):
        if names is None or case.name in names:
            yield case.name, case.model.graph.node[0].op_type if len(case.model.graph.node) == 1 else "", case


def arrays(data):
    return [numpy_helper.to_array(x) if isinstance(x, onnx.TensorProto) else np.asarray(x) for x in data]


def errors(case) -> float:
    """The largest error of the float outputs, in units of the last place of float32."""
    worst = 0.0
    prepared = Backend.prepare(case.model)
    for inputs, outputs in case.data_sets:
        for got, expected in zip(prepared.run(arrays(inputs)), arrays(outputs)):
            if expected.dtype == np.float32 and expected.size:
                with np.errstate(all="ignore"):
                    ulp = np.abs(got.astype(float) - expected) / np.spacing(np.maximum(np.abs(expected), 1e-3)).astype(
                        float
                    )
                worst = max(worst, float(np.nanmax(np.where(np.isfinite(ulp), ulp, 0))))
    return worst


def slopes(case, seed=0):
    """The gradient of a case along random directions, in float64, and the central differences, where they are finite; None if there is none.

    The loss is a weighted sum of the outputs of floats, and the direction is over all inputs of floats.
    """
    file = File(case.model)
    inputs, rng = arrays(case.data_sets[0][0]), np.random.default_rng(seed)
    given = dict(zip([x.name for x in file.model.graph.input], inputs))
    known = looked_at(file.model.graph)
    values = {name: x for name, x in given.items() if name in known}
    network = imported(
        file, {n: x.shape for n, x in given.items()}, values, [None] * len(given), False, as_written=True
    )
    data = {name: _beside(given[name], rng) for name, _, dtype in network.inputs if dtype is None}
    computed = [k for k, x in enumerate(network.results) if isinstance(x, Value)]
    for facts in (network.results, network.outputs):
        facts[:] = [facts[k] for k in computed]
    if not data or not computed:
        return None
    layer, g = OnnxModel(network), cv.CalcGraph()
    placed = {name: g.placeholder(name, shape, dtype) for name, shape, dtype in network.inputs}
    made = {}
    with g.path("predict", adopt=False) as path:
        terms = []
        for v in layer.call(*placed.values(), training=False):
            if v.type == "float":
                w = g.constant(g.unique("w"), rng.standard_normal([n.b for n in v.shape]))
                terms.append(cv.sum(v * w))
        if not terms:
            return None
        loss = sum(terms[1:], terms[0]).rename("loss")
        for name in {*data} - {"attn_mask"}:  # of which attention computes no gradient, but for a parameter
            try:
                made[name] = cv.gradient(loss, placed[name]).name
            except cv.CalcError as error:
                if "no gradient" not in str(error):
                    raise
    path.output = (loss, *(g.variables[name] for name in made.values()))
    model = cv.Model(g, batch_size=1, dtype="float64", workers=1)
    read = {name for name in placed if any(g.variables[name] in op.inputs.values() for op in path.operations)}
    whole = {name: data.get(name, given[name]) for name in read}
    at = model.run(whole)
    found = []
    for _ in range(SLOPES):
        way = {name: rng.standard_normal(data[name].shape) for name in made}
        ends = [model.run({**whole, **{n: data[n] + sign * STEP * way[n] for n in way}})["loss"] for sign in (1, -1)]
        if np.isfinite(ends).all():
            found.append((sum(float((at[made[n]] * way[n]).sum()) for n in way), float(ends[0] - ends[1]) / (2 * STEP)))
    return found


def _beside(x, rng):
    """Numbers nearby: cases like whole numbers, at which functions bend."""
    return x * (1 - 0.02 * rng.random(x.shape)) + (x == 0) * 0.01 * rng.random(x.shape)


# ---------------------------------------------------------------- the table
def target() -> dict[str, str]:
    with TARGET.open() as file:
        return {row["name"]: row["expanded"] for row in csv.DictReader(file)}


def table(found) -> list[str]:
    """Lines of docs/onnx.md."""
    passed, of, worst = defaultdict(int), defaultdict(int), defaultdict(float)
    for name, op, case in cases():
        if op and not name.endswith("expanded") and "_expanded_ver" not in name:
            of[op] += 1
            if found["operators"].get(name) == "":
                passed[op] += 1
                worst[op] = max(worst[op], errors(case))
    lines = ["| operator | cases passed | of | largest error, ulp |", "|---|---|---|---|"]
    return lines + [f"| {op} | {passed[op]} | {n} | {worst[op]:.2g} |" for op, n in sorted(of.items())]


def summary(found) -> list[str]:
    return [f"{kind}: {sum(not why for why in of.values())} of {len(of)}" for kind, of in found.items()]


def written(found) -> str:
    """The page with the table anew."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    return before + "\n".join([BEGIN, "", *table(found), "", END]) + rest.partition(END)[2]


def beside(ours) -> list[str]:
    """Counts of both, the target cases first where their list is here."""
    from onnxruntime.backend.backend import OnnxRuntimeBackend

    theirs = official(backend=OnnxRuntimeBackend)
    groups = {kind: [*of] for kind, of in ours.items()}
    if TARGET.exists():
        for name, expanded in target().items():
            groups.setdefault("target cases, expanded" if expanded == "1" else "target cases", []).append(name)
    passed = [{name: not why for of in found.values() for name, why in of.items()} for found in (ours, theirs)]
    return [
        f"{group}: {' and '.join(str(sum(map(p.get, names))) for p in passed)} of {len(names)}"
        for group, names in groups.items()
    ]


if __name__ == "__main__":
    wanted = sys.argv[1] if sys.argv[1:] else ""
    results = official("" if wanted == "--beside" else wanted)
    if wanted == "--beside":
        print("\n".join(beside(results)))
    elif wanted:
        print(
            "\n".join([*summary(results), *(f"{n}: {why}" for of in results.values() for n, why in of.items() if why)])
        )
    else:
        print("\n".join(summary(results)))
        LEFT.write_text("".join(f"{n}: {why}\n" for of in results.values() for n, why in sorted(of.items()) if why))
        PAGE.write_text(written(results))
