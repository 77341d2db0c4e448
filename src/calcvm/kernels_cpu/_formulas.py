"""Elementary functions as straight-line LLVM IR, written once for scalars and vectors of both dtypes.

A formula (`calcvm.formulas`) takes and returns `V`, a value under construction; that is how the CPU represents numbers.  `_math`
makes scalar functions and elementwise loops of formulas.  No formula branches or calls libm, so each costs the same for every
input and vectorises.  tests/test_math.py tests the stated bounds.  A formula that "flushes" gives zero if the result is below the
smallest normal number.

Sources: range reductions as in fdlibm (exp, log, log1p, tanh); the erf of large arguments as
1 - exp(-q(x)) after N. Juffa; polynomial coefficients other than fdlibm's are weighted minimax fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from calcvm.formulas.functions import FUNCTIONS
from calcvm.formulas.number import Number, leading, poly
from calcvm.kernels_cpu._common import FAST, I32, I64
from calcvm.kernels_cpu._vectors import phi

FLAGS = tuple(sorted(FAST))


class V(Number):
    """A float, or a vector of floats or of integers of the same width, in LLVM IR, with Python's operators."""

    __slots__ = ("b", "v")

    def __init__(self, b: ir.IRBuilder, v: Any):
        self.b, self.v = b, v

    @property
    def lanes(self) -> int:
        return self.v.type.count if isinstance(self.v.type, ir.VectorType) else 0

    @property
    def element(self) -> Any:
        return self.v.type.element if self.lanes else self.v.type

    @property
    def is_f64(self) -> bool:
        return self.element in (ir.DoubleType(), I64)

    def over(self, element: Any) -> Any:
        """The type of this shape with another element type."""
        return ir.VectorType(element, self.lanes) if self.lanes else element

    def const(self, c: Any) -> V:
        if isinstance(c, V):
            return c
        return V(self.b, ir.Constant(self.v.type, [c] * self.lanes if self.lanes else c))

    def pick(self, f32: Any, f64: Any) -> Any:
        return f64 if self.is_f64 else f32

    def _op(self, float_op: str, int_op: str, x: Any, y: Any) -> V:
        x, y = self.const(x).v, self.const(y).v
        if isinstance(self.element, ir.IntType):
            return V(self.b, getattr(self.b, int_op)(x, y))
        return V(self.b, getattr(self.b, float_op)(x, y, flags=FLAGS))

    def __add__(self, o: Any) -> V:
        return self._op("fadd", "add", self, o)

    def __sub__(self, o: Any) -> V:
        return self._op("fsub", "sub", self, o)

    def __rsub__(self, o: Any) -> V:
        return self._op("fsub", "sub", o, self)

    def __mul__(self, o: Any) -> V:
        return self._op("fmul", "mul", self, o)

    __radd__, __rmul__ = __add__, __mul__

    def __truediv__(self, o: Any) -> V:
        return self._op("fdiv", "sdiv", self, _divisor(o))

    def __rtruediv__(self, o: Any) -> V:
        return self._op("fdiv", "sdiv", o, _divisor(self))

    def __neg__(self) -> V:
        return V(self.b, self.b.fneg(self.v))

    def __and__(self, o: Any) -> V:
        return V(self.b, self.b.and_(self.v, self.const(o).v))

    def __or__(self, o: Any) -> V:
        return V(self.b, self.b.or_(self.v, self.const(o).v))

    def __xor__(self, o: Any) -> V:
        return V(self.b, self.b.xor(self.v, self.const(o).v))

    def __invert__(self) -> V:
        return V(self.b, self.b.not_(self.v))

    def __lshift__(self, n: int) -> V:
        return V(self.b, self.b.shl(self.v, self.const(n).v))

    def __rshift__(self, n: int) -> V:  # arithmetic
        return V(self.b, self.b.ashr(self.v, self.const(n).v))

    def shift_right(self, n: int) -> V:  # logical
        return V(self.b, self.b.lshr(self.v, self.const(n).v))

    def _compare(self, op: str, o: Any) -> Any:
        o = self.const(o).v
        if isinstance(self.element, ir.IntType):
            return V(self.b, self.b.icmp_signed(op, self.v, o))
        return V(self.b, self.b.fcmp_ordered(op, self.v, o))

    def __lt__(self, o: Any) -> Any:
        return self._compare("<", o)

    def __gt__(self, o: Any) -> Any:
        return self._compare(">", o)

    def __ge__(self, o: Any) -> Any:
        return self._compare(">=", o)

    def __le__(self, o: Any) -> Any:
        return self._compare("<=", o)

    def equals(self, o: Any) -> Any:
        return self._compare("==", o)

    def is_nan(self) -> V:
        return V(self.b, self.b.fcmp_unordered("uno", self.v, self.v))

    def where(self, condition: Any, other: Any) -> V:
        """This value if the condition (a comparison's result) holds, else ``other``."""
        x, y = self._whole(condition.v), self.const(other)._whole(condition.v)
        return V(self.b, self.b.select(condition.v, x, y))

    def _whole(self, condition: Any) -> Any:
        """The value, from memory loaded whole: a load masked by the condition would have to wait for it.

        relu's gradient of 16.8 million elements takes 3.3 ms on Zen 5 instead of 4.4.
        """
        loaded = {o for o in (self.v, *getattr(self.v, "operands", ())) if isinstance(o, ir.LoadInstr)}
        floats = isinstance(self.v.type, ir.VectorType) and not isinstance(self.v.type.element, ir.IntType)
        if floats and loaded - {*condition.operands}:
            return self.call("arithmetic.fence").v
        return self.v

    def select(self, condition: Any, x: Any, y: Any) -> V:
        return self.const(x).where(condition, y)

    def fma(self, y: Any, z: Any) -> V:
        return self.call("fmuladd", y, z)

    def rarely(self, condition: Any, usual: Sequence[V], make: Callable[[], Sequence[V]]) -> list[V]:
        b, before, mask = self.b, self.b.block, ir.IntType(max(condition.lanes, 1))
        with b.if_then(b.icmp_unsigned("!=", b.bitcast(condition.v, mask), mask(0)), likely=False):
            new = [x.where(condition, y).v for x, y in zip(make(), usual)]
            inside = b.block
        return [V(b, phi(b, y.v.type, (y.v, before), (x, inside))) for x, y in zip(new, usual)]

    def leading(self) -> V:
        return (self.bits() & -self.pick(1 << 12, 1 << 27)).as_float()

    def bits(self) -> V:
        return V(self.b, self.b.bitcast(self.v, self.over(I64 if self.is_f64 else I32)))

    def as_float(self) -> V:
        return V(self.b, self.b.bitcast(self.v, self.over(ir.DoubleType() if self.is_f64 else ir.FloatType())))

    def as_f64(self) -> V:
        if self.is_f64:
            return self
        return V(self.b, self.b.fpext(self.v, self.over(ir.DoubleType())))

    def rounded(self, like: V) -> V:
        """A float64 value converted to the type of ``like``."""
        return self if like.is_f64 else V(self.b, self.b.fptrunc(self.v, like.v.type))

    def call(self, name: str, *others: Any) -> V:
        """An LLVM intrinsic on values of this type."""
        t = self.v.type
        tag = (f"v{self.lanes}" if self.lanes else "") + ("f64" if self.is_f64 else "f32")
        fn = cgutils.get_or_insert_function(
            self.b.module, ir.FunctionType(t, [t] * (1 + len(others))), f"llvm.{name}.{tag}"
        )
        return V(self.b, self.b.call(fn, [self.v, *(self.const(o).v for o in others)]))


