"""What code is compiled for: a processor, and what is known of it where code is written by hand.

No Numba here: a process that links what is in the cache needs its own target for the key.
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
from calcvm.undisturbed import undisturbed

PROBE = """define void @f(ptr %p) {
    %x = load <16 x float>, ptr %p, align 4
    %y = fadd <16 x float> %x, %x
    store <16 x float> %y, ptr %p, align 4
    ret void }"""


@dataclass(frozen=True)
class Target:
    """A processor, as LLVM spells it; what else is known of it is read off LLVM's code for it.

    features : that it has beside those of its name ("+avx2,-fma"; of a name such as "x86-64-v3" nothing is left to say).
    jit : whether code is linked into this process, as `host`'s is; else it is position-independent, for any linker.
    """

    triple: str
    cpu: str
    features: str = ""
    jit: bool = False

    def machine(self, opt: int = 2) -> llvm.TargetMachine:
        """LLVM's generator of code for it (of Numba's options for what it links itself, where ``jit``)."""
        _know(self.triple)
        options: dict[str, Any] = {"reloc": "pic", "codemodel": "default"}
        if self.jit:
            reloc = "static" if self.triple.startswith(("x86", "i386", "i686")) else "default"
            options = {"reloc": reloc, "codemodel": "jitdefault", "jit": True}
        of = llvm.Target.from_triple(self.triple)
        return of.create_target_machine(cpu=self.cpu, features=self.features, opt=opt, **options)

    @cached_property
    def vectors(self) -> tuple[int, int]:
        """Width in bits and number of the vector registers that the code generator uses, read off its assembly."""
        return undisturbed(self._vectors)

    def _vectors(self) -> tuple[int, int]:
        text = self.machine().emit_assembly(llvm.parse_assembly(PROBE))
        if "zmm" in text:
            return 512, 32
        return (256, 16) if "ymm" in text else (128, 16 if "xmm" in text else 32)

    @property
    def elf(self) -> bool:
        """Whether its object files are ELF of 64 bits, which `_native` can look into."""
        return "linux" in self.triple and "64" in self.triple.partition("-")[0]

    def lanes(self, bits: int) -> int:
        """Elements of so many bits in a vector; of short ones as many as of 32 bits, with which they meet."""
        return self.vectors[0] // max(bits, 32)

    @property
    def registers(self) -> int:
        """Vector registers."""
        return self.vectors[1]

    @property
    def masks(self) -> bool:
        """Masked loads and stores are instructions; elsewhere they are emulated, and a scalar loop ends a vector loop."""
        return self.vectors[0] >= 256

    @property
    def streams(self) -> bool:
        """Stores past the caches are instructions, of whole vectors."""
        return self.triple.startswith("x86_64") and self.masks

    @property
    def free_masks(self) -> bool:
        """Masked loads cost nothing."""
        return self.vectors[0] == 512


@cache
def _know(triple: str) -> None:
    """Let LLVM know the generator of a triple: others than the machine's own only where they are asked for."""
    if triple == llvm.get_process_triple():
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
    else:
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()


def host() -> Target:
    """The machine that this process runs on; ``NUMBA_CPU_NAME`` and ``NUMBA_CPU_FEATURES`` put others in place of it."""
    return _host(os.environ.get("NUMBA_CPU_NAME"), os.environ.get("NUMBA_CPU_FEATURES"))


@cache
def _host(cpu: str | None, features: str | None) -> Target:
    if features is None:
        features = "" if cpu else undisturbed(lambda: llvm.get_host_cpu_features().flatten())
    return Target(llvm.get_process_triple(), cpu or undisturbed(llvm.get_host_cpu_name), features, jit=True)


# ---------------------------------------------------------------- while compiling
_current: Target | None = None


@contextmanager
def on_target(target: Target) -> Iterator[None]:
    """Compile for a target (the caller has the compiler's lock)."""
    global _current
    saved, _current = _current, target
    try:
        yield
    finally:
        _current = saved


def current() -> Target:
    """The target that is being compiled for."""
    return _current or host()


def compiling() -> Target | None:
    """The same; None outside of our compiler, where Numba compiles by itself."""
    return _current
