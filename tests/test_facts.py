"""A model's facts and settings: checked where they are set, whoever sets them, and kept wherever the model goes."""

from __future__ import annotations

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn
from calcvm.vm.memory.epoch import Epoch

X = np.random.default_rng(0).standard_normal((64, 4)).astype(np.float32)
Y = np.arange(64) % 3


def graph() -> cv.CalcGraph:
    return cv.build_graph(nn.Linear(3), (4,), "softmax_cross_entropy", cv.SGD(0.5))


def program(batch: int = 16, accumulate: bool = True) -> cv.Program:
    return cv.compile(graph(), batch_size=batch, workers=1, accumulate=accumulate)


def model(**how) -> cv.Model:
    options = dict(input_shape=(4,), optimizer=cv.SGD(0.5), batch_size=8, workers=1) | how
    return cv.Model(nn.Linear(3), **options)


NO_NUMBERS = [None, "16", True, 16.0, 0, -1, -16, -(2**63), 2**63, 2**62, np.nan, [16]]


@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
def test_a_learning_batch_that_is_none_is_refused_by_every_door(value):
    whole = model(learning_batch=8)
    with pytest.raises(cv.CalcError, match="learning_batch"):
        whole.learning_batch = value
    assert whole.learning_batch == 8
    with pytest.raises(cv.CalcError, match="learning_batch"):
        whole.facts["learning_batch"] = value
    fleet = cv.Fleet("1 MiB", workers=1)
    if value is not None:
        with pytest.raises(cv.CalcError, match="learning_batch"):
            model(learning_batch=value)
        with pytest.raises(cv.CalcError, match="learning_batch"):
            fleet.add(program(), data=(X, Y), learning_batch=value)
        assert not fleet.handles and fleet.free_bytes == fleet.heap.nbytes
    if isinstance(value, int) and not isinstance(value, bool):
        with pytest.raises(cv.CalcError, match="learning_batch"):
            Epoch(whole, {"input": X, "target": Y}, "learn", train=True, learning=value)


@pytest.mark.parametrize("number", [np.int64(24), np.uint8(24), 24])
def test_numpy_integers_are_learning_batches_that_can_be_saved(number, tmp_path):
    whole = model(learning_batch=number)
    whole.learning_batch = number
    whole.save(tmp_path / "m")
    assert cv.load(tmp_path / "m").learning_batch == 24


def test_less_than_a_batch_is_no_learning_batch():
    with pytest.raises(cv.CalcError, match="learning_batch=7 is below the batch of 8"):
        model(learning_batch=8).learning_batch = 7


def test_learning_batches_are_the_same_however_they_are_come_by():
    losses = {}
    for name, batch, accumulate, learning in (("batch", 64, False, None), ("rounds", 16, True, 64)):
        fleet = cv.Fleet("1 MiB", workers=1)
        handle = fleet.add(program(batch, accumulate), data=(X, Y), learning_batch=learning, shuffle=False)
        fleet.fit(3, progress=False)
        losses[name] = handle.losses
    np.testing.assert_allclose(losses["rounds"], losses["batch"], rtol=1e-6)


def test_a_program_that_does_not_add_up_has_no_larger_learning_batch():
    """Its gradient is the last round's."""
    fleet = cv.Fleet("1 MiB", workers=1)
    with pytest.raises(cv.CalcError, match="above the batch of 16.*does not add gradients up.*accumulate=True"):
        fleet.add(program(accumulate=False), data=(X, Y), learning_batch=64)
    fleet.add(program(accumulate=False), data=(X, Y), learning_batch=16)
    alone = model()
    with pytest.raises(cv.CalcError, match="Model: learning_batch=64"):
        alone.learning_batch = 64
    alone.learning_batch = 8
    with pytest.raises(cv.CalcError, match="does not add gradients up"):
        Epoch(alone, {"input": X, "target": Y}, "learn", train=True, learning=9)


@pytest.mark.parametrize("seed", [-1, 2**63, None, "1", 1.0, True], ids=repr)
def test_a_seed_that_is_none_is_refused_before_anything_has_changed(seed):
    heap = cv.CalcHeap("1 MiB")
    with pytest.raises(cv.CalcError, match="seed must be an integer (>= 0|from 0 to 9223372036854775807), not"):
        heap.create(program(), seed=seed)
    assert not heap.names and heap.free_bytes == heap.nbytes
    whole = model(seed=3)
    before = whole["linear_1.weight"]
    with pytest.raises(cv.CalcError, match="seed must be"):
        whole.reset(seed)
    assert whole.seed == 3
    np.testing.assert_array_equal(whole["linear_1.weight"], before)


def test_other_facts_are_what_json_can_hold():
    facts = model().facts
    facts["note"] = {"lr": [1, 2.5, None]}
    facts["n"] = np.float32(0.5)
    assert facts["n"] == 0.5 and type(facts["n"]) is float
    for value in ({1}, object(), np.ones(3)):
        with pytest.raises(cv.CalcError, match="'bad' cannot be written as JSON"):
            facts["bad"] = value
    del facts["note"]
    with pytest.raises(cv.CalcError, match="a model has a seed"):
        del facts["seed"]
    with pytest.raises(cv.CalcError, match="epochs must be an integer from 0 to .*, not -1"):
        facts["epochs"] = -1
    with pytest.raises(cv.CalcError, match="program is another one"):
        facts["program"] = "0" * 64
    assert "bad" not in facts and "note" not in facts


# ---------------------------------------------------------------- settings are part of what is kept
@pytest.mark.parametrize("leave", ["close", "close in the heap", "commit", "close the model", "switch"])
def test_a_setting_changed_alone_is_kept(tmp_path, leave):
    heap = cv.CalcHeap("8 KiB", store=cv.FileStore(tmp_path, durable=False))
    heap.create(program(), name="m").commit()
    heap.close()
    store = cv.FileStore(tmp_path, durable=False)
    heap = cv.CalcHeap("8 KiB", store=store)
    changed = heap.open("m")
    before = store.get("m")[1]
    if leave in ("close in the heap", "switch"):
        changed.predict(X)
    changed.learning_batch = 48
    if leave == "switch":
        while changed.record.slot is not None:
            heap.create(program()).reset(0)
    elif leave == "commit":
        changed.commit()
    elif leave == "close the model":
        changed.close()
    else:
        heap.close()
        store = cv.FileStore(tmp_path, durable=False)
    facts, image = store.get("m")
    assert facts["learning_batch"] == 48
    assert image == before
    heap.close()
    store.close()


def test_what_has_not_changed_is_not_written_again(tmp_path):
    store = cv.FileStore(tmp_path, durable=False)
    heap = cv.CalcHeap("1 MiB", store=store)
    resident = heap.create(program(), name="m")
    resident.facts["learning_batch"] = 16
    resident.commit()
    before = (tmp_path / "models" / "m.model").stat().st_mtime_ns
    resident.facts["learning_batch"] = np.int64(16)
    resident.commit()
    heap.close()
    assert (tmp_path / "models" / "m.model").stat().st_mtime_ns == before


def test_a_copy_in_the_middle_of_an_accumulation_goes_on_with_the_same_bits():
    one = cv.CalcHeap("1 MiB").create(program(), seed=1)
    one["input"], one["target"] = X[:16], Y[:16]
    one.forward("learn")
    one.backward("learn")
    two = one.copy()
    for each in (one, two):
        each["input"], each["target"] = X[16:32], Y[16:32]
        each.forward("learn")
        each.backward("learn")
        each.optimize("learn")
    np.testing.assert_array_equal(one["linear_1.weight"], two["linear_1.weight"])
