"""Numbers of any type in the heap, as a user reaches them: graph, plan, compile, call."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn
from calcvm.errors import CalcError, ProgramError
from calcvm.graph import CalcGraph, apply
from calcvm.ops import OPS
from calcvm.ops.spec import Example, find_row, row_named
from calcvm.ops.types import BYTES, FLOAT, instance_of, promoted
from tests.rowrun import Case, run_row

TYPES = ("float32", "float64", "int64", "int32", "uint8", "int8", "bool")
ENDS = {
    "int64": (-(2**63), 2**63 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "uint8": (0, 255),
    "int8": (-128, 127),
    "bool": (0, 1),
}
RNG = np.random.default_rng(0)


def numbers(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    if dtype.startswith("float"):
        return RNG.normal(size=shape).astype(dtype)
    low, high = ENDS[dtype]
    out = RNG.integers(low, high, shape, dtype=np.int64, endpoint=True).astype(dtype)
    out.reshape(-1)[:2] = low, high
    return out


def looked(build, data: dict[str, np.ndarray], workers: int = 1) -> dict:
    """What a path computes of placeholders of the data's own types: ``build`` makes results of them by name."""
    g = CalcGraph()
    given = {name: g.placeholder(name, (None, *a.shape[1:]), dtype=a.dtype) for name, a in data.items()}
    with g.path("look", adopt=False):
        results = build(**given)
    n = len(next(iter(data.values())))
    names = [v.name for v in results.values()]
    program = cv.compile(g, batch_size=n, workers=workers, keep=names)
    with cv.CalcHeap(program.heap_bytes) as heap:
        model = heap.create(program, workers=workers)
        for name, a in data.items():
            model[name] = a
            assert model[name].dtype == a.dtype and np.array_equal(model[name], a, equal_nan=a.dtype.kind == "f")
        model.forward("look")
        return {name: np.array(model[v.name]) for name, v in results.items()}


# ---------------------------------------------------------------- what operators give
COMPARED = {
    "equal": np.equal, "not_equal": np.not_equal, "less": np.less, "less_equal": np.less_equal, "greater": np.greater,
    "greater_equal": np.greater_equal,
}  # fmt: skip


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("of", TYPES)
def test_comparisons_are_numpys(of, workers):
    a, b = numbers(of, (37, 3)), numbers(of, (37, 3))
    b[::2] = a[::2]
    got = looked(lambda a, b: {name: getattr(cv, name)(a, b) for name in COMPARED}, {"a": a, "b": b}, workers=workers)
    for name, fn in COMPARED.items():
        assert got[name].dtype == bool and np.array_equal(got[name], fn(a, b)), name


def test_every_type_goes_through_the_heap_as_it_is():
    data = {f"x_{of}": numbers(of, (5, 4)) for of in TYPES}

    def build(**x):
        out = {f"cut_{n}": v[:, 1:3] for n, v in x.items()}
        out |= {f"turned_{n}": cv.transpose(v, (1, 0)) for n, v in x.items()}
        out |= {f"flat_{n}": cv.reshape(v, (-1, 2, 2)) for n, v in x.items()}
        return out | {f"twice_{n}": cv.concat([v, v]) for n, v in x.items()}

    got = looked(build, data)
    for name, a in data.items():
        for how, want in (("cut", a[:, 1:3]), ("turned", a.T), ("flat", a.reshape(-1, 2, 2)), ("twice", np.c_[a, a])):
            found = got[f"{how}_{name}"]
            assert found.dtype == a.dtype and np.array_equal(found, want), (how, name)


def test_integers_beyond_a_floats_are_exact():
    big = np.array([2**24 + 1, 2**53 + 1, -(2**62) - 1, 2**63 - 1])
    got = looked(lambda a, b: {"same": cv.equal(a, b), "more": a > b, "of": a > 2**53}, {"a": big, "b": big - 1})
    assert not got["same"].any() and got["more"].all() and got["of"].tolist() == [False, True, False, True]


@pytest.mark.parametrize("to", TYPES)
@pytest.mark.parametrize("of", TYPES)
def test_casts(of, to):
    a = numbers(of, (41,)) if not of.startswith("float") else np.linspace(-5.9, 5.9, 41).astype(of)
    if of.startswith("float") and to == "uint8":
        a = np.abs(a)
    got = looked(lambda a: {"y": cv.cast(a, to), "float": cv.cast(a, None)}, {"a": a})
    assert got["y"].dtype == to and np.array_equal(got["y"], a.astype(to))
    assert got["float"].dtype == np.float32 and np.array_equal(got["float"], a.astype(np.float32))


def test_a_float_that_no_integer_is_becomes_the_nearest_one():
    a = np.array([np.nan, np.inf, -np.inf, 300.7, -300.7, 1e30, -1e30], np.float32)
    got = looked(lambda a: {t: cv.cast(a, t) for t in ("int64", "int32", "uint8", "int8", "bool")}, {"a": a})
    for of in ("int64", "int32", "uint8", "int8"):
        low, high = ENDS[of]
        want = [0, high, low, min(300, high), max(-300, low), high, low]
        assert got[of].tolist() == want, of
    assert got["bool"].all()


