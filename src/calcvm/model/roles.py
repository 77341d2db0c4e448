"""The parts of a program that a `Model` uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from calcvm.errors import CalcError
from calcvm.vm.run.loaded import FORWARD, Loaded

LEARN, PREDICT, STREAM = "learn", "predict", "stream"  # the paths of a model; the last one runs sequences step by step
WEIGHT = "sample_weight"  # the placeholder for the weight of each sample in the loss
LENGTHS = "lengths"  # the placeholder for the steps of each sequence
TRAINED = f"{LEARN}."  # prefix of results of path learn that judge a model while it trains


@dataclass(frozen=True)
class Roles:
    """Placeholders and results of the paths learn and predict, by name; of a graph whose paths learn in turn there may be neither.

    inputs : the outputs are computed from these.
    targets : learning, or judging, needs these in addition.
    outputs : the results that `Model.predict` returns.
    figures : scalar results of predict that judge a model, with their names in a `History`.
    whole : placeholders without samples: their contents are given once.
    columns : those that accept data of shape (n,) as (n, 1).
    trained : the loss of learn, and its results that judge a model while it trains, with their names there.
    hint : the end of an error about too few inputs.
    ranks : numbers of axes of the inputs and targets.
    steps : of a model of sequences with lengths, the most steps of each input and target.
    ragged : whether the output has a result for each step of such sequences: every layer keeps the steps.
    """

    inputs: tuple[str, ...]
    targets: tuple[str, ...]
    outputs: tuple[str, ...]
    figures: Mapping[str, str]
    trained: Mapping[str, str]
    whole: frozenset[str] = frozenset()
    columns: frozenset[str] = frozenset()
    hint: str = ""
    ranks: Mapping[str, int] = field(default_factory=dict)
    steps: Mapping[str, int] = field(default_factory=dict)
    ragged: bool = False

    @classmethod
    def of(cls, loaded: Loaded) -> Roles:
        """The roles in a program, which may have the path predict alone (CalcError: it has no such paths)."""
        missing = [path for path in (LEARN, PREDICT) if path not in loaded.paths]
        trained_by = trained_paths(loaded)
        predicts = missing == [LEARN] and not trained_by  # and does nothing else
        if missing and len(trained_by) < 2 and not predicts:
            there = f"no path {missing[0]!r}, but {', '.join(loaded.paths)}: rename one of them"
            raise CalcError(
                f"a Model's graph has two paths of fixed names, {LEARN!r}, which trains, and {PREDICT!r}: this has "
                f"{there if loaded.paths else 'no paths: add them with g.path(name)'}"
            )
        trained = {} if LEARN in missing else {str(loaded.training(LEARN)["loss"]): "loss"}
        trained |= {
            name: name.removeprefix(TRAINED)
            for name in _readable(loaded, LEARN)
            if name.startswith(TRAINED) and name not in loaded.own_types and loaded.is_number(name)
        }
        inputs = () if PREDICT in missing else loaded.feeds(PREDICT, ("forward",))
        if not inputs and PREDICT not in missing:
            raise CalcError(f"path {PREDICT!r} reads no placeholder: there is nothing to predict from")
        used = [*(() if LEARN in missing else loaded.feeds(LEARN))]
        used += () if PREDICT in missing else loaded.feeds(PREDICT, FORWARD)
        if LENGTHS in used and "input" in inputs:  # of a network of layers, also if none of them reads the lengths
            inputs = (*dict.fromkeys((*inputs, LENGTHS)),)
        targets = tuple(dict.fromkeys(name for name in used if name not in inputs))
        outputs = _declared(loaded) or [name for name in _readable(loaded) if not loaded.is_number(name)]
        if not outputs and PREDICT not in missing:
            raise CalcError(f"path {PREDICT!r} has no output: predict.output = y, or a tuple of results")
        whole = frozenset(name for name in (*inputs, *targets) if not loaded.has_samples(name))
        hint = (
            f": path {PREDICT!r} reads results of path {LEARN!r}, and needs all of its data, because minimize(...) of {LEARN!r} "
            "has no output="
        ) * (
            not missing
            and loaded.paths[LEARN]["output"] is None
            and LEARN in dict(loaded.before(PREDICT, ("forward",)))
        )
        ranks = {name: len(loaded.forms[name]) for name in (*inputs, *targets)}
        steps = {name: loaded.forms[name][1].b for name, rank in ranks.items() if LENGTHS in inputs and rank > 1}
        layers = [loaded.forms[of] for scope, of in loaded.program.info.get("called", {}).items() if "." not in scope]
        kept = {form[1].b if len(form) > 2 else None for form in layers}
        ragged = bool(steps) and kept == {next(iter(steps.values()))}
        return cls(
            inputs, targets, tuple(outputs), figures(loaded), trained, whole, loaded.columns, hint, ranks, steps, ragged
        )  # fmt: skip

    def in_order(self, loaded: Loaded, order: tuple[str, ...], y: object) -> Roles:
        """The roles in a training in which paths learn in turn: inputs are all data of these paths, without ``y``."""
        read = {name for path in order for name in loaded.feeds(path)}
        names = [name for name in loaded.variables if name in read]
        inputs = tuple(name for name in names if y is None or name in self.inputs)
        return replace(
            self, inputs=inputs, targets=tuple(name for name in names if name not in inputs), hint="",
            whole=frozenset(name for name in names if not loaded.has_samples(name)),
            ranks={name: len(loaded.forms[name]) for name in names},
            trained={str(loaded.training(path)["loss"]): f"{path}.loss" for path in dict.fromkeys(order)},
        )  # fmt: skip

    @property
    def weighted(self) -> bool:
        """Whether the loss has a weight per sample."""
        return WEIGHT in self.targets

    @property
    def labels(self) -> tuple[str, ...]:
        """The targets without the weights."""
        return tuple(name for name in self.targets if name != WEIGHT)


def trained_paths(loaded: Loaded) -> list[str]:
    """The paths that train, in their order in the program."""
    return [path for path, facts in loaded.paths.items() if facts["backward"]]


def figures(loaded: Loaded) -> dict[str, str]:
    """Results of the path predict that judge a model, with their names."""
    outputs = _declared(loaded)
    floats = [name for name in _readable(loaded) if name not in loaded.own_types]
    names = [
        name
        for name in floats
        if name not in outputs and loaded.is_number(name) and not loaded.variables[name].get("inner")
    ]
    return {name: name.removeprefix("predict.") for name in names}


def _declared(loaded: Loaded) -> list[str]:
    """The outputs that the graph names."""
    facts = loaded.paths.get(PREDICT, {})
    return facts.get("outputs") or [name for name in [facts.get("output")] if name is not None]


def _readable(loaded: Loaded, path: str = PREDICT) -> list[str]:
    """Results of a path that exist once it has run."""
    return [
        name for name, facts in loaded.variables.items()
        if facts["path"] == path and facts["symbol"] is not None and not facts["unreadable"]
    ]  # fmt: skip
