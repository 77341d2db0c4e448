"""A notebook is executed, and its outputs counted; what is printed of public objects is short."""

from __future__ import annotations

import re

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn

SETUP = """
import numpy as np, calcvm as cv
from calcvm import nn
X = np.random.default_rng(0).standard_normal((1000, 10)).astype("float32")
y = (X[:, 0] > 0).astype(int)
def graph(width=16, rate=1e-3):
    net = nn.Linear(width) >> nn.ReLU() >> nn.Linear(2)
    return cv.build_graph(net, (10,), "softmax_cross_entropy", cv.Adam(rate))
model = cv.Model(graph(), batch_size=32)
program = cv.compile(graph(), batch_size=32)
fleet = cv.Fleet("16 MiB")
for seed in range(20):
    fleet.add(program, data=(X, y), seed=seed)
"""
EXPLORE = """
found = cv.explore(
    lambda trial: graph(trial["width"], trial["rate"]), {"width": (4, 16), "rate": (1e-4, 1e-1, "log")},
    data=(X, y), validation=0.2, n_trials=20, epochs=4,
)
"""
# a cell, and what its only output ends with
CELLS = {
    "history = model.fit(X, y, epochs=2000, validation=0.2)": r"epoch 2000/2000  loss [\d.e-]+  val_loss .*  val_accuracy .* m?s",
    "for i in range(300): model.fit(X, y)": r"epoch 1/1  loss .*",
    "results = fleet.fit(200)": r"4,000/4,000 epochs  mean loss .*",
    EXPLORE: r"20/20 trials  best val_loss .*",
    "history": "<History: 2000 epochs, .*",
    "print(history)": r"epoch  loss[^\n]*\n... 1980 epochs before\n(.*\n){20}all epochs done\n",
    "model": "<Model .*",
    "model.summary()": r"model 'model-0': input \(B, 10\) -> output \(B, 2\)\nlayer (.*\n)+heap .* epochs done",
    "program": "<Program: .*",
    "results": "<results of 20 models.*",
    "found": "<exploration of 20 trials.*",
    "nn.Dense": r"UnknownName: module 'calcvm.nn' has no 'Dense': did you mean nn.Linear\?",
}


def test_cells_have_one_output_each() -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("optuna")
    cells = [nbformat.v4.new_code_cell(text, metadata={"tags": ["raises-exception"]}) for text in (SETUP, *CELLS)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=200, kernel_name="python3").execute()
    assert notebook.cells[0].outputs == []
    for cell, wanted in zip(notebook.cells[1:], CELLS.values()):
        assert len(cell.outputs) == 1, (cell.source, cell.outputs)
        (output,) = cell.outputs
        text = output.get("text") or output.get("data", {}).get("text/plain") or f"{output.ename}: {output.evalue}"
        assert re.fullmatch(wanted, text), (cell.source, text)
        assert len(output.get("data", {}).get("text/html", "")) < 12_000
        assert ("<progress" in output.get("data", {}).get("text/html", "")) == (output.output_type == "display_data")


# ---------------------------------------------------------------- what is printed
def objects() -> dict[str, object]:
    """Public objects that a cell may end with: of the largest network of the zoo, of many epochs, models and steps."""
    X = np.zeros((64, 10), "float32")
    y = np.zeros(64, int)
    net = nn.Linear(32) >> nn.ReLU() >> nn.Linear(2)
    small = cv.build_graph(net, (10,), "softmax_cross_entropy", cv.Adam())
    model = cv.Model(small, batch_size=32, workers=1)
    large = cv.build_graph(cv.zoo.resnet18(width=4), (3, 32, 32), "softmax_cross_entropy", cv.Adam())
    fleet = cv.Fleet("64 MiB", workers=1)
    for seed in range(300):
        fleet.add(model.program, data=(X, y), seed=seed)
    results = fleet.fit(1, progress=False)
    split = cv.plan_devices(small, [cv.Processor("a"), cv.Processor("b")], batch_size=8)
    made = {
        "model": model, "history": model.fit(X, y, epochs=300, progress=False), "network": cv.zoo.resnet18(), "graph": large,
        "program": cv.compile(large, batch_size=4, workers=1), "plan": cv.plan(large, batch_size=4, workers=1),
        "heap": fleet.heap, "resident": model, "fleet": fleet, "handle": next(iter(fleet.handles.values())),
        "results": results, "hyper": model.hyper, "split plan": split, "split model": cv.SplitModel(split),
        "path": large.paths["learn"], "variable": large.variables["input"], "ensemble": cv.Ensemble([model]),
        "equations": small.paths["learn"].gradient_of("linear_1.bias"), "processor": cv.Processor("a"),
        "weights as given": nn.Linear(500, init=np.zeros((500, 500))), "operator": cv.graph.OPS["linear"],
    }  # fmt: skip
    layers = [k for k in vars(nn).values() if isinstance(k, type) and issubclass(k, nn.Layer)]
    for kind in layers:
        try:
            made[f"nn.{kind.__name__}"] = kind()
        except (TypeError, cv.CalcError):  # of these as with one setting
            try:
                made[f"nn.{kind.__name__}"] = kind(2)
            except (TypeError, cv.CalcError):
                pass
    return made


def test_what_is_printed_of_public_objects_is_short() -> None:
    long = []
    for name, thing in objects().items():
        html = thing._repr_html_() if hasattr(thing, "_repr_html_") else ""
        if len(repr(thing)) > 600 or len(html) > 40_000 or " object at 0x" in repr(thing):
            long.append((name, len(repr(thing)), len(html)))
    assert not long, long
    assert len(objects()) > 55


def test_a_layer_is_printed_as_it_was_written() -> None:
    for text in (
        "Linear(units=8)",
        "Conv2d(channels=3, kernel=(3, 3), padding=1)",
        "Dropout(rate=0.3)",
        "ReLU()",
        "BatchNorm()",
    ):
        assert repr(eval(f"nn.{text}")) == text
    assert repr(nn.Linear(8, bias=False) >> nn.ReLU()) == "Linear(units=8, bias=False) >> ReLU()"
    assert "... (62 layers)" in repr(nn.Sequential(*(nn.ReLU() for _ in range(62))))
