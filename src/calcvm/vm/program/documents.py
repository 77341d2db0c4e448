"""The format of a program's documents, field by field.

The verifier checks rows.  This module checks the data that Python reads from a program, and rejects invalid data before
creating anything from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from calcvm import init
from calcvm.errors import CalcError, ProgramError
from calcvm.ops.dims import Affine
from calcvm.ops.layouts import LAYOUTS
from calcvm.ops.optimizers import HYPER_SLOTS
from calcvm.ops.sizes import MAX_BATCH
from calcvm.ops.statement import PHASES
from calcvm.ops.types import BYTES, FLOAT
from calcvm.vm.program import schema
from calcvm.vm.program.schema import (
    Misfit,
    boolean,
    entry,
    integer,
    listing,
    mapping,
    number,
    one_of,
    optional,
    table,
    text,
)

DTYPES = ("float32", "float64")
MAX_WORKERS = 1024
MAX_BLOCKS = 65535  # on device cuda, whose workers are thread blocks
MAX_HEAP = 2**48
PAGES = "pages"  # the zone beyond the heap: the page file
MAX_SIZE = 2**60
MAX_RANK = 32  # the lowest limit among NumPy versions
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
    """One of calcvm's initializers, created from checked numbers."""
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
    """The initial value of a state symbol."""
    kind = _KIND(value)["kind"]
    return _STARTS[kind](value)


_FORM = entry(a=SIZE, b=integer(-MAX_SIZE, MAX_SIZE))
_SIZES = listing(_form, MAX_RANK)
_INITIALIZER = mapping({"class": one_of(*INITIALIZERS), "fields": table(number())})
_FUNCTION = mapping({"class": one_of(init.Function.__name__), "fields": mapping({"name": text("(?s:.+)")})})
_SYMBOL = optional(SIZE)
_STATE = {"symbol": _SYMBOL, "kind": text()}
_STARTS = {
    "rng": mapping(_STATE),
    "seed": mapping(_STATE),
    "float64": mapping({**_STATE, "value": number()}),
    "fill": mapping({**_STATE, "value": number()}),
    "constant": mapping({**_STATE, "array": text()}),
    "hyper": mapping({**_STATE, "slots": mapping({slot: number(infinite=True) for slot in HYPER_SLOTS})}),
}
STARTS = {  # for these kinds the type (FLOAT: the program's) and the number of elements
    "rng": ("int64", 2), "seed": (FLOAT, 1), "float64": ("float64", 1), "hyper": ("float64", len(HYPER_SLOTS)),
}  # fmt: skip
_KIND = mapping({"kind": one_of(*_STARTS)}, others=True)
_NAMES = listing(text())
KINDS = {
    "placeholder": "placeholder",
    "parameter": "parameter",
    "buffer": "buffer",
    "carry": "carry",
    "constant": "state",
    "state": "state",
}  # kind of a variable -> kind of its symbol
_VARIABLE = mapping(
    {
        "symbol": _SYMBOL, "shape": _shape, "kind": one_of(*KINDS, "result"),
        "path": optional(text()), "phase": one_of(None, *READ), "of": text(), "unreadable": text(),
        "classes": optional(integer(1, MAX_SIZE)),
    },
    optional={
        "layout": one_of("", *LAYOUTS), "over": one_of("sum", "other"), "why": text(), "totals": table(one_of("mean", "sum")), "inner": boolean, "ignored": integer(-(2**63), 2**63 - 1),
    },
)  # fmt: skip
_PATH = {"backward": boolean, "output": optional(text()), "needs": table(_NAMES)}
_SEVERAL = {"outputs": _NAMES, "rates": table(number()), "no_decay": _NAMES}
TRAINING = {
    "loss": text(), "optimizer": text(), "hyper": SIZE, "seed": SIZE, "accumulate": boolean,
    "moments": table(table(SIZE)), "gradients": table(_SYMBOL),
}  # fmt: skip
_COUNT = integer(0, 2**100)
_ADAPTS = mapping(
    {
        "of": optional(text()),
        "shape": listing(integer(1, MAX_SIZE), MAX_RANK),
        "axis": optional(integer(0, MAX_RANK)),
        "channels_last": boolean,
    }
)
_LAYER = entry(name=text(), shape=_shape, parameters=SIZE, flops=_COUNT, bytes=_COUNT)
EQUATIONS = table(
    mapping(
        {
            "language": integer(0, 2**31), "text": text(), "words": _NAMES, "reads": _NAMES, "sets": _NAMES,
            "types": table(text()), "declares": text(),
        }
    )
)  # fmt: skip
CELLS = table(
    mapping(
        {
            "language": integer(0, 2**31), "name": text(), "text": text(), "gates": integer(0, 2**31), "apart": integer(0, 2**31),
            "states": _NAMES, "parameters": _NAMES,
        }
    )
)  # fmt: skip
_WITH_EQUATIONS = mapping({}, optional={"equations": EQUATIONS, "cells": CELLS}, others=True)
INFO = mapping(
    {},
    optional={
        "variables": table(_VARIABLE),
        "parameters": table(mapping({"init": mapping({}, others=True), "trainable": boolean})),
        "buffers": table(mapping({"init": mapping({}, others=True)})),
        "carries": table(mapping({"init": mapping({}, others=True)}, optional={"steps": integer(1, 2**63 - 1)})),
        "state": listing(_start),
        "paths": table(mapping(_PATH, optional={**TRAINING, **_SEVERAL})),
        "layers": table(listing(_LAYER)),
        "called": table(text()),
        "adapts": table(_ADAPTS),
        "state_names": table(mapping({"names": table(text())}, optional={"form": one_of("turned", "flat")})),
        "device": one_of("cpu", "blas", "cuda", "small"),
        "mode": one_of(None, "grid", "graph", "fleet"),
        "precision": one_of("float32", "tf32"),
        "specialize": boolean,
        "equations": EQUATIONS,
        "cells": CELLS,
    },
    others=True,
)
DOCUMENT = mapping(
    {
        "format_version": integer(0, 2**31),
        "dtype": one_of(*DTYPES),
        "batch_size": integer(1, MAX_BATCH),
        "workers": integer(1, MAX_BLOCKS),
        "heap_elems": integer(0, MAX_HEAP),
        "sections": listing(entry(path=text(), phase=one_of(*PHASES), start=SIZE, stop=SIZE)),
        "zones": listing(
            mapping({"name": text(), "start": SIZE, "stop": SIZE, "persistent_start": SIZE, "persistent_stop": SIZE})
        ),
        "symbols": listing(
            entry(
                name=text(), kind=text(), offset=SIZE, elems=_form, shape=_shape, persistent=boolean, resident=boolean,
                members=listing(SIZE), dtype=one_of(*BYTES),
            )
        ),
        "labels": listing(text()),
        "info": mapping({}, others=True),
        "instructions": listing(entry(name=text(), form=text())),
    },
    optional={"layouts": table(one_of(*LAYOUTS))},  # of symbols, by their numbers
)  # fmt: skip


def know_equations(info: Mapping[str, Any]) -> None:
    """Register the rows of custom equations and recurrent cells (ProgramError: one was altered, or has no kernel)."""
    found = schema.check(_WITH_EQUATIONS, info, "info")
    try:
        if found.get("equations"):
            from calcvm.ops.stated import rows_of  # a module for equations, which an import does not need

            rows_of(found["equations"])
        if found.get("cells"):
            from calcvm.ops.cells import cells_of

            cells_of(found["cells"])
    except CalcError as error:
        raise ProgramError(str(error)) from None