def test_conditions_and_where():
    a, b, c = (numbers("bool", (19, 4)) for _ in range(3))
    x, y = numbers("uint8", (19, 4)), numbers("uint8", (19, 4))

    def build(a, b, c, x, y):
        return {
            "and": a & b, "or": a | b, "xor": a ^ b, "not": ~a, "pick": cv.where(c, x, y), "zero": cv.where(c, x, 0),
            "numbers": cv.where(c, 2.5, -1.0), "nested": cv.where(a & ~b, x, cv.where(c, y, x)),
        }  # fmt: skip

    got = looked(build, {"a": a, "b": b, "c": c, "x": x, "y": y})
    want = {
        "and": a & b, "or": a | b, "xor": a ^ b, "not": ~a, "pick": np.where(c, x, y), "zero": np.where(c, x, 0),
        "numbers": np.where(c, 2.5, -1.0), "nested": np.where(a & ~b, x, np.where(c, y, x)),
    }  # fmt: skip
    for name, w in want.items():
        assert np.array_equal(got[name], w), name
    assert got["pick"].dtype == got["zero"].dtype == np.uint8


def test_three_operands_broadcast():
    c, x = numbers("bool", (6, 1, 4)), numbers("float32", (6, 3, 4))
    for y in (np.float32(2), RNG.normal(size=(3, 1)).astype("f"), RNG.normal(size=(4,)).astype("f")):
        got = looked(lambda c, x, y=y: {"y": cv.where(c, x, y)}, {"c": c, "x": x})
        np.testing.assert_array_equal(got["y"], np.where(c, x, y))


def test_mod_maximum_minimum():
    a, b = (
        RNG.uniform(-9, 9, (50,)).astype("f"),
        RNG.uniform(0.5, 4, (50,)).astype("f") * RNG.choice([-1, 1], 50).astype("f"),
    )
    a[0], b[1] = np.nan, np.nan
    got = looked(
        lambda a, b: {"mod": a % b, "max": cv.maximum(a, b), "min": cv.minimum(a, 0.5), "of": 7 % b}, {"a": a, "b": b}
    )
    np.testing.assert_allclose(got["mod"], np.mod(a, b), atol=2e-6)
    np.testing.assert_allclose(got["of"], np.mod(np.float32(7), b), atol=2e-6)
    np.testing.assert_array_equal(got["max"], np.maximum(a, b))
    np.testing.assert_array_equal(got["min"], np.minimum(a, np.float32(0.5)))


def test_types_meet():
    assert promoted(["uint8", "int8"]) == "int32" and promoted(["bool", "uint8"]) == "uint8"
    assert promoted(["int64", FLOAT]) == FLOAT and promoted(["int32", "int64"]) == "int64"
    x = {"a": numbers("uint8", (9,)), "b": numbers("int8", (9,)), "f": numbers("float32", (9,))}
    got = looked(lambda a, b, f: {"ab": a < b, "af": a > f, "number": a < 300, "half": a < 100.5}, x)
    wide = {n: v.astype(np.float64) for n, v in x.items()}
    assert np.array_equal(got["ab"], wide["a"] < wide["b"]) and np.array_equal(got["af"], wide["a"] > wide["f"])
    assert got["number"].all() and np.array_equal(got["half"], x["a"] < 100.5)


def test_arithmetic_is_of_floats():
    image = numbers("uint8", (8, 5))
    got = looked(lambda image: {"y": image / 255.0 - 0.5, "z": image * image}, {"image": image})
    np.testing.assert_allclose(got["y"], image / np.float32(255) - 0.5, atol=1e-6)
    np.testing.assert_array_equal(got["z"], image.astype("f") ** 2)


# ---------------------------------------------------------------- training
def masked(g: CalcGraph, labels: str | None, image: str | None):
    x, t = g.placeholder("x", (None, 6), dtype=image), g.placeholder("t", (None,), dtype=labels)
    W, b = g.parameter("W", (6, 4)), g.parameter("b", (4,))
    with g.path("learn", backward=True) as learn:
        z = (x / 16.0) @ W + b
        Y = z * (z > 0) + cv.where(z < -1, 0.1 * z, cv.maximum(z, -0.25)) + cv.minimum(z, cv.square(z))
        L = cv.softmax_cross_entropy(Y, t)
        A = cv.accuracy(Y, t)
        learn.minimize(L, optimizer=cv.Adam(0.05), output=Y)
    return L, A


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_labels_and_images_as_they_are_train_to_the_same_bits(dtype, workers):
    X, T = RNG.integers(0, 256, (50, 6)).astype(np.uint8), RNG.integers(0, 4, 50)
    found = []
    for labels, image, t in ((None, None, T), ("int64", "uint8", T), ("int32", "uint8", T.astype("int32")),
                             ("uint8", None, T.astype("uint8"))):  # fmt: skip
        g = CalcGraph()
        masked(g, labels, image)
        program = cv.compile(g, batch_size=16, dtype=dtype, workers=workers)
        model = cv.CalcHeap(program.heap_bytes).create(program, seed=1, workers=workers)
        losses = [model.step(X[:16], t[:16]) for _ in range(20)]
        model["x"], model["t"] = X[16:20], t[16:20]
        losses.append(model.run_steps(5))
        found.append((losses, {n: v.copy() for n, v in model.parameters.items()}))
    for losses, parameters in found[1:]:
        assert losses == found[0][0]
        for name, v in parameters.items():
            assert v.tobytes() == found[0][1][name].tobytes(), name


