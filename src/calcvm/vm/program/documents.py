"""What the documents of a program say: the form of every field, and that what refers to something finds it.

Rows are the verifier's.  Here is what Python takes from a program: where it cannot be what it says, it is refused
before anything is made of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from calcvm import init
from calcvm.errors import CalcError, ProgramError
from calcvm.ops.dims import Affine, numel
from calcvm.ops.layouts import LAYOUTS
from calcvm.ops.optimizers import HYPER_SLOTS
from calcvm.ops.sizes import MAX_BATCH
from calcvm.ops.statement import PHASES
from calcvm.ops.types import BYTES, FLOAT, dtype_of
from calcvm.vm.program import schema
from calcvm.vm.program.schema import (
    Misfit,
    boolean,
    entry,
    integer,
    listing,
    number,
    one_of,
    optional,
    record,
    table,
    text,
)

if TYPE_CHECKING:
    from calcvm.vm.program.program import Program, Symbol

DTYPES = ("float32", "float64")
MAX_WORKERS = 1024
MAX_BLOCKS = 65535  # of device cuda, whose workers are thread blocks
MAX_HEAP = 2**48
PAGES = "pages"  # the zone beyond the heap: a file
MAX_SIZE = 2**60
MAX_RANK = 32  # NumPy's least
READ = PHASES[:2]  # phases that compute results

# ---------------------------------------------------------------- forms
SIZE = integer(0, MAX_SIZE)
INITIALIZERS = {
    name: kind for name, kind in vars(init).items()
    if isinstance(kind, type) and issubclass(kind, init.Initializer) and kind not in (init.Initializer, init.Function) and name[0] != "_"
}  # fmt: skip


def _form(value: Any) -> Affine:
    a, b = _FORM(value)
    if a + b < 0:
        raise Misfit(f"is {a}*B{b:+d}: no size of a batch of 1")
    return Affine(a, b)


def _shape(value: Any) -> tuple[Affine, ...]:
    shape = tuple(_SIZES(value))
    if sum(size.a > 0 for size in shape) > 1:
        raise Misfit("depends on the batch in several axes")
    return shape


def initializer(value: Any) -> init.Initializer:
    """An initializer of ours, made of checked numbers."""
    if isinstance(value, dict) and value.get("class") == init.Function.__name__:
        return init.Function(_FUNCTION(value)["fields"]["name"])
    found = _INITIALIZER(value)
    kind = INITIALIZERS[found["class"]]
    wanted = {field.name for field in fields(kind)}
    if found["fields"].keys() != wanted:
        raise Misfit(f"has the fields {', '.join(found['fields']) or 'none'}; {kind.__name__} has {', '.join(wanted)}")
    try:
        return kind(**found["fields"])
    except CalcError as error:
        raise Misfit(f"cannot be made: {error}") from None


def _start(value: Any) -> dict[str, Any]:
    """What a symbol of the state starts with."""
    kind = _KIND(value)["kind"]
    return _STARTS[kind](value)


_FORM = entry(a=SIZE, b=integer(-MAX_SIZE, MAX_SIZE))
_SIZES = listing(_form, MAX_RANK)
_INITIALIZER = record({"class": one_of(*INITIALIZERS), "fields": table(number())})
_FUNCTION = record({"class": one_of(init.Function.__name__), "fields": record({"name": text("(?s:.+)")})})
_SYMBOL = optional(SIZE)
_STATE = {"symbol": _SYMBOL, "kind": text()}
_STARTS = {
    "rng": record(_STATE),
    "seed": record(_STATE),
    "float64": record({**_STATE, "value": number()}),
    "fill": record({**_STATE, "value": number()}),
    "constant": record({**_STATE, "array": text()}),
    "hyper": record({**_STATE, "slots": record({slot: number(infinite=True) for slot in HYPER_SLOTS})}),
}
STARTS = {  # of these kinds the type (the program's own: FLOAT) and the number of elements
    "rng": ("int64", 2), "seed": (FLOAT, 1), "float64": ("float64", 1), "hyper": ("float64", len(HYPER_SLOTS)),
}  # fmt: skip
_KIND = record({"kind": one_of(*_STARTS)}, others=True)
_NAMES = listing(text())
_KINDS = {
    "placeholder": "placeholder",
    "parameter": "parameter",
    "buffer": "buffer",
    "constant": "state",
    "state": "state",
}  # of a variable by what its symbol is
_VARIABLE = record(
    {
        "symbol": _SYMBOL, "shape": _shape, "kind": one_of(*_KINDS, "result"),
        "path": optional(text()), "phase": one_of(None, *READ), "of": text(), "unreadable": text(),
        "classes": optional(integer(1, MAX_SIZE)),
    },
    optional={
        "layout": one_of("", *LAYOUTS), "over": one_of("sum", "other"), "why": text(), "totals": table(one_of("mean", "sum")), "inner": boolean, "ignored": integer(-(2**63), 2**63 - 1),
    },
)  # fmt: skip
_PATH = {"backward": boolean, "output": optional(text()), "needs": table(_NAMES)}
_SEVERAL = {"outputs": _NAMES, "rates": table(number()), "no_decay": _NAMES}
_TRAINING = {
    "loss": text(), "optimizer": text(), "hyper": SIZE, "seed": SIZE, "accumulate": boolean,
    "moments": table(table(SIZE)), "gradients": table(_SYMBOL),
}  # fmt: skip
_COUNT = integer(0, 2**100)
_ADAPTS = record(
    {
        "of": optional(text()),
        "shape": listing(integer(1, MAX_SIZE), MAX_RANK),
        "axis": optional(integer(0, MAX_RANK)),
        "channels_last": boolean,
    }
)
_LAYER = entry(name=text(), shape=_shape, parameters=SIZE, flops=_COUNT, bytes=_COUNT)
EQUATIONS = table(
    record(
        {
            "language": integer(0, 2**31), "text": text(), "words": _NAMES, "reads": _NAMES, "sets": _NAMES,
            "types": table(text()), "declares": text(),
        }
    )
)  # fmt: skip
_WITH_EQUATIONS = record({}, optional={"equations": EQUATIONS}, others=True)
INFO = record(
    {},
    optional={
        "variables": table(_VARIABLE),
        "parameters": table(record({"init": record({}, others=True), "trainable": boolean})),
        "buffers": table(record({"init": record({}, others=True)})),
        "state": listing(_start),
        "paths": table(record(_PATH, optional={**_TRAINING, **_SEVERAL})),
        "layers": table(listing(_LAYER)),
        "called": table(text()),
        "adapts": table(_ADAPTS),
        "device": one_of("cpu", "blas", "cuda"),
        "mode": one_of(None, "grid", "graph", "fleet"),
        "precision": one_of("float32", "tf32"),
        "equations": EQUATIONS,
    },
    others=True,
)
DOCUMENT = record(
    {
        "format_version": integer(0, 2**31),
        "dtype": one_of(*DTYPES),
        "batch_size": integer(1, MAX_BATCH),
        "workers": integer(1, MAX_BLOCKS),
        "heap_elems": integer(0, MAX_HEAP),
        "sections": listing(entry(path=text(), phase=one_of(*PHASES), start=SIZE, stop=SIZE)),
        "zones": listing(
            record({"name": text(), "start": SIZE, "stop": SIZE, "persistent_start": SIZE, "persistent_stop": SIZE})
        ),
        "symbols": listing(
            entry(
                name=text(), kind=text(), offset=SIZE, elems=_form, shape=_shape, persistent=boolean, resident=boolean,
                members=listing(SIZE), dtype=one_of(*BYTES),
            )
        ),
        "labels": listing(text()),
        "info": record({}, others=True),
        "instructions": listing(entry(name=text(), form=text())),
    },
    optional={"layouts": table(one_of(*LAYOUTS))},  # of symbols, by their numbers
)  # fmt: skip


def know_equations(program: Program) -> None:
    """Know the rows that are users' equations (ProgramError: one was changed, or no kernel can be made of it)."""
    if found := schema.check(_WITH_EQUATIONS, program.info, "info").get("equations"):
        from calcvm.ops.stated import rows_of  # which reads equations: an import needs none

        try:
            rows_of(found)
        except CalcError as error:
            raise ProgramError(str(error)) from None


