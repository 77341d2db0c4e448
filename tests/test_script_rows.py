"""Each row's text in NumPy against its kernel: the whole table, every example, both dtypes, and what may be in place."""

from __future__ import annotations

import numpy as np
import pytest

from calcvm.errors import UnsupportedOperator
from calcvm.formulas.elementwise import ACTIVATIONS, ELEMENTWISE
from calcvm.ops import OPS, ROWS, dims, epilogues
from calcvm.ops.dims import BATCH, affine
from calcvm.ops.sizes import evaluate
from calcvm.ops.spec import row_named
from calcvm.ops.types import dtype_of
from calcvm.script import helpers
from calcvm.script.code import trace
from calcvm.script.derived import writer_of
from calcvm.script.optimizers import SLOTS, STEPS, UPDATES, source_of
from calcvm.script.row import WRITERS, Row, Seen, lines_of
from tests.rowrun import EPS, Case, _row_runs, _run, cases, close, run_row, words_of

GLOBALS = {**vars(helpers)}
exec("import math\nfrom calcvm.formulas.steps import SINE\nN_SLOTS = 20\n" + "".join(f"{name} = {k}\n" for name, k in vars(__import__("calcvm.formulas.steps", fromlist=["x"])).items() if name in SLOTS), GLOBALS)  # fmt: skip
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


def text_of(name: str, words: dict, **shapes) -> str:
    """A row's text for operands of these shapes, None being the batch."""
    of = trace()
    r = Row(row_named(name), words, {k: Seen(of.of(k), dims.shape_of(s), "float32") for k, s in shapes.items()}, of)
    writer_of(name)(r)
    return "; ".join(lines_of(r))


ROWS_OF_5, SUM = {"rows": BATCH, "inner": 5}, dict.fromkeys(("O", "R0", "K0", "R1", "K1", "R2", "I"), 1)


@pytest.mark.parametrize(
    ("name", "words", "shapes", "text"),
    [
        ("linear_fwd", {"rows": BATCH, "inner": 1, "K": 6, "N": 3, "act": 0, "alpha": 0.0},
         {"x": (None, 6), "wt": (6, 3), "b": (3,), "y": (None, 3)}, "y[...] = x @ wt + b"),
        ("linear_fwd", {"rows": BATCH, "inner": 1, "K": 1, "N": 1, "act": 0, "alpha": 0.0},
         {"x": (None, 1), "wt": (1, 1), "b": (1,), "y": (None, 1)}, "y[...] = x @ wt + b"),
        ("linear_bwd_x", ROWS_OF_5 | {"K": 6, "N": 3, "act": 1, "alpha": 0.0},
         {"dy": (None, 5, 3), "wt": (6, 3), "dx": (None, 5, 6), "ya": (None, 5, 6)},
         "dx[...] = np.where(ya.reshape(5*B, 6) <= 0, 0, dy.reshape(5*B, 3) @ wt.T).reshape(B, 5, 6)"),
        ("sum_fwd", SUM | {"O": BATCH, "R0": 12}, {"x": (None, 3, 4), "y": (None,)}, "y[...] = x.sum((1, 2))"),
        ("mean_bwd", SUM | {"O": BATCH, "R0": 3, "I": 4}, {"dy": (None, 4), "dx": (None, 3, 4)},
         "dx[...] = np.broadcast_to(dy.reshape(B, 1, 4)/3, (B, 3, 4))"),
        ("softmax_bwd", ROWS_OF_5 | {"N": 3}, {"y": (None, 5, 3), "dy": (None, 5, 3), "dx": (None, 5, 3)},
         "dx[...] = y*(dy - (dy*y).sum(2, keepdims=True))"),
        ("concat_bwd_b", ROWS_OF_5 | {"A": 4, "B": 2}, {"dy": (None, 5, 6), "db": (None, 5, 2)}, "db[...] = dy[:, :, 4:6]"),
        ("layer_norm_fwd", ROWS_OF_5 | {"N": 3, "eps": 0.1},
         {"x": (None, 5, 3), "scale": (3,), "y": (None, 5, 3), "mean": (None, 5), "inv": (None, 5)},
         "mean[...] = mean_of(x, 2); u1 = x - mean.reshape(B, 5, 1); inv[...] = 1/np.sqrt(mean_of(u1**2, 2) + 0.1); "
         "y[...] = u1*inv.reshape(B, 5, 1)*scale"),
        ("batch_norm_stats", {"rows": BATCH, "inner": 1, "N": 3, "eps": 0.1, "momentum": 1.0},
         {"x": (None, 3), "mean": (3,), "inv": (3,), "running_mean": (3,), "running_var": (3,)},
         "mean[...] = mean_of(x, 0); u1 = mean_of((x - mean)**2, 0); inv[...] = 1/np.sqrt(u1 + 0.1); "
         "running_mean[...] += mean - running_mean; "
         "running_var[...] += np.where(B > 1, u1*B/np.maximum(B - 1, 1) - running_var, 0)"),
        ("batch_norm_stats", ROWS_OF_5 | {"N": 3, "eps": 0.1, "momentum": 1.0},
         {"x": (None, 5, 3), "mean": (3,), "inv": (3,), "running_mean": (3,), "running_var": (3,)},
         "mean[...] = mean_of(x, 0, 1); u1 = mean_of((x - mean)**2, 0, 1); inv[...] = 1/np.sqrt(u1 + 0.1); "
         "running_mean[...] += mean - running_mean; running_var[...] += u1*5*B/(5*B - 1) - running_var"),
    ],
)  # fmt: skip
def test_texts_that_follow_from_equations_read_as_if_written_by_hand(name, words, shapes, text):
    assert text_of(name, words, **shapes) == text


def test_rows_without_a_text_are_refused_and_writers_are_of_rows():
    assert {*WRITERS} <= {*ROWS}
    with pytest.raises(UnsupportedOperator, match="row 'send' has no text in NumPy"):
        text_of("send", {"n": 4}, x=(4,))


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