@pytest.mark.peers
def test_training_through_conditions_is_pytorchs():
    torch = pytest.importorskip("torch")
    X, T = RNG.integers(0, 256, (16, 6)).astype(np.uint8), RNG.integers(0, 4, 16)
    g = CalcGraph()
    masked(g, "int64", "uint8")
    program = cv.compile(g, batch_size=16, dtype="float64")
    model = cv.CalcHeap(program.heap_bytes).create(program, seed=1)
    W, b = (torch.tensor(model.parameters[n].copy(), requires_grad=True) for n in "Wb")
    optimizer = torch.optim.Adam([W, b], lr=0.05)
    for _ in range(10):
        z = (torch.tensor(X) / 16.0).double() @ W + b
        y = (
            z * (z > 0)
            + torch.where(z < -1, 0.1 * z, torch.maximum(z, torch.tensor(-0.25).double()))
            + torch.minimum(z, z * z)
        )
        loss = torch.nn.functional.cross_entropy(y, torch.tensor(T))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert model.step(X, T) == pytest.approx(loss.item(), rel=1e-9)
    for name, v in (("W", W), ("b", b)):
        np.testing.assert_allclose(model.parameters[name], v.detach().numpy(), rtol=1e-6, atol=1e-8)


def small(labels: str | None = "int64") -> cv.Program:
    g = CalcGraph()
    x, t = g.placeholder("x", (None, 6), dtype="uint8"), g.placeholder("t", (None,), dtype=labels)
    W = g.parameter("W", (6, 3))
    with g.path("learn", backward=True) as learn:
        Y = (x / 255.0) @ W
        learn.minimize(cv.softmax_cross_entropy(Y, t), optimizer=cv.SGD(0.5), output=Y)
    with g.path("predict"):
        P = cv.softmax((x / 255.0) @ W)
        P.rename("P")
    return cv.compile(g, batch_size=8, workers=1)


@pytest.mark.parametrize("given", ["uint8", "int64", "float32", "list", "strided"])
def test_epochs_fleets_and_switches(given, tmp_path):
    """The same data in other types, whole data sets by shuffled epochs, models that take turns in a heap and in a store."""
    program = small()
    X, T = RNG.integers(0, 256, (37, 6)).astype(np.uint8), RNG.integers(0, 3, 37)
    data = {"list": X.tolist(), "strided": np.repeat(X, 2, 1)[:, ::2]}.get(given)
    data = X.astype(given) if data is None else data
    want = cv.CalcHeap(program.heap_bytes).create(program, seed=5)
    got = want.copy(heap=cv.CalcHeap(program.heap_bytes))
    for model, x, t in ((want, X, T), (got, data, T.astype(np.int32))):
        model.fit(x, t, epochs=3)
    assert want["W"].tobytes() == got["W"].tobytes()
    got.save(tmp_path / "it")
    again = cv.load(tmp_path / "it")
    assert again["W"].tobytes() == got["W"].tobytes()
    assert again.step(X[:8], T[:8]) == want.step(X[:8], T[:8])


def test_many_calls_are_compiled_ones():
    """Compiled methods copy labels and images as they are, and leave other types to Python."""
    model = cv.CalcHeap(small().heap_bytes).create(small(), seed=0)
    X, T = RNG.integers(0, 256, (8, 6)).astype(np.uint8), RNG.integers(0, 3, 8)
    want = cv.CalcHeap(small().heap_bytes).create(small(), seed=0)
    for k in range(100):
        x, t = (X, T) if k % 3 else (X.astype(np.float64), T.astype(np.int32))
        assert model.step(x, t) == want.step(X, T)
        np.testing.assert_array_equal(model.predict(x[:3]), want.predict(X[:3]))
    with pytest.raises(CalcError, match=r"labels must be integers in \[0, 3\)"):
        model.step(X, T + 1)
    with pytest.raises(CalcError, match="256 at index .* is no uint8"):
        model.step(X.astype(np.int64) * 0 + 256, T)
    bound = model.bind(X, T)
    assert bound() == want.step(X, T)
    with pytest.raises(CalcError, match="array of uint8"):
        model.bind(X.astype("f"), T)


# ---------------------------------------------------------------- memory
def test_bytes_are_those_of_the_types():
    def heap(dtype):
        g = CalcGraph()
        g.placeholder("x", (None, 64), dtype=dtype)
        with g.path("p"):
            apply("abs", g.placeholder("f", (None, 1)))
        return cv.plan(g, batch_size=32)

    plans = {of: heap(of) for of in (*TYPES, None)}
    for of, plan in plans.items():
        assert plans[None].heap_bytes - plan.heap_bytes == 32 * 64 * (4 - BYTES.get(of, 4)), of


