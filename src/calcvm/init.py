"""Initializers: ``init(shape, rng)`` returns the initial values of a parameter, in float64.

A user's function gets the shape that users see.  Built-in initializers get weights as stored, (inputs, outputs):
a weight of shape ``(*receptive field, n_in, n_out)`` has a fan-in of ``n_in`` and a fan-out of ``n_out``, each times the
size of the receptive field.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import fields
from itertools import count
from types import FunctionType
from typing import Any, ClassVar

import numpy as np

from calcvm import checks, hints
from calcvm.errors import CalcError, ShapeError
from calcvm.frozen import frozen

Shape = tuple[int, ...]
BLOCK = 1 << 16  # most values drawn at once


def fans(shape: Shape) -> tuple[int, int]:
    """Fan-in and fan-out of a weight; both are n for a vector of n."""
    if len(shape) < 2:
        n = math.prod(shape)
        return n, n
    field = math.prod(shape[:-2])
    return shape[-2] * field, shape[-1] * field


@frozen
class Initializer:
    """Base class: a callable from a shape and a random generator to values.

    as_seen : whether the shape is the one that users see, or the stored one: (*window, inputs, outputs).
    """

    as_seen: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for f in fields(self):
            value = checks.number(f"{type(self).__name__}: {f.name}", getattr(self, f.name), -1e300, 1e300)
            object.__setattr__(self, f.name, value + 0)  # NumPy treats -0.0 as negative

    def __call__(self, shape: Shape, rng: np.random.Generator) -> np.ndarray:
        draw = self._drawing(shape)
        assert draw is not None
        return draw(shape, rng)

    def _drawing(self, shape: Shape) -> Callable[[Shape, np.random.Generator], np.ndarray] | None:
        """A function that draws any number of values for this shape, or None if they are not drawn one after another."""
        return None

    def fill(self, out: np.ndarray, rng: np.random.Generator) -> None:
        """Fill an array in place.  Values drawn one after another need memory for one block only."""
        shape = out.shape
        draw = self._drawing(shape) or self.__call__
        n, axis = 1, len(shape)
        while axis and n * shape[axis - 1] <= BLOCK:
            axis -= 1
            n *= shape[axis]
        if axis == 0 or draw == self.__call__:
            out[...] = draw(shape, rng)
            return
        for index in np.ndindex(*shape[: axis - 1]):
            for i in range(0, shape[axis - 1], BLOCK // n):
                block = out[index][i : i + BLOCK // n]
                block[...] = draw(block.shape, rng)


@frozen
class Constant(Initializer):
    """Every element is ``value``."""

    value: float

    def _drawing(self, shape: Shape) -> Callable[[Shape, np.random.Generator], np.ndarray]:
        return lambda of, rng: np.full(of, float(self.value))


@frozen
class Zeros(Constant):
    """Every element is 0."""

    value: float = 0.0


@frozen
class Ones(Constant):
    """Every element is 1."""

    value: float = 1.0


@frozen
class Uniform(Initializer):
    """Uniform in [low, high)."""

    low: float = -0.05
    high: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.low <= self.high and math.isfinite(self.high - self.low)):
            raise CalcError(f"Uniform: low {self.low!r} must be at most high {self.high!r}, by a finite difference")

    def _drawing(self, shape: Shape) -> Callable[[Shape, np.random.Generator], np.ndarray]:
        return lambda of, rng: rng.uniform(self.low, self.high, of)


@frozen
class Normal(Initializer):
    """Normal of ``mean`` and standard deviation ``std``."""

    mean: float = 0.0
    std: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.std >= 0:
            raise CalcError(f"{type(self).__name__}: std must be >= 0, not {self.std!r}")

    def _drawing(self, shape: Shape) -> Callable[[Shape, np.random.Generator], np.ndarray] | None:
        return lambda of, rng: rng.normal(self.mean, self.std, of)


@frozen
class PaddedNormal(Normal):
    """As `Normal`, but row ``padding`` of the first axis is 0, as `nn.Embedding` starts its padding."""

    padding: int = 0

    def __post_init__(self) -> None:
        padding = checks.integer("PaddedNormal: padding", self.padding, 0)
        super().__post_init__()
        object.__setattr__(self, "padding", padding)

    def _drawing(self, shape: Shape) -> None:
        return None

    def __call__(self, shape: Shape, rng: np.random.Generator) -> np.ndarray:
        if not shape or self.padding >= shape[0]:
            raise CalcError(f"PaddedNormal: the shape {shape} has no row {self.padding}")
        x = np.asarray(rng.normal(self.mean, self.std, shape))
        x[self.padding] = 0
        return x


@frozen
class TruncatedNormal(Normal):
    """Normal of ``mean`` and ``std`` before truncation; values beyond two ``std`` are redrawn."""

    def _drawing(self, shape: Shape) -> None:
        return None

    def __call__(self, shape: Shape, rng: np.random.Generator) -> np.ndarray:
        x = np.asarray(rng.standard_normal(shape))
        while (far := np.abs(x) > 2).any():
            x[far] = rng.standard_normal(np.count_nonzero(far))
        return self.mean + self.std * x


@frozen
class _Scaled(Initializer):
    """Mean 0 and variance gain^2 / fan."""

    gain: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.gain >= 0:
            raise CalcError(f"{type(self).__name__}: gain must be >= 0, not {self.gain!r}")

    def _std(self, shape: Shape) -> float:
        raise NotImplementedError

    def _drawing(self, shape: Shape) -> Callable[[Shape, np.random.Generator], np.ndarray]:
        std = self._std(shape)
        return lambda of, rng: rng.normal(0, std, of)


@frozen
class XavierNormal(_Scaled):
    """Normal of variance ``gain^2 * 2 / (fan_in + fan_out)`` (Glorot and Bengio 2010)."""

    def _std(self, shape: Shape) -> float:
        return self.gain * math.sqrt(2 / max(1, sum(fans(shape))))


@frozen
class XavierUniform(XavierNormal):
    """Uniform of the same variance as `XavierNormal`."""

    def _drawing(self, shape: Shape) -> Callable[[Shape, np.random.Generator], np.ndarray]:
        bound = math.sqrt(3) * self._std(shape)
        return lambda of, rng: rng.uniform(-bound, bound, of)


@frozen
class HeNormal(_Scaled):
    """Normal of variance ``gain^2 / fan_in`` (He et al. 2015); the default gain, sqrt(2), suits ReLU."""

    gain: float = math.sqrt(2)

    def _std(self, shape: Shape) -> float:
        return self.gain / math.sqrt(max(1, fans(shape)[0]))


@frozen
class HeUniform(HeNormal):
    """Uniform of the same variance as `HeNormal`."""

    def _drawing(self, shape: Shape) -> Callable[[Shape, np.random.Generator], np.ndarray]:
        bound = math.sqrt(3) * self._std(shape)
        return lambda of, rng: rng.uniform(-bound, bound, of)


@frozen
class Orthogonal(Initializer):
    """``gain`` times a random matrix of orthonormal rows or columns (Saxe et al. 2014).

    The last axis of the shape is one side of the matrix; the other axes together are the other side.
    """

    gain: float = 1.0

    def __call__(self, shape: Shape, rng: np.random.Generator) -> np.ndarray:
        if len(shape) < 2:
            raise CalcError(f"Orthogonal: the shape {shape} has fewer than 2 axes")
        m, n = math.prod(shape[:-1]), shape[-1]
        q, r = np.linalg.qr(rng.standard_normal((max(m, n), min(m, n))))
        q *= np.where(np.diag(r) < 0, -1.0, 1.0)  # makes the distribution uniform
        return self.gain * (q if m >= n else q.T).reshape(shape)


# ---------------------------------------------------------------- custom functions
FUNCTIONS: dict[
    str, Callable[[Shape, np.random.Generator], Any]
] = {}  # functions given to graphs of this process, by name


@frozen
class Function(Initializer):
    """A user's function of (shape, rng).  A program stores its name only."""

    as_seen: ClassVar[bool] = True
    name: str

    def __post_init__(self) -> None:
        checks.text("Function: name", self.name, "module.function")

    def __call__(self, shape: Shape, rng: np.random.Generator) -> np.ndarray:
        if self.name not in FUNCTIONS:
            raise CalcError(
                f"a parameter is initialized by the function {self.name!r}, which this process does not know: files "
                "store its name only; register it with cv.init.function(...), or build the graph here"
            )
        given = FUNCTIONS[self.name](shape, rng)
        array = np.asarray(given)
        if array.dtype.kind not in "fiub" or array.shape != shape:
            raise ShapeError(
                f"initializer {self.name!r}: an array of numbers of shape {shape} is wanted, not {checks.shown(given)}"
            )
        return array.astype(np.float64)


