"""Functions of one number that formulas may call, each declared once, for devices, listings, scripts and tests.

CONTRIBUTING.md has the recipe for a new one.  Sources: range reduction after Cody and Waite, and after Payne and Hanek;
coefficients are weighted minimax fits.

Over all finite float32 numbers sin is within 2.54 ulp, cos 2.40, tan 4.13, asin 2.37, acos 1.13, atan 1.64.  A million float32
sines take 0.21 ms on a core of Zen 5 below 2^14 (NumPy 0.38, PyTorch 0.97) and 3.5 ms above (8.8 and 5.4), where numbers are
multiplied by 2/pi to 192 places.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import field
from typing import Any

from calcvm.formulas.arithmetic import Number, equal, fma, leading, like, pick, poly, rarely, where
from calcvm.frozen import frozen


@frozen
class Function:
    """A function of one number; calling it with a number gives the function's value.

    value : the function as a formula, for numbers without a method of its name; None: all numbers have one.
    said : its form in listings; "": that of its value.  numpy : its form in NumPy or scripts, with `calcvm.script.helpers`.
    equation : its name in equations.  derivative : over x and y, its value, as written in equations; "": equations lack it.
    ulp : its largest error on a CPU, in units of the last place; None: stated by a separate test.
    libm : whether C, and so libdevice, has it under this name.  long : its code is so long that a GPU's loop contains it once.
    """

    name: str
    value: Callable[[Any], Any] | None = field(default=None, repr=False)
    said: str = ""
    numpy: str = ""
    equation: str = ""
    derivative: str = ""
    ulp: float | None = None
    libm: bool = True
    long: bool = False

    def __call__(self, x: Any) -> Any:
        return getattr(x, self.name)()


FUNCTIONS: dict[str, Function] = {}


def function(name: str, value: Callable[[Any], Any] | None = None, **how: Any) -> Function:
    """Declare a function."""
    how = {"said": f"{name}({{}})", "numpy": f"np.{name}({{}})", "equation": name} | how
    made = FUNCTIONS[name] = Function(name, value, **how)
    if value is not None:
        setattr(Number, name, value)
    return made


def valued(**how: Any) -> Callable[[Callable[[Any], Any]], Function]:
    """Decorator of a function's value; the function takes its name."""
    return lambda value: function(value.__name__, value, **how)


# ---------------------------------------------------------------- provided by every device
exp = function("exp", ulp=1, derivative="y")
expm1 = function("expm1", ulp=2, long=True, derivative="y + 1")
log = function("log", ulp=1, long=True, derivative="1/x")
log1p = function("log1p", ulp=2, long=True, derivative="1/(1 + x)")
tanh = function("tanh", ulp=3, derivative="1 - y^2")
erf = function("erf", numpy="erf({})", ulp=2.5, long=True, derivative="1.1283791670955126*exp(-x^2)")  # 2/sqrt(pi)
sqrt = function("sqrt", ulp=0.5, derivative="0.5/y")
fabs = function("fabs", said="|{}|", numpy="np.abs({})", ulp=0, equation="abs", derivative="sign(x)")
floor = function("floor", ulp=0, derivative="0")
ceil = function("ceil", ulp=0, derivative="0")
rint = function("rint", ulp=0, derivative="0")  # the nearest integer; halfway cases go to the even one


# ---------------------------------------------------------------- composed of others
@valued(said="", numpy="sigmoid({})", ulp=3, libm=False, equation="sigmoid", derivative="y*(1 - y)")
def logistic(x: Any) -> Any:
    return 1 / (1 + exp(-x))


@valued(numpy="np.logaddexp(0, {})", ulp=3, libm=False, long=True, derivative="sigmoid(x)")
def softplus(x: Any) -> Any:
    return where(x < 0, 0.0, x) + log1p(exp(-fabs(x)))


@valued(said="", numpy="normal_cdf({})", libm=False)
def normal_cdf(x: Any) -> Any:
    return 0.5 * (1 + erf(x * math.sqrt(0.5)))


@valued(ulp=0, libm=False, derivative="0")
def sign(x: Any) -> Any:
    """NaN gives 0, since no gradient passes there."""
    return where(x > 0, like(x, 1.0), where(x < 0, like(x, -1.0), 0.0))


