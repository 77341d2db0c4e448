"""Losses and metrics: first a value per row, shared over rows, then one row that reduces them to a scalar.

Every loss is a mean over `count` values, so its backward divides by `count` again.  `count` is a separate word because
it depends on the batch.  ``t_l`` is the row's share of the sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from calcvm.formulas.declare import Formula, PairLoss
from calcvm.formulas.losses import PAIR_LOSSES
from calcvm.ops import parameters
from calcvm.ops.dims import Shape, affine, numel, show
from calcvm.ops.spec import (
    OPS,
    PLACES,
    ROWS_COLS,
    SIZE,
    VECTORS,
    Attr,
    Example,
    OpSpec,
    R,
    RowSpec,
    Shapes,
    W,
    Word,
    choice,
    dims,
    joined,
    operator,
    places,
    register,
    rows_cols,
)

COUNT = dims("count")
SEED = R("dloss", "1")


# ---------------------------------------------------------------- from rows to a scalar
def _final(name: str, out: str, synopsis: str) -> RowSpec:
    return RowSpec(
        name=name,
        synopsis=synopsis,
        words=dims("rows count"),
        operands=(R("t_l", "rows", "w0"), W(out, "1", "w0")),
        flops="rows",
    )


LOSS_MEAN = _final("loss_mean", "loss", "loss = sum[r<rows] t_l[r]/count")
MEAN = _final("metric_mean", "y", "y = sum[r<rows] t_l[r]/count")
ROOT_MEAN = _final("metric_root_mean", "y", "y = sqrt(sum[r<rows] t_l[r]/count)")


# ---------------------------------------------------------------- losses over pairs of equal shape
def _pair_shape(out: str) -> Any:
    def shape(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Shape]:
        x, t = shapes["x"], shapes["t"]
        if x != t:
            raise ValueError(f"prediction {show(x)} and target {show(t)} differ in shape")
        return {out: (), "t_l": joined(x)[:1]}

    return shape


def _pair_words(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Any]:
    return {**rows_cols(shapes["x"]), "count": numel(shapes["x"]), **attrs}


def spec_of(op: PairLoss) -> OpSpec:
    """The operator of a loss over pairs."""
    elems = {v: R(v, SIZE, "rows") for v in "xt"}
    words = parameters.words(op.params)
    for f in (op.term, *op.slopes.values()):
        if f.own:
            f.check()

    def bwd(v: str, f: Formula) -> RowSpec:
        return RowSpec(
            name=f.name,
            synopsis=lambda: f.with_places(
                "[r,c]", f"{f'{f.factor}*' * (f.factor != 1)}dloss/count*{{}}", f"d{v}[r<rows,c<cols]"
            ),
            words=ROWS_COLS + COUNT + words,
            operands=(SEED, *(elems[r] for r in f.reads), W(f"d{v}", SIZE, "rows")),
            in_place=tuple((f"d{v}", r) for r in f.reads),
            flops=lambda: f"{f.operations + 1 + (f.factor != 1)}*{SIZE}",
        )

    fwd = RowSpec(
        name=op.term.name,
        synopsis=lambda: op.term.with_places("[r,c]", "sum[c<cols] {}", "t_l[r<rows]"),
        words=ROWS_COLS + words,
        operands=(elems["x"], elems["t"], W("t_l", "rows", "rows")),
        flops=lambda: f"{op.term.operations + 1}*{SIZE}",
    )
    examples = ((None, 3), (None, 1), (None,), (None, 4, 5), (7, 17))
    return OpSpec(
        name=op.name,
        synopsis=lambda: op.term.with_places("[r,c]", "mean[r,c] {}", "loss"),
        category="loss",
        inputs=("x", "t"),
        outputs=("loss",),
        attrs=parameters.attributes(op.params),
        shape=_pair_shape("loss"),
        words=_pair_words,
        fwd=(fwd, LOSS_MEAN),
        bwd=tuple(bwd(v, f) for v, f in op.slopes.items()),
        differentiable=("x", "t"),
        examples=tuple(Example(shapes=(s, s)) for s in examples)
        + (Example(shapes=((None, 64), (None, 64)), batch=256, bench=True),),
        source=op.source,
    )


for _loss in PAIR_LOSSES.values():
    register(spec_of(_loss))
MSE = OPS["mse"]


# ---------------------------------------------------------------- softmax cross entropy
def _classes(x: Shape, t: Shape) -> bool:
    """Whether the target holds a probability for each class, rather than labels."""
    if not x:
        raise ValueError("scores need a last axis of classes")
    if t == x:
        return True
    if t in (x[:-1], x[:-1] + (affine(1),)):
        return False
    raise ValueError(
        f"target {show(t)} is neither labels {show(x[:-1])} nor probabilities {show(x)} for the scores {show(x)}"
    )


def _share(x: Shape, t: Shape) -> Shape:
    """The shape of the rows' shares of the sum."""
    _classes(x, t)
    return joined(x)[:-1][:1]


