"""The form of the instruction set: operators, their rows, and what a row declares about itself.

An *operator* (`OpSpec`) is a node of a graph.  A *row* (`RowSpec`) is one instruction of the VM: an operator has forward
rows and backward rows.  Everything else in calcvm is derived from these declarations: encoding, dispatch, autodiff,
lifetimes, verifier, disassembly, documentation, tests and benchmarks.  So a false declaration is a defect, and every
declared property has a test that fails if it is false.

Sizes (`elems`, `part`, `flops`) are expressions over the row's words, such as ``"M*K"``.  `calcvm.ops.sizes` evaluates
them for each batch; the reference shows them as written.  Extents of scratch may also use ``nw``, the planned number
of workers, ``gpu``, 1 for the device "cuda" and else 0, and ``small``, 1 for the device "small".

Scratch is a budget.  A row's word ``wn`` is the number of elements it may use: for each worker if the scratch's extent is
``nw*wn``, for all together if it is ``wn``.  A function of the row gives the minimum and the best for speed
(`RowSpec.workspace`); kernels give the same bits for any ``wn`` in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from calcvm.errors import CalcError
from calcvm.frozen import frozen
from calcvm.lazy import cached_property
from calcvm.ops.dims import Shape, numel
from calcvm.ops.layouts import LAST, WINDOW  # noqa: F401  (for declarations)
from calcvm.ops.types import CELLS, FLOAT, VARIABLES

Shapes = Mapping[str, Any]  # of an operator's values by name: Shape, None for an input that is left out
P = ParamSpec("P")
T = TypeVar("T")
HEADER_WORDS = 2
LINE_WORDS = 8  # of a cache line; an encoded row fills whole lines
MAX_WORDS = 15 * LINE_WORDS  # of a row: a GPU's block keeps two rows and a few words more


@frozen(kw_only=True)
class Word:
    """One integer or float word of a row.

    kind : "dim" (a size, may depend on the batch, >= 0), "int" (a constant in [lo, hi]) or "float"
        (a float64 stored as its bits, in [lo, hi], finite).
    default : its value if an operator's words omit it.
    """

    name: str
    kind: str = "dim"
    lo: float = 0
    hi: float = 2**40
    default: float | None = None


def dims(names: str) -> tuple[Word, ...]:
    """Words that are sizes, by their names: ``dims("rows cols")``."""
    return tuple(Word(name=n) for n in names.split())


def choice(name: str, n: int) -> Word:
    """An integer word in [0, n)."""
    return Word(name=name, kind="int", lo=0, hi=n - 1)


class Told(Generic[T]):
    """A field given as a value, or as a function that computes it on first use, so that an import computes few.

    A computed value is then a plain attribute; `make_later` stores functions where this finds them.
    """

    def __init__(self, default: T | None = None):
        self.default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        owner.told = (*getattr(owner, "told", ()), name)  # type: ignore[attr-defined]

    def __get__(self, spec: Any, owner: type | None = None) -> T:
        if spec is None:
            if self.default is None:
                raise AttributeError(self.name)
            return self.default
        own = spec.__dict__
        return own.setdefault(self.name, own["make " + self.name]())

    if TYPE_CHECKING:  # at run time __set__ would also intercept reads of present values

        def __set__(self, spec: Any, value: T | Callable[[], T]) -> None: ...


def make_later(spec: Any) -> None:
    own = spec.__dict__
    for name in spec.told:
        if callable(own[name]):
            own["make " + name] = own.pop(name)


@frozen(kw_only=True)
class Operand:
    """One operand of a row: which heap cells it may touch, how, and by which worker.

    access : "r" read; "w" every element is set; "a" set, or added to if the row's word ``acc`` is 1;
        "u" read and updated in place (parameters, optimizer state; in a forward buffers); "s" scratch of this row alone.
    elems : extent, in elements.
    type : of its elements, or a variable (`calcvm.ops.types`).
    below : the size that an index must be below; a kernel traps others.
    moved : it may be of any type of that many bytes.
    part : how the workers share it.  An expression n: worker w touches only elements of units
        [n*w // nw, n*(w+1) // nw), each elems/n long.  "" or an n of 0: any worker may touch any
        element; scratch on a CPU: worker w has the w-th of nw equal parts.  "w0": worker 0 alone.
    optional : whether it may be left out; or an expression over the row's words: if it is not 0.
    paged : it lies in the heap's pages (`calcvm.ops.paging`), and no other operand does.
    """

    name: str
    access: str
    elems: Told[str] = Told()
    part: Told[str] = Told("")
    optional: bool | str = False
    type: str = FLOAT
    below: Told[str] = Told("")
    moved: bool = False
    paged: bool = False

    def __post_init__(self) -> None:
        make_later(self)
        if self.type == CELLS:
            object.__setattr__(self, "moved", True)

    @property
    def reads(self) -> bool:
        return self.access in "rua"

    @property
    def writes(self) -> bool:
        return self.access in "wuas"


def R(name: str, elems: str, part: str = "", **kw: Any) -> Operand:
    """An operand that is read."""
    return Operand(name=name, access="r", elems=elems, part=part, **kw)


def W(name: str, elems: str, part: str = "", **kw: Any) -> Operand:
    """An operand that is set, every element."""
    return Operand(name=name, access="w", elems=elems, part=part, **kw)


def A(name: str, elems: str, part: str = "", **kw: Any) -> Operand:
    """An operand that is set, or added to if the row's word ``acc`` is 1."""
    return Operand(name=name, access="a", elems=elems, part=part, **kw)


def U(name: str, elems: str, part: str = "", **kw: Any) -> Operand:
    """An operand that is read and updated in place."""
    return Operand(name=name, access="u", elems=elems, part=part, **kw)


def S(name: str, elems: str, part: str = "", **kw: Any) -> Operand:
    """Scratch of this row alone."""
    return Operand(name=name, access="s", elems=elems, part=part, **kw)


@frozen
class Epilogue:
    """One way to run a row inside the row that computes its input, while that is still in cache.

    kind : what it becomes there, one of the kinds that the other `takes`.  reads : the operand that holds the other's result.
    words : the other's words, as numbers or this row's words.  operands : the other's operands, as this row's.
    """

    kind: str
    reads: str
    words: tuple[tuple[str, int | str], ...] = ()
    operands: tuple[tuple[str, str], ...] = ()


ACC = Word(name="acc", kind="int", lo=0, hi=1)
PHASES = Word(name="phases", lo=1, hi=2**20)  # the first word of a row with several phases; assembly counts them
WN = Word(name="wn", kind="int")  # elements of scratch that may be used; lowering chooses them


@frozen(kw_only=True)
class RowSpec:
    """One instruction: ``kernels_*/`` hold a kernel of the same name and the same words.

    name : its identity in stored programs, together with its words and operands: with others it is another instruction.
    in_place : pairs (written, read) that may share storage if the read value dies here.
    require : expressions over the words that must be >= 0: what the kernel relies on beyond the ranges.
    phases : how often the row is run, with a barrier of all workers in between; if it is not "1", the first word is
        `PHASES`.  Parts hold in every phase; scratch belongs to all workers, and later phases read what any worker
        has written there.
    synopsis : its equation over its words, in the language of docs/equations.md, every index with its range.
    declares : axes of operands that are read at other places than indexes, and values of operands that are left out.
    lies : words -> by operand, the equation's axes in storage order, if that differs.
    no_equation : why the synopsis is prose.
    workspace : (words, `calcvm.ops.sizes.On`) -> the minimum ``wn`` and the best for speed, for a row that has this word.
    useful : (expression over the words, message): if it is below 0 at the largest batch, the row computes nothing useful.
    epilogues : ways to run it inside the row before.
    takes : kinds of epilogues that it applies, in their order: `calcvm.ops.epilogues`.
    """

    name: str
    synopsis: Told[str] = Told()
    words: tuple[Word, ...]
    operands: tuple[Operand, ...]
    in_place: Told[tuple[tuple[str, str], ...]] = Told(())
    require: tuple[str, ...] = ()
    flops: Told[str] = Told("0")
    phases: str = "1"
    workspace: Callable[[Any, Any], tuple[Any, Any]] | None = None
    useful: tuple[tuple[str, str], ...] = ()
    epilogues: tuple[Epilogue, ...] = ()
    takes: tuple[str, ...] = ()
    declares: Told[str] = Told("")
    lies: Callable[[Mapping[str, Any]], Mapping[str, tuple[int, ...]]] | None = None
    no_equation: str = ""

    def __post_init__(self) -> None:
        make_later(self)
        if self.n_words > MAX_WORDS:
            raise CalcError(f"row {self.name!r} has more than {MAX_WORDS} words")
        if (self.words[:1] == (PHASES,)) != (self.phases != "1"):
            raise CalcError(f"row {self.name!r}: its first word is PHASES where it has several phases=, and only there")
        if (WN in self.words) != (self.workspace is not None):
            raise CalcError(
                f"row {self.name!r}: the word WN and the function workspace= are given together, or neither"
            )

    def __reduce__(
        self,
    ) -> tuple:  # pickled by name, like an operator's spec; a row outside the table can have no rules
        return (row_named, (self.name,)) if find_row(self.name) == self else object.__reduce_ex__(self, 2)  # type: ignore[return-value]

    @property
    def n_words(self) -> int:
        """The words of an encoded row, including the header."""
        return HEADER_WORDS + len(self.words) + len(self.operands)

    @cached_property
    def given(self) -> tuple[str, ...]:
        """The words that an operator gives: all except `WN` and `PHASES`."""
        return tuple([w.name for w in self.words if w not in (WN, PHASES)])

    @property
    def defaults(self) -> dict[str, float]:
        """The words with defaults."""
        return {w.name: w.default for w in self.words if w.default is not None}

    @cached_property
    def reads(self) -> tuple[Operand, ...]:
        return tuple(o for o in self.operands if o.reads)

    @cached_property
    def writes(self) -> tuple[Operand, ...]:
        return tuple(o for o in self.operands if o.writes and o.access != "s")

    def operand(self, name: str) -> Operand:
        return next(o for o in self.operands if o.name == name)

    @cached_property
    def variables(self) -> tuple[str, ...]:
        """The variable types of its operands."""
        return tuple(dict.fromkeys(o.type for o in self.operands if o.type in VARIABLES))

    def of(self, types: tuple[str, ...]) -> RowSpec:
        """Its instance, with a type in place of each variable."""
        if all(t == FLOAT for t in types):
            return self
        known = _INSTANCES.get((self.name, types))
        if known is None or known[0] is not self:
            by = dict(zip(self.variables, types, strict=True))
            operands = tuple(replace(o, type=by.get(o.type, o.type), moved=o.moved) for o in self.operands)
            name = ".".join((self.name, *types))
            known = _INSTANCES[self.name, types] = self, replace(self, name=name, operands=operands)
        return known[1]


_INSTANCES: dict[tuple[str, tuple[str, ...]], tuple[RowSpec, RowSpec]] = {}


@frozen(kw_only=True)
class Attr:
    """One attribute of an operator: its default, and its valid values (checked when the graph is built)."""

    name: str
    default: Any = None
    check: Callable[[Any], bool] = field(default=lambda v: True, repr=False)
    doc: str = ""


@frozen(kw_only=True)
class Example:
    """Shapes (with None for the batch) and attributes that tests and benchmarks run the operator with.

    low, high : the range inputs are drawn from.  integer : {input: n} draws integers in [0, n).
    batch : the batch size used.  types : types in place of variables (default: the program's float).
    """

    shapes: tuple[tuple[int | None, ...], ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    batch: int = 5
    low: float = -2.0
    high: float = 2.0
    integer: Mapping[str, int] = field(default_factory=dict)
    types: Mapping[str, str] = field(default_factory=dict)
    bench: bool = False


@frozen(kw_only=True)
class OpSpec:
    """One operator.

    category : unary | binary | reduction | normalization | contraction | shape | loss | metric | random | optimizer | system,
        or `EQUATION`.  For the same inputs all except random operators give the same results, so repeated operations are
        computed once (`calcvm.lowering.simplify`).
    inputs, outputs, saved : names.  The forward writes saved values for the backward only; one that is optional in the
        row that writes it has cells only if a backward reads it.
    shape : (inputs' shapes by name, attributes) -> {output or saved name: shape}; raises ValueError with the reason.
    words : (shapes by name, attributes) -> {word: value} for all rows of the operator.
        Both find None for an input that is left out.
    fwd : rows in order.  bwd : rows in order; an operand ``d<input>`` or ``d<output>`` is that value's
        gradient.  A backward row is emitted if one of the gradients it writes is needed.  The backward
        reads exactly the values that its rows read.  Names starting with ``t_`` are
        temporaries between rows of one operator (shape from `shape`).
    view : the output is the input under another shape: no row at all, in either direction.
    casts : the output y is the input x in another type; if the types are equal, it is a view.
    stops : it blocks gradients, by design.
    flat : inputs whose gradient is 0 wherever there is one, such as of sign: none is propagated to them.
    passes : inputs whose gradient is the output's gradient itself (reduced if broadcast): no row.
    layouts : the layouts (`calcvm.ops.layouts`) of inputs, outputs and saved values not stored as users see them.
        `shape` and `words` refer to the stored values; so do the shapes of examples.
    anyhow : its inputs may have any common layout, which its results then have too.
    relaid : (attributes, axes in storage order) -> attributes, for an operator with ``anyhow`` whose attributes
        name axes.
    broadcast : rows see operands of broadcast shape; gradients of broadcast inputs are reduced by lowering.
    differentiable : inputs that have a gradient.
    exact : integers of 32 and 64 bits, which floats may not represent, are rejected instead of cast: rounding would change the meaning.
    """

    name: str
    synopsis: Told[str] = Told()
    category: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...] = ("y",)
    saved: tuple[str, ...] = ()
    attrs: tuple[Attr, ...] = ()
    shape: Callable[[Shapes, Mapping[str, Any]], dict[str, Shape]] = field(repr=False)
    words: Callable[[Shapes, Mapping[str, Any]], dict[str, Any]] = field(repr=False)
    fwd: tuple[RowSpec, ...] = ()
    bwd: tuple[RowSpec, ...] = ()
    differentiable: tuple[str, ...] = ()
    flat: tuple[str, ...] = ()
    view: bool = False
    casts: bool = False
    stops: bool = False
    passes: tuple[str, ...] = ()
    layouts: Mapping[str, str] = field(default_factory=dict)
    anyhow: bool = False
    relaid: Callable[[Mapping[str, Any], tuple[int, ...]], dict[str, Any]] | None = field(default=None, repr=False)
    broadcast: bool = False
    exact: bool = False
    optional_inputs: tuple[str, ...] = ()
    onnx: tuple[str, ...] = ()
    examples: tuple[Example, ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        make_later(self)

    def __repr__(self) -> str:
        return f"<OpSpec {self.name!r}: {self.synopsis}>"

    def __reduce__(self) -> tuple:  # graphs are pickled and copied; rules are functions, which the table has
        return _by_name, (self.name, self.form if any(row.name in OWN for row in self.rows) else "")

    @cached_property
    def form(self) -> str:
        """The interface that graphs rely on: an operator of the same name with another form is a different one."""
        rows = [
            (r.name, [(w.name, w.kind) for w in r.words], [(o.name, o.type) for o in r.operands]) for r in self.rows
        ]
        return repr((self.inputs, self.outputs, [a.name for a in self.attrs], rows))

    @property
    def stem(self) -> str:
        """The name given to results without one."""
        return self.name

    @property
    def rows(self) -> tuple[RowSpec, ...]:
        return self.fwd + self.bwd

    @cached_property
    def updates(self) -> tuple[str, ...]:
        """Inputs that the forward updates: buffers, which only a training path may update."""
        return tuple(o.name for row in self.fwd for o in row.operands if o.access == "u" and o.name in self.inputs)

    @cached_property
    def types(self) -> dict[str, str]:
        """The types or variables of inputs and outputs that do not have the program's own float type; views have any type."""
        values = (*self.inputs, *self.outputs)
        if self.view:
            return dict.fromkeys(values, CELLS)
        said = {o.name: o.type for row in self.rows for o in row.operands if o.type != FLOAT}
        return {name: said[name] for name in values if name in said}

    def type_of(self, name: str) -> str:
        """The type of a saved value or a temporary, as declared by rows."""
        return next((o.type for row in self.rows for o in row.operands if o.name == name), FLOAT)

    def backward_rows(self, wanted: Iterable[str]) -> list[RowSpec]:
        """Backward rows that write gradients of ``wanted`` inputs, or values that such rows read."""
        rows: list[RowSpec] = []
        needed = {f"d{n}" for n in wanted}
        for row in reversed(self.bwd):
            if any(o.name in needed for o in row.writes):
                rows.insert(0, row)
                needed |= {o.name for o in row.reads}
        return rows

    @property
    def bwd_reads(self) -> tuple[str, ...]:
        """Forward values that the backward reads: all others may be overwritten after the forward."""
        names = {o.name for row in self.bwd for o in row.operands if o.reads}
        return tuple(n for n in (*self.inputs, *self.outputs, *self.saved) if n in names)


# ---------------------------------------------------------------- the table
OPS: dict[str, OpSpec] = {}
ROWS: dict[str, RowSpec] = {}
OWN: set[str] = set()  # names of rows registered by users
EQUATION = "equation"  # category of operators that are users' equations
RECURRENT = "recurrent"  # category of recurrent cells, also users'
STATED: dict[
    str, RowSpec
] = {}  # rows of users' equations and cells, which no table contains: `calcvm.ops.stated`, `.cells`


def stem_of(name: str) -> str:
    """The name of a row without an instance's types."""
    return name.partition(".")[0]


def find_row(name: str) -> RowSpec | None:
    """A row of the table, or its instance for the types at the end of its name."""
    stem, _, types = name.partition(".")
    row, given = ROWS.get(stem) or STATED.get(stem), tuple(types.split(".")) if types else ()
    if row is None or not given:
        return row
    may = [VARIABLES[v] for v in row.variables]
    fits = len(given) == len(may) and all(t in of for t, of in zip(given, may))
    return row.of(given) if fits and any(t != FLOAT for t in given) else None


def row_named(name: str) -> RowSpec:
    """The same (CalcError: there is none)."""
    row = find_row(name)
    if row is None:
        raise CalcError(f"no operator has the row {name!r}: declare it (calcvm.operators.elementwise, cv.register_op)")
    return row


def is_own(row: RowSpec) -> bool:
    """Whether a row is a user's, registered or not."""
    return row.name in OWN or find_row(row.name) is not row


def row_words(rows: Iterable[RowSpec]) -> int:
    """Words of each row in a program of these rows: whole cache lines."""
    return -(-max((row.n_words for row in rows), default=1) // LINE_WORDS) * LINE_WORDS


def check_free(spec: OpSpec, row: RowSpec) -> None:
    """Reject a row of an operator whose name is taken by a different row."""
    if ROWS.get(row.name, row) is not row:
        raise CalcError(f"operator {spec.name!r}: row {row.name!r} is registered already, and differs")


def instruction(row: RowSpec) -> RowSpec:
    """Add a row that belongs to no operator to the table."""
    return ROWS.setdefault(row.name, row)


def register(spec: OpSpec) -> OpSpec:
    """Add an operator to the table.  Rows may be shared by operators; their names are unique.

    Raises
    ------
    CalcError : its name or that of a row is taken.
    """
    if spec.name in OPS:
        raise CalcError(f"operator {spec.name!r} is registered already: take another name")
    for row in spec.rows:
        check_free(spec, row)
    for row in spec.rows:
        ROWS[row.name] = row
    OPS[spec.name] = spec
    return spec


def registered(make: Callable[P, OpSpec]) -> Callable[P, OpSpec]:
    """``make``, with its operators added to the table."""
    return lambda *args, **kw: register(make(*args, **kw))


operator = registered(OpSpec)


def _by_name(name: str, form: str = "") -> OpSpec:
    """The operator of a graph that was pickled or copied; its form must not have changed since."""
    if name not in OPS:
        raise CalcError(
            f"the graph has an operator {name!r} that is not in the table: register it first (cv.register_op)"
        )
    if form and form != OPS[name].form:
        raise CalcError(
            f"operator {name!r} has been declared with other inputs, parameters or rows since the graph was built: build it again"
        )
    return OPS[name]


# ---------------------------------------------------------------- shared by families
ROWS_COLS = dims("rows cols")
SIZE = "rows*cols"
PLACES = dims("rows inner N")  # of vectors of N along the last axis
VECTORS = "rows*inner*N"


def uniform(
    name: str, synopsis: str, reads: Iterable[str], writes: str, flops: int, words: tuple[Word, ...], size: str = SIZE
) -> RowSpec:
    """A row whose operands have one size and are shared alike; its result may overwrite any of them."""
    return RowSpec(
        name=name,
        synopsis=synopsis,
        words=words,
        operands=(*(R(v, size, "rows") for v in reads), W(writes, size, "rows")),
        in_place=tuple((writes, v) for v in reads),
        flops=f"{flops}*{size}",
    )


def leading(shape: Shape) -> dict[str, Any]:
    """A tensor as rows of its leading axis."""
    return {"rows": shape[0] if shape else 1, "cols": numel(shape[1:])}


def joined(shape: Shape) -> Shape:
    """A shape with its leading axis as the unit of sharing: from rank 3 on the first two axes are merged."""
    return (shape[0] * shape[1], *shape[2:]) if len(shape) > 2 else shape


def rows_cols(shape: Shape) -> dict[str, Any]:
    """A tensor as rows, the units of sharing: workers then own the same rows in every operator."""
    return leading(joined(shape))


def are_axes(v: Any) -> bool:
    return v is None or (isinstance(v, tuple) and all(isinstance(a, int) for a in v))


def places(shape: Shape) -> dict[str, Any]:
    """A tensor as vectors along its last axis, with rows of them as the units of sharing."""
    x = joined(shape)
    return {"rows": x[0] if len(x) > 1 else 1, "inner": numel(x[1:-1]), "N": x[-1]}


def same_shape(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Shape]:
    """The shape of the first input."""
    return {"y": next(iter(shapes.values()))}
