"""Draw docs/rooms.svg: the packages ("rooms") of src/calcvm and their imports, read from the sources.

python tools/rooms.py           # write it
python tools/rooms.py --check   # only check whether it is up to date (exit status 1 if not)

Boxes are the rows of the table of rooms in docs/architecture.md.  An arrow is omitted if other arrows lead the same way.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parent.parent / "docs"
ROOT = DOCS.parent / "src" / "calcvm"
TARGET = DOCS / "rooms.svg"
INNER = ("vm",)  # folders whose subfolders are separate rooms
COMMON = {
    "errors.py",
    "lazy.py",
    "tables.py",
    "progress.py",
    "without_signals.py",
    "checks.py",
}  # imported by many, so drawn without arrows


class Import(NamedTuple):
    """An import in a file, at any depth.  ``target``: the imported module, if an imported name identifies it."""

    line: int
    target: str
    typing: bool  # under TYPE_CHECKING, so not executed


# ---------------------------------------------------------------- what imports what
def module_of(path: Path, root: Path) -> str:
    parts = ("calcvm", *path.relative_to(root).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports(path: Path, root: Path) -> list[Import]:
    """Every import of a file below ``root``, in any function or condition."""
    package = ("calcvm", *path.relative_to(root).parts[:-1])
    found: list[Import] = []

    def visit(node: ast.AST, typing: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(node.lineno, alias.name, typing) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            base = ".".join(part for part in (base, node.module) if part)
            for alias in node.names:
                inside = root.joinpath(*base.split(".")[1:], alias.name)
                within = base.startswith("calcvm") and (inside.is_dir() or inside.with_suffix(".py").exists())
                found.append(
                    Import(node.lineno, f"{base}.{alias.name}" if within or base == "calcvm" else base, typing)
                )
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                visit(child, True)
            for child in node.orelse:
                visit(child, typing)
        else:
            for child in ast.iter_child_nodes(node):
                visit(child, typing)

    visit(ast.parse(path.read_text(), str(path)), False)
    return found


def room_of(module: str, root: Path = ROOT) -> str:
    """The room of a module by its dotted name; "" for the package itself and for modules outside of rooms."""
    first, *rest = [*module.split(".")[1:], ""]
    if first in INNER and root.joinpath(first, rest[0]).is_dir() and rest[0]:
        return f"{first}.{rest[0]}"
    return first if root.joinpath(first).is_dir() or root.joinpath(f"{first}.py").exists() else ""


def circles(root: Path) -> list[list[str]]:
    """Import cycles between modules, including imports in functions and for type checkers; each cycle once."""
    files = {module_of(path, root): path for path in sorted(root.rglob("*.py"))}
    left = {m: {i.target for i in imports(p, root) if i.target in files} - {m} for m, p in files.items()}
    found = []
    while left:
        while free := [m for m, others in left.items() if not others & left.keys()]:
            for m in free:
                del left[m]
        if left:  # every remaining module leads into a cycle
            way = [next(iter(left))]
            while way[-1] not in way[:-1]:
                way.append(min(left[way[-1]] & left.keys()))
            found.append(way[way.index(way[-1]) :])
            del left[way[-1]]
    return found


# ---------------------------------------------------------------- the boxes
def boxes() -> dict[tuple[str, ...], str]:
    """Rows of the table of rooms: the names in the first column, and their description."""
    section = (DOCS / "architecture.md").read_text().partition("\n## Rooms\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
    return {tuple(re.findall(r"`([^`]+)`", names)): text.strip() for names, text in rows}


def arrows(of: Mapping[str, tuple[str, ...]]) -> dict[tuple[str, ...], set[tuple[str, ...]]]:
    """By box, the boxes that its rooms import, without those that it reaches through others."""
    out: dict[tuple[str, ...], set[tuple[str, ...]]] = {box: set() for box in of.values()}
    for path in ROOT.rglob("*.py"):
        box = of.get(room_of(module_of(path, ROOT)))
        for found in imports(path, ROOT):
            other = of.get(room_of(found.target)) if found.target.startswith("calcvm") else None
            if box is not None and other is not None and box != other:
                out[box].add(other)

    def reach(box: tuple[str, ...]) -> set[tuple[str, ...]]:
        return out[box].union(*(reach(other) for other in out[box]))

    return {box: others - set().union(*(reach(other) for other in others)) for box, others in out.items()}


# ---------------------------------------------------------------- the picture
STEP, LINE, GAP, CHARACTER, PAD = (
    84,
    15,
    26,
    7,
    10,
)  # pixels: distance of layers, line height, gap between boxes, width of a letter, padding


class Node:
    """A box, or (without lines) a place in a layer for an arrow to pass through."""

    def __init__(self, lines: tuple[str, ...], layer: int):
        self.lines, self.layer, self.x = lines, layer, 0.0
        self.down: list[Node] = []
        self.up: list[Node] = []
        self.width = PAD * 2 + CHARACTER * max(map(len, lines)) if lines else 2
        self.height = PAD + LINE * len(lines) if lines else 0


def layered(graph: Mapping[tuple[str, ...], set[tuple[str, ...]]]) -> list[list[Node]]:
    """Boxes in layers, each above all that it imports, and near its neighbours within a layer."""
    depth: dict[tuple[str, ...], int] = {}

    def layer_of(box: tuple[str, ...]) -> int:
        if box not in depth:
            depth[box] = 1 + max((layer_of(other) for other in graph[box]), default=-1)
        return depth[box]

    nodes = {box: Node(box, layer_of(box)) for box in graph}
    layers: list[list[Node]] = [[] for _ in range(1 + max(depth.values()))]
    for node in nodes.values():
        layers[node.layer].append(node)
    for box in graph:
        for other in sorted(graph[box]):
            at, end = nodes[box], nodes[other]
            for layer in range(at.layer - 1, end.layer, -1):
                passing = Node((), layer)
                layers[layer].append(passing)
                at.down.append(passing)
                passing.up.append(at)
                at = passing
            at.down.append(end)
            end.up.append(at)
    for sweep in range(24):
        for row in layers if sweep % 2 else reversed(layers):
            for node in row:
                tied = (node.down if sweep % 2 else node.up) or node.down or node.up or row
                node.x = sum(other.x for other in tied) / len(tied)
            row.sort(key=lambda node: node.x)
            spread(row)
    return layers


def spread(row: list[Node]) -> None:
    """Move overlapping nodes of a layer apart, around their former center."""
    middle, at = sum(node.x for node in row) / len(row), float("-inf")
    for node in row:
        node.x = max(node.x, at + node.width / 2)
        at = node.x + node.width / 2 + GAP
    shift = middle - sum(node.x for node in row) / len(row)
    for node in row:
        node.x += shift


def draw(layers: list[list[Node]], texts: Mapping[tuple[str, ...], str], common: list[str]) -> Iterator[str]:
    """The lines of the SVG."""
    left = min(node.x - node.width / 2 for row in layers for node in row) - GAP
    right = max(node.x + node.width / 2 for row in layers for node in row) + GAP
    height = STEP * len(layers) + 2 * LINE + GAP

    def at(node: Node) -> tuple[int, int, int]:
        """The middle, top and bottom of a node."""
        middle = STEP * (len(layers) - node.layer) - STEP // 2
        return round(node.x - left), middle - node.height // 2, middle + node.height // 2

    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {round(right - left)} {height}" font-family="monospace" font-size="12">'
    yield "<!-- made by tools/rooms.py from the imports -->"
    yield '<defs><marker id="to" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    yield '<path d="M0 0L8 4L0 8z" fill="#667"/></marker></defs>'
    yield '<rect width="100%" height="100%" fill="#fff"/>'
    for row in layers:
        for node in row:
            for other in node.down:
                (x, _, y), (to_x, to_y, _) = at(node), at(other)
                bend, end = (to_y - y) // 2, ' marker-end="url(#to)"' if other.lines else ""
                curve = f"M{x} {y}C{x} {y + bend} {to_x} {to_y - bend} {to_x} {to_y}"
                yield f'<path d="{curve}" fill="none" stroke="#667"{end}/>'
    for row in layers:
        for node in row:
            if node.lines:
                x, top, _ = at(node)
                fill = "#fdf0d5" if node.lines[0].startswith(INNER) else "#eef3fa"
                yield f"<g><title>{texts[node.lines]}</title>"
                yield f'<rect x="{x - node.width // 2}" y="{top}" width="{node.width}" height="{node.height}" rx="5" fill="{fill}" stroke="#456"/>'
                for k, line in enumerate(node.lines):
                    yield f'<text x="{x}" y="{top + LINE * (k + 1)}" text-anchor="middle">{line}</text>'
                yield "</g>"
    half = len(common) // 2
    for k, text in enumerate((f"used all over: {', '.join(common[:half])},", ", ".join(common[half:]))):
        yield f'<text x="{GAP}" y="{height - GAP + LINE * (k - 1)}" fill="#667">{text}</text>'
    yield "</svg>"


def picture() -> str:
    texts = boxes()
    shown = {names: text for names, text in texts.items() if not COMMON.intersection(names)}
    of = {
        name.removesuffix(".py").strip("/").replace("/", ".").replace("__init__", ""): box
        for box in shown
        for name in box
    }
    common = [name for names in texts if COMMON.intersection(names) for name in names]
    return "\n".join(draw(layered(arrows(of)), shown, common)) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if it is not up to date")
    text = picture()
    if not parser.parse_args().check:
        TARGET.write_text(text)
    elif not TARGET.exists() or TARGET.read_text() != text:
        print(f"{TARGET} is not up to date")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
