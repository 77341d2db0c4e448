"""Tamper fuzz: no altered program that the verifier accepts may touch memory outside its heap.

    python tests/fuzz_programs.py --programs 100000

Half of the programs are real ones (MLPs, planned and assembled) with words, rows, patches, symbols or
sizes altered; the other half are made of random rows of every registered instruction, their operands
flush with the ends of the heap.  What the verifier accepts runs natively, with 1 and 2 workers, on a heap
between guard pages (flush with the lower and the upper one in turn), its cells holding anything: ordinary
numbers, NaN, huge values, random bits.  Counted are refused and run programs, crashes (a guard page was
touched: the process died), hangs, escapes (cells between heap and guard page, or the heap's reserved
cells, were changed) and strays (a row changed cells of the heap that it does not declare to write).
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import mmap
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np

import calcvm as cv
from calcvm import optim
from calcvm.errors import ProgramError
from calcvm.graph import CalcGraph, apply
from calcvm.kernels_cpu import address_of
from calcvm.lowering import lower
from calcvm.ops import ROWS
from calcvm.ops.dims import Affine
from calcvm.ops.sizes import On, evaluate, workspace
from calcvm.ops.spec import HEADER_WORDS, RowSpec, row_words
from calcvm.ops.types import BYTES, VARIABLES, bytes_of, dtype_of
from calcvm.planner import plan
from calcvm.vm.program.assemble import assemble
from calcvm.vm.program.encoding import (
    FLAG_PC_SHIFT,
    FLAG_PHASES,
    FLAG_SYNC,
    Instruction,
    encode_row,
    float_bits,
    form_of,
    instructions,
    phases_of,
)
from calcvm.vm.program.program import Program, Symbol, Zone
from calcvm.vm.program.verify import verify

PAGE = mmap.PAGESIZE
SENTINEL = 0xA5
HANG_SECONDS = 60
LARGEST_HEAP = 1 << 24  # bytes; what is accepted for a larger heap is counted, not run
KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3)
EXTREMES = (0, 1, 2, -1, -2, 15, 16, 2**31, 2**32, -(2**31), 2**40, 2**40 + 1, 2**47, 2**62, 2**63 - 1, -(2**63))


# ---------------------------------------------------------------- real programs
FUNCTIONS = {"gpu": 0, "max": max, "min": min, "ceil_div": lambda n, m: -(-n // m)}  # of size expressions


def mlp(sizes: tuple[int, ...], optimizer: optim.Optimizer, loss: str = "softmax_cross_entropy", act: str = "sigmoid",
        batch: int = 7, workers: int = 2, dtype: str = "float32", accumulate: bool = True) -> Program:  # fmt: skip
    """An assembled MLP: linear layers with an activation between them, a loss, an optimizer, a metric path."""
    g = CalcGraph()
    h = g.placeholder("x", (None, sizes[0]))
    t = g.placeholder("t", (None,) if loss == "softmax_cross_entropy" else (None, sizes[-1]))
    with g.path("learn", backward=True) as learn:
        for i, (m, n) in enumerate(zip(sizes, sizes[1:])):
            w, b = g.parameter(f"w{i}", (m, n)), g.parameter(f"b{i}", (n,))
            h = apply("linear", h, w, b, out=f"z{i}")
            if i + 2 < len(sizes):
                h = apply(act, h, out=f"y{i}")
        learn.minimize(apply(loss, h, t, out="loss"), optimizer, output=h)
    with g.path("score"):
        apply("accuracy" if loss == "softmax_cross_entropy" else "rmse", h, t, out="metric")
    lowered, facts = lower(g, dtype=dtype, workers=workers, accumulate=accumulate)
    itemsize = {"float32": 4, "float64": 8}[dtype]
    planned = plan(lowered, itemsize=itemsize, batch_size=batch, workers=workers)
    return assemble(lowered, planned, dtype, {"variables": facts.variables})


def typed(dtype: str, labels: str) -> Program:
    """A program with numbers of several types."""
    g = CalcGraph()
    x, t = g.placeholder("x", (None, 5), dtype="uint8"), g.placeholder("t", (None,), dtype=labels)
    on, W = g.placeholder("on", (None, 3), dtype="bool"), g.parameter("W", (5, 3))
    with g.path("learn", backward=True) as learn:
        z = apply("matmul", apply("affine", x, a=1 / 255, b=0.0), W)
        y = apply("where", on & (z > 0), z, z * 0.1)
        learn.minimize(apply("softmax_cross_entropy", y, t), optimizer=optim.SGD(0.1), output=y)
    with g.path("look"):
        apply("transpose", x[:, 1:4], axes=(1, 0))
        apply("accuracy", y, t)
        apply("pick", y, t)
        apply("cast", apply("equal", t, 1), to="int32")
    return cv.compile(g, batch_size=7, dtype=dtype, workers=2)


def carrying(dtype: str, batch: int) -> Program:
    """A program that keeps states of samples, one of which another path changes too."""
    g = CalcGraph()
    x, t = g.placeholder("x", (None, 3)), g.placeholder("t", (None, 5))
    h, n, U = g.carry("h", (None, 5)), g.carry("n", (None,)), g.parameter("U", (5, 5))
    W = g.parameter("W", (3, 5))
    with g.path("learn", backward=True) as learn:
        y = cv.carry(h, cv.tanh(x @ W + h @ U))
        learn.minimize(cv.mse(y, t), optimizer=optim.SGD(0.1), output=y)
    with g.path("predict") as predict:
        predict.output = cv.carry(h, cv.tanh(x @ W + h @ U))
        cv.carry(n, n + cv.sum(h, 1))
    return cv.compile(g, batch_size=batch, dtype=dtype, workers=2)


def real_programs() -> list[Program]:
    return [
        carrying("float32", 9),
        carrying("float64", 4),
        typed("float32", "int64"),
        typed("float64", "uint8"),
        mlp((6, 4, 3), optim.SGD(0.1)),
        mlp((5, 8, 8, 4), optim.Adam(1e-3), batch=12),
        mlp((3, 17, 2), optim.SGD(0.1, momentum=0.9), loss="mse", act="tanh", batch=33),
        mlp((4, 6, 5), optim.AdamW(1e-3, clip_norm=1.0), act="relu", batch=1),
        mlp((4, 6, 5), optim.RMSProp(1e-3), act="gelu", dtype="float64", accumulate=False, batch=5),
        mlp((9, 3), optim.Adagrad(1e-2), loss="huber", batch=16, workers=1),
    ]


# ---------------------------------------------------------------- alterations
def tamper(program: Program, rng: np.random.Generator) -> Program:
    """One to three random alterations of a program's content."""
    f = SimpleNamespace(
        rows=program.rows.copy(), patches=program.patches.copy(), values=program.operand_values.copy(),
        fields={}, spec=program.spec,
    )  # fmt: skip
    for _ in range(rng.integers(1, 4)):
        if f.rows.shape[1] > 2:
            ALTERATIONS[rng.choice(len(ALTERATIONS), p=WEIGHTS)](program, f, rng)
    if rng.random() < 0.3:  # a forger would keep the rows' indexes right
        f.rows[:, 1] = (np.arange(len(f.rows)) << FLAG_PC_SHIFT) | (f.rows[:, 1] & (FLAG_SYNC | FLAG_PHASES))
    return replace(program, info={}, rows=f.rows, patches=f.patches, operand_values=f.values, **f.fields)


