"""The verifier: real programs pass, and each rule refuses what breaks it, naming row, operand and numbers."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import calcvm as cv
from calcvm import nn, optim
from calcvm.errors import ProgramError
from calcvm.ops import ROWS
from calcvm.ops.dims import Affine
from calcvm.ops.sizes import evaluate
from calcvm.ops.spec import HEADER_WORDS, RowSpec, Word, dims
from calcvm.ops.spec import R as Read
from calcvm.ops.spec import W as Write
from calcvm.vm.program.encoding import FLAG_SYNC, Instruction, encode_row, float_bits, form_of, instructions
from calcvm.vm.program.program import Program, Symbol, Zone
from calcvm.vm.program.verify import verify
from calcvm.vm.program.verify.row import EMPTY_LIMIT
from calcvm.vm.program.verify.together import Shadow
from tests import fuzz_programs
from tests.rowrun import words_of


@pytest.fixture(scope="module")
def program() -> Program:
    return fuzz_programs.mlp((5, 8, 8, 4), optim.AdamW(1e-3, clip_norm=1.0), batch=12)


def row_of(p: Program, name: str, nth: int = 0) -> int:
    return [i for i in range(len(p.rows)) if p.spec(i).name == name][nth]


def word_of(p: Program, row: int, name: str) -> int:
    spec = p.spec(row)
    return HEADER_WORDS + [*(w.name for w in spec.words), *(o.name for o in spec.operands)].index(name)


def altered(p: Program, *changes: tuple[int, int | str, int]) -> Program:
    rows = p.rows.copy()
    for row, word, value in changes:
        rows[row, word if isinstance(word, int) else word_of(p, row, word)] = value
    return replace(p, rows=rows)


def refused(p: Program, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        verify(p)


# ---------------------------------------------------------------- real programs
@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("batch", [1, 2, 100])
def test_real_programs_pass(workers, dtype, accumulate, batch):
    for sizes, optimizer in (((6, 3), optim.SGD(0.1)), ((7, 20, 9, 3), optim.Adam(1e-3, clip_norm=1.0))):
        for kind in ("softmax_cross_entropy", "mse"):
            verify(fuzz_programs.mlp(sizes, optimizer, kind, "gelu", batch, workers, dtype, accumulate))


# ---------------------------------------------------------------- rows by themselves
@pytest.mark.parametrize("place", [-1, 9999, 2**62, -(2**63), None])
def test_a_row_is_one_of_the_program_s_instructions(program, place):
    n = len(program.instructions)
    place = n if place is None else place
    refused(altered(program, (2, 0, place)), rf"row 2 \? .*instruction {place} of a program that has {n}")


def test_instructions_must_be_known(program):
    def listed(*instructions: tuple[str, str]) -> Program:
        return replace(program, instructions=tuple(Instruction(*i) for i in instructions))

    first, *others = program.instructions
    refused(
        listed(("a_fwd", first.form), *others), "no operator has the instruction 'a_fwd': declare the custom operator"
    )
    refused(
        listed((first.name, others[0].form), *others),
        rf"other instructions \({first.name}\): build and compile the graph again",
    )
    refused(listed(first, first, *others), "is there twice: its operator was declared again")
    refused(listed(*others, first), "not in the order of their names")
    refused(listed(first, *others[:-1]), "of a program that has|rows is")
    mul = ROWS["mul_fwd"]  # no row uses it, and it has more words than theirs
    refused(
        listed(*sorted([first, *others, (mul.name, form_of(mul))])), r"rows is int64\(\d+, 16\), not int64\(\d+, 24\)"
    )


def test_rows_are_as_wide_as_the_longest_instruction(program):
    for change in (lambda a, fill: np.pad(a, ((0, 0), (0, 8)), constant_values=fill), lambda a, fill: a[:, :-8]):
        rows, values = change(program.rows, 0), change(program.operand_values, -1)
        refused(replace(program, rows=rows, operand_values=values), r"rows is int64.*, not int64")


def test_words_behind_the_last_operand_must_be_zero(program):
    refused(altered(program, (3, program.rows.shape[1] - 1, 5)), "row 3 .*must be zero")


@pytest.mark.parametrize("flags", [0x2, 0x80, 1 << 8, 1 << 40, -1])
def test_flags_hold_the_row_index(program, flags):
    refused(altered(program, (4, 1, int(program.rows[4, 1]) ^ flags)), "row 4 .*flags .* malformed")


@pytest.mark.parametrize("value", [-1, 9, 2**63 - 1, -(2**63)])
def test_words_stay_in_their_range(program, value):
    row = row_of(program, "linear_fwd")
    refused(altered(program, (row, "act", value)), rf"row {row} linear_fwd \(.*\): act = {value} is outside \[0, 8\]")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
def test_floats_are_finite_and_in_range(program, value):
    row = row_of(program, "linear_fwd")
    refused(altered(program, (row, "alpha", float_bits(value))), "alpha = .* is outside")


@pytest.mark.parametrize("value", [-1, 2**40 + 1, 2**62, -(2**63)])
def test_sizes_stay_in_their_range(program, value):
    row = row_of(program, "linear_fwd")
    refused(altered(program, (row, "K", value)), "K = .* is outside")


def test_no_operand_leaves_the_heap_or_its_symbol(program):
    row = row_of(program, "linear_fwd")
    for offset in (0, 15, -2, 2**62, program.heap_elems - 1, program.heap_elems):
        refused(altered(program, (row, "y", offset)), rf"row {row} linear_fwd .*operand y .*leaves the heap's")
    start = int(program.rows[row, word_of(program, row, "wt")])
    refused(altered(program, (row, "wt", start + 1)), "operand wt .*leaves w0 ")
    refused(altered(program, (row, "K", 2**40)), "operand x .*leaves the heap")


def test_only_optional_operands_are_left_out(program):
    row = row_of(program, "linear_fwd")
    refused(altered(program, (row, "wt", -1)), "operand wt of 40 elements is left out")
    refused(altered(program, (row, "b", -1)), "operand b is left out, but has symbol")
    values = program.operand_values.copy()
    values[row, word_of(program, row, "b")] = -1
    verify(replace(altered(program, (row, "b", -1)), operand_values=values))


def test_an_operand_is_left_out_only_where_the_words_allow_it(program):
    """The output that an activation's derivative reads: not needed where there is no activation."""
    row = row_of(program, "linear_bwd_x")
    values = program.operand_values.copy()
    values[row, word_of(program, row, "ya")] = -1
    p = replace(altered(program, (row, "ya", -1)), operand_values=values)
    refused(p, f"row {row} linear_bwd_x .*operand ya of 96 elements is left out")
    verify(altered(p, (row, "act", 0)))