def test_a_cast_to_the_programs_own_float_is_no_row():
    g = CalcGraph()
    x = g.placeholder("x", (None, 3), dtype="float32")
    with g.path("p"):
        cv.exp(x)
    names = {
        dtype: [n for n, _ in cv.compile(g, batch_size=4, dtype=dtype).instructions] for dtype in ("float32", "float64")
    }
    assert names == {"float32": ["exp_fwd"], "float64": ["cast_fwd.float32.float", "exp_fwd"]}


# ---------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    ("dtype", "value", "message"),
    [
        ("uint8", [[1, -1, 0]], r"'x': -1 at index \(0, 1\) is no uint8"),
        ("int64", [[1.5, 0, 0]], r"'x': 1.5 at index \(0, 0\) is no int64"),
        ("int64", [[np.nan, 0, 0]], "nan at index .* is no int64"),
        ("bool", [[0, 1, 2]], "2 at index .* is no bool"),
        ("int32", [[2**40, 0, 0]], "is no int32"),
        ("int64", [["a", "b", "c"]], "data of dtype .* cannot be used"),
    ],
)
def test_numbers_that_a_placeholder_has_not(dtype, value, message):
    g = CalcGraph()
    x = g.placeholder("x", (None, 3), dtype=dtype)
    with g.path("p"):
        cv.equal(x, 0)
    program = cv.compile(g, batch_size=2)
    model = cv.CalcHeap(program.heap_bytes).create(program)
    with pytest.raises(CalcError, match=message):
        model["x"] = value


def test_what_is_no_type_is_refused():
    g = CalcGraph()
    for dtype in ("float16", "int16", "complex64", "what", object, 3):
        with pytest.raises(CalcError, match="placeholder 'x': dtype .* is unknown; take one of float, float32"):
            g.placeholder("x", (None,), dtype=dtype)
    x = g.placeholder("x", (None, 2), dtype=np.int64)
    with g.path("p"):
        with pytest.raises(CalcError, match="cast: dtype"):
            cv.cast(x, "int128")
        with pytest.raises(CalcError, match=r"use cv.where\(condition, x, y\) for an if"):
            if x > 3:
                pass
        with pytest.raises(CalcError, match="a variable is wanted"):
            cv.equal(1, 2)
    with pytest.raises(CalcError, match="-1 at index .* is no uint8"):
        g.constant("c", np.array([-1]), dtype="uint8")


def test_a_row_of_another_type_is_refused():
    from dataclasses import replace

    from calcvm.vm.program.verify import verify

    program = small()
    k = next(k for k, s in enumerate(program.symbols) if s.name == "t")
    symbols = list(program.symbols)
    symbols[k] = replace(symbols[k], dtype="float64")
    with pytest.raises(ProgramError, match="operand target .* is of int64, t of float64"):
        verify(replace(program, symbols=tuple(symbols)))
    for name in (
        "less_fwd.int16",
        "less_fwd.float",
        "less_fwd.int64.int64",
        "add_fwd.int64",
        "pick_fwd.bool",
        "what.int64",
    ):
        assert find_row(name) is None, name
    assert row_named("pick_fwd.uint8").operand("index").type == "uint8"


def test_instances_are_found_by_name():
    for spec in OPS.values():
        for row in spec.rows:
            if row.variables:
                assert find_row(row.name) is row.of((FLOAT,) * len(row.variables)) is row
    assert instance_of("cells", "int32", "float32") == FLOAT and instance_of("cells", "int32", "float64") == "int32"
    assert instance_of("any", "float32", "float32") == FLOAT and instance_of("index", "int64", "float64") == "int64"


