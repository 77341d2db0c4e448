"""Processors that packs are made for.  Nothing is read off the machine that makes them."""

from __future__ import annotations

from calcvm import checks
from calcvm.frozen import frozen
from calcvm.kernels_cpu._target import Target

FLOATS, NO_FLOATS = (32, 16), (32, 0)  # registers of one number, and none


@frozen
class Processor:
    """A processor.

    target : for the code generator.  bits : of a pointer, and so of sizes and offsets; with 32 hyperparameters are float32.
    zig : options of ``zig cc`` that name the same processor, for linking; none if LLVM has no code for it: then C is made, by way of a
        processor that is like it.
    objective : of `calcvm.Model.export`, unless it is given.  linux : the triple of ``zig cc`` for libraries, if it may run Linux.
    """

    name: str
    what: str
    target: Target
    bits: int
    zig: tuple[str, ...]
    objective: str = "size"
    linux: str = ""

    @property
    def formats(self) -> tuple[str, ...]:
        """What packs may be written as; the first by default."""
        if self.wasm:
            return ("browser",)
        if not self.zig:
            return ("c", "micropython")
        return ("object", "archive", *["c", "micropython"] * self.scalar, *(("shared", "python") if self.linux else ()))

    @property
    def scalar(self) -> bool:
        """Whether it has no vectors; then code is made as small as can be, which with vectors would be several times slower."""
        return self.target.vectors[0] == 32

    @property
    def wasm(self) -> bool:
        """Whether its code is WebAssembly, which is linked here and called from JavaScript."""
        return self.target.triple.startswith("wasm")


def _bare(
    name: str,
    what: str,
    triple: str,
    cpu: str,
    zig: tuple[str, str] | None,
    features: str = "",
    abi: str = "",
    simd: tuple[int, int] = FLOATS,
    dsp: bool = False,
) -> Processor:
    """A processor of 32 bits without an operating system."""
    options = ("-target", zig[0], f"-mcpu={zig[1]}") if zig else ()
    return Processor(name, what, Target(triple, cpu, features, abi=abi, simd=simd, dsp=dsp), 32, options)


# LLVM wants all four parts of a triple: with fewer it takes another convention of calls without a word
ARM, ARM_HARD, RISCV = "thumb-freestanding-eabi", "thumb-freestanding-eabihf", "riscv32-freestanding-none"
TARGETS = {
    processor.name: processor
    for processor in (
        _bare("cortex-m0plus", "Arm Cortex-M0+, without floats: Raspberry Pi Pico (RP2040)", "thumbv6m-unknown-none-eabi", "cortex-m0plus", (ARM, "cortex_m0plus"), simd=NO_FLOATS),
        _bare("cortex-m4f", "Arm Cortex-M4 with floats: STM32F4, nRF52", "thumbv7em-unknown-none-eabihf", "cortex-m4", (ARM_HARD, "cortex_m4+vfp4d16sp"), dsp=True),
        _bare("cortex-m33", "Arm Cortex-M33 with floats: Raspberry Pi Pico 2 (RP2350), nRF53, STM32U5", "thumbv8m.main-unknown-none-eabihf", "cortex-m33", (ARM_HARD, "cortex_m33+fp_armv8d16sp"), dsp=True),
        _bare("riscv32", "RISC-V of 32 bits with floats (rv32imafc)", "riscv32-unknown-none-elf", "generic-rv32", (RISCV, "generic_rv32+m+a+c+f"), "+m,+a,+f,+c", "ilp32f"),
        _bare("esp32-c3", "RISC-V of 32 bits without floats (rv32imc): ESP32-C3", "riscv32-unknown-none-elf", "generic-rv32", (RISCV, "generic_rv32+m+c"), "+m,+c", "ilp32", NO_FLOATS),
        _bare("esp32", "Xtensa LX6 and LX7 with floats, as C alone: ESP32, ESP32-S3", "riscv32-unknown-none-elf", "generic-rv32", None, "+m,+a,+f,+c", "ilp32f"),
        Processor("raspberry-pi-4", "Arm Cortex-A72, 64 bits", Target("aarch64-unknown-linux-gnu", "cortex-a72"), 64, ("-target", "aarch64-freestanding-none", "-mcpu=cortex_a72"), linux="aarch64-linux-musl"),
        Processor("armv7", "Arm Cortex-A7 and later, 32 bits, NEON: Raspberry Pi 2, Linux boards", Target("thumbv7-unknown-linux-gnueabihf", "cortex-a7", "+neon,+vfp4"), 32, ("-target", "arm-freestanding-eabihf", "-mcpu=cortex_a7"), linux="arm-linux-musleabihf"),
        Processor("riscv64", "RISC-V of 64 bits (rv64gc)", Target("riscv64-unknown-linux-gnu", "generic-rv64", "+m,+a,+f,+d,+c", abi="lp64d", simd=FLOATS), 64, ("-target", "riscv64-freestanding-none", "-mcpu=baseline_rv64"), linux="riscv64-linux-musl"),
        Processor("browser", "WebAssembly with vectors: browsers, Node", Target("wasm32-unknown-unknown", "generic", "+simd128,+bulk-memory", simd=(128, 16)), 32, ("-target", "wasm32-freestanding", "-mcpu=generic+simd128+bulk_memory"), "speed"),
        Processor("linux-x86_64", "x86-64-v3 (AVX2), 64 bits", Target("x86_64-unknown-linux-gnu", "x86-64-v3"), 64, ("-target", "x86_64-freestanding-none", "-mcpu=x86_64_v3"), "speed", "x86_64-linux-musl"),
    )
}  # fmt: skip
ALIASES = {"pico": "cortex-m0plus", "pico-2": "cortex-m33"}


def processor_of(name: object) -> Processor:
    """A processor by its name, or by that of a board (CalcError: there is none)."""
    return TARGETS[ALIASES.get(checks.choice("target", name, (*TARGETS, *ALIASES)), str(name))]