def function(given: Callable[[Shape, np.random.Generator], Any]) -> Function:
    """Make an initializer of a plain function ``fn(shape, rng)``, which returns an array; ``rng`` follows from the model's seed.

    Programs and files store its name and a digest of its code, ``module.function-1a2b3c4d``.  A number is appended if
    another function has that name.
    """
    if not callable(given) or isinstance(given, type) or type(given) in KINDS:
        raise CalcError(f"cv.init.function: a function of (shape, rng) is wanted, not {checks.called(given)}")
    code = getattr(given, "__code__", None)
    made_of = code and (code.co_code, code.co_names, [c for c in code.co_consts if _is_plain(c)], _beside(given))
    stem = f"{getattr(given, '__module__', '')}.{getattr(given, '__qualname__', type(given).__qualname__)}"
    stem += f"-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:8]}"
    for k in count(1):
        name = stem if k == 1 else f"{stem}_{k}"
        if _alike(FUNCTIONS.setdefault(name, given), given):
            return Function(name)
    raise AssertionError


def _alike(a: Any, b: Any) -> bool:
    """Whether two functions do the same: they are identical, or have the same code, closure and defaults."""
    if a is b:
        return True
    if not (isinstance(a, FunctionType) and isinstance(b, FunctionType) and a.__code__ is b.__code__):
        return False
    beside = _beside(a)
    return beside is not None and beside == _beside(b)