def test_symbols_stand_behind_operands_alone(program):
    for word, value in (
        (0, 0),
        (program.rows.shape[1] - 1, 0),
        (word_of(program, 0, "y"), 10**6),
        (word_of(program, 0, "y"), -2),
    ):
        values = program.operand_values.copy()
        values[0, word] = value
        refused(replace(program, operand_values=values), "symbol")


def test_operands_are_of_their_symbols_type(program):
    row = row_of(program, "tick")
    symbols = list(program.symbols)
    k = int(program.operand_values[row, word_of(program, row, "hyper")])
    symbols[k] = replace(symbols[k], dtype="int64")
    refused(replace(program, symbols=tuple(symbols), info={}), "operand hyper .* is of float64, learn.hyper of int64")


def test_a_zero_size_does_not_hide_an_endless_loop():
    """rows*cols*0 elements fit anywhere, but a loop over the rows would not end."""
    p = one_row("relu_fwd", {"rows": 2**40, "cols": 0}, {"x": 16, "y": 16})
    refused(p, f"a size is zero, .* more than {EMPTY_LIMIT}")
    verify(one_row("relu_fwd", {"rows": 0, "cols": 7}, {"x": 16, "y": 32}))


def one_row(name: str, words: dict, offsets: dict, workers: int = 1) -> Program:
    """A program of one row over one symbol that spans a heap of 1024 elements."""
    spec = ROWS[name]
    row = encode_row(spec, words, offsets, FLAG_SYNC)
    values = np.full((1, len(row)), -1, np.int32)
    for k, o in enumerate(spec.operands, HEADER_WORDS + len(spec.words)):
        values[0, k] = 0 if offsets.get(o.name) is not None else -1
    return Program(
        dtype="float32", instructions=instructions([spec]), rows=row[None], patches=np.zeros((0, 4), np.int64), sections={("p", "forward"): (0, 1)},
        batch_size=1, workers=workers, heap_elems=1024, zones=(Zone(name="all", start=16, stop=1024),),
        symbols=(Symbol(name="all", kind="state", offset=16, elems=Affine(0, 1008), shape=(), dtype="float32"),),
        operand_values=values, labels=("",),
    )  # fmt: skip


