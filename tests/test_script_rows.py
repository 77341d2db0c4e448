"""Each row's text in NumPy against its kernel: the whole table, every example, both dtypes, and what may be in place."""

from __future__ import annotations

import numpy as np
import pytest

from calcvm.formulas.elementwise import ACTIVATIONS, ELEMENTWISE
from calcvm.ops import OPS, epilogues
from calcvm.ops.dims import affine
from calcvm.ops.sizes import evaluate
from calcvm.ops.types import dtype_of
from calcvm.script import helpers
from calcvm.script.code import trace
from calcvm.script.derived import writer_of
from calcvm.script.optimizers import SLOTS, STEPS, UPDATES, source_of
from calcvm.script.row import Row, Seen, lines_of
from tests.rowrun import EPS, Case, _row_runs, _run, cases, close, run_row, words_of

GLOBALS = {**vars(helpers)}
exec("import math\nN_SLOTS = 20\n" + "".join(f"{name} = {k}\n" for name, k in vars(__import__("calcvm.formulas.steps", fromlist=["x"])).items() if name in SLOTS), GLOBALS)  # fmt: skip
for _name in (*STEPS, *UPDATES):
    exec(source_of(_name), GLOBALS)


def shape_of(case: Case, row, name: str, elems):
    """An operand's shape as it lies, with the batch in it: its value's, or of a gradient its value's."""
    shapes, of = case.generic, name[1:] if name[0] == "d" and name not in case.generic else name
    if case.spec.broadcast and name[0] == "d" and of in case.spec.inputs:
        of = case.spec.outputs[0]
    shape = shapes.get(of)
    if name in ("other", "ya"):
        result = row.writes[0].name
        shape = shape_of(case, row, result, elems)
    if shape is None or int(np.prod([n.at(case.batch) for n in shape], dtype=int)) != elems:
        return (affine(elems),)
    return shape


def run_text(case: Case, row, values, alias=None, more=()):
    """What the row's text sets, by operand; ``more`` : operands that it has beside those of the example."""
    env = words_of(row, case.words)
    words = {w.name: case.forms.get(w.name, env.get(w.name)) for w in row.words if w.name not in ("wn", "phases")}
    of, operands, arrays, texts = trace(), {}, {}, {}
    for o in row.operands:
        if o.access == "s" or (o.optional and o.name not in case.known() | {*more}):
            continue
        elems, dtype = int(evaluate(o.elems, env)), dtype_of(o.type, case.dtype)
        shape = shape_of(case, row, o.name, elems)
        operands[o.name] = Seen(of.of(o.name), shape, dtype)
        at = tuple(n.at(case.batch) for n in shape)
        array = (
            values[o.name].copy()
            if o.access in "ru" or (o.access == "a" and env["acc"] == 1)
            else np.zeros(elems, dtype)
        )
        if o.access == "w" and dtype.startswith("float"):
            array = np.full(elems, np.nan, dtype)
        arrays[o.name] = array.view(dtype).reshape(at)
    if alias and {*alias} <= {*arrays} and arrays[alias[0]].nbytes == arrays[alias[1]].nbytes:
        arrays[alias[0]] = arrays[alias[1]].reshape(-1).view(arrays[alias[0]].dtype).reshape(arrays[alias[0]].shape)
    r = Row(row, words, operands, of)
    writer_of(row.name)(r)
    texts = lines_of(r)
    with np.errstate(all="ignore"):
        if alias is None:
            check_shapes(r, arrays, case.batch)
        exec("\n".join(texts), GLOBALS, scope := {**arrays, "B": case.batch})
    assert all(scope[name] is array for name, array in arrays.items())
    return {o.name: arrays[o.name] for o in row.operands if o.writes and o.name in arrays}, texts


def check_shapes(r: Row, arrays: dict[str, np.ndarray], batch: int) -> None:
    """What a text gives has the shape of what it is for: in equations nothing but its own value says one."""
    for made in r.made:
        if made.names and not made.at and not made.value.scalar:
            *named, (_, text) = r.trace.equations([("", made.value)])
            scope = {**arrays, "B": batch}
            exec("\n".join(f"{name} = {said}" for name, said in named), GLOBALS, scope)
            value = eval(text, GLOBALS, scope)
            for name, v in zip(made.names, value if len(made.names) > 1 else (value,)):
                assert name is None or np.shape(v) == arrays[name].shape, f"{r.spec.name}.{name}: {text}"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", sorted(n for n, op in OPS.items() if op.rows))
def test_texts_do_what_kernels_do(name, dtype):
    for case in cases(OPS[name], dtype):
        for row, values in _row_runs(case):
            want = _run(case, row, values)
            for pair in (None, *row.in_place):
                got, texts = run_text(case, row, values, pair)
                assert want.keys() == got.keys()
                for o, w in want.items():
                    if pair and o == pair[1]:
                        continue
                    assert got[o].dtype == w.dtype
                    same(got[o].reshape(-1), w, dtype, f"{row.name}.{o} {case.shapes} {pair}\n" + "\n".join(texts))


def same(got, want, dtype, what):
    if want.dtype.kind != "f":
        assert (got == want).all(), what
    else:
        close(got.astype(np.float64), want, 256 * EPS[dtype], what)


@pytest.mark.parametrize(
    "name", sorted(n for n, op in OPS.items() if any("acc" in {w.name for w in r.words} for r in op.rows))
)
def test_texts_add_up_what_rounds_add(name):
    for case in cases(OPS[name], "float32"):
        case.forms["acc"] = case.words["acc"] = 1
        for row, values in _row_runs(case):
            if "acc" in {w.name for w in row.words}:
                got, texts = run_text(case, row, values)
                for o, w in _run(case, row, values).items():
                    same(got[o].reshape(-1), w, "float32", f"{row.name}.{o}\n" + "\n".join(texts))


FROM_RESULTS = {name for name in ACTIVATIONS[1:] if ELEMENTWISE[name].backward["x"].reads == ("dy", "y")}


@pytest.mark.parametrize("name", sorted(n for n, op in OPS.items() if any(row.takes for row in op.rows)))
@pytest.mark.parametrize("act", range(1, len(ACTIVATIONS)))
def test_texts_do_epilogues(name, act):
    """All that a row takes, and each activation."""
    rng = np.random.default_rng(3)
    for case in cases(OPS[name], "float64"):
        for row, values in _row_runs(case):
            if not row.takes or ("derivative" in row.takes and ACTIVATIONS[act] not in FROM_RESULTS):
                continue
            case.forms |= {"act": act, "alpha": 0.3}
            case.words |= {"act": act, "alpha": 0.3}
            env, names = words_of(row, case.words), [o.name for o in epilogues.operands_of(row.takes, "", "")]
            own = {n: rng.uniform(-1, 1, int(evaluate(row.operand(n).elems, env))) for n in names}
            want = run_row(row, case.words, values | own, "float64", known=case.known() | {*own})
            got, texts = run_text(case, row, values | own, more=own)
            for o, w in want.items():
                same(got[o].reshape(-1), w, "float64", f"{row.name}.{o}\n" + "\n".join(texts))
