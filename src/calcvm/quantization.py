"""Quantized inference: a model's path predict with weights and values in int8, their ranges measured on data.

A value v is kept as an integer q of int8 with v = q*scale, one scale for each value and one for each output channel of weights
(Jacob et al., Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference, 2017; symmetric).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from calcvm import checks, compiler
from calcvm import functions as F
from calcvm.errors import CalcError
from calcvm.graph import CalcGraph, Operation, Path, TensorDescriptor, Variable, applied, apply
from calcvm.model import CalcHeap, Model
from calcvm.model.data import by_name
from calcvm.ops.quantized import CATEGORY, LEAST, MOST, SUMMANDS
from calcvm.ops.types import CELLS, FLOAT

PREDICT, FAKED = "predict", "fake_quantize"
NORM, STATISTICS = "batch_norm_inference", ("running_mean", "running_var", "scale", "shift")
RECTIFIERS = ("relu", "relu6")  # of relu6 the measured range ends at 6
BIAS = 2**29  # the most of a bias in int32
COARSE = 4  # times the scale that a value's range asks for: a row that needs more is computed in floats


def quantize(model: Model, data: Any) -> Model:
    """A model that predicts as another does, in int8: weights and values take a quarter of the memory, and sums are integers.

    Linear layers and convolutions are computed in int8, with the batch norm and the ReLU that follow them, and so are pooling and
    additions behind them.  Everything else is computed in floats as before.  Results have the same bits on every processor that
    computes the rest with the same bits.  The new model only predicts; the given one is unchanged.

    Parameters
    ----------
    model : a model of layers or of a graph (from a file it has no graph).
    data : samples as for `Model.predict`, without labels, some hundreds that are typical: the largest value of each result on them gets
        127, and what is beyond it later becomes that.

    Returns
    -------
    Model : ``predict`` (of arrays), ``evaluate``, ``save`` and ``export`` are as for the given one.

    Raises
    ------
    CalcError : the model has no graph or no path predict, the path keeps a state, or the data give a value that is not finite.

    Examples
    --------
    >>> X = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    >>> model = cv.Model(nn.Linear(8) >> nn.ReLU() >> nn.Linear(3), input_shape=(4,), optimizer="adam")
    >>> small = cv.quantize(model, X)
    >>> bool(abs(small.predict(X) - model.predict(X)).max() < 0.05)
    True
    """
    checks.one_of("quantize", model, Model, "a model")
    if model._source is None:
        raise CalcError("quantize: a model from a file has no graph: build it with cv.Model, and set its weights")
    graph = model._source[0]
    if PREDICT not in graph.paths:
        raise CalcError(f"quantize: the graph has no path {PREDICT!r}, but {', '.join(graph.paths)}")
    path = graph.paths[PREDICT]
    if any(op.spec.category == CATEGORY for op in path.operations):
        raise CalcError("quantize: the model is one of int8 already")
    rewritten = _Quantizer(path, model.get_weights(), _ranges(model, path, data)).run()
    out = _model_of(model, rewritten)
    out._source = rewritten, {}
    return out


def _ranges(model: Model, path: Path, data: Any) -> dict[Variable, float]:
    """The largest absolute value on the data of each float that the path's outputs are computed from."""
    values, needed = set(path.outputs), path.outputs
    while needed:
        makers = {v.producer for v in needed if v.producer is not None}
        needed = tuple({v for op in makers for v in (*op.inputs.values(), *op.outputs.values())} - values)
        values |= {*needed}
    floats = [v for v in values if v.type == FLOAT and v.kind in ("result", "placeholder")]
    keep = [v.name for v in floats if v.kind == "result"]
    twin = _model_of(model, path.graph, keep=keep)
    twin.set_weights(model.get_weights())
    given = by_name("X", twin.roles.inputs, data, twin.roles)
    ends = {name: twin.check(name, a, samples=True) for name, a in given.items() if name not in twin.roles.whole}
    found = dict.fromkeys(floats, 0.0)
    for start in range(0, max(ends.values(), default=1), model.batch_size):
        batch = {name: a[start : start + model.batch_size] if name in ends else a for name, a in given.items()}
        twin.run(batch)
        for v in floats:
            most = float(np.abs(twin[v.name]).max(initial=0.0))
            if not math.isfinite(most):
                raise CalcError(f"quantize: {v.name!r} is not finite on these data, so it has no range")
            found[v] = max(found[v], most)
    return found