class Root(V):
    """A square root.  If LLVM recognized it, it would estimate a quotient by it, and make 1/sqrt(0) NaN."""

    __slots__ = ()


def _divisor(x: Any) -> Any:
    return x.call("arithmetic.fence") if isinstance(x, Root) else x


def fma(x: V, y: Any, z: Any) -> V:
    """x*y + z: one rounding if the target has FMA, two otherwise; never a library call."""
    return x.fma(y, z)


def _rounded_right(name: str) -> Callable[[V], V]:
    return lambda x: x.call(name)


fabs, sqrt, floor, ceil, rint = map(_rounded_right, ("fabs", "sqrt", "floor", "ceil", "rint"))


def clamp(x: V, lo: float, hi: float) -> V:
    """x in [lo, hi]; NaN stays."""
    x = x.const(hi).where(x > hi, x)
    return x.const(lo).where(x < lo, x)


def maximum(x: V, y: Any) -> V:
    """The larger of two; NaN if either is."""
    y = x.const(y)
    larger = x.where(x > y, y)
    return x.where(x.is_nan(), larger)


def minimum(x: V, y: Any) -> V:
    """The smaller of two; NaN if either is."""
    return -maximum(-x, -x.const(y))


# ---------------------------------------------------------------- exp and functions built on it
# e**r = 1 + r + r*r*Q(r) on |r| <= 0.3476
_Q32 = (0.4999999332, 0.1666651882, 0.0416684105, 0.008368932375, 0.001381405224)
_Q64 = (
    0.5000000000000011032, 0.1666666666666640831, 0.04166666666652632105, 0.008333333333496106673,
    0.001388888894473425713, 0.000198412695053645919, 2.48014918682093825e-5, 2.755758532734735362e-6,
    2.763071509454321259e-7, 2.500107209004033438e-8,
)  # fmt: skip
_LN2_HI = (0.693359375, 6.93147180369123816490e-01)
_LN2_LO = (-2.12194440054690583e-4, 1.90821492927058770002e-10)