INDEXED = {
    "pick": ((None, 3), (None,)),
    "softmax_cross_entropy": ((None, 3), (None,)),
    "accuracy": ((None, 37), (None,)),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("of", ["int64", "int32", "uint8"])
@pytest.mark.parametrize("name", INDEXED)
def test_an_index_that_is_none_traps_and_touches_nothing_else(name, of, dtype):
    spec, shapes = OPS[name], INDEXED[name]
    slot = next(o.name for o in spec.fwd[0].operands if o.below)
    n = shapes[0][1]
    assert n is not None
    case = Case(spec, Example(shapes=shapes, integer={slot: n}, types={"index": of}), dtype, 5)
    assert case.values[slot].dtype == of
    case.forward()
    for wrong in (-1, n, 2**63 - 1, -(2**63)):
        for k in (0, 4):
            bad = case.values[slot].copy()
            bad[k] = np.array(wrong).astype(of)
            if 0 <= bad[k] < n:  # the lowest bits of it are a class
                continue
            for row in (*case.spec.fwd[:1], *case.spec.bwd):
                start = {**case.values, **case.output_gradients(), slot: bad}
                start |= {
                    o.name: np.full(int(np.prod(case.shapes[o.name])), 0.3, dtype)
                    for o in row.reads
                    if o.name in ("p",)
                }
                with pytest.raises(AssertionError, match=f"{row.name} trapped"):
                    run_row(row, case.words, start, dtype, known=case.known())


def test_a_model_of_layers_takes_data_as_they_are():
    X, T = RNG.integers(0, 256, (40, 6)).astype(np.uint8), RNG.integers(0, 3, 40)
    how = dict(input_shape=(6,), loss="softmax_cross_entropy", optimizer=cv.Adam(1e-2), batch_size=10, seed=3)
    net = cv.nn.Linear(8) >> cv.nn.Tanh() >> cv.nn.Linear(3)
    plain, own = cv.Model(net, **how), cv.Model(net, **how, input_dtype="uint8", target_dtype=np.int64)
    assert (own.loaded.own_types, plain.loaded.own_types) == (
        {"input": "uint8", "target": "int64"},
        {},
    )
    for m in (plain, own):
        m.fit(X, T, epochs=3, progress=False)
    assert plain.image().size == own.image().size
    for name, v in plain.parameters.items():
        assert v.tobytes() == own.parameters[name].tobytes()
    assert plain.evaluate(X, T) == own.evaluate(X, T)
    np.testing.assert_array_equal(plain.predict(X), own.predict(X.astype(np.float32)))


def test_a_variable_is_cast_once_in_a_path():
    g = CalcGraph()
    x = g.placeholder("x", (None, 4), dtype="uint8")
    with g.path("p"):
        cv.exp(x / 255.0) + x * cv.sqrt(x)
    names = [op.spec.name for op in g.paths["p"].operations]
    assert names.count("cast") == 1


# ---------------------------------------------------------------- results of their own types
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("to", ["bool", "int8", "uint8", "int32", "int64", "float32", "float64"])
def test_what_is_predicted_has_its_type(dtype, to):
    g = cv.CalcGraph()
    x, w = g.placeholder("x", (None, 3)), g.parameter("w", (3,), init=np.ones(3))
    with g.path("learn", backward=True) as learn:
        y = cv.mean(x * w)
        learn.minimize(y, cv.SGD(0.0), output=y)
    with g.path("predict") as predict:
        a, b = cv.cast(x * 2.0, to), x > 0
        cv.cast(cv.sum(b), "int64")
        predict.output = (a, b)
    m = cv.Model(g, batch_size=4, dtype=dtype)
    given = np.arange(33.0).reshape(11, 3)
    for _ in range(3):
        found = m.predict(given)
        assert found[a.name].dtype == to and found[b.name].dtype == bool
        np.testing.assert_array_equal(found[a.name], (given * 2).astype(to))
        np.testing.assert_array_equal(found[b.name], given > 0)
    out = {a.name: np.empty((11, 3), to), b.name: np.empty((11, 3), bool)}
    m.predict(given, out=out)
    np.testing.assert_array_equal(out[b.name], given > 0)
    with pytest.raises(cv.CalcError, match="bool"):
        m.predict(given, out={**out, b.name: np.empty((11, 3), "float32")})


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("type_", "values", "other"),
    [
        ("int64", 1_700_000_000 + np.array([-100, -1, 0, 1, 100]), 1.7e9),
        ("int32", 16777216 + np.array([-1, 0, 1, 2]), 16777217.0),
        ("float64", 1 + np.array([-1e-12, 0, 1e-12]), 1.0),
        ("float64", 1 + np.array([-1e-12, 0, 1e-12]), 1),
    ],
)
def test_what_differs_is_not_equal(dtype, type_, values, other):
    """Types that meet are compared in one that has them, whatever the program's float is."""
    g = cv.CalcGraph()
    x, y = g.placeholder("x", (None,), dtype=type_), g.placeholder("y", (None,), dtype="float64")
    with g.path("p"):
        made = {">": x > other, "=": cv.equal(x, other), "y>": x > y, "y=": cv.equal(y, x)}
    m = cv.CalcHeap("1 MiB").create(cv.compile(g, batch_size=len(values), dtype=dtype))
    m["x"], m["y"] = values, np.full(len(values), float(other))
    m.forward("p")
    for name, wanted in ((">", values > other), ("=", values == other)):
        for of in ("", "y"):
            np.testing.assert_array_equal(m[made[of + name].name], wanted)


def test_a_condition_that_python_has_answered_is_refused():
    g = cv.CalcGraph()
    x = g.placeholder("x", (None,), dtype="int64")
    with g.path("p"), pytest.raises(cv.CalcError, match="cv.equal"):
        cv.where(x == 1, 1.0, 0.0)


# ---------------------------------------------------------------- what a loss says of its targets
TARGETS = [None, "int64", "int32", "int8", "uint8", "float32", "float64"]


def of_target(loss, outputs, dtype, seed=0):
    net = cv.nn.Linear(outputs)
    return cv.Model(
        net, input_shape=(4,), loss=loss, batch_size=10, seed=seed, target_dtype=dtype, optimizer=cv.SGD(0.5)
    )


