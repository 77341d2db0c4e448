"""Generated graphs of anything: equations, scripts, gradients and every call are what the program computes.

In `make test` a sample; ``pytest --whole tests/kinds/test_wild.py`` runs hundreds of each.  All is computed in float64, so that what
differs by more than rounding is wrong.
"""

from __future__ import annotations

import ast
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import calcvm as cv
from calcvm.ops import OPS
from calcvm.ops.dims import BATCH
from calcvm.ops.types import FLOAT
from calcvm.script.names import HELPERS
from tests.kinds.placed import OPERATORS, Placed, below
from tests.kinds.wild import Wild, kinds, wild

# the refusal of a rest of one sample, which a few graphs meet
ALONE = re.compile(r"batch_norm: in (a batch of 1|the last batch, 1 of \d+ samples,) there is one value per channel")
RIGHT = 1e-9  # of the largest element: float64, and sums of another order
SAMPLE, WHOLE, CHUNK = 10, 500, 25
TAME = 1e8  # what is larger, or no number, is rounding's as much as anybody's


def close(got: Any, want: Any, what: str) -> bool:
    """Whether it is compared, and not for nothing: shapes always, numbers where they are tame."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape, f"{what}: shape {got.shape}, {want.shape} is right"
    if want.dtype.kind != "f":
        assert got.dtype == want.dtype and np.array_equal(got, want), f"{what}:\n{got}\n{want} is right"
        return True
    if not np.isfinite(want).all() or np.abs(want).max(initial=0) > TAME:
        return False
    scale = max(np.abs(want).max(initial=0), 1e-3)
    assert np.abs(got - want).max(initial=0) <= RIGHT * scale, f"{what}:\n{got}\n{want} is right"
    return True


def loaded(case: Wild, **options: Any) -> Any:
    """A model of the graph; what other paths make can be read."""
    made = [v.name for v in case.graph.variables.values() if v.kind == "result" and v.path is not case.learn]
    program = cv.compile(case.graph, batch_size=case.batch, dtype="float64", workers=1, keep=made, **options)
    return cv.CalcHeap(program.heap_bytes).create(program, seed=3)


def feed(model: Any, data: dict[str, np.ndarray], path: str) -> None:
    for name in model.loaded.feeds(path):
        model[name] = data[name]


# ---------------------------------------------------------------- equations
def equations(case: Wild) -> Counter[str]:
    """Those of each parameter: they parse, define what they read, have its shape and the program's numbers."""
    model, learn, done = loaded(case, accumulate=True), case.learn, Counter[str]()
    assert learn.loss is not None
    trained = learn.trained_behind(learn.loss)
    for batch in {case.batch, (case.batch + 1) // 2}:
        data = case.data(batch)
        feed(model, data, "learn")
        model.settle("learn")
        model.run_round("learn")
        learnt = {p: learn.gradient_of(p) for p in trained}
        read = {n for found in learnt.values() for n in found.sources.values()}
        known = {n: model[n] for n in read if n in model and model.loaded.variables[n]["kind"] != "placeholder"}
        model.backward("learn")
        for p, found in learnt.items():
            printed(found, p)
            with np.errstate(all="ignore"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                got = found.evaluate({**known, **data})
            done["numbers"] += close(got, model.grad(p.name, "learn"), f"d{p.name!r}, batch {batch}:\n{found}")
            done["equations"] += 1
    return done


def printed(found: Any, p: Any) -> None:
    defined = {"np", "B", *HELPERS, *found.sources}
    for name, text in found.equations:
        nodes = [*ast.walk(ast.parse(text, mode="eval"))]
        read = {node.id for node in nodes if isinstance(node, ast.Name)}
        read -= {node.arg for node in nodes if isinstance(node, ast.arg)}  # of the function of a scan
        assert read <= defined, f"{read - defined} of {name} = {text} is not defined in\n{found}"
        body = ast.parse(text, mode="eval").body
        body = body.operand if isinstance(body, ast.UnaryOp) else body
        assert not isinstance(body, ast.Constant) or name == found.name, f"{name} is a name for {text} in\n{found}"
        assert not {*name.split(", ")} & (defined - {"_"}), f"{name} is defined twice in\n{found}"
        defined |= {*name.split(", ")}
    assert found.equations[-1][0] == found.name and found._repr_latex_().startswith("$$")


# ---------------------------------------------------------------- values
def evaluated(case: Wild) -> Counter[str]:
    """All that paths compute, by the equations of their rows alone."""
    every = {v.name for v in case.graph.variables.values() if v.kind == "result"}
    program = cv.compile(case.graph, batch_size=case.batch, dtype="float64", workers=1, keep=[*every])
    model, done = cv.CalcHeap(program.heap_bytes).create(program, seed=3), Counter[str]()
    data = case.data(case.batch)
    for path in case.graph.paths.values():
        feed(model, data, path.name)
        before = {name: model[name].copy() for name in program.info.get("buffers", {})}
        model.run_round(path.name)
        own = {v.name for op in path.operations for v in op.outputs.values()}
        read = {v.name for op in path.operations for v in op.inputs.values()} - own
        others = {v: model[v] for v in read if case.graph.variables[v].kind == "result"}
        feeds = {name: data[name] for name in read if name in data}
        drawn = {op.outputs["y"].name for op in path.operations if op.spec.name in ("dropout", "dropout_mask", "crop")}
        found = path.evaluate({**feeds, **others, **before, **{name: model[name] for name in drawn}}, seed=3)
        done["drawn"] += len(drawn)
        assert {*found} == own, {*found} ^ own
        for name, value in found.items():
            done["numbers"] += close(value, model[name], f"{name!r} of path {path.name!r}")
            done["values"] += 1
    return done


# ---------------------------------------------------------------- scripts
def script(case: Wild) -> Counter[str]:
    """It is Python that imports NumPy alone, and steps, predicts and judges as the model does, at any batch."""
    done = Counter[str]()
    rounds = case.seed % 3 == 0
    try:
        model = cv.Model(
            case.graph,
            batch_size=case.batch,
            dtype="float64",
            workers=1,
            **({"learning_batch": 2 * case.batch} if rounds else {}),
        )
    except cv.CalcError:
        return Counter(refused=1)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "script.py"
        model.to_python(path)
        text = path.read_text("utf-8")
        tree = ast.parse(text)
        imported = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        imported |= {str(n.module) for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        assert imported == {"argparse", "math", "numpy", "pathlib"}, imported
        scope: dict[str, Any] = {"__name__": "script", "__file__": str(path)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(tree, "script.py", "exec"), scope)
            say = SimpleNamespace(**scope)
            inputs = model.loaded.feeds("predict", ("forward",))
            for k, batch in enumerate((case.batch, (case.batch + 1) // 2, 1)):
                data = case.data(batch, k)
                with np.errstate(all="ignore"):
                    got = say.predict(*(data[n] for n in inputs))
                want = model.run({n: data[n] for n in inputs})
                for name, y in zip(model.roles.outputs, got if len(model.roles.outputs) > 1 else [got], strict=True):
                    done["numbers"] += close(y, want[name], f"predict {name!r}, batch {batch}")
                arrays = [data[n] for n in model.loaded.feeds("learn")]
                try:
                    want = model.step(*arrays)
                except cv.Trap:
                    break
                with np.errstate(all="ignore"):
                    got = say.step(*arrays)
                if not close(got, want, f"step {k}, batch {batch}"):
                    break
                done["numbers"] += 1
    done["scripts"] += 1
    return done


# ---------------------------------------------------------------- gradients as variables
def random_elsewhere(case: Wild) -> bool:
    """Whether a path that does not train draws random numbers."""
    others = (p for p in case.graph.paths.values() if p is not case.learn)
    return any(op.spec.name == "dropout" for p in others for op in p.operations)


def gradients(case: Wild) -> Counter[str]:
    """dy/dx of values that were drawn is the slope of y along any way x may move, all paths run again, or it is refused."""
    if random_elsewhere(case):
        return Counter(drawn=1)  # each run draws other numbers: there is no slope
    rng, g = np.random.default_rng(case.seed), case.graph
    done = Counter[str]()
    moves = [v for v in g.variables.values() if v.type == FLOAT and v.name not in case.labels]
    sources = [v for v in moves if v.kind in ("placeholder", "parameter")]
    values = [
        v
        for v in g.variables.values()
        if v.kind == "result" and v.path is not None and v.type == FLOAT and v.path is not case.learn
    ]
    made = []
    with g.path("looking", adopt=False):
        for _ in range(4):
            a, b = (values[int(rng.integers(len(values)))] for _ in range(2))
            x = sources[int(rng.integers(len(sources)))]
            with suppress(cv.ShapeError):
                made.append((cv.mean(cv.tanh(a) * cv.tanh((x, b)[int(rng.integers(2))])), x))
            made.append((cv.mean(cv.tanh(a)) + cv.sum(cv.sigmoid(x)), x))
        found = []
        for y, x in made:
            if behind(y) & {"dropout", "stop_gradient"}:
                done["no slope"] += 1  # each run draws other numbers, or the gradient ends by intent
                continue
            try:
                found.append((y, x, cv.gradient(y, x)))
            except cv.CalcError as error:
                assert "goes through" in str(error) or "no gradient" in str(error), error
                done["refused"] += 1
    if not found:
        return done
    kept = [v.name for y, _, d in found for v in (y, d)]
    program = cv.compile(g, batch_size=case.batch, dtype="float64", workers=1, keep=kept)
    model = cv.CalcHeap(program.heap_bytes).create(program, seed=3)
    for y, x, d in found:
        wrong = [said for draw in range(3) if (said := slope(case, model, y, x, d, draw))]
        assert len(wrong) < 3, f"d {y.name!r} / d {x.name!r}: {wrong}"  # else some were at a kink
        done["slopes"] += 1
    return done


def behind(y: Any) -> set[str]:
    """The operators that a value is made by, in whatever path."""
    seen, todo = {y: y.producer}, [y]
    while todo:
        producer = seen[todo.pop()]
        for v in producer.inputs.values() if producer else ():
            if v not in seen:
                seen[v] = v.producer
                todo.append(v)
    return {op.spec.name for op in seen.values() if op}


def slope(case: Wild, model: Any, y: Any, x: Any, d: Any, draw: int, step: float = 1e-6) -> str:
    """Why a gradient is no slope (nothing: it is one)."""
    data, rng = case.data(case.batch, draw), np.random.default_rng(draw)
    start = data[x.name] if x.kind == "placeholder" else np.array(model.parameters[x.name])
    way = rng.uniform(-1, 1, np.shape(start))

    def at(h: float) -> Any:
        moved = start + h * way
        if x.kind == "placeholder":
            data[x.name] = moved
        else:
            model.parameters[x.name][...] = moved
        feed(model, data, "looking")
        model.run_round("looking")
        return model[y.name].reshape(())

    try:
        slope = (at(step) - at(-step)) / (2 * step)
        at(0.0)
    except cv.Trap:
        return ""
    gradient = model[d.name]
    gradient = gradient.transpose(0, *range(2, x.rank), 1) if x.layout and x.kind == "placeholder" else gradient
    got, scale = (gradient * way).sum(), max(abs(slope), np.abs(gradient * way).sum(), 1e-2)
    return "" if not np.isfinite(slope) or abs(got - slope) <= 1e-5 * scale else f"{got}, slope {slope}"


# ---------------------------------------------------------------- calls
def calls(case: Wild) -> Counter[str]:
    """A graph that plans is trained by every call, to the same bits; whole data sets may be refused, in words."""
    done = Counter[str]()
    options: dict[str, Any] = {"batch_size": case.batch, "dtype": "float64"}
    program = cv.compile(case.graph, workers=1, **options)
    try:
        model, fitted = (cv.Model(case.graph, workers=1, **options) for _ in range(2))
    except cv.CalcError:
        return Counter(refused=1)
    resident = cv.CalcHeap(program.heap_bytes).create(program)
    split = cv.SplitModel(cv.plan_devices(case.graph, [cv.Processor("a"), cv.Processor("b")], **options))
    feeds, inputs = resident.loaded.feeds("learn"), model.roles.inputs

    def by_item(data: dict[str, np.ndarray], arrays: list[np.ndarray]) -> Any:
        feed(resident, data, "learn")
        return resident.run_steps(1, "learn")

    ways: tuple[Callable[[dict[str, np.ndarray], list[np.ndarray]], Any], ...] = (
        by_item, lambda _, arrays: model.bind(*arrays)(), lambda _, arrays: split.step(*arrays),
        lambda _, arrays: fitted.step(*arrays),
    )  # fmt: skip
    for k, batch in enumerate((case.batch, 1, case.batch)):
        data = case.data(batch, k)
        arrays = [np.asarray(data[name], order="C") for name in feeds]
        try:
            losses = [way(data, arrays) for way in ways]
        except cv.Trap:
            return done
        assert len({np.float64(loss).tobytes() for loss in losses}) == 1, f"{losses} of {feeds}, batch {batch}"
        done["steps"] += len(ways)
    out = model.run({name: data[name] for name in inputs})
    X, y = ({name: data[name] for name in names} if names else None for names in (inputs, model.roles.targets))
    forms = model.loaded.forms
    by_samples = all(not any(n.a for n in forms[v]) or forms[v][0] == BATCH for v in (*inputs, *model.roles.targets))
    fleet = cv.Fleet(2 * program.heap_bytes)
    drawn = random_elsewhere(case)
    whole = {
        "fleet": all(not any(n.a for n in forms[v]) or forms[v][0] == BATCH for v in feeds),
        "predict": by_samples and all(forms[v][:1] == (BATCH,) for v in model.roles.outputs),
        "evaluate": by_samples and bool(model.roles.figures), "fit": by_samples,
    }  # fmt: skip
    for name, may in whole.items():
        try:
            if name == "fleet":
                handle = fleet.add(program, data=dict(zip(feeds, arrays)), shuffle=False)
                fleet.fit(1, progress=False)
                if handle.status == "trapped":
                    return done
                first = cv.CalcHeap(program.heap_bytes).create(program)
                feed(first, data, "learn")
                close(handle.losses[0], first.run_steps(1, "learn"), "fleet")
            elif name == "predict":
                found = model.predict(X)
                found = found if isinstance(found, dict) else {model.roles.outputs[0]: found}
                assert drawn or all(np.array_equal(found[v], out[v], equal_nan=True) for v in out), (found, out)
            elif name == "evaluate":
                model.evaluate(X, y)
            else:
                loss = fitted.fit(X, y, epochs=1, progress=False, shuffle=False)["loss"]
                close(loss[0], by_item(data, arrays), "fit")
            done[name] += 1
        except cv.Trap:
            return done
        except cv.CalcError as error:
            assert not may, f"{name}: {error}"
            done["refused"] += 1
    return done + (of_many(case, program, (X, y)) if whole["fleet"] and by_samples and not drawn else Counter())


def of_many(case: Wild, program: Any, like: tuple[Any, Any]) -> Counter[str]:
    """Several batches in a fleet, as an array and as they come: one loss, that of the data set where it has one."""
    data = case.data(2 * case.batch + 1, 9)
    X, y = ({name: data[name] for name in given} if given else None for given in like)
    model, streamed = (
        cv.Model(case.graph, workers=1, batch_size=case.batch, dtype="float64", seed=0) for _ in range(2)
    )
    feeds = model.loaded.feeds("learn")
    fleet = cv.Fleet(2 * program.heap_bytes)
    try:
        losses = model.fit(X, y, epochs=2, progress=False, shuffle=False)["loss"]
        handle = fleet.add(program, data={name: data[name] for name in feeds}, shuffle=False, seed=0)
        fleet.fit(2, progress=False)
        parts = [slice(i, i + case.batch) for i in range(0, 2 * case.batch + 1, case.batch)]
        cut = {name for name in feeds if model.loaded.forms[name][:1] == (BATCH,)}
        batches = dict(
            enumerate({name: data[name][part] if name in cut else data[name] for name in feeds} for part in parts)
        ).values()
        come = streamed.fit(batches, epochs=2, progress=False)["loss"]
    except cv.Trap:
        return Counter()
    if handle.status == "done":
        close(handle.losses, losses, "a fleet of several batches")
        close(come, losses, "batches as they come")
    return Counter(many=1)


# ---------------------------------------------------------------- all of it
CHECKS = {"equations": equations, "evaluated": evaluated, "script": script, "gradients": gradients, "calls": calls}


def checked(which: str, seeds: range) -> tuple[Counter[str], list[str]]:
    done, failed = Counter[str](), []
    for seed in seeds:
        case = wild(seed, odd=seed % 2 == 1)
        try:
            cv.plan(case.graph, batch_size=case.batch, dtype="float64")
        except cv.CalcError:
            done["no plan"] += 1
            continue
        try:
            done += CHECKS[which](case)
            done["graphs"] += 1
        except Exception as error:
            if ALONE.match(str(error)):
                done["one value"] += 1
            else:
                failed.append(f"{which}({seed}): {type(error).__name__}: {error}")
    return done, failed


def over(which: str, n: int) -> Counter[str]:
    chunks = [(which, range(i, min(i + CHUNK, n))) for i in range(0, n, CHUNK)]
    if n <= 100:
        found = [checked(*chunk) for chunk in chunks]
    else:
        with get_context("spawn").Pool(os.cpu_count(), maxtasksperchild=8) as pool:
            found = pool.starmap(checked, chunks, chunksize=1)
    failed = [text for _, texts in found for text in texts]
    assert not failed, f"{len(failed)} of {n} fail:\n\n" + "\n\n".join(failed[:5])
    total = sum((done for done, _ in found), Counter[str]())
    assert total["graphs"] > 0.9 * n, total
    print(which, dict(total))
    return total


@pytest.mark.parametrize("which", CHECKS)
def test_what_is_drawn_is_what_the_program_computes(which, whole):
    over(which, WHOLE if whole else SAMPLE)


# ---------------------------------------------------------------- attributes
NUMBERS = (2, 1, 0, -1, 3, 0.5, 2.5)


def attributes(name: str) -> dict[str, Any]:
    """Of an operator, those that are numbers, with what an example or their default says."""
    spec = OPS[name]
    said = {a.name: a.default for a in spec.attrs} | {k: v for e in spec.examples for k, v in e.attrs.items()}
    return {a.name: said[a.name] for a in spec.attrs if type(said[a.name]) in (int, float)}


def with_attribute(name: str, attr: str, number: Any) -> Wild:
    """The operator in a graph of its own (CalcError: it does not take the number)."""
    spec = OPS[name]
    small = [e for e in spec.examples if not e.bench]
    example = next((e for e in small if any(None in s for s in e.shapes)), small[0])  # of a batch, where there is one
    example = replace(example, attrs={**example.attrs, attr: number}, low=max(example.low, 0.1))
    graph = Placed(spec, example).graph()
    placed = Placed(spec, replace(example, integer={slot: below(spec, example, slot) for slot in example.integer}))
    for parameter, init in placed.parameters(np.random.default_rng(0)).items():
        graph.variables[parameter].init = init
    with graph.path("predict") as predict:
        predict.output = graph.variables["y"]
    over_samples = attr == "axis" and number == 0 and example.shapes[0][0] is None  # of which no rounds are made
    case = Wild(int(over_samples), graph, 3)
    case.drawn = {slot: lambda rng, batch, slot=slot: placed.data(batch, rng)[slot] for slot in placed.inputs(1)}
    cv.plan(graph, batch_size=case.batch, dtype="float64")
    return case


@pytest.mark.parametrize("name", [n for n in OPERATORS if OPS[n].differentiable and attributes(n)])
def test_an_attribute_is_any_kind_of_number(name, whole):
    """Equations and scripts of whatever number an operator takes, however it is said."""
    done = Counter[str]()
    for attr, usual in attributes(name).items():
        taken = 0
        for number in (number for value in (*NUMBERS, usual) for number in kinds(value)[:: 1 if whole else 2]):
            try:
                case = with_attribute(name, attr, number)
            except cv.CalcError:
                done["not taken"] += 1
                continue
            done += equations(case) + script(case)
            taken += 1
            if taken == 2 and not whole:
                break
        assert taken, f"{name}: {attr}"
    assert not done["refused"] and done["numbers"] > 0.9 * (done["equations"] + done["scripts"]) > 0, done
    print(name, dict(done))