def test_operands_of_a_row_overlap_only_where_declared():
    verify(one_row("relu_fwd", {"rows": 2, "cols": 8}, {"x": 16, "y": 16}))  # declared in place
    refused(one_row("relu_fwd", {"rows": 2, "cols": 8}, {"x": 16, "y": 17}), "operand x .* and operand y .* overlap")
    refused(one_row("relu_fwd", {"rows": 2, "cols": 8}, {"x": 31, "y": 16}), "overlap")
    verify(one_row("relu_fwd", {"rows": 2, "cols": 8}, {"x": 32, "y": 16}))


# ---------------------------------------------------------------- batches
def test_patches_agree_with_the_rows(program):
    def patched(change) -> Program:
        patches = program.patches.copy()
        change(patches)
        return replace(program, patches=patches)

    def put(row, column, value):
        return lambda patches: patches.__setitem__((row, column), value)

    refused(patched(put(0, 2, 2)), r"= 2\*B\+0 is 24 at batch 12, but the row says 12")
    refused(patched(put(0, 3, 1)), r"is 13 at batch 12")
    refused(patched(put(0, 0, 10**6)), "patch of row 1000000")
    refused(patched(put(0, 1, 0)), "word 0 is no size")
    refused(patched(put(0, 1, word_of(program, 0, "y"))), "is no size")
    refused(replace(program, patches=np.repeat(program.patches, 2, axis=0)), "repeated or out of order")
    refused(replace(program, patches=program.patches[::-1]), "repeated or out of order")
    refused(patched(lambda a: a.__setitem__((0, slice(2, 4)), (-1, 24))), "does not grow")
    refused(patched(lambda a: a.__setitem__((0, slice(2, 4)), (2, -12))), "= -10 is outside")  # at batch 1


def test_sizes_that_fall_behind_at_small_batches_are_refused(program):
    """A size that should follow the batch but does not: more is read at batch 1 than was written."""
    row = row_of(program, "linear_bwd_w")
    keep = ~((program.patches[:, 0] == row) & (program.patches[:, 1] == word_of(program, row, "rows")))
    refused(replace(program, patches=program.patches[keep]), f"row {row} linear_bwd_w .*leaves")


ODD = RowSpec(
    name="odd",
    synopsis="y = x",
    words=(*dims("n m"), Word(name="k", kind="int", lo=-5, hi=5)),
    operands=(Read("x", "n*(m - n) if k else 4"), Write("y", "max(0, m - n) + n // 2")),
    require=("m - n",),
)


@given(
    forms=st.tuples(*[st.tuples(st.integers(0, 6), st.integers(-6, 30))] * 2),
    batch=st.integers(1, 12),
    k=st.integers(0, 1),
)
@settings(max_examples=300, deadline=None)
def test_accepted_extents_hold_at_every_batch(forms, batch, k):
    """Sizes with differences, which may bulge between the ends: accepted only if bounded for every batch."""
    ROWS[ODD.name] = ODD
    try:
        values = {name: a * batch + b for name, (a, b) in zip("nm", forms)}
        patches = [(0, HEADER_WORDS + i, a, b) for i, (a, b) in enumerate(forms) if a]
        rows = encode_row(ODD, {**values, "k": k}, {"x": 16, "y": 216}, FLAG_SYNC)[None]
        operand_values = np.full(rows.shape, -1, np.int32)
        operand_values[0, 5:7] = 0, 1
        p = Program(
            dtype="float32", instructions=instructions([ODD]), rows=rows, patches=np.array(patches, np.int64).reshape(-1, 4), batch_size=batch, workers=1,
            sections={("p", "forward"): (0, 1)}, heap_elems=416, zones=(Zone(name="z", start=16, stop=416),),
            symbols=(
                Symbol(name="x", kind="state", offset=16, elems=Affine(0, 200), shape=(), dtype="float32"),
                Symbol(name="y", kind="state", offset=216, elems=Affine(0, 200), shape=(), dtype="float32"),
            ),
            operand_values=operand_values, labels=("",),
        )  # fmt: skip
        try:
            verify(p)
        except ProgramError:
            return
        for b in range(1, batch + 1):
            words = {name: a * b + c for name, (a, c) in zip("nm", forms)} | {"k": k}
            assert words["n"] >= 0 and words["m"] >= words["n"]
            assert all(evaluate(o.elems, words) <= 200 for o in ODD.operands)
    finally:
        del ROWS[ODD.name]


