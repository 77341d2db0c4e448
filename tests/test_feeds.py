"""Data come in right, whatever array holds them, through every door."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn
from calcvm.vm.run.feeds import numbers

RNG = np.random.default_rng(0)
WHOLE = RNG.integers(0, 100, (48, 4))  # numbers that every type holds
LABELS = RNG.integers(0, 3, 48)
TYPES = ["<f4", ">f4", "<f8", ">f8", "<f2", ">f2", "longdouble", "i1", "u1", "<i2", ">i2", "<u2", ">u2", "<i4", ">i4",
         "<u4", ">u4", "<i8", ">i8", "<u8", ">u8"]  # fmt: skip


def model(loss: str = "softmax_cross_entropy", **how) -> cv.Model:
    options = dict(input_shape=(4,), optimizer=cv.SGD(0.001), batch_size=16, workers=1, dtype="float64", seed=1) | how
    return cv.Model(nn.Scale(0.01) >> nn.Linear(3), loss=loss, **options)


def outcome(x, y) -> list[np.ndarray]:
    """What every door makes of the data."""
    alone, fleet = model(), cv.Fleet("1 MiB", workers=1)
    handle = fleet.add(alone.program, data=(x, y), validation=(x, y), seed=1)
    fleet.fit(2, progress=False)
    figures = [handle.losses, handle.val_losses]
    figures.append(alone.fit(x, y, epochs=2, validation=(x, y), progress=False)["val_loss"])
    figures += [alone.predict(x), alone.evaluate(x, y)["loss"], alone.step(x[:16], y[:16])]
    alone["input"] = x[:16]
    figures += [alone["input"], alone.run({"input": x[:16], "target": y[:16]})["output"]]
    figures.append(cv.Ensemble([alone]).evaluate(x, y)["loss"])
    return [np.asarray(figure) for figure in figures]


@pytest.fixture(scope="module")
def wanted() -> list[np.ndarray]:
    return outcome(WHOLE.astype(np.float64), LABELS)


@pytest.mark.parametrize("dtype", TYPES)
def test_every_type_and_byte_order_gives_the_same_bits(dtype, wanted):
    for x, y in ((WHOLE.astype(dtype), LABELS), (WHOLE.astype(np.float64), LABELS.astype(dtype))):
        for ours, right in zip(outcome(x, y), wanted):
            np.testing.assert_array_equal(ours, right)


def test_truth_values_are_zeros_and_ones():
    x = WHOLE > 50
    for ours, right in zip(outcome(x, LABELS), outcome(x.astype(np.float64), LABELS)):
        np.testing.assert_array_equal(ours, right)


@pytest.mark.parametrize("dtype", ["<u8", ">u8"])
def test_unsigned_numbers_above_two_to_the_63_keep_their_sign(dtype):
    x = (np.uint64(2**63) + np.uint64(2**40) * np.arange(12, dtype=np.uint64)).reshape(3, 4).astype(dtype)
    m = model("mse")
    np.testing.assert_array_equal(m.predict(x), m.predict(x.astype(np.float64)))
    m["input"] = x
    np.testing.assert_array_equal(m["input"], x.astype(np.float64))
    with pytest.raises(cv.CalcError, match="labels must be integers"):
        model().fit(WHOLE[:3], np.array([2**63, 0, 1], dtype), progress=False)


def test_what_can_be_read_in_place_is_not_copied():
    for dtype in ("float32", "float64", "uint8", "int32", "int64"):
        array = np.ones((3, 4), dtype)
        assert numbers("x", array) is array and np.shares_memory(numbers("x", array[::2, ::-1]), array)
    truth = np.ones(3, bool)
    assert np.shares_memory(numbers("x", truth), truth)


def test_masked_values_are_refused():
    whole, masked = np.ma.masked_array(WHOLE, mask=False), np.ma.masked_array(WHOLE.astype(float), WHOLE == 7)
    m = model()
    np.testing.assert_array_equal(m.predict(whole), m.predict(WHOLE))
    uses = (
        lambda: m.predict(masked),
        lambda: m.fit(masked, LABELS, progress=False),
        lambda: m.evaluate(masked, LABELS),
        lambda: m.fit(WHOLE, np.ma.masked_equal(LABELS, 1), progress=False),
        lambda: m.step(masked, LABELS),
        lambda: m.__setitem__("input", masked),
        lambda: cv.Fleet("1 MiB", workers=1).add(m.program, data=(masked, LABELS)),
    )
    for use in uses:
        with pytest.raises(cv.CalcError, match=r"values are masked: fill them"):
            use()


@pytest.mark.parametrize("value", [[[1, 2], [3]], object, {"a": 1}, "text", [[1j] * 4]], ids=repr)
def test_what_is_no_array_of_numbers_is_refused_by_name(value):
    m = model()
    with pytest.raises(cv.CalcError, match="'input'"):
        m["input"] = value
    for use in (m.predict, lambda x: m.fit(x, LABELS, progress=False), lambda x: m.evaluate(x, LABELS)):
        with pytest.raises(cv.CalcError, match="X|input"):
            use(value)


# ---------------------------------------------------------------- what fleets convert
def test_what_a_fleet_converted_goes_with_its_last_model():
    fleet, program = cv.Fleet("1 MiB", workers=1), model().program
    x, y = WHOLE.astype("f2"), [int(label) for label in LABELS]
    handles = [fleet.add(program, data=(x, y), seed=seed) for seed in range(3)]
    assert len(fleet._converted) == 2  # once for all models
    reads = [handle._train._arrays[0].ctypes.data for handle in handles]
    assert len(set(reads)) == 1
    for handle in handles:
        assert len(fleet._converted) == 2
        fleet.advance(1)
        handle.close()
    gc.collect()
    assert not fleet._converted
    assert handles[0].epochs_done == 1 and np.isfinite(handles[0].loss)  # its figures stay


@pytest.mark.parametrize("kind", ["list", "float16", "transposed", "table"])
def test_a_fleet_reads_what_it_must_convert_as_it_is_at_each_add(kind):
    def given(rows):
        if kind == "table":
            return pytest.importorskip("pandas").DataFrame(rows, columns=["a", "b"])
        return {"list": rows.tolist(), "float16": rows.astype("f2"), "transposed": np.asfortranarray(rows)}[kind]

    graph = cv.build_graph(nn.Linear(1), (2,), "mse", cv.SGD(0.1))
    program, rows = cv.compile(graph, batch_size=10), np.arange(20.0).reshape(10, 2)
    fleet, data, y = cv.Fleet("1 MiB"), given(rows), np.zeros((10, 1), "float32")
    for _ in range(3):
        for _ in range(2):
            fleet.add(program, data=(data, y))
        if kind == "list":
            for row in data:
                row[0] += 8.0
        elif kind == "table":
            data["a"] += 8.0
        else:
            data[:, 0] += 8
    handles = [*fleet.handles.values()]
    assert len({id(source) for handle in handles for source in handle._sources}) == 3  # one for each state
    fleet.fit(2, progress=False)
    for i, handle in enumerate(handles):
        alone = cv.CalcHeap("1 MiB").create(program)
        history = alone.fit((rows + [8.0 * (i // 2), 0]).astype("float32"), y, epochs=2, progress=False)
        np.testing.assert_array_equal(handle.losses, history["loss"])


def test_a_refused_model_leaves_nothing_converted():
    fleet = cv.Fleet("1 MiB", workers=1)
    for _ in range(3):
        with pytest.raises(cv.CalcError, match="labels"):
            fleet.add(model().program, data=(WHOLE.astype("f2"), [5] * 48))
    gc.collect()
    assert not fleet._converted


def test_an_array_is_not_taken_for_one_that_is_gone():
    """Python gives the id of what is gone to the next object."""
    fleet, program = cv.Fleet("1 MiB", workers=1), model().program
    taken: dict[int, int] = {}
    for value in range(50):
        x = np.full((16, 4), value, "f2")
        handle = fleet.add(program, data=(x, LABELS[:16]), seed=0)
        assert handle._train._arrays[0][0, 0] == value
        taken[id(x)] = taken.get(id(x), 0) + 1
        handle.close()
        del x, handle
    assert max(taken.values()) > 1  # ids did come back
