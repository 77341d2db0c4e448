"""Compiled methods of a model: functions that the interpreter calls with Python objects, and that call no Python code.

`calcvm.vm.calls.methods` decides when they are used, and lays out the words that they read.  When a process installs them, it
checks the layout of the structures read here (an array's fields, the owner of a lock).
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from calcvm.vm.run import job as J
from calcvm.vm.run.atomics import I64, call_entry, f32_at, f64_at, i32_at, i64_at, u8_at
from calcvm.vm.run.entry import OWN, TUPLE_SIZE
from calcvm.vm.run.samples import bytes_of, given_bytes, helper, inlined, scratch, sum_of

# Offsets in Python's objects, in bytes.
WORDS_SLOT, ARGUMENTS_SLOT, MODEL_SLOT = 16, 16, 24  # of `methods.HasFastMethods` and `methods.BoundStep`; 0: empty
TYPE, DATA, RANK_AT, DIMS_AT, DESCR, FLAGS = 8, 16, 24, 32, 56, 64  # of an array
BASIC_SIZE = 32  # of a type
PLAIN, WRITEABLE = 0x0001 | 0x0100, 0x0400  # C-contiguous, aligned
MOST_OBJECTS = 30  # arguments of a fallback call: more are a caller's error in any case
STEP_NAME, RUN_STEPS_NAME, PREDICT_NAME, EVALUATE_NAME, RUN_NAME, SET_NAME, STREAM_NAME, BOUND_NAME = range(
    8
)  # as in `entries`
ANSWERS_AT, SUMS_AT = 16, 24  # among a call's stack words, after its arguments: arrays, or sums, of its results
# Return values that are no answer: Python must run the call; a kernel trapped; the answer needs a dict, or must not have one.
ASK, TRAPPED, DICT = 0, -1, -2

_float = types.ExternalFunction("PyFloat_FromDouble", types.int64(types.float64))
_long = types.ExternalFunction("PyLong_AsLong", types.int64(types.int64))
_thread = types.ExternalFunction("PyThread_get_thread_ident", types.int64())
_intern = types.ExternalFunction("PyUnicode_InternFromString", types.int64(types.int64))
_call_method = types.ExternalFunction("PyObject_VectorcallMethod", types.int64(*[types.int64] * 4))
_incref = types.ExternalFunction("Py_IncRef", types.void(types.int64))
_decref = types.ExternalFunction("Py_DecRef", types.void(types.int64))
_new_dict = types.ExternalFunction("PyDict_New", types.int64())
_dict_size = types.ExternalFunction("PyDict_Size", types.int64(types.int64))
_dict_next = types.ExternalFunction("PyDict_Next", types.int32(*[types.int64] * 4))  # borrowed references
_dict_set = types.ExternalFunction("PyDict_SetItem", types.int32(*[types.int64] * 3))  # takes its own references
_new_tuple = types.ExternalFunction("PyTuple_New", types.int64(types.int64))
_clear_error = types.ExternalFunction("PyErr_Clear", types.void())


def _text(value: str):  # type: ignore[no-untyped-def]
    """An intrinsic for the address of a constant C string."""

    @intrinsic
    def address(tc):
        def codegen(ctx, b, sig, args):
            return b.ptrtoint(ctx.insert_const_string(b.module, value), I64)

        return types.int64(), codegen

    return address


_step_text, _run_steps_text, _predict_text, _evaluate_text, _run_text, _set_text, _trap_text = (
    _text(OWN + name) for name in ("step", "run_steps", "predict", "evaluate", "run_by_name", "set_item", "trapped")
)
_bound_text, _stream_text = _text(f"{OWN}bound"), _text(f"{OWN}stream")


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


# ---------------------------------------------------------------- arguments
@helper
def items_of(one):
    """Address of a tuple's items, which begin at the size of its type: another one from Python 3.14 on."""
    return one + i64_at(i64_at(one + TYPE)[0] + BASIC_SIZE)[0]


