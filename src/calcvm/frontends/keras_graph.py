"""The graph of a model of Keras as plain data."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from inspect import signature
from typing import Any

import numpy as np

from calcvm import checks
from calcvm.errors import CalcError, UnsupportedOperator
from calcvm.frontends.aten import GETITEM
from calcvm.frontends.imported import Imported, Node, Shape, Tensor, Value
from calcvm.frontends.keras import KERAS, LEFT_OUT, TRAINING

BUFFERS = ("moving_mean", "moving_variance")
# settings of a layer that are not read: the ends of their names, and names
ENDS = ("_initializer", "_regularizer", "_constraint")
OTHERS = ("dtype", "mask", "name", "seed", "trainable", "training")
INTEGERS = ("uint8", "int8", "int16", "int32", "int64", "uint16", "uint32")
PROBABILITIES = ("sigmoid", "softmax")
MASKS = ("attention_mask", "use_causal_mask")  # that have a counterpart


def imported(model: Any, input_shape: Any, logits: bool) -> Imported:
    """The network of a model; arguments as those of `from_keras`."""
    functional = _functional(model)
    if functional is None:
        raise UnsupportedOperator(
            f"from_keras: {type(model).__name__} has no graph of layers: only keras.Sequential with known inputs and models of "
            "keras.Model(inputs, outputs) have one; build a Sequential model first, model.build((None, 4)), and call a subclass's layers on "
            "keras.Input"
        )
    if missing := [*dict.fromkeys(_missing(functional, ""))]:
        raise UnsupportedOperator(f"from_keras: no counterpart of {', '.join(missing)}")
    reader = _Reader(model, logits)
    given = [reader.numbered() for _ in functional.inputs]
    results = reader.model(functional, given, "")
    if logits:
        reader.without_probabilities(results)
    used = {x for node in reader.nodes for x in _read(node)}
    inputs = _inputs(functional, input_shape, [_is_embedded(value, reader.nodes) for value in given])
    names = _names(functional, len(results))
    tensors = [t for t in reader.tensors.values() if t.value in used]
    left = "; ".join(dict.fromkeys(reader.left_out))
    return Imported(
        "from_keras", model.name, inputs, [0] * len(inputs), names, given, tensors, reader.nodes, results, left
    )


# ---------------------------------------------------------------- models
def _functional(x: Any) -> Any:
    """The functional model that a model is, or None."""
    found = getattr(x, "_functional", x)  # of a Sequential
    own = type(x).call.__qualname__ if hasattr(type(x), "call") else ""
    return found if hasattr(found, "_nodes_by_depth") and own in ("Functional.call", "Sequential.call") else None


def _steps(functional: Any) -> Iterator[Any]:
    """The calls of layers in an order in which they can be computed."""
    for depth in sorted(functional._nodes_by_depth, reverse=True):
        yield from (node for node in functional._nodes_by_depth[depth] if not node.is_input)


def _is_layer(x: Any) -> bool:
    return hasattr(x, "trainable_weights")


def _type(x: Any) -> str:
    """The name of a layer or function in the table."""
    return type(x).__name__ if _is_layer(x) else f"ops.{type(x).__name__.lower()}"


def _parts(x: Any) -> list[Any]:
    """The layers that a layer consists of, or itself."""
    name = type(x).__name__
    if name == "Bidirectional":
        return [x.forward_layer, x.backward_layer]
    if name == "TimeDistributed":
        return [x.layer]
    return [x]


def _missing(functional: Any, path: str) -> Iterator[str]:
    """What has no counterpart, with its names."""
    for node in _steps(functional):
        for x in _parts(node.operation):
            where = f"{path}{x.name}"
            if (inner := _functional(x)) is not None:
                yield from _missing(inner, f"{where}.")
            elif _cell(x) not in KERAS or not _is_keras(x):
                yield f"{type(x).__name__} ({where})"


def _is_keras(x: Any) -> bool:
    return type(x).__module__.partition(".")[0] == "keras"


def _cell(x: Any) -> str:
    """As `_type`; RNN of one of Keras's cells is that cell's layer."""
    cell = getattr(x, "cell", None)
    return type(cell).__name__.removesuffix("Cell") if _type(x) == "RNN" and _is_keras(cell) else _type(x)


def _values(x: Any) -> Iterator[Value]:
    """The values of a structure, in Keras's order."""
    if isinstance(x, Value):
        yield x
    elif isinstance(x, (dict, list)):
        for y in (x[k] for k in sorted(x)) if isinstance(x, dict) else x:
            yield from _values(y)