def _class_words(x: Shape, t: Shape) -> dict[str, Any]:
    return {**places(x), "dense": int(_classes(x, t)), "count": numel(x[:-1])}


CLASSES = (*PLACES, choice("dense", 2))
SMOOTHING = Word(name="smoothing", kind="float", lo=0, hi=1)
LABELS = "target[r,i,t<1 + dense*(N - 1)]"  # a label, or a probability for each class
SMOOTHED = (
    "q[r<rows,i<inner,j<N] = (1 - smoothing)*where(dense == 1, target[r, i, dense*j], where(j == target[r, i, 0], 1, 0)) "
    "+ smoothing/N"
)
TARGET = R("target", "rows*inner*(1 + dense*(N - 1))", "rows", type="index", below="N")

operator(
    name="softmax_cross_entropy",
    synopsis="loss = mean_r(-sum_j q[r,j]*log(softmax(logits)[r,j])), q = (1-s)*target + s/N",
    category="loss",
    inputs=("logits", "target"),
    outputs=("loss",),
    saved=("p",),
    attrs=(
        Attr(
            name="label_smoothing",
            default=0.0,
            check=lambda v: 0 <= v < 1,
            doc="weight s of the uniform target, 0 <= s < 1",
        ),
    ),
    shape=lambda shapes, attrs: {
        "loss": (),
        "p": shapes["logits"],
        "t_l": _share(shapes["logits"], shapes["target"]),
    },
    words=lambda shapes, attrs: {
        **_class_words(shapes["logits"], shapes["target"]),
        "smoothing": attrs["label_smoothing"],
    },
    fwd=(
        RowSpec(
            name="softmax_cross_entropy_fwd",
            synopsis="l[r<rows,i<inner] = logsumexp[j<N] logits[r,i,j]; p[r,i,j] = exp(logits[r,i,j] - l[r,i]); "
            f"{SMOOTHED}; t_l[r] = -sum[i,j] q[r,i,j]*(logits[r,i,j] - l[r,i])",
            declares=LABELS,
            words=(*CLASSES, SMOOTHING),
            operands=(
                R("logits", VECTORS, "rows"),
                TARGET,
                W("p", VECTORS, "rows", optional=True),
                W("t_l", "rows", "rows"),
            ),
            in_place=(("p", "logits"),),
            require=("N - 1",),
            flops="16*rows*inner*N",
        ),
        LOSS_MEAN,
    ),
    bwd=(
        RowSpec(
            name="softmax_cross_entropy_bwd",
            synopsis=f"{SMOOTHED}; dlogits[r,i,j] = dloss/count*(p[r,i,j]*(sum[k<N] q[r,i,k]) - q[r,i,j])",
            declares=LABELS,
            words=(*CLASSES, *COUNT, SMOOTHING),
            operands=(
                SEED,
                TARGET,
                R("p", VECTORS, "rows"),
                W("dlogits", VECTORS, "rows"),
            ),
            in_place=(("dlogits", "p"),),
            require=("N - 1",),
            flops="3*rows*inner*N",
        ),
    ),
    differentiable=("logits",),
    examples=(
        Example(shapes=((None, 3), (None,)), integer={"target": 3}),
        Example(shapes=((None, 37), (None,)), integer={"target": 37}, types={"index": "int64"}),
        Example(shapes=((None, 4, 6), (None, 4)), integer={"target": 6}, types={"index": "uint8"}),
        Example(shapes=((None, 10), (None,)), integer={"target": 10}, batch=32, bench=True),
        Example(shapes=((None, 10), (None, 1)), integer={"target": 10}, attrs={"label_smoothing": 0.1}),
        Example(shapes=((None, 37), (None,)), integer={"target": 37}, low=-30, high=30),
        Example(shapes=((None, 4, 6), (None, 4)), integer={"target": 6}, batch=3),
        Example(shapes=((None, 5), (None, 5)), low=0.1, high=1.0),
        Example(shapes=((None, 21), (None, 21)), low=0.1, high=1.0, attrs={"label_smoothing": 0.25}),
        Example(shapes=((None, 1), (None, 1)), low=0.1, high=1.0),
        Example(shapes=((7,), ()), integer={"target": 7}),
    ),
    source="Szegedy et al. 2016 (label smoothing); torch.nn.CrossEntropyLoss",
)