@helper
def mine(owner):
    """Whether the lock with this owner field is free, or belongs to this thread."""
    thread = i64_at(owner)[0]
    return thread == 0 or thread == _thread()


@helper
def number_at(data, dtype, i):
    """Element i of an array, as a float."""
    if dtype == 0:
        return np.float64(f32_at(data)[i])
    if dtype == 1:
        return f64_at(data)[i]
    if dtype == 2:
        return np.float64(u8_at(data)[i])
    if dtype == 3:
        return np.float64(i32_at(data)[i])
    return np.float64(i64_at(data)[i])


@helper
def is_class(x, classes):
    """Whether a number is an integer in [0, classes)."""
    return x >= 0.0 and x < classes and x == np.float64(np.int64(x))


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
        for i in range(n):
            if not is_class(number_at(data, dtype, i), classes):
                return False
    return low >= 0 and high < classes


@helper
def labels_or_ignored(data, dtype, n, classes, ignored):
    """Whether n labels are in [0, classes), or equal to the ignored one."""
    for i in range(n):
        x = number_at(data, dtype, i)
        if x != ignored and not is_class(x, classes):
            return False
    return True


@helper
def probabilities(data, dtype, n):
    """Whether n numbers are in [0, 1]."""
    for i in range(n):
        if not 0.0 <= number_at(data, dtype, i) <= 1.0:
            return False
    return True


@helper
def is_array(sheet, array, item_type):
    """Whether an object is a plain array of numbers."""
    return (
        i64_at(array + TYPE)[0] == i64_at(sheet)[J.ARRAY_TYPE]
        and i32_at(array + FLAGS)[0] & PLAIN == PLAIN
        and (item_type == 0 or i64_at(array + DESCR)[0] == item_type)
    )


@helper
def dtype_of(sheet, array):
    """An array's type as a number among the feeds' types; 5: none of them."""
    descr = i64_at(array + DESCR)[0]
    for k in range(5):
        if i64_at(sheet)[J.DTYPES + k] == descr:
            return k
    return 5


@helper
def placeholder(sheet, k):
    """Words of a placeholder."""
    return i64_at(sheet + 8 * (J.PLACEHOLDERS + k * J.PLACEHOLDER_WORDS))


@helper
def batch_of(sheet, k, array, most, single):
    """Number of samples in a placeholder's array; 0: Python must check it, also for more than ``most`` samples.

    single : 1: the array is one sample, without the axis of the batch; else 0.
    """
    if not is_array(sheet, array, 0):
        return 0
    wanted, dtype, rank = placeholder(sheet, k), dtype_of(sheet, array), i32_at(array + RANK_AT)[0] + single
    if rank != wanted[J.RANK] and not (
        rank == 1 and wanted[J.RANK] == 2 and wanted[J.DIMS + 1] == 1 and single == 0
    ):  # (n,) for (n, 1)
        return 0
    if i64_at(array + DESCR)[0] != wanted[J.EXACT] if wanted[J.EXACT] != 0 else dtype == 5:
        return 0
    dims = i64_at(i64_at(array + DIMS_AT)[0] - 8 * single)
    for i in range(1, rank):
        if dims[i] != wanted[J.DIMS + i]:
            return 0
    n = 1 if single else dims[0]
    if n < 1 or n > most:
        return 0
    if wanted[J.CLASSES] != 0:
        data, many, classes = i64_at(array + DATA)[0], n * wanted[J.PER_SAMPLE], wanted[J.CLASSES]
        if wanted[J.IGNORED] != 0:
            fit = labels_or_ignored(data, dtype, many, classes, wanted[J.IGNORED])
        else:
            fit = labels(data, dtype, many, classes) if classes > 0 else probabilities(data, dtype, many)
        if not fit:
            return 0
    return n


# ---------------------------------------------------------------- a call
@helper
def words_of(self):
    """Address of the words of an object with compiled methods; 0: it has none yet."""
    holder = i64_at(self + WORDS_SLOT)[0]
    return i64_at(holder + DATA)[0] if holder != 0 else 0


