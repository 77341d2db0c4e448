"""What derived equations look like, and where gradients go wrong elsewhere: beyond the ends, at conditions, when derived twice."""

from __future__ import annotations

import doctest
from typing import Any

import numpy as np
import pytest

from calcvm.equations.check import check
from calcvm.equations.gradient import Gradient, gradient
from calcvm.equations.grammar import read
from calcvm.equations.kinds import INTEGER, NUMBER
from calcvm.equations.meaning import evaluate
from calcvm.equations.ranges import ranges
from calcvm.equations.scatter import scatter
from calcvm.equations.text import show, show_equation, show_equations
from calcvm.errors import CalcError
from calcvm.ops.dims import BATCH
from tests.equations.derive import Derived
from tests.equations.interpreter import interpret

RNG = np.random.default_rng(3)


def derive(
    text: str, shapes: dict[str, tuple], out: str = "y", wrt: list[str] | None = None, **options: Any
) -> Gradient:
    equations = read(text)
    found = ranges(equations, shapes, options.pop("parameters", {}))
    return gradient(equations, wrt or list(shapes), [out], found, **options)


# ---------------------------------------------------------------- texts
TEXTS = {
    "y[r,j] = exp(x[r,j] - logsumexp[k] x[r,k])": "t2[r] = sum[j] dy[r,j]*y[r,j]; dx[r,j] = y[r,j]*(dy[r,j] - t2[r])",
    "m[r] = max[k] x[r,k]; y[r,j] = exp(x[r,j] - m[r])/sum[k] exp(x[r,k] - m[r])": (
        "t2[r] = sum[j] dy[r,j]*y[r,j]; dx[r,j] = y[r,j]*(dy[r,j] - t2[r])"
    ),
    "y[r,i] = y[r,i - 1] + x[r,i]": "dx[r,i] = dy[r,i] + dx[r, i + 1]",
    "y[r,i] = x[r, I - 1 - i]": "dx[r,x1<5] = dy[r, 4 - x1]",
    "y[r] = x[r,2]": "dx[r,x1<5] = where(x1 == 2, dy[r], 0)",
    "y[r,o<2] = x[r, 2*o + 1]^2": "dx[r,x1] = 2*dy[r, (x1 - 1)/2]*x[r,x1]",
    "y[r] = sum[k] where(k == r, x[r,k], 0)": "dx[r,k<5] = where(k == r, dy[r], 0)",
    "y[r] = max[k] x[r,k]": "arg_y[r] = argmax[k] x[r,k]; dx[r,k<5] = where(k == arg_y[r], dy[r], 0)",
    "y[k] = var[r] x[r,k]": "t1[k] = mean[r] x[r,k]; dx[r,k] = 2*dy[k]*(x[r,k] - t1[k])/R",
    "y = mean[r,k] x[r,k]": "dx[r<4,k<5] = dy/(R*K)",
    "y[r] = prod[k] x[r,k]": "t1[k<5,r] = prod[k_] where(k_ == k, 1, x[r,k_]); dx[r,k] = dy[r]*t1[k,r]",
    "y[r,k] = stop(x[r,k])*x[r,k]": "dx[r,k] = dy[r,k]*stop(x[r,k])",
    "y[r,k] = relu(x[r,k]) + |x[r,k]|": "dx[r,k] = dy[r,k]*sign(x[r,k]) + where(x[r,k] > 0, dy[r,k], 0)",
    "y[r,k] = floor(x[r,k])": "dx[x0<4,x1<5] = 0",
    "y[r,k] = x[r,k] - x[r,k]": "dx[r<4,k<5] = 0",
}


@pytest.mark.parametrize("text", TEXTS)
def test_the_text_of_a_gradient(text: str) -> None:
    text_with_range = text.replace("y[r,i] = x[r, I", "y[r,i<5] = x[r, I")
    assert show_equations(derive(text_with_range, dict(x=(4, 5))).backward) == TEXTS[text]


