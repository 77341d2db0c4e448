"""Compiled methods of a model: functions that the interpreter calls with its own objects, and that call no Python.

`calcvm.vm.methods` says when they are used, and lays out the words that they read.  The structures read here (an
array's fields, the owner of a lock) are checked there when the process installs them.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from calcvm.vm.atomics import I64, call_entry, f32_at, f64_at, i32_at, i64_at, u8_at
from calcvm.vm.job import (
    ARG_WORDS,
    ARGUMENTS,
    ARMED,
    ARRAY_TYPE,
    BEGIN,
    CHANGED_AT,
    CHANGES,
    CLASSES,
    CODE,
    CONTROL,
    DEADLINE,
    DIMS,
    DTYPES,
    END,
    FORGETS,
    FORGOT_AT,
    FRAME_JOB,
    HELD,
    INT_TYPE,
    ITEM,
    KEPT_ROWS,
    LAST,
    LAST_BATCH,
    LENGTH,
    LONG_NS,
    METHOD_WORDS,
    METHODS,
    MOST,
    N_ARGUMENTS,
    NEW_ARRAY,
    NO_PLACES,
    NS,
    OUT_NAME,
    PER_SAMPLE,
    PIECE,
    PLACE,
    PREDICT,
    RANK,
    RESULT,
    RESULT_DIMS,
    RESULT_RANK,
    ROWS,
    ROWS_OF,
    RUN_ROWS,
    SEQ,
    SET,
    START,
    STEP,
    STEPPED_AT,
    STEPS,
    STOP,
    TEAM,
    TRAINING_OWNER,
    TURN_OWNER,
    WORKERS,
)
from calcvm.vm.samples import helper, scratch

# Bytes of Python's objects.
WORDS_SLOT, ARGUMENTS_SLOT, MODEL_SLOT = 16, 16, 24  # of `methods.Native` and `methods.Bound`; 0: nothing is there
TYPE, DATA, RANK_AT, DIMS_AT, DESCR, FLAGS = 8, 16, 24, 32, 56, 64  # of an array
TUPLE_SIZE, TUPLE_ITEMS = 16, 24
PLAIN, WRITEABLE = 0x0001 | 0x0100, 0x0400  # C-contiguous, aligned
MOST_OBJECTS = 30  # that a call hands on: more are an error of the caller's anyway
STEP_NAME, PREDICT_NAME, RUN_STEPS_NAME, BOUND_NAME = range(4)
ASK, TRAPPED = 0, -1  # what is no answer: Python must give it; a kernel trapped

_float = types.ExternalFunction("PyFloat_FromDouble", types.int64(types.float64))
_long = types.ExternalFunction("PyLong_AsLong", types.int64(types.int64))
_thread = types.ExternalFunction("PyThread_get_thread_ident", types.int64())
_intern = types.ExternalFunction("PyUnicode_InternFromString", types.int64(types.int64))
_call_method = types.ExternalFunction("PyObject_VectorcallMethod", types.int64(*[types.int64] * 4))
_incref = types.ExternalFunction("Py_IncRef", types.void(types.int64))
_decref = types.ExternalFunction("Py_DecRef", types.void(types.int64))
_clear_error = types.ExternalFunction("PyErr_Clear", types.void())


def _text(value: str):  # type: ignore[no-untyped-def]
    """An intrinsic for the address of a constant C string."""

    @intrinsic
    def address(tc):
        def codegen(ctx, b, sig, args):
            return b.ptrtoint(ctx.insert_const_string(b.module, value), I64)

        return types.int64(), codegen

    return address


_step_text, _predict_text, _run_steps_text, _trap_text = map(_text, ("_step", "_predict", "_run_steps", "_trapped"))


@intrinsic
def new_array(tc, function, rank, dims, descr):
    """NumPy's ``PyArray_Empty(rank, dims, descr, 0)``, which takes a reference to ``descr``."""

    def codegen(ctx, b, sig, args):
        i32 = ir.IntType(32)
        ft = ir.FunctionType(I64, [i32, I64, I64, i32])
        function, rank, dims, descr = args
        return b.call(b.inttoptr(function, ft.as_pointer()), [b.trunc(rank, i32), dims, descr, i32(0)])

    return types.int64(*[types.int64] * 4), codegen


