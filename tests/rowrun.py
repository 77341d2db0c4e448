"""Runs one operator's rows on heaps laid out by hand, and checks each property that its spec declares.

Every operand lies between guards, starts at a multiple of 64 bytes, and is as long as its declared
extent.  Guards are NaN, of a payload of their operand's own: what is computed from one operand's guard
never looks like another's; those of integers are a number that examples do not draw.  What a row must set is filled
with the same before, so that a cell that was not set shows.  Each ``check_*`` raises AssertionError where the spec lies; tests/test_operators.py runs them over
the whole table, and on specs that lie on purpose.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from calcvm.kernels_cpu import load
from calcvm.kernels_cpu._common import KERNELS
from calcvm.ops import epilogues
from calcvm.ops.dims import Affine, numel, shape_of
from calcvm.ops.sizes import On, evaluate, workspace
from calcvm.ops.spec import Example, Operand, OpSpec, RowSpec
from calcvm.ops.types import BYTES, FLOAT, bytes_of, dtype_of
from calcvm.vm.program.encoding import FLAG_PHASES, encode_row
from tests.reference import reference

load()

NATIVE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3)
RESERVED, PAD = 16, 64  # elements at a heap's begin, bytes of a guard
GUARD = {
    "float32": 0x7FC5EE00,
    "float64": 0x7FF85EED5EED5E00,
    "int64": -(2**62),
    "int32": -(2**30),
    "uint8": 0xA0,
    "int8": -96,
    "bool": 0xA0,
}
EPS = {"float32": 2.0**-23, "float64": 2.0**-52}


def guard_of(row: RowSpec, operand: Operand, dtype: str) -> int:
    """Bits of the NaN around an operand, and in it before it is set."""
    own = dtype_of(operand.type, dtype)
    return (GUARD[own] + 1 + row.operands.index(operand)) % 256 ** BYTES[own]


def bits_of(fill: float | None, row: RowSpec, operand: Operand, dtype: str) -> int:
    """Bits of a number, or of the operand's guard."""
    own = dtype_of(operand.type, dtype)
    if fill is None:
        return guard_of(row, operand, dtype)
    number = fill if own in EPS else int(fill)  # a negative float as a uint8 is what the processor makes of it
    return int(np.array(number).astype(own).view(f"u{BYTES[own]}"))


# ---------------------------------------------------------------- what runs a row
class Cpu:
    """A phase of a row by the CPU's kernels, a worker after the other."""

    gpu, kernels, teams = 0, KERNELS, (2, 3, 5)

    def kind(self, o: Operand) -> str:
        """What a kernel's parameter for an operand must be declared as."""
        return "ptr" if o.type == FLOAT else f"ptr.{o.type}"

    def run(self, name, dtype, cells, row, n_workers, phase, only, reverse) -> None:  # type: ignore[no-untyped-def]
        native = NATIVE(KERNELS[name].address(dtype))
        workers = range(n_workers) if only is None else [only]
        for w in reversed(workers) if reverse else workers:
            native(cells.ctypes.data, row.ctypes.data, w, n_workers, phase)


backend: Any = Cpu()  # tests/cuda puts another in its place