def _reduce(x: V) -> tuple[V, V]:
    """(k, r): x = k*ln2 + r with |r| <= ln2/2 and k an integer; |x| below 1100 or NaN."""
    magic = x.pick(1.5 * 2**23, 1.5 * 2**52)  # adding it rounds to an integer, kept in the low bits
    t = fma(x, 1.4426950408889634, magic)
    n = t - magic
    r = fma(n, -x.pick(*_LN2_HI), x)
    r = fma(n, -x.pick(*_LN2_LO), r)
    return t.bits() - magic_bits(x, magic), r


def magic_bits(x: V, magic: float) -> V:
    return x.const(magic).bits()


def _power_of_two(k: V) -> V:
    """2**k for k within the normal exponents."""
    return ((k + k.pick(127, 1023)) << k.pick(23, 52)).as_float()


def exp(x: V) -> V:
    """e**x: <= 1 ulp; overflows to inf, underflows gradually, NaN stays."""
    k, r = _reduce(clamp(x, x.pick(-105.0, -760.0), x.pick(90.0, 711.0)))
    p = fma(r * r, poly(r, _Q32, _Q64), r) + 1
    half = k >> 1  # two factors, because k may exceed the exponent's range
    return p * _power_of_two(half) * _power_of_two(k - half)


def _exp_normal(x: V) -> V:
    """e**x if the result and its factors are normal numbers; NaN stays."""
    k, r = _reduce(x)
    return (fma(r * r, poly(r, _Q32, _Q64), r) + 1) * _power_of_two(k)


def expm1(x: V) -> V:
    """e**x - 1 without cancellation: <= 2 ulp; x itself if it is tiny, -0 too."""
    return x.where(fabs(x) < x.pick(2.0**-25, 2.0**-54), _expm1(x))


def _expm1(x: V) -> V:
    """The same, except for the sign of 0 and the last bit of denormals."""
    y = clamp(x, x.pick(-20.0, -40.0), x.pick(88.8, 709.9))  # the result overflows there; k - 1 does not
    k, r = _reduce(y)
    p = fma(r * r, poly(r, _Q32, _Q64), r)
    s = _power_of_two(k - 1)
    return 2 * fma(s, p, s - 0.5)


def tanh(x: V) -> V:
    """<= 3 ulp."""
    y = fabs(x)
    y = x.const(x.pick(20.0, 40.0)).where(y > x.pick(20.0, 40.0), y)
    e = _expm1(y + y)
    return (e / (e + 2)).call("copysign", x)


def logistic(x: V) -> V:
    """1 / (1 + e**-x): <= 3 ulp; flushes below -88.4 (float32) and -709.4 (float64), where 2**k is infinite."""
    return 1 / (_exp_normal(clamp(-x, x.pick(-87.0, -708.0), x.pick(89.0, 709.9))) + 1)


# ---------------------------------------------------------------- log and functions built on it
_L32 = (0.66666662693, 0.40000972152, 0.28498786688, 0.24279078841)
_L64 = (
    6.666666666666735130e-01, 3.999999999940941908e-01, 2.857142874366239149e-01, 2.222219843214978396e-01,
    1.818357216161805012e-01, 1.531383769920937332e-01, 1.479819860511658591e-01,
)  # fmt: skip