# ---------------------------------------------------------------- angles
PI = 0xC90FDAA22168C234C4C6628B80DC1CD129024E088A67CC74020BBEA63B139B22  # * 2^-254
TWO_BY_PI = int(  # * 2^-1168
    "A2F9836E4E441529FC2757D1F534DDC0DB6295993C439041FE5163ABDEBBC561B7246E3A424DD2E006492EEA09D1921CFE1DEB1CB129A73E"
    "E88235F52EBB4484E99C7026B45F7E413991D639835339F49C845F8BBDF9283B1FF897FFDE05980FEF2F118B5A0A6D1F6D367ECF27CB09B7"
    "4F463F669E5FEA2D7527BAC7EBE5F17B3D0739F78A5292EA6BFB5FB11F8D5D085603",
    16,
)


def _half_pi(*bits: int) -> tuple[float, ...]:
    """Half of pi as a sum of floats with the given numbers of bits, the largest first."""
    out, left = [], PI
    for n in bits:
        drop = left.bit_length() - n
        out.append(math.ldexp(left >> drop, drop - 255))
        left &= (1 << drop) - 1
    return tuple(out)


_HALF_PI = _half_pi(24, 24), _half_pi(53, 53)
_SINE = (  # (sin(t)/t - 1)/z in z = t*t, on t <= pi/4
    (-0.1666665457, 0.00833215843, -0.0001951495872),
    (
        -0.1666666666666663052, 0.00833333333332206257, -0.0001984126982954278618, 2.755731360456558055e-6,
        -2.505074504191002227e-8, 1.589606767462493964e-10,
    ),
)  # fmt: skip
_COSINE = (  # (cos(t) - 1 + z/2)/z^2 in the same z
    (0.04166664562, -0.001388731314, 2.443279198e-5),
    (
        0.04166666666666659247, -0.001388888888887297572, 2.480158728879994686e-5, -2.755731416396382547e-7,
        2.087569870776958646e-9, -1.135842351327649915e-11,
    ),
)  # fmt: skip


def _quarters(x: Any) -> tuple[Any, Any]:
    """(q, r): x = q*pi/2 + r with |r| <= pi/4, q an integer; far from 0, q is reduced by multiples of 4."""
    parts = pick(x, _half_pi(10, 10, 10, 10, 24), _half_pi(33, 33, 33, 53))  # their products with q are exact
    q, r = rint(x * (2 / math.pi)), x
    for part in parts:
        r = fma(q, -part, r)
    return rarely(fabs(x) > pick(x, 2.0**14, 2.0**20), (q, r), lambda: _quarters_of_far(x))


