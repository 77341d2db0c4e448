"""A cache of lines in a carry: the row of a new one writes it where the cache lies, unless something else needs the old lines."""

from __future__ import annotations

import numpy as np
import pytest

import calcvm as cv

SAMPLES, LINES, FEATURES = 3, 4, 5
RNG = np.random.default_rng(0)


def graph(way: str) -> cv.CalcGraph:
    g = cv.CalcGraph()
    v, place = g.placeholder("v", (None, FEATURES)), g.placeholder("place", (None,), dtype="int64")
    past = g.carry(
        "past", (None, LINES, FEATURES), init=np.arange(LINES * FEATURES, dtype=float).reshape(LINES, FEATURES)
    )
    with g.path("stream") as stream:
        new = cv.carry(past, cv.apply("put_line", past, v, place))
        stream.output = {
            "in place": lambda: cv.sum(new, 1),
            "output": lambda: new,
            "read before": lambda: cv.sum(past, 1) + cv.sum(new, 1),
            "read behind": lambda: cv.sum(new, 1) * cv.mean(past, 1),
            "a view": lambda: cv.sum(new + cv.reshape(past, (None, LINES, FEATURES)), 1),
        }[way]()
    return g


def wanted(way: str, past: np.ndarray, new: np.ndarray) -> np.ndarray:
    return {
        "in place": lambda: new.sum(1),
        "output": lambda: new,
        "read before": lambda: past.sum(1) + new.sum(1),
        "read behind": lambda: new.sum(1) * past.mean(1),
        "a view": lambda: (past + new).sum(1),
    }[way]()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("way", ["in place", "output", "read before", "read behind", "a view"])
def test_a_step_changes_one_line(way, workers, dtype):
    program = cv.compile(graph(way), batch_size=SAMPLES + 2, workers=workers, dtype=dtype)
    rows = [pc for pc in range(len(program.rows)) if program.spec(pc).name.startswith("put_line_fwd")]
    there = [program.symbol_of(pc, "y") == program.symbol_of(pc, "x") for pc in rows]
    assert there == [way == "in place"]
    cells = program.info["variables"]["past"]["symbol"]
    written = [
        pc
        for pc in range(len(program.rows))
        for o in program.spec(pc).operands
        if o.writes and program.symbol_of(pc, o.name) == cells
    ]
    assert len(written) == 1
    model = cv.CalcHeap(program.heap_bytes).create(program)
    stream, other = model.stream("stream", batch=SAMPLES, place=2), model.stream("stream", place=0)
    kept, past = other.state["past"].copy(), stream.state["past"].copy()
    for _ in range(6):
        v, place = RNG.standard_normal((SAMPLES, FEATURES)), RNG.integers(0, LINES, SAMPLES)
        new = past.copy()
        new[np.arange(SAMPLES), place] = v.astype(dtype)
        np.testing.assert_allclose(stream(v, place), wanted(way, past, new), rtol=1e-5)
        assert (stream.state["past"] == new).all() and (other.state["past"] == kept).all()
        past = new
    with pytest.raises(cv.CalcError, match=r"integers in \[0, 4\)"):
        stream(v, np.full(SAMPLES, LINES))
    assert (stream.state["past"] == past).all()


def test_a_program_of_it_is_stored_and_is_a_script(tmp_path):
    program = cv.compile(graph("in place"), batch_size=SAMPLES)
    program.save(tmp_path / "it.calcvm")
    assert cv.load_program(tmp_path / "it.calcvm").hash == program.hash
    text = graph("in place").text()
    assert cv.compile(cv.read_graph(text), batch_size=SAMPLES).hash == program.hash


def test_what_does_not_fit():
    g = cv.CalcGraph()
    x, v, place = g.placeholder("x", (None, 4, 5)), g.placeholder("v", (None, 5)), g.placeholder("place", (None,))
    with g.path("p"):
        for wrong in ((x, x, place), (v, v, place), (x, v, v), (x, place, place)):
            with pytest.raises(cv.ShapeError, match="is not \\(samples, lines, features\\)"):
                cv.apply("put_line", *wrong)
