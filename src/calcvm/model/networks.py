"""The graph of a network of layers: its loss, with sample weights if requested, and its metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict

from calcvm import checks, hints, nn
from calcvm import functions as F
from calcvm.errors import CalcError, ShapeError, warn
from calcvm.graph import CalcGraph, Operation, Variable, apply, ask, check_scores
from calcvm.model.roles import LEARN, LENGTHS, PREDICT, STREAM, TRAINED, WEIGHT
from calcvm.ops.dims import numel
from calcvm.optim import Optimizer, optimizer_of

if TYPE_CHECKING:
    from typing_extensions import Required

IGNORED = -100  # the label of steps past the length of their sequence
SOFTMAX, BINARY = "softmax_cross_entropy", "binary_cross_entropy"
LOSS_WANTED = "a function of (output, target) that returns a variable of one element"
TERMS_WANTED = "with sample_weight a function of (output, target) that returns a variable with one term per sample"


def _labels_or_probabilities(x: Variable, t: Variable) -> Variable:
    """For each row, the cross entropy of softmax(x) against labels or probabilities."""
    axis = F.class_axis(x)
    log_p = F.log_softmax(x, axis)
    if t.shape == x.shape:
        return -F.sum(_without_part(t, t * log_p), axis=axis)  # a class with probability 0 may have the score -inf
    log_p = F.channels_last(log_p) if axis == 1 else log_p
    return -F.pick(log_p, t if t.rank < x.rank else F.reshape(t, log_p.descriptor.generic[:-1]))


def _huber(x: Variable, t: Variable, delta: float = 1.0) -> Variable:
    far = F.abs(x - t)
    near = apply("minimum", far, delta)
    return near * (far - 0.5 * near)


LOSSES: dict[str, Callable[..., Variable]] = {
    SOFTMAX: F.softmax_cross_entropy,
    BINARY: F.binary_cross_entropy,
    "mse": F.mse,
    "mae": F.mae,
    "huber": F.huber,
}
# The terms whose mean is the loss, before weighting.
TERMS: dict[str, Callable[..., Variable]] = {
    SOFTMAX: _labels_or_probabilities,
    BINARY: lambda x, t: apply("binary_cross_entropy_term", x, t),
    "mse": lambda x, t: F.square(x - t),
    "mae": lambda x, t: apply("mae_term", x, t),
    "huber": _huber,
}


def _accuracy(x: Variable, t: Variable, loss: Any, ignore_index: int | None) -> Variable:
    """Fraction of correct classes.  One output is compared with the loss's threshold; of several, the largest score counts."""
    if not isinstance(loss, str):
        loss = next((op.spec.name for op in x.graph.active.operations if _judges(op, x)), "")
    axis = next((axis for op in x.graph.active.operations if (axis := _axis_of(op, x))), None)
    one = x.rank < 2 or x.shape[F.class_axis(x, axis)] == 1
    if loss != BINARY and not one:
        return F.accuracy(x, t, axis, ignore_index)
    if loss not in THRESHOLDS:
        raise CalcError(
            f"metric 'accuracy' of one output {x}: a loss function does not define the threshold of class 1: use the loss "
            "binary_cross_entropy on logits, one output per class, or a function of (output, target) as the metric"
        )
    return _mean(F.cast(F.equal(x > THRESHOLDS[loss], t > 0.5), None), x)


def _mean(terms: Variable, x: Variable) -> Variable:
    """The mean of the terms of an output x; of a sequence over the steps that are there, and 0 if there are none."""
    if x.lengths is None:
        return F.mean(terms)
    there = F.steps_there(x, terms)
    return F.mean(apply("where", there, terms, 0.0)) / F.share_of(there)


def _axis_of(op: Operation, x: Variable) -> int | None:
    """The axis of x, 1 or -1, over which an operator is the cross entropy; None: it is none of x."""
    if op.spec.name != SOFTMAX:
        return None
    logits = op.inputs[op.spec.inputs[0]]
    turned = logits is not x and logits.producer is not None and logits.producer.spec.name == "channels_last"
    source = logits.source
    if source is not x.source and source.producer is not None:  # a copy in another storage order
        source = source.producer.inputs.get("x", source).source
    return (1 if turned else -1) if source is x.source else None