def _pick(f: SimpleNamespace, rng: np.random.Generator) -> tuple[int, int]:
    """A random word, mostly a used one."""
    row = int(rng.integers(len(f.rows)))
    spec = f.spec(row)
    used = min(spec.n_words if rng.random() < 0.95 else f.rows.shape[1], f.rows.shape[1])
    low = HEADER_WORDS if rng.random() < 0.9 and used > HEADER_WORDS else 0
    return row, int(rng.integers(low, used))


def _flip(program, f, rng):
    row, word = _pick(f, rng)
    f.rows[row, word] ^= np.int64(1) << np.int64(rng.integers(63))


def _nudge(program, f, rng):
    row, word = _pick(f, rng)
    f.rows[row, word] += rng.choice([-16, -8, -2, -1, 1, 2, 8, 16])


def _shrink(program, f, rng):
    row, word = _pick(f, rng)
    if 0 < f.rows[row, word] < 2**40:
        f.rows[row, word] = rng.integers(0, f.rows[row, word])


def _extreme(program, f, rng):
    row, word = _pick(f, rng)
    f.rows[row, word] = EXTREMES[rng.integers(len(EXTREMES))]


def _random(program, f, rng):
    row, word = _pick(f, rng)
    f.rows[row, word] = rng.integers(-(2**63), 2**63 - 1) >> int(rng.integers(63))


