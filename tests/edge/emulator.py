"""Packs on an emulated processor: linked with nothing but the compiler's own runtime, instructions counted, the stack painted."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from elftools.elf.elffile import ELFFile
from unicorn import (
    UC_ARCH_ARM,
    UC_ARCH_ARM64,
    UC_ARCH_RISCV,
    UC_HOOK_CODE,
    UC_MODE_ARM,
    UC_MODE_MCLASS,
    UC_MODE_RISCV32,
    UC_MODE_RISCV64,
    UC_MODE_THUMB,
    Uc,
    UcError,
)
from unicorn import arm64_const as a64
from unicorn import arm_const as a32
from unicorn import riscv_const as rv

from calcvm.edge import linker
from calcvm.edge.targets import Processor

CODE, HEAP, STACK, END = 0x10000, 0x2000_0000, 0x3000_0000, 0x0F00_0000
STACK_BYTES, PAINT, MOST = 1 << 20, b"\xa5", 20_000_000
LAYOUT = """SECTIONS {{ . = {code:#x}; .text : {{ *(.text*) }} .rodata : {{ *(.rodata*) }} .ARM.exidx : {{ *(.ARM.exidx*) }}
.data : {{ *(.data*) }} .bss : {{ *(.bss*) *(COMMON) }} /DISCARD/ : {{ *(.comment) *(.note*) *(.eh_frame*) }} }}"""


def linked(code: bytes, processor: Processor, entries: list[str], folder: Path) -> bytes:
    """An executable of an object, in which all but the entries and what they call is left out."""
    layout = folder / "layout.ld"
    layout.write_text(LAYOUT.format(code=CODE))
    keep = [f"-Wl,-u,{name}" for name in entries]
    options = ["-Wl,--gc-sections", f"-Wl,-e,{entries[0]}", *keep, f"-Wl,-T,{layout.resolve()}"]
    return linker.linked({"pack.o": code}, [*processor.zig, *options], "an executable for the emulator")


def code_bytes(elf: bytes) -> int:
    """Bytes of code and constants."""
    return _bytes_of(elf, ".text", ".rodata")


def unwinding_bytes(elf: bytes) -> int:
    """Bytes of Arm's tables for the unwinding of stacks, 8 a function."""
    return _bytes_of(elf, ".ARM.exidx")


def _bytes_of(elf: bytes, *names: str) -> int:
    return sum(s["sh_size"] for s in ELFFile(io.BytesIO(elf)).iter_sections() if s.name in names)


class Machine:
    """A processor with a linked pack, a heap and a stack.

    count : instructions of the last call.  stack : bytes that it took.
    """

    def __init__(self, elf: bytes, processor: Processor, heap_bytes: int):
        file = ELFFile(io.BytesIO(elf))
        symbols = file.get_section_by_name(".symtab")
        self.symbols = {s.name: s["st_value"] for s in symbols.iter_symbols()}
        triple = processor.target.triple
        self.family = next(f for f in ("thumbv7-", "thumb", "aarch64", "riscv32", "riscv64") if triple.startswith(f))
        self.uc, self.registers, self.top, self.returns = self._made()
        for start, size in ((0, 1 << 24), (HEAP, heap_bytes), (STACK, STACK_BYTES), (END, 1 << 12)):
            self.uc.mem_map(start, (size + 0xFFF) & ~0xFFF)
        for segment in file.iter_segments():
            if segment["p_type"] == "PT_LOAD":
                self.uc.mem_write(segment["p_vaddr"], segment.data())
        self._floats_on()
        self.count = self.stack = 0
        self.uc.hook_add(UC_HOOK_CODE, self._counted)

    def _made(self):
        """The emulator, its registers of arguments, its stack pointer, and where it keeps the address of return."""
        if self.family == "thumb":
            uc = Uc(UC_ARCH_ARM, UC_MODE_THUMB | UC_MODE_MCLASS)
            uc.ctl_set_cpu_model(a32.UC_CPU_ARM_CORTEX_M33)
            return uc, (a32.UC_ARM_REG_R0, a32.UC_ARM_REG_R1), a32.UC_ARM_REG_SP, a32.UC_ARM_REG_LR
        if self.family == "aarch64":
            uc = Uc(UC_ARCH_ARM64, UC_MODE_ARM)
            return uc, (a64.UC_ARM64_REG_X0, a64.UC_ARM64_REG_X1), a64.UC_ARM64_REG_SP, a64.UC_ARM64_REG_LR
        if self.family == "thumbv7-":
            uc = Uc(UC_ARCH_ARM, UC_MODE_ARM)
            uc.ctl_set_cpu_model(a32.UC_CPU_ARM_CORTEX_A7)
            return uc, (a32.UC_ARM_REG_R0, a32.UC_ARM_REG_R1), a32.UC_ARM_REG_SP, a32.UC_ARM_REG_LR
        uc = Uc(UC_ARCH_RISCV, UC_MODE_RISCV32 if self.family == "riscv32" else UC_MODE_RISCV64)
        return uc, (rv.UC_RISCV_REG_A0, rv.UC_RISCV_REG_A1), rv.UC_RISCV_REG_SP, rv.UC_RISCV_REG_RA

    def _floats_on(self) -> None:
        uc = self.uc
        if self.family == "thumb":
            uc.mem_map(0xE000_E000, 0x1000)
            try:
                uc.mem_write(0xE000_ED88, (0xF << 20).to_bytes(4, "little"))
            except UcError:
                pass
            uc.reg_write(a32.UC_ARM_REG_FPEXC, 1 << 30)
        elif self.family == "aarch64":
            uc.reg_write(a64.UC_ARM64_REG_CPACR_EL1, 3 << 20)
        elif self.family == "thumbv7-":
            uc.reg_write(a32.UC_ARM_REG_C1_C0_2, uc.reg_read(a32.UC_ARM_REG_C1_C0_2) | 0xF << 20)
            uc.reg_write(a32.UC_ARM_REG_FPEXC, 1 << 30)
        else:
            uc.reg_write(rv.UC_RISCV_REG_MSTATUS, uc.reg_read(rv.UC_RISCV_REG_MSTATUS) | 0x6000)

    def _counted(self, uc, address, size, _) -> None:
        self.count += 1

    def write(self, array: np.ndarray, at: int = 0) -> None:
        """Write an array into the heap, ``at`` bytes from its start."""
        self.uc.mem_write(HEAP + at, np.ascontiguousarray(array).tobytes())

    def read(self, n: int, dtype: str, at: int = 0) -> np.ndarray:
        """n elements of the heap."""
        return np.frombuffer(bytes(self.uc.mem_read(HEAP + at, int(n) * np.dtype(dtype).itemsize)), dtype)

    def call(self, name: str) -> int:
        """Call an entry on the heap; what it returns."""
        uc, top = self.uc, STACK + STACK_BYTES - 64
        uc.mem_write(STACK, PAINT * (STACK_BYTES - 64))
        uc.reg_write(self.registers[0], HEAP)
        thumb = self.family.startswith("thumb")
        uc.reg_write(self.returns, END | thumb)
        uc.reg_write(self.top, top)
        self.count = 0
        uc.emu_start(self.symbols[name] | thumb, END, count=MOST)
        assert self.count < MOST, f"{name} does not return"
        painted = bytes(uc.mem_read(STACK, STACK_BYTES - 64))
        self.stack = top - STACK - (len(painted) - len(painted.lstrip(PAINT)))
        return uc.reg_read(self.registers[0]) & 0xFFFF_FFFF


def own_bytes(elf: bytes, code: bytes) -> int:
    """Bytes of an executable without the functions that the linker added to an object."""
    own = {s.name for s in _functions(code)}
    added = {s["st_value"]: s["st_size"] for s in _functions(elf) if s.name not in own}  # some have several names
    return code_bytes(elf) - sum(added.values())


def _functions(elf: bytes) -> list:
    symbols = ELFFile(io.BytesIO(elf)).get_section_by_name(".symtab").iter_symbols()
    return [s for s in symbols if s["st_info"]["type"] == "STT_FUNC"]