@pytest.mark.parametrize("dtype", TARGETS)
def test_outputs_are_scores_of_classes_whatever_the_labels_are(dtype):
    x, t = np.random.default_rng(0).normal(size=(30, 4)), np.arange(30) % 3
    models = [of_target("softmax_cross_entropy", 3, dtype, seed) for seed in range(2)]
    mean = np.mean([m.predict_proba(x) for m in models], 0)
    np.testing.assert_allclose(cv.Ensemble(models).predict(x), mean, rtol=1e-6)
    np.testing.assert_array_equal(models[0].predict_classes(x), models[0].predict(x).argmax(-1))
    assert cv.Ensemble(models).evaluate(x, t)["loss"] > 0


@pytest.mark.parametrize("dtype", TARGETS)
@pytest.mark.parametrize(
    ("loss", "outputs", "wrong"),
    [("softmax_cross_entropy", 3, 3), ("softmax_cross_entropy", 3, 2.5), ("binary_cross_entropy", 1, 2)],
)
def test_wrong_targets_are_refused_before_anything_changes(dtype, loss, outputs, wrong):
    m = of_target(loss, outputs, dtype)
    if wrong != int(wrong) and dtype not in (None, "float32", "float64"):
        dtype = None  # no integer: refused, as no such number
    right = np.zeros(2 if outputs == 3 else (2, 1))
    with pytest.raises(cv.CalcError) as error:
        before = m.get_weights()
        m.step(np.ones((2, 4)), (right + wrong).astype(dtype or "float64"))
    assert not isinstance(error.value, cv.Trap)
    for name, w in before.items():
        np.testing.assert_array_equal(m.get_weights()[name], w)
    m.step(np.ones((2, 4)), right)


# ---------------------------------------------------------------- the rest of a division
@pytest.mark.parametrize("dtype", ["uint8", "int8", "float32", "float64"])
def test_mod_is_numpys(dtype):
    a = numbers(dtype, (64, 5)) if dtype.endswith("8") else (RNG.integers(-4000, 4000, (64, 5)) / 8).astype(dtype)
    divisors = (7, 3) if dtype == "uint8" else (7, -3, 2.5)
    got = looked(lambda a: {f"by {b}": (a % b).rename(f"by {b}") for b in divisors}, {"a": a})
    for b in divisors:
        np.testing.assert_array_equal(got[f"by {b}"], np.mod(a.astype(np.float64), b).astype(np.float32))


@pytest.mark.parametrize("dtype", ["int64", "int32"])
@pytest.mark.parametrize(
    "of", [lambda x: x % 7, lambda x: 7 % x, lambda x: cv.mod(x, x), lambda x: apply("mod", x, 7.0)]
)
def test_mod_of_integers_that_floats_have_not_is_refused(of, dtype):
    g = CalcGraph()
    x = g.placeholder("ids", (None, 2), dtype=dtype)
    with g.path("p"):
        with pytest.raises(
            CalcError, match=f"mod computes in floats, .* every {dtype}, the type of 'ids': .* use cv.cast"
        ):
            of(x)
        assert of(cv.cast(x, None)).type == FLOAT


# ---------------------------------------------------------------- NaN and ties
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["maximum", "minimum"])
def test_of_two_of_which_one_is_nan_gradients_are_pytorchs(name, dtype):
    torch = pytest.importorskip("torch")
    some = (np.nan, 1.0, 2.0, -0.0, 0.0, np.inf, -np.inf)
    a, b = np.array([(a, b) for a in some for b in some], dtype).T
    w = np.arange(1.0, len(a) + 1).astype(dtype)
    g = CalcGraph()
    p, q = (g.parameter(of, (len(a),), init="zeros") for of in "pq")
    with g.path("learn", backward=True) as learn:
        y = getattr(cv, name)(p, q)
        learn.minimize(cv.sum(y * g.constant("w", w)), cv.SGD(0.1))
    program = cv.compile(g, batch_size=1, keep=[y], dtype=dtype)
    with cv.CalcHeap(program.heap_bytes) as heap:
        model = heap.create(program)
        model.parameters["p"][:], model.parameters["q"][:] = a, b
        model.forward("learn")
        model.backward("learn")
        got = {"y": model["y"].copy(), "p": model.grad("p").copy(), "q": model.grad("q").copy()}
    ta, tb = (torch.tensor(np.ascontiguousarray(of), requires_grad=True) for of in (a, b))
    ty = getattr(torch, name)(ta, tb)
    (ty * torch.tensor(w)).sum().backward()
    for of, theirs in (("y", ty.detach()), ("p", ta.grad), ("q", tb.grad)):
        np.testing.assert_array_equal(got[of], theirs.numpy())


