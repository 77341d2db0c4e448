"""Write a graph as text."""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from calcvm import checks
from calcvm.errors import CalcError
from calcvm.graph import CalcGraph, Operation, Path, Variable, layouts_of
from calcvm.graph_text.words import (
    BACKWARD,
    CONTINUED,
    GRADIENT,
    INITIALIZERS,
    LAID,
    OPTIMIZERS,
    PENALTIES,
    REGULARIZERS,
    SCHEDULES,
    SMALL,
    TITLE,
    VERSION,
    Numbering,
    named,
)
from calcvm.ops import OPS
from calcvm.ops.gradient import GRADIENT as GRADIENT_SPEC
from calcvm.ops.layouts import axes
from calcvm.ops.spec import EQUATION, RECURRENT, OpSpec
from calcvm.ops.types import FLOAT
from calcvm.optim import Optimizer
from calcvm.tables import Lines

INDENT = "    "
Keywords = list[tuple[str, str]]  # names, and their values as text


def text_of(graph: CalcGraph) -> str:
    """The graph as text (see `CalcGraph.text`)."""
    return Lines(_Writer(graph).text())


class _Part(NamedTuple):
    """A line of a path: the results it reads and sets, its layer, and a function that writes it."""

    reads: tuple[Variable | Path, ...]  # a path: the optimizer that its `minimize` names
    makes: tuple[Variable | Path, ...]
    layer: str
    write: Callable[[], str]