@intrinsic
def call_copy_rows(tc, dst, src, places, rows, stride, length, dtype, size):
    return call_entry("copy_rows")


@intrinsic
def call_run_rows(tc, job, worker):
    return call_entry("run_rows")


@intrinsic
def call_run_team(tc, control, job, n_workers):
    return call_entry("run_team")


# ---------------------------------------------------------------- what is given
@helper
def mine(owner):
    """Whether no thread has the lock whose owner is kept there, or this one has it."""
    thread = i64_at(owner)[0]
    return thread == 0 or thread == _thread()


@helper
def labels(data, dtype, n, classes):
    """Whether n labels are in [0, classes)."""
    low, high = np.int64(0), np.int64(-1)
    if dtype == 2:
        for i in range(n):
            high = max(high, np.int64(u8_at(data)[i]))
    elif dtype == 3:
        for i in range(n):
            low, high = min(low, np.int64(i32_at(data)[i])), max(high, np.int64(i32_at(data)[i]))
    elif dtype == 4:
        for i in range(n):
            low, high = min(low, i64_at(data)[i]), max(high, i64_at(data)[i])
    else:
        return False
    return low >= 0 and high < classes


@helper
def probabilities(data, dtype, n):
    """Whether n numbers are in [0, 1]."""
    for i in range(n):
        if dtype == 0:
            x = np.float64(f32_at(data)[i])
        elif dtype == 1:
            x = f64_at(data)[i]
        elif dtype == 2:
            x = np.float64(u8_at(data)[i])
        elif dtype == 3:
            x = np.float64(i32_at(data)[i])
        else:
            x = np.float64(i64_at(data)[i])
        if not 0.0 <= x <= 1.0:
            return False
    return True


@helper
def is_array(words, array, item_type):
    """Whether an object is a plain array of a type of numbers."""
    return (
        i64_at(array + TYPE)[0] == words[ARRAY_TYPE]
        and i32_at(array + FLAGS)[0] & PLAIN == PLAIN
        and (item_type == 0 or i64_at(array + DESCR)[0] == item_type)
    )


@helper
def dtype_of(words, array):
    """Number of an array's type among the feeds'; 5: none."""
    descr = i64_at(array + DESCR)[0]
    for k in range(5):
        if words[DTYPES + k] == descr:
            return k
    return 5


@helper
def batch_of(words, argument, array):
    """Samples in what is given for an argument; 0 where Python must look at it."""
    arg = i64_at(argument)
    if not is_array(words, array, 0):
        return 0
    dtype = dtype_of(words, array)
    if i32_at(array + RANK_AT)[0] != arg[RANK] or dtype == 5:
        return 0
    dims = i64_at(i64_at(array + DIMS_AT)[0])
    for k in range(1, arg[RANK]):
        if dims[k] != arg[DIMS + k]:
            return 0
    n = dims[0]
    if n < 1 or n > arg[MOST]:
        return 0
    if arg[CLASSES] != 0:
        data, many = i64_at(array + DATA)[0], n * arg[PER_SAMPLE]
        if not (labels(data, dtype, many, arg[CLASSES]) if arg[CLASSES] > 0 else probabilities(data, dtype, many)):
            return 0
    return n


# ---------------------------------------------------------------- a call
@helper
def words_of(self):
    """Address of the words of what has compiled methods; 0: it has none yet."""
    holder = i64_at(self + WORDS_SLOT)[0]
    return i64_at(holder + DATA)[0] if holder != 0 else 0


@helper
def method_of(at, which):
    """Address of a method's words; 0 where Python must be asked, since the model is not there or not this thread's."""
    words, method = i64_at(at), at + 8 * (METHODS + which * METHOD_WORDS)
    if words[ARMED] == 0 or i64_at(method)[SET] == 0 or not mine(words[TURN_OWNER]):
        return 0
    if i64_at(method)[CHANGES] != 0 and not mine(words[TRAINING_OWNER]):
        return 0
    return method


