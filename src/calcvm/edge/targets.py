"""Processors that packs are made for.  Nothing is read off the machine that makes them."""

from __future__ import annotations

from calcvm import checks
from calcvm.frozen import frozen
from calcvm.kernels_cpu._target import Target

SCALAR = (32, 0)  # no vector registers


@frozen
class Processor:
    """A processor.

    target : for the code generator.  bits : of a pointer, and so of sizes and offsets.
    small : code is as short as can be, and products are plain loops.
    zig : options of ``zig cc`` that name the same processor, for linking.
    """

    name: str
    what: str
    target: Target
    bits: int
    small: bool
    zig: tuple[str, ...]


def _bare(
    name: str, what: str, triple: str, cpu: str, zig: tuple[str, str], features: str = "", abi: str = ""
) -> Processor:
    """A processor of 32 bits without an operating system."""
    options = ("-target", zig[0], f"-mcpu={zig[1]}")
    return Processor(name, what, Target(triple, cpu, features, abi=abi, simd=SCALAR), 32, True, options)


# LLVM wants all four parts of a triple: with fewer it takes another convention of calls without a word
ARM, ARM_HARD, RISCV = "thumb-freestanding-eabi", "thumb-freestanding-eabihf", "riscv32-freestanding-none"
TARGETS = {
    processor.name: processor
    for processor in (
        _bare("cortex-m0plus", "Arm Cortex-M0+, without floats: Raspberry Pi Pico (RP2040)", "thumbv6m-unknown-none-eabi", "cortex-m0plus", (ARM, "cortex_m0plus")),
        _bare("cortex-m4f", "Arm Cortex-M4 with floats: STM32F4, nRF52", "thumbv7em-unknown-none-eabihf", "cortex-m4", (ARM_HARD, "cortex_m4+vfp4d16sp")),
        _bare("cortex-m33", "Arm Cortex-M33 with floats: Raspberry Pi Pico 2 (RP2350), nRF53, STM32U5", "thumbv8m.main-unknown-none-eabihf", "cortex-m33", (ARM_HARD, "cortex_m33+fp_armv8d16sp")),
        _bare("riscv32", "RISC-V of 32 bits with floats (rv32imafc)", "riscv32-unknown-none-elf", "generic-rv32", (RISCV, "generic_rv32+m+a+c+f"), "+m,+a,+f,+c", "ilp32f"),
        _bare("esp32-c3", "RISC-V of 32 bits without floats (rv32imc): ESP32-C3", "riscv32-unknown-none-elf", "generic-rv32", (RISCV, "generic_rv32+m+c"), "+m,+c", "ilp32"),
        Processor("raspberry-pi-4", "Arm Cortex-A72, 64 bits", Target("aarch64-unknown-linux-gnu", "cortex-a72"), 64, False, ("-target", "aarch64-freestanding-none", "-mcpu=cortex_a72")),
        Processor("linux-x86_64", "x86-64-v3 (AVX2), 64 bits", Target("x86_64-unknown-linux-gnu", "x86-64-v3"), 64, False, ("-target", "x86_64-freestanding-none", "-mcpu=x86_64_v3")),
    )
}  # fmt: skip
ALIASES = {"pico": "cortex-m0plus", "pico-2": "cortex-m33"}


def processor_of(name: object) -> Processor:
    """A processor by its name, or by that of a board (CalcError: there is none)."""
    return TARGETS[ALIASES.get(checks.choice("target", name, (*TARGETS, *ALIASES)), str(name))]