# ---------------------------------------------------------------- the whole
@pytest.mark.parametrize(
    "field, value, message",
    [
        ("batch_size", 0, "batch_size is 0"),
        ("workers", 0, "workers is 0"),
        ("workers", 10**6, "workers is 1000000"),
        ("heap_elems", 2**60, "heap_elems is"),
        ("heap_elems", 100, "heap"),
        ("dtype", "int8", "neither float32 nor float64"),
        ("format_version", 9, "format 9"),
        ("labels", (), "0 labels"),
        ("rows", np.zeros((2, 3), np.int64), "rows is"),
        ("patches", np.zeros((2, 3), np.int64), "patches is"),
        ("zones", (), "in no zone"),
        ("sections", {}, "belong to no section"),
    ],
)
def test_the_form_of_a_program(program, field, value, message):
    p = replace(program, **{field: value}) if field != "dtype" else replace(program)
    if field == "dtype":
        object.__setattr__(p, "dtype", value)
    refused(p, message)


def test_sections_cover_the_rows_in_order(program):
    sections = dict(program.sections)
    n = len(program.rows)
    refused(replace(program, sections={("learn", "forward"): (1, n)}), "must begin at 0")
    refused(replace(program, sections={("learn", "forward"): (0, n + 1)}), "end by")
    refused(replace(program, sections={("learn", "dance"): (0, n)}), "no such phase")
    refused(replace(program, sections={("learn", "loss"): (0, 2), ("learn", "forward"): (2, n)}), "order")
    scrambled = {("a", "forward"): (0, 1), ("b", "forward"): (1, 2), ("a", "loss"): (2, n)}
    refused(replace(program, sections=scrambled), "must follow each other")
    verify(replace(program, sections=sections))


def test_symbols_have_names_of_their_own(program):
    symbols = [replace(s, name=program.symbols[0].name) if i == 3 else s for i, s in enumerate(program.symbols)]
    refused(replace(program, symbols=tuple(symbols)), f"two symbols are called '{program.symbols[0].name}'")


def test_zones_do_not_overlap(program):
    zones = list(program.zones)
    zones[2] = replace(zones[2], start=zones[2].start - 1)
    refused(replace(program, zones=tuple(zones)), "zones must not overlap")


def test_kept_values_share_cells_with_none(program):
    symbols = list(program.symbols)
    k = next(i for i, s in enumerate(symbols) if s.name == "w1")
    j = next(i for i, s in enumerate(symbols) if s.name == "w0")
    symbols[k] = replace(symbols[k], offset=symbols[j].offset)
    p = replace(program, symbols=tuple(symbols))
    with pytest.raises(ProgramError):
        verify(p)
    transient = [i for i, s in enumerate(symbols) if s.kind == "activation" and not s.resident]
    pair = next(
        (a, b) for a in transient for b in transient if a < b and program.symbols[a].offset == program.symbols[b].offset
    )
    symbols = list(program.symbols)
    symbols[pair[0]] = replace(symbols[pair[0]], resident=True)
    refused(replace(program, symbols=tuple(symbols)), "share cells .* must keep its own")


def test_parameters_change_only_in_updates(program):
    row = row_of(program, "linear_fwd")
    k = next(i for i, s in enumerate(program.symbols) if s.name == "w1")
    values = program.operand_values.copy()
    word = word_of(program, row, "y")
    values[row, word] = k
    p = altered(program, (row, "rows", 1), (row, word, program.symbols[k].offset))
    patches = p.patches[(p.patches[:, 0] != row)]
    refused(replace(p, operand_values=values, patches=patches), "overwrites parameter w1: only updates may")
    sections, at = {}, row_of(program, "adamw")
    sections[("learn", "forward")] = (0, at + 1)
    sections[("learn", "end_round")] = (at + 1, len(program.rows))
    refused(replace(program, sections=sections), "changes parameter .* in phase forward: it is read-only there")


