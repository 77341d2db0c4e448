"""A model for Python with NumPy alone, made by calcvm."""

import os

import numpy as np

try:
    from . import _code
except ImportError:  # a Python without this ABI
    _code = None

PACK = {"arrays": {}}  # the facts of the pack
TRAPPED = "{}: data that the model cannot use, such as a label that is no class (trap {}, row {})"
TOLERANCE = 1e-3  # of the self-test: of the largest element that is compared
if _code is not None:
    _code.prepare(np.ndarray, *[np.dtype(of["dtype"]) for of in PACK["arrays"].values()])


class Model:
    """A model with its own heap, which starts as it was exported, or as ``path`` has it.

    path : a file that `save` has written; if there is none yet, the model starts as it was exported.
    Its functions take arrays of one batch, and return a number or a new array.
    """

    def __init__(self, path=None):
        n, align = PACK["ram"], PACK["align"]
        memory = bytearray(n + align)
        whole = np.frombuffer(memory, np.uint8)
        start = -whole.__array_interface__["data"][0] % align
        self._heap = whole[start : start + n]
        views = {x: np.ndarray(of["shape"], of["dtype"], self._heap, of["at"]) for x, of in PACK["arrays"].items()}
        for number, (name, of) in enumerate(PACK["functions"].items()):
            if _code is None:
                function = _by_ctypes(name, of, views, self._heap)
            else:
                function = _code.bind(number, memory, _array, *[views[y].copy for y in of["gives"]])
            setattr(self, name, function)
        self.start()
        if path is not None and os.path.exists(os.fspath(path)):
            self._load(path)

    def __reduce__(self):
        """Copied and pickled as its state; the copy has its own heap."""
        return _of_state, (self.state,)

    def self_test(self):
        """Names of the functions that do not compute here what the PC has computed; the model stays as it is."""
        other, failed = Model(), []
        for name, outputs in PACK["self_test"].items():
            of = PACK["functions"][name]
            found = getattr(other, name)(*[_pattern(PACK["arrays"][x]) for x in of["takes"]])
            given = dict(zip(of["gives"], found if len(of["gives"]) > 1 else [found]))
            apart = {y: np.abs(np.ravel(given[y])[: len(wanted)] - wanted).max() for y, wanted in outputs.items()}
            if any(not apart[y] <= TOLERANCE * max(1e-6, *map(abs, wanted)) for y, wanted in outputs.items()):
                failed.append(name)
        return failed

    @property
    def state(self):
        """What lasts, as bytes: parameters, the optimizer's state, that of a stream.  Set it to go on from there."""
        at, n = PACK["state"]
        return self._heap[at : at + n].tobytes()

    @state.setter
    def state(self, data):
        at, n = PACK["state"]
        data = memoryview(data).cast("B")
        if len(data) != n:
            raise ValueError(f"a state has {n:,} bytes, not {len(data):,}")
        self._heap[at : at + n] = np.frombuffer(data, np.uint8)

    def save(self, path):
        """Write the state to a file.  Power may fail at any time: the file has the old state, or the new one."""
        new, page = f"{os.fspath(path)}.new", _page(self.state)
        try:
            with open(new, "wb") as file:
                file.write(page)
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, path)
        except OSError:
            if os.path.exists(new):
                os.remove(new)
            raise

    def _load(self, path):
        with open(path, "rb") as file:
            data = file.read()
        if data != _page(data[16:], data[4:8]):
            raise ValueError(
                f"{path} is no state of this model: it is damaged, or the code of another pack has written it"
            )
        self.state = data[16:]


def _pattern(of):
    """The data of the self-test: element k by a formula."""
    k, floats = np.arange(int(np.prod(of["shape"]))), of["dtype"].startswith("float")
    if of["classes"]:
        values = (k + 1) % of["classes"]
    else:
        values = (37 * k % 101).astype(of["dtype"])
        values = values / values.dtype.type(101) - values.dtype.type(0.5) if floats else values
    return values.astype(of["dtype"]).reshape(of["shape"])


def _of_state(state):
    model = Model()
    model.state = state
    return model


def _page(state, counter=b"\1\0\0\0"):
    """A state behind the program's mark, a counter, its bytes and a checksum: as packs for C have it, and as the PC reads it."""
    import zlib  # only where it is needed: a board has little memory

    head = int(PACK["program"][:8], 16).to_bytes(4, "little") + counter + len(state).to_bytes(4, "little")
    return head + zlib.crc32(head + state).to_bytes(4, "little") + state


def _array(number, value):
    """A value as an array of the type and shape that a function takes; ``number`` : among the pack's arrays."""
    name, of = list(PACK["arrays"].items())[number]
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ValueError(f"{name} is no array: {error}") from error
    shape = tuple(of["shape"])
    if array.shape not in ((shape, shape[1:]) if PACK["batch_size"] == 1 else (shape,)):
        raise ValueError(f"{name} has shape {array.shape}: {shape} is wanted")
    if array.dtype.kind not in "biuf":
        raise TypeError(f"{name} is of type {array.dtype}: numbers are wanted")
    made = np.ascontiguousarray(array.reshape(shape), of["dtype"])
    if made.dtype.kind != "f" and (made != array.reshape(shape)).any():
        raise ValueError(f"{name} has values that are none of {of['dtype']}")
    return made


def _by_ctypes(name, of, views, heap):
    """A function of the library, called from Python code."""
    import ctypes

    library = ctypes.PyDLL(os.path.join(os.path.dirname(__file__), "_code.abi3.so"))  # a heap serves one call at a time
    run, place = library[f"{PACK['name']}_{name}"], ctypes.c_void_p(heap.__array_interface__["data"][0])
    numbers = {x: k for k, x in enumerate(views)}
    takes = [(numbers[x], views[x], views[x].dtype, views[x].shape) for x in of["takes"]]
    gives = [views[y].copy if views[y].ndim else views[y].item for y in of["gives"]]

    def call(*given):
        if len(given) != len(takes):
            raise TypeError(f"{name} takes {len(takes)} arrays: {len(given)} are given")
        for value, (number, view, dtype, shape) in zip(given, takes):
            same = type(value) is np.ndarray and value.dtype is dtype and value.shape == shape
            view[...] = value if same else _array(number, value)
        trap = run(place)
        if trap:
            raise ValueError(TRAPPED.format(name, trap & 255, trap >> 8))
        return gives[0]() if len(gives) == 1 else tuple(y() for y in gives)

    return call