def test_what_the_backward_reads_is_in_the_forward() -> None:
    made = derive("y[b,o] = tanh(sum[i] x[b,i]*w[i,o] + v[o])", dict(x=(4, 5), w=(5, 6), v=(6,)))
    assert show_equations(made.forward) == "t1[b,o] = sum[i] x[b,i]*w[i,o]; y[b,o] = tanh(t1[b,o] + v[o])"
    assert show_equations(made.backward) == (
        "dt1[b,o] = dy[b,o]*(1 - y[b,o]^2); dx[b,i] = sum[o] dt1[b,o]*w[i,o]; "
        "dw[i,o] = sum[b] dt1[b,o]*x[b,i]; dv[o] = sum[b] dt1[b,o]"
    )
    assert made.of == dict(x="dx", w="dw", v="dv") and made.seeds == dict(y="dy")
    assert made.equations == made.forward + made.backward
    linear = derive("y[b,o] = sum[i] x[b,i]*w[i,o]", dict(x=(4, 5), w=(5, 6)))
    assert linear.equations == linear.backward  # which reads operands and seeds alone


def test_results_may_be_what_a_gradient_is_by_and_several_have_seeds() -> None:
    text = "h[b] = sum[i] x[b,i]^2; y = sum[b] sin(h[b]); z[b] = h[b]*2"
    found = ranges(read(text), dict(x=(3, 2)), {})
    made = gradient(read(text), ["h", "x"], ["y", "z", "h"], found)
    assert made.seeds == dict(y="dy", z="dz", h="dh") and made.of == dict(h="dh_", x="dx")
    assert show_equations(made.backward) == "dh_[b] = dh[b] + 2*dz[b] + dy*cos(h[b]); dx[b,i] = 2*dh_[b]*x[b,i]"


def test_names_that_are_there_are_left_alone() -> None:
    made = derive("dy[b] = x[b]*t1; y[b] = dy[b] + logsumexp[k] z[b,k]*t1", dict(x=(3,), t1=(), z=(3, 2)))
    assert made.seeds == dict(y="dy_") and made.of == dict(x="dx", t1="dt1", z="dz")
    assert {e.name for e in made.forward} == {"dy", "t2", "y"}


# ---------------------------------------------------------------- order and forms
def test_sums_go_inwards_by_cost_before_equal_parts_are_found() -> None:
    """Of attention, ``sum[e,k] dy*w*exp(..)`` is ``sum[e] dy*y``: two factors, and not three."""
    text = "s[b,q,k] = sum[e] x[b,q,e]*z[b,k,e]; l[b,q] = logsumexp[k] s[b,q,k]; y[b,q,e] = sum[k] exp(s[b,q,k] - l[b,q])*w[b,k,e]"
    made = derive(text, dict(x=(2, 32, 16), z=(2, 32, 16), w=(2, 32, 16)))
    assert show_equations(made.backward[:3]) == (
        "t1[b,q] = sum[e] dy[b,q,e]*y[b,q,e]; t2[b,q,k] = sum[e] dy[b,q,e]*w[b,k,e]; "
        "ds[b,q,k] = exp(s[b,q,k] - l[b,q])*(t2[b,q,k] - t1[b,q])"
    )


def test_a_chain_of_products_is_summed_pair_by_pair() -> None:
    made = derive("y[a,d] = sum[b,c] x[a,b]*w[b,c]*z[c,d]", dict(x=(8, 64), w=(64, 64), z=(64, 8)), wrt=["w"])
    assert show_equations(made.backward) == "t1[a,c] = sum[d] dy[a,d]*z[c,d]; dw[b,c] = sum[a] x[a,b]*t1[a,c]"


SAME_BUT_FOR_EXTENTS = {
    "y = (sum[k<2] v[k]) + (sum[j<3] v[j])": (lambda v: v[:2].sum() + v[:3].sum(), [2, 2, 1, 0, 0]),
    "y = (sum[k] v[k]*R) + (sum[j] v[j]*S) + 0*(sum[r<2] v[r]) + 0*(sum[s<3] v[s])": (lambda v: 5 * v.sum(), [5] * 5),
    "e[i<2] = v[i]*v[i]; y = (sum[i] e[i]) + (sum[k] v[k]*v[k]*v[k])": (
        lambda v: (v[:2] ** 2).sum() + (v**3).sum(),
        lambda v: 3 * v**2 + [2 * v[0], 2 * v[1], 0, 0, 0],
    ),
    "y = sum[k<2] v[k]*v[k]*exp(v[k])": (
        lambda v: (v**2 * np.exp(v))[:2].sum(),
        lambda v: ((v**2 + 2 * v) * np.exp(v)) * [1, 1, 0, 0, 0],
    ),
}


