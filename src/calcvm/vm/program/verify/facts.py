"""Checks of a program's facts besides its rows: references are valid."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from calcvm import init
from calcvm.errors import ProgramError
from calcvm.ops.dims import Shape, affine, numel
from calcvm.ops.types import dtype_of
from calcvm.vm.program import schema
from calcvm.vm.program.documents import INFO, KINDS, STARTS, TRAINING, initializer
from calcvm.vm.program.program_data import ProgramData, Symbol
from calcvm.vm.program.schema import mapping, text


def check_info(program: ProgramData) -> None:
    """Reject facts that have another form or contradict the program (ProgramError)."""
    info = schema.check(INFO, program.info, "info")
    _Facts(program, info).check()


class _Facts:
    """Facts of a program, in the right form."""

    def __init__(self, program: ProgramData, info: Mapping[str, Any]):
        self.program = program
        self.variables: Mapping[str, Any] = info.get("variables", {})
        self.parameters: Mapping[str, Any] = info.get("parameters", {})
        self.buffers: Mapping[str, Any] = info.get("buffers", {})
        self.carries: Mapping[str, Any] = info.get("carries", {})
        self.state: list[Any] = info.get("state", [])
        self.paths: Mapping[str, Any] = info.get("paths", {})
        self.called: Mapping[str, str] = info.get("called", {})
        self.adapts: Mapping[str, Any] = info.get("adapts", {})

    def check(self) -> None:
        for name, facts in self.variables.items():
            self.variable(f"variable {name!r}", facts)
        for kind, table_ in (("parameter", self.parameters), ("buffer", self.buffers), ("carry", self.carries)):
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

    def shape_of(self, facts: Any) -> Shape:
        """The shape of a variable's symbol: of a carry, and of views of it, that of the largest batch."""
        shape, batch = facts["shape"], self.program.batch_size
        return tuple(affine(n.at(batch)) for n in shape) if self.variables[facts["of"]]["kind"] == "carry" else shape

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
            raise ProgramError(f"{where} is declared as a view of {facts['of']!r}, which lies elsewhere")
        if facts["symbol"] is None:
            if not (result and facts["unreadable"]):
                self.fail(where, f"a {facts['kind']} without a symbol")
            return
        if result and not computed:
            self.fail(where, "a result that no phase computes")
        symbol = self.symbol(where, facts["symbol"])
        elems = numel(self.shape_of(facts))
        if elems != symbol.elems or not (result or symbol.kind == KINDS[facts["kind"]]):
            self.fail(
                where,
                f"{facts['kind']} of {elems} elements, is not the symbol {symbol.name!r}, {symbol.kind} of {symbol.elems}",
            )

    def initialized(self, where: str, name: str, kind: str, start: Any) -> None:
        facts = self.variables.get(name)
        if facts is None or facts["kind"] != kind:
            raise ProgramError(f"{where}: no variable of that kind")
        symbol = self.symbol(where, facts["symbol"])
        if not symbol.persistent or symbol.shape != self.shape_of(facts):
            self.fail(where, f"symbol {symbol.name!r} does not persist or is of another shape")
        if "array" in start:
            array = schema.check(mapping({"array": text()}), start, f"{where}: its initializer")["array"]
            self.constant(where, array, tuple(size.b for size in facts["shape"][kind == "carry" :]))
            return
        made = schema.check(initializer, start, f"{where}: its initializer")
        if isinstance(made, init.Orthogonal) and len(facts["shape"][kind == "carry" :]) < 2:
            self.fail(where, "Orthogonal needs two axes")

    def constant(self, where: str, name: str, shape: tuple[int, ...]) -> None:
        array = self.program.constants.get(name)
        if array is None or array.shape != shape or array.dtype.kind not in "biuf":
            self.fail(where, f"the program has no constant {name!r} of shape {shape}")

    def start(self, where: str, facts: Any) -> None:
        symbol, kind = self.symbol(where, facts["symbol"]), facts["kind"]
        if symbol.kind not in ("state", "optimizer") or not symbol.persistent or symbol.elems.a:
            self.fail(where, f"initial state of {symbol.kind} {symbol.name!r}, which is no persistent state")
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
        missing = TRAINING.keys() - facts.keys()
        if missing:
            self.fail(where, f"it trains, but has no {min(missing)!r}")
        if self.holding(where, facts["loss"]).elems != 1:
            self.fail(where, f"its loss {facts['loss']!r} is not a single number")
        for role in ("seed", "hyper"):
            symbol, wanted = self.symbol(f"{where}: its {role}", facts[role]), self.wanted(role)
            if symbol.kind != "state" or self.form(symbol) != wanted:
                self.fail(where, f"its {role} is not a state of {wanted[1]} {wanted[0]}")
        for name in {*facts["gradients"], *facts["moments"]} - {*self.parameters}:
            self.fail(where, f"it trains {name!r}, which is no parameter")
        for name, gradient in facts["gradients"].items():
            if gradient is None and facts["accumulate"]:
                self.fail(where, f"it accumulates gradients, but {name!r} has none")
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