class _Writer:
    def __init__(self, graph: CalcGraph):
        self.graph = graph
        self.numbering = Numbering()
        self.first: dict[Variable, tuple[Operation, str]] = {}  # the first reader of a parameter, and the input

    def text(self) -> str:
        paths = self.paths()  # before their inputs, whose layouts this determines
        sources = [self.source(v) for v in self.graph.variables.values() if v.kind != "result"]
        adapts = [self.adapt(scope, *of) for scope, of in self.graph.adapts.items()]
        lines = [f"{TITLE} {VERSION}", *sources, *paths, *([""] if adapts else []), *adapts]
        if any(v.unnamed for v in self.graph.variables.values()):
            lines.insert(1, "# %name: an automatic name")
        return "\n".join(lines) + "\n"

    # ------------------------------------------------------------ placeholders, parameters and the like
    def source(self, v: Variable) -> str:
        what = f"{v.kind} {v.name!r}"
        said: Keywords = []
        if v.kind in ("placeholder", "constant", "state") and v.type != FLOAT:
            said.append(("dtype", repr(v.type)))
        if v.kind == "placeholder" and v.layout:
            said.append(("channels_last", "True"))
        if v.kind in ("parameter", "buffer", "carry"):
            said.append(("init", _initial(what, v.init)))
        if v.steps is not None:
            said.append(("steps", str(v.steps)))
        if v.kind == "parameter":
            if v.regularizer is not None:
                said.append(("regularizer", _regularizer(what, v.regularizer)))
            if not v.trainable:
                said.append(("trainable", "False"))
            if v.turned is not None:
                said.append(("turned", str(v.turned)))
            if v.layout != self.found_layout(v):
                said.append(("layout", repr(v.layout)))
        if v.kind == "constant":
            said.append(("value", _array(v.init, v.init.dtype)))
        if v.kind == "state":
            said += self.state(what, v)
        shape = v.laid if v.kind == "placeholder" else v.shape
        sizes = ", ".join(str(n.b) if n.constant else "None" for n in shape)
        return f"{_defined(v)} = {v.kind}[{sizes}]{''.join(f' {k}={text}' for k, text in said)}"

    def state(self, what: str, v: Variable) -> Keywords:
        of = next((key for key, state in self.graph.states.items() if state is v), None)
        if of is None or not isinstance(v.init, Mapping) or not {"kind"} <= v.init.keys() <= {"kind", "value"}:
            raise CalcError(
                f"{what} has no text: it starts from {checks.shown(v.init)}, which no operator of calcvm uses"
            )
        said = [(key, _literal(what, value)) for key, value in v.init.items()]
        return said if of == v.name else [*said, ("of", repr(of))]

    def found_layout(self, v: Variable) -> str:
        """The layout a parameter gets from its first reader, as the text's reader will choose it."""
        op, slot = self.first.get(v, (None, ""))
        if op is None or op.is_copy or op.spec is GRADIENT_SPEC:
            return ""
        if op.spec.broadcast and v.rank < max(x.rank for x in op.inputs.values()):  # it is reshaped first
            return ""
        new = {x for x in op.inputs.values() if x in self.first and self.first[x][0] is op}
        return layouts_of(op.spec, {s: replace(x, layout="") if x in new else x for s, x in op.inputs.items()})[slot]

    @staticmethod
    def adapt(scope: str, x: Variable, axis: int | None) -> str:
        return f"adapt({named(scope)}, {named(x.name)}{'' if axis is None else f', axis={axis}'})"

    # ------------------------------------------------------------ paths
    def paths(self) -> list[str]:
        """The paths in the order of their inputs.  A path extended by results of later paths is continued after these."""
        waiting = {path: deque(self.parts(path)) for path in self.graph.paths.values()}
        lines: list[str] = []
        begun, known = set[Path](), set[Variable | Path]()

        def ready(parts: deque[_Part]) -> bool:
            return bool(parts) and known.issuperset(parts[0].reads)

        while any(waiting.values()) or len(begun) < len(waiting):
            before = len(lines)
            for path, parts in waiting.items():
                if path in begun and not ready(parts):
                    continue
                how = CONTINUED if path in begun else BACKWARD if path.backward else ""
                lines += ["", f"path {named(path.name)}{how and f' ({how})'}:"]
                begun.add(path)
                layer = ""
                while ready(parts):
                    part = parts.popleft()
                    if part.layer != layer and part.layer:
                        lines.append(f"{INDENT}layer {named(part.layer)}:")
                    layer = part.layer
                    lines.append(f"{INDENT * (2 if layer else 1)}{part.write()}")
                    known.update(part.makes)
            if len(lines) == before:
                names = ", ".join(path.name for path, parts in waiting.items() if parts)
                raise CalcError(
                    f"the graph has no text: operators of the paths {names} read results that nothing computes before"
                )
        return lines

    def parts(self, path: Path) -> Iterable[_Part]:
        made: dict[int, list[tuple[str, Variable]]] = {}
        for scope, (v, n) in path.layers.items():
            made.setdefault(n, []).append((scope, v))
        for n in range(len(path.operations) + 1):
            for scope, v in made.get(n, ()):
                yield _Part(_results(v), (), scope, partial("return {}".format, named(v.name)))
            if n < len(path.operations):
                op = path.operations[n]
                outputs = tuple(op.outputs.values())
                yield _Part(_results(*op.inputs.values()), outputs, op.layer, partial(self.operation, op))
        for state, new in path.carries.items():
            yield _Part(_results(new), (), "", partial("carry({})".format, _names((state, new))))
        outputs = path.outputs
        if path.loss is not None:
            reads = *_results(path.loss, *outputs), *(() if path.state_of is None else (path.state_of,))
            yield _Part(reads, (path,), "", partial(self.minimize, path, path.loss))
        elif outputs:
            yield _Part(_results(*outputs), (), "", partial("output({})".format, _names(outputs)))

    def operation(self, op: Operation) -> str:
        for slot, v in op.inputs.items():
            if v.kind == "parameter":
                self.first.setdefault(v, (op, slot))
        name, attrs = self.called(op)
        given = [named(op.inputs[slot].name) if slot in op.inputs else "None" for slot in op.spec.inputs]
        while given[-1:] == ["None"]:
            given.pop()
        given += [f"{key}={text}" for key, text in attrs]
        first = next(iter(op.outputs.values()))
        stem = f"d{op.inputs['x'].name}" if op.spec is GRADIENT_SPEC else name
        other = "" if op.name == self.numbering.expected(stem, first.name, first.unnamed) else f" as {named(op.name)}"
        self.numbering.called(stem, op.name)
        return f"{', '.join(map(_defined, op.outputs.values()))} = {named(name)}({', '.join(given)}){other}"

    def called(self, op: Operation) -> tuple[str, Keywords]:
        """The word for an operator, and those of its attributes that differ from the default."""
        spec, what = op.spec, f"operator {op.name!r}"
        if spec is GRADIENT_SPEC:
            return GRADIENT, []
        if op.is_copy:
            return LAID, [("layout", repr(op.outputs["y"].layout))]
        if spec.category == EQUATION:
            return EQUATION, _equation(spec)
        if spec.stem == RECURRENT:
            return RECURRENT, _cell(op)
        if OPS.get(spec.name) is not spec or spec.name in (GRADIENT, LAID):
            why = (
                "a word of the language" if spec.name in (GRADIENT, LAID) else "no longer in the table, or another one"
            )
            raise CalcError(
                f"{what} has no text: {spec.name!r} is {why}: declare it (by another name), and build the graph again"
            )
        attrs, layout = op.attrs_as_seen, op.outputs[spec.outputs[0]].layout
        if spec.relaid and layout:
            rank = max(v.rank for v in op.inputs.values())
            if spec.relaid(attrs, axes(layout, rank)) != op.attrs:
                raise CalcError(f"{what} has no text: its `relaid` does not determine the attributes of {spec.name!r}")
        said = ((a, _as(a.default, attrs[a.name])) for a in spec.attrs)
        return spec.name, [(a.name, _literal(f"{what}: {a.name}", v)) for a, v in said if repr(v) != repr(a.default)]

    def minimize(self, path: Path, loss: Variable) -> str:
        what, behind, optimizer = f"path {path.name!r}", path.trained_behind(loss), path.optimizer
        if optimizer is None:
            raise CalcError(f"{what} has a loss that nothing minimizes: call path.minimize(loss, optimizer)")
        names = {v.name for v in behind}
        chosen = None if path.parameters is None else [v.name for v in path.parameters]
        for name in (*(chosen or ()), *path.rates, *path.no_decay):
            if name not in names:
                raise CalcError(
                    f"{what} has no text: it has a setting for {name!r}, which is not a trainable parameter of the loss"
                )
        if self.spared(path, optimizer) != path.no_decay:  # parameters have been renamed since
            optimizer = replace(optimizer, no_decay=path.no_decay)
        shared = path.state_of
        said = [
            named(loss.name),
            f"state_of={named(shared.name)}" if shared else f"optimizer={_optimizer(what, optimizer)}",
        ]
        if path.outputs:
            several = len(path.outputs) > 1
            said.append(f"output={'(' * several}{_names(path.outputs)}{')' * several}")
        if shared:
            return f"minimize({', '.join(said)})"
        if chosen is not None:
            said.append(f"parameters=[{', '.join(map(named, chosen))}]")
        if path.rates:
            said.append(f"rates={{{', '.join(f'{named(k)}: {v!r}' for k, v in path.rates.items())}}}")
        return f"minimize({', '.join(said)})"

    @staticmethod
    def spared(path: Path, optimizer: Optimizer) -> tuple[str, ...] | None:
        """Parameters exempt from the optimizer's weight decay under their current names."""
        trained = path.parameters
        if trained is None:
            assert path.loss is not None
            trained = tuple(path.trained_behind(path.loss))
        try:
            return path._spared(trained, optimizer)
        except CalcError:  # a name belongs to another parameter
            return None