@helper
def rows_of(method, batch):
    """Address of the rows for a batch; 0: they are not known here."""
    entry = i64_at(method + 8 * (ROWS_OF + 2 * (batch % KEPT_ROWS)))
    return entry[1] if entry[0] == batch else 0


@helper
def run(at, method, which, batch, rows, steps):
    """Run a method's rows, and take note of that; whether no kernel trapped."""
    words, mw = i64_at(at), i64_at(method)
    words[SEQ] += 1
    words[LAST], words[LAST_BATCH], words[HELD] = which, batch, batch
    if mw[CHANGES] != 0:
        words[CHANGED_AT] = words[SEQ]
    if mw[FORGETS] != 0:
        words[FORGOT_AT], words[HELD] = words[SEQ], 0
    else:
        words[STEPPED_AT] = words[SEQ]
    job = i64_at(words[FRAME_JOB])
    job[ROWS], job[START], job[STOP], job[STEPS], job[DEADLINE] = rows, mw[BEGIN], mw[END], steps, 0
    if words[WORKERS] > 1:
        job[CODE] = words[RUN_ROWS]
        call_run_team(words[CONTROL], words[FRAME_JOB], words[WORKERS])
    else:
        job[TEAM] = 1
        call_run_rows(words[FRAME_JOB], 0)
    piece = words[PIECE]
    return f32_at(piece)[0] == 0.0 if words[ITEM] == 4 else f64_at(piece)[0] == 0.0


@helper
def batch_given(words, method, given, n):
    """Samples in all arguments of a call; 0 where Python must look at them."""
    if n != i64_at(method)[N_ARGUMENTS]:
        return 0
    batch = np.int64(0)
    for k in range(n):
        found = batch_of(words, method + 8 * (ARGUMENTS + k * ARG_WORDS), given[k])
        if found == 0 or (k > 0 and found != batch):
            return 0
        batch = found
    return batch


@helper
def place(at, method, given, n, batch):
    """Copy arguments into their placeholders."""
    words = i64_at(at)
    for k in range(n):
        arg = i64_at(method + 8 * (ARGUMENTS + k * ARG_WORDS))
        many = batch * arg[PER_SAMPLE]
        call_copy_rows(
            words[PIECE] + words[ITEM] * arg[PLACE], i64_at(given[k] + DATA)[0], at + 8 * NO_PLACES, 1, many, many,
            dtype_of(words, given[k]), words[ITEM],
        )  # fmt: skip


@helper
def number(words, method):
    """A result that is one number, as a Python float."""
    at = words[PIECE] + words[ITEM] * i64_at(method)[RESULT]
    return _float(np.float64(f32_at(at)[0]) if words[ITEM] == 4 else f64_at(at)[0])


@helper
def looked_at(self, which, given, n):
    """Of a call with arrays: addresses of words and method, the batch, and its rows; 0 where Python must be asked."""
    at = words_of(self)
    method = method_of(at, which) if at != 0 else 0
    batch = batch_given(i64_at(at), method, given, n) if method != 0 else 0
    return at, method, batch, rows_of(method, batch) if batch != 0 else 0


@helper
def stepped(self, given, n):
    """A training step on arrays."""
    at, method, batch, rows = looked_at(self, STEP, given, n)
    if rows == 0:
        return ASK
    words = i64_at(at)
    place(at, method, given, n, batch)
    return number(words, method) if run(at, method, STEP, batch, rows, 1) else TRAPPED


@helper
def result(words, method, batch, out):
    """A new reference to the array for a result: ``out`` if it fits, or (0) a new one; 0 where there is none."""
    mw, item_type = i64_at(method), words[DTYPES + (words[ITEM] == 8)]
    dims = i64_at(mw[RESULT_DIMS])
    dims[0] = batch
    if out == 0:
        _incref(item_type)
        answer = new_array(words[NEW_ARRAY], mw[RESULT_RANK], mw[RESULT_DIMS], item_type)
        if answer == 0:
            _clear_error()
        return answer
    if not is_array(words, out, item_type) or i32_at(out + FLAGS)[0] & WRITEABLE == 0:
        return 0
    if i32_at(out + RANK_AT)[0] != mw[RESULT_RANK]:
        return 0
    there = i64_at(i64_at(out + DIMS_AT)[0])
    for k in range(mw[RESULT_RANK]):
        if there[k] != dims[k]:
            return 0
    _incref(out)
    return out