@helper
def there(at, changes):
    """Whether the model is in its slot and this thread may use it, or change it."""
    words = i64_at(at)
    if at == 0 or words[J.ARMED] == 0 or not mine(words[J.TURN_OWNER]):
        return False
    return not changes or mine(words[J.TRAINING_OWNER])


@helper
def method_of(at, which):
    """Address of a method's words; 0: Python must run the call, since the model is absent or another thread's."""
    if not there(at, False):
        return 0
    method = i64_at(at)[J.SHEET] + 8 * (J.METHODS + which * J.METHOD_WORDS)
    if i64_at(method)[J.SET] == 0 or (i64_at(method)[J.CHANGES] != 0 and not there(at, True)):
        return 0
    return method


@helper
def rows_of(sheet, method, batch):
    """Address and time of the rows for a batch; 0: they are not cached here."""
    entry = i64_at(
        method + 8 * (J.ROWS_OF + 3 * (J.KEPT_ROWS if batch == i64_at(sheet)[J.PLANNED] else batch % J.KEPT_ROWS))
    )
    return (entry[1], entry[2]) if batch != 0 and entry[0] == batch else (0, 0)


@helper
def batch_given(sheet, mw, given, n):
    """Number of samples in all arguments of a call; 0: Python must check them."""
    if n != mw[J.N_ARGUMENTS]:
        return 0
    batch = np.int64(0)
    for i in range(n):
        found = batch_of(sheet, mw[J.ARGUMENTS + i], given[i], mw[J.MOST_SAMPLES], 0)
        if found == 0 or (i > 0 and found != batch):
            return 0
        batch = found
    return batch


@inlined
def place(at, k, array, start, batch):
    """Copy samples of an array into their placeholder, for the current call."""
    words = i64_at(at)
    sheet = words[J.SHEET]
    wanted, item = placeholder(sheet, k), i64_at(sheet)[J.ITEM]
    many, dtype = batch * wanted[J.PER_SAMPLE], wanted[J.AS_IT_IS] if wanted[J.EXACT] != 0 else dtype_of(sheet, array)
    source = i64_at(array + DATA)[0] + given_bytes(dtype) * start * wanted[J.PER_SAMPLE]
    call_copy_rows(
        words[J.PIECE] + bytes_of(dtype, item) * wanted[J.PLACE],
        source,
        sheet + 8 * J.NO_PLACES,
        1,
        many,
        many,
        dtype,
        item,
    )
    words[J.HOLDS + 2 * k], words[J.HOLDS + 2 * k + 1] = batch, words[J.SEQ]


@helper
def held(words, mw):
    """Number of samples in all placeholders of a method; 0: Python must check."""
    batch, since = np.int64(0), max(words[J.FORGOT_AT], words[J.LOOKED_AT])
    for i in range(mw[J.N_ARGUMENTS]):
        k = J.HOLDS + 2 * mw[J.ARGUMENTS + i]
        if words[k + 1] <= since or (i > 0 and words[k] != batch):
            return 0
        batch = words[k]
    return batch


@inlined
def run(at, method, which, batch, rows, steps):
    """Run a method's rows, after those of the paths that it reads, and record it; returns whether no kernel trapped."""
    words, mw = i64_at(at), i64_at(method)
    words[J.DONE + 2 * which], words[J.DONE + 2 * which + 1] = batch, words[J.SEQ]
    if mw[J.CHANGES] != 0:
        words[J.CHANGED_AT] = words[J.SEQ]
    if mw[J.FORGETS] != 0:
        words[J.FORGOT_AT] = words[J.SEQ]
    job, piece, item = i64_at(words[J.SLOT_JOB]), words[J.PIECE], i64_at(words[J.SHEET])[J.ITEM]
    job[J.ROWS], job[J.DEADLINE] = rows, 0
    for k in range(mw[J.N_SPANS_OF]):
        span, last = i64_at(method + 8 * (J.SPANS_OF + 3 * k)), k == mw[J.N_SPANS_OF] - 1
        job[J.START], job[J.STOP], job[J.STEPS] = span[0], span[1], steps if last else 1
        if words[J.WORKERS] > 1 and (batch > span[2] or job[J.STEPS] > 1):
            job[J.CODE] = words[J.RUN_ROWS]
            call_run_team(words[J.CONTROL], words[J.SLOT_JOB], words[J.WORKERS])
        else:
            job[J.TEAM] = 1
            call_run_rows(words[J.SLOT_JOB], 0)
        if (f32_at(piece)[0] if item == 4 else f64_at(piece)[0]) != 0.0:
            return False
    return True


