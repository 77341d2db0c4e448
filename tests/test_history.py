"""Figures of a training: as a table, a frame, a picture; metrics of what is trained on."""

from __future__ import annotations

import sys
from html.parser import HTMLParser

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn

rng = np.random.default_rng(0)
X = rng.standard_normal((100, 5)).astype("float32")
LABELS = np.arange(100) % 3
NUMBERS = X[:, :2] * 2


def history(epochs: int, **options: object) -> cv.History:
    figures = [{"loss": 1 / (i + 1), "val_loss": 2.0, "seconds": 1e-4} for i in range(epochs)]
    return cv.History(figures, **options)  # type: ignore[arg-type]


class Table(HTMLParser):
    """Rows and cells of a table, and the text beside it."""

    def __init__(self, text: str):
        super().__init__()
        self.rows: list[list[str]] = []
        self.beside, self._in = "", ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag == "tr":
            self.rows.append([])
        self._in = tag
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self._in in ("td", "th"):
            self.rows[-1][-1] += data
        else:
            self.beside += data


# ---------------------------------------------------------------- shown
@pytest.mark.parametrize("epochs", [0, 1, 3, 20, 21, 2000, 100_000])
def test_a_history_is_a_table_of_its_last_epochs(epochs: int) -> None:
    h = history(epochs, kept=1 if epochs > 1 else None)
    lines = str(h).splitlines()
    assert lines[0].split() == (["epoch", "loss", "val_loss", "seconds"] if epochs else ["epoch"])
    shown = min(epochs, 20)
    assert [int(line.split()[0]) for line in lines[-1 - shown : -1]] == [*range(epochs - shown + 1, epochs + 1)]
    assert (f"... {epochs - 20} epochs before" in lines) == (epochs > 20) and len(lines) <= 23
    assert lines[-1] == "all epochs done" + ("; the state after epoch 2 was kept" if epochs > 1 else "")
    table = Table(h._repr_html_())
    assert len(table.rows) == shown + 1 and lines[-1] in table.beside and len(h._repr_html_()) < 3000
    assert len(repr(h)) < 200 and f"{epochs} epochs" in repr(h) and "\n" not in repr(h)


def test_epochs_without_a_figure_have_an_empty_cell() -> None:
    h = cv.History([{"loss": 1.0, "seconds": 1.0}, {"loss": float("nan"), "accuracy": 0.5, "seconds": 1.0}], "<why>")
    assert Table(h._repr_html_()).rows[1] == ["1", "1", "1", ""] and "<why>" not in h._repr_html_()
    assert "nan" in str(h)


def test_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas")
    frame = history(30).to_frame()
    assert [*frame.columns] == ["loss", "val_loss", "seconds"] and [*frame.index] == [*range(1, 31)]
    assert frame.index.name == "epoch" and frame.loss.tolist() == history(30)["loss"]
    assert history(0).to_frame().shape == (0, 0)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(cv.MissingExtra, match=r'to_frame needs pandas: install it with pip install "calcvm\[pandas\]"'):
        history(3).to_frame()


def test_frames_of_a_fleet_and_of_a_search() -> None:
    pytest.importorskip("pandas")
    pytest.importorskip("optuna")
    X, y = np.random.default_rng(0).standard_normal((64, 4)).astype("f4"), np.arange(64) % 3
    graph = cv.build_graph(cv.nn.Linear(3), (4,), "softmax_cross_entropy", cv.SGD(0.1))
    with cv.Fleet("1 MiB") as fleet:
        for name in ("a", "b"):
            fleet.add(cv.compile(graph, batch_size=16), data=(X, y), validation=slice(0, 16), name=name)
        results = fleet.fit(3, progress=False)
        frame = results.to_frame()
        assert [*frame.index] == ["a", "b"] and frame.loss.tolist() == results.column("loss").tolist()
        assert frame.epochs.tolist() == [3, 3] and "val_accuracy" in frame
    found = cv.explore(
        lambda trial: graph, {"n": [1, 2]}, data=(X, y), validation=0.25, n_trials=2, epochs=1, progress=False
    )
    assert found.to_frame().val_loss.tolist() == [trial.value for trial in found.trials]
    assert [*found.to_frame().n] == [trial["n"] for trial in found.trials]


