"""Optimizers: update rows, the step counter with its schedule, clipping, penalties.

Hyperparameters are float64 values in the heap (``hyper``: the slots below), so one program serves every
learning rate.  A step runs, in this order:

1. ``zero`` at the end of a round; ``penalty`` adds regularizers to a final gradient;
2. ``clip_value`` clamps a gradient in place; or ``sumsq`` writes the norms of a gradient's rows into that gradient's slice
   of one array (roots, because squares may overflow), and ``clip_norm_scale`` reduces the array to the slot
   ``clip_scale``;
3. ``tick`` counts the step and computes everything that depends only on it;
4. one update row for each parameter; with its word ``clip`` it also applies ``clip_scale``, without a separate pass.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from calcvm.formulas.declare import Update
from calcvm.formulas.optimizers import HYPER_SLOTS, UPDATES
from calcvm.frozen import frozen
from calcvm.ops.dims import Shape, affine
from calcvm.ops.spec import (
    ROWS_COLS,
    SIZE,
    Attr,
    Example,
    Operand,
    OpSpec,
    R,
    RowSpec,
    Shapes,
    U,
    W,
    Word,
    choice,
    dims,
    leading,
    register,
    registered,
    rows_cols,
)

HYPER: dict[str, str] = {"name": "hyper", "elems": str(len(HYPER_SLOTS)), "type": "float64"}
# Slots that do not start at 0.
HYPER_START = {"beta1_t": 1.0, "beta2_t": 1.0, "gamma_t": 1.0, "clip_scale": 1.0, "inv_sqrt_correction2_t": 1.0}
STEP_ROW = "tick"  # counts an optimizer's steps
DECAY_ROW = "decay_scale"  # computes the hyperparameters of parameters without decay
SCHEDULES = ("constant", "step", "exponential", "cosine", "cosine_restarts")  # append-only: programs store the place


# ---------------------------------------------------------------- what users may set
@frozen
class Slot:
    """The values that a hyperparameter may have: between two bounds, whose inclusion ``ends`` states as in mathematics."""

    low: float = 0.0
    high: float = 1e300
    ends: str = "[]"
    whole: bool = False


SLOTS = {
    "learning_rate": Slot(),
    "beta1": Slot(high=1, ends="[)"),
    "beta2": Slot(high=1, ends="[)"),
    "eps": Slot(),
    "weight_decay": Slot(),
    "clip_value": Slot(ends="(]"),
    "clip_norm": Slot(ends="(]"),
    "step_size": Slot(low=1, whole=True),
    "gamma": Slot(),
    "total_steps": Slot(low=1, whole=True),
    "min_lr": Slot(),
    "warmup_steps": Slot(whole=True),
}
# Slots that each step computes from others, and what to set instead.
COMPUTED = {
    "lr_t": "learning_rate",
    "step_size_t": "learning_rate",
    "inv_sqrt_correction2_t": "beta2",
    "clip_scale": "clip_norm",
}
SCHEDULE_SLOTS = {
    "constant": (),
    "step": ("step_size", "gamma"),
    "exponential": ("gamma",),
    "cosine": ("total_steps", "min_lr"),
    "cosine_restarts": ("total_steps", "gamma", "min_lr"),
}


def slots_of(row: RowSpec, words: Mapping[str, Any]) -> dict[str, Slot]:
    """The user's slots that a row's results depend on: those in its equation."""
    if row.name == "tick":  # its powers of beta1 and beta2 count for the rows that name them
        schedule = SCHEDULES[words["schedule"]]
        slots = {name: SLOTS[name] for name in ("learning_rate", "warmup_steps", *SCHEDULE_SLOTS[schedule])}
        return slots | ({"gamma": Slot(low=1)} if schedule == "cosine_restarts" else {})
    slots = {name: SLOTS[name] for name in re.findall(r"\w+", row.synopsis) if name in SLOTS}
    return slots | ({"beta1": Slot()} if row.name in ("momentum", "nesterov", "rmsprop_momentum") else {})


CLIP = choice("clip", 2)


def _operator(
    name: str,
    synopsis: str | Callable[[], str],
    words: tuple[Word, ...],
    operands: tuple[Operand, ...],
    *,
    attrs: tuple[Attr, ...] = (),
    shape: Any = None,
    word_values: Any = None,
    examples: tuple[Example, ...],
    source: str = "",
    **row_has: Any,
) -> OpSpec:
    """One row as an operator: operands are inputs if read, outputs if written."""
    row = RowSpec(name=name, synopsis=synopsis, words=words, operands=operands, **row_has)

    def updated(shapes: Shapes, a: Mapping[str, Any]) -> dict[str, Shape]:
        return {o.name: shapes[o.name] for o in row.writes if o.name in shapes} | (shape(shapes, a) if shape else {})

    return OpSpec(
        name=name,
        synopsis=synopsis,
        category="optimizer",
        inputs=tuple(o.name for o in row.reads),
        outputs=tuple(o.name for o in row.writes),
        attrs=attrs,
        shape=updated,
        words=word_values or (lambda shapes, attrs: {**rows_cols(shapes[operands[0].name]), **attrs}),
        fwd=(row,),
        examples=examples,
        source=source,
    )


_add = registered(_operator)
SLOT = f"h<{len(HYPER_SLOTS)}"  # the index of a slot


def _at(slot: str) -> int:
    return HYPER_SLOTS.index(slot)


_FLAG = Attr(name="clip", default=0, check=lambda v: v in (0, 1), doc="1: gradients are scaled by hyper.clip_scale")


def _is_weight(v: Any) -> bool:
    return 0 <= v < 1e300


def _weight(name: str) -> Word:
    return Word(name=name, kind="float", lo=0, hi=1e300)


def _example(*shapes: tuple[int, ...], bench: bool = False, **attrs: Any) -> Example:
    """An example with operands of these shapes, and the hyperparameters."""
    return Example(shapes=(*shapes, (len(HYPER_SLOTS),)), attrs=attrs, low=0.1, high=0.9, bench=bench)


# ---------------------------------------------------------------- update rows
def spec_of(op: Update) -> OpSpec:
    """The operator of an optimizer's update."""
    known = (*HYPER_SLOTS, *op.coefficients)
    if "p" not in op.steps:
        raise ValueError("a formula p of p, its gradient g, state and hyperparameters is wanted")
    if unknown := [name for name in op.uses if name not in known]:
        raise ValueError(
            f"{unknown[0]!r} is neither p, g nor state, and no hyperparameter: those are {', '.join(known)}"
        )
    if op.own:
        op.check()
    n = 2 + len(op.state)
    return _operator(
        op.name,
        lambda: op.text,
        (*ROWS_COLS, CLIP),
        (
            U("p", SIZE, "rows"),
            R("g", SIZE, "rows"),
            *(U(s, SIZE, "rows") for s in op.state),
            R(**HYPER),
        ),
        attrs=(_FLAG,),
        examples=(
            *(_example(*[shape] * n, clip=clip) for shape, clip in (((6, 4), 0), ((3,), 1), ((5, 37), 1))),
            _example(*[(784, 64)] * n, clip=0, bench=True),
        ),
        flops=lambda: f"{op.operations}*{SIZE}",
        source=op.source,
    )