def _quarters_of_far(x: Any) -> tuple[Any, Any]:
    """The same by x*2/pi: exact products with as many digits as the largest x needs, each reduced by multiples of 4."""
    bits, count, up = pick(x, (24, 8, 64), (52, 22, 512))
    high = middle = low = like(x, 0.0)
    for k in range(1, count + 1):
        digits = TWO_BY_PI >> (1168 - k * bits) & ((1 << bits) - 1)
        scale = up if k > count // 2 else 0  # digits this small would be subnormal
        c, c_low = (math.ldexp(n, scale - k * bits) for n in (digits, digits % (1 << bits // 2)))
        y, c_high = x * 2.0**-scale, c - c_low
        y_high = leading(y)
        y_low, product = y - y_high, y * c
        rest = y_high * c_high - product + y_high * c_low + y_low * c_high + y_low * c_low
        for term in (product, rest):
            high, error = _exact_sum(high, term - 4 * rint(0.25 * term))
            middle, error = _exact_sum(middle, error)
            low = low + error
    q = rint(high)
    high, error = _exact_sum(high - q, middle)
    whole, part = pick(x, *_HALF_PI)
    return q, fma(high, whole, fma(high, part, (error + low) * whole))


def _exact_sum(x: Any, y: Any) -> tuple[Any, Any]:
    """x + y and its rounding error; Knuth 1969."""
    total = x + y
    of_y = total - x
    return total, (x - (total - of_y)) + (y - of_y)


def _waves(r: Any) -> tuple[Any, Any]:
    """The sine and the cosine for |r| <= pi/4."""
    z = r * r
    return fma(r * z, poly(z, *_SINE), r), fma(z, fma(z, poly(z, *_COSINE), -0.5), 1.0)


def _even(q: Any) -> Any:
    """Whether an integer is a multiple of 2."""
    return equal(q, 2 * floor(0.5 * q))


def _sine(q: Any, r: Any) -> Any:
    """The sine of q*pi/2 + r."""
    y = where(_even(q), *_waves(r))
    return where(_even(floor(0.5 * q)), y, -y)


@valued(ulp=3, long=True, derivative="cos(x)")
def sin(x: Any) -> Any:
    return where(equal(x, 0), x, _sine(*_quarters(x)))


@valued(ulp=3, long=True, derivative="-sin(x)")
def cos(x: Any) -> Any:
    q, r = _quarters(x)
    return _sine(q + 1, r)


@valued(ulp=4.5, long=True, derivative="1 + y^2")
def tan(x: Any) -> Any:
    q, r = _quarters(x)
    even, (sine, cosine) = _even(q), _waves(r)
    return where(equal(x, 0), x, where(even, sine, -cosine) / where(even, cosine, sine))


_ASIN = (  # (asin(t)/t - 1)/z in z = t*t, on z <= 1/4
    (0.1666675247, 0.07495297856, 0.04547035353, 0.02417961103, 0.04216616457),
    (
        0.1666666666666540891, 0.07500000000337013371, 0.04464285682832939996, 0.03038195913694724996,
        0.02237175805020745919, 0.01735970477533634178, 0.01388523529085284399, 0.01216921301961514401,
        0.006527968605401358629, 0.01952828514349100252, -0.01622428671764546172, 0.03191229487805714775,
    ),
)  # fmt: skip
_ATAN = (  # (atan(t)/t - 1)/z in z = t*t, on z <= 1
    (
        -0.3333329909, 0.1999854825, -0.1426424121, 0.1095218299, -0.08403441572, 0.05795743593, -0.03117768265,
        0.01091451544, -0.001793601021,
    ),
    (
        -0.3333333333333185893, 0.1999999999975503586, -0.1428571427133559209, 0.1111111067876729958,
        -0.0909090123564486005, 0.076922129327692927, -0.06665860376861851201, 0.05877307832432458935,
        -0.05239233204093283427, 0.04673950111874560763, -0.04092639165210547502, 0.03406782422361172418,
        -0.02582681091222318782, 0.01697804705098098846, -0.00918456564087332553, 0.003855977445648749204,
        -0.00116407237946045581, 0.0002230224724431055045, -2.025855388585723119e-5,
    ),
)  # fmt: skip


def _of_half(x: Any, half: Any) -> Any:
    """asin(x) for |x| <= 1/2; otherwise (``half`` holds) asin(sqrt((1 - |x|)/2))."""
    a = fabs(x)
    z = where(half, fma(a, -0.5, 0.5), x * x)
    t = where(half, sqrt(z), x)
    return fma(t * z, poly(z, *_ASIN), t)


@valued(numpy="np.arcsin({})", ulp=2.5, long=True, derivative="1/sqrt(1 - x^2)")
def asin(x: Any) -> Any:
    half, (whole, part) = fabs(x) > 0.5, pick(x, *_HALF_PI)
    y = _of_half(x, half)
    far = whole - (2 * y - part)
    return where(half, where(x < 0, -far, far), where(equal(x, 0), x, y))


@valued(numpy="np.arccos({})", ulp=1.5, long=True, derivative="-1/sqrt(1 - x^2)")
def acos(x: Any) -> Any:
    half, (whole, part) = fabs(x) > 0.5, pick(x, *_HALF_PI)
    y = _of_half(x, half)
    rest = whole - (y - part)
    return where(half, 2 * where(x < 0, rest, y), rest)


@valued(numpy="np.arctan({})", ulp=2, long=True, derivative="1/(1 + x^2)")
def atan(x: Any) -> Any:
    a, (whole, part) = fabs(x), pick(x, *_HALF_PI)
    t = where(a > 1, like(x, -1.0), a) / where(a > 1, a, 1.0)
    z = t * t
    y = fma(t * z, poly(z, *_ATAN), t)
    y = where(a > 1, whole + (y + part), y)
    return where(equal(x, 0), x, where(x < 0, -y, y))


# ---------------------------------------------------------------- hyperbolic
@valued(ulp=3, long=True, derivative="cosh(x)")
def sinh(x: Any) -> Any:
    a = fabs(x)
    e = expm1(a)
    y = rarely(a > pick(x, 88.0, 709.0), (0.5 * (e + e / (e + 1)),), lambda: (_half_exp(a),))[0]
    return where(equal(x, 0), x, where(x < 0, -y, y))


@valued(ulp=3, long=True, derivative="sinh(x)")
def cosh(x: Any) -> Any:
    a = fabs(x)
    e = exp(a)
    return rarely(a > pick(x, 88.0, 709.0), (0.5 * e + 0.5 / e,), lambda: (_half_exp(a),))[0]


def _half_exp(x: Any) -> Any:
    """exp(x)/2 where exp(x) would overflow."""
    e = exp(0.5 * x)
    return 0.5 * e * e
