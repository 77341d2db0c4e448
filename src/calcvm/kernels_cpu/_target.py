"""The processor that code is compiled for, with the facts that hand-written code needs.

This module does not import Numba: a process that links cached code needs its target for the cache key.

The key has all fields of the target, not a level such as x86-64-v3: the name also selects LLVM's tuning, and only equal targets
promise equal code.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import llvmlite.binding as llvm

from calcvm.system import n_cores  # noqa: F401  (its former place)
from calcvm.without_signals import without_signals

PROBE = """define void @f(ptr %p) {
    %x = load <16 x float>, ptr %p, align 4
    %y = fadd <16 x float> %x, %x
    store <16 x float> %y, ptr %p, align 4
    ret void }"""


@dataclass(frozen=True)
class Target:
    """A processor, as LLVM spells it; further facts are read off LLVM's code for it.

    features : beyond those of its name ("+avx2,-fma"; empty for a name such as "x86-64-v3").
    jit : whether code is linked into this process, as for `host`; if not, it is position-independent, for any linker.
    abi : the convention of calls, where the triple leaves it open ("ilp32f").
    simd : width in bits and number of its vector registers, (32, 0) for none; read off LLVM's code if left out.
    dsp : whether it has Arm's instructions for products of pairs of 16 bits, which no C has.
    """

    triple: str
    cpu: str
    features: str = ""
    jit: bool = False
    abi: str = ""
    simd: tuple[int, int] | None = None
    dsp: bool = False

    def machine(self, opt: int = 2) -> llvm.TargetMachine:
        """LLVM's code generator for it; if ``jit``, with Numba's options for code that it links itself."""
        _know(self.triple)
        options: dict[str, Any] = {"reloc": "pic", "codemodel": "default", "abiname": self.abi}
        if self.jit:
            reloc = "static" if self.triple.startswith(("x86", "i386", "i686")) else "default"
            options = {"reloc": reloc, "codemodel": "jitdefault", "jit": True}
        of = llvm.Target.from_triple(self.triple)
        return of.create_target_machine(cpu=self.cpu, features=self.features, opt=opt, **options)

    @cached_property
    def vectors(self) -> tuple[int, int]:
        """Width in bits and number of the vector registers that the code generator uses, read off its assembly."""
        return self.simd or without_signals(self._vectors)

    def _vectors(self) -> tuple[int, int]:
        if not self.triple.startswith(("x86", "i386", "i686")):
            return (32, 0) if self.triple.startswith("riscv") else (128, 32)
        text = self.machine().emit_assembly(llvm.parse_assembly(PROBE))
        if "zmm" in text:
            return 512, 32
        return (256, 16) if "ymm" in text else (128, 16)

    @property
    def elf(self) -> bool:
        """Whether its object files are 64-bit ELF, which `_native` can inspect."""
        return "linux" in self.triple and "64" in self.triple.partition("-")[0]

    def lanes(self, bits: int) -> int:
        """Elements of so many bits in a vector; for short ones as many as of 32 bits, which they are combined with."""
        return max(self.vectors[0] // max(bits, 32), 1)

    @property
    def registers(self) -> int:
        """Vector registers."""
        return self.vectors[1]

    @property
    def masks(self) -> bool:
        """Whether masked loads and stores are instructions; otherwise they are emulated, and a scalar loop ends each vector loop."""
        return self.vectors[0] >= 256

    @property
    def streams(self) -> bool:
        """Whether whole vectors can be stored past the caches."""
        return self.triple.startswith("x86_64") and self.masks

    @property
    def free_masks(self) -> bool:
        """Whether masked loads cost nothing."""
        return self.vectors[0] == 512


@cache
def _know(triple: str) -> None:
    """Initialize LLVM's code generator of a triple; generators other than the machine's own only when needed."""
    if triple == llvm.get_process_triple():
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
    else:
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()


def host() -> Target:
    """The machine that this process runs on; ``NUMBA_CPU_NAME`` and ``NUMBA_CPU_FEATURES`` override it."""
    return _host(os.environ.get("NUMBA_CPU_NAME"), os.environ.get("NUMBA_CPU_FEATURES"))


@cache
def _host(cpu: str | None, features: str | None) -> Target:
    if features is None:
        features = "" if cpu else without_signals(lambda: llvm.get_host_cpu_features().flatten())
    return Target(llvm.get_process_triple(), cpu or without_signals(llvm.get_host_cpu_name), features, jit=True)


# ---------------------------------------------------------------- while compiling
_current: Target | None = None


@contextmanager
def on_target(target: Target) -> Iterator[None]:
    """Compile for a target (the caller holds the compiler's lock)."""
    global _current
    saved, _current = _current, target
    try:
        yield
    finally:
        _current = saved


def current() -> Target:
    """The target being compiled for."""
    return _current or host()


def compiling() -> Target | None:
    """The same; None if Numba compiles outside of our compiler."""
    return _current