# ---------------------------------------------------------------- names
def _defined(v: Variable) -> str:
    return f"{'%' * v.unnamed}{named(v.name)}"


def _names(variables: Iterable[Variable]) -> str:
    return ", ".join(named(v.name) for v in variables)


def _results(*variables: Variable) -> tuple[Variable, ...]:
    return tuple(v for v in variables if v.kind == "result")


def _equation(spec: OpSpec) -> Keywords:
    """The settings of a user's equation that differ from the default."""
    from calcvm.ops.stated import stated_of

    default = {"reads": [f"x{k + 1}" for k in range(len(spec.inputs))], "sets": ["y"], "types": {}, "declares": ""}
    return [(key, _literal(EQUATION, v)) for key, v in stated_of(spec.fwd[0]).document.items() if v != default.get(key)]


def _cell(op: Operation) -> Keywords:
    """The settings of a user's recurrent cell that differ from the default."""
    from calcvm.ops.cells import document_of

    default = {"apart": 0, "parameters": [], "reverse": False}
    said = document_of(op.spec.fwd[0]) | {"reverse": bool(op.attrs["reverse"])}
    return [(key, _literal(RECURRENT, v)) for key, v in said.items() if v != default.get(key)]


# ---------------------------------------------------------------- values
def _as(default: Any, value: Any) -> Any:
    """An attribute with a float default as a float: 2 and 2.0 give the same graph."""
    return float(value) if type(default) is float and type(value) is int and float(value) == value else value