# ---------------------------------------------------------------- references
def check_info(program: Program) -> None:
    """Refuse (ProgramError) facts of another form, and such that say what is not so."""
    info = schema.check(INFO, program.info, "info")
    _Facts(program, info).check()


class _Facts:
    """Facts of a program, of the right form."""

    def __init__(self, program: Program, info: Mapping[str, Any]):
        self.program = program
        self.variables: Mapping[str, Any] = info.get("variables", {})
        self.parameters: Mapping[str, Any] = info.get("parameters", {})
        self.buffers: Mapping[str, Any] = info.get("buffers", {})
        self.state: list[Any] = info.get("state", [])
        self.paths: Mapping[str, Any] = info.get("paths", {})
        self.called: Mapping[str, str] = info.get("called", {})
        self.adapts: Mapping[str, Any] = info.get("adapts", {})

    def check(self) -> None:
        for name, facts in self.variables.items():
            self.variable(f"variable {name!r}", facts)
        for kind, table_ in (("parameter", self.parameters), ("buffer", self.buffers)):
            for name, facts in table_.items():
                self.initialized(f"{kind} {name!r}", name, kind, facts["init"])
        for i, facts in enumerate(self.state):
            if facts["symbol"] is not None:
                self.start(f"state {i}", facts)
        if self.paths and self.paths.keys() != {*self.program.paths}:
            self.fail("paths", f"they are {', '.join(self.paths)}, the rows' are {', '.join(self.program.paths)}")
        for name, facts in self.paths.items():
            self.path(f"path {name!r}", facts)
        for scope, facts in self.adapts.items():
            self.adapting(f"layer {scope!r}", scope, facts)
        for name, of in self.called.items():
            if of not in self.variables:
                self.fail(f"layer {name!r}", f"it makes {of!r}, which is no variable")

    def adapting(self, where: str, scope: str, facts: Any) -> None:
        """A layer's buffers, and the placeholder that it reads."""
        of, axis, shape = facts["of"], facts["axis"], facts["shape"]
        if axis is not None and axis >= max(len(shape), 1):
            self.fail(where, f"it has no axis {axis}")
        wanted = tuple(shape) if axis is None else tuple(shape[axis : axis + 1]) or (1,)
        for name in ("mean", "std"):
            buffer = self.variables.get(f"{scope}.{name}") if f"{scope}.{name}" in self.buffers else None
            if buffer is None or math.prod(n.b for n in buffer["shape"]) != math.prod(wanted):
                self.fail(where, f"the program has no buffer {scope}.{name} of {math.prod(wanted)} elements")
        if f"{scope}.samples" not in self.buffers:
            self.fail(where, f"the program has no buffer {scope}.samples")
        if of is not None:
            placeholder = self.variables.get(of)
            if placeholder is None or placeholder["kind"] != "placeholder" or not placeholder["shape"]:
                self.fail(where, f"it reads {of!r}, which is no placeholder")

    def fail(self, where: str, message: str) -> None:
        raise ProgramError(f"{where}: {message}")

    def symbol(self, where: str, number_: int | None) -> Symbol:
        symbols = self.program.symbols
        if number_ is None or number_ >= len(symbols):
            raise ProgramError(f"{where}: the program has no symbol {number_}")
        symbol = symbols[number_]
        if numel(symbol.shape) != symbol.elems:
            raise ProgramError(
                f"{where}: the shape of {symbol.name!r} has {numel(symbol.shape)} elements, not {symbol.elems}"
            )
        return symbol

    def variable(self, where: str, facts: Any) -> None:
        result = facts["kind"] == "result"
        computed = facts["phase"] is not None
        if (self.paths and result != (facts["path"] in self.paths)) or computed > result:
            self.fail(where, f"a {facts['kind']} of path {facts['path']!r}, phase {facts['phase']!r}")
        source = self.variables.get(facts["of"])
        if source is None or (source["of"], source["symbol"]) != (facts["of"], facts["symbol"]):
            raise ProgramError(f"{where} is said to be a view of {facts['of']!r}, which lies elsewhere")
        if facts["symbol"] is None:
            if not (result and facts["unreadable"]):
                self.fail(where, f"a {facts['kind']} without a symbol")
            return
        if result and not computed:
            self.fail(where, "a result that no phase computes")
        symbol = self.symbol(where, facts["symbol"])
        elems = numel(facts["shape"])
        if elems != symbol.elems or not (result or symbol.kind == _KINDS[facts["kind"]]):
            self.fail(
                where,
                f"{facts['kind']} of {elems} elements, is not the symbol {symbol.name!r}, {symbol.kind} of {symbol.elems}",
            )

    def initialized(self, where: str, name: str, kind: str, start: Any) -> None:
        facts = self.variables.get(name)
        if facts is None or facts["kind"] != kind:
            raise ProgramError(f"{where}: no variable of that kind")
        symbol = self.symbol(where, facts["symbol"])
        if not symbol.persistent or symbol.shape != facts["shape"]:
            self.fail(where, f"symbol {symbol.name!r} does not persist or is of another shape")
        if "array" in start:
            array = schema.check(record({"array": text()}), start, f"{where}: its initializer")["array"]
            self.constant(where, array, tuple(size.b for size in facts["shape"]))
            return
        made = schema.check(initializer, start, f"{where}: its initializer")
        if isinstance(made, init.Orthogonal) and len(facts["shape"]) < 2:
            self.fail(where, "Orthogonal wants two axes")

    def constant(self, where: str, name: str, shape: tuple[int, ...]) -> None:
        array = self.program.constants.get(name)
        if array is None or array.shape != shape or array.dtype.kind not in "biuf":
            self.fail(where, f"the program has no constant {name!r} of shape {shape}")

    def start(self, where: str, facts: Any) -> None:
        symbol, kind = self.symbol(where, facts["symbol"]), facts["kind"]
        if symbol.kind not in ("state", "optimizer") or not symbol.persistent or symbol.elems.a:
            self.fail(where, f"initial state of {symbol.kind} {symbol.name!r}, which is none that persists")
        if kind in STARTS and self.form(symbol) != (wanted := self.wanted(kind)):
            self.fail(
                where,
                f"{kind} takes {wanted[1]} {wanted[0]}, symbol {symbol.name!r} has {symbol.elems} {symbol.dtype}",
            )
        if kind == "constant":
            array = self.program.constants.get(facts["array"])
            self.constant(where, facts["array"], () if array is None else array.shape)
            if array is not None and array.size != symbol.elems.b:
                self.fail(
                    where, f"constant {facts['array']!r} has {array.size} elements, {symbol.name!r} {symbol.elems}"
                )

    def wanted(self, kind: str) -> tuple[str, int]:
        type_, elems = STARTS[kind]
        return dtype_of(type_, self.program.dtype), elems

    @staticmethod
    def form(symbol: Symbol) -> tuple[str, int]:
        return symbol.dtype, symbol.elems.b

    def path(self, where: str, facts: Any) -> None:
        for name in (n for names in facts["needs"].values() for n in names):
            if name not in self.variables or self.variables[name]["kind"] not in ("placeholder", "result"):
                self.fail(where, f"it reads {name!r}, which is neither a placeholder nor a result")
            self.holding(where, name)
        for name in facts.get("outputs", [facts["output"]]):
            if name is not None:
                self.holding(where, name)
        if not facts["backward"]:
            return
        missing = _TRAINING.keys() - facts.keys()
        if missing:
            self.fail(where, f"it trains, but has no {min(missing)!r}")
        if self.holding(where, facts["loss"]).elems != 1:
            self.fail(where, f"its loss {facts['loss']!r} is no single number")
        for role in ("seed", "hyper"):
            symbol, wanted = self.symbol(f"{where}: its {role}", facts[role]), self.wanted(role)
            if symbol.kind != "state" or self.form(symbol) != wanted:
                self.fail(where, f"its {role} is not a state of {wanted[1]} {wanted[0]}")
        for name in {*facts["gradients"], *facts["moments"]} - {*self.parameters}:
            self.fail(where, f"it trains {name!r}, which is no parameter")
        for name, gradient in facts["gradients"].items():
            if gradient is None and facts["accumulate"]:
                self.fail(where, f"it adds gradients up, but {name!r} has none")
            for kind, number_ in (
                ("gradient", gradient),
                *(("optimizer", k) for k in facts["moments"].get(name, {}).values()),
            ):
                if number_ is None:
                    continue
                symbol, parameter = self.symbol(where, number_), self.symbol(where, self.variables[name]["symbol"])
                if (symbol.kind, symbol.elems) != (kind, parameter.elems):
                    self.fail(where, f"{symbol.kind} {symbol.name!r} is not the {kind} of {name!r}")

    def holding(self, where: str, name: str) -> Symbol:
        """The symbol of a variable that must have one."""
        if name not in self.variables:
            raise ProgramError(f"{where}: the program has no variable {name!r}")
        return self.symbol(f"{where}: {name!r}", self.variables[name]["symbol"])
