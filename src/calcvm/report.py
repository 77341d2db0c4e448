"""`calcvm info`: versions, the processor, the cache of compiled code, extras.  It does not need the extras."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from importlib import metadata

from calcvm import __version__
from calcvm.errors import CalcError
from calcvm.kernels_cpu._native import NOWHERE, cache_root
from calcvm.kernels_cpu._shipped import archive_of
from calcvm.kernels_cpu._target import host
from calcvm.system import n_cores


def info() -> None:
    """Print it."""
    print(f"calcvm    {__version__}  (Python {platform.python_version()}, {platform.system()} {platform.machine()})")
    print("          " + ", ".join(f"{name} {_version(name)}" for name in ("numpy", "numba", "llvmlite")))
    processor = host()
    print(
        f"processor {n_cores()} cores; code for {processor.cpu}, with vectors of {processor.vectors[0]} bits, {_shipped()}"
    )
    if cache_root() == NOWHERE:
        print("cache     nowhere: the user has no home folder; the environment variable CALCVM_CACHE_DIR names one")
    else:
        files = [p.stat().st_size for p in cache_root().rglob("*") if p.is_file()]
        print(f"cache     {cache_root()}: {len(files)} files, {sum(files) / 1e6:.1f} MB")
    print(f"gpu       {_gpu()}")
    extras = _extras()
    width = max(map(len, extras), default=0)
    for extra, packages in extras.items():
        print(f"extra     {extra:<{width}} {', '.join(f'{p} {_version(p)}'.rstrip() for p in packages)}")
    if not extras:
        print("extra     (not known: calcvm runs without the metadata of an installed package)")


def _shipped() -> str:
    """Whether the installed package brings it."""
    return "brought by the wheel" if archive_of(host().cpu).is_file() else "compiled here"


def _extras() -> dict[str, list[str]]:
    """Packages of each extra, with nested extras resolved, from the metadata of the installed package."""
    try:
        requires = metadata.requires("calcvm") or []
    except metadata.PackageNotFoundError:
        return {}
    found: dict[str, list[str]] = {}
    for requirement in requires:  # such as: typer>=0.16; extra == "cli"
        extra, package = re.search(r"""extra\s*==\s*["']([\w-]+)""", requirement), re.match(r"[\w.-]+", requirement)
        if extra and package:
            others = re.match(r"calcvm\[([\w,-]+)\]", requirement)
            parts = [f"[{other}]" for other in others[1].split(",")] if others else [package[0]]
            found.setdefault(extra[1], []).extend(parts)

    def packages(extra: str) -> Iterator[str]:
        for part in found[extra]:
            yield from packages(part[1:-1]) if part.startswith("[") else (part,)

    return {extra: [*dict.fromkeys(packages(extra))] for extra in found}


def _gpu() -> str:
    """A description of the device "cuda", or the reason why there is none."""
    from calcvm.vm.run.cuda.driver import Driver

    try:
        driver = Driver.open()
    except CalcError as error:
        return f"none: {error}"
    free, total = driver.memory()
    major, minor = driver.compute_capability
    return (
        f"{driver.name}, compute capability {major}.{minor}, {driver.multiprocessors} multiprocessors, "
        f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free, driver for CUDA {'.'.join(map(str, driver.version))}"
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "(not installed)"