@pytest.mark.parametrize("text", SAME_BUT_FOR_EXTENTS)
def test_what_is_equal_but_for_ranges_is_two_things(text: str) -> None:
    value, slope = SAME_BUT_FOR_EXTENTS[text]
    v = RNG.normal(size=5)
    made = Derived(text, dict(v=v), {}, ["v"])
    np.testing.assert_allclose(made.value(), value(v), rtol=1e-12)
    np.testing.assert_allclose(made.forward(), value(v), rtol=1e-12)
    want = slope(v) if callable(slope) else slope
    np.testing.assert_allclose(made.gradient(np.array(1.0))["v"], want, rtol=1e-12)


def test_a_label_that_is_no_integer_is_no_place() -> None:
    x, label = RNG.normal(size=(3, 4)), np.array([0.0, 2.0, 1.5])
    made = Derived("y[b] = sum[j] where(j == label[b], x[b,j], 0)", dict(x=x, label=label), {}, ["x"])
    made.derive_again("x", np.ones(3))
    np.testing.assert_array_equal(made.second_gradient(np.ones(3), x)["dy"], [x[0, 0], x[1, 2], 0])


def test_what_sums_to_one_is_known_in_gradients_alone() -> None:
    made = derive("l[r] = logsumexp[k] x[r,k]; y[r] = sum[k] exp(x[r,k] - l[r])", dict(x=(3, 4)))
    assert show_equations(made.forward) == "l[r] = logsumexp[k] x[r,k]; y[r] = sum[k] exp(x[r,k] - l[r])"
    assert show_equations(made.backward) == "dx[r<3,k<4] = 0"


def test_what_a_mean_is_taken_from_sums_to_zero() -> None:
    made = derive("m[r] = mean[n] x[r,n]; y[r] = mean[n] (x[r,n] - m[r])^2", dict(x=(4, 6)))
    assert show_equations(made.backward) == "dx[r,n] = 2*dy[r]*(x[r,n] - m[r])/N"


def test_a_variance_of_a_stopped_mean_has_the_gradient_and_another_second_derivative() -> None:
    text = "m[r] = mean[n] x[r,n]; y[r] = mean[n] (x[r,n] - {})^2"
    x, seed, along = RNG.normal(size=(4, 6)), RNG.normal(size=4), RNG.normal(size=(4, 6))
    first, second = [], []
    for mean in ("m[r]", "stop(m[r])"):
        made = Derived(text.format(mean), dict(x=x), {}, ["x"])
        first.append(made.gradient(seed)["x"])
        made.derive_again("x", seed)
        second.append(made.second_gradient(seed, along)["x"])
    np.testing.assert_allclose(*first, rtol=1e-12)
    means = along.mean(1, keepdims=True)
    np.testing.assert_allclose(second[0], 2 / 6 * seed[:, None] * (along - means), rtol=1e-12)
    np.testing.assert_allclose(second[1], 2 / 6 * seed[:, None] * along, rtol=1e-12)


# ---------------------------------------------------------------- zeros that may meet infinity
@pytest.mark.parametrize(
    "text", ["y[i] = where(x[i] > 0, log(x[i]), 0)", "l[i] = log(x[i]); y[i] = where(x[i] > 0, l[i], 0)"]
)
def test_conditions_stand_outside_what_they_guard(text: str) -> None:
    x, seed = np.array([0.0, 1.0, 2.0, -1.0]), np.array([3.0, 5.0, 7.0, 9.0])
    made = Derived(text, dict(x=x), {}, ["x"])
    np.testing.assert_array_equal(made.value(), [0, 0, np.log(2), 0])
    np.testing.assert_array_equal(made.gradient(seed)["x"], [0, 5, 3.5, 0])
    made.derive_again("x", seed)
    second = made.second_gradient(seed, np.ones(4))
    np.testing.assert_array_equal(second["x"], [0, -5, -7 / 4, 0])
    np.testing.assert_array_equal(second["dy"], [0, 1, 0.5, 0])


