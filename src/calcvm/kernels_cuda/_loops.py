"""Loops of a block's threads over elements: flat, over lines, over up to six axes.

A loop is made of a formula over elements, as a text, because its reads come first and its writes after them: a
thread has several independent loads in flight, and a load at a place that is past the end is one of its first
place again, so that no branch stands between loads.  Neighbouring threads take neighbouring elements, or
neighbouring *quads*: four elements in 16-byte accesses, where all operands lie on 16-byte boundaries.  Nothing
but the order of the accesses depends on that: an element has the same bits either way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from calcvm.kernels_cuda._cuda import I64, at, compiled_by, device, ir, like, thread, threads, types  # noqa: F401  (loops' texts use them)


# ---------------------------------------------------------------- quads
def _quad(pointer: Any) -> Any:
    return ir.VectorType(ir.FloatType() if pointer.dtype == types.float32 else ir.DoubleType(), 4).as_pointer()


def _load4(tc, p):
    def build(ctx, b, sig, args):
        quad = b.load(b.bitcast(args[0], _quad(p)), align=16)
        return ctx.make_tuple(b, sig.return_type, [b.extract_element(quad, I64(k)) for k in range(4)])

    return types.UniTuple(p.dtype, 4)(p), build


@compiled_by(_load4)
def load4(p):
    """The four elements at a pointer, which lies on a 16-byte boundary."""
    assert aligned(p)
    return p[0], p[1], p[2], p[3]


def _store4(tc, p, x0, x1, x2, x3):
    def build(ctx, b, sig, args):
        place = b.bitcast(args[0], _quad(p))
        quad = ir.Constant(place.type.pointee, ir.Undefined)
        for k in range(4):
            quad = b.insert_element(quad, args[1 + k], I64(k))
        b.store(quad, place, align=16)
        return ctx.get_dummy_value()

    return types.void(p, *[p.dtype] * 4), build


@compiled_by(_store4)
def store4(p, x0, x1, x2, x3):
    """Set the four elements at a pointer, which lies on a 16-byte boundary."""
    assert aligned(p)
    p[0], p[1], p[2], p[3] = x0, x1, x2, x3


def _aligned(tc, p):
    def build(ctx, b, sig, args):
        return b.icmp_signed("==", b.and_(b.ptrtoint(args[0], I64), I64(15)), I64(0))

    return types.boolean(p), build


@compiled_by(_aligned)
def aligned(p):
    """Whether a pointer lies on a 16-byte boundary."""
    return p.ctypes.data % 16 == 0


@device
def spread4(p, step):
    """Four elements from a pointer on, or (``step`` 0) one of them four times."""
    if step == 0:
        return p[0], p[0], p[0], p[0]
    return load4(p)


# ---------------------------------------------------------------- places
@device
def split(k, n):
    """k // n and k % n for 0 <= k < 2**31 - 1 and n > 0, by a division of 32 bits."""
    small = np.uint32(min(n, 0x7FFFFFFF))
    q = np.int64(np.uint32(k) // small)
    return q, k - q * n


@device
def digits(k, d):
    """The indexes (i0, ..., i5) of element k < 2**31 - 1 of an array of inner sizes ``d``, none of them 0."""
    k, i5 = split(k, d[4])
    k, i4 = split(k, d[3])
    k, i3 = split(k, d[2])
    k, i2 = split(k, d[1])
    i0, i1 = split(k, d[0])
    return i0, i1, i2, i3, i4, i5


@device
def carry(i, d):
    """A digit below 2*d as one below d, and what it carries."""
    if i >= d:
        return i - d, 1
    return i, 0


@device
def onward(i, step, d):
    """Indexes ``step`` further in an array of inner sizes ``d``."""
    i5, c = carry(i[5] + step[5], d[4])
    i4, c = carry(i[4] + step[4] + c, d[3])
    i3, c = carry(i[3] + step[3] + c, d[2])
    i2, c = carry(i[2] + step[2] + c, d[1])
    i1, c = carry(i[1] + step[1] + c, d[0])
    return i[0] + step[0] + c, i1, i2, i3, i4, i5


@device
def offset(i, s):
    return i[0] * s[0] + i[1] * s[1] + i[2] * s[2] + i[3] * s[3] + i[4] * s[4] + i[5] * s[5]


# ---------------------------------------------------------------- texts
def _define(text: str, formula: Callable) -> Any:
    scope = {**globals(), "f": device(formula)}
    exec(text, scope)
    return device(scope["each"])


def _turns(ways: int, more: str, places: Mapping[str, str], go_on: str, read: str, write: str, level: int) -> str:
    """``while more``: read at ``ways`` places, then write.  A variable ``v_`` is one for each place."""
    lines = [f"while {more}:"]
    for k in range(ways):
        lines += [f"    more_{k} = {more}"] if k else []
        past = f" if more_{k} else {{}}0" if k else ""
        lines += [f"    {v}{k} = {place}{past.format(v)}" for v, place in places.items()]
        lines += [f"    {line}" for line in f"{read}\n{go_on}".replace("_#", f"_{k}").splitlines()]
    for k in range(ways):
        lines += [f"    if more_{k}:"] if k else []
        lines.append(("        " if k else "    ") + write.replace("_#", f"_{k}"))
    return ("\n" + "    " * level).join(lines)


def _names(letter: str, n: int) -> list[str]:
    return [f"{letter}{k}" for k in range(n)]


def _four(x: str) -> str:
    """The variables of a quad of ``x``."""
    return ", ".join(f"{x}_{j}_#" for j in range(4))


FLAT = """\
def each(start, stop, {arguments}):
    head, tail = (start + 3) & -4, stop & -4
    if head >= tail or not ({aligned}):
        head = tail = stop
    i, step = head + 4 * thread(), 4 * threads()
    {quads}
    k, n = threads() - 1 - thread(), stop - start - (tail - head)
    while k < n:  # by the last threads, which the quads of a small array leave idle
        i = start + k if start + k < head else start + k + tail - head
        y[i] = {one}
        k += threads()
"""


def elementwise(formula: Callable, reads: int, params: int = 0, indexed: bool = False, ways: int = 2) -> Any:
    """A loop ``each(start, stop, reads..., y, params...)``: y[i] = formula(reads[i]..., params...), i from start to stop.

    y may be one of the arrays.  indexed : the formula gets i before the params.  ways : quads that a thread reads
    at once: 2, or 1 for a long formula, whose text each repeats, or 0: no quads.
    """
    names, over = _names("x", reads), _names("p", params)

    def result(elements: Sequence[str], i: str) -> str:
        return f"f({', '.join([*elements, *[i] * indexed, *over])})"

    read = "\n".join(f"{_four(x)} = load4(at({x}, i_#))" for x in names)
    quad = ", ".join(result([f"{x}_{j}_#" for x in names], f"i_# + {j}") for j in range(4))
    quads = _turns(ways, "i < tail", {"i_": "i"}, "i += step", read, f"store4(at(y, i_#), {quad})", 1)
    text = FLAT.format(
        arguments=", ".join([*names, "y", *over]),
        aligned=" and ".join(f"aligned({p})" for p in [*names, "y"]) if ways else "False",
        quads=quads if ways else "",
        one=result([f"{x}[i]" for x in names], "i"),
    )
    return _define(text, formula)


LINES = """\
def each(lines, n, {arguments}y, y_stride):
    if lines <= 0 or n <= 0:
        return
    if (n | y_stride) & 3 == 0 and aligned(y){aligned}:
        quads = n >> 2
        (l, j), (dl, dj) = split(thread(), quads), split(threads(), quads)
        {by_quads}
        return
    (l, j), (dl, dj) = split(thread(), n), split(threads(), n)
    {by_ones}
"""


def linewise(formula: Callable, reads: int) -> Any:
    """A loop ``each(lines, n, (x, x_stride, x_step)..., y, y_stride)`` over elements j of n in lines l.

    y[l*y_stride + j] = formula(x[l*x_stride + j*x_step]...); steps are 1, or 0 for one element a line.  y may be an
    operand of its strides.
    """
    names = _names("x", reads)

    def by(ways: int, width: int, read: str, write: str, size: str, level: int) -> str:
        places = {f"{x}_at_": f"l * {x}_stride + {width} * j * {x}_step" for x in names}
        places["y_at_"] = f"l * y_stride + {width} * j"
        return _turns(ways, "l < lines", places, f"j, c = carry(j + dj, {size})\nl += dl + c", read, write, level)

    four = "\n".join(f"{_four(x)} = spread4(at({x}, {x}_at_#), {x}_step)" for x in names)
    one = "\n".join(f"{x}_# = {x}[{x}_at_#]" for x in names)
    results = ", ".join(f"f({', '.join(f'{x}_{j}_#' for x in names)})" for j in range(4))
    text = LINES.format(
        arguments="".join(f"{x}, {x}_stride, {x}_step, " for x in names),
        aligned="".join(f" and ({x}_step == 0 or {x}_stride & 3 == 0 and aligned({x}))" for x in names),
        by_quads=by(2, 4, four, f"store4(at(y, y_at_#), {results})", "quads", 2),
        by_ones=by(4, 1, one, f"y[y_at_#] = f({', '.join(f'{x}_#' for x in names)})", "n", 1),
    )
    return _define(text, formula)


AXES = """\
def each(n0, d, {arguments}):
    stop = n0 * d[0] * d[1] * d[2] * d[3] * d[4]
    if stop <= 0:
        return
    k, i, step = thread(), digits(thread(), d), digits(threads(), d)
    {loop}
"""


def axiswise(formula: Callable, operands: str) -> Any:
    """A loop ``each(n0, d, operands...)`` over an array (n0, *d) of six axes: the last operand = formula(the others).

    operands : a letter each: ``d`` dense, ``s`` strided, its argument followed by a tuple of six strides.  The last
    one may be an operand of its strides.  An element costs additions for six axes: `linewise` is for one or two.
    """
    names = _names("x", len(operands))
    strided = [kind == "s" for kind in operands]
    places = {f"{x}_at_": f"offset(i, {x}_s)" if s else "k" for x, s in zip(names, strided)}
    *reads, y = [f"{x}[{x}_at_#]" for x in names]
    text = AXES.format(
        arguments=", ".join(f"{x}, {x}_s" if s else x for x, s in zip(names, strided)),
        loop=_turns(
            4, "k < stop", places, "k, i = k + threads(), onward(i, step, d)",
            "\n".join(f"{x}_# = {place}" for x, place in zip(names, reads)),
            f"{y} = f({', '.join(f'{x}_#' for x in names[:-1])})", 1,
        ),
    )  # fmt: skip
    return _define(text, formula)


fill = elementwise(lambda value: value, 0, 1)  # fill(start, stop, y, value)
copy_lines = linewise(lambda x: x, 1)  # copy_lines(lines, n, x, x_stride, x_step, y, y_stride)
gather = axiswise(lambda x: x, "sd")  # gather(n0, d, x, strides, y)
scatter = axiswise(lambda x: x, "ds")  # scatter(n0, d, x, y, strides)
