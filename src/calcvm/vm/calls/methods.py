"""Methods that the interpreter calls as compiled code, for a model's calls on plain arrays.

A call in Python checks everything each time: names, types, shapes, turns, the contents of the heap.  That takes a hundred times
as long as a small network's arithmetic.  A compiled method (`calcvm.vm.calls.compiled`) does all of it in one go while it holds
the interpreter's lock, so that no other thread comes in between:

- it checks that the arguments are plain arrays of the right sizes, with labels and probabilities in range;
- it checks that the model is in its slot and no thread is about to take that (`ARMED`), and that no other thread has the
  model's turn, or, for a call that changes the model, its training: Python's locks themselves show this;
- it copies the samples into the heap, runs the rows, and creates the answer.

Any other call falls through to Python.  There lists, tensors of other libraries, arrays of other types and orders, tuples and
keyword arguments become plain arrays in their places, and the compiled method is called again.  If that falls through as well,
the Python method runs: it raises the error, or answers and then arms the compiled method.

From the first model on, a class has functions that the interpreter calls directly.  They run in Python until a process has made
WORTH calls, and from then on in compiled code (`calcvm.vm.calls.entries`), even through references taken earlier.  Python
takes note of the effects of compiled calls when it next looks at the model (`CallLog.look`).  Long calls stay in Python, where
other threads can run meanwhile and Ctrl-C works.

Short calls run on one worker, whatever the model's team, because they end before a second worker would wake up.  A prediction of
one sample by 784-64-64-10, 5 ms after the last call, takes 32 us; with a team of two it took 127.
"""

from __future__ import annotations

import ctypes
import inspect
import math
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from time import perf_counter
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from calcvm.errors import CalcError
from calcvm.hints import hinted
from calcvm.ops.statement import PHASES
from calcvm.system import at_fork, has_teams
from calcvm.vm.run import job as J
from calcvm.vm.run import team
from calcvm.vm.run.device import heaps_of
from calcvm.vm.run.entry import METHODS, OWN, STREAMS, entry
from calcvm.vm.run.entry import address as address_of
from calcvm.vm.run.loaded import FORWARD

if TYPE_CHECKING:
    from calcvm.vm.memory.base_model import BaseModel
    from calcvm.vm.memory.record import Record
    from calcvm.vm.memory.slot import Slot
    from calcvm.vm.run.loaded import Loaded

WORTH = 32  # Python calls before a process compiles methods, which takes seconds if none are cached
ARRAY = 0  # a result with one row per sample
FASTCALL = 0x0080 | 0x0002  # METH_FASTCALL | METH_KEYWORDS
ARRAY_EMPTY = 184  # index in NumPy's table of functions


_sheets = threading.RLock()  # for writers of a sheet: models of several heaps, and so several threads, share one
at_fork(before=_sheets.acquire, after_in_parent=_sheets.release, after_in_child=_sheets.release)
Method = TypeVar("Method", bound=Callable[..., Any])