def _model_of(model: Model, graph: CalcGraph, **options: Any) -> Model:
    """A new model of a graph, with the batch, type and device of another."""
    device = model.loaded.device.name
    program = compiler.compile(
        graph, batch_size=model.batch_size, dtype=model.program.dtype, device=device, workers=model.workers, **options
    )
    return CalcHeap(program.heap_bytes, device=device).create(program)


class _Quantizer:
    """A path written again.  floats, ints : its values in the new graph, as floats, and as int8 with their scales."""

    def __init__(self, path: Path, known: Mapping[str, np.ndarray], ranges: Mapping[Variable, float]):
        self.path, self.known, self.ranges = path, known, ranges
        self.graph = CalcGraph()
        self.floats: dict[Variable, Variable] = {}
        self.ints: dict[Variable, tuple[Variable, float]] = {}
        self.readers: dict[Variable, list[Operation]] = {}
        for op in path.operations:
            for v in dict.fromkeys(op.inputs.values()):
                self.readers.setdefault(v, []).append(op)

    def run(self) -> CalcGraph:
        folded: set[str] = set()  # operators that are part of the row before them, by name
        with self.graph.path(PREDICT, adopt=False) as path:
            for op in self.path.operations:
                if op.name not in folded:
                    folded |= self.rewritten(op)
            path.output = tuple(map(self.float_of, self.path.outputs))
        return self.graph

    # ---------------------------------------------------------------- values
    def float_of(self, v: Variable) -> Variable:
        """A value of the path in the new graph, as it was."""
        if v not in self.floats:
            if v in self.ints:
                x, scale = self.ints[v]
                self.floats[v] = apply("mul", F.cast(x, None), scale, out=v.name)
            elif v.kind == "placeholder":
                form: Any = TensorDescriptor(v.laid).generic
                self.floats[v] = self.graph.placeholder(v.name, form, v.type, channels_last=bool(v.layout))
            else:
                self.floats[v] = self.graph.constant(v.name, self.number_of(v), v.type)
        return self.floats[v]

    def int_of(self, v: Variable) -> tuple[Variable, float]:
        """The same as int8, and its scale."""
        if v not in self.ints:
            self.ints[v] = self.rounded(v, self.scale_of(v), v)
        return self.ints[v]

    def rounded(self, v: Variable, scale: float, y: Variable) -> tuple[Variable, float]:
        """A float as int8 of a scale, in the place of y."""
        return apply("cast", F.round(self.float_of(v) * (1 / scale)), to="int8", out=f"{y.name}.int8"), scale

    def scale_of(self, v: Variable) -> float:
        """The scale of a value: that of the `fake_quantize` behind it, or by its range."""
        faked = self.follower(v, FAKED)
        return float(faked.attrs["scale"]) if faked is not None else (self.ranges[v] or 1.0) / MOST

    def number_of(self, v: Variable) -> np.ndarray:
        """The value of a parameter, a buffer or a constant."""
        if v.kind not in ("parameter", "buffer", "constant"):
            raise CalcError(f"quantize: {v.name!r} is a {v.kind}, which a model in int8 cannot have")
        return self.known[v.name] if v.kind != "constant" else v.init

    # ---------------------------------------------------------------- operators
    def rewritten(self, op: Operation) -> set[str]:
        """Write an operator, in int8 if it has such a row; the names of those behind it that have become part of it."""
        y, name = next(iter(op.outputs.values())), op.spec.name
        x = next(iter(op.inputs.values()), y)
        if name == "transpose" and x.shape == y.shape and x.layout != y.layout:  # the new graph chooses layouts itself
            if x in self.ints:
                self.ints[y] = self.ints[x]
            else:
                self.floats[y] = self.float_of(x)
            return set()
        if not op.inputs or y not in self.ranges:  # such as losses
            return self.kept(op)
        known = all(v in self.ints for v in op.inputs.values())
        if name in ("linear", "conv") and is_known(op, "wt", "b") and fits(op):
            return self.product(op)
        if x in self.ints and name == NORM and is_known(op, *STATISTICS) and len(x.shape) > 2:
            return self.normalized(op)
        if known and is_mean(op):
            return self.mean(op)
        if known and (name in RECTIFIERS or (name == "add" and len({v.shape for v in op.inputs.values()}) == 1)):
            return self.sum(op)
        if name == FAKED:
            return self.faked(op)
        if known and name == "max_pool":
            self.ints[y] = apply("max_pool_int8", self.ints[x][0], **op.attrs), self.ints[x][1]
        elif known and len(op.inputs) == 1 and {*op.spec.types.values()} == {CELLS}:  # moved as it is
            self.ints[y] = applied(op.spec, self.ints[x][0], **op.attrs_as_seen), self.ints[x][1]
        else:
            return self.kept(op)
        return set()

    def kept(self, op: Operation) -> set[str]:
        """Write an operator as it is, in floats."""
        inputs = [self.float_of(op.inputs[slot]) if slot in op.inputs else None for slot in op.spec.inputs]
        made = applied(op.spec, *inputs, out=next(iter(op.outputs.values())).name, **op.attrs_as_seen).producer
        assert made is not None
        self.floats |= dict(zip(op.outputs.values(), made.outputs.values()))
        return set()

    def follower(self, v: Variable, *names: str) -> Operation | None:
        """The operator that alone reads a value, if it is one of these."""
        readers = self.readers.get(v, [])
        alone = len(readers) == 1 and v not in self.path.outputs and readers[0].spec.name in names
        return readers[0] if alone else None

    def rectified(self, op: Operation) -> tuple[Operation, int, set[str]]:
        """The ReLU that follows an operator, or the operator; the least result in int8; the names of what has been folded."""
        after = self.follower(next(iter(op.outputs.values())), *RECTIFIERS)
        return (after, 0, {after.name}) if after is not None else (op, LEAST, set())

    def product(self, op: Operation) -> set[str]:
        """A linear layer or a convolution, with the batch norm and the ReLU that follow."""
        linear, last, folded = op.spec.name == "linear", op, set()
        weights = np.asarray(self.number_of(op.inputs["wt"]), np.float64)
        weights = weights.T if linear else np.moveaxis(weights, 1, -1)  # (F, *window, C)
        bias = np.zeros(len(weights))
        if "b" in op.inputs:
            bias += self.number_of(op.inputs["b"])
        norm = self.follower(op.outputs["y"], NORM)
        if norm is not None and is_known(norm, *STATISTICS):
            factor, offset = self.normalization(norm)
            weights, bias = weights * factor.reshape(-1, *[1] * (weights.ndim - 1)), bias * factor + offset
            last, folded = norm, {norm.name}
        last, lo, more = self.rectified(last)
        attrs = {} if linear else {k: op.attrs[k] for k in ("stride", "padding", "dilation", "groups")}
        return self.written(op, f"{op.spec.name}_int8", weights, bias, last, lo, attrs, folded | more)

    def written(
        self, op: Operation, row: str, weights: Any, bias: Any, last: Operation, lo: int, attrs: Any, folded: set[str]
    ) -> set[str]:
        """Write a product with float weights (F, ..., C), and all up to the operator ``last`` with it; the names of what is folded.

        `packed` takes quotients below 1/4.  If the result's scale would be much too coarse for that, the operator is kept.
        """
        v = op.inputs["x"]
        of_x = self.ints[v][1] if v in self.ints else self.scale_of(v)
        y = next(iter(last.outputs.values()))
        most = np.abs(weights).reshape(len(weights), -1).max(axis=1, initial=0.0)
        most[most == 0] = most[most > 0].min(initial=np.inf if most.any() else 1.0)
        of_w = np.maximum(most / MOST, np.abs(bias) / (of_x * BIAS))
        of_y = max(self.scale_of(y), 4.0001 * of_x * float(of_w.max()))
        if of_y > COARSE * self.scale_of(y):
            return self.kept(op)
        x, _ = self.int_of(v)
        units = of_w.reshape(-1, *[1] * (weights.ndim - 1))
        numbers = {
            "weight": (np.rint(weights / units), "int8"),
            "bias": (np.rint(bias / (of_x * of_w)), "int32"),
            "scale": ([packed(of_x * w / of_y) for w in of_w], "int32"),
        }
        held = [self.graph.constant(f"{y.name}.{k}", np.asarray(v), t) for k, (v, t) in numbers.items()]
        self.ints[y] = apply(row, x, *held, lo=lo, out=f"{y.name}.int8", **attrs), of_y
        return folded

    def normalization(self, op: Operation) -> tuple[np.ndarray, np.ndarray]:
        """A batch norm as a factor and an offset of each channel."""
        given = {s: np.asarray(self.number_of(v), np.float64) for s, v in op.inputs.items() if s != "x"}
        factor = given.get("scale", 1.0) / np.sqrt(given["running_var"] + op.attrs["eps"])
        return factor, given.get("shift", 0.0) - given["running_mean"] * factor

    def normalized(self, op: Operation) -> set[str]:
        """A batch norm of images that follows no product, as a convolution of each channel with one weight."""
        factor, offset = self.normalization(op)
        last, lo, folded = self.rectified(op)
        weights = factor.reshape(-1, *[1] * (len(op.inputs["x"].shape) - 1))
        return self.written(op, "conv_int8", weights, offset, last, lo, {"groups": len(factor)}, folded)

    def mean(self, op: Operation) -> set[str]:
        """The mean of windows, as a convolution of each channel with equal weights."""
        _, channels, *sizes = (s.b for s in op.inputs["x"].shape)
        if op.spec.name == "avg_pool":
            window, attrs = op.attrs["kernel"], {k: op.attrs[k] for k in ("stride", "padding")}
            attrs["stride"] = attrs["stride"] or window
        else:
            window, attrs = sizes, {}
        weights = np.full((channels, *window, 1), 1 / math.prod(window))
        attrs["groups"] = channels
        return self.written(op, "conv_int8", weights, np.zeros(channels), op, LEAST, attrs, set())

    def faked(self, op: Operation) -> set[str]:
        """A `fake_quantize`: nothing, if what it reads has its scale; else the change of the scale."""
        x, y, scale = op.inputs["x"], op.outputs["y"], float(op.attrs["scale"])
        a, of_a = self.ints.get(x, (x, scale))
        if of_a > scale * 2**10:
            return self.kept(op)
        if of_a != scale:
            self.ints[y] = self.added(a, of_a, a, 0.0, scale, LEAST, y)
        else:
            self.ints[y] = self.ints[x] if x in self.ints else self.rounded(x, scale, y)
        return set()

    def sum(self, op: Operation) -> set[str]:
        """The sum of two values, with the ReLU that follows; or the ReLU of one, as the sum with nothing."""
        values = [self.ints[v] for v in op.inputs.values()]
        (a, of_a), (b, of_b) = values if len(values) == 2 else (values[0], (values[0][0], 0.0))
        last, lo, folded = self.rectified(op) if op.spec.name == "add" else (op, 0, set())
        y = next(iter(last.outputs.values()))
        of_y = max(self.scale_of(y), max(of_a, of_b) / 2**10)
        self.ints[y] = self.added(a, of_a, b, of_b, of_y, lo, y)
        return folded

    def added(
        self, a: Variable, of_a: float, b: Variable, of_b: float, of_y: float, lo: int, y: Variable
    ) -> tuple[Variable, float]:
        """The row of a sum, with its scale."""
        shift = 20 - max(0, math.ceil(math.log2(max(of_a, of_b) / of_y)))
        factors = {f"factor_{k}": round(of / of_y * 2 ** (shift + 1)) for k, of in (("a", of_a), ("b", of_b))}
        return apply("add_int8", a, b, shift=shift, lo=lo, out=f"{y.name}.int8", **factors), of_y


