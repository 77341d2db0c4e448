"""Firmware that learns digits on a microcontroller, and goes on after its power has failed; the PC reads what it has learned.

python examples/firmware.py [--out FOLDER] compiles it for a Cortex-M4F and runs it in an emulator (extras ``demo`` and ``edge``, and
the package unicorn); it draws firmware.png.
"""

from __future__ import annotations

import argparse
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from unicorn import UC_ARCH_ARM, UC_HOOK_MEM_WRITE, UC_MODE_MCLASS, UC_MODE_THUMB, Uc
from unicorn import arm_const as arm

import calcvm as cv
from calcvm import nn

TRAINED, TESTED, EPOCHS, HIDDEN = 500, 200, 12, 32
# as in an STM32F4: code and constants, two sectors for the state, memory, a register to report to
FLASH, PAGES, SECTOR, RAM, REPORT = 0x0800_0000, 0x080C_0000, 0x2_0000, 0x2000_0000, 0x4000_0000
RAM_BYTES, END = 128 << 10, 0x0808_0000

FIRMWARE = """
#include "digits.h"
#include "data.h"

static _Alignas(DIGITS_HEAP_ALIGN) unsigned char heap[DIGITS_HEAP_BYTES];
static unsigned char page[DIGITS_PAGE_BYTES];

static void write_flash(unsigned char *to, const unsigned char *from, uint32_t n) /* on a board, its driver */
{
    while (n--)
        *to++ = *from++;
}

static void see(int k)
{
    for (int i = 0; i < 64; i++)
        digits_input(heap)[i] = (float)SCANS[k][i] / 16;
}

static int is_right(int k)
{
    see(k);
    digits_predict(heap);
    const float *scores = digits_output(heap);
    int best = 0;
    for (int i = 1; i < 10; i++)
        if (scores[i] > scores[best])
            best = i;
    return best == LABELS[k];
}

int main(void)
{
    uint32_t epoch = 0;
    *(volatile uint32_t *)0xE000ED88 |= 0xF << 20; /* the unit of floats on */
    digits_start(heap);
    digits_load(heap, PAGES, PAGES + SECTOR, &epoch);
    while (epoch < EPOCHS) {
        float loss = 0, right = 0;
        for (int k = 0; k < TRAINED; k++) {
            see(k);
            digits_target(heap)[0] = LABELS[k];
            digits_step(heap);
            loss += digits_loss(heap)[0];
        }
        for (int k = TRAINED; k < TRAINED + TESTED; k++)
            right += (float)is_right(k);
        epoch++;
        digits_save(heap, epoch, page);
        write_flash(PAGES + epoch % 2 * SECTOR, page, DIGITS_PAGE_BYTES);
        REPORT[0] = loss / TRAINED;
        REPORT[1] = right / TESTED;
        REPORT[2] = (float)epoch;
    }
    return 0;
}
"""
LAYOUT = f"""SECTIONS {{ . = {FLASH:#x}; .text : {{ *(.text*) *(.rodata*) }} .ARM.exidx : {{ *(.ARM.exidx*) }} . = {RAM:#x}; .bss : {{ *(.data*) *(.bss*) }}
/DISCARD/ : {{ *(.comment) *(.note*) }} }}"""


def built(folder: Path, scans: np.ndarray, labels: np.ndarray, epochs: int) -> tuple[bytes, int]:
    """The bytes of the firmware's flash, and where it begins to run."""

    def numbers(values: np.ndarray) -> str:
        return ",".join(map(str, values.ravel()))

    (folder / "data.h").write_text(
        f"enum {{ TRAINED = {TRAINED}, TESTED = {TESTED}, EPOCHS = {epochs}, SECTOR = {SECTOR} }};\n"
        f"#define PAGES ((unsigned char *){PAGES:#x})\n#define REPORT ((volatile float *){REPORT:#x})\n"
        f"static const unsigned char SCANS[{len(scans)}][64] = {{{numbers(scans)}}}, LABELS[{len(labels)}] = {{{numbers(labels)}}};\n"
    )
    (folder / "main.c").write_text(FIRMWARE)
    (folder / "layout.ld").write_text(LAYOUT)
    processor = ["-target", "thumb-freestanding-eabihf", "-mcpu=cortex_m4+vfp4d16sp"]
    linking = [
        "-Wl,-T,layout.ld",
        "-Wl,-e,main",
        "-Wl,--gc-sections",
        "-Wno-excess-initializers",
        "-Wno-missing-braces",
    ]
    command = [sys.executable, "-m", "ziglang", "cc", *processor, "-Os", "-Wall", "-Wextra", "main.c", "digits.o"]
    subprocess.run([*command, *linking, "-o", "firmware.elf"], cwd=folder, check=True)
    elf = (folder / "firmware.elf").read_bytes()
    entry, headers = struct.unpack_from("<II", elf, 24)
    flash = bytearray(END - FLASH)
    for k in range(struct.unpack_from("<H", elf, 44)[0]):
        kind, offset, address, _, size = struct.unpack_from("<5I", elf, headers + 32 * k)
        if kind == 1 and FLASH <= address < END:
            flash[address - FLASH : address - FLASH + size] = elf[offset : offset + size]
    return bytes(flash), entry