def _judges(op: Operation, x: Variable) -> bool:
    """Whether an operator is a loss of x."""
    return op.spec.category == "loss" and op.inputs[op.spec.inputs[0]].source is x.source


# Thresholds by loss: an output above it means class 1.
THRESHOLDS = {BINARY: 0.0, "mse": 0.5, "mae": 0.5, "huber": 0.5, "log_cosh": 0.5}


OF_STEPS: dict[str, Callable[..., Variable]] = {  # metrics of sequences with lengths
    **{name: lambda x, t, of=name: _mean(TERMS[of](x, t), x) for name in ("mse", "mae", "huber")},
    "rmse": lambda x, t: F.sqrt(_mean(TERMS["mse"](x, t), x)),
}
METRICS: dict[str, Callable[..., Variable]] = {
    "accuracy": F.accuracy,
    "mse": F.mse,
    "mae": F.mae,
    "huber": F.huber,
    "rmse": F.rmse,
}


class GraphChoices(TypedDict, total=False):
    """The options of `build_graph` that have defaults."""

    loss: str | Callable[..., Any]
    target_shape: tuple[int, ...] | None
    preprocess: nn.Layer | None
    metrics: Iterable[str | Callable[..., Any]] | None
    sample_weight: bool
    rates: Mapping[str, float] | None
    input_dtype: Any
    target_dtype: Any
    channels_last: bool
    train_metrics: bool
    ignore_index: int | None
    lengths: bool
    stream: bool


class GraphOptions(GraphChoices, total=False):
    """The options of `build_graph`."""

    input_shape: Required[tuple[int, ...]]
    optimizer: Required[Optimizer | str | type[Optimizer]]