def is_known(op: Operation, *slots: str) -> bool:
    """Whether these inputs are numbers when the network is quantized."""
    return all(op.inputs[s].kind in ("parameter", "buffer", "constant") for s in slots if s in op.inputs)


def fits(op: Operation) -> bool:
    """Whether sums fit int32, and the padding of a convolution is within its window."""
    shape = [s.b for s in op.inputs["wt"].shape]
    if op.spec.name == "linear":
        return shape[0] <= SUMMANDS
    within = all(p < (k - 1) * d + 1 for p, k, d in zip(op.attrs["padding"], shape[2:] * 2, op.attrs["dilation"] * 2))
    return within and math.prod(shape[1:]) <= SUMMANDS


def is_mean(op: Operation) -> bool:
    """Whether an operator is the mean of windows that have all their elements, counted with their padding."""
    if op.spec.name == "avg_pool":
        return not op.attrs["ceil_mode"] and (op.attrs["count_include_pad"] or not any(op.attrs["padding"] or ()))
    return op.spec.name == "global_avg_pool" or (op.spec.name == "adaptive_avg_pool" and {*op.attrs["sizes"]} == {1})


def packed(quotient: float) -> int:
    """A number below 1/4 as the factor and the shift of `calcvm.ops.quantized`, in one integer."""
    shift = min(max(-math.frexp(quotient)[1] - 2, 0), 31)
    return min(round(quotient * 2.0 ** (17 + shift)), 2**15 - 1) | shift << 15