def _float(program, f, rng):
    row, word = _pick(f, rng)
    f.rows[row, word] = float_bits(rng.choice([np.nan, np.inf, -np.inf, 0.0, 1e-300, 1e30, -1e30, 1e300, 0.5]))


def _swap_words(program, f, rng):
    (r, i), (s, j) = _pick(f, rng), _pick(f, rng)
    if rng.random() < 0.5:
        s = r
    f.rows[r, i], f.rows[s, j] = int(f.rows[s, j]), int(f.rows[r, i])


def _swap_operands(program, f, rng):
    """Swap operands with the symbols behind them."""
    (r, i), (s, j) = _pick(f, rng), _pick(f, rng)
    for a in (f.rows, f.values):
        if max(i, j) < a.shape[1]:  # another alteration has narrowed one of them
            a[r, i], a[s, j] = int(a[s, j]), int(a[r, i])


def _swap_rows(program, f, rng):
    r, s = rng.integers(len(f.rows), size=2)
    f.rows[[r, s]] = f.rows[[s, r]]
    if rng.random() < 0.7:
        f.values[[r, s]] = f.values[[s, r]]


def _copy_row(program, f, rng):
    r, s = rng.integers(len(f.rows), size=2)
    f.rows[r], f.values[r] = f.rows[s].copy(), f.values[s].copy()


def _repoint(program, f, rng):
    """Another symbol behind an operand, at that symbol's offset or inside it."""
    row, word = _pick(f, rng)
    k = int(rng.integers(len(program.symbols)))
    f.values[row, word] = k
    s = program.symbols[k]
    f.rows[row, word] = s.offset + int(rng.integers(0, 3)) * int(rng.integers(0, s.elems.at(program.batch_size) + 1))


def _instruction(program, f, rng):
    """A row of another instruction, or of none."""
    row, n = int(rng.integers(len(f.rows))), len(program.instructions)
    f.rows[row, 0] = rng.integers(n) if rng.random() < 0.8 else rng.choice([-1, n, n + 1, 2**31, 2**62, -(2**63)])


def _list(program, f, rng):
    """Another instruction in a place of the list, mostly well; or one that is of another form, twice there or not there."""
    listed = list(f.fields.get("instructions", program.instructions))
    k, name = int(rng.integers(len(listed))), str(rng.choice(list(ROWS)))
    choice = rng.integers(6)
    if choice < 3:
        listed[k] = Instruction(name, form_of(ROWS[name]))
    elif choice == 3:
        listed[k] = Instruction(listed[k].name, form_of(ROWS[name]))
    elif choice == 4:
        listed.insert(k, listed[k] if rng.random() < 0.3 else Instruction(name, form_of(ROWS[name])))
    elif len(listed) > 1:
        del listed[k]
    f.fields["instructions"] = tuple(sorted(listed) if rng.random() < 0.9 else listed)


def _width(program, f, rng):
    """Rows that are longer or shorter than their header says."""
    n = int(rng.choice([-8, -1, 1, 8]))
    change = (lambda a: np.pad(a, ((0, 0), (0, n)))) if n > 0 else (lambda a: a[:, :n].copy())
    if rng.random() < 0.9:
        f.rows = change(f.rows)
    if rng.random() < 0.9:
        f.values = change(f.values)