def test_placeholders_are_never_written(program):
    symbols = tuple(replace(s, kind="placeholder") if s.name == "y0" else s for s in program.symbols)
    refused(replace(program, symbols=symbols), "writes placeholder y0")


@pytest.fixture(scope="module")
def carrying() -> Program:
    return fuzz_programs.carrying("float32", 9)


def writer(p: Program, path: str, carry: str) -> tuple[int, int]:
    """The row of a path that writes a carry, and the word of that operand."""
    of = next(i for i, s in enumerate(p.symbols) if s.name == carry)
    span = p.sections[path, "forward"]
    found = [
        (row, word_of(p, row, o.name))
        for row in range(*span)
        for o in p.spec(row).operands
        if o.writes and p.operand_values[row, word_of(p, row, o.name)] == of
    ]
    assert len(found) == 1
    return found[0]


def test_carries_change_only_where_results_are_computed(carrying):
    row, _ = writer(carrying, "learn", "h")
    sections = carrying.sections
    for phase in ("backward", "optimize", "end_round"):
        spans = {key: span for key, span in sections.items() if key[0] != "learn"}
        start, stop = sections["learn", "forward"][0], max(b for (p, _), (_, b) in sections.items() if p == "learn")
        late = {("learn", "forward"): (start, row), ("learn", phase): (row, stop)}
        refused(
            replace(carrying, sections={**late, **spans}), f"changes carry h in phase {phase}: it is read-only there"
        )


def test_rows_take_of_a_carry_what_each_sample_has(carrying):
    """Streams move these operands by whole samples: none may reach further than the samples of its batch."""
    verify(carrying)
    for path, name in (("learn", "h"), ("predict", "h"), ("predict", "n")):
        row, word = writer(carrying, path, name)
        at = int(carrying.rows[row, word])
        for offset in (at + 1, at + (5 if name == "h" else 1), at - 1):
            refused(altered(carrying, (row, word, offset)), f"row {row} .*{name}")
    row, _ = writer(carrying, "learn", "h")
    symbols = tuple(
        replace(s, elems=Affine(0, 45), shape=(Affine(0, 45),)) if s.name == "y" else s for s in carrying.symbols
    )
    p = replace(carrying, info={}, symbols=symbols, patches=carrying.patches[carrying.patches[:, 0] != row])
    refused(p, f"row {row} .*is not 5 elements of carry h for each sample")  # but 45 for every batch


@pytest.mark.parametrize(
    "change", [{"elems": Affine(0, 44)}, {"elems": Affine(5, 0)}, {"elems": Affine(0, 40)}, {"persistent": False}]
)
def test_a_carry_is_a_persistent_symbol_of_all_samples(carrying, change):
    symbols = tuple(replace(s, **change) if s.name == "h" else s for s in carrying.symbols)
    refused(replace(carrying, symbols=symbols), "h")


def test_carries_overlap_nothing(carrying):
    offsets = {s.name: s.offset for s in carrying.symbols}
    for other in ("n", "W", "y"):
        symbols = tuple(replace(s, offset=offsets[other]) if s.name == "h" else s for s in carrying.symbols)
        shift = offsets[other] - offsets["h"]
        rows = carrying.rows.copy()
        k = [s.name for s in symbols].index("h")
        rows[carrying.operand_values == k] += shift
        refused(replace(carrying, symbols=symbols, rows=rows), "share|overlap|lie|zone|persist")


# ---------------------------------------------------------------- rows together
def test_every_barrier_of_a_real_program_is_needed(program):
    """Taking any barrier away is refused: the planner sets no more than it must, the verifier misses none."""
    syncs = np.flatnonzero(program.rows[:, 1] & FLAG_SYNC)
    assert len(syncs) > 3
    for i in syncs:
        refused(altered(program, (int(i), 1, int(program.rows[i, 1]) & ~FLAG_SYNC)), "barrier")