def _read(node: Node) -> set[Value]:
    """What a node reads."""
    return {*_values([node.args, node.options])}


# ---------------------------------------------------------------- inputs and outputs
def _inputs(functional: Any, input_shape: Any, embedded: Sequence[bool]) -> list[tuple[str, Shape, str | None]]:
    names = [x.name for x in functional.inputs]
    sizes = input_shape if isinstance(input_shape, Mapping) else dict.fromkeys(names[:1], input_shape)
    for name in sizes:
        checks.choice("from_keras: input_shape: a name", name, names)
    found = []
    for x, is_embedded in zip(functional.inputs, embedded):
        shape = [*x.shape[1:]]
        if sizes.get(x.name) is not None:
            given = checks.sizes("from_keras: input_shape", sizes[x.name], low=1)
            if len(given) != len(shape) or any(n not in (None, m) for n, m in zip(shape, given)):
                raise CalcError(f"from_keras: input_shape: the input {x.name!r} is {(None, *shape)}, without the batch")
            shape = [*given]
        if None in shape:
            raise CalcError(
                f"from_keras: the input {x.name!r} is {(None, *shape)}, and all sizes but the batch must be known: give "
                "input_shape=, the shape of a sample"
            )
        integer = is_embedded or str(x.dtype) in INTEGERS
        found.append((x.name, (None, *shape), "bool" if x.dtype == "bool" else "int64" if integer else None))
    return found


def _is_embedded(value: Value, nodes: Sequence[Node]) -> bool:
    """Whether embeddings alone read an input."""
    readers = [node for node in nodes if value in _read(node)]
    return bool(readers) and all(node.name == "Embedding" for node in readers)


def _names(functional: Any, outputs: int) -> list[str]:
    """Names of the outputs: the keys of a mapping, or those of their layers if they differ."""
    struct = functional._outputs_struct
    names = sorted(struct) if isinstance(struct, Mapping) else [*functional.output_names]
    return names if len({*names}) == outputs == len(names) else [f"y{k}" for k in range(outputs)]


# ---------------------------------------------------------------- layers
# layers that compute nothing in inference
MOVES = ("Dropout", "Flatten", "Identity", "Permute", "Reshape", "ops.reshape")