# ---------------------------------------------------------------- numbers that meet what they do not fit
def test_numbers_are_conditions_where_they_are_not_0():
    a = np.array([[1, 255], [6, 0]], np.uint8)
    ways = {
        "right": lambda a: a & 6, "left": lambda a: 6 & a, "none": lambda a: a | 0, "one": lambda a: a ^ 1.5,
        "array": lambda a: a & np.array([0, 300]), "chosen": lambda a: cv.where(2, a, 0),
    }  # fmt: skip
    got = looked(lambda a: {name: way(a).rename(name) for name, way in ways.items()}, {"a": a})
    for name in ("right", "left", "none"):
        np.testing.assert_array_equal(got[name], a != 0)
    np.testing.assert_array_equal(got["one"], a == 0)
    np.testing.assert_array_equal(got["array"], (a != 0) & np.array([False, True]))
    np.testing.assert_array_equal(got["chosen"], a)


@pytest.mark.parametrize("dtype", [None, "int64", "uint8"])
@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 2**70])
def test_an_integer_that_no_type_has_is_told(number, dtype):
    g = CalcGraph()
    x = g.placeholder("x", (None, 2), dtype=dtype)
    with g.path("p"):
        for compare in (lambda: x < number, lambda: cv.equal(number, x), lambda: cv.where(x > 0, x, number)):
            with pytest.raises(CalcError, match=f"{number} is beyond int64: as a float it is "):
                compare()
        with pytest.raises(CalcError, match="an integer of 1329 bits"):
            cv.less(x, 10**400)


def test_floats_beyond_float32_are_infinite_there():
    """On every way in, and without a word of NumPy's: warnings are errors."""
    huge = np.array([[1e300, -1e300], [1.0, np.nan]])
    g = CalcGraph()
    x = g.placeholder("x", (None, 2))
    with g.path("p", adopt=False):
        fed = (x + 0.0).rename("fed")
        added = (x * 0.0 + np.array([1e300, 2.0])).rename("added")
        chosen = cv.where(x < 1e300, -1e300, x).rename("chosen")
    program = cv.compile(g, batch_size=2, keep=[fed, added, chosen])
    with cv.CalcHeap(program.heap_bytes) as heap:
        model = heap.create(program)
        model["x"] = huge
        model.forward("p")
        with np.errstate(over="ignore"):
            rounded = huge.astype(np.float32)
        np.testing.assert_array_equal(model["fed"], rounded)
        np.testing.assert_array_equal(model["added"][1], [np.inf, np.nan])
        np.testing.assert_array_equal(model["chosen"], [[np.inf, -np.inf], [-np.inf, np.nan]])


# ---------------------------------------------------------------- what is said of indexes
def indexed(build):
    g = CalcGraph()
    x, i = g.placeholder("x", (None, 3)), g.placeholder("i", (None,), dtype="int64")
    with g.path("p") as p:
        p.output = build(x, i)
    program = cv.compile(g, batch_size=4)
    model = cv.CalcHeap(program.heap_bytes).create(program)
    model["x"], model["i"] = np.ones((4, 3)), np.array([0, 1, 2, 0])
    return model


@pytest.mark.parametrize(
    ("build", "told"),
    [(cv.pick, "an index of 'i' is not an integer in"), (cv.accuracy, "a label of 'i' is not an integer")],
)
def test_a_trap_says_what_the_operator_is_about(build, told):
    model = indexed(build)
    with pytest.raises(
        CalcError, match=r"'i': indexes and labels must be integers in \[0, 3\); found 0 to 5, 5 at index \(2,\)"
    ):
        model["i"] = np.array([0, 1, 5, 2])
    with pytest.raises(CalcError, match="'i': 0.5 at index"):
        model["i"] = np.array([0, 1, 0.5, 2])
    model.slot.write(model.program.by_name["i"], np.array([0, 1, 5, 2]), (4,))
    with pytest.raises(cv.Trap, match=rf"row 0 .*{told}.*\[0, 3\)"):
        model.forward("p")


@pytest.mark.parametrize("found", [0.5, np.nan])
def test_a_part_of_a_label_is_told(found):
    g = CalcGraph()
    x, i = g.placeholder("x", (None, 3)), g.placeholder("i", (None,))
    with g.path("p") as p:
        p.output = cv.pick(x, i)
    program = cv.compile(g, batch_size=4)
    with cv.CalcHeap(program.heap_bytes) as heap, pytest.raises(CalcError, match=f"integers in .0, 3.; found {found}"):
        heap.create(program)["i"] = np.array([0, 1, found, 2])


def test_what_cannot_be_bound_says_its_type():
    net = nn.Linear(2)
    model = cv.Model(
        net, input_shape=(3,), input_dtype="uint8", loss="mse", optimizer=cv.SGD(0.1), batch_size=4, target_shape=(2,)
    )
    X, Y = np.ones((4, 3), np.uint8), np.ones((4, 2), np.float32)
    assert np.isfinite(model.bind(X, Y)())
    with pytest.raises(CalcError, match="must be a C-contiguous array of uint8, not one of float64: take"):
        model.bind(X.astype(np.float64), Y)
    with pytest.raises(CalcError, match="array of float32 or float64 or int32 or int64 or uint8, not one of float16"):
        model.bind(X, Y.astype(np.float16))
    with pytest.raises(CalcError, match="not one of uint8 that is not contiguous"):
        model.bind(np.asfortranarray(X), Y)
    with pytest.raises(CalcError, match="of uint8, not "):
        model.bind(X.tolist(), Y)