class Board:
    """An emulated board.  reports : (epoch, loss, accuracy) as the firmware tells them."""

    def __init__(self, flash: bytes, entry: int):
        self.flash, self.entry, self.pages = flash, entry, b"\xff" * 2 * SECTOR
        self.reports: list[tuple[int, float, float]] = []

    def run(self, instructions: int = 0) -> bool:
        """Power on; after some instructions (0: never) the power fails.  Whether the firmware has come to its end."""
        uc = Uc(UC_ARCH_ARM, UC_MODE_THUMB | UC_MODE_MCLASS)
        uc.ctl_set_cpu_model(arm.UC_CPU_ARM_CORTEX_M33)
        for start, size in ((FLASH, 1 << 20), (RAM, RAM_BYTES), (REPORT, 1 << 12), (0xE000_E000, 1 << 12)):
            uc.mem_map(start, size)
        uc.mem_write(FLASH, self.flash)
        uc.mem_write(PAGES, self.pages)
        uc.mem_write(RAM, np.random.default_rng(0).bytes(RAM_BYTES))  # as memory may be when the power comes
        uc.reg_write(arm.UC_ARM_REG_FPEXC, 1 << 30)
        uc.reg_write(arm.UC_ARM_REG_SP, RAM + RAM_BYTES)
        uc.reg_write(arm.UC_ARM_REG_LR, END | 1)
        uc.hook_add(UC_HOOK_MEM_WRITE, self._reported, begin=REPORT + 8, end=REPORT + 8)
        uc.emu_start(self.entry | 1, END, count=instructions)
        self.pages = bytes(uc.mem_read(PAGES, 2 * SECTOR))
        return uc.reg_read(arm.UC_ARM_REG_PC) == END

    def _reported(self, uc: Uc, access: int, address: int, size: int, value: int, data: object) -> None:
        loss, accuracy = struct.unpack("<2f", uc.mem_read(REPORT, 8))
        epoch = int(struct.unpack("<f", struct.pack("<I", value & 0xFFFF_FFFF))[0])
        self.reports.append((epoch, loss, accuracy))
        print(
            f"epoch {epoch:2}  loss {loss:.3f}  accuracy {accuracy:.3f} on {TESTED} digits that it has not learned from"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("out/firmware"), help="where the firmware and firmware.png are written"
    )
    parser.add_argument("--quick", action="store_true", help="fewer epochs")
    args = parser.parse_args()
    epochs = 4 if args.quick else EPOCHS
    scans, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(scans))[: TRAINED + TESTED]
    scans, labels = scans[order].astype(np.uint8), labels[order].astype(np.uint8)

    net = nn.Linear(HIDDEN) >> nn.ReLU() >> nn.Linear(10)
    model = cv.Model(net, input_shape=(64,), optimizer=cv.Adam(3e-3), batch_size=1, seed=0, workers=1)
    pack = model.export(args.out, target="cortex-m4f", name="digits", ram="64 KiB", flash="16 KiB")
    print(pack)
    board = Board(*built(args.out, scans, labels, epochs))
    cuts, rng = [], np.random.default_rng(1)
    while not board.run(0 if len(cuts) == 3 else int(rng.integers(epochs * TRAINED * 50_000))):
        cuts.append(len(board.reports))
        print("the power fails, and comes again")
    assert [epoch for epoch, *_ in board.reports] == [*range(1, epochs + 1)]

    pack.restore(model, board.pages[:SECTOR], board.pages[SECTOR:])
    accuracy = (model.predict(scans[TRAINED:] / np.float32(16)).argmax(1) == labels[TRAINED:]).mean()
    print(f"on the PC, from the board's flash: accuracy {accuracy:.3f}")
    draw(board.reports, cuts, args.out / "firmware.png")


def draw(reports: list[tuple[int, float, float]], cuts: list[int], file: Path) -> None:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    epochs, losses, accuracies = zip(*reports)
    axes.plot(
        epochs, [100 * a for a in accuracies], "o-", color="#2f6f9f", label="digits right, of those not learned from, %"
    )
    axes.plot(epochs, [100 * x / losses[0] for x in losses], color="#c2552d", label="loss, % of the first epoch's")
    for k, epoch in enumerate(cuts):
        axes.axvline(epoch + 0.5, color="#5b6672", linestyle=":", label="the power fails" if k == 0 else None)
    axes.set(xlabel="epoch on a Cortex-M4F (emulated)", ylim=(0, 102))
    axes.legend(loc="center right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=130)


if __name__ == "__main__":
    main()