class CallKind(NamedTuple):
    """The section that a compiled method runs, and the form of its answer."""

    path: str
    phases: tuple[str, ...]
    forgets: bool  # contents of placeholders and results are gone afterwards
    kind: int  # kind of its results: ARRAY, SINGLE or MEAN
    named: bool  # returned in a dict, as several results always are

    def round(self, loaded: Loaded) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Paths, with their phases: first those whose results it reads, then its own."""
        return (*loaded.before(self.path, self.phases), (self.path, self.phases))


CALLS = {
    J.STEP: CallKind("learn", PHASES, forgets=False, kind=J.SINGLE, named=False),
    J.PREDICT: CallKind("predict", ("forward",), forgets=True, kind=ARRAY, named=False),
    J.EVALUATE: CallKind("predict", FORWARD, forgets=True, kind=J.MEAN, named=True),
    J.RUN: CallKind("predict", ("forward",), forgets=False, kind=ARRAY, named=True),
}


class HasFastMethods:
    """Base of classes with compiled methods."""

    __slots__ = ("_calcvm_words",)  # an array, after the first call that offers compiled methods
    _calcvm_words: np.ndarray

    def _calcvm_bound(self) -> None:
        """Fallback of a bound step that was called with arguments."""
        raise TypeError("a bound step takes nothing: it reads the arrays that it is bound to")


def native(plain: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]) -> Callable[[Method], Method]:
    """A method that runs as compiled code once that exists, even through references taken before the first model.

    plain : maps its arguments to those that compiled code takes: positional ones, and options by name.
    """

    def named(method: Method) -> Method:
        method = hinted(method)

        @wraps(method)
        def call(self: Any, *args: Any, **options: Any) -> Any:
            return (made.get("code") or method)(self, *args, **options)

        made: dict[str, Any] = {"call": call, "handed": _handed(method, plain, lambda: made["code"])}
        call.made = made  # type: ignore[attr-defined]
        return call  # type: ignore[return-value]

    return named


_again = threading.local()  # set while compiled code is called a second time


def _handed(method: Method, plain: Callable[..., Any], compiled: Callable[[], Any]) -> Method:
    """The fallback of compiled code: the same code again with plain arrays, and then the method in Python."""

    @wraps(method)
    def handed(self: Any, *args: Any, **options: Any) -> Any:
        if self.record.calls is None or getattr(_again, "on", False):
            return method(self, *args, **options)
        try:
            taken, named = plain(self, *args, **options)
        except (CalcError, AttributeError, KeyError, TypeError, ValueError):  # the method raises the error
            return method(self, *args, **options)
        _again.on = True
        try:
            return compiled()(self, *taken, **named)
        finally:
            _again.on = False

    return handed  # type: ignore[return-value]


class BoundStep:
    """A model's step, bound to array objects; their contents may change."""

    __slots__ = ("arguments", "model")

    def __init__(self, model: Any, arguments: tuple[np.ndarray, ...]):
        self.arguments, self.model = arguments, model

    def step(self) -> float:
        """The step in Python: if it cannot be compiled, is overridden, or was pickled."""
        return float(self.model.step(*self.arguments))

    def __reduce__(self) -> tuple[Any, ...]:  # also for pickle protocols without support for slots
        return BoundStep, (self.model, self.arguments)