# ---------------------------------------------------------------- cases
@dataclass
class Case:
    """An operator with an example's sizes at its batch, and inputs drawn for it."""

    spec: OpSpec
    example: Example
    dtype: str
    batch: int
    words: dict[str, Any] = field(init=False)
    shapes: dict[str, tuple[int, ...]] = field(init=False)
    values: dict[str, np.ndarray] = field(init=False)  # flat, as the heap holds them

    def __post_init__(self) -> None:
        spec, example = self.spec, self.example

        def typed(rows: tuple[RowSpec, ...]) -> tuple[RowSpec, ...]:
            return tuple(row.of(tuple(example.types.get(v, FLOAT) for v in row.variables)) for row in rows)

        self.spec = spec = replace(spec, fwd=typed(spec.fwd), bwd=typed(spec.bwd))
        self.attrs = {a.name: a.default for a in spec.attrs} | dict(example.attrs)
        for a in spec.attrs:
            assert a.check(self.attrs[a.name]), f"{spec.name}: example's {a.name} fails the attribute's own check"
        given = dict(zip(spec.inputs, map(shape_of, example.shapes)))
        named = dict.fromkeys(spec.inputs) | given
        made = spec.shape(named, self.attrs)
        self.forms, shapes = dict(spec.words(named | made, self.attrs)), given | made
        self.generic = shapes
        self.words = {k: v.at(self.batch) if isinstance(v, Affine) else v for k, v in self.forms.items()}
        self.shapes = {n: tuple(d.at(self.batch) for d in s) for n, s in shapes.items()}
        self.given = tuple(given)
        self.types = {o.name: dtype_of(o.type, self.dtype) for row in spec.rows for o in row.operands}
        rng = np.random.default_rng(sum(map(ord, spec.name)) + len(example.shapes))
        self.values = {}
        for n in self.given:
            size = int(np.prod(self.shapes[n], dtype=int))
            own = self.types.get(n, self.dtype)
            if n in example.integer:
                v: np.ndarray = rng.integers(0, example.integer[n], size)
            elif own == "bool":
                v = rng.integers(0, 2, size)
            elif n == "rng":
                v = rng.integers(1, 1000, size)
            else:
                v = rng.uniform(example.low if own != "uint8" else 0, example.high, size)
            self.values[n] = v.astype(own)

    def array(self, name: str, flat: np.ndarray) -> np.ndarray:
        """A value in its shape, float64 (integers stay)."""
        flat = flat.astype(np.float64) if flat.dtype.kind == "f" else flat
        return flat.reshape(self.shapes[name])

    def expected(self, **changed: np.ndarray) -> dict[str, np.ndarray]:
        """What the reference gives for the inputs (some of them changed)."""
        fn = reference(self.spec.name)
        assert fn is not None, f"operator {self.spec.name} has no reference in tests/reference"
        inputs = [changed.get(n, self.array(n, self.values[n])) for n in self.given]
        attrs = dict(self.example.attrs)
        if isinstance(attrs.get("shape"), tuple):
            attrs["shape"] = tuple(self.batch if n is None else n for n in attrs["shape"])
        out = fn(*inputs, **attrs)
        return out if isinstance(out, dict) else {self.spec.outputs[0]: out}

    def forward(self, **how: Any) -> dict[str, np.ndarray]:
        """All values after the forward rows."""
        values = dict(self.values)
        if self.spec.view:
            values[self.spec.outputs[0]] = values[self.spec.inputs[0]].copy()
        for row in self.spec.fwd:
            values |= run_row(row, self.words, values, self.dtype, **{"known": self.known(), **how})
        return values

    def output_gradients(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(7)
        return {
            f"d{n}": rng.uniform(-1, 1, int(np.prod(self.shapes[n], dtype=int))).astype(self.dtype)
            for n in self.spec.outputs
        }

    def backward(self, values: Mapping[str, np.ndarray], **how: Any) -> dict[str, np.ndarray]:
        """Gradients as the rows give them, by d-name."""
        values = {**values}
        found: dict[str, np.ndarray] = {}
        for row in self.spec.bwd:
            new = run_row(row, self.words, values, self.dtype, known=self.known(), **how)
            values |= new
            found |= new
        return {n: v for n, v in found.items() if n[1:] in self.spec.inputs}

    def known(self) -> set[str]:
        """Values that exist in this example (an operand that is not one of them is left out)."""
        names = set(self.shapes)
        return names | {f"d{n}" for n in names}

    def gradient(self, name: str, gradients: Mapping[str, np.ndarray], dy: np.ndarray) -> np.ndarray:
        """The gradient of an input in its shape: reduced over broadcast axes, passed on where there is no row."""
        y = self.spec.outputs[0]
        passed = self.spec.view or name in self.spec.passes
        g = (dy if passed else gradients[f"d{name}"]).astype(np.float64)
        shape = self.shapes[name]
        if self.spec.broadcast:
            full = self.shapes[y]
            g = g.reshape(full)
            g = g.sum(tuple(range(len(full) - len(shape))))
            axes = tuple(i for i, n in enumerate(shape) if n == 1)
            g = g.sum(axes, keepdims=True)
        return g.reshape(shape)


def cases(spec: OpSpec, dtype: str) -> list[Case]:
    found = [Case(spec, e, dtype, e.batch) for e in spec.examples if not e.bench]
    assert found, f"operator {spec.name} has no example"
    return found


# ---------------------------------------------------------------- one row
def words_of(row: RowSpec, words: Mapping[str, Any], n_workers: int = 1) -> dict[str, Any]:
    """All that a row's sizes read: its words, with those that lowering gives it, and what it runs on."""
    on = On(n_workers, backend.gpu)
    known = {"acc": 0, **row.defaults, **words, **on._asdict()}
    if row.workspace and "wn" not in words:
        wanted = workspace(row, known, on)[1]
        known["wn"] = wanted.at(1) if wanted.constant else wanted
    return {**known, "phases": evaluate(row.phases, known)}


def run_row(
    row: RowSpec,
    words: Mapping[str, Any],
    values: Mapping[str, np.ndarray],
    dtype: str,
    *,
    n_workers: int = 1,
    only: int | None = None,
    until: int | None = None,
    reverse: bool = False,
    alias: tuple[str, str] | None = None,
    known: set[str] | None = None,
    poison: Mapping[str, np.ndarray] | None = None,
    fill: float | None = None,
    raw: bool = False,
) -> dict[str, np.ndarray]:
    """What the row wrote, by operand.  Raises where a guard was touched or a cell was not set.

    until : end with this phase (nothing is required to be set).  only : run this worker alone in it.  alias : (written, read) in one storage.
    poison : {operand: mask of cells} that are NaN before it, or ``fill``.  raw : the bits of written operands and scratch.
    """
    size = np.dtype(dtype).itemsize
    env = words_of(row, words, n_workers)
    offsets: dict[str, int | None] = {}  # in bytes
    extents: dict[str, int] = {}
    wide = {o.name: bytes_of(o.type, size) for o in row.operands}
    end = RESERVED * size + PAD
    for o in row.operands:
        absent = o.optional and (o.name not in known if known is not None else o.name not in values)
        if absent:
            offsets[o.name] = None
            continue
        extents[o.name] = n = int(evaluate(o.elems, env))
        assert n >= 0, f"{row.name}: extent of {o.name} is {n}"
        if alias and o.name == alias[0]:
            continue
        offsets[o.name] = end
        end += -(-n * wide[o.name] // PAD) * PAD + 2 * PAD
    if alias:
        assert extents[alias[0]] == extents[alias[1]]
        offsets[alias[0]] = offsets[alias[1]]
    store = np.empty(end + 64, np.uint8)
    start = -store.ctypes.data % 64
    cells = store[start : start + end]
    cells.view(f"u{size}")[:] = GUARD[dtype]
    cells[: RESERVED * size] = 0
    inside = np.zeros(end, bool)

    def of(o: Operand, around: int = 0) -> np.ndarray:
        """An operand's cells as unsigned integers, and bytes around them."""
        at, n = offsets[o.name], extents.get(o.name, 0) * wide[o.name]
        assert at is not None
        return cells[at - around : at + n + around].view(f"u{wide[o.name]}")

    for o in row.operands:
        at, n = offsets[o.name], extents.get(o.name, 0)
        if at is None:
            continue
        inside[at : at + n * wide[o.name]] = True
        if not alias or o.name != alias[0]:
            of(o, PAD)[:] = guard_of(row, o, dtype)
        if o.access in "ru" or (o.access == "a" and env["acc"] == 1):
            v = values[o.name]
            assert v.size == n, f"{row.name}: {o.name} has {v.size} elements, its declared extent is {n}"
            of(o)[:] = v.view(f"u{wide[o.name]}")
    before = cells.copy()
    for expression in row.require:
        assert evaluate(expression, env) >= 0, f"{row.name} requires {expression} >= 0"
    places = {name: at if at is None else at // wide[name] for name, at in offsets.items()}
    phases = env["phases"]
    encoded = encode_row(row, env, places, 3 << 8 | (FLAG_PHASES if phases > 1 else 0))
    last = phases - 1 if until is None else until
    for phase in range(last + 1):
        if phase == last:
            for name, mask in (poison or {}).items():
                of(row.operand(name))[mask] = bits_of(fill, row, row.operand(name), dtype)
        only_now, heap = only if phase == last else None, cells.view(f"u{size}")
        backend.run(row.name, dtype, heap, encoded, n_workers, phase, only_now, reverse)
    inside[: RESERVED * size] = True
    assert (cells[~inside] == before[~inside]).all(), f"{row.name} wrote outside its operands"
    assert only is not None or not cells[: RESERVED * size].any(), f"{row.name} trapped"
    out = {}
    for o in row.operands:
        if offsets[o.name] is None or not (o.writes if raw else o.writes and o.access != "s"):
            continue
        got = of(o).copy()
        if raw:
            out[o.name] = got
            continue
        if o.access == "w" or (o.access == "a" and env["acc"] == 0):
            left = got == guard_of(row, o, dtype)  # among numbers of a byte it is one that may be right
            assert not (left.all() and left.size if BYTES[dtype_of(o.type, dtype)] == 1 else left.any()), (
                f"{row.name} did not set all of {o.name}"
            )
        out[o.name] = got.view(dtype_of(o.type, dtype))
    return out


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.tobytes() == b.tobytes()


def close(got: np.ndarray, want: np.ndarray, tolerance: float, what: str) -> None:
    """Within ``tolerance`` of each value and of the largest."""
    want = np.asarray(want, np.float64)
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    if want.size == 0:
        return
    scale = np.abs(want) + max(np.abs(want).max(), 1e-3)
    error = np.abs(got - want) / scale
    assert error.max() <= tolerance, f"{what}: relative error {error.max():.2e} exceeds {tolerance:.2e}"


# ---------------------------------------------------------------- checks
def check_forward(case: Case) -> None:
    """The forward rows compute the reference, and set all that they declare."""
    values = case.forward()
    want = case.expected()
    assert set(case.spec.outputs) <= set(want), f"{case.spec.name}: the reference gives {sorted(want)}"
    for name, w in want.items():
        if name not in values:
            continue  # a name the reference explains, and no value of the operator
        got = case.array(name, values[name])
        close(got, w, 64 * EPS[case.dtype], f"{case.spec.name}.{name}")


# Operators whose gradient is, by definition, the slope of another function.
SLOPES = {"fake_quantize": lambda x, scale: np.clip(x, -128 * scale, 127 * scale)}


def check_gradients(case: Case) -> None:
    """float64: the backward rows agree with central differences of the reference."""
    spec = case.spec
    values = case.forward()
    seeds = case.output_gradients()
    gradients = case.backward(values | seeds)
    y, *others = spec.outputs
    graded = [y, *(n for n in others if any(o.name == f"d{n}" for row in spec.bwd for o in row.reads))]
    dy = seeds[f"d{y}"]

    def loss(**changed: np.ndarray) -> float:
        slope = SLOPES.get(spec.name)
        made = case.expected(**changed) if slope is None else {y: slope(*changed.values(), **case.attrs)}
        return float(sum((np.asarray(made[n]).reshape(-1) * seeds[f"d{n}"]).sum() for n in graded))

    for name in spec.differentiable:
        if name not in case.given or case.types.get(name, case.dtype) != case.dtype:
            continue
        x = case.array(name, case.values[name])
        want = np.zeros(x.shape)
        h = 1e-5
        for i in np.ndindex(x.shape):
            up, down = x.copy(), x.copy()
            up[i] += h
            down[i] -= h
            want[i] = (loss(**{name: up}) - loss(**{name: down})) / (2 * h)
        close(case.gradient(name, gradients, dy), want, 1e-6, f"{spec.name}: gradient of {name}")


def check_gradients_float32(case: Case) -> None:
    """float32: the backward rows agree with themselves in float64 on the same inputs."""
    exact = Case(case.spec, case.example, "float64", case.batch)
    exact.values = {n: v.astype(np.float64) if v.dtype == np.float32 else v for n, v in case.values.items()}
    seeds = case.output_gradients()
    wide = {n: v.astype(np.float64) for n, v in seeds.items()}
    got = case.backward(case.forward() | seeds)
    want = exact.backward(exact.forward() | wide)
    for name, g in got.items():
        close(g.astype(np.float64), want[name], 256 * EPS["float32"], f"{case.spec.name}: {name} in float32")


def _row_runs(case: Case) -> list[tuple[RowSpec, dict[str, np.ndarray]]]:
    """Each row with the values it starts from."""
    values = dict(case.values)
    runs = []
    for row in case.spec.fwd:
        runs.append((row, dict(values)))
        values |= run_row(row, case.words, values, case.dtype, known=case.known())
    values |= case.output_gradients()
    for row in case.spec.bwd:
        start = dict(values)
        for o in row.operands:
            if o.access in "ua" and o.name not in start and o.name[1:] in case.shapes:
                start[o.name] = np.linspace(-1, 1, int(np.prod(case.shapes[o.name[1:]], dtype=int))).astype(case.dtype)
        runs.append((row, start))
        values |= run_row(row, case.words, start, case.dtype, known=case.known())
    return runs


def _run(case: Case, row: RowSpec, values: Mapping[str, np.ndarray], **how: Any) -> dict[str, np.ndarray]:
    return run_row(row, case.words, values, case.dtype, known=case.known(), **how)


def check_workers(case: Case) -> None:
    """1, 2, 3 and 5 workers give the same bits, in whatever order they run."""
    for row, values in _row_runs(case):
        want = _run(case, row, values)
        for n in backend.teams:
            for reverse in (False, True):
                got = _run(case, row, values, n_workers=n, reverse=reverse)
                for name, v in want.items():
                    assert same_bits(got[name], v), f"{row.name}: {name} differs with {n} workers"


def check_left_out(case: Case) -> None:
    """A saved value that nobody reads may be left out where its row says so: nothing else changes a bit."""
    for row, values in _row_runs(case):
        for o in row.writes:
            if o.name in case.spec.saved and o.optional:
                want = _run(case, row, values)
                for n in (1, 3):
                    known = case.known() - {o.name}
                    got = run_row(row, case.words, values, case.dtype, known=known, n_workers=n)
                    assert o.name not in got
                    for name, v in got.items():
                        assert same_bits(v, want[name]), f"{row.name}: {name} differs without {o.name}"


def check_epilogues(case: Case) -> None:
    """A row does the epilogues that it takes, each and all, to what it gives alone, as NumPy does them, by any team."""
    rng = np.random.default_rng(3)
    for row, values in _row_runs(case):
        alone = _run(case, row, values)
        result = row.writes[0].name
        env = words_of(row, case.words) | {"act": 2, "alpha": 0.3}
        for kinds in [*((kind,) for kind in row.takes), row.takes] if row.takes else []:
            names = [o.name for o in epilogues.operands_of(kinds, "", "")]
            own = {n: rng.uniform(-1, 1, int(evaluate(row.operand(n).elems, env))).astype(case.dtype) for n in names}
            acts = bool(epilogues.words_of(kinds))
            want = _completed(alone[result].astype(np.float64), own, acts, "ya" in own)
            words = case.words | ({"act": 2, "alpha": 0.3} if acts else {})
            for n in (1, *backend.teams[:2]):
                got = run_row(row, words, values | own, case.dtype, known=case.known() | {*own}, n_workers=n)[result]
                close(got.astype(np.float64), want, 64 * EPS[case.dtype], f"{row.name}: {kinds} by {n} workers")


def _completed(y: np.ndarray, own: Mapping[str, np.ndarray], acts: bool, slope: bool) -> np.ndarray:
    """Normalized by column, added to, and leaky ReLU with slope 0.3, or its derivative by ``ya``."""
    if "factor" in own:
        y = ((y.reshape(-1, own["factor"].size) - own["mean"]) * own["factor"] + own["offset"]).ravel()
    y = y + own.get("other", 0)
    return np.where((own["ya"] if slope else y) > 0, y, 0.3 * y) if acts else y


def check_reads(found: list[Case]) -> None:
    """A value that a backward row declares to read matters in some example.  (That what it declares only to
    write does not matter is seen in every run: such cells are NaN before.)"""
    idle: dict[tuple[str, str], bool] = {}
    for case in found:
        for row, values in _row_runs(case):
            if row not in case.spec.bwd:
                continue
            want = _run(case, row, values)
            for o in row.operands:
                if o.access != "r" or o.name not in values or o.type != FLOAT:
                    continue
                idle.setdefault((row.name, o.name), True)
                for other in (np.nan, 0.0, -3.0, 3.0):
                    changed = {**values, o.name: np.full_like(values[o.name], other)}
                    try:
                        got = _run(case, row, changed)
                    except AssertionError:  # trapped: it was read
                        idle[row.name, o.name] = False
                        break
                    if any(not same_bits(got[n], v) for n, v in want.items()):
                        idle[row.name, o.name] = False
                        break
    for (row_name, operand), unread in idle.items():
        assert not unread, f"{row_name} declares to read {operand}, which changes nothing"


def check_in_place(case: Case) -> None:
    """Each pair that may share storage gives the same bits when it does, for any team."""
    for row, values in _row_runs(case):
        present = {o.name for o in row.operands if not o.optional or o.name in case.known()}
        for written, read in row.in_place:
            if not {written, read} <= present:
                continue
            env = words_of(row, case.words)
            a, b = (int(evaluate(row.operand(n).elems, env)) for n in (written, read))
            sizes = {bytes_of(row.operand(n).type, np.dtype(case.dtype).itemsize) for n in (written, read)}
            if a != b or len(sizes) > 1:
                continue  # a broadcast operand: the planner only merges equal sizes
            want = _run(case, row, values)
            for n, reverse in ((1, False), (3, False), (3, True)):
                got = _run(case, row, values, alias=(written, read), n_workers=n, reverse=reverse)
                for name, v in want.items():
                    assert same_bits(got[name], v), f"{row.name}: {name} differs with {written} in place of {read}"


def check_parts(case: Case) -> None:
    """A worker alone reads and writes only its declared share of each operand, and sets that share right.

    At every batch near which shares change their form: 1, 2, 3, the team's size and its neighbours, the largest.
    """
    if not any(None in shape for shape in (*case.example.shapes, case.attrs.get("shape") or ())):
        _check_parts(case, backend.teams)
        return
    for batch in sorted({1, 2, 3, case.batch}.union(*({n - 1, n, n + 1} for n in backend.teams))):
        near = [n for n in backend.teams if batch in (1, 2, 3, n - 1, n, n + 1, case.batch)]
        _check_parts(Case(case.spec, case.example, case.dtype, batch), near)


def _check_parts(case: Case, teams: Sequence[int]) -> None:
    for row, values in _row_runs(case):
        for n_workers in teams:
            env = words_of(row, case.words, n_workers)
            for until in range(env["phases"]):
                whole = _run(case, row, values, n_workers=n_workers, until=until, raw=True)
                for w in range(n_workers):
                    _check_part(case, row, values, env, until, w, n_workers, whole)


def _check_part(
    case: Case, row: RowSpec, values: Mapping[str, np.ndarray], env: Mapping[str, Any], until: int, w: int,
    n_workers: int, whole: Mapping[str, np.ndarray],
) -> None:  # fmt: skip
    """A worker alone in a phase, after those that all have run."""
    foreign = {}
    for o in row.operands:
        if o.optional and o.name not in case.known():
            continue
        mask = _foreign(row, o, env, w, n_workers)
        if mask is not None:
            foreign[o.name] = mask
    for fill in (None, -1.0):  # a comparison may take NaN for what is right
        how = {"n_workers": n_workers, "until": until, "only": w, "poison": foreign, "fill": fill}
        alone = _run(case, row, values, raw=True, **how)
        for name, mask in foreign.items():
            if name not in alone:
                continue
            operand = row.operand(name)
            who = f"{row.name} at batch {case.batch}: worker {w} of {n_workers}"
            before = bits_of(fill, row, operand, case.dtype)
            assert (alone[name][mask] == before).all(), f"{who} wrote {name} outside its share"
            if operand.access != "s":
                message = f"{who} reads what is not in its share, for {name}"
                assert same_bits(alone[name][~mask], whole[name][~mask]), message


def _foreign(row: RowSpec, o: Operand, env: Mapping[str, Any], w: int, n_workers: int) -> np.ndarray | None:
    """Cells of an operand that are not the worker's; None: it may touch any."""
    n = int(evaluate(o.elems, env))
    mask = np.ones(n, bool)
    if o.part == "w0":
        mask[:] = w != 0
        return mask
    units = int(evaluate(o.part, env)) if o.part else 0
    if units:
        assert n % units == 0, f"{row.name}: {o.name} of {n} elements is not shared by {units} units"
        lo, hi = units * w // n_workers, units * (w + 1) // n_workers
        mask[lo * (n // units) : hi * (n // units)] = False
        return mask
    if o.access == "s" and not backend.gpu and env["phases"] == 1:
        mask[w * (n // n_workers) : (w + 1) * (n // n_workers)] = False
        return mask
    return None


def check_accumulation(case: Case) -> None:
    """A row with the word ``acc`` sets with 0 and adds with 1."""
    for row, values in _row_runs(case):
        if "acc" not in {w.name for w in row.words}:
            continue
        added = replace(case)
        added.words = {**case.words, "acc": 1}
        added.values = case.values
        start = {o.name: values[o.name] for o in row.operands if o.access == "a" and o.name in values}
        assert start, f"{row.name} has the word acc and nothing that it adds to"
        poison = {n: np.ones(v.size, bool) for n, v in start.items()}
        once, twice = _run(case, row, values, poison=poison), _run(added, row, values)
        for n, v in start.items():
            close(twice[n] - v.astype(np.float64), once[n], 64 * EPS[case.dtype], f"{row.name}: {n} with acc")


def check_workspace(case: Case) -> None:
    """Rows give the same bits for any workspace, from the least to what speed wants, and touch no more of it."""
    for row, values in _row_runs(case):
        if not row.workspace:
            continue
        for n in (1, backend.teams[0]):
            on = On(n, backend.gpu)
            least, wanted = (size.at(1) for size in workspace(row, case.words, on))
            assert 0 <= least <= wanted, f"{row.name}: the least workspace is {least}, what speed wants {wanted}"
            want = _run(case, row, values, n_workers=n)
            for wn in sorted({least, least + 1, (least + wanted) // 2, wanted - 1} & {*range(least, wanted)}):
                got = run_row(row, {**case.words, "wn": wn}, values, case.dtype, known=case.known(), n_workers=n)
                for name, v in want.items():
                    assert same_bits(got[name], v), (
                        f"{row.name}: {name} differs with {wn} elements of scratch, not {wanted}"
                    )


def check_names(spec: OpSpec) -> None:
    """Kernels have the words and operands of the spec, in order and of its kinds."""
    for row in spec.rows:
        assert row.name in backend.kernels, f"row {row.name} has no kernel"
        kinds = {"float": "float", "dim": "int", "int": "int"}
        want = [(w.name, kinds[w.kind]) for w in row.words] + [(o.name, backend.kind(o)) for o in row.operands]
        words = list(backend.kernels[row.name].words)
        assert words == want, f"{row.name}: kernel has {words}, spec {want}"


class Counted(np.ndarray):
    """An array that counts the elements that arithmetic gives."""

    operations = 0

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kw: Any) -> Any:
        plain = [np.asarray(x) if isinstance(x, Counted) else x for x in inputs]
        kw = {k: tuple(np.asarray(x) for x in v) if k == "out" else v for k, v in kw.items()}
        out = getattr(ufunc, method)(*plain, **kw)
        if ufunc is np.matmul:
            Counted.operations += 2 * np.size(out) * np.shape(plain[0])[-1]
        elif not ufunc.__name__.startswith(("less", "greater", "equal", "not", "logical", "bitwise", "is")):
            Counted.operations += np.size(plain[0]) if method == "reduce" else np.size(out)
        return np.asarray(out).view(Counted)

    def __array_function__(self, func: Any, kinds: Any, args: Any, kw: Any) -> Any:
        if func is np.einsum:
            plain = [np.asarray(a) if isinstance(a, Counted) else a for a in args]
            info = np.einsum_path(*plain, optimize=False)[1]
            Counted.operations += int(float(info.split("Naive FLOP count:")[1].split()[0]))
            return np.asarray(func(*plain, **kw)).view(Counted)
        return super().__array_function__(func, kinds, args, kw)


def check_flops(case: Case) -> None:
    """Declared operations of the forward: within a factor of 4 of those that the reference does; linear in the batch."""
    forms = [evaluate(row.flops, {"acc": 0, **case.forms}) for row in case.spec.fwd]
    declared = sum(f.at(case.batch) if isinstance(f, Affine) else int(f) for f in forms)
    Counted.operations = 0
    case.expected(
        **{n: case.array(n, case.values[n]).view(Counted) for n in case.given if case.values[n].dtype.kind == "f"}
    )
    counted = Counted.operations
    if case.spec.category in ("shape", "system", "random") or counted <= 32:
        assert declared >= 0
    else:
        assert counted / 4 <= declared <= 4 * counted, (
            f"{case.spec.name} declares {declared} operations, its reference does {counted}"
        )
    for row in case.spec.rows:
        f = evaluate(row.flops, {"acc": 0, **case.forms})
        extents = [evaluate(o.elems, words_of(row, case.forms)) for o in row.operands]
        if isinstance(f, Affine) and f:
            assert f.b == 0 or f.a == 0, f"{row.name}: {f} operations are not proportional to the batch"
            grows = any(isinstance(e, Affine) and e.a for e in extents)
            assert bool(f.a) == grows, f"{row.name}: {f} operations, extents {extents}"


def check_extents(case: Case) -> None:
    """Extents, as forms of the batch, are the sizes of the values they name."""
    sizes = {n: numel(s) for n, s in case.generic.items()}
    for row in case.spec.rows:
        for o in row.operands:
            name = o.name if o.name in sizes else o.name[1:] if o.name.startswith("d") else ""
            if name not in sizes or o.access == "s":
                continue
            if case.spec.broadcast and o.name.startswith("d"):
                name = case.spec.outputs[0]  # gradients in the output's full shape
            got = evaluate(o.elems, words_of(row, case.forms))
            assert got == sizes[name] or sizes[name] == got, (
                f"{row.name}: extent of {o.name} is {got}, not {sizes[name]}"
            )


def _each(check: Any) -> Any:
    def over(found: list[Case]) -> None:
        for case in found:
            check(case)

    return over


CHECKS = {
    "extents": _each(check_extents),
    "forward": _each(check_forward),
    "workers": _each(check_workers),
    "left_out": _each(check_left_out),
    "in_place": _each(check_in_place),
    "parts": _each(check_parts),
    "reads": check_reads,
    "accumulation": _each(check_accumulation),
    "workspace": _each(check_workspace),
}
