"""Build a graph from its text, by the calls that would build it in Python, with their checks."""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

import numpy as np

from calcvm import checks, dtypes, init, optim
from calcvm.errors import CalcError, UnsupportedOperator
from calcvm.gradients import gradient
from calcvm.graph import CalcGraph, Path, Variable, applied, apply, copied, same_order
from calcvm.graph_text import parse
from calcvm.graph_text.parse import Node, Statement, Wrong, literal
from calcvm.graph_text.words import (
    BACKWARD,
    CELLS,
    CONTINUED,
    EQUATIONS,
    GRADIENT,
    INITIALIZERS,
    LAID,
    OPTIMIZERS,
    PENALTIES,
    REGULARIZERS,
    SCHEDULES,
    SOURCES,
    STATES,
    TITLE,
    VERSION,
    Numbering,
)
from calcvm.hints import close_to
from calcvm.ops import OPS
from calcvm.ops.layouts import LAYOUTS
from calcvm.ops.spec import EQUATION, RECURRENT, OpSpec

DTYPE = re.compile(r"bool|u?int\d{1,3}|float\d{1,3}|[<>][fiu]\d{1,2}")  # NumPy's names of array types


def read_graph(text: str) -> CalcGraph:
    """Build the graph of a text, written by `CalcGraph.text` or by hand.

    It compiles to the same program as the graph that was written.  Nothing in the text runs as Python, and no file is read.

    Raises
    ------
    CalcError : a line is not a statement of the language, or Python's call rejects it (then also a ShapeError, for example).
        The message has the line's number, a caret under the position, the error and the remedy.

    Examples
    --------
    >>> graph = cv.build_graph(nn.Linear(2), (4,), "mse", cv.SGD(0.1))
    >>> cv.compile(cv.read_graph(graph.text()), batch_size=8) == cv.compile(graph, batch_size=8)
    True
    """
    if not isinstance(text, str):
        raise CalcError(f"read_graph: a text is wanted, such as graph.text() gives, not {checks.called(text)}")
    return _Reader().read(text)


@dataclass
class _Block:
    """Lines of one indentation: those of the text, a path, or a layer (None: outside of one)."""

    indent: int
    path: Path | None = None
    layer: str | None = None


