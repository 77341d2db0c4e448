"""Unknown arguments and attributes are answered with what may have been meant, by every public callable."""

from __future__ import annotations

import copy
import inspect
import math
import operator
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import calcvm as cv
from calcvm import hints, nn, zoo
from calcvm.functions import __all__ as FUNCTIONS
from calcvm.images import __all__ as IMAGES

X = np.random.default_rng(0).standard_normal((24, 4)).astype("float32")
Y = np.arange(24) % 3


def model() -> cv.Model:
    return cv.Model(nn.Linear(3), input_shape=(4,), optimizer=cv.SGD(0.1), batch_size=24, workers=1)


def variable() -> cv.Variable:
    return cv.CalcGraph().placeholder("x", (None, 4))


def callables() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every public one that has parameters of its own names; of methods those of what is made."""
    made = [model(), cv.Fleet("1 MiB", workers=1), cv.CalcGraph(), cv.Ensemble([model()]), cv.CalcGraph().path("learn")]
    made += [made[1].results, made[0].plan, made[0].program, cv.History(), nn.Layer()]  # type: ignore[attr-defined]
    rooms = {
        cv: {*cv.__all__, *FUNCTIONS, "compile"},  # `from calcvm import *` leaves out what Python has too
        nn: nn.__all__, cv.init: [kind.__name__ for kind in cv.init.KINDS], zoo: zoo.__all__,
    }  # fmt: skip
    for room, names in rooms.items():
        for name in sorted(names):
            value = getattr(room, name)
            if callable(value) and not (isinstance(value, type) and issubclass(value, BaseException)):
                yield f"{room.__name__}.{name}", value
    for thing in made:
        for name in dir(type(thing)):
            of = inspect.getattr_static(thing, name)
            if not name.startswith("_") and inspect.isfunction(of) and of.__module__.startswith("calcvm"):
                yield f"{type(thing).__name__}.{name}", getattr(thing, name)


def parameters(function: Callable[..., Any]) -> list[str] | None:
    """Names of its parameters; None where it takes any, or is not calcvm's."""
    try:
        found = inspect.signature(function).parameters.values()
    except ValueError:
        return None
    if any(p.kind is p.VAR_KEYWORD for p in found):
        return None
    return [p.name for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


BASES = {"calcvm.Callback", "calcvm.nn.Layer"}  # which take nothing, by Python's own error


def test_every_public_callable_answers_for_a_name_that_it_has_not() -> None:
    n, raw, missed = 0, [], []
    for name, function in callables():
        known = parameters(function)
        if known is None or name in BASES:
            continue
        slips = [(p, p[:-2] + p[-1]) for p in known if len(p) > 5 and p[:-2] + p[-1] not in known]
        for meant, wrong in [("", "no_such_thing"), *slips]:
            n += 1
            try:
                function(**{wrong: 1})
            except hints.UnknownArgument as error:
                assert repr(wrong) in str(error)
                alike = [p for p, slip in slips if slip == wrong]  # of weight_ih and weight_hh both
                if meant and not any(p in str(error) for p in alike):
                    missed.append((name, meant, str(error)))
            except cv.CalcError as error:
                raw.append((name, wrong, str(error)))
            except TypeError as error:
                raw.append((name, wrong, str(error)))
    print(f"{n} calls of {len([*callables()])} callables")
    assert not raw, f"{len(raw)}: {raw[:10]}"
    assert not missed, missed[:10]
    assert n > 500


def test_the_tables_name_what_is_there() -> None:
    known = {p for _, function in callables() for p in parameters(function) or ()}
    assert {m for meant in hints.ARGUMENTS.values() for m in meant if " " not in m} <= known
    said = [
        *(m for meant in hints.ARGUMENTS.values() for m in meant),
        *(t for of in hints.NAMES.values() for t in of.values()),
    ]
    for text in said:
        for room, name in re.findall(r"\b(cv|nn)\.(\w+)", text):
            assert hasattr({"cv": cv, "nn": nn}[room], name), text
    for owner, thing in (("Model", model()), ("History", cv.History())):
        for name, text in hints.NAMES[owner].items():
            assert not hasattr(thing, name), name
            first = re.match(r"\w+", text)[0]
            assert first in ("cv", "what", "history") or hasattr(thing, first), text
    handle = cv.Fleet("1 MiB", workers=1).add(model(), data=(X, Y), name="net")
    for owner, thing in (("Handle", handle), ("Hyper", model().hyper), ("Ensemble", cv.Ensemble([model()]))):
        for name, text in hints.NAMES[owner].items():
            assert not hasattr(thing, name), name
            if text.startswith(("handle.", "model.")):
                eval(text, {"handle": handle, "model": model()})
    for name in hints.NAMES["calcvm.nn"]:
        assert not hasattr(nn, name) and not hasattr(cv, name)
    assert not any(hasattr(cv, name) for name in hints.NAMES["calcvm"])
    for name, text in hints.NAMES["Variable"].items():
        assert not hasattr(variable(), name), name
        assert "." in text or "model" in text or "x[" in text or hasattr(variable(), text), text
    assert not any(hasattr(room, name) for name in hints.NONE_YET for room in (cv, nn, variable()))


def test_a_sentence_is_said_of_the_callables_that_it_fits() -> None:
    """Not of others, which list what they take."""
    only: dict[str, str] = {
        "activation": r"nn\.(Linear|\w*Conv\w+)", "amsgrad": r"calcvm\.\w+", "betas": r"calcvm\.(Ada\w+|Lion)", "end_dim": r".*[Ff]latten",
        "in_channels": r"nn\.\w*Conv\w+", "in_features": r"nn\.Linear", "inplace": r"(nn|Layer)\.\w+", "num_features": r"nn\.\w*Norm\w*",
        "return_indices": r".*[Pp]ool\w*", "sample_weight": r"\w+\.evaluate", "steps": r"\w+\.(evaluate|predict\w*)",
        "target_shape": r"nn\.Reshape", "track_running_stats": r"nn\.BatchNorm", "validation_split": r"Model\.fit|calcvm\.explore",
    }  # fmt: skip
    found: dict[str, int] = dict.fromkeys(only, 0)
    for name, function in callables():
        for argument, fits in only.items():
            known = parameters(function)
            if known is None or argument in known or name in BASES:
                continue
            with pytest.raises(hints.UnknownArgument) as told:
                function(**{argument: 1})
            if any(said.rpartition("? ")[2] in str(told.value) for said in hints.ARGUMENTS[argument] if " " in said):
                assert re.fullmatch(fits, re.sub("^calcvm.nn", "nn", name)), (name, argument)
                found[argument] += 1
    assert all(found.values()), found


SAID: list[tuple[Callable[[], Any], str]] = [
    (lambda: model().fit(X, Y, validation_data=(X, Y)), r"Model.fit has no argument 'validation_data': did you mean validation=\?"),
    (lambda: model().fit(X, Y, validation_split=0.1), "validation=0.2 holds a share"),
    (lambda: model().fit(X, Y, verbose=0), r"did you mean progress=\?"),
    (lambda: model().fit(X, Y, batch_size=8), r"it is the model's: cv.Model\(..., batch_size=32\)"),
    (lambda: model().predict(X, batch_size=8), "Model.predict has no argument 'batch_size'"),
    (lambda: model().evaluate(X, Y, verbose=0), "leave it out"),
    (lambda: cv.Adam(lr=1e-3), r"Adam has no argument 'lr': did you mean learning_rate=\?"),
    (lambda: cv.Model(nn.Linear(3), input_shape=(4,), optimizer="adam", lr=0.1), "it is the optimizer's"),
    (lambda: cv.Model(nn.Linear(3), input_shape=(4,), optimiser="adam"), r"did you mean optimizer=\?"),
    (lambda: nn.Linear(8, activation="relu"), r"nn.Linear\(8\) >> nn.ReLU\(\)"),
    (lambda: nn.Conv2d(8, kernel_size=3), r"Conv2d has no argument 'kernel_size': did you mean kernel=\?"),
    (lambda: cv.EarlyStopping(monitor="val_loss"), r"did you mean figure=\?"),
    (lambda: cv.explore(verbose=2), r"explore has no argument 'verbose': did you mean progress=\?"),
    (lambda: cv.plan(None, num_threads=2), r"did you mean workers=\?"),
    (lambda: cv.sum(None, axes=1), r"sum has no argument 'axes': did you mean axis=\?"),
    (lambda: variable().sum(axes=1), r"sum has no argument 'axes': did you mean axis=\?"),
    (lambda: cv.max(None, dim=1), r"max has no argument 'dim': did you mean axis=\?"),
    (lambda: cv.transpose(None, axis=(1, 0)), r"transpose has no argument 'axis': did you mean axes=\?"),
    (lambda: cv.transpose(None, dims=(1, 0)), r"transpose has no argument 'dims': did you mean axes=\?"),
    (lambda: cv.layer_norm(None, axes=2), r"layer_norm has no argument 'axes': did you mean normalized_axes=\?"),
    (lambda: cv.rms_norm(None, axis=2), r"rms_norm has no argument 'axis': did you mean normalized_axes=\?"),
    (lambda: nn.LayerNorm(axes=2), r"LayerNorm has no argument 'axes': did you mean normalized_axes=\?"),
    (lambda: nn.RMSNorm(axes=2), r"RMSNorm has no argument 'axes': did you mean normalized_axes=\?"),
    (lambda: cv.split(None, indices_or_sections=2), r"split has no argument 'indices_or_sections': did you mean sections=\?"),
    (lambda: cv.stack(arrays=[]), r"stack has no argument 'arrays': did you mean variables=\?"),
]  # fmt: skip
NAMED: list[tuple[Callable[[], Any], str]] = [
    (lambda: nn.Dense, r"module 'calcvm.nn' has no 'Dense': did you mean nn.Linear\?"),
    (lambda: cv.Dense, "did you mean nn.Linear"),
    (lambda: cv.Conv2d, "did you mean nn.Conv2d"),
    (lambda: nn.relu, "did you mean nn.ReLU"),
    (lambda: cv.RMSprop, "did you mean cv.RMSProp"),
    (lambda: model().compile, r"a Model has no 'compile': did you mean cv.Model\("),
    (lambda: model().save_weights(), "did you mean save"),
    (lambda: model().lr, r'did you mean hyper\["learning_rate"\]'),
    (lambda: cv.History().history, r'did you mean history\["loss"\]'),
    (lambda: cv.History().epocs, "did you mean epochs"),
    (lambda: variable().shap, r"a Variable has no 'shap': did you mean shape\?"),
    (lambda: variable().permute, r"a Variable has no 'permute': did you mean transpose\?"),
    (lambda: variable().unsqueeze, r"did you mean cv.expand_dims\(x, axis\)\?"),
    (lambda: cv.unsqueeze, r"did you mean cv.expand_dims\?"),
    (lambda: cv.log10, r"module 'calcvm' has no 'log10': calcvm has none yet: declare it by its formulas"),
    (lambda: cv.arcsin, r"module 'calcvm' has no 'arcsin': did you mean cv.asin\?"),
]


@pytest.mark.parametrize(("call", "message"), SAID)
def test_arguments_of_others(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(cv.CalcError, match=message) as caught:
        call()
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize(("call", "message"), NAMED)
def test_names_of_others(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(cv.CalcError, match=message) as caught:
        call()
    assert isinstance(caught.value, AttributeError)


def test_compiled_methods_answer_too() -> None:
    m = model()
    for _ in range(50):
        m.step(X, Y)
        m.predict(X)
        m.evaluate(X, Y)
    for call in (lambda: m.step(X, Y, weights=1), lambda: m.predict(X, verbose=0), lambda: m.evaluate(X, Y, verbose=0)):
        with pytest.raises(hints.UnknownArgument):
            call()
    assert np.isfinite(m.step(X, Y))


def test_type_errors_of_the_users_own_stay_theirs() -> None:
    def callback(*_: Any) -> None:
        raise TypeError("f() got an unexpected keyword argument 'verbose'")

    with pytest.raises(TypeError, match="unexpected") as caught:
        model().fit(X, Y, callbacks=[callback], progress=False)
    assert not isinstance(caught.value, cv.CalcError)
    with pytest.raises(TypeError, match="positional"):
        model().fit(X, Y, 1, 2)


def test_what_asks_for_attributes_is_told_that_there_are_none() -> None:
    """Copies, pickles, notebooks and completion."""
    m = model()
    assert not {*hints.NAMES["Model"]} & {*dir(m)} and {"fit", "hyper"} < {*dir(m)}
    assert not hasattr(m, "lr") and getattr(cv, "Dense", None) is None
    for thing in (m, cv.History([{"loss": 1.0}]), nn.Linear(3), cv.Adam(1e-3)):
        assert type(copy.deepcopy(thing)) is type(pickle.loads(pickle.dumps(thing))) is type(thing)
        assert not hasattr(thing, "_ipython_display_")


def test_methods_are_found_the_fast_way() -> None:
    """A class with ``__getattr__`` costs each ``model.predict(x)`` 80 ns in Python 3.10 and 3.11."""
    assert not hasattr(cv.Model, "__getattr__")
    for name, meant in hints.NAMES["Model"].items():
        with pytest.raises(hints.UnknownName, match=re.escape(f"a Model has no '{name}': did you mean {meant}?")):
            getattr(model(), name)


def test_what_an_object_tells_of_itself_cannot_be_set() -> None:
    kinds = {
        c for module in (cv, nn) for c in vars(module).values() if isinstance(c, type) and issubclass(c, hints.Closed)
    }
    told = [
        (c, name)
        for c in kinds
        for name in dir(c)
        if isinstance(p := getattr(c, name, None), property) and p.fset is None
    ]
    assert len(told) > 50
    for kind, name in told:
        with pytest.raises(cv.CalcError, match=f"'{name}' of a {kind.__name__} .* cannot be set"):
            setattr(kind.__new__(kind), name, 1)


# ---------------------------------------------------------------- variables are no arrays
def test_a_variable_names_the_function_for_every_method_of_others() -> None:
    x = variable()
    names = [name for name in (*FUNCTIONS, *IMAGES) if not hasattr(cv.Variable, name)]
    for name in names:
        with pytest.raises(hints.UnknownName, match=rf"a Variable has no '{name}': did you mean cv.{name}\("):
            getattr(x, name)
    assert len(names) > 90 and "conv2d" in names
    for name in ("sum", "mean", "std", "transpose"):
        with pytest.raises(cv.CalcError, match=f"np.{name} takes arrays.* use x.{name}"):
            getattr(np, name)(x)


@pytest.mark.parametrize("name", hints.NONE_YET)
def test_what_calcvm_has_none_of(name: str) -> None:
    for room in (cv, nn, variable()):
        with pytest.raises(hints.UnknownName, match=f"has no '{name}': calcvm has none yet"):
            getattr(room, name)


def functions_of_arrays() -> list[tuple[str, Callable[..., Any], int]]:
    """Of NumPy the ufuncs, of Python those of numbers, and how many operands each takes."""
    ufuncs = {f: f.nin for f in vars(np).values() if isinstance(f, np.ufunc)}
    ofmath = {f: 1 for n, f in vars(math).items() if callable(f) and not n.startswith("_") and takes_one(f)}
    others = dict.fromkeys((float, int, complex, len, bool, round, range, list, np.asarray, np.sum, np.linalg.norm), 1)
    return [(f.__name__, f, n) for f, n in (ufuncs | ofmath | others).items()]


def takes_one(function: Callable[..., Any]) -> bool:
    try:
        function(0.5)
    except TypeError:
        return False
    except ValueError:  # outside of where it is defined
        pass
    return True


def test_functions_of_arrays_and_numbers_are_refused_in_words() -> None:
    """Or they are the operator that a variable has with an array: both in the same place of the graph."""
    n, built = 0, set()
    for name, function, operands in functions_of_arrays():
        for right in range(operands):
            g = cv.CalcGraph()
            x, a = g.placeholder("x", (4, 4)), np.ones((4, 4))
            with g.path("run"):
                try:
                    y = function(*(x if i == right else a for i in range(operands)))
                except cv.CalcError as error:
                    assert len(str(error)) > 40 or "number" in str(error), name
                else:
                    assert isinstance(y, cv.Variable), (name, y)
                    built.add(name)
            n += 1
    print(f"{n} calls, {len(built)} of them operators")
    assert n > 150
    assert built == {
        "add", "subtract", "multiply", "divide", "matmul", "remainder", "less", "less_equal", "greater", "greater_equal",
        "bitwise_and", "bitwise_or", "bitwise_xor",
    }  # fmt: skip


def test_operators_of_python_that_a_variable_has_not_are_refused_in_words() -> None:
    """Those of the numbers, and those that change a sequence."""
    x = variable()
    for name in ("floordiv", "ifloordiv"):
        with pytest.raises(cv.CalcError, match="variables have no //"):
            getattr(operator, name)(x, 2)
    for pair in ((x, 2), (2, x)):
        with pytest.raises(cv.CalcError, match="variables have no //"):
            divmod(*pair)
    with pytest.raises(cv.CalcError, match="has no numbers until the program runs"):
        format(x, ".3f")
    with pytest.raises(cv.CalcError, match="variables cannot be assigned to"):
        x[0] = 1.0
    assert +x is x and f"{x}" == str(x)


def test_a_variable_is_no_condition_unless_it_is_looked_up() -> None:
    g = cv.CalcGraph()
    x, w = g.placeholder("x", (None, 4)), g.parameter("w", (4,))
    with g.path("run"):
        for v in (x, x * w, cv.mean(x * w), x > 0):
            with pytest.raises(cv.CalcError, match=r"use cv.where\(condition, x, y\) for an if"):
                bool(v)
    assert (g.variables.get("w") or None) is w


def test_models_and_layers_are_no_functions() -> None:
    m = model()
    for given in ((X,), (X, Y), ()):
        with pytest.raises(cv.CalcError, match=r"model.predict\(X\)"):
            m(*given)
        with pytest.raises(cv.CalcError, match="Linear is not a function: layers are composed by >>"):
            nn.Linear(3)(*given)
    with pytest.raises(cv.CalcError, match="callbacks: a list of callbacks"):
        m.fit(X, Y, callbacks=[m], progress=False)
    with pytest.raises(cv.CalcError, match="metric .* is unknown"):
        cv.Model(nn.Linear(3), input_shape=(4,), optimizer="adam", metrics=[m])


@pytest.mark.parametrize("kind", [cv.EarlyStopping, cv.ReduceOnPlateau])
def test_a_figure_is_given_by_its_name(kind: type) -> None:
    with pytest.raises(cv.CalcError, match=rf"{kind.__name__}\(figure='val_loss'\)"):
        kind("val_loss")


# ---------------------------------------------------------------- functions of users
class Loss:
    def __call__(self, output: Any, target: Any) -> Any:
        return output.size() - target


ERRORS: list[Callable[..., Any]] = [
    lambda o, t: {}["key"], lambda o: cv.mean(o), lambda o, t: np.zeros(3)[9], lambda o, t: math.exp(o), Loss(),
    lambda o, t: o.median(), lambda o, t: cv.sum(o, axes=1) if o else t, lambda o, t: 1 / 0, lambda o, t: o.item(),
    lambda o, t: cv.sum(o, axes=1), lambda o, t: [*o], lambda o, t: np.exp(o),
]  # fmt: skip


@pytest.mark.parametrize("function", ERRORS)
def test_errors_of_users_functions_are_told_with_their_cause(function: Callable[..., Any]) -> None:
    def named(*given: Any) -> Any:
        return function(*given)

    for what, options in (
        ("loss", {"loss": named}), ("loss", {"loss": named, "sample_weight": True}), ("metric 'named'", {"metrics": [named]}),
        ("Function", {"preprocess": nn.Function(named, 1.0)}),
    ):  # fmt: skip
        with pytest.raises(cv.CalcError, match=f"^{what}.*: named\\(.*raised.*variables of a graph") as caught:
            cv.Model(nn.Linear(3), **{"input_shape": (4,), "optimizer": "adam", **options})
        assert caught.value.__cause__ is not None and type(caught.value) is cv.CalcError


def test_what_calcvm_says_of_shapes_in_a_users_loss_stays() -> None:
    with pytest.raises(cv.ShapeError, match="^matmul"):
        cv.Model(nn.Linear(3), input_shape=(4,), optimizer="adam", loss=lambda o, t: cv.mean(o @ np.ones((9, 9))))