# ---------------------------------------------------------------- answers
@helper
def fits(sheet, result, batch, out):
    """Whether an object is an array that can receive a result."""
    rw, sw = i64_at(result), i64_at(sheet)
    if not is_array(sheet, out, sw[J.DTYPES + (sw[J.ITEM] == 8)]) or i32_at(out + FLAGS)[0] & WRITEABLE == 0:
        return False
    if i32_at(out + RANK_AT)[0] != rw[J.RESULT_RANK]:
        return False
    found, wanted = i64_at(i64_at(out + DIMS_AT)[0]), i64_at(rw[J.RESULT_DIMS])
    for k in range(1, rw[J.RESULT_RANK]):
        if found[k] != wanted[k]:
            return False
    return found[0] == batch


@helper
def number(at, result):
    """A scalar result."""
    words = i64_at(at)
    item = i64_at(words[J.SHEET])[J.ITEM]
    source = words[J.PIECE] + item * i64_at(result)[J.RESULT]
    return np.float64(f32_at(source)[0]) if item == 4 else f64_at(source)[0]


@inlined
def begun(at, method, n, out, objects, single):
    """Allocate arrays for the results of n samples, or zero sums; returns whether memory sufficed.

    single : as in `batch_of`, of the arrays.
    """
    sw, answers, sums = i64_at(i64_at(at)[J.SHEET]), i64_at(objects + 8 * ANSWERS_AT), f64_at(objects + 8 * SUMS_AT)
    for i in range(i64_at(method)[J.N_ANSWERS]):
        rw = i64_at(method + 8 * (J.RESULTS_OF + i * J.RESULT_WORDS))
        answers[i], sums[i] = out, 0.0
        if out != 0:
            _incref(out)
        elif rw[J.RESULT_RANK] > 0:
            item_type = sw[J.DTYPES + (sw[J.ITEM] == 8)]
            i64_at(rw[J.RESULT_DIMS])[0] = n
            _incref(item_type)
            rank, dims = rw[J.RESULT_RANK] - single, rw[J.RESULT_DIMS] + 8 * single
            answers[i] = new_array(sw[J.NEW_ARRAY], rank, dims, item_type)
            if answers[i] == 0:
                dropped(i, objects)
                return False
    return True


@helper
def dropped(n, objects):
    """Release the first n arrays for results."""
    for i in range(n):
        if i64_at(objects + 8 * ANSWERS_AT)[i] != 0:
            _decref(i64_at(objects + 8 * ANSWERS_AT)[i])


@inlined
def collect(at, method, start, batch, objects):
    """Collect the results of a batch that begins at sample ``start``."""
    words, answers, sums = i64_at(at), i64_at(objects + 8 * ANSWERS_AT), f64_at(objects + 8 * SUMS_AT)
    sheet = words[J.SHEET]
    item = i64_at(sheet)[J.ITEM]
    for i in range(i64_at(method)[J.N_ANSWERS]):
        result = method + 8 * (J.RESULTS_OF + i * J.RESULT_WORDS)
        rw = i64_at(result)
        if rw[J.RESULT_RANK] == J.MEAN:
            sums[i] += sum_of(number(at, result), batch, item)
        elif rw[J.RESULT_RANK] == J.SUM:
            sums[i] += number(at, result)
        elif rw[J.RESULT_RANK] < 0:
            sums[i] = number(at, result)  # unchanged, even -0.0
        else:
            to, many = i64_at(answers[i] + DATA)[0] + item * start * rw[J.LENGTH], batch * rw[J.LENGTH]
            source = words[J.PIECE] + item * rw[J.RESULT]
            call_copy_rows(to, source, sheet + 8 * J.NO_PLACES, 1, many, many, np.int64(item == 8), item)