def test_a_zero_beyond_the_ends_meets_no_infinity() -> None:
    """``dy`` is 0 beyond the ends, and so is ``v``, which divides."""
    text, x, v = "y[o] = sum[t<3] x[o + t - 1]/v[o]", RNG.normal(size=5), np.array([2.0, 4.0, 8.0, 1.0, 0.5])
    made = Derived(text, dict(x=x, v=v), {}, ["x", "v"])
    seed = np.ones(5)
    want = [sum(1 / v[o] for o in range(5) if abs(i - o) <= 1) for i in range(5)]
    np.testing.assert_allclose(made.gradient(seed)["x"], want)
    plain = derive("y[o] = sum[t<3] x[o + t - 1]*v[o]", dict(x=(5,), v=(5,)), wrt=["x"])
    assert "where" not in show_equations(plain.backward)


def test_no_infinite_factor_leaves_a_sum_of_nothing() -> None:
    text = "y = sum[o,t] where(m[t] > o, x[o]*exp(z[t]), 0)"
    values = dict(x=np.ones(3), z=np.array([1.0, 1000.0]), m=np.array([2, 0]))
    made = Derived(text, values, {}, ["x", "z"])
    np.testing.assert_allclose(made.gradient(np.array(1.0))["z"], [2 * np.e, 0])


def test_a_power_of_zero() -> None:
    x, n = np.array([0.0, 0.0, 2.0]), np.array([0.0, 2.0, 3.0])
    made = Derived("y[i] = x[i]^n[i]", dict(x=x, n=n), {}, ["x", "n"])
    got = made.gradient(np.ones(3))
    np.testing.assert_allclose(got["x"], [0, 0, 12])
    np.testing.assert_allclose(got["n"], [0, 0, 8 * np.log(2)])


def test_the_first_of_equals_has_the_gradient() -> None:
    x = np.array([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]])
    made = Derived("y[r] = max[k] x[r,k] + max(x[r,1], x[r,2])", dict(x=x), {}, ["x"])
    np.testing.assert_array_equal(made.gradient(np.ones(2))["x"], [[0, 2, 0], [1, 1, 0]])


# ---------------------------------------------------------------- scatters
def test_a_gather_derives_to_a_scatter_and_that_to_a_gather() -> None:
    made = derive("y[r,c] = w[index[r], c]", dict(w=(5, 4), index=(3,)), wrt=["w"])
    (equation,) = made.backward
    assert show_equation(equation) == "dw[w0<5,c] = sum[r] where(w0 == index[r], dy[r,c], 0)"
    found = scatter(equation)
    assert found is not None and found.guard is None
    assert {k: show(place) for k, place in found.places.items()} == {"w0": "index[r]"}
    assert [i.name for i in found.over] == ["r"] and show(found.value) == "dy[r,c]"
    known = ranges(made.backward, dict(dy=(3, 4), index=(3,)), {})
    again = gradient(made.backward, ["dy"], ["dw"], known, integers=["index"])
    assert show_equations(again.backward) == "ddy[r,c] = ddw[index[r], c]"


@pytest.mark.parametrize(
    "text, is_one",
    [
        ("y[j,c] = sum[r] where(index[r] == j and c < 2, x[r,c], 0)", True),
        ("y[j] = sum[r] where(j == index[r], x[r,j], 0)", False),  # reads more for each j
        ("y[j] = sum[r] where(j == 3, x[r], 0)", False),
        ("y[j] = sum[r] where(j <= index[r], x[r], 0)", False),
        ("y[j] = mean[r] where(j == index[r], x[r], 0)", False),
        ("y[j] = sum[r] where(j == index[r], x[r], 1)", False),
    ],
)
def test_which_sums_are_scatters(text: str, is_one: bool) -> None:
    assert (scatter(read(text)[0]) is not None) == is_one