class _Reader:
    def __init__(self) -> None:
        self.graph = CalcGraph()
        self.known: dict[str, Variable] = {}  # by their names in the text
        self.numbering = Numbering()
        self.at = 0  # position in the line to report if a call raises
        self.blocks = [_Block(0)]
        self.opened: _Block | None = None  # block opened by the line before; the next line sets its indentation

    def read(self, text: str) -> CalcGraph:
        lines = [line.rstrip("\r") for line in text.split("\n")]
        first = next((n for n, line in enumerate(lines) if line.strip()), 0)
        for n, line in enumerate(lines[first:], first):
            try:
                if n == first:
                    parse.title(line, TITLE, VERSION)
                elif found := parse.statement(line):
                    self.enter(line)
                    self.at = found.at
                    getattr(self, f"_{found.kind}")(found)
            except Wrong as wrong:
                raise parse.error(n + 1, line, wrong) from None
            except CalcError as error:
                error.args = (parse.shown(n + 1, line, self.at, str(error)), *error.args[1:])
                raise
        for path in self.graph.paths.values():
            path.adopt = True
        return self.graph

    # ------------------------------------------------------------ blocks
    def enter(self, line: str) -> None:
        """Find the block of a line by its indentation."""
        indent = len(line) - len(line.lstrip(" "))
        if self.opened is not None and indent > self.blocks[-1].indent:
            self.opened.indent = indent
            self.blocks.append(self.opened)
        self.opened = None
        while indent < self.blocks[-1].indent:
            self.blocks.pop()
        if indent != self.blocks[-1].indent:
            raise Wrong(
                indent,
                f"the line is indented by {indent}, and the lines above it by {self.blocks[-1].indent}",
            )

    @property
    def block(self) -> _Block:
        return self.blocks[-1]

    def inside(self, what: str) -> Path:
        if self.block.path is None:
            raise Wrong(
                self.at, f"{what} belongs to a path: write it below a line such as path learn (backward):, indented"
            )
        return self.block.path

    # ------------------------------------------------------------ names
    def define(self, target: parse.Target) -> None:
        if target.name in self.known:
            raise Wrong(target.at, f"{target.name!r} is defined already: variables of a graph have different names")

    def keep(self, target: parse.Target, v: Variable) -> None:
        if v.name != target.name:
            v.rename(target.name)
        v.unnamed = target.unnamed
        self.known[target.name] = v

    def variable(self, node: Node) -> Variable:
        if node.kind not in ("name", "text"):
            raise Wrong(node.at, "the name of a variable is wanted here")
        if node.value not in self.known:
            near = close_to(node.value, self.known)
            raise Wrong(node.at, f"no line above defines {node.value!r}{near and f': did you mean {near!r}?'}")
        return self.known[node.value]

    def variables(self, node: Node) -> list[Variable]:
        return [self.variable(item) for item in (node.items if node.kind in ("list", "tuple") else [node])]

    # ------------------------------------------------------------ placeholders, parameters and the like
    def _source(self, line: Statement) -> None:
        if len(line.targets) > 1:
            raise Wrong(line.targets[1].at, f"a {line.what} defines one variable")
        target = line.targets[0]
        self.define(target)
        said = _by_name(line.what, line.settings, SOURCES[line.what])
        sizes = tuple(literal(size) for size in line.sizes)
        v = getattr(self, f"_source_{line.what}")(target.name, sizes, said)
        self.keep(target, v)

    def _source_placeholder(self, name: str, sizes: tuple[Any, ...], said: Mapping[str, Node]) -> Variable:
        return self.graph.placeholder(name, sizes, **{key: literal(node) for key, node in said.items()})

    def _source_parameter(self, name: str, sizes: tuple[Any, ...], said: Mapping[str, Node]) -> Variable:
        given: dict[str, Any] = {}
        if "init" in said:
            given["init"] = _initial(said["init"], sizes)
        if "regularizer" in said:
            given["regularizer"] = _made(said["regularizer"], "regularizer", REGULARIZERS)
        if "trainable" in said:
            given["trainable"] = literal(said["trainable"])
        v = self.graph.parameter(name, sizes, **given)
        v.turned = literal(said["turned"]) if "turned" in said else None
        if "layout" in said:
            v.layout, v.settled = _layout(said["layout"], v), True
        return v

    def _source_buffer(self, name: str, sizes: tuple[Any, ...], said: Mapping[str, Node]) -> Variable:
        return self.graph.buffer(name, sizes, **({"init": _initial(said["init"], sizes)} if said else {}))

    def _source_carry(self, name: str, sizes: tuple[Any, ...], said: Mapping[str, Node]) -> Variable:
        given = {"init": _initial(said["init"], sizes[1:])} if "init" in said else {}
        return self.graph.carry(name, sizes, **given, steps=literal(said["steps"]) if "steps" in said else None)

    def _source_constant(self, name: str, sizes: tuple[Any, ...], said: Mapping[str, Node]) -> Variable:
        if "value" not in said:
            raise Wrong(self.at, f"the constant {name!r} has no value: write value= and a number, or lists of numbers")
        dtype = literal(said["dtype"]) if "dtype" in said else None
        type_ = dtypes.type_of(f"constant {name!r}", dtype)
        value = _array(said["value"], sizes, np.dtype("float64" if type_ not in dtypes.BYTES else type_))
        return self.graph.constant(name, value, dtype)

    def _source_state(self, name: str, sizes: tuple[Any, ...], said: Mapping[str, Node]) -> Variable:
        kind = checks.text(f"state {name!r}: kind", literal(said["kind"]) if "kind" in said else None, "rng")
        if kind not in STATES:
            raise Wrong(said["kind"].at, f"state {name!r}: kind {kind!r} is unknown; take one of {', '.join(STATES)}")
        of = checks.text(f"state {name!r}: of", literal(said["of"]) if "of" in said else name)
        if of in self.graph.states:
            raise Wrong(said["of"].at if "of" in said else self.at, f"there already is a state of {of!r}")
        sizes = checks.sizes(f"state {name!r}: shape", sizes)
        if len(sizes) != 1:
            raise Wrong(self.at, f"state {name!r}: its shape is one number, such as state[2], not {sizes}")
        type_ = dtypes.type_of(f"state {name!r}", literal(said["dtype"]) if "dtype" in said else None)
        wanted, elems, valued = STATES[kind]
        if (type_, *sizes) != (wanted or type_, elems or sizes[0]):
            raise Wrong(self.at, f"state {name!r} of kind {kind!r} is state[{elems}] dtype={wanted!r}")
        if valued != ("value" in said):
            start = "a value: add value=" if valued else "the seed: it has no value="
            raise Wrong(said["kind" if valued else "value"].at, f"state {name!r} of kind {kind!r} starts from {start}")
        value = {"value": checks.number(f"state {name!r}: value", literal(said["value"]))} if valued else {}
        return self.graph.state(of, sizes[0], type_, {"kind": kind, **value})

    # ------------------------------------------------------------ paths
    def _path(self, line: Statement) -> None:
        if len(self.blocks) > 1:
            raise Wrong(self.at, "a path cannot be inside another path: begin its line at the left")
        name, flag = line.name or "", line.flag
        if flag not in ("", BACKWARD, CONTINUED):
            raise Wrong(line.flag_at, f"after a path only ({BACKWARD}), ({CONTINUED}) or nothing is allowed")
        if flag == CONTINUED:
            if name not in self.graph.paths:
                raise Wrong(self.at, f"no path {name!r} above that could be {CONTINUED}")
            path = self.graph.paths[name]
        elif name in self.graph.paths:
            raise Wrong(self.at, f"path {name!r} exists already: continue it by path {name} ({CONTINUED}):")
        else:
            path = self.graph.path(name, flag == BACKWARD, adopt=False)
        self.opened = _Block(0, path)

    def _layer(self, line: Statement) -> None:
        path = self.inside("a layer")
        if self.block.layer is not None:
            raise Wrong(
                self.at,
                f"a layer cannot be written inside another layer: its name says that it is inside, such as {self.block.layer}.linear_1",
            )
        self.opened = _Block(0, path, line.name)

    def _return(self, line: Statement) -> None:
        path = self.inside("the result of a layer")
        if self.block.layer is None:
            raise Wrong(self.at, "only a layer returns something: for a path, output(...) names the results")
        v = self.variable(Node("name", line.at, line.name))
        path.layers[self.block.layer] = v, len(path.operations)

    def _output(self, line: Statement) -> None:
        path, call = self.inside("an output"), line.call
        assert call is not None
        _by_name("output", call.pairs, ())
        found = tuple(self.variable(node) for node in call.items)
        if not found:
            raise Wrong(self.at, "output() needs the path's results, such as output(y)")
        path.output = found if len(found) > 1 else found[0]

    def _carry(self, line: Statement) -> None:
        path, call = self.inside("a carry"), line.call
        assert call is not None
        path.carry(*self.inputs(call, "carry", 2))

    def _minimize(self, line: Statement) -> None:
        path, call = self.inside("minimize"), line.call
        assert call is not None
        said = _by_name("minimize", call.pairs, ("optimizer", "output", "parameters", "rates", "state_of"))
        if len(call.items) != 1:
            raise Wrong(self.at, "minimize needs one loss, such as minimize(loss, optimizer=SGD(0.1))")
        if "optimizer" not in said and "state_of" not in said:
            raise Wrong(self.at, "minimize needs an optimizer, such as optimizer=SGD(0.1)")
        loss = self.variable(call.items[0])
        given: dict[str, Any] = {}
        if "optimizer" in said:
            given["optimizer"] = _made(said["optimizer"], "optimizer", OPTIMIZERS)
        if "state_of" in said:
            other = self.graph.paths.get(said["state_of"].value)
            if said["state_of"].kind not in ("name", "text") or other is None:
                raise Wrong(said["state_of"].at, "the name of a path that a line above begins is wanted here")
            given["state_of"] = other
        if "output" in said:
            found = self.variables(said["output"])
            given["output"] = tuple(found) if len(found) > 1 else found[0] if found else None
        if "parameters" in said:
            given["parameters"] = self.variables(said["parameters"])
        if "rates" in said:
            if said["rates"].kind != "dict":
                raise Wrong(said["rates"].at, "rates must be given by parameter, such as {W: 0.1}")
            given["rates"] = {self.variable(key).name: literal(value) for key, value in said["rates"].pairs}
        path.minimize(loss, **given)

    def _adapt(self, line: Statement) -> None:
        call = line.call
        assert call is not None
        if self.block.path is not None:
            raise Wrong(self.at, "adapt cannot be inside a path: begin its line at the left")
        said = _by_name("adapt", call.pairs, ("axis",))
        if len(call.items) != 2 or call.items[0].kind not in ("name", "text"):
            raise Wrong(self.at, "adapt needs a layer and its input, such as adapt(standardize_1, input)")
        scope, x = call.items[0].value, self.variable(call.items[1])
        if not x.rank or x.shape[0].constant or not all(n.constant for n in x.shape[1:]):
            raise Wrong(call.items[1].at, f"{x} must have the batch first and fixed sizes after it")
        axis = literal(said["axis"]) if "axis" in said else None
        if axis is not None:
            axis = checks.integer("adapt: axis", axis, 0, max(x.rank - 2, 0))
        self.graph.adapts[scope] = x, axis

    # ------------------------------------------------------------ operators
    def _operator(self, line: Statement) -> None:
        path, call, name = self.inside("an operator"), line.call, line.what
        assert call is not None
        for target in line.targets:
            self.define(target)
        if twice := [t for i, t in enumerate(line.targets) if t.name in [u.name for u in line.targets[:i]]]:
            raise Wrong(twice[0].at, f"{twice[0].name!r} is defined twice")
        first, start = line.targets[0], len(path.operations)
        with path:
            if name == GRADIENT:
                y, x = self.inputs(call, GRADIENT, 2)
                outputs, stem = [gradient(y, x)], f"d{x.name}"
            elif name == LAID:
                outputs, stem = [self.laid(path, call)], LAID
            else:
                outputs, stem = self.applied(call, first.name), name
        if len(line.targets) != len(outputs):
            at = line.targets[min(len(outputs), len(line.targets) - 1)].at
            raise Wrong(at, f"names before '=': {len(line.targets)}; results of {name}: {len(outputs)}")
        for target, v in zip(line.targets, outputs):
            self.keep(target, v)
        *inserted, op = path.operations[start:]
        for other in inserted:  # casts and copies, which the text omits
            self.numbering.called(other.spec.name, other.name)
            other.layer = self.block.layer or ""
        op.name = line.name or self.numbering.expected(stem, first.name, first.unnamed)
        op.layer = self.block.layer or ""
        self.numbering.called(stem, op.name)
        self.graph._counts |= self.numbering.last  # operators added to the graph later need other names
        if "stream" in op.attrs and any(v.kind == "state" for v in op.inputs.values()):  # and other random numbers
            self.graph._streams = max(self.graph._streams, op.attrs["stream"] + 1)

    def inputs(self, call: Node, what: str, n: int) -> list[Variable]:
        _by_name(what, call.pairs, ())
        if len(call.items) != n:
            raise Wrong(self.at, f"{what} takes {n} variables, not {len(call.items)}")
        return [self.variable(node) for node in call.items]

    def laid(self, path: Path, call: Node) -> Variable:
        """A copy of a variable in another layout."""
        said = _by_name(LAID, call.pairs, ("layout",))
        (x,) = self.inputs(Node("call", call.at, items=call.items), LAID, 1)
        if "layout" not in said:
            raise Wrong(self.at, f"{LAID} needs a layout, such as {LAID}(x, layout={LAYOUTS[0]!r})")
        layout = _layout(said["layout"], x)
        if same_order(x.shape, x.layout, layout):
            raise Wrong(said["layout"].at, f"{x} has this layout already")
        x.settled = True
        return copied(path, x, layout)

    def applied(self, call: Node, out: str) -> list[Variable]:
        if call.value in (EQUATION, RECURRENT):
            own, how = self.equation(call) if call.value == EQUATION else self.cell(call)
            y = applied(own, *map(self.operand, call.items), out=out, **how)
            assert y.producer is not None
            return [*y.producer.outputs.values()]
        spec = OPS.get(call.value)
        if spec is None:
            near = close_to(call.value, OPS)
            raise UnsupportedOperator(
                f"no operator is called {call.value!r}{near and f' (did you mean {near!r}?)'}: a custom one must be declared before "
                "the text is read (calcvm.operators.elementwise, cv.register_op)"
            )
        attrs = {
            key: literal(node) for key, node in _by_name(spec.name, call.pairs, [a.name for a in spec.attrs]).items()
        }
        inputs = [self.operand(node) for node in call.items]
        y = apply(spec.name, *inputs, out=out, **attrs)
        assert y.producer is not None
        return [*y.producer.outputs.values()]

    def equation(self, call: Node) -> tuple[OpSpec, dict[str, Any]]:
        """The operator for a user's equation, and its attributes."""
        from calcvm.ops.stated import operator_said

        default = {"reads": [f"x{k + 1}" for k in range(len(call.items))], "sets": ["y"], "types": {}, "declares": ""}
        return operator_said(self.document(call, EQUATIONS, default)), {}

    def cell(self, call: Node) -> tuple[OpSpec, dict[str, Any]]:
        """The same for a user's recurrent cell."""
        from calcvm.ops.cells import operator_said

        said = self.document(call, CELLS, {"apart": 0, "parameters": [], "reverse": False})
        return operator_said(said), {"reverse": said["reverse"]}

    def document(self, call: Node, kinds: Mapping[str, type], default: dict[str, Any]) -> dict[str, Any]:
        """The settings of an operator that is a user's equation or cell."""
        given, whole = (
            _by_name(str(call.value), call.pairs, [*kinds]),
            "an equation" if kinds is EQUATIONS else "a recurrent cell",
        )
        said = default | {key: literal(node) for key, node in given.items()}
        for key, kind in kinds.items():
            inside = said.get(key) if kind in (list, dict) else ()
            if type(said.get(key)) is not kind or not all(type(v) is str for v in _inside(inside)):
                at, what = (
                    given[key].at if key in given else self.at,
                    {int: "a number", str: "a text", bool: "True or False"},
                )
                raise Wrong(at, f"{key} of {whole} is {what.get(kind, f'a {kind.__name__} of texts')}")
        return said

    def operand(self, node: Node) -> Variable | np.ndarray | None:
        if node.kind in ("name", "text"):
            return self.variable(node)
        if node.kind == "value" and node.value is None:
            return None
        shape = _shape_of(node)
        return np.array(_numbers(node, shape)).reshape(shape)