@inlined
def finished(method, n, into, objects):
    """A method's answer: a result, or the dict ``into`` with all of them; 0: out of memory."""
    answers, sums, answer = i64_at(objects + 8 * ANSWERS_AT), f64_at(objects + 8 * SUMS_AT), into
    for i in range(i64_at(method)[J.N_ANSWERS]):
        rw, one = i64_at(method + 8 * (J.RESULTS_OF + i * J.RESULT_WORDS)), answers[i]
        if rw[J.RESULT_RANK] < 0:
            one = _float(sums[i] / n if rw[J.RESULT_RANK] == J.MEAN else sums[i])
        if into == 0:
            return one
        if one == 0 or _dict_set(into, rw[J.RESULT_NAME], one) != 0:
            answer = np.int64(0)
        if one != 0:
            _decref(one)
    return answer


# ---------------------------------------------------------------- kinds of calls
@helper
def by_name(sheet, mw, given, objects):
    """Address of a dict's values in the order of a method's arguments; 0: its keys are not exactly their names.

    Keys are compared by identity, so that none of their code runs.
    """
    n, found = mw[J.N_ARGUMENTS], np.int64(0)
    if _dict_size(given) != n:
        return 0
    arrays, at_key = i64_at(objects), objects + 8 * J.MOST_ARGUMENTS
    pair = i64_at(at_key)  # key, value, position
    pair[2] = 0
    while _dict_next(given, at_key + 16, at_key, at_key + 8) != 0:
        for i in range(n):
            if placeholder(sheet, mw[J.ARGUMENTS + i])[J.NAME] == pair[0]:
                arrays[i] = pair[1]
                found += 1
    return objects if found == n else 0


@helper
def apart(sheet, mw, given, n, objects):
    """Address of the arguments of a call with (inputs, others), each a tuple if several; 0: the call has another form."""
    inputs, many = mw[J.N_INPUTS], mw[J.N_ARGUMENTS]
    if n != 1 + (many > inputs):
        return 0
    arrays, found = i64_at(objects), np.int64(0)
    for k in range(n):
        wanted, one = inputs if k == 0 else many - inputs, i64_at(given)[k]
        if wanted > 1:
            if i64_at(one + TYPE)[0] != i64_at(sheet)[J.TUPLE_TYPE] or i64_at(one + TUPLE_SIZE)[0] != wanted:
                return 0
            for i in range(wanted):
                arrays[found + i] = i64_at(items_of(one))[i]
        else:
            arrays[found] = one
        found += wanted
    return objects


