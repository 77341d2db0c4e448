"""`Model.notes` go wherever the model goes; `steps_done` counts every update."""

import copy
import io
import pickle

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn
from calcvm.errors import CalcError

X, Y = np.ones((8, 4), "f4"), np.zeros((8, 2), "f4")
NOTES = {
    "scaler": [0.5, 2.0],
    "labels": {"0": "no", "1": "yes"},
    "version": 3,
    "text": "ß",
    "none": None,
    "nested": [[1], {"a": [True]}],
}


def model(**options):
    return cv.Model(
        nn.Linear(2),
        **{"input_shape": (4,), "loss": "mse", "optimizer": cv.SGD(0.1), "batch_size": 4, "workers": 1, **options},
    )


def saved(m):
    file = io.BytesIO()
    m.save(file)
    file.seek(0)
    return cv.load(file)


WAYS = {"saved": saved, "copied": copy.copy, "deep": copy.deepcopy, "pickled": lambda m: pickle.loads(pickle.dumps(m)),
        "in a heap": lambda m: m.copy(heap=cv.CalcHeap("1 MiB"))}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_notes_go_with_the_model(way):
    m = model()
    m.notes = NOTES
    m.notes["more"] = np.float32(0.5), np.int64(7)
    del m.notes["none"]
    m.step(X[:4], Y[:4])
    other = WAYS[way](m)
    wanted = {**NOTES, "more": [0.5, 7]}
    del wanted["none"]
    assert dict(other.notes) == wanted and len(other.notes) == len(wanted) and other.steps_done == 1
    other.notes["mine"] = 1
    assert "mine" not in m.notes
    assert dict(saved(other).notes) == {**wanted, "mine": 1}


def test_a_users_facts_are_saved_too():
    m = model()
    m.facts["my_scaler"] = [1, 2]
    assert saved(m).facts["my_scaler"] == [1, 2]


def test_a_store_has_notes_that_were_changed_in_their_place(tmp_path):
    with cv.CalcHeap("1 MiB", cv.FileStore(tmp_path, durable=False)) as heap:
        m = heap.create(model().program, name="a")
        m.notes["log"] = [1]
        m.commit()
        m.notes["log"].append(2)
        m.commit()
    with cv.CalcHeap("1 MiB", cv.FileStore(tmp_path, durable=False)) as heap:
        assert heap.open("a").notes["log"] == [1, 2]


def test_numbers_of_numpy_are_put_into_notes_and_a_wrong_one_keeps_only_its_model_from_the_store(tmp_path):
    program = model().program
    heap = cv.CalcHeap(2 * program.heap_bytes, store=cv.FileStore(tmp_path))
    names = ["a", "b", "c", "d"]
    for name in names:
        one = heap.create(program, name=name)
        one.notes["errors"] = []
        one.notes["errors"].append(np.float32(0.5))
    bad = heap.open("a")
    bad.notes["errors"].append({1, 2})
    for name in names[1:] * 3:  # others come and go, though this one cannot
        assert heap.open(name).parameters
    with pytest.raises(cv.CalcError, match="model 'a': its notes hold values that cannot be written as JSON .*{1, 2}"):
        heap.close()
    bad.notes["errors"].pop()
    heap.close()
    heap = cv.CalcHeap("1 MiB", store=cv.FileStore(tmp_path))
    assert [heap.open(name).notes["errors"] for name in names] == [[0.5]] * 4


def test_models_of_a_fleet_have_their_own():
    fleet, program = cv.Fleet("1 MiB", workers=1), model().program
    handles = [fleet.add(program, data=(X, Y)) for _ in range(3)]
    for k, handle in enumerate(handles):
        handle.model.notes["customer"] = k
    fleet.fit(epochs=2, progress=False)
    assert [saved(handle.model).notes["customer"] for handle in handles] == [0, 1, 2]
    assert [handle.model.steps_done for handle in handles] == [4, 4, 4]


@pytest.mark.parametrize(
    "value",
    [np.ones(2), {1: 2}, {"a": {3: 4}}, object(), {1, 2}, b"x", [object()], lambda: 0],
    ids=lambda v: type(v).__name__,
)
def test_what_json_does_not_hold_is_refused(value):
    m = model()
    m.notes["kept"] = 1
    with pytest.raises(CalcError, match="notes: "):
        m.notes["bad"] = value
    with pytest.raises(CalcError, match="notes"):
        m.notes = {"bad": value}
    for wrong in (None, 3, [1], {1: 1}):
        with pytest.raises(CalcError, match="notes"):
            m.notes = wrong
    assert dict(m.notes) == {"kept": 1}
    m.notes["list"] = []
    m.notes["list"].append(object())
    with pytest.raises(CalcError, match="cannot be written as JSON"):
        m.save(io.BytesIO())


def test_every_update_is_a_step_done():
    m = model()
    assert m.steps_done == 0
    m.fit(X, Y, epochs=3, progress=False)  # 2 batches each
    assert (m.steps_done, m.epochs_done) == (6, 3)
    m.step(X[:4], Y[:4])
    m.run_steps(5)
    m.predict(X)
    assert (m.steps_done, m.epochs_done) == (12, 3) and saved(m).steps_done == 12
    rounds = model(learning_batch=8)
    rounds.fit(X, Y, epochs=3, progress=False)
    assert rounds.steps_done == 3


def test_updates_of_every_path_are_steps_done():
    g = cv.CalcGraph()
    x, W, V = g.placeholder("x", (None, 4)), g.parameter("W", (4, 2)), g.parameter("V", (4, 2))
    for name, w in (("learn", W), ("other", V)):
        with g.path(name, backward=True) as path:
            path.minimize(cv.mean(cv.square(x @ w)), cv.SGD(0.1))
    with g.path("predict") as predict:
        predict.output = x @ W
    m = cv.Model(g, batch_size=4)
    m.step(X[:4])
    for _ in range(2):
        m.step(X[:4], path="other")
    assert m.steps_done == 3 == m.hyper["t"] + m.hyper("other")["t"] and saved(m).steps_done == 3