def _beside(f: Any) -> str | None:
    """A function's closure and defaults as text; None if a value of them is mutable or unknown."""
    try:
        cells = tuple(cell.cell_contents for cell in f.__closure__ or ())
    except ValueError:  # a cell that is not set yet
        return None
    values = (cells, f.__defaults__, tuple((f.__kwdefaults__ or {}).items()))
    return repr(values) if _is_plain(values) else None


def _is_plain(value: Any) -> bool:
    """Whether a value is None, a number or text, or a tuple of such values."""
    return (
        value is None
        or type(value) in (bool, int, float, str, bytes)
        or (type(value) is tuple and all(map(_is_plain, value)))
    )


GlorotUniform, GlorotNormal = XavierUniform, XavierNormal
KaimingUniform, KaimingNormal = HeUniform, HeNormal

KINDS = (
    Zeros, Ones, Constant, Uniform, Normal, PaddedNormal, TruncatedNormal, XavierNormal, XavierUniform, HeNormal, HeUniform, Orthogonal,
    Function,
)  # fmt: skip
# "he_normal": HeNormal, "glorot_uniform": XavierUniform, ...; initializers that need a value have no name
NAMES = {
    "".join("_" + c.lower() if c.isupper() else c for c in name)[1:]: kind
    for name, kind in list(globals().items())
    if kind in KINDS and kind not in (Constant, Function)
}
__all__ = ["Initializer", "function", *(kind.__name__ for kind in KINDS)]
hints.hint(globals(), __all__[2:])


def initializer_of(what: str, given: Any, shape: Shape) -> Initializer | np.ndarray:
    """The initializer of a parameter of ``shape``, given as an initializer, its name or class, a function or an array.

    Raises
    ------
    CalcError : it is none of these.
    """
    if given is None:
        return XavierUniform() if len(shape) > 1 else Zeros()
    if isinstance(given, str):
        if given.lower() not in NAMES:
            raise CalcError(f"{what}: initializer {checks.shown(given)} is unknown; take one of {', '.join(NAMES)}")
        given = NAMES[given.lower()]
    if isinstance(given, type) and given in KINDS and given is not Function:
        if given is Constant:
            raise CalcError(f"{what}: Constant needs its value: init=cv.init.Constant(0.1)")
        given = given()  # type: ignore[call-arg]
    if type(given) in KINDS:
        if isinstance(given, Orthogonal) and len(shape) < 2:
            raise CalcError(f"{what}: Orthogonal: the shape {shape} has fewer than 2 axes")
        return given
    if callable(given) and not isinstance(given, type):
        return function(given)
    wanted = "an initializer such as cv.init.HeNormal(), its name, a function of (shape, rng), or an array"
    if not isinstance(given, (np.ndarray, list, tuple)):
        raise CalcError(f"{what}: {wanted} is wanted, not {checks.shown(given)}")
    try:
        array = np.asarray(given)
    except ValueError:
        raise CalcError(f"{what}: the rows of {checks.shown(given)} differ in length") from None
    if array.dtype.kind not in "fiub":
        raise CalcError(f"{what}: {wanted} is wanted, not an array of {array.dtype}")
    if array.shape != shape:
        raise ShapeError(f"{what}: initial array {array.shape} is not of its shape {shape}")
    return array
