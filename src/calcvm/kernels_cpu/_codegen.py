"""Numba's compiler for any target.

Numba adds what it compiles for a processor to its engine at once, with wrappers for Python, even if only kernels call
the function.  Here the code stays IR, generated for the target, until it becomes part of an object file.
All uses of Numba beyond its public names are in this module and in `_common.compile_object`.

A helper is compiled once for all integers, even if a call has a literal.  Specializing on literals, as Numba does, took 17 %
longer over all kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import llvmlite.binding as llvm
from numba import _dynfunc, types
from numba.core import codegen, config, fastmathpass
from numba.core.cpu import CPUContext
from numba.core.registry import CPUDispatcher, CPUTarget, cpu_target
from numba.extending import models, register_model

from calcvm.kernels_cpu._target import Target, compiling


class Library(codegen.AOTCodeLibrary):
    """The IR of a function and of everything it calls, optimized once, as a whole, when it becomes an object file.

    Numba would optimize each called function separately, with everything below it, and generate code that never runs.  That made
    compiling kernels take half as long again.  Over 115 rows timed side by side, these kernels are as fast (geometric mean 1.02).
    """

    def _optimize_final_module(self) -> None:
        """Parts are not optimized."""

    def optimize(self) -> None:
        super()._optimize_final_module()


class Codegen(codegen.CPUCodegen):
    """Numba's passes for a target's machine, without an engine."""

    _library_class = Library

    def __init__(self, target: Target):
        self._triple = target.triple
        # At its highest level LLVM fuses AArch64's products and sums by what else is computed there: the last elements of a loop, which
        # go one by one, would have other bits than in its vectors.
        self._tm = target.machine(config.OPT if target.x86 else 2)
        self._target_data = self._tm.target_data
        self._data_layout = str(self._target_data)
        # as Numba sets them for the passes that come first
        self._loopvect, self._opt_level = (True, 3) if config.OPT.is_opt_max else (False, 0)

    def _create_empty_module(self, name: str) -> Any:
        module = super()._create_empty_module(name)
        module.triple = self._triple
        return module

    def _add_module(self, module: llvm.ModuleRef) -> None:
        """There is no engine to add it to."""


class Context(CPUContext):
    """Numba's context of the processor with another code generator; typing and lowering are the same for all."""

    def __init__(self, target: Target):
        self.__dict__ |= cpu_target.target_context.subtarget(_internal_codegen=Codegen(target)).__dict__

    def get_executable(self, library: Any, fndesc: Any, env: Any) -> Any:
        """The object by which Numba identifies a compiled function; it is never called."""
        library.finalize()
        return _dynfunc.make_function(fndesc.lookup_module(), fndesc.qualname.split(".")[-1], "", 0, env, (library,))

    def post_lowering(self, module: Any, library: Any) -> None:
        """As Numba's, without linking its runtime: our kernels allocate nothing."""
        if self.fastmath:
            fastmathpass.rewrite_module(module, self.fastmath)


context_of = cache(Context)


class _Described(CPUTarget):
    """Numba's description of a target."""

    def __init__(self, target: Target):
        super().__init__("cpu")
        self.target = target

    @property
    def target_context(self) -> Any:
        return context_of(self.target)

    @property
    def typing_context(self) -> Any:
        return cpu_target.typing_context


_described = cache(_Described)


class Variant(NamedTuple):
    """What is being compiled besides the target: the device whose routines are called; ``straight`` : operands left out have no address."""

    device: str
    straight: bool


variant = Variant("cpu", False)


class Helper(CPUDispatcher):
    """A jitted function that compiled code calls, compiled for each target and variant.  Calls from Python use Numba's version."""

    def __init__(self, fn: Callable, options: dict[str, Any]):
        super().__init__(fn, targetoptions={"nopython": True, "boundscheck": None, **options})
        self.options = options
        self.compiled: dict[tuple[Target, Variant], CPUDispatcher] = {}

    @property
    def _numba_type_(self) -> Any:
        return _HelperType(self)

    def on(self, target: Target) -> CPUDispatcher:
        kind = target, variant
        if kind not in self.compiled:
            self.compiled[kind] = _OnTarget(self, target)
        return self.compiled[kind]


class _OnTarget(CPUDispatcher):
    def __init__(self, helper: Helper, target: Target):
        self.targetdescr = _described(target)
        super().__init__(
            helper.py_func,
            targetoptions={**helper.targetoptions, "no_cpython_wrapper": True, "no_cfunc_wrapper": True},
        )

    def get_call_template(self, args: tuple, kws: dict[str, Any]) -> Any:
        """Compile once per type; Numba would compile again for each literal number."""
        return super().get_call_template(tuple(map(types.unliteral, args)), kws)


class _HelperType(types.Dispatcher):
    """The type of a helper; it stands for the code compiled for the current target."""

    @property
    def dispatcher(self) -> CPUDispatcher:
        helper, target = super().dispatcher, compiling()
        return helper if target is None else helper.on(target)


register_model(_HelperType)(models.OpaqueModel)  # the model of its base class
