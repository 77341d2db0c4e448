"""The processor that code is compiled for, with the facts that hand-written code needs.

This module does not import Numba: a process that links cached code needs its target for the cache key.

Code is compiled for the highest level that a processor has (`LEVELS`), not for the processor: so all machines of a level have the
same code, and the same bits, and a wheel can bring it (`calcvm.kernels_cpu._shipped`).  ``CALCVM_CPU`` names another one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import takewhile
from typing import Any

import llvmlite.binding as llvm

from calcvm.errors import CalcError
from calcvm.system import n_cores  # noqa: F401  (its former place)
from calcvm.without_signals import without_signals

PROBE = """define void @f(ptr %p) {
    %x = load <16 x float>, ptr %p, align 4
    %y = fadd <16 x float> %x, %x
    store <16 x float> %y, ptr %p, align 4
    ret void }"""


# what LLVM calls the levels of processors, by the first part of a triple, and what a processor must have beside the level before
LEVELS = {
    "x86_64": {
        "x86-64": (),
        "x86-64-v2": ("cx16", "popcnt", "sahf", "sse4.2", "ssse3"),
        "x86-64-v3": ("avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe"),
        "x86-64-v4": ("avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"),
    },
    "aarch64": {"generic": ()},
}
# LLVM's tuning for this level has loops of half the vectors
WHOLE_VECTORS = {"x86-64-v4": "-prefer-256-bit"}


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
    def x86(self) -> bool:
        """Whether it is an x86 of 64 bits."""
        return self.triple.startswith("x86_64")

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
        return self.x86 and self.masks

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


NATIVE = "native"  # of CALCVM_CPU: the processor itself, with LLVM's tuning for it


def host() -> Target:
    """What this process runs: the code of its processor's highest level, or of what ``CALCVM_CPU`` names: a lower one, or "native"."""
    return _host(os.environ.get("CALCVM_CPU") or None)


@cache
def _host(named: str | None) -> Target:
    named = named and named.strip().lower().replace("_", "-")
    triple, found = without_signals(lambda: (llvm.get_process_triple(), llvm.get_host_cpu_features()))
    arch = triple.partition("-")[0] if sys.platform == "linux" else ""
    here = levels(arch, found)
    if named not in (None, NATIVE, *here):
        known = "which this processor lacks" if named in LEVELS.get(arch, ()) else "which is unknown"
        raise CalcError(
            f"CALCVM_CPU names {named!r}, {known}: take one of {', '.join([*here, NATIVE])}, or leave it unset"
        )
    if here and named != NATIVE:
        return of_level(arch, named or here[-1])
    return Target(triple, without_signals(llvm.get_host_cpu_name), found.flatten(), jit=True)


def levels(arch: str, features: Mapping[str, bool]) -> list[str]:
    """The levels that a processor with these features has, in rising order."""
    known = LEVELS.get(arch, {})
    return [*takewhile(lambda name: all(features.get(f) for f in known[name]), known)]


def of_level(arch: str, level: str) -> Target:
    """The target of a level: the same on all systems, which name themselves by several triples."""
    return Target(f"{arch}-unknown-linux-gnu", level, WHOLE_VECTORS.get(level, ""), jit=True)


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