@helper
def predicted(self, given, n, out):
    """Outputs for an array of samples, at most a batch."""
    at, method, batch, rows = looked_at(self, PREDICT, given, n)
    if rows == 0:
        return ASK
    words = i64_at(at)
    answer = result(words, method, batch, out)
    if answer == 0:
        return ASK
    place(at, method, given, n, batch)
    if not run(at, method, PREDICT, batch, rows, 1):
        _decref(answer)
        return TRAPPED
    source, many = words[PIECE] + words[ITEM] * i64_at(method)[RESULT], batch * i64_at(method)[LENGTH]
    call_copy_rows(i64_at(answer + DATA)[0], source, at + 8 * NO_PLACES, 1, many, many, words[ITEM] == 8, words[ITEM])
    return answer


@helper
def steps_run(self, given):
    """Steps on the data that are there."""
    at = words_of(self)
    method = method_of(at, STEP) if at != 0 else 0
    if method == 0:
        return ASK
    words = i64_at(at)
    batch = words[HELD]
    rows = rows_of(method, batch) if batch != 0 else 0
    if rows == 0 or i64_at(given[0] + TYPE)[0] != words[INT_TYPE]:
        return ASK
    steps = _long(given[0])
    if steps == -1:
        _clear_error()
    if steps < 1 or steps > LONG_NS // max(i64_at(method)[NS], 1):
        return ASK
    return number(words, method) if run(at, method, STEP, batch, rows, steps) else TRAPPED


# ---------------------------------------------------------------- methods
@helper
def hand_on(self, args, n, names, name):
    """What the method ``name``, written in Python, answers to the same objects."""
    objects = scratch()
    out, given = i64_at(objects), i64_at(args)
    many = n + (i64_at(names + TUPLE_SIZE)[0] if names != 0 else 0)
    if many > MOST_OBJECTS:
        many, n, names = MOST_OBJECTS, MOST_OBJECTS, 0
    out[0] = self
    for k in range(many):
        out[1 + k] = given[k]
    text = _intern(name)
    answer = _call_method(text, objects, n + 1, names)
    _decref(text)
    return answer


def method(self, args, n, names, name):
    """What the methods below have in common: compiled once, for that takes two seconds."""
    model, given, answer, written = self, i64_at(args), ASK, _step_text()
    if name == BOUND_NAME:
        arguments = i64_at(self + ARGUMENTS_SLOT)[0]
        model, args = i64_at(self + MODEL_SLOT)[0], arguments + TUPLE_ITEMS
        if n == 0 and names == 0:  # else Python is given what is too many, and says so
            n = i64_at(arguments + TUPLE_SIZE)[0]
            answer = stepped(model, i64_at(args), n)
        else:
            n = 0
    elif name == STEP_NAME:
        if names == 0:
            answer = stepped(self, given, n)
    elif name == PREDICT_NAME:
        written = _predict_text()
        if names == 0:
            answer = predicted(self, given, n, 0)
        elif i64_at(names + TUPLE_SIZE)[0] == 1 and words_of(self) != 0:
            if i64_at(names + TUPLE_ITEMS)[0] == i64_at(words_of(self))[OUT_NAME]:
                answer = predicted(self, given, n, given[n])
    else:
        written = _run_steps_text()
        if n == 1 and names == 0:
            answer = steps_run(self, given)
    if answer == TRAPPED:
        n, names, written = 0, 0, _trap_text()
    if answer == TRAPPED or answer == ASK:
        answer = hand_on(model, args, n, names, written)
    return answer


@intrinsic
def call_method(tc, self, args, n, names, name):
    return call_entry("method")


def step(self, args, n, names):
    return call_method(self, args, n, names, STEP_NAME)


def predict(self, args, n, names):
    return call_method(self, args, n, names, PREDICT_NAME)


def run_steps(self, args, n, names):
    return call_method(self, args, n, names, RUN_STEPS_NAME)


def bound_step(self, args, n, names):
    """`step` on the arrays of a `methods.Bound`."""
    return call_method(self, args, n, names, BOUND_NAME)
