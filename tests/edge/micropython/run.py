"""Runs in MicroPython: packs beside the numbers of the PC, in the file that is named."""

import array
import gc
import json
import sys

import bytes_of
import exact
import flow
import sensor
import small


def close(found, wanted, tolerance=1e-4):
    assert len(found) == len(wanted)
    assert all(abs(a - b) <= tolerance * max(1, abs(b)) for a, b in zip(found, wanted)), (found, wanted)


with open(sys.argv[1]) as file:
    wanted = json.load(file)
sample, at_first, at_last = wanted["sample"], wanted["at first"], wanted["at last"]
model = sensor.Model()
close(model.predict(sample), at_first)
for x, y, loss in wanted["steps"]:
    assert abs(model.step(x, y) - loss) < 1e-4
    gc.collect()
close(model.predict([tuple(sample)]), at_last, 1e-3)

# states
state, other = model.state, sensor.Model(model.state)
close(other.predict(array.array("f", sample)), at_last, 1e-3)
other.start()
close(other.predict(array.array("d", sample)), at_first)
other.state = state
seventh, eighth = model.page(7), other.page(8)
other.start()
assert other.load(seventh, eighth) == 8 and other.load(eighth, seventh) == 8 and other.state == state
assert other.load(b"", seventh) == 7 and other.load(seventh, eighth[:-1]) == 7
damaged = bytearray(seventh)
damaged[30] ^= 1
assert other.load(damaged, b"") is None

# self-tests, which leave the model as it is
assert model.self_test() is None and flow.Model().self_test() is None and small.Model().self_test() is None
assert model.state == state

# views live as long as they are used
view = model.array("input")
view[1] = 0.25
assert model.array("input")[1] == 0.25 and len(view) == 4
del model
gc.collect()
assert view[1] == 0.25
model = sensor.Model(state)


def refused(error, text, call):
    try:
        call()
    except error as found:
        assert text in str(found), found
    else:
        raise AssertionError(text)
    assert model.state == state


def set_state():
    model.state = b"x"


endless = []
endless.append(endless)
refused(ValueError, "input has 3 numbers: 4 are wanted", lambda: model.step([1, 2, 3], 1))
refused(ValueError, "input has 3 numbers: 4 are wanted", lambda: model.predict(array.array("f", [1, 2, 3])))
refused(ValueError, "step: data that the model cannot use", lambda: model.step([1, 2, 3, 4], 3))
refused(ValueError, "bytes, not 1", set_state)
refused(ValueError, "bytes, not 2", lambda: sensor.Model(b"xx"))
refused(TypeError, "positional arguments", lambda: model.step([1, 2, 3, 4]))
refused(TypeError, "str", lambda: model.step("abcd", 1))
refused(TypeError, "NoneType", lambda: model.step([1, 2, 3, None], 1))
refused(TypeError, "buffer", lambda: model.load(1, 2))
refused(KeyError, "there is no array 'y'", lambda: model.array("y"))
refused(AttributeError, "nothing", lambda: model.nothing)
refused(RuntimeError, "recursion", lambda: model.predict(endless))


def calling():
    model.predict([9, 9, 9, 9])
    yield from sample


refused(RuntimeError, "an argument of step calls the model", lambda: model.step(calling(), 1))
model.start()
close(model.predict(number for number in sample), at_first)

# other types of numbers
whole = bytes_of.Model()
first = whole.state
for pixels in ([300] * 50, [-1] * 50, [0.5] * 50, [[255]] * 49):
    try:
        whole.step(pixels, [0, 3])
    except (ValueError, TypeError):
        assert whole.state == first
    else:
        raise AssertionError(pixels)
for labels in ([0, 4], [-1, 0], [0, 0.5]):
    try:
        whole.step(bytes([255] * 50), labels)
    except (ValueError, TypeError):
        assert whole.state == first
    else:
        raise AssertionError(labels)
assert abs(whole.step(bytes([255] * 50), [0, 3]) - wanted["bytes"]) < 1e-5 and whole.self_test() is None
assert abs(exact.Model().step(sample, 1) - wanted["exact"]) < 1e-9 and exact.Model().self_test() is None

stream = flow.Model()
for x, y in wanted["stream"]:
    close(stream.stream(x), y)
close(small.Model().predict(sample), wanted["int8"], 1e-6)
assert small.Model().state == b"" and not hasattr(small.Model(), "page")
print("all as on the PC")