# ---------------------------------------------------------------- sizes of the batch
BATCHES = {
    "y = mean[b,o] (sum[i] x[b,i]*w[i,o] + v[o])^2": (dict(x=(BATCH, 4), w=(4, 3), v=(3,)), {}),
    "y[c] = sum[n] x[n,c]": (dict(x=(BATCH, 4)), {"N": BATCH}),
    "y[n,o,f] = sum[t,c] x[n, o*2 - 1 + t, c]*w[t,c,f]": (dict(x=(BATCH, 9, 4), w=(3, 4, 2)), {}),
    "y[n,c] = y[n - 1, c]*x[n,c] + x[n,c]": (dict(x=(BATCH, 4)), {}),
    "y[c] = var[n] x[n,c] + max[k] x[k,c]": (dict(x=(BATCH, 4)), {}),
}


@pytest.mark.parametrize("text", BATCHES)
@pytest.mark.parametrize("batch", [1, 3])
def test_a_gradient_for_any_batch(text: str, batch: int) -> None:
    shapes, sizes = BATCHES[text]
    made = derive(text, shapes)
    assert sizes.items() <= made.sizes.items()
    values = {k: RNG.normal(size=[n if isinstance(n, int) else n.at(batch) for n in s]) for k, s in shapes.items()}
    known = {name: n.at(batch) for name, n in made.sizes.items()}
    plain = Derived(text, values, {}, list(shapes))
    given = {**values, "dy": RNG.normal(size=plain.shape)}
    check(made.equations, dict.fromkeys(given, NUMBER), dict.fromkeys(known, INTEGER))
    got, want = evaluate(made.equations, given, known), plain.gradient(given["dy"])
    for k in shapes:
        np.testing.assert_allclose(got[made.of[k]], want[k], rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    "text, message",
    [
        (
            "y[i] = y[i] + x[i]",
            "y is used before: a gradient needs another name for the result\n    y[i] = y[i] + x[i]\n    ^",
        ),
        ("y[i] = x[i]; y[i] = x[i]*2", "y is used before"),
        ("z[i] = y[i]*x[i]; y[i] = z[i]", "y is used before"),
        ("y[i] = sum[d<2] tanh(y[i - 1] + d) + x[i]", "a scan in a reduction has no gradient: read y outside it"),
        ("y[i] = gelu(x[i])", "the function gelu has no derivative here\n    y[i] = gelu(x[i])\n           ^"),
    ],
)
def test_what_has_no_gradient_is_refused(text: str, message: str) -> None:
    shapes = dict(x=(3,), y=(3,)) if "y[i]" in text.partition("=")[2] else dict(x=(3,))
    with pytest.raises(CalcError) as error:
        derive(text, shapes, wrt=["x"])
    assert message in str(error.value)


@pytest.mark.parametrize(
    "wrt, out, message", [("z", "y", "no array 'z' to derive; there are x, y"), ("x", "x", "no result 'x' to derive")]
)
def test_a_name_of_no_array_is_refused(wrt: str, out: str, message: str) -> None:
    with pytest.raises(CalcError, match=message):
        derive("y[i] = x[i]^2", dict(x=(3,)), out=out, wrt=[wrt])


def test_the_example_of_the_docstring() -> None:
    from calcvm.equations import gradient as module

    assert doctest.testmod(module) == doctest.TestResults(failed=0, attempted=6)


# ---------------------------------------------------------------- the witness
@pytest.mark.parametrize(
    "text, extents, want",
    [
        ("y[i] = y[i - 1] + x[i]", dict(i=3), [1, 4, 6]),
        ("y[i] = y[i + 1; 10] - x[i]", dict(i=3), [4, 5, 8]),
        ("y[i<4] = x[(i + 1)/2; -1]", dict(i=4), [-1, 3, -1, 2]),
        ("y[i] = x[2 - i]*x[argmax[k] x[k]]", dict(i=3, k=3), [6, 9, 3]),
        ("y = var[i] x[i]", dict(i=3), 2 / 3),
        ("y = logsumexp[i] log(x[i])", dict(i=3), np.log(6)),
        ("y[i] = where(x[i] > 2 or i == 2 and not i == 0, 7 // 2, 2^-1)", dict(i=3), [0.5, 3, 3]),
    ],
)
def test_the_interpreter_on_what_is_known_by_hand(text: str, extents: dict[str, int], want: Any) -> None:
    got = interpret(read(text), dict(x=np.array([1.0, 3.0, 2.0])), extents, {})
    np.testing.assert_allclose(got["y"], want, rtol=1e-15)