def build_graph(
    net: nn.Layer | Iterable[nn.Layer],
    input_shape: tuple[int, ...],
    loss: Any,
    optimizer: Optimizer | str,
    target_shape: tuple[int, ...] | None = None,
    preprocess: nn.Layer | None = None,
    metrics: Iterable[Any] | None = None,
    sample_weight: bool = False,
    rates: Mapping[str, float] | None = None,
    input_dtype: Any = None,
    target_dtype: Any = None,
    channels_last: bool = False,
    train_metrics: bool = False,
    ignore_index: int | None = None,
    lengths: bool = False,
    stream: bool = False,
) -> CalcGraph:
    """The graph of a `Model`: paths preprocess (if given), learn, predict (without dropout and augmentation), stream (if wanted).

    The parameters are those of `Model`.  Random layers of ``preprocess``, and those after them, are part of learn and predict.

    Examples
    --------
    >>> graph = cv.build_graph(nn.Linear(2), (4,), "mse", cv.SGD(0.1))
    >>> [*graph.paths], cv.plan(graph, memory="64 KiB").batch_size > 100
    (['learn', 'predict'], True)
    """
    loss_fn = LOSSES.get(loss) if isinstance(loss, str) else loss
    if not callable(loss_fn) or isinstance(loss_fn, (type, nn.Layer)):
        raise CalcError(
            f"loss {checks.shown(loss)} is unknown{hints.meant(loss, LOSSES)}; take one of {', '.join(LOSSES)} or a function, such as "
            "cv.log_cosh"
        )
    input_shape = checks.sizes("input_shape, the shape of one sample,", input_shape)
    if target_shape is not None:
        target_shape = checks.sizes("target_shape, the shape of one target,", target_shape)
    sample_weight, train_metrics = (
        checks.flag("sample_weight", sample_weight),
        checks.flag("train_metrics", train_metrics),
    )
    if ignore_index is not None and loss != SOFTMAX:
        raise CalcError(
            f"ignore_index needs the loss {SOFTMAX!r} with labels: a loss function passes it to "
            "cv.softmax_cross_entropy, and a metric function to cv.accuracy"
        )
    lengths, stream = checks.flag("lengths", lengths), checks.flag("stream", stream)
    if (lengths or stream) and not input_shape:
        raise ShapeError(f"input_shape {input_shape}: a sequence has a shape (steps, ...), such as (50, 16)")
    judges = _metrics(loss, metrics, ignore_index)
    optimizer = optimizer_of(optimizer)
    network = nn.Sequential(net)
    before = [] if preprocess is None else [*nn.Sequential(preprocess)]
    shared = next((i for i, layer in enumerate(before) if layer.random), len(before))
    drawn = nn.Sequential(*before[shared:])
    g = CalcGraph()

    def loss_of(name: str, y: Variable, target: Variable, weight: Variable | None = None) -> Variable:
        if y.lengths is not None and isinstance(loss, str) and (loss != SOFTMAX or target.rank == y.rank):
            terms = TERMS[loss](y, target)
            return _mean(terms if weight is None else _weighted(terms, weight), y).rename(name)
        if weight is not None or (sample_weight and not isinstance(loss, str)):
            share = None
            if weight is not None and isinstance(loss, str):
                y = _without_part(_as(y, weight), y)
                if ignore_index is not None:
                    y, target, counts = F.counting(SOFTMAX, y, target, None, ignore_index, 0)
                    share = F.share_of(counts)
            terms = checks.one_of(
                "loss",
                ask("loss", TERMS[loss] if isinstance(loss, str) else loss_fn, y, target),
                Variable,
                TERMS_WANTED,
            )
            if not terms.rank:
                raise ShapeError(f"loss: {TERMS_WANTED} is wanted, not {terms}")
            mean = F.mean(terms if weight is None else _weighted(terms, weight))
            return (mean if share is None else mean / share).rename(name)
        options = {} if ignore_index is None else {"ignore_index": ignore_index}
        return checks.one_of("loss", ask("loss", loss_fn, y, target, **options), Variable, LOSS_WANTED).rename(name)

    def judge(output: Variable, target: Variable, prefix: str) -> None:
        for name, metric in judges.items():
            what = f"metric {name!r}"
            metric = metric if output.lengths is None else OF_STEPS.get(name, metric)
            figure = checks.one_of(what, ask(what, metric, output, target), Variable, LOSS_WANTED)
            if numel(figure.shape) != 1:
                raise ShapeError(
                    f"metric {name!r}: {LOSS_WANTED} is wanted, not {figure}: reduce it, for example by mean"
                )
            figure.rename(prefix + name)

    def labelled(y: Variable, target: Variable, name: str) -> Variable:
        """The target, where labels of steps past the lengths are ignored."""
        if y.lengths is None or ignore_index is None or target.rank == y.rank:
            return target
        return F.where(F.steps_there(y, target), target, ignore_index).rename(name)

    if input_dtype is None:
        input_dtype = next((layer.takes for layer in (*before, *network)), None)
    x = g.placeholder("input", (None, *input_shape), input_dtype, channels_last)
    x.lengths = g.placeholder(LENGTHS, (None,), "int64") if lengths else None
    if shared:
        with g.path("preprocess", adopt=False):
            x = nn.Sequential(*before[:shared]).build(x, "preprocess.", training=False)
        _check_learns_nothing(g.variables.values())

    def result(training: bool) -> Variable:
        known = {*g.variables}
        data = drawn.build(x, "augment.", training)
        _check_learns_nothing(v for name, v in g.variables.items() if name not in known)
        return network.build(data, training=training)

    turned = (
        ""
        if channels_last or isinstance(next(iter(network), None), nn.layers.Complete) or not _seems_turned(input_shape)
        else (
            f"input_shape {input_shape} has {input_shape[0]} channels, {input_shape[1]} by {input_shape[2]}: if the images' "
            "channels are last, give channels_last=True, or move them first, X.transpose(0, 3, 1, 2)"
        )
    )
    with g.path(LEARN, backward=True, adopt=False) as learn:
        try:
            y = result(training=True)
        except ShapeError as error:
            if not turned:
                raise
            raise ShapeError(f"{error}; {turned}") from None
        if sample_weight and isinstance(loss, str):  # the weighted terms use other operators
            check_scores(loss, y)
        if target_shape is None:
            sizes = [s.b for s in y.shape]
            if loss == SOFTMAX and len(sizes) > 1:
                del sizes[F.class_axis(y)]
            target_shape = tuple(sizes[1:])
        target = g.placeholder("target", (None, *target_shape), target_dtype)
        if lengths and y.lengths is not None and loss == SOFTMAX and ignore_index is None and target.rank < y.rank:
            ignore_index = IGNORED
            judges = _metrics(loss, metrics, ignore_index)
        wanted = labelled(y, target, "target.there")
        weight = g.placeholder(WEIGHT, (None,)) if sample_weight else None
        descended = loss_of("loss", y, wanted, weight)
        if train_metrics:
            judge(y, wanted, TRAINED)
        learn.minimize(descended, optimizer, output=y, rates=rates)
    if lengths and all(g.variables[LENGTHS] not in op.inputs.values() for op in learn.operations):
        raise CalcError(
            "lengths=True: no layer reads the lengths, and the output has no steps that the loss counts: leave lengths out, and give "
            "padded sequences, cv.pad_sequences(X, steps)[0]"
        )
    with g.path(PREDICT, adopt=False) as predict:
        predict.output = output = result(training=False).rename("output")
        target = labelled(output, target, "predict.target.there")
        loss_of("predict.loss", output, target)
        judge(output, target, "")
    if stream:
        with g.path(STREAM, adopt=False) as steps:
            step = g.placeholder("step", (None, *input_shape[1:]), input_dtype, channels_last)
            step = nn.Sequential(*before).build(step, "augment.", training=False)
            steps.output = network.build(step, training=False).rename("stream.output")
        if not steps.carries:
            raise CalcError("stream=True: no layer of the network keeps a state from step to step, such as nn.LSTM")
    if turned and any(op.spec.name == "conv" for op in predict.operations):
        warn(turned)
    return g