@inlined
def answered(self, which, given, n, out, into):
    """Run a method on arrays; ``out``: array for its result, or 0; ``into``: a dict for named results."""
    at = words_of(self)
    method = method_of(at, which)
    if method == 0:
        return ASK
    words, mw, objects = i64_at(at), i64_at(method), scratch()
    sheet = words[J.SHEET]
    if (mw[J.NAMED] != 0) != (into != 0):
        return DICT
    if which == J.RUN or (which == J.PREDICT and mw[J.N_ARGUMENTS] > 1):  # these take one object
        if n != 1 or given == 0:
            return ASK
        kind, one, n = i64_at(i64_at(given)[0] + TYPE)[0], i64_at(given)[0], mw[J.N_ARGUMENTS]
        if kind == i64_at(sheet)[J.DICT_TYPE]:
            given = by_name(sheet, mw, one, objects)
        elif which == J.PREDICT and kind == i64_at(sheet)[J.TUPLE_TYPE] and i64_at(one + TUPLE_SIZE)[0] == n:
            given = items_of(one)
        else:
            given = np.int64(0)
    elif mw[J.N_INPUTS] != 0:
        given, n = apart(sheet, mw, given, n, objects), mw[J.N_ARGUMENTS]
    if given == 0:
        return ASK
    arrays, planned = i64_at(given), i64_at(sheet)[J.PLANNED]
    many = batch_given(sheet, mw, arrays, n)
    rows, ns = rows_of(sheet, method, min(many, planned))
    if rows == 0:
        return ASK
    rows_rest = rows
    if many > planned:  # a call on one batch needs no divisions
        if many // planned > J.LONG_NS // ns:
            return ASK
        if many % planned != 0:
            rows_rest, _ = rows_of(sheet, method, many % planned)
            if rows_rest == 0:
                return ASK
    if out != 0 and (into != 0 or many > planned or not fits(sheet, method + 8 * J.RESULTS_OF, many, out)):
        return ASK
    if not begun(at, method, many, out, objects, 0):
        return ASK
    words[J.SEQ] += 1
    start = np.int64(0)
    while start < many:
        batch = min(many - start, planned)
        for i in range(n):
            place(at, mw[J.ARGUMENTS + i], arrays[i], start, batch)
        if not run(at, method, which, batch, rows if start + planned <= many else rows_rest, 1):
            dropped(mw[J.N_ANSWERS], objects)
            return TRAPPED
        collect(at, method, start, batch, objects)
        start += batch
    return finished(method, many, into, objects)


@helper
def called(self, which, given, n, out):
    """As `answered`, with a dict if one is needed; otherwise Python runs the call.

    After creating the dict, everything is checked again: the creation may run the garbage collector, and so any code.
    """
    into = np.int64(0)
    while True:
        found = answered(self, which, given, n, out, into)
        if found != DICT or into != 0:
            break
        into = _new_dict()
        if into == 0:
            break
    if found == DICT:
        found = np.int64(ASK)
    if found != into and into != 0:
        _decref(into)
    if found == ASK:  # out of memory: Python raises the error
        _clear_error()
    return found


@helper
def steps_run(self, given):
    """Run steps on the data in the placeholders."""
    at = words_of(self)
    method = method_of(at, J.STEP)
    if method == 0:
        return ASK
    words, mw = i64_at(at), i64_at(method)
    batch = held(words, mw)
    rows, ns = rows_of(words[J.SHEET], method, batch)
    if rows == 0 or i64_at(given[0] + TYPE)[0] != i64_at(words[J.SHEET])[J.INT_TYPE]:
        return ASK
    steps = _long(given[0])
    if steps == -1:
        _clear_error()
    if steps < 1 or steps > J.LONG_NS // ns:
        return ASK
    words[J.SEQ] += 1
    return _float(number(at, method + 8 * J.RESULTS_OF)) if run(at, method, J.STEP, batch, rows, steps) else TRAPPED


@helper
def fed(sheet, mw, given, batch, single):
    """Whether the arguments of a stream have its number of samples; ``single`` as in `batch_of`."""
    for i in range(mw[J.N_ARGUMENTS]):
        if batch_of(sheet, mw[J.ARGUMENTS + i], given[i], batch, single) != batch:
            return False
    return True


@helper
def stepped(self, given, n, into):
    """Run the next step of a stream; ``into``: a tuple for its results, if there are several."""
    method, objects = words_of(self), scratch()
    mw, answers = i64_at(method), i64_at(objects + 8 * ANSWERS_AT)
    at, batch, rows, single = mw[J.MODEL_WORDS], mw[J.ROWS_OF], mw[J.ROWS_OF + 1], np.int64(0)
    words = i64_at(at)
    if n != mw[J.N_ARGUMENTS] or not there(at, True):
        return ASK
    if batch == 1 and fed(words[J.SHEET], mw, given, batch, 1):
        single = np.int64(1)
    elif not fed(words[J.SHEET], mw, given, batch, 0):
        return ASK
    if not begun(at, method, batch, 0, objects, single):
        return ASK
    words[J.SEQ] += 1
    for i in range(n):
        place(at, mw[J.ARGUMENTS + i], given[i], 0, batch)
    if not run(at, method, J.STREAM, batch, rows, 1):
        dropped(mw[J.N_ANSWERS], objects)
        return TRAPPED
    collect(at, method, 0, batch, objects)
    for i in range(mw[J.N_ANSWERS] if into != 0 else 0):
        i64_at(items_of(into))[i] = answers[i]
    return into if into != 0 else answers[0]