def _sync(program, f, rng):
    f.rows[rng.integers(len(f.rows)), 1] ^= FLAG_SYNC


def _patch(program, f, rng):
    if len(f.patches):
        f.patches[rng.integers(len(f.patches)), rng.integers(4)] += rng.choice([-(2**62), -7, -1, 1, 7, 2**40, 2**62])


def _drop_patch(program, f, rng):
    if len(f.patches):
        f.patches = np.delete(f.patches, rng.integers(len(f.patches)), axis=0)


def _sizes(program, f, rng):
    name = rng.choice(["heap_elems", "batch_size", "workers"])
    value = getattr(program, name)
    f.fields[name] = int(rng.choice([0, 1, value - 1, value + 1, value * 2, 2**40, 2**62, -1]))


def _symbol(program, f, rng):
    """A symbol elsewhere, of another size, kind or type."""
    symbols = list(f.fields.get("symbols", program.symbols))
    k = int(rng.integers(len(symbols)))
    s = symbols[k]
    choice = rng.integers(5)
    if choice == 0:
        s = replace(s, offset=int(s.offset + rng.choice([-64, -16, -1, 1, 16, 64, 2**40])))
    elif choice == 1:
        s = replace(s, elems=Affine(int(s.elems.a + rng.integers(-1, 2)), int(s.elems.b + rng.integers(-16, 17))))
    elif choice == 2:
        kinds = ["parameter", "state", "placeholder", "activation", "gradient", "optimizer", "workspace", "carry"]
        s = replace(s, kind=str(rng.choice(kinds)))
    elif choice == 3:
        s = replace(s, persistent=not s.persistent)
    else:
        s = replace(s, dtype=str(rng.choice([*BYTES])))
    symbols[k] = s
    f.fields["symbols"] = tuple(symbols)


ALTERATIONS = (_flip, _nudge, _shrink, _extreme, _random, _float, _swap_words, _swap_operands, _swap_rows, _copy_row,
               _repoint, _instruction, _sync, _patch, _drop_patch, _sizes, _symbol, _list, _width)  # fmt: skip
WEIGHTS = np.array([3, 3, 6, 2, 1, 1, 2, 2, 1, 1, 3, 1, 1, 1, 1, 1, 1, 1, 0.3], float)
WEIGHTS /= WEIGHTS.sum()

INTEGERS = ("int64", "int32", "uint8", "int8")
INDEXES = np.array([-1, 0, 1, 2, 3, 4, 5, 16, 255, 2**31, 2**62, 2**63 - 1, -(2**63)])


