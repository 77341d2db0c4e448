"""Unknown arguments and attributes are answered with what may have been meant, by every public callable."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import calcvm as cv
from calcvm import hints, nn

X = np.random.default_rng(0).standard_normal((24, 4)).astype("float32")
Y = np.arange(24) % 3


def model() -> cv.Model:
    return cv.Model(nn.Linear(3), input_shape=(4,), optimizer=cv.SGD(0.1), batch_size=24, workers=1)


def callables() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every public one that has parameters of its own names; of methods those of what is made."""
    made = [model(), cv.Fleet("1 MiB", workers=1), cv.CalcGraph(), cv.Ensemble([model()]), cv.CalcGraph().path("learn")]
    for room in (cv, nn):
        for name in room.__all__:
            value = getattr(room, name)
            if callable(value) and not (isinstance(value, type) and issubclass(value, BaseException)):
                yield f"{room.__name__}.{name}", value
    for thing in made:
        for name in dir(type(thing)):
            if not name.startswith("_") and inspect.isfunction(inspect.getattr_static(thing, name)):
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
                if meant and meant not in str(error):
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
    for name in hints.NAMES["calcvm.nn"]:
        assert not hasattr(nn, name) and not hasattr(cv, name)
    assert not any(hasattr(cv, name) for name in hints.NAMES["calcvm"])


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
]  # fmt: skip
NAMED: list[tuple[Callable[[], Any], str]] = [
    (lambda: nn.Dense, r"module 'calcvm.nn' has no 'Dense': did you mean nn.Linear\?"),
    (lambda: cv.Dense, "did you mean nn.Linear"),
    (lambda: cv.Conv2d, "did you mean nn.Conv2d"),
    (lambda: nn.relu, "did you mean nn.ReLU"),
    (lambda: cv.RMSprop, "did you mean cv.RMSProp"),
    (lambda: model().compile, r"a Model has no 'compile': did you mean cv.Model\("),
    (lambda: model().state_dict(), "did you mean get_weights"),
    (lambda: model().lr, r'did you mean hyper\["learning_rate"\]'),
    (lambda: cv.History().history, r'did you mean history\["loss"\]'),
    (lambda: cv.History().epocs, "did you mean epochs"),
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
    assert "compile" not in dir(m) and "fit" in dir(m) and not hasattr(m, "lr") and getattr(cv, "Dense", None) is None
    for thing in (m, cv.History([{"loss": 1.0}]), nn.Linear(3), cv.Adam(1e-3)):
        assert type(copy.deepcopy(thing)) is type(pickle.loads(pickle.dumps(thing))) is type(thing)
        assert not hasattr(thing, "_ipython_display_")
