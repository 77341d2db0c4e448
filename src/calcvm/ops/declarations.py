"""Checks of users' operators: when they are registered, and when they are used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Real
from reprlib import repr
from typing import Any, NoReturn

from calcvm.errors import CalcError
from calcvm.ops.dims import Affine, Shape, check_linear, numel
from calcvm.ops.sizes import MACHINE, evaluate, reads
from calcvm.ops.spec import ACC, PHASES, WN, Operand, OpSpec, RowSpec, Shapes, Word, is_own
from calcvm.ops.types import RANKS, TYPES, VARIABLES

CATEGORIES = (
    "unary",
    "binary",
    "reduction",
    "normalization",
    "contraction",
    "shape",
    "loss",
    "metric",
    "random",
    "optimizer",
    "system",
)
INDEXES = ("index", *RANKS[1:])  # types of operands that `below` may bound
LOWERINGS = {word.name: word for word in (ACC, WN, PHASES)}  # words that lowering sets


# ---------------------------------------------------------------- at registration
def check_spec(spec: Any) -> None:
    """Reject an operator that cannot be used (CalcError)."""
    if not isinstance(spec, OpSpec):
        raise CalcError(f"register_op takes a calcvm.operators.OpSpec, not {spec!r}")

    def wrong(what: str) -> NoReturn:
        raise CalcError(f"operator {spec.name!r}: {what}")

    if not _is_name(spec.name):
        wrong("its name must be an identifier")
    if spec.category not in CATEGORIES:
        wrong(f"category {spec.category!r} is none of {', '.join(CATEGORIES)}")
    for what, kind in ("inputs", str), ("outputs", str), ("saved", str), ("fwd", RowSpec), ("bwd", RowSpec):
        given = getattr(spec, what)
        if not isinstance(given, tuple) or not all(isinstance(item, kind) for item in given):
            wrong(f"{what} must be a tuple of {'names' if kind is str else 'RowSpec'}, not {repr(given)}")
    names = (*spec.inputs, *spec.outputs, *spec.saved)
    for name in names:
        if not _is_name(name) or names.count(name) > 1:
            wrong(f"{name!r} is no name of one input, output or saved value")
        if f"d{name}" in names:
            wrong(f"{'d' + name!r} is the gradient of {name!r}, and cannot be the name of another value")
    for what in "differentiable", "optional_inputs", "passes", "flat":
        others = [name for name in getattr(spec, what) if name not in spec.inputs]
        if others:
            wrong(f"{what} names {others[0]!r}, which is no input: there are {', '.join(spec.inputs)}")
    for row in spec.rows:
        if is_own(row):
            check_row(spec, row)
    written = {operand.name for row in spec.fwd for operand in row.writes}
    if not spec.view:
        if spec.inputs and (found := written & {*spec.inputs} - {*spec.updates}):
            wrong(f"a forward row writes the input {min(found)!r}: other operators may read it too")
        if missing := [name for name in (*spec.outputs, *spec.saved) if name not in written]:
            wrong(f"no forward row writes {missing[0]!r}")
        graded = {operand.name for row in spec.bwd for operand in row.writes} | {f"d{name}" for name in spec.passes}
        if missing := [name for name in spec.differentiable if f"d{name}" not in graded]:
            wrong(f"{missing[0]!r} is declared differentiable, but no backward row writes 'd{missing[0]}'")


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and name.isidentifier() and name.isascii()


def check_row(spec: OpSpec, row: RowSpec) -> None:
    """Reject a row that cannot be lowered, planned or verified."""

    def wrong(what: str) -> NoReturn:
        raise CalcError(f"operator {spec.name!r}, row {row.name!r}: {what}")

    for what, kind in ("words", Word), ("operands", Operand):
        given = getattr(row, what)
        if not isinstance(given, tuple) or not all(isinstance(item, kind) for item in given):
            wrong(f"{what} must be a tuple of {kind.__name__}, not {repr(given)}")
    words, operands = [word.name for word in row.words], {operand.name: operand for operand in row.operands}
    values = [f"{d}{name}" for d in ("", "d") for name in (*spec.inputs, *spec.outputs)] + [*spec.saved]
    parameters = (*words, *(operand.name for operand in row.operands))
    for name in parameters:
        if not _is_name(name) or parameters.count(name) > 1:
            wrong(f"{name!r} is no name of one word or operand: kernels have them as their parameters")
    for word in row.words:
        if word.name in LOWERINGS and word != LOWERINGS[word.name]:
            wrong(f"the word {word.name!r} is lowering's: take {word.name.upper()}, or another name")
        if word.kind not in ("dim", "int", "float") or not word.lo <= word.hi:
            wrong(
                f"word {word.name!r} is a dim, int or float from lo to hi, not {word.kind!r} from {word.lo} to {word.hi}"
            )
    expressions = [(f"require {text!r}", text) for text in row.require] + [("flops", row.flops), ("phases", row.phases)]
    for name, operand in operands.items():
        if operand.access not in ("r", "w", "a", "u", "s"):
            wrong(f"operand {name!r} has access {operand.access!r}: R, W, A, U and S make operands")
        if operand.access != "s" and name not in values and not name.startswith("t_"):
            wrong(
                f"operand {name!r} is no value of the operator: there are {', '.join(sorted(values))}, and temporaries t_..."
            )
        if operand.type not in (*TYPES, *VARIABLES):
            wrong(
                f"operand {name!r} is of the type {operand.type!r}, which is none of {', '.join((*TYPES, *VARIABLES))}"
            )
        if operand.below and operand.type not in INDEXES:
            wrong(f"operand {name!r} of type {operand.type!r} has below=, which is of indexes: {', '.join(INDEXES)}")
        if operand.access == "a" and "acc" not in words:
            wrong(f"operand {name!r} may be added to, which the word ACC says: add it to the words")
        texts = {"elems": operand.elems, "part": operand.part, "optional": operand.optional, "below": operand.below}
        expressions += [
            (f"{what} of operand {name!r}", text)
            for what, text in texts.items() if not isinstance(text, bool) and (what, text) not in (("part", ""), ("part", "w0"), ("below", ""))
        ]  # fmt: skip
    for what, text in expressions:
        try:
            unknown = [name for name in reads(text) if name not in (*words, *MACHINE)]
        except (SyntaxError, TypeError) as error:
            why = error.msg if isinstance(error, SyntaxError) else 'it must be a text, such as "rows*cols"'
            wrong(f"{what}: {text!r} is no expression ({why})")
        if unknown:
            wrong(f"{what}: {text!r} reads {unknown[0]!r}; the row's words are {', '.join(words) or 'none'}")
    for pair in row.in_place:
        known = [operands.get(name) for name in pair]
        if len(known) != 2 or known[0] is None or known[1] is None or not (known[0].writes and known[1].reads):
            wrong(f"in_place has pairs of a written operand and a read one, not {pair!r}")


# ---------------------------------------------------------------- at use
def sizes_of(spec: OpSpec, inputs: Shapes, attrs: Mapping[str, Any]) -> dict[str, Shape]:
    """Shapes of a user's operator's results, for these inputs; its words are checked too.

    Raises
    ------
    ValueError : the operator's rule rejects the inputs, with a reason.
    CalcError : a rule raises another error, or returns an unusable value.
    """
    shapes = _ask(spec, "shape", spec.shape, inputs, attrs)
    for name in (*spec.outputs, *spec.saved):
        shape = shapes.get(name) if isinstance(shapes, Mapping) else None
        if not isinstance(shape, tuple) or not all(isinstance(size, Affine) for size in shape):
            raise CalcError(
                f"`shape` must return a dict with a tuple of sizes for {name!r}, derived from the inputs' sizes (Affine(0, 3) is "
                f"a 3); it returned {repr(shapes)}"
            )
    check_linear(shapes)
    words = _ask(spec, "words", spec.words, {**inputs, **shapes}, attrs)
    if not isinstance(words, Mapping):
        raise CalcError(f"`words` must return a dict, not {repr(words)}")
    for row in spec.rows:
        for word in row.words if is_own(row) else ():
            value = words.get(word.name, 0 if word.name in LOWERINGS else None)
            if not (isinstance(value, Affine) and word.kind == "dim") and not isinstance(value, Real):
                raise CalcError(f"row {row.name!r} has a word {word.name!r}, for which `words` gives {repr(value)}")
    for row in spec.fwd:
        for operand in row.operands if is_own(row) else ():
            if operand.access == "w" and operand.name in shapes and not {*reads(operand.elems)} & {*MACHINE}:
                elems, wanted = evaluate(operand.elems, words), numel(shapes[operand.name])
                if elems != wanted:
                    raise CalcError(
                        f"row {row.name!r} writes {elems} elements of {operand.name!r}, which has {wanted}: it must set every one"
                    )
    return dict(shapes)


def _ask(spec: OpSpec, what: str, rule: Callable[..., Any], *given: Any) -> Any:
    try:
        return rule(*given)
    except ValueError:  # the reason why the inputs do not fit
        raise
    except Exception as error:
        raise CalcError(f"`{what}` of operator {spec.name!r} has raised {type(error).__name__}: {error}") from error