def test_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib").use("Agg")
    from matplotlib import pyplot

    figures = [{"loss": 1.0, "accuracy": 0.5, "val_loss": 2.0, "val_accuracy": 0.4, "seconds": 1.0}] * 3
    axes = cv.History(figures).plot()
    assert [[line.get_label() for line in a.lines] for a in axes] == [
        ["loss", "val_loss"],
        ["accuracy", "val_accuracy"],
    ]
    assert axes[0].lines[0].get_xdata().tolist() == [1, 2, 3]
    (again,) = {*cv.History(figures).plot(["loss", "accuracy"], ax=axes[0])}
    assert again is axes[0] and len(again.lines) == 4
    pyplot.close("all")
    for wrong, message in (("loss", "a list of names"), (["los"], "no figure 'los'"), ([], "name a figure")):
        with pytest.raises(cv.CalcError, match=message):
            history(3).plot(wrong)  # type: ignore[arg-type]
    with pytest.raises(cv.CalcError, match="no epoch"):
        history(0).plot()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(cv.MissingExtra, match=r"calcvm\[plot\]"):
        history(3).plot()


# ---------------------------------------------------------------- metrics of what is trained on
def squared(output: cv.Variable, target: cv.Variable) -> cv.Variable:
    return cv.mean(cv.square(output - target))


CASES = {
    "softmax": ("softmax_cross_entropy", None, LABELS, 3),
    "binary": ("binary_cross_entropy", ["accuracy"], (LABELS == 1)[:, None].astype("float32"), 1),
    "mse": ("mse", ["mae", "huber", squared], NUMBERS, 2),
    "own loss": (squared, ["mse"], NUMBERS, 2),
}
HOW = {
    "whole": {},
    "rounds": {"learning_batch": 24},
    "weights": {"sample_weight": True},
    "a team": {"workers": 2},
    "float64": {"dtype": "float64"},
}


def model(case: str, hidden: nn.Layer, **options: object) -> tuple[cv.Model, np.ndarray]:
    loss, metrics, y, n = CASES[case]
    net = nn.Linear(16) >> hidden >> nn.Linear(n)
    defaults = {"optimizer": cv.Adam(1e-2), "batch_size": 8, "workers": 1}
    return cv.Model(net, input_shape=(5,), loss=loss, metrics=metrics, **{**defaults, **options}), y  # type: ignore[arg-type]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("case", CASES)
def test_metrics_of_training_are_those_of_its_samples(case: str, how: str) -> None:
    """Those of parameters that stay as they are; of a step that learns the same bits as without them."""
    if (case, how) == ("own loss", "weights"):  # that returns terms
        return
    m, y = model(case, nn.Tanh(), train_metrics=True, **HOW[how])
    names = [*m.evaluate(X, y)]
    m.hyper["learning_rate"] = 0.0
    arrays = [X, y, np.ones(100)] if how == "weights" else [X, y]
    batches = [tuple(a[i : i + 8] for a in arrays) for i in range(0, 100, 8)]
    for data in [(X, y)] if how == "rounds" else [(X, y), (batches,)]:  # batches one by one are a step each
        h = m.fit(*data, progress=False)
        assert [*h.epochs[0]] == [*names, "seconds"]
        found = m.evaluate(X, y)
        assert all(np.isclose(h[name][0], found[name], rtol=2e-6) for name in names), (h.epochs, found)
    plain, told = (model(case, nn.Dropout(0.5), train_metrics=with_, **HOW[how])[0] for with_ in (False, True))
    histories = [m.fit(X, y, epochs=3, validation=0.2, progress=False) for m in (plain, told)]
    assert histories[0]["loss"] == histories[1]["loss"] and histories[0]["val_loss"] == histories[1]["val_loss"]
    assert all(np.array_equal(a, b) for a, b in zip(plain.get_weights().values(), told.get_weights().values()))
    assert {*histories[1].names} - {*histories[0].names} == {*names} - {"loss"}


def test_metrics_of_training_in_a_graph_of_ones_own() -> None:
    g = cv.CalcGraph()
    x, t = g.placeholder("x", (None, 5)), g.placeholder("t", (None, 2))
    w = g.parameter("w", (5, 2))
    with g.path("learn", backward=True) as learn:
        loss = cv.mse(x @ w, t)
        cv.mae(x @ w, t).rename("learn.error")
        learn.minimize(loss, cv.SGD(0.0))
    with g.path("predict") as predict:
        predict.output = x @ w
        cv.mae(predict.output, t).rename("error")
    h = cv.Model(g, batch_size=8).fit(X, NUMBERS, validation=(X, NUMBERS), progress=False)
    assert h.names == ["loss", "error", "val_error", "seconds"] and np.isclose(h["error"], h["val_error"]).all()


def test_train_metrics_are_asked_for() -> None:
    with pytest.raises(cv.CalcError, match="train_metrics must be True or False, not 1"):
        model("mse", nn.Tanh(), train_metrics=1)
    m, y = model("softmax", nn.Tanh())
    assert m.fit(X, y, progress=False).names == ["loss", "seconds"]
