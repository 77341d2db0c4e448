"""State dicts of PyTorch: a model's parameters and buffers by PyTorch's names, in its layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from calcvm import checks
from calcvm.errors import CalcError, ShapeError
from calcvm.vm.memory.base_model import BaseModel
from calcvm.vm.run.feeds import numbers, numeric

WITHOUT = "num_batches_tracked"  # a buffer of PyTorch's batch normalization that nothing here needs
LOAD = "load_state_dict"


class _Place(NamedTuple):
    """A parameter or buffer, its shape here and in a state dict, and whether its axes are reversed there."""

    ours: str
    shape: tuple[int, ...]
    theirs: tuple[int, ...]
    turned: bool


def _places(what: str, model: BaseModel, prefix: Any, names: Any) -> dict[str, _Place]:
    """The parameter or buffer of each name in a state dict (CalcError: of two, or ``names`` has an unknown one)."""
    checks.one_of(f"{what}: prefix", prefix, str, "a text such as 'encoder.'")
    given = checks.one_of(f"{what}: names", {} if names is None else names, Mapping, "a mapping of names to names")
    info, places, used = model.program.info, dict[str, _Place](), set[str]()
    if "state_names" not in info:
        raise CalcError(
            f"{what}: the model's program is of an older calcvm, which wrote no names: compile its graph again"
        )
    kept = (*info["parameters"], *info.get("buffers", ()))
    for ours in kept:
        facts = info["state_names"].get(ours, {"names": {ours: ours}})
        shape, form = model.loaded.shape(ours, 1), facts.get("form")
        theirs = shape[::-1] if form == "turned" else (*shape[:1],) if form == "flat" else shape
        for known, name in facts["names"].items():
            parts = known.split(".")
            n = next((n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in given), 0)
            if n:  # the rest of the name has as many parts on both sides
                scope = ".".join(parts[:n])
                new = checks.one_of(f"{what}: names[{scope!r}]", given[scope], str, "a text such as 'encoder'")
                name = ".".join([*filter(None, [new]), *name.split(".")[::-1][: len(parts) - n][::-1]])
                used.add(scope)
            name = prefix + name
            if name in places:
                raise CalcError(
                    f"{what}: {places[name].ours!r} and {ours!r} are both called {name!r}: give others by names="
                )
            places[name] = _Place(ours, shape, theirs, form == "turned")
    if unknown := [name for name in given if name not in used]:
        layers = dict.fromkeys(name.rpartition(".")[0] or name for name in kept)
        raise CalcError(f"{what}: names: the model has no {checks.shown(unknown[0])}, but {', '.join(layers)}")
    return places


def _moved(value: np.ndarray, turned: bool, shape: tuple[int, ...]) -> np.ndarray:
    """From here to there, or back."""
    return (value.T if turned else value).reshape(shape)


def state_dict(model: BaseModel, weights: Mapping[str, np.ndarray], prefix: Any, names: Any) -> dict[str, np.ndarray]:
    """`Model.state_dict`, of the weights."""
    places = _places("state_dict", model, prefix, names)
    return {name: _moved(weights[p.ours], p.turned, p.theirs).copy() for name, p in places.items()}


def values_of(
    model: BaseModel, state: Any, strict: Any, prefix: Any, names: Any
) -> tuple[dict[str, np.ndarray], list[str], list[str]]:
    """`Model.load_state_dict`: the values by name, and the names that are missing and unexpected."""
    wanted = "a mapping of names to arrays, such as module.state_dict(),"
    checks.one_of(f"{LOAD}: state_dict", state, Mapping, wanted)
    strict, places = checks.flag(f"{LOAD}: strict", strict), _places(LOAD, model, prefix, names)
    named = {checks.one_of(f"{LOAD}: a name", n, str, "a text"): value for n, value in state.items()}
    given = {n: value for n, value in named.items() if n.startswith(prefix) and not n.endswith(WITHOUT)}
    if given and not given.keys() & places.keys() and all(n.startswith(f"{prefix}0.") for n in given):
        places = {f"{prefix}0.{n[len(prefix) :]}": p for n, p in places.items()}  # a Sequential of one module
    values, wrong = dict[str, np.ndarray](), list[str]()
    for name, place in places.items():
        value = _array(name, given[name]) if name in given else None
        if value is not None and value.shape != place.theirs:
            wrong.append(f"{name} has shape {value.shape}, and {place.theirs} is wanted")
        elif value is not None:
            value = _moved(value, place.turned, place.shape)
            if not np.array_equal(values.setdefault(place.ours, value), value, equal_nan=True):
                wrong.append(f"{name} differs from the weight that it is tied to, {place.ours}")
    read = {place.ours for name, place in places.items() if name in given}
    missing = [name for name, place in places.items() if place.ours not in read]
    unexpected = [name for name in given if name not in places]
    if wrong or (strict and (missing or unexpected)):
        error: type[CalcError] = ShapeError
        if strict and (missing or unexpected):
            error, own = CalcError, {place.ours for place in places.values()}
            wrong += ["missing: " + ", ".join(f"{name} {places[name].theirs}" for name in missing)] * bool(missing)
            shapes = (f"{name} {(*getattr(given[name], 'shape', ()),)}" for name in unexpected)
            wrong += [f"unknown: {', '.join(shapes)}"] * bool(unexpected)
            wrong += [f"{n} is a name of get_weights: use set_weights" for n in unexpected if n in own][:1]
            wrong += [f"{n} is a mapping: give the one of arrays" for n in unexpected if isinstance(given[n], Mapping)][
                :1
            ]
            wrong.append("names={'linear_1': 'encoder.0'} maps names of layers, prefix='encoder.' takes a part")
        raise error(f"{LOAD}: the model is unchanged: {'; '.join(wrong)}")
    return values, missing, unexpected


def _array(name: str, value: Any) -> np.ndarray:
    """A value as an array of numbers, also of a tensor in another memory, or of a type that NumPy does not have."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float() if "bfloat16" in str(value.dtype) else value
    return numeric(name, numbers(name, value))
