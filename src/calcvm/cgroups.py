"""The limits of this process's control groups, of either version: what a container may use.

A group's limits apply to all groups inside it, so the tightest one from the process's own group up to the mounted root counts.
Inside a container, the root of the mount may be the container's own group, or a group that its paths do not name.
Files: https://docs.kernel.org/admin-guide/cgroup-v2.html and .../cgroup-v1/.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path("/")  # of the file system with the files below


class Room(NamedTuple):
    """Memory of a group: its ``limit``, and the bytes ``left``: the limit without memory it uses and cannot drop, plus free swap."""

    limit: int
    left: int
    folder: Path


def cpus() -> float | None:
    """Processors that the group may use on average, by its quota; None: no limit."""
    found: list[float] = []
    for folder in _groups("cpu"):
        with suppress(OSError, ValueError, ZeroDivisionError):
            if (folder / "cpu.max").exists():
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{what}_us").read_text() for what in ("quota", "period"))
            if quota != "max" and int(quota) > 0:
                found.append(int(quota) / int(period))
    return min(found, default=None)


def memory() -> Room | None:
    """The group with the least memory left; None: no limit."""
    return min(filter(None, map(_room, _groups("memory"))), key=lambda room: room.left, default=None)


def _room(folder: Path) -> Room | None:
    two = (folder / "memory.max").exists()
    limit = _number(folder / ("memory.max" if two else "memory.limit_in_bytes"))
    if limit is None:
        return None
    figures = _figures(folder / "memory.stat")
    if two:
        used = figures.get("anon", 0) + figures.get("shmem", 0)
        swap, swapped = _number(folder / "memory.swap.max"), _number(folder / "memory.swap.current") or 0
    else:
        used = figures.get("total_rss", 0) + figures.get("total_shmem", 0)
        both, swapped = _number(folder / "memory.memsw.limit_in_bytes"), figures.get("total_swap", 0)
        swap = None if both is None else both - limit
    free = _figures(ROOT / "proc/meminfo").get("SwapFree:", 0) << 10
    if swap is not None:
        free = min(free, max(swap - swapped, 0))
    return Room(limit, max(limit - used, 0) + free, folder)


def _number(file: Path) -> int | None:
    """The limit in a file; None if there is no file or no limit."""
    with suppress(OSError, ValueError):
        number = int(file.read_text())
        return number if 0 <= number < 1 << 60 else None  # version 1: "no limit" is the largest number of pages
    return None


def _figures(file: Path) -> dict[str, int]:
    """The contents of a file of names and numbers."""
    with suppress(OSError):
        lines = (line.split() for line in file.read_text().splitlines())
        return {name: int(number) for name, number, *_ in (line for line in lines if len(line) > 1) if number.isdigit()}
    return {}


def _groups(controller: str) -> Iterator[Path]:
    """Folders of the process's groups, of a controller in version 1 and of version 2, each with its parents."""
    try:
        mine = [line.split(":", 2) for line in (ROOT / "proc/self/cgroup").read_text().splitlines()]
        mounts = [line.partition(" - ") for line in (ROOT / "proc/self/mountinfo").read_text().splitlines()]
    except (OSError, UnicodeDecodeError):
        return
    for where, _, what in mounts:
        at, of = where.split(), what.split()
        if len(at) < 5 or len(of) < 3:
            continue
        for _, controllers, path in (parts for parts in mine if len(parts) == 3):
            one = of[0] == "cgroup" and controller in controllers.split(",") and controller in of[2].split(",")
            if one or (of[0] == "cgroup2" and not controllers):
                root, point = map(_unescaped, at[3:5])
                yield from _up(ROOT / point.lstrip("/"), root, path)


def _up(point: Path, root: str, path: str) -> Iterator[Path]:
    """A group's folder below the mount of a root, and its parents."""
    try:
        inside = PurePosixPath(path).relative_to(root).parts
    except ValueError:  # named from outside: the mount is the process's own group
        inside = ()
    if ".." in inside:
        inside = ()
    for n in range(len(inside), -1, -1):
        yield point.joinpath(*inside[:n])


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