for _op in UPDATES.values():
    register(spec_of(_op))


# ---------------------------------------------------------------- the step: counter and schedule
_add(
    "tick",
    "t += 1; beta1_t *= beta1; beta2_t *= beta2; lr_t = schedule(t - 1)*min(1, t/warmup_steps); step_size_t = "
    "lr_t/(1 - beta1_t); inv_sqrt_correction2_t = 1/sqrt(1 - beta2_t)",
    (choice("schedule", len(SCHEDULES)),),
    (U(**HYPER, part="w0"),),
    attrs=(
        Attr(
            name="schedule",
            default=0,
            check=lambda v: v in range(len(SCHEDULES)),
            doc=f"0..{len(SCHEDULES) - 1}: {', '.join(SCHEDULES)}",
        ),
    ),
    word_values=lambda shapes, attrs: dict(attrs),
    examples=tuple(_example(schedule=s) for s in range(len(SCHEDULES))),
    no_equation="a schedule with branches over slots of hyperparameters, in float64",
    source="torch.optim.lr_scheduler: StepLR, ExponentialLR, CosineAnnealingLR, CosineAnnealingWarmRestarts; the schedule "
    "starts after the warm-up",
)


_add(
    "rate_table",
    "lr_t *= f; step_size_t *= f; f = table[min(max(0, t - 1 - warmup_steps) // every, n - 1)]",
    (*dims("n"), Word(name="every", kind="int", lo=1, hi=2**53)),
    (R("table", "n", "w0"), U(**HYPER, part="w0")),
    require=("n - 1",),
    attrs=(Attr(name="every", default=1, check=lambda v: isinstance(v, int) and v >= 1, doc="steps of an entry"),),
    word_values=lambda shapes, attrs: {"n": shapes["table"][0], **attrs},
    examples=(_example((1,), every=1), _example((7,), every=2)),
    no_equation="the place is computed of slots of hyperparameters, in float64",
    source="torch.optim.lr_scheduler.LambdaLR",
)
_add(
    "rate_scale",
    f"scaled[{SLOT}] = where(h == {_at('lr_t')} or h == {_at('step_size_t')}, factor, 1)*hyper[h]",
    (_weight("factor"),),
    (R(**HYPER, part="w0"), W(**{**HYPER, "name": "scaled"}, part="w0")),
    attrs=(Attr(name="factor", default=1.0, check=_is_weight, doc="of a parameter's learning rate"),),
    shape=lambda shapes, attrs: {"scaled": shapes["hyper"]},
    word_values=lambda shapes, attrs: dict(attrs),
    examples=(_example(factor=0.25),),
    source="torch.optim's groups of parameters",
)
_add(
    DECAY_ROW,
    f"scaled[{SLOT}] = where(h == {_at('weight_decay')}, factor, 1)*scaled[h]",
    (_weight("factor"),),
    (U(**{**HYPER, "name": "scaled"}, part="w0"),),
    attrs=(Attr(name="factor", default=1.0, check=_is_weight, doc="of a parameter's weight decay"),),
    word_values=lambda shapes, attrs: dict(attrs),
    examples=(_example(factor=0.0), _example(factor=0.5)),
    source="torch.optim's groups of parameters",
)