# ---------------------------------------------------------------- one element of each row
def _pick_shape(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Shape]:
    x, index = shapes["x"], shapes["index"]
    if not x or index != x[:-1]:
        hint = ""
        if x and x[0].constant and not (index and index[0].constant):
            hint = (
                ", x has the batch first as the index has; it does not take rows of a table for indexes (an embedding)"
            )
        elif index == x:
            hint = "; a Model's target is a label of each sample by target_shape=()"
        raise ValueError(
            f"index {show(index)} is not of the shape of x {show(x)} without its last axis: of each row it takes its own "
            f"element{hint}"
        )
    return {"y": index}


operator(
    name="pick",
    synopsis="y[r] = x[r, index[r]]",
    category="shape",
    inputs=("x", "index"),
    shape=_pick_shape,
    words=lambda shapes, attrs: places(shapes["x"]),
    fwd=(
        RowSpec(
            name="pick_fwd",
            synopsis="y[r<rows*inner] = x[r, index[r]]",
            declares="x[r,n<N]",
            words=PLACES,
            operands=(
                R("x", VECTORS, "rows"),
                R("index", "rows*inner", "rows", type="index", below="N"),
                W("y", "rows*inner", "rows"),
            ),
            require=("N - 1",),
        ),
    ),
    bwd=(
        RowSpec(
            name="pick_bwd",
            synopsis="dx[r<rows*inner,n<N] = where(n == index[r], dy[r], 0)",
            words=PLACES,
            operands=(
                R("index", "rows*inner", "rows", type="index", below="N"),
                R("dy", "rows*inner", "rows"),
                W("dx", VECTORS, "rows"),
            ),
            require=("N - 1",),
        ),
    ),
    differentiable=("x",),
    examples=(
        Example(shapes=((None, 3), (None,)), integer={"index": 3}),
        Example(shapes=((None, 3), (None,)), integer={"index": 3}, types={"index": "int32"}),
        Example(shapes=((None, 10), (None,)), integer={"index": 10}, batch=32, bench=True),
        Example(shapes=((None, 4, 6), (None, 4)), integer={"index": 6}, batch=3),
        Example(shapes=((None, 1), (None,)), integer={"index": 1}),
        Example(shapes=((7,), ()), integer={"index": 7}),
    ),
    source="MXNet's pick; torch.gather along the last axis",
)


# ---------------------------------------------------------------- metrics
operator(
    name="rmse",
    synopsis="y = sqrt(mean((x - t)^2))",
    category="metric",
    inputs=("x", "t"),
    shape=_pair_shape("y"),
    words=_pair_words,
    fwd=(MSE.fwd[0], ROOT_MEAN),
    examples=(Example(shapes=((None, 3), (None, 3))), Example(shapes=((None,), (None,)))),
)


operator(
    name="accuracy",
    synopsis="y = mean_r(argmax_j scores[r,j] == target[r])",
    category="metric",
    inputs=("scores", "target"),
    shape=lambda shapes, attrs: {"y": (), "t_l": _share(shapes["scores"], shapes["target"])},
    words=lambda shapes, attrs: _class_words(shapes["scores"], shapes["target"]),
    fwd=(
        RowSpec(
            name="accuracy_fwd",
            synopsis="target_class[r<rows,i<inner] = where(dense == 1, argmax[j<N] target[r, i, dense*j], target[r, i, 0]); "
            "t_l[r] = sum[i] where(argmax[j] scores[r,i,j] == target_class[r,i], 1, 0)",
            declares=LABELS,
            words=CLASSES,
            operands=(
                R("scores", VECTORS, "rows"),
                TARGET,
                W("t_l", "rows", "rows"),
            ),
            require=("N - 1",),
            flops="rows*inner*N",
        ),
        MEAN,
    ),
    examples=(
        Example(shapes=((None, 3), (None,)), integer={"target": 3}, batch=11),
        Example(shapes=((None, 3), (None,)), integer={"target": 3}, types={"index": "int64"}),
        Example(shapes=((None, 10), (None, 1)), integer={"target": 10}, batch=32),
        Example(shapes=((None, 5), (None, 5)), batch=9),
        Example(shapes=((None, 4, 3), (None, 4)), integer={"target": 3}),
    ),
)


# ---------------------------------------------------------------- facts about an operand's values
SOFTMAX, BINARY = "softmax_cross_entropy_fwd", "binary_cross_entropy_fwd"
SCORES = {SOFTMAX: "logits", BINARY: "x"}  # the operand holds scores of classes
PROBABILITIES = {BINARY: "t"}  # the operand is between 0 and 1