def _split(x: V) -> tuple[V, V]:
    """(k, m): x = 2**k * m, m in [sqrt(1/2), sqrt(2)), for positive normal x."""
    one, root, shift = x.pick((0x3F800000, 0x3F3504F3, 23), (0x3FF0000000000000, 0x3FE6A09E667F3BCD, 52))
    i = x.bits() + (one - root)
    k = (i >> shift) - x.pick(127, 1023)
    return k, ((i & ((1 << shift) - 1)) + root).as_float()


def _to_float(k: V, like: V) -> V:
    """A small integer as a float, by its bits, for machines that cannot convert vectors of 64-bit integers."""
    magic = like.pick(1.5 * 2**23, 1.5 * 2**52)
    return (k + magic_bits(like, magic)).as_float() - magic


def _log_1_plus(f: V, k: V, c: V | None) -> V:
    """k*ln2 + log(1 + f) + c."""
    s = f / (f + 2)
    z = s * s
    r = z * poly(z, _L32, _L64)
    h = 0.5 * (f * f)
    hi, lo = f.pick((6.9313812256e-01, 9.0580006145e-06), (_LN2_HI[1], _LN2_LO[1]))
    low = k * lo if c is None else fma(k, lo, c)
    return fma(k, hi, f - (h - fma(s, h + r, low)))


def log(x: V) -> V:
    """<= 1 ulp; log(0) = -inf, log(x < 0) = nan."""
    tiny = x < x.pick(2.0**-126, 2.0**-1022)
    k, m = _split((x * x.pick(2.0**25, 2.0**54)).where(tiny, x))
    n = _to_float(k, x)
    n = (n - x.pick(25.0, 54.0)).where(tiny, n)
    y = _log_1_plus(m - 1, n, None)
    y = y.where(x < float("inf"), x)  # inf and NaN stay
    y = x.const(float("nan")).where(x < 0, y)
    return x.const(float("-inf")).where(x.equals(0), y)


def log1p(x: V) -> V:
    """log(1 + x) without cancellation: <= 2 ulp; log1p(-0) = -0, log1p(-1) = -inf, below nan."""
    u = x + 1
    k, m = _split(u)
    n = _to_float(k, x)
    small = k.equals(0)
    c = (x - (u - 1)).where(u < 2, 1 - (u - x)) / u  # the rounding error of 1 + x
    y = _log_1_plus(x.where(small, m - 1), n, x.const(0.0).where(small, c))
    y = y.call("copysign", x).where(x < float("inf"), x)
    y = x.const(float("nan")).where(x < -1, y)
    return x.const(float("-inf")).where(x.equals(-1), y)


# ---------------------------------------------------------------- powers
# a polynomial in z = s*s on z <= 0.0295 for (3/2) * (log((1 + s) / (1 - s)) - 2*s - 2/3*s**3) / s**5
_L_POW = (
    0.59999999999999999725, 0.42857142857144052747, 0.33333333332481750932, 0.27272727503560079372, 0.23076892393476165226,
    0.20002209775958249908, 0.17559281279968190792, 0.17585533535473841002,
)  # fmt: skip
_LN2 = (0.6931471526622772, 2.7897668087737545e-08)  # ln 2 as a 25-bit number and the rest; below it 2/(3*ln 2)
_LOG2_E_BY_3 = (0.9617966711521149, 2.2773860736742555e-08)


def _log2(x: V) -> tuple[V, V]:
    """log2(x) as a sum of two numbers, the first of 26 bits, exact to 2**-65, for positive finite float64 x."""
    tiny = x < 2.0**-1022
    k, m = _split((x * 2.0**54).where(tiny, x))
    n = _to_float(k, x)
    n = (n - 54.0).where(tiny, n)
    f, g = m - 1, m + 1
    s = f / g
    s_hi, g_hi = leading(s), leading(g)
    s_lo = (f - s_hi * g_hi - s_hi * (m - (g_hi - 1))) / g
    z, z_hi = s * s, s_hi * s_hi
    rest = z * z * poly(z, _L_POW, _L_POW) + s_lo * (s_hi + s)
    t_hi = leading(3 + z_hi + rest)  # log(m) = 2/3 * s * t
    t_lo = rest - ((t_hi - 3) - z_hi)
    u, v = s_hi * t_hi, s_lo * t_hi + t_lo * s
    p_hi = leading(u + v)
    p_lo = v - (p_hi - u)
    u, v = p_hi * _LOG2_E_BY_3[0], p_hi * _LOG2_E_BY_3[1] + p_lo * sum(_LOG2_E_BY_3)
    hi = leading(u + v + n)
    return hi, v - ((hi - n) - u)