def test_a_read_before_the_write_is_refused(program):
    """Two forward rows in the wrong order: the first now reads what nobody has written."""
    rows, values = program.rows.copy(), program.operand_values.copy()
    a, b = row_of(program, "linear_fwd", 0), row_of(program, "linear_fwd", 1)
    rows[[a, b]], values[[a, b]] = rows[[b, a]], values[[b, a]]
    rows[[a, b], 1] = program.rows[[a, b], 1]
    patches = program.patches.copy()
    for n, m in ((a, b), (b, a)):
        patches[program.patches[:, 0] == n, 0] = m
    patches = patches[np.lexsort((patches[:, 1], patches[:, 0]))]
    refused(replace(program, rows=rows, operand_values=values, patches=patches), f"row {a} .*reads y0 .*nothing")


def test_a_clobbered_value_is_refused(program):
    """Move one transient value onto another that is still read later."""
    symbols = list(program.symbols)
    index = {s.name: i for i, s in enumerate(symbols)}
    a, b = index["y0"], index["y1"]
    moved = symbols[a].offset
    rows = program.rows.copy()
    rows[program.operand_values == b] = moved
    symbols[b] = replace(symbols[b], offset=moved)
    refused(replace(program, rows=rows, symbols=tuple(symbols)), "overlap|reads y0 .*holds|barrier")


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12), st.integers(0, 3)), max_size=25), st.data())
@settings(max_examples=200, deadline=None)
def test_the_shadow_map_equals_an_array_of_cells(writes, data):
    shadow, cells = Shadow(), [-1] * 50
    for start, n, owner in writes:
        shadow.write(start, start + n, owner)
        cells[start : start + n] = [owner] * n
        a = data.draw(st.integers(0, 40))
        b = data.draw(st.integers(a, 49))
        o = data.draw(st.integers(0, 3))
        wrong = [c for c in range(a, b) if cells[c] != o]
        found = shadow.foreign(a, b, o)
        assert (found is None) == (not wrong)
        if wrong:
            assert found == (wrong[0], cells[wrong[0]])


# ---------------------------------------------------------------- the operator table
@pytest.mark.parametrize("name", sorted(ROWS))
def test_scratch_grows_with_the_team(name):
    """A smaller team than planned needs no more scratch."""
    spec = ROWS[name]
    words = {w.name: 3 if w.kind == "dim" else max(w.lo, 0) for w in spec.words if w.name != "wn"}
    for o in spec.operands:
        if o.access == "s":
            sizes = [evaluate(o.elems, words_of(spec, words, nw)) for nw in range(1, 9)]
            assert sizes == sorted(sizes)


def test_least_workspace(program):
    """Less scratch than a row can do with is refused, more of it than its operand has too."""
    i = row_of(program, "linear_bwd_x")
    for wn, message in ((16 * 4 - 1, "the least workspace = -1"), (10**6, "ws .* leaves"), (-1, "wn = -1")):
        with pytest.raises(ProgramError, match=f"row {i} linear_bwd_x.*{message}"):
            verify(altered(program, (i, "wn", wn)))
    verify(altered(program, (i, "wn", 16 * 4)))


# Sizes that no loop runs over: divisors; strides (a0, b0, s0, ...) are none either.
NOT_LOOPS = {"count"}
COUNTED = {"lp_pool_bwd_y": "DHW"}  # sizes that say how much of a window lies inside, and bound no loop


@pytest.mark.parametrize("name", sorted(ROWS))
def test_every_size_is_bounded_by_an_extent(name):
    """A size of 2^40 is refused, so that no loop can run on without touching an operand."""
    spec = ROWS[name]
    for big in spec.words:
        if (
            big.kind != "dim"
            or big.name in (*NOT_LOOPS, *COUNTED.get(name, ""))
            or re.fullmatch(r"([abstx]|slope)[0-5]", big.name)
        ):
            continue
        for others in (1, 0):
            words = {
                w.name: (2**40 if w is big else others) if w.kind == "dim" else (w.lo if w.lo > 0 else min(w.hi, 1))
                for w in spec.words
            }
            offsets = {o.name: None if o.optional or o.access == "s" else 16 for o in spec.operands}
            with pytest.raises(ProgramError):
                verify(one_row(name, words, offsets))