class _Reader:
    """Calls of layers as nodes."""

    def __init__(self, model: Any, logits: bool):
        self.count, self.nodes, self.left_out = 0, list[Node](), list[str]()
        self.tensors: dict[int, Tensor] = {}  # by the weight
        self.names: set[str] = set()
        self.trains = {id(w) for w in model.trainable_weights}

    def numbered(self) -> Value:
        self.count += 1
        return Value(self.count - 1)

    def model(self, functional: Any, given: Sequence[Any], path: str) -> list[Value]:
        """The outputs of a model of these inputs."""
        known = {id(x): value for x, value in zip(functional.inputs, given)}
        for node in _steps(functional):
            args, options = self.plain([*node.arguments.args], known), self.plain({**node.arguments.kwargs}, known)
            made = self.call(node.operation, args, options, path, len(node.outputs))
            known.update((id(x), value) for x, value in zip(node.outputs, made))
        return [known[id(x)] for x in functional.outputs]

    def call(self, x: Any, args: list[Any], options: dict[str, Any], path: str, outputs: int) -> list[Value]:
        """The outputs of a call of a layer."""
        where = f"{path}.{x.name}" if path else x.name
        if (inner := _functional(x)) is not None:
            return self.model(inner, [*_values(args)], where)
        name = type(x).__name__
        if any(k.endswith("mask") and k not in MASKS and v is not None for k, v in options.items()):
            raise UnsupportedOperator(
                f"from_keras: {name} in {where}: it is called with a mask, which has no counterpart"
            )
        if name == "Bidirectional":
            return self.both(x, args, options, where, outputs)
        if name == "TimeDistributed":
            apart = self.add("steps.apart", where, args[:1], {}, _normalizes(x.layer))
            made = self.call(x.layer, [apart], options, where, 1)
            return [self.add("steps.together", where, [*made, args[0]], {})]
        return self.layer(x, args, options, where, outputs)

    def layer(self, x: Any, args: list[Any], options: dict[str, Any], where: str, outputs: int = 1) -> list[Value]:
        """The outputs of a layer that the table has."""
        self.note(x, where)
        given = {k: v for k, v in (self.settings(x, where) | options).items() if k not in OTHERS}
        name = type(x).__name__
        trains = name in TRAINING and (name != "BatchNormalization" or x.trainable)
        return self.several(_cell(x), where, args, given, trains, outputs)

    def both(self, x: Any, args: list[Any], options: dict[str, Any], where: str, outputs: int) -> list[Value]:
        """A layer in both directions."""
        start = options.get("initial_state", args[1] if len(args) > 1 else None) or []
        half, sides = len(start) // 2, list[Value]()
        for layer, states in ((x.forward_layer, start[:half]), (x.backward_layer, start[half:])):
            own = {**options, "in_order": True, "initial_state": states or None}
            sides += self.layer(layer, args[:1], own, f"{where}.{layer.name}")
        return self.several("Bidirectional", where, sides, {"merge_mode": x.merge_mode}, False, outputs)

    # ------------------------------------------------------------ nodes
    def add(self, name: str, path: str, args: list[Any], options: dict[str, Any], trains: bool = False) -> Value:
        node = Node(self.numbered(), name, path, "float32", args, options, trains)
        self.nodes.append(node)
        return node.value

    def several(self, name: str, path: str, args: list[Any], options: dict[str, Any], trains: bool, outputs: int) -> list[Value]:  # fmt: skip
        value = self.add(name, path, args, options, trains)
        return [value] if outputs == 1 else [self.add(GETITEM, path, [value, k], {}) for k in range(outputs)]

    def without_probabilities(self, results: Sequence[Value]) -> None:
        """Leave out the softmax or sigmoid that gives an output."""
        for k, node in enumerate(self.nodes):
            name, options = node.name, {**node.options}
            if name in ("Softmax", "ops.softmax", "ops.sigmoid"):
                name = "Identity"
            elif options.get("activation") in PROBABILITIES and "recurrent_kernel" not in options:
                options["activation"] = None
            else:
                continue
            if node.value not in results:
                if any(self._moved(x) == node.value for x in results):
                    raise CalcError(
                        f"from_keras: logits=True: {node.path} is not the last layer: move it, or leave it out of the model"
                    )
                continue
            if options.get("axis", -1) == 0:
                raise CalcError(f"from_keras: logits=True: {node.path} is over the batch")
            if any(node.value in _read(other) for other in self.nodes):
                raise CalcError(f"from_keras: logits=True: a layer reads the probabilities of {node.path}")
            self.nodes[k] = Node(node.value, name, node.path, node.type, node.args, options, node.trains)

    def _moved(self, x: Value) -> Value:
        """What an output is made of, by layers that compute nothing in inference."""
        node = next((node for node in self.nodes if node.value == x), None)
        return self._moved(node.args[0]) if node is not None and node.name in MOVES else x

    # ------------------------------------------------------------ what layers have
    def settings(self, x: Any, where: str) -> dict[str, Any]:
        """The weights and the configuration of a layer, as plain data."""
        if not _is_layer(x):
            return self.plain({k: v for k, v in vars(x).items() if not k.startswith("_") and not callable(v)}, {})
        config = {**x.get_config(), **(x.cell.get_config() if _type(x) == "RNN" else {})}
        kept = {k: _function(v) if "activation" in k else v for k, v in config.items() if not k.endswith(ENDS) and k not in OTHERS}  # fmt: skip
        kept = {k: v for k, v in self.plain(kept, {}).items() if not isinstance(v, dict)}
        if _type(x) == "Normalization":
            numbers = {k: np.asarray(_array(getattr(x, k)), np.float32) for k in ("mean", "variance")}
            return {**kept, **numbers}
        return {**kept, **self.weights(x, where)}

    def weights(self, x: Any, where: str) -> dict[str, Value]:
        """The weights of a layer by the ends of their paths, without the numbers that Keras adds."""
        paths = [re.sub(r"_\d+$", "", w.path).split("/") for w in x.weights]
        parts = 1 if len({path[-1] for path in paths}) == len(paths) else 2
        names = ["_".join(path[-parts:]) for path in paths]
        if unknown := [name for name in names if name not in signature(KERAS[_cell(x)]).parameters]:
            raise UnsupportedOperator(f"from_keras: {_type(x)} in {where}: no counterpart of its {', '.join(unknown)}")
        return {name: self.weight(w, where) for name, w in zip(names, x.weights)}

    def weight(self, w: Any, where: str) -> Value:
        if id(w) not in self.tensors:
            name = w.path if w.path not in self.names else f"{where.replace('.', '/')}/{w.name}"
            self.names.add(name)
            array, buffer = np.asarray(_array(w), np.float32), w.name in BUFFERS
            trains = id(w) in self.trains and not buffer
            self.tensors[id(w)] = Tensor(self.numbered(), name, array, buffer, False, trains)
        return self.tensors[id(w)].value

    def note(self, x: Any, where: str) -> None:
        """What a layer does in training alone, and not here."""
        name = type(x).__name__
        told = [name] if name in LEFT_OUT else []
        if name not in TRAINING and any(getattr(x, k, None) for k in ("dropout", "recurrent_dropout")):
            told.append("dropout inside")
        if _is_layer(x):
            parts = [x, *([x.cell] if hasattr(x, "cell") else [])]
            told += [
                kind
                for kind in ("regularizer", "constraint")
                if any(k.endswith(f"_{kind}") and v is not None for part in parts for k, v in vars(part).items())
            ]
        self.left_out += [f"{what} of {where}" for what in told]

    def plain(self, x: Any, known: Mapping[int, Any]) -> Any:
        """Arguments with values for tensors, and lists for tuples."""
        if id(x) in known:
            return known[id(x)]
        if isinstance(x, dict):
            return {k: self.plain(v, known) for k, v in x.items()}
        if isinstance(x, (list, tuple)):
            return [self.plain(y, known) for y in x]
        if isinstance(x, slice):
            return {"start": x.start, "stop": x.stop, "step": x.step}
        if not hasattr(x, "__array__"):
            return x
        array = _array(x)
        return array if array.ndim else array.item()


def _normalizes(x: Any) -> bool:
    """Whether a layer, or one inside it, takes statistics of a batch."""
    return any(type(layer).__name__ == "BatchNormalization" for layer in x._flatten_layers())


def _function(x: Any) -> Any:
    """An activation as its name, or a layer as [class, configuration]."""
    if not isinstance(x, Mapping):
        return x
    config = x.get("config")
    kept = {k: v for k, v in config.items() if k not in OTHERS} if isinstance(config, dict) else {}
    return [str(x.get("class_name", "custom")), kept]


def _array(x: Any) -> np.ndarray:
    """The numbers of a weight or tensor."""
    x = getattr(x, "value", x)
    if not hasattr(x, "detach"):
        return np.array(x)
    x = x.detach().cpu()
    return (x.float() if "float16" in str(x.dtype) else x).numpy().copy()