def _inside(value: Any) -> list[Any]:
    return [*value, *(value.values() if isinstance(value, dict) else ())]


# ---------------------------------------------------------------- values
def _by_name(what: str, pairs: Sequence[tuple[Node, Node]], names: Sequence[str]) -> dict[str, Node]:
    found: dict[str, Node] = {}
    for key, value in pairs:
        if key.value not in names:
            near = close_to(key.value, names)
            hint = f"did you mean {near}=?" if near else f"it takes {', '.join(names) or 'none'}"
            raise Wrong(key.at, f"{what} has no setting {key.value!r}: {hint}")
        if key.value in found:
            raise Wrong(key.at, f"{key.value}= is given twice")
        found[key.value] = value
    return found


def _layout(node: Node, v: Variable) -> str:
    layout = literal(node)
    if layout not in ("", *LAYOUTS) or v.rank < 3:
        raise Wrong(
            node.at, f"the layout of {v} must be '', or with three axes or more {' or '.join(map(repr, LAYOUTS))}"
        )
    return layout


def _made(node: Node, what: str, kinds: Mapping[str, type]) -> Any:
    """An object of plain data, such as ``SGD(0.1)``."""
    if node.kind != "call" or node.value not in kinds:
        near = close_to(str(node.value), kinds)
        hint = f"did you mean {near}(...)?" if near else f"one of {', '.join(kinds)}, with its settings in parentheses"
        raise Wrong(node.at, f"{what}: {hint}")
    kind = kinds[node.value]
    wanted = [f for f in fields(kind) if f.name in PENALTIES.get(kind, (f.name,))]
    needed = [f.name for f in wanted if f.default is MISSING]
    by_place = [*needed, *(f.name for f in wanted if f.name not in needed and not f.kw_only)]
    if len(node.items) > len(by_place):
        raise Wrong(
            node.items[len(by_place)].at,
            f"{node.value} takes {', '.join(by_place) or 'nothing'} by position, and nothing more",
        )
    names = [f.name for f in wanted if f.name not in by_place[: len(node.items)]]
    found = dict(zip(by_place, node.items)) | _by_name(node.value, node.pairs, names)
    if missing := [name for name in needed if name not in found]:
        raise Wrong(node.at, f"{node.value}: {missing[0]} is missing")
    given = {
        name: _made(value, "schedule", SCHEDULES) if name == "schedule" and value.kind != "value" else literal(value)
        for name, value in found.items()
    }
    if kind is init.Function and given["name"] not in init.FUNCTIONS:
        raise Wrong(
            node.at,
            f"this process does not know the function {given['name']!r}: texts store its name only; register it with "
            "cv.init.function(...) before reading the text",
        )
    try:
        if kind is optim.Sampled:
            return _sampled(**given)
        return kind(*given.values()) if kind in PENALTIES else kind(**given)
    except CalcError as error:
        raise Wrong(node.at, str(error)) from None