# ---------------------------------------------------------------- tampering
def test_no_altered_program_touches_memory_outside_its_heap():
    """A sample of `make fuzz`."""
    counts = fuzz_programs.run(600, seed=1, verbose=False)
    assert fuzz_programs.harmless(counts), counts
    assert counts["programs"] == 600 and counts["refused"] > 100 and counts["run"] > 50, counts


@pytest.mark.parametrize(
    "alter, message",
    [
        (lambda i: i["variables"]["input"].update(symbol=i["variables"]["linear_1.weight"]["symbol"]), "'input'"),
        (lambda i: i["variables"]["input"].update(shape=[[1, 0], [0, 100000]]), "'input'.*100000\\*B"),
        (lambda i: i["variables"]["output"].update(symbol="output"), "'output'.*symbol must be an integer"),
        (lambda i: i["variables"]["output"].update(symbol=10**6), "no symbol 1000000"),
        (lambda i: i["variables"]["output"].update(symbol=True), "'output'.*symbol must be an integer"),
        (lambda i: i["variables"]["output"].update(of="input"), "'output' .* view of 'input', which lies elsewhere"),
        (lambda i: i["paths"]["learn"].update(seed=i["variables"]["input"]["symbol"]), "its seed is not a state of 1"),
        (lambda i: i["paths"]["learn"].update(hyper=i["paths"]["learn"]["seed"]), "its hyper is not a state"),
        (lambda i: i["paths"]["learn"]["gradients"].update({"linear_1.weight": 0}), "not the gradient of 'linear_1"),
        (lambda i: i["paths"]["learn"]["moments"]["linear_1.bias"].update(m=0), "not the optimizer of 'linear_1.bias'"),
        (lambda i: i["paths"]["learn"]["needs"].update(forward=["linear_1.bias"]), "neither a placeholder nor a res"),
        (lambda i: i["paths"]["learn"]["needs"].update(forward=[]), "reads 'input'.*says nothing of it"),
        (lambda i: i["state"][0].update(symbol=i["variables"]["input"]["symbol"]), "initial state of placeholder"),
        (lambda i: i["layers"]["predict"][0].pop(), "layers.*must be a list of name, shape, parameters, flops, bytes"),
        (lambda i: i["layers"]["predict"][0].__setitem__(4, -1), "layers.*bytes must be an integer from 0"),
        (lambda i: i["parameters"].update(input={}), "parameters.'input'. lacks 'init'"),
        (lambda i: i["parameters"].update(input=i["parameters"]["linear_1.bias"]), "parameter 'input'"),
    ],
)
def test_facts_beside_the_rows_are_proven(alter, message):
    """fit and predict fill and read what ``info`` names: it cannot name anything but the truth."""
    net = nn.Linear(3) >> nn.Tanh() >> nn.Linear(2)
    model = cv.Model(net, input_shape=(4,), optimizer=optim.Adam(), batch_size=5)
    documents, arrays = model.program.to_parts()
    documents = json.loads(json.dumps(documents))
    assert Program.from_parts(documents, arrays) == model.program
    alter(documents["program"]["info"])
    with pytest.raises(ProgramError, match=message):
        Program.from_parts(documents, arrays)


def test_many_blocks_take_no_longer_than_their_number():
    """Each block against each symbol would take minutes."""
    n = 6000
    kept = dict(kind="state", shape=(Affine(0, 1),), elems=Affine(0, 1), persistent=True, dtype="float32")
    values = [Symbol(name=f"v{i}", offset=16 + i, **kept) for i in range(n)]
    blocks = [replace(v, name=f"b{i}", members=(i,)) for i, v in enumerate(values)]
    zone = Zone(name="all", start=16, stop=n + 16, persistent_start=16, persistent_stop=n + 16)
    nothing = np.zeros((0, 8), np.int64)
    program = Program(
        dtype="float32", instructions=(), rows=nothing, patches=np.zeros((0, 4), np.int64), sections={}, batch_size=1, workers=1,
        heap_elems=n + 16, zones=(zone,), symbols=(*values, *blocks), operand_values=nothing, labels=(),
    )  # fmt: skip
    began = time.process_time()
    verify(program)
    assert time.process_time() - began < 2