def power(x: V, p: V, low: V) -> V:
    """x**(p + low) for float64 x >= 0 or NaN, finite p, and ``low`` below p's last place: <= 1 ulp; as fdlibm's e_pow."""
    hi, lo = _log2(x)
    p_hi = leading(p)
    u, v = p_hi * hi, (p - p_hi + low) * hi + p * lo
    z = u + v
    inside = fabs(z) < 1100
    t = clamp(z, -1100.0, 1100.0) + 1.5 * 2**52
    a, v = (u - (t - 1.5 * 2**52)).where(inside, 0.0), v.where(inside, 0.0)
    r_hi = leading(a + v)
    u, v = r_hi * _LN2[0], r_hi * _LN2[1] + (v - (r_hi - a)) * sum(_LN2)
    r = u + v
    y = 1 + (u + fma(r * r, poly(r, _Q32, _Q64), v))
    k = t.bits() - magic_bits(t, 1.5 * 2**52)
    half = k >> 1
    y = y * _power_of_two(half) * _power_of_two(k - half)
    nothing, inf = x.const(0.0), x.const(float("inf"))
    y = nothing.where(p > 0, inf).where(x.equals(0), y)
    return y.where(x < inf, inf.where(p > 0, nothing).where(x.equals(inf), x))


# ---------------------------------------------------------------- erf
_S32 = (1.128379166, -0.3761262581, 0.1128358496, -0.02685380393, 0.005188312482, -0.0008010060114, 7.853420647e-5)
_S64 = (
    1.128379167095512566, -0.3761263890318351931, 0.1128379167094417571, -0.02686617064311008556,
    0.005223977606107581096, -0.0008548325928812437367, 0.000120552935624503225, -1.492471203455371148e-5,
    1.644712838788613356e-6, -1.620629020993402009e-7, 1.371088188355625603e-8, -7.779290405657261144e-10,
)  # fmt: skip
_B32 = (
    5.36494126, 4.418160786, 0.923750984, 0.01646580024, -0.003570547004, 0.0007302113192, -0.0001376756101,
    2.17141936e-5,
)  # fmt: skip
_B64 = (
    5.364941264616636182, 4.418160805994414474, 0.9237508418239497722, 0.01646511813736316432, -0.003570756347970252907,
    0.0007323993780877820959, -0.000135309329772351949, 2.07064706594091113e-5, -1.952189717961226196e-6,
    -2.037280775470416597e-7, 1.731757407261310702e-7, -5.769488695964452963e-8, 1.39867697084735676e-8,
    -2.61023534139426247e-9, 2.583183947253903363e-10, 7.154669477407403264e-11, -3.690822286743357591e-11,
    4.926032195256696366e-12,
)  # fmt: skip


def erf(x: V) -> V:
    """<= 2.5 ulp."""
    y = fabs(x)
    near = y * poly(y * y, _S32, _S64)  # |x| < 1: odd polynomial
    t = y.const(y.pick(4.0, 6.0)).where(y > y.pick(4.0, 6.0), y) - 2
    far = 1 - _exp_normal(-poly(t, _B32, _B64))  # the exponent is in [-39, 0]
    return near.where(y < 1, far).call("copysign", x)


# normal_cdf(-t) = e**(-t*t/2) * P(1 / (1 + 0.3*t)) for t >= 0; P is a minimax fit, relative error 6e-8 for float32
_N32 = (
    7.16885552e-06, 0.119487688, 0.12192034, 0.0946835354, 0.142535493, -0.076506421, 0.228660032, -0.169166088,
    0.0383782834,
)  # fmt: skip


def normal_cdf(x: V) -> V:
    """Error in float32: relative, 5 eps above -2 and (2 + x*x/4) eps below; in float64: absolute, 2 eps."""
    if x.is_f64:
        return FUNCTIONS["normal_cdf"].value(x)
    below = exp(-0.5 * x * x) * poly(1 / fma(fabs(x), 0.3, 1.0), _N32, _N32)
    return (1 - below).where(x > 0, below)


for _name in FUNCTIONS.keys() & globals().keys():
    setattr(V, _name, globals()[_name])
V.sqrt = lambda x: Root(x.b, sqrt(x).v)  # type: ignore[attr-defined]