# ---------------------------------------------------------------- clipping
_GRADIENT = U("g", SIZE, "rows")

_add(
    "clip_value",
    "g = min(max(g, -clip_value), clip_value)",
    ROWS_COLS,
    (_GRADIENT, R(**HYPER)),
    examples=(_example((6, 4)), _example((3,))),
    flops=f"2*{SIZE}",
    source="torch.nn.utils.clip_grad_value_",
)
_add(
    "sumsq",
    "s[r<rows] = sqrt(sum[c<cols] g[r,c]^2)",
    ROWS_COLS,
    (R("g", SIZE, "rows"), W("s", "rows", "rows")),
    shape=lambda shapes, attrs: {"s": shapes["g"][:1] or (affine(1),)},
    word_values=lambda shapes, attrs: leading(shapes["g"]),
    examples=(
        Example(shapes=((6, 4),)),
        Example(shapes=((37,),)),
        Example(shapes=((5, 137),)),
        Example(shapes=((784, 64),), bench=True),
    ),
    flops=f"2*{SIZE}",
)
_add(
    "clip_norm_scale",
    f"hyper[{SLOT}] = where(h == {_at('clip_scale')}, min(1, clip_norm/(sqrt(sum[i<n] s[i]^2) + 1e-6)), hyper[h])",
    dims("n"),
    (R("s", "n", "w0"), U(**HYPER, part="w0")),
    word_values=lambda shapes, attrs: {"n": shapes["s"][0]},
    examples=(_example((2,)), _example((300,))),
    flops="n",
    source="torch.nn.utils.clip_grad_norm_",
)


# ---------------------------------------------------------------- penalties, zero
_add(
    "penalty",
    "g += l1*sign(p) + 2*l2*p",
    (*ROWS_COLS, _weight("l1"), _weight("l2")),
    (R("p", SIZE, "rows"), _GRADIENT),
    attrs=(
        Attr(name="l1", default=0.0, check=_is_weight, doc="weight of sum |p|"),
        Attr(name="l2", default=0.0, check=_is_weight, doc="weight of sum p^2"),
    ),
    examples=tuple(
        Example(shapes=(s, s), attrs=a)
        for s, a in (((6, 4), {"l1": 0.01}), ((5,), {"l2": 0.1}), ((3, 19), {"l1": 0.3, "l2": 0.2}))
    ),
    flops=f"4*{SIZE}",
    source="the gradient of l1*sum|p| + l2*sum p^2, as in Keras",
)
_add(
    "zero",
    "g = 0",
    ROWS_COLS,
    (W("g", SIZE, "rows"),),
    attrs=(Attr(name="shape", default=(1,), doc="shape of g"),),
    shape=lambda shapes, attrs: {"g": tuple(affine(n) for n in attrs["shape"])},
    word_values=lambda shapes, attrs: rows_cols(shapes["g"]),
    examples=(Example(shapes=(), attrs={"shape": (6, 4)}), Example(shapes=(), attrs={"shape": (3,)})),
)