# ---------------------------------------------------------------- random rows
def synthetic(rng: np.random.Generator, names: list[str]) -> Program:
    """Rows of random instructions over one big symbol, operands where they may do harm: at the heap's ends."""
    dtype = ("float32", "float64")[rng.integers(2)]
    size = BYTES[dtype]
    workers = int(rng.integers(1, 4))
    heap = 16 * int(rng.integers(4, 160))
    n = int(rng.integers(1, 4))
    specs = [_instance(ROWS[str(rng.choice(names))], rng) for _ in range(n)]
    listed, width = instructions(specs), row_words(specs)
    rows, values = np.zeros((n, width), np.int64), np.full((n, width), -1, np.int32)
    top = int(rng.choice([4, 9, 20, 70]))
    half = 16 + 16 * int(rng.integers(0, heap // 32)) if rng.random() < 0.5 else heap
    regions = {dtype: (16 * size, half * size)}  # in bytes, a symbol each
    for own in sorted({dtype_of(o.type, dtype) for spec in specs for o in spec.operands} - {dtype}):
        begin = max(stop for _, stop in regions.values())
        regions[own] = begin, begin + 64 * int(rng.integers(1, 12))
    moved = (max(stop for _, stop in regions.values()) - half * size) // size
    heap, room_for = heap + moved, {own: k for k, own in enumerate(regions)}
    half += moved
    for i, spec in enumerate(specs):
        words: dict[str, float] = {}
        for w in spec.words:
            if w.kind == "dim":
                words[w.name] = int(rng.choice([0, 1, 1, 2, 3, 4, 8, 16, int(rng.integers(0, top + 1))]))
            elif w.kind == "int":
                words[w.name] = int(rng.integers(int(w.lo), int(min(w.hi, w.lo + 8)) + 1))
            else:
                words[w.name] = float(np.clip(rng.choice([0.0, 0.5, 1.0, -1.0, 2.0, rng.normal(), 1e30]), w.lo, w.hi))
        if "a5" in words or "b5" in words:
            _strides(words, rng)
        if spec.workspace and rng.random() < 0.8:
            words["wn"] = int(rng.choice([size.at(1) for size in workspace(spec, words, On(workers, 0))]))
        if "phases" in words and rng.random() < 0.8:
            words["phases"] = evaluate(spec.phases, {**words, "nw": workers, "gpu": 0})
        sizes = {**words, "nw": workers, **FUNCTIONS}
        offsets: dict[str, int | None] = {}
        several = FLAG_PHASES if words.get("phases", 1) > 1 else 0
        for k, o in enumerate(spec.operands, HEADER_WORDS + len(spec.words)):
            elems = max(eval(o.elems, {"__builtins__": {}}, sizes), 0)
            scratch = o.access == "s"
            own = dtype_of(o.type, dtype)
            low, high = (half, heap) if scratch else (n // BYTES[own] for n in regions[own])
            if (o.optional or (scratch and not elems)) and (scratch or rng.random() < 0.4):
                offsets[o.name] = None
                continue
            room = high - elems
            start = int(rng.choice([low, room, rng.integers(low, max(room, low) + 1)]))
            offsets[o.name] = start
            values[i, k] = len(regions) if scratch else room_for[own]
        place = [name for name, _ in listed].index(spec.name)
        row = encode_row(spec, words, offsets, i << FLAG_PC_SHIFT | FLAG_SYNC | several, place)
        rows[i, : len(row)] = row
    symbols = (
        *(
            Symbol(
                name=own,
                kind="state",
                offset=a // BYTES[own],
                elems=Affine(0, (b - a) // BYTES[own]),
                shape=(),
                persistent=True,
                dtype=own,
            )
            for own, (a, b) in regions.items()
        ),
        Symbol(name="scratch", kind="workspace", offset=half, elems=Affine(0, heap - half), shape=(), dtype=dtype),
    )
    zones = (
        Zone(name="all", start=16, stop=half, persistent_start=16, persistent_stop=half),
        Zone(name="scratch", start=half, stop=heap),
    )
    return Program(
        dtype=dtype, instructions=listed, rows=rows, patches=np.zeros((0, 4), np.int64), sections={("p", "optimize"): (0, n)}, batch_size=1,
        workers=workers, heap_elems=heap, zones=zones, symbols=symbols, operand_values=values, labels=("",) * n,
    )  # fmt: skip


def _instance(spec: RowSpec, rng: np.random.Generator) -> RowSpec:
    """The row for any types that its operands may be of."""
    return spec.of(tuple(str(rng.choice(VARIABLES[v])) for v in spec.variables))


def _strides(words: dict, rng: np.random.Generator) -> None:
    """Strides as broadcasting makes them, most of the time."""
    for p in "ab":
        if f"{p}5" not in words or rng.random() < 0.1:
            continue
        stride = 1
        for k in range(5, -1, -1):
            broadcast = rng.random() < 0.3 and (k < 5 or words.get("a5" if p == "b" else "b5", 1) == 1)
            words[f"{p}{k}"] = 0 if broadcast else stride
            stride *= 1 if broadcast else words[f"d{k}"]


# ---------------------------------------------------------------- running
class Arena:
    """Writable pages between two that nobody may touch."""

    def __init__(self, nbytes: int):
        self.nbytes = -(-nbytes // PAGE) * PAGE
        self.map = mmap.mmap(-1, self.nbytes + 2 * PAGE)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        libc = ctypes.CDLL(None, use_errno=True)
        for page in (base, base + PAGE + self.nbytes):
            if libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        self.start, self.bytes = base + PAGE, np.frombuffer(self.map, np.uint8, self.nbytes, PAGE)

    def heap(self, nbytes: int, upper: bool) -> tuple[np.ndarray, np.ndarray]:
        """A heap flush with the upper or the lower guard page, and the bytes left over, set to the sentinel."""
        at = self.nbytes - nbytes if upper else 0
        rest = self.bytes[:at] if upper else self.bytes[nbytes:]
        rest[:] = SENTINEL
        return self.bytes[at : at + nbytes], rest


class Runner:
    """Runs verified programs by calling the kernels' native addresses row by row."""

    def __init__(self) -> None:
        self.arenas: dict[int, Arena] = {}
        self.kernels: dict[tuple[str, str], object] = {}
        rng = np.random.default_rng(7)
        n = 1 << 16
        self.fills = {}
        for dtype, integer in (("float32", np.uint32), ("float64", np.uint64)):
            ordinary = rng.normal(size=n).astype(dtype)
            labels = rng.integers(-1, 6, n).astype(dtype)
            mixed = np.where(rng.random(n) < 0.5, ordinary * 1e30, np.nan).astype(dtype)
            bits = rng.integers(0, np.iinfo(integer).max, n, dtype=integer).view(dtype)
            self.fills[dtype] = (ordinary, labels, mixed, np.full(n, np.nan, dtype), np.full(n, -np.inf, dtype), bits)

    def kernel(self, name: str, dtype: str):
        if (name, dtype) not in self.kernels:
            self.kernels[name, dtype] = KERNEL(address_of(name, dtype))
        return self.kernels[name, dtype]

    def run(self, program: Program, rng: np.random.Generator) -> tuple[int, int]:
        """Run all sections; returns escapes and strays."""
        escapes = strays = 0
        pages = -(-program.heap_bytes // PAGE)
        if pages not in self.arenas:
            self.arenas[pages] = Arena(pages * PAGE)
        fills = self.fills[program.dtype]
        batches = {program.batch_size, int(rng.integers(1, program.batch_size + 1))}
        for upper, workers in ((True, 1), (False, min(2, program.workers))):
            for batch in batches:
                raw, rest = self.arenas[pages].heap(program.heap_bytes, upper)
                heap = raw.view(program.dtype)
                fill = fills[rng.integers(len(fills))]
                heap[:] = np.resize(fill, heap.size) if heap.size > fill.size else fill[: heap.size]
                if rng.random() < 0.5:
                    other = fills[rng.integers(len(fills))][: heap.size]
                    heap[: other.size : 3] = other[::3]
                for s in program.symbols:  # indexes that are none, and some that are
                    if s.dtype in INTEGERS and rng.random() < 0.8:
                        own = raw[s.start : s.start + s.bytes.at(program.batch_size)].view(s.dtype)
                        own[:] = rng.choice(INDEXES, own.size).astype(s.dtype)
                heap[:16] = 0
                rows = program.rows_for(batch, int(rng.integers(program.batch_size - batch + 1)))  # as streams do
                strays += self.rows(program, rows, heap, workers)
                escapes += int(not (rest == SENTINEL).all()) + int(heap[2:16].any())
        return escapes, strays

    def rows(self, program: Program, rows: np.ndarray, heap: np.ndarray, workers: int) -> int:
        strays = 0
        bits = heap.view(np.uint8)
        for row in rows:
            spec = program.specs[row[0]]
            before = bits.copy()
            kernel = self.kernel(spec.name, program.dtype)
            for phase, w in product(range(phases_of(row)), range(workers)):
                kernel(heap.ctypes.data, row.ctypes.data, w, workers, phase)
            changed = before != bits
            changed[: 2 * program.itemsize] = False  # the trap
            for start, n in written(spec, row, program.itemsize, program.workers):
                changed[start : start + n] = False
            strays += int(changed.any())
        return strays


def written(spec: RowSpec, row: np.ndarray, itemsize: int, workers: int) -> list[tuple[int, int]]:
    """First byte and bytes of the operands that a row may write."""
    names: dict[str, int] = {"nw": workers, **FUNCTIONS}  # type: ignore[dict-item]
    names |= {w.name: int(row[k]) for k, w in enumerate(spec.words, HEADER_WORDS)}
    out = []
    for k, o in enumerate(spec.operands, HEADER_WORDS + len(spec.words)):
        if o.writes and row[k] >= 0:
            size = bytes_of(o.type, itemsize)
            out.append((size * int(row[k]), size * eval(o.elems, {"__builtins__": {}}, names)))
    return out


# ---------------------------------------------------------------- the campaign
COUNTS = ("programs", "refused", "run", "escapes", "strays", "errors", "too_large")


def campaign(start: int, stop: int, seed: int, progress: np.ndarray) -> None:
    """Programs start..stop-1, each from its own seed; ``progress`` is shared: (next program, *COUNTS)."""
    runner, bases = Runner(), real_programs()
    for p in bases:
        _, strays = runner.run(p, np.random.default_rng(0))
        assert not strays, "an unaltered program strays"
    names = sorted(ROWS)
    for i in range(start, stop):
        progress[0] = i
        rng = np.random.default_rng([seed, i])
        program = tamper(bases[rng.integers(len(bases))], rng) if i % 2 else synthetic(rng, names)
        progress[1] += 1
        try:
            verify(program)
        except ProgramError:
            progress[2] += 1
            continue
        except Exception as error:
            print(f"program {i}: the verifier raised {type(error).__name__}: {error}", flush=True)
            progress[6] += 1
            continue
        if program.heap_bytes > LARGEST_HEAP:
            progress[7] += 1
            continue
        escapes, strays = runner.run(program, rng)
        if escapes or strays:
            rows = [program.spec(pc).name for pc in range(len(program.rows))]
            print(f"program {i}: {escapes} escapes, {strays} strays; rows {rows}", flush=True)
        progress[3:6] += (1, escapes, strays)
    progress[0] = stop


def run(programs: int, seed: int = 0, verbose: bool = True) -> dict[str, int]:
    """Fuzz in a child process that may die; returns the counts, crashes and hangs among them."""
    shared = f"/tmp/calcvm-fuzz-{os.getpid()}"
    progress = np.memmap(shared, np.int64, "w+", shape=(1 + len(COUNTS),))
    crashes = hangs = 0
    start, began = 0, time.monotonic()
    try:
        while start < programs:
            arguments = [sys.executable, __file__, "--child", shared, str(start), str(programs), str(seed)]
            child = subprocess.Popen(arguments)
            last, since = -1, time.monotonic()
            while child.poll() is None:
                time.sleep(0.05)
                if progress[0] != last:
                    last, since = int(progress[0]), time.monotonic()
                elif progress[1] and time.monotonic() - since > HANG_SECONDS:
                    child.kill()
                    child.wait()
            at = int(progress[0])
            if child.returncode == 0:
                break
            if child.returncode > 0 or progress[1] == 0:
                raise RuntimeError(f"the fuzz process failed with status {child.returncode} at program {at}")
            if child.returncode == -signal.SIGKILL:
                hangs += 1
            else:
                crashes += 1
            print(f"program {at}: the process died of {signal.Signals(-child.returncode).name}", flush=True)
            start = at + 1
        counts = dict(zip(COUNTS, progress[1:].tolist())) | {"crashes": crashes, "hangs": hangs}
    finally:
        os.unlink(shared)
    if verbose:
        seconds = time.monotonic() - began
        print(", ".join(f"{v} {k}" for k, v in counts.items()), f"({seconds:.1f} s, seed {seed})", flush=True)
    return counts


def harmless(counts: dict[str, int]) -> bool:
    return not any(counts[k] for k in ("escapes", "strays", "errors", "crashes", "hangs"))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        faulthandler.enable()
        name, first, stop_at, seed_text = sys.argv[2:]
        state = np.memmap(name, np.int64, "r+", shape=(1 + len(COUNTS),))
        campaign(int(first), int(stop_at), int(seed_text), state)
        sys.exit(0)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    sys.exit(0 if harmless(run(options.programs, options.seed)) else 1)