@helper
def streamed(self, given, n):
    """As `stepped`, with a tuple if one is needed, whose creation may run any code, before anything is checked."""
    method, into, found = words_of(self), np.int64(0), np.int64(ASK)
    if method != 0:
        if i64_at(method)[J.N_ANSWERS] > 1:
            into = _new_tuple(i64_at(method)[J.N_ANSWERS])
        if into != 0 or i64_at(method)[J.N_ANSWERS] == 1:
            found = stepped(self, given, n, into)
        if found != into and into != 0:
            _decref(into)
        if found == ASK:  # out of memory: Python raises the error
            _clear_error()
    return found


@helper
def item_set(self, name, array):
    """Set a placeholder."""
    at = words_of(self)
    if not there(at, True):
        return ASK
    words = i64_at(at)
    sheet, sw = words[J.SHEET], i64_at(words[J.SHEET])
    for k in range(sw[J.N_PLACEHOLDERS]):
        if placeholder(sheet, k)[J.NAME] == name:
            batch = batch_of(sheet, k, array, sw[J.PLANNED], 0)
            if batch == 0:
                return ASK
            words[J.SEQ] += 1
            place(at, k, array, 0, batch)
            _incref(sw[J.NONE])
            return sw[J.NONE]
    return ASK


# ---------------------------------------------------------------- methods
@helper
def hand_on(self, args, n, names, name):
    """Call the Python method ``name`` with the same objects."""
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
    """The code of all methods; ``name``: the called one.  ``self`` is a model, a stream, or, for a bound step, a `methods.BoundStep`."""
    model, given, found, written = self, i64_at(args), ASK, _step_text()
    if name == BOUND_NAME:
        arguments = i64_at(self + ARGUMENTS_SLOT)[0]
        model, args = i64_at(self + MODEL_SLOT)[0], items_of(arguments)
        given = i64_at(args)
        n, names = i64_at(arguments + TUPLE_SIZE)[0] if n == 0 and names == 0 else 0, 0  # 0: it got arguments
    which, out = J.STEP, np.int64(0)
    if name == BOUND_NAME and n == 0:
        written = _bound_text()
    elif name == RUN_STEPS_NAME:
        written = _run_steps_text()
        if n == 1 and names == 0:
            found = steps_run(model, given)
    elif name == STREAM_NAME:
        written = _stream_text()
        if names == 0:
            found = streamed(self, given, n)
    elif name == SET_NAME:
        written = _set_text()
        if n == 2 and names == 0:
            found = item_set(model, given[0], given[1])
    else:
        if name == PREDICT_NAME:
            written, which = _predict_text(), J.PREDICT
            if names != 0 and i64_at(names + TUPLE_SIZE)[0] == 1 and words_of(model) != 0:
                if i64_at(items_of(names))[0] == i64_at(i64_at(words_of(model))[J.SHEET])[J.OUT_NAME]:
                    out = given[n]
        elif name == EVALUATE_NAME:
            written, which = _evaluate_text(), J.EVALUATE
        elif name == RUN_NAME:
            written, which = _run_text(), J.RUN
        if names == 0 or out != 0:
            found = called(model, which, args, n, out)
    if found == TRAPPED:
        n, names, written = 0, 0, _trap_text()
    if found == TRAPPED or found == ASK:
        found = hand_on(model, args, n, names, written)
    return found