class ProgramSheet:
    """A program's data for compiled methods, shared by all its models: words, and their targets (`calcvm.vm.run.job`)."""

    def __init__(self, loaded: Loaded):
        words = self.words = np.zeros(J.SHEET_WORDS, np.int64)
        self.numbers: dict[str, int] = {}  # of placeholders that are read in place
        self.feeds: dict[int, list[int] | None] = {}  # by method; None: its calls cannot be compiled
        self._kept: list[Any] = []
        self._rows: dict[int, np.ndarray] = {}  # by the address of their entry
        self._streams: dict[str, np.ndarray | None] = {}  # words of a stream, by path
        words[[J.ITEM, J.PLANNED]] = loaded.program.itemsize, loaded.program.batch_size
        words[[J.ARRAY_TYPE, J.INT_TYPE]] = id(np.ndarray), id(int)
        words[[J.DICT_TYPE, J.TUPLE_TYPE]] = id(dict), id(tuple)
        words[[J.NONE, J.OUT_NAME, J.NEW_ARRAY]] = id(None), self._name("out"), _new_array()
        words[J.DTYPES : J.PLACEHOLDERS] = [id(np.dtype(name)) for name in J.FEED_DTYPES]
        for name, facts in loaded.variables.items():
            if facts["kind"] == "placeholder" and facts["symbol"] is not None and _by_samples(loaded.forms[name]):
                self._describe_placeholder(loaded, name)
                if len(self.numbers) == J.MOST_PLACEHOLDERS:
                    break
        words[J.N_PLACEHOLDERS] = len(self.numbers)

    def _name(self, name: str) -> int:
        """The address of the interned string that literals of this text share."""
        self._kept.append(sys.intern(name))
        return id(self._kept[-1])

    def _describe_placeholder(self, loaded: Loaded, name: str) -> None:
        form, facts = loaded.forms[name], loaded.variables[name]
        classes = facts["classes"]
        sizes, k = [size.b for size in form[1:]], len(self.numbers)
        words = self.words[J.PLACEHOLDERS + k * J.PLACEHOLDER_WORDS :][: J.PLACEHOLDER_WORDS]
        words[: J.DIMS] = (
            self._name(name), len(form), math.prod(sizes), loaded.symbol(name).offset,
            classes if classes is not None else -1 if name in loaded.probabilities else 0, facts.get("ignored", 0), 0, 0,
        )  # fmt: skip
        if name in loaded.own_types:
            dtype = np.dtype(loaded.own_types[name])
            words[[J.EXACT, J.AS_IT_IS]] = id(dtype), J.FEED_CELLS[dtype.itemsize]
        words[J.DIMS + 1 :][: len(sizes)] = sizes
        self.numbers[name] = k

    def _method(self, which: int) -> np.ndarray:
        return self.words[J.METHODS + which * J.METHOD_WORDS :][: J.METHOD_WORDS]

    def describes(
        self, loaded: Loaded, which: int, feeds: Sequence[str], results: Mapping[str, str], inputs: int
    ) -> bool:
        """Fill in a method's words, once; returns whether its calls can be compiled.

        feeds : placeholders in argument order.
        results : results in the answer, with their names there.
        inputs : number of arguments in the first group, apart from the others (0: all are passed one by one).
        """
        if which not in self.feeds:
            self.feeds[which] = self._describe(loaded, self._method(which), CALLS[which], feeds, results)
            self._method(which)[J.N_INPUTS] = inputs
        return self.feeds[which] is not None

    def _describe(
        self, loaded: Loaded, words: np.ndarray, what: CallKind, feeds: Sequence[str], results: Mapping[str, str]
    ) -> list[int] | None:
        places = [self.numbers.get(name, -1) for name in feeds]
        paths = what.round(loaded)
        if (
            -1 in places or len(places) > J.MOST_ARGUMENTS or not 1 <= len(results) <= J.MOST_RESULTS
            or {*feeds} != {*loaded.feeds(what.path, what.phases)} or len(paths) > J.MOST_BEFORE + 1
        ):  # fmt: skip
            return None
        for k, (name, called) in enumerate(results.items()):
            facts, form = loaded.variables[name], loaded.forms[name]
            made = loaded.variables[facts["of"]]
            if (
                facts["symbol"] is None
                or name in loaded.own_types
                or made["path"] != what.path
                or made["phase"] not in what.phases
            ):
                return None
            if (what.named and facts["unreadable"]) or not (
                _by_samples(form) if what.kind == ARRAY else loaded.is_number(name)
            ):
                return None
            dims = np.array([0, *(size.b for size in form[1:])], np.int64)
            self._kept.append(dims)
            of_set = J.SUM if what.kind == J.MEAN and facts.get("over") == "sum" else what.kind
            kind = len(dims) if what.kind == ARRAY else of_set
            words[J.RESULTS_OF + k * J.RESULT_WORDS :][: J.RESULT_WORDS] = (
                loaded.symbol(name).offset, math.prod(dims[1:].tolist()), kind, dims.ctypes.data, self._name(called),
            )  # fmt: skip
        spans = [(*loaded.span(*path), loaded.brief(*path)) for path in paths]
        words[J.N_SPANS_OF], words[J.SPANS_OF :][: 3 * len(spans)] = len(spans), np.ravel(spans)
        words[[J.CHANGES, J.FORGETS]] = any(path in loaded.changes for path, _ in paths), what.forgets
        several = what.forgets and not any(loaded.variables[name].get("over") == "other" for name in results)
        words[J.MOST_SAMPLES] = 2**62 if several else loaded.program.batch_size  # several batches leave no results
        words[J.ARGUMENTS :][: len(places)] = places
        named = what.named or len(results) > 1
        words[[J.N_ARGUMENTS, J.N_ANSWERS, J.NAMED]] = len(places), len(results), named
        words[J.SET] = 1
        return places

    def of_stream(self, loaded: Loaded, path: str, results: Sequence[str]) -> np.ndarray | None:
        """The words of streams over a path, as of a method (None: its calls cannot be compiled)."""
        if path not in self._streams:
            what = CallKind(path, ("forward",), forgets=True, kind=ARRAY, named=False)
            words, feeds = np.zeros(J.METHOD_WORDS, np.int64), loaded.feeds(path, what.phases)
            fits = self._describe(loaded, words, what, feeds, dict.fromkeys(results, "")) is not None
            self._streams[path] = words if fits else None
        return self._streams[path]

    def has_rows(self, which: int, batch: int) -> bool:
        """Whether the rows for a method's calls on ``batch`` samples are cached."""
        return bool(self._rows_entry(which, batch)[0] == batch)

    def note_time(self, which: int, batch: int, seconds: float) -> None:
        """Record the time of such a call, if it is the shortest so far."""
        entry = self._rows_entry(which, batch)
        entry[2] = min(entry[2], max(int(1e9 * seconds), 1))

    def _rows_entry(self, which: int, batch: int) -> np.ndarray:
        place = J.KEPT_ROWS if batch == self.words[J.PLANNED] else batch % J.KEPT_ROWS
        return self._method(which)[J.ROWS_OF + 3 * place :][:3]

    def take_rows(self, loaded: Loaded, which: int, batch: int, seconds: float) -> None:
        """Cache the rows, and the time of such a call."""
        entry = self._rows_entry(which, batch)
        place = entry.ctypes.data
        rows, address = loaded.rows(batch)
        while self._rows.get(place) is not rows or entry[0] != batch:  # a finalizer may interrupt this and do the same
            entry[0] = 0  # before its rows may be freed
            self._rows[place] = rows
            entry[:] = batch, address, max(int(1e9 * seconds), 1)