@pytest.mark.parametrize("wrong", [np.ones((4, 3)), 3, None, "x"])
def test_a_layer_is_built_on_a_variable(wrong):
    layers = (
        nn.Linear(2), nn.Linear(2) >> nn.ReLU(), nn.Center(), nn.Dropout(0.0), nn.ReLU(), nn.Reshape(3), nn.Flatten(),
        nn.Function(lambda x: x),
    )  # fmt: skip
    g = CalcGraph()
    with g.path("p"):
        for layer in layers:
            with pytest.raises(CalcError, match="build of .*a variable of a graph is wanted, not "):
                layer.build(wrong, "layer", True)


def test_a_parameter_is_set_through_its_view():
    model = cv.Model(nn.Linear(2), input_shape=(3,), loss="mse", optimizer="adam", batch_size=4, target_shape=(2,))
    with pytest.raises(CalcError, match=r"set what it shows, \['linear_1.weight'\]\[...\] = array"):
        model.parameters["linear_1.weight"] = np.zeros((3, 2))
    model.parameters["linear_1.weight"][...] = 0
    model.parameters["linear_1.weight"] += 1
    assert (model.get_weights()["linear_1.weight"] == 1).all()
    for copied in (copy.deepcopy(model.parameters), pickle.loads(pickle.dumps(model.parameters))):
        copied["linear_1.weight"] = np.zeros((3, 2))
    assert (model.get_weights()["linear_1.weight"] == 1).all()


@pytest.mark.parametrize(
    "blocked",
    [
        lambda y: cv.cast(y, "int32"),
        lambda y: cv.cast(y > 0, "float32"),
        lambda y: y > 0,
        lambda y: cv.where(y > 0, 1.0, 2.0),
        cv.sign,
    ],
)
def test_a_loss_without_gradients_is_refused(blocked):
    """Training would change nothing."""
    how = {"input_shape": (3,), "loss": "mse", "optimizer": "adam", "batch_size": 4, "target_shape": (2,)}
    with pytest.raises(
        CalcError, match="the loss .* has no gradient with respect to 'linear_1.weight': .* integers, conditions"
    ):
        cv.Model(nn.Linear(2) >> nn.Function(blocked), **how)
    model = cv.Model(nn.Linear(2) >> nn.Function(lambda y: cv.where(y > 0, y, 2.0 * y)), **how)
    assert np.isfinite(model.step(np.ones((4, 3)), np.ones((4, 2))))


def test_an_operand_that_is_none_is_told():
    g = CalcGraph()
    x = g.placeholder("x", (None, 2))
    with g.path("p"), pytest.raises(CalcError, match="less: b is None"):
        x < None  # noqa: B015


# ---------------------------------------------------------------- what == is, and what has no gradient
@pytest.mark.parametrize(
    "of",
    [
        lambda x: x * (x == 3),
        lambda x: 1 - (x != 3),
        lambda x: (x > 0) & (x == x),
        lambda x: x + (x is x),
        lambda x: cv.where(x == 3.0, x, 0),
    ],
)
def test_the_bool_of_two_equals_signs_is_refused(of):
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 3))
    with g.path("p"), pytest.raises(cv.CalcError, match=r"cv\.equal"):
        of(x)
    assert x in {x} and x in [g.placeholder("z", (3,)), x] and x != None and x != "x"  # noqa: E711


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("to", [None, "float", "float32", "float64"])
def test_gradients_go_through_casts_of_floats(to, dtype):
    g = cv.CalcGraph()
    x, w = g.placeholder("x", (None, 3)), g.parameter("w", (3,))
    with g.path("learn", backward=True) as learn:
        z = cv.cast(x * w, to)
        learn.minimize(cv.sum(cv.where(z > 3, z, 2 * z) * w), cv.SGD(0.1))
    m = cv.CalcHeap("1 MiB").create(cv.compile(g, batch_size=4, dtype=dtype), seed=0)
    m["x"] = np.full((4, 3), 2)
    m.parameters["w"][...] = 1, 2, 3
    m.forward("learn")
    m.backward("learn")
    np.testing.assert_array_equal(m.grad("w"), [32, 32, 48])


def test_indexes_that_the_type_of_a_placeholder_cannot_tell_apart_are_refused():
    for dtype, given, most in (("float32", None, 2**24), ("float32", "int64", None), ("float64", None, None)):
        g = cv.CalcGraph()
        x, t = g.placeholder("x", (None, 2**24 + 8)), g.placeholder("t", (None,), given)
        with g.path("predict") as predict:
            predict.output = cv.pick(x, t)
        if most:
            with pytest.raises(
                cv.CalcError, match=r"'t' holds numbers below 16,777,224, .* g.placeholder\('t', ..., dtype='int64'\)"
            ):
                cv.plan(g, batch_size=1, dtype=dtype)
        else:
            cv.plan(g, batch_size=1, dtype=dtype)