def _literal(what: str, value: Any) -> str:
    """Numbers and texts, and tuples, lists and dictionaries of them, with all their digits."""
    if value is None or type(value) in (bool, int, float, str):
        return repr(value)
    if type(value) in (tuple, list):
        inner = [_literal(what, v) for v in value]
        text = ", ".join(inner) + ("," if len(inner) == 1 and type(value) is tuple else "")
        return f"({text})" if type(value) is tuple else f"[{text}]"
    if type(value) is dict:
        return f"{{{', '.join(f'{_literal(what, k)}: {_literal(what, v)}' for k, v in value.items())}}}"
    raise CalcError(f"{what}: {checks.shown(value)} has no text: only numbers, texts, and tuples of them have one")


def _array(value: np.ndarray, dtype: np.dtype | None = None) -> str:
    """An array: as lists of numbers if it is small, else as bytes; float64 unless ``dtype`` says otherwise."""
    said = "" if value.dtype == (dtype or np.float64) else f", dtype={_dtype(value.dtype)!r}"
    if value.size <= SMALL and value.itemsize <= 8 and not np.isnan(value).any():  # a NaN has hidden bits
        numbers = _literal("", value.tolist())
        return f"array({numbers}{said})" if said else numbers
    return f"base64('{base64.b64encode(value.tobytes()).decode()}'{said})"


def _dtype(dtype: np.dtype) -> str:
    return dtype.name if dtype.isnative else dtype.str


def _initial(what: str, value: Any) -> str:
    return _array(value) if isinstance(value, np.ndarray) else _made(f"{what}: init", value, INITIALIZERS)


def _regularizer(what: str, value: Any) -> str:
    return _made(f"{what}: regularizer", value, REGULARIZERS, PENALTIES.get(type(value)))


def _optimizer(what: str, value: Any) -> str:
    return _made(f"{what}: optimizer", value, OPTIMIZERS)


def _made(what: str, value: Any, kinds: Mapping[str, type], only: tuple[str, ...] | None = None) -> str:
    """An object of plain data as a constructor call: required arguments, and those that differ from the default."""
    kind = type(value)
    if kinds.get(kind.__name__) is not kind:
        raise CalcError(
            f"{what} has no text: {kind.__name__} is a custom class, and the text has those of calcvm: {', '.join(kinds)}; write "
            "the graph without it, and set it on the graph that is read"
        )
    given, by_name = [], []
    for f in fields(kind):
        v = getattr(value, f.name)
        if only is None or f.name in only:
            text = (
                _made(f"{what}: {f.name}", v, SCHEDULES)
                if f.name == "schedule" and v is not None
                else _literal(what, v)
            )
            if f.default is MISSING:
                given.append(text)
            elif repr(v) != repr(f.default):
                by_name.append(f"{f.name}={text}")
    return f"{kind.__name__}({', '.join(given + by_name)})"