class CallLog:
    """The words of a model's compiled methods: where the model is, and the effects of calls (`calcvm.vm.run.job`)."""

    __slots__ = ("_asked", "_seen", "_sheet", "_view", "words")

    def __init__(self, loaded: Loaded) -> None:
        if loaded.sheet is None:
            loaded.sheet = ProgramSheet(loaded)
        self._sheet: ProgramSheet = loaded.sheet
        self.words = np.zeros(J.CALL_WORDS, np.int64)
        self.words[J.SHEET] = self._sheet.words.ctypes.data
        self._view = self.words.data
        self._seen = self._asked = 0  # calls that Python has taken note of

    # ------------------------------------------------------------ effects of compiled calls
    def used(self) -> bool:
        """Whether compiled code has run since the last query."""
        before, self._asked = self._asked, self._view[J.SEQ]
        return before != self._asked

    def disarm(self) -> None:
        """Send all calls to Python."""
        self._view[J.ARMED] = 0

    def behind(self) -> bool:
        """Whether compiled code has run since Python looked.  Python has the model now, and may change its contents."""
        self._view[J.LOOKED_AT] = self._view[J.SEQ]
        return self._view[J.SEQ] != self._seen

    def look(self, record: Record) -> None:
        """Take note of the effects of compiled calls, as Python calls record theirs; the caller has the heap's lock."""
        if self.behind():
            self._catch_up(record)

    def _catch_up(self, record: Record) -> None:
        view, done = self._view, -1
        while done != view[J.SEQ]:  # repeated if another thread's call comes in between
            done, since = view[J.SEQ], self._seen
            record.changed |= view[J.CHANGED_AT] > since
            if view[J.DONE + 2 * J.STEP + 1] > since:
                record.open.discard(CALLS[J.STEP].path)
                record.graded.add(CALLS[J.STEP].path)
            if view[J.FORGOT_AT] > since:
                since = view[J.FORGOT_AT]
                record.forget()
            if record.loaded is not None:
                self._note(record, record.loaded, since)
        self._seen = done

    def _note(self, record: Record, loaded: Loaded, since: int) -> None:
        """Record contents of placeholders and results after calls later than ``since``: the last of each kind, in call order."""
        view = self._view
        last: list[tuple[int, str | CallKind]] = [(J.HOLDS + 2 * k, name) for name, k in self._sheet.numbers.items()]
        last += [(J.DONE + 2 * which, what) for which, what in CALLS.items() if not what.forgets]
        for at, what in sorted(last, key=lambda entry: view[entry[0] + 1]):
            batch, seq = view[at], view[at + 1]
            if seq <= since:
                continue
            if isinstance(what, str):
                record.unset(what)
                record.held[what] = batch
            else:
                for path, phases in what.round(loaded):
                    record.unmake(path, phases)
                    record.ran.update(dict.fromkeys(loaded.makes(path, phases), batch))
                    record.arena = path

    # ------------------------------------------------------------ input of compiled calls
    def arm(
        self, model: BaseModel, which: int, n: int, seconds: float, feeds: Sequence[str], results: Mapping[str, str],
        inputs: int = 0,
    ) -> None:  # fmt: skip
        """Let the next calls of a method on ``n`` samples run compiled; the last call, in this turn, took ``seconds``."""
        planned = model.program.batch_size
        for batch in {min(n, planned), n % planned or planned}:
            self._arm(model, which, batch, seconds / -(-n // planned), feeds, results, inputs)

    def _arm(
        self, model: BaseModel, which: int, batch: int, seconds: float, feeds: Sequence[str], results: Mapping[str, str],
        inputs: int,
    ) -> None:  # fmt: skip
        record, loaded, sheet, view = model.record, model.loaded, self._sheet, self._view
        if view[J.ARMED] and sheet.has_rows(which, batch):
            sheet.note_time(which, batch, seconds)
        else:
            if seconds > J.LONG_NS / 1e9:
                return
            with model.heap.still, _sheets:
                slot = record.ready
                if slot is None or not sheet.describes(
                    loaded, which, feeds, results, inputs
                ):  # another thread is about to take it
                    return
                sheet.take_rows(loaded, which, batch, seconds)
                self._admit(record, slot)
        if not CALLS[which].forgets:  # record Python's data as if a call that it knows had placed them
            self._seen = seq = view[J.SEQ] + 1
            view[J.SEQ] = seq
            for k in sheet.feeds[which] or ():
                view[J.HOLDS + 2 * k], view[J.HOLDS + 2 * k + 1] = batch, seq

    def _admit(self, record: Record, slot: Slot) -> None:
        """Let compiled calls use the model in its slot; the caller has the heap's lock."""
        words, locks = self.words, (record.turn.lock, record.training.lock)
        words[[J.PIECE, J.SLOT_JOB]] = slot.address, slot.job_address
        words[[J.CONTROL, J.RUN_ROWS]] = team.control(), address_of("run_rows")
        words[J.WORKERS] = record.workers if has_teams() else 1
        words[[J.TURN_OWNER, J.TRAINING_OWNER]] = [id(lock) + OWNER for lock in locks]
        words[J.ARMED] = 1

    def arm_stream(self, stream: Any, results: Sequence[str], seconds: float) -> np.ndarray | None:
        """The words with which a stream's next calls run compiled (None: they cannot); as `arm`."""
        model, record = stream.model, stream.record
        with model.heap.still, _sheets:
            slot, words = record.ready, self._sheet.of_stream(model.loaded, stream.path, results)
            if slot is None or words is None or seconds > J.LONG_NS / 1e9:
                return None
            words = np.array([*words, self.words.ctypes.data])
            words[J.ROWS_OF :][:2] = stream.batch, stream.rows[1]
            self._admit(record, slot)
            return words


def arm(
    model: BaseModel,
    which: int,
    n: int,
    start: float,
    feeds: Sequence[str],
    results: Mapping[str, str],
    inputs: int = 0,
    calls: int = 1,
) -> None:
    """Let a method's next calls be compiled if possible; called after ``calls`` in Python that began at ``start``, in their turn.

    n : samples of each.  feeds, results, inputs : as in `ProgramSheet.describes`.
    """
    if model.record.calls is not None:
        model.record.calls.arm(model, which, n, (perf_counter() - start) / calls, feeds, results, inputs)


def arm_stream(stream: Any, results: Sequence[str], start: float) -> None:
    """As `arm`, for the stream's next calls; called after one in Python."""
    if stream.record.calls is not None:
        words = stream.record.calls.arm_stream(stream, results, perf_counter() - start)
        if words is not None:
            stream._calcvm_words = words


def _by_samples(form: tuple[Any, ...]) -> bool:
    """Whether the batch is a shape's first size, and no other size depends on it."""
    return 1 <= len(form) <= J.MOST_RANK and (form[0].a, form[0].b) == (1, 0) and not any(s.a for s in form[1:])


# ---------------------------------------------------------------- the objects that compiled code reads
def _owner_at() -> int:
    """Offset of the owner's thread id in an RLock, in bytes; 0: not found."""
    lock, me = threading.RLock(), threading.get_ident()
    words = (ctypes.c_uint64 * (sys.getsizeof(lock) // 8)).from_address(id(lock))
    free = [*words]
    with lock:
        found = [k for k, word in enumerate(words) if word == me and free[k] == 0]
    return 8 * found[0] if len(found) == 1 and words[found[0]] == 0 else 0


OWNER = _owner_at()


def _arrays_are_known() -> bool:
    """Whether an array's fields have the offsets that compiled code assumes."""
    array = np.zeros((3, 5), np.int64)
    words = (ctypes.c_int64 * 9).from_address(id(array))
    halves = (ctypes.c_int32 * 18).from_address(id(array))
    known = words[1] == id(np.ndarray) and words[2] == array.ctypes.data and words[7] == id(np.dtype(np.int64))
    return (
        known and halves[6] == 2 and [*(ctypes.c_int64 * 2).from_address(words[4])] == [3, 5]
        and halves[16] & 0x501 == 0x501
    )  # fmt: skip


def _slots_are_known() -> bool:
    """Whether slots and a tuple's items have the offsets that compiled code assumes."""
    native, marks = HasFastMethods(), (np.zeros(1), np.zeros(1))
    native._calcvm_words, bound = marks[0], BoundStep(marks[0], marks)
    of_native = (ctypes.c_int64 * 3).from_address(id(native))
    of_bound = (ctypes.c_int64 * 4).from_address(id(bound))
    items = tuple.__basicsize__ // 8
    of_type = (ctypes.c_int64 * 5).from_address(id(tuple))
    of_tuple = (ctypes.c_int64 * (items + 2)).from_address(id(marks))
    return (
        of_native[2] == id(marks[0]) and [*of_bound[2:]] == [id(marks), id(marks[0])]
        and of_type[4] == tuple.__basicsize__ and of_tuple[2] == 2 and [*of_tuple[items:]] == [*map(id, marks)]
    )  # fmt: skip


def _new_array() -> int:
    """Address of NumPy's PyArray_Empty; 0: it does not exist."""
    try:
        from numpy._core import _multiarray_umath as multiarray  # type: ignore[attr-defined]
    except ImportError:  # before 2.0
        from numpy.core import _multiarray_umath as multiarray  # type: ignore[no-redef]
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    table = ctypes.cast(get(multiarray._ARRAY_API, None), ctypes.POINTER(ctypes.c_void_p))
    return int(table[ARRAY_EMPTY] or 0)


@cache
def possible() -> bool:
    """Whether this interpreter's objects have the layout that compiled code assumes, and it runs one thread at a time."""
    one_at_a_time = getattr(sys, "_is_gil_enabled", lambda: True)()
    known = (
        sys.implementation.name == "cpython" and OWNER and _arrays_are_known() and _slots_are_known() and _new_array()
    )
    return bool(one_at_a_time and known)


# ---------------------------------------------------------------- the methods themselves
class MethodDef(ctypes.Structure):
    """CPython's PyMethodDef."""

    _fields_ = [("name", ctypes.c_char_p), ("code", ctypes.c_void_p), ("flags", ctypes.c_int), ("doc", ctypes.c_char_p)]


_calls = 0  # number of calls in Python
_installed: set[type] = set()
_kept: list[MethodDef] = []  # these live as long as the process


@cache
def _codes() -> list[int]:
    """Addresses of the code of METHODS, STREAMS and a bound step, in this order, and of the variable for `method`'s."""
    return [entry("methods")(k) for k in range(len(METHODS | STREAMS) + 2)]


def _definition(name: str, code: int, doc: str) -> int:
    """Address of the definition of a method."""
    _kept.append(MethodDef(name.encode(), code, FASTCALL, doc.encode()))
    return ctypes.addressof(_kept[-1])


def install(cls: type) -> None:
    """Replace methods written in Python by native ones; the former are called ``_calcvm_step``, ... from then on.

    A derived class may still override methods; replacements that a user has assigned stay.
    """
    make = ctypes.pythonapi.PyDescr_NewMethod
    make.restype, make.argtypes = ctypes.py_object, [ctypes.py_object, ctypes.c_void_p]
    for (name, called), code in zip((METHODS | STREAMS).items(), _codes()):
        written: Any = vars(cls).get(name)
        made = getattr(written, "made", {})
        if "call" not in made or made["call"] is not written:  # already installed, or replaced by the user
            continue
        plain = [p.replace(annotation=p.empty) for p in inspect.signature(written).parameters.values()]
        signature = str(inspect.Signature(plain)).replace("(self", "($self")
        method = make(cls, _definition(name, code, f"{name}{signature}\n--\n\n{inspect.getdoc(written) or ''}"))
        setattr(cls, OWN + called, made["handed"])
        setattr(cls, name, method)
        made["code"] = method


def offer(model: Any) -> None:
    """Set up compiled methods for the next calls, if possible and worth it; called after a call in Python."""
    global _calls
    record = model.record
    if record.calls is None:
        _calls += 1
        if _calls < WORTH or not possible() or heaps_of(model.heap.device.name) != "cpu":
            return
        have(model)
        record.calls = CallLog(model.loaded)
    model._calcvm_words = record.calls.words


def prepare(model: Any) -> type:
    """Give a model's class functions that the interpreter calls directly; returns calcvm's class that has them."""
    cls = next(c for c in type(model).__mro__ if HasFastMethods in c.__bases__)
    if cls not in _installed and possible():
        install(cls)
        _installed.add(cls)
    return cls


def have(model: Any) -> type:
    """`prepare`, and switch these functions to compiled code; takes no lock, which a forked child would inherit."""
    cls = prepare(model)
    ctypes.c_int64.from_address(_codes()[-1]).value = address_of("method")
    return cls


def bound_step(model: Any, arguments: tuple[np.ndarray, ...]) -> Any:
    """A callable that runs a step on the current contents of arrays."""
    compiled = vars(have(model))["step"] if possible() else None
    if compiled is not type(model).step or isinstance(compiled, FunctionType) or "step" in vars(model):
        return BoundStep(model, arguments).step  # it cannot be compiled, or is overridden
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p]
    return make(_bound_definition(), BoundStep(model, arguments), None)


@cache
def _bound_definition() -> int:
    return _definition(
        "step", _codes()[-2], "step()\n--\n\nOne training step on the arrays it was bound to; returns its loss."
    )