def _seems_turned(shape: tuple[int, ...]) -> bool:
    """Whether the shape of a sample looks like a square image with its channels last."""
    return len(shape) == 3 and shape[0] == shape[1] > 4 >= shape[2]


def _check_learns_nothing(preprocessing: Iterable[Variable]) -> None:
    for v in preprocessing:
        if v.kind in ("parameter", "buffer"):
            raise CalcError(
                f"preprocess: {v} would be learnt: layers with parameters or statistics belong to the network"
            )


def _weighted(terms: Variable, weight: Variable) -> Variable:
    """The terms of each sample times its weight; exactly 0 for a weight of 0, whatever the terms are."""
    weight = _as(terms, weight)
    return _without_part(weight, terms * weight)


def _as(terms: Variable, weight: Variable) -> Variable:
    """The weight of each sample, reshaped to broadcast with its terms."""
    return F.reshape(weight, (None, *(1 for _ in terms.shape[1:]))) if terms.rank > 1 else weight


def _without_part(part: Variable, x: Variable) -> Variable:
    """x, with 0 where ``part`` is 0; x gets no gradient there."""
    return apply("where", apply("not_equal", part, 0.0), x, 0.0)


def _metrics(loss: Any, given: Any, ignore_index: int | None) -> dict[str, Callable[..., Variable]]:
    """Functions of (output, target) by name; the default is the accuracy, if the loss has classes."""
    if given is None:
        given = ["accuracy"] if loss == SOFTMAX else []
    wanted = f"a list of names ({', '.join(METRICS)}) or functions of (output, target)"
    found: dict[str, Callable[..., Variable]] = {}
    for metric in checks.items("metrics", given, wanted):
        if isinstance(metric, str) and metric in METRICS:
            accuracy = partial(_accuracy, loss=loss, ignore_index=ignore_index)
            name, function = metric, accuracy if metric == "accuracy" else METRICS[metric]
        elif callable(metric) and not isinstance(metric, (type, nn.Layer)) and hasattr(metric, "__name__"):
            name, function = metric.__name__.strip("<>"), metric
        else:
            raise CalcError(f"metric {checks.shown(metric)} is unknown{hints.meant(metric, METRICS)}; give {wanted}")
        if name in found or name == "loss":
            raise CalcError(
                f"two figures would be called {name!r}: give functions with different names (def, not lambda)"
            )
        found[name] = function
    return found
