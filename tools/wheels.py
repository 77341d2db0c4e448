"""Make wheels of platforms of a wheel for any: they bring the code of all kernels, for each level of processors.

python tools/wheels.py dist/calcvm-0.2.0-py3-none-any.whl [--arch x86_64] [--arch aarch64] [--level x86-64-v3]

The code is compiled here, also that for other processors, and from the sources beside this file, which must be those in the wheel.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from calcvm import warm  # noqa: E402
from calcvm.kernels_cpu import _shipped  # noqa: E402
from calcvm.kernels_cpu._native import ObjectCode  # noqa: E402
from calcvm.kernels_cpu._target import LEVELS, Target, of_level  # noqa: E402

PARTS = 32  # in which a level is compiled, by all cores
LIBC = "manylinux_2_17"  # as the oldest of llvmlite's wheels
LEAST = {"x86_64": "x86-64-v2"}  # the level from which on code is worth its bytes


@cache
def functions() -> list[warm.Function]:
    return warm.everything()


def compiled(numbers: Iterable[int], target: Target) -> dict[str, ObjectCode]:
    """Some of `functions`, and what they call."""
    return {symbol: made for k in numbers for symbol, made in functions()[k].objects(target).items()}


def archive(path: Path, target: Target) -> int:
    """Write the archive of a level; returns the number of its functions."""
    made: dict[str, ObjectCode] = {}
    parts = [range(start, len(functions()), PARTS) for start in range(PARTS)]
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        for part in pool.map(compiled, parts, [target] * PARTS):
            made |= part
    warm.write_archive(path, made, target)
    return len(made)


def levels(arch: str) -> list[str]:
    """The levels whose code the wheel of an architecture brings."""
    known = [*LEVELS[arch]]
    return known[known.index(LEAST[arch]) :] if arch in LEAST else known


def wheel(plain: Path, arch: str, wanted: list[str]) -> Path:
    """The wheel of an architecture, beside one for any."""

    def run(*command: str | Path) -> None:
        subprocess.run([sys.executable, "-m", "wheel", *map(str, command)], check=True, stdout=subprocess.DEVNULL)

    with TemporaryDirectory() as folder:
        run("unpack", plain, "--dest", folder)
        (inside,) = Path(folder).iterdir()
        for source in inside.rglob("calcvm/**/*.py"):
            if source.read_bytes() != (ROOT / "src" / source.relative_to(inside)).read_bytes():
                raise SystemExit(f"{plain}: its {source.relative_to(inside)} is not the one in {ROOT}: build it again")
        objects = inside / "calcvm" / _shipped.OBJECTS.name
        objects.mkdir()
        for level in wanted:
            number = archive(objects / f"{level}.zip", of_level(arch, level))
            print(f"{level}: {number} functions in {(objects / f'{level}.zip').stat().st_size:,} bytes")
        packed = Path(folder, "packed")
        packed.mkdir()
        run("pack", inside, "--dest-dir", packed)
        run("tags", "--platform-tag", f"{LIBC}_{arch}", "--remove", *packed.iterdir())
        (made,) = packed.iterdir()
        out = plain.with_name(made.name)
        out.write_bytes(made.read_bytes())
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--arch", action="append", choices=[*LEVELS], help="default: all")
    parser.add_argument("--level", action="append", help="default: all of the architecture from the least on")
    given = parser.parse_args()
    for arch in given.arch or LEVELS:
        made = wheel(given.wheel, arch, given.level or levels(arch))
        print(f"{made}: {made.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