def _sampled(factors: Any, every: Any = 1, **more: Any) -> optim.Sampled:
    """A schedule from its table of factors.  The text has these numbers, not the function."""
    factors = checks.items("Sampled: factors", factors, "a list of numbers, such as [1.0, 0.5],")
    if not factors:
        raise CalcError("Sampled: its list of factors is empty")
    every = checks.integer("Sampled: every", every, 1, optim.LARGEST_COUNT)
    return optim.Sampled(lambda k: factors[k // every], (len(factors) - 1) * every + 1, every, **more)


def _initial(node: Node, shape: tuple[Any, ...]) -> Any:
    is_array = node.kind in ("list", "value") or (node.kind == "call" and node.value in ("array", "base64"))
    return _array(node, shape) if is_array else _made(node, "init", INITIALIZERS)


def _array(node: Node, sizes: tuple[Any, ...], dtype: np.dtype | None = None) -> np.ndarray:
    """An array of a given shape from a number, lists, ``array(lists, dtype=...)`` or ``base64(bytes, dtype=...)``."""
    shape = checks.sizes("shape", sizes)
    given, at = dtype or np.dtype(np.float64), node.at
    packed = node.kind == "call" and node.value == "base64"
    if node.kind == "call":
        if node.value not in ("array", "base64") or len(node.items) != 1:
            raise Wrong(
                at, "numbers are wanted here: lists of them, array(lists, dtype=...) or base64('...', dtype=...)"
            )
        said = _by_name(node.value, node.pairs, ("dtype",))
        given = _dtype(said["dtype"]) if "dtype" in said else given
        node = node.items[0]
    if packed:
        return _unpacked(node, shape, given)
    numbers = _numbers(node, shape)
    kinds: Any = {"b": bool, "i": int, "u": int, "f": (int, float)}[given.kind]
    if wrong := [n for n in numbers if not isinstance(n, kinds) or isinstance(n, bool) != (given.kind == "b")]:
        raise Wrong(at, f"{wrong[0]!r} is not of type {given.name}")
    try:
        return np.array(numbers, given).reshape(shape)
    except (OverflowError, ValueError):
        raise Wrong(at, f"a number is beyond {given.name}") from None


def _dtype(node: Node) -> np.dtype:
    said = literal(node)
    try:
        if isinstance(said, str) and DTYPE.fullmatch(said):
            return np.dtype(said)
    except TypeError:  # no type of that size
        pass
    raise Wrong(node.at, f"dtype {checks.shown(said)} is not a type of numbers, such as 'float32'")


def _unpacked(node: Node, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    wanted = math.prod(shape) * dtype.itemsize
    try:
        data = base64.b64decode(node.value if node.kind == "text" else "", validate=True)
    except (binascii.Error, ValueError):
        raise Wrong(node.at, "the text is not base64, or incomplete") from None
    if len(data) != wanted:
        raise Wrong(node.at, f"shape {shape} of {dtype.name} needs {wanted} bytes, and the text has {len(data)}")
    if dtype.kind == "b" and not {*data} <= {0, 1}:
        raise Wrong(node.at, "a byte of a bool must be 0 or 1")
    return np.frombuffer(data, dtype).reshape(shape).copy()


def _numbers(node: Node, shape: Sequence[int]) -> Any:
    """The numbers in nested lists of a given shape, in order."""
    if not shape:
        if node.kind != "value" or node.value is None:
            raise Wrong(node.at, "a number is wanted here")
        return [node.value]
    if node.kind != "list" or len(node.items) != shape[0]:
        raise Wrong(node.at, f"a list of {shape[0]} is wanted here, as the shape says")
    return [n for item in node.items for n in _numbers(item, shape[1:])]


def _shape_of(node: Node) -> tuple[int, ...]:
    return (len(node.items), *_shape_of(node.items[0])) if node.kind == "list" and node.items else ()
