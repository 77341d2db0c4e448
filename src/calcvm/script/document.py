"""Write a model as a script that needs only NumPy, with its weights beside it."""

from __future__ import annotations

import errno
import json
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from calcvm.errors import CalcError, UnsupportedOperator, telling
from calcvm.files import place, replace
from calcvm.formulas import steps
from calcvm.ops.dims import Affine, Shape
from calcvm.ops.layouts import back
from calcvm.ops.statement import PHASES
from calcvm.script import helpers
from calcvm.script.code import module_text, show
from calcvm.script.names import Names, functions, plain
from calcvm.script.optimizers import SLOTS
from calcvm.script.sections import Listing, ScriptLine, shape_of

if TYPE_CHECKING:
    from calcvm.vm.run.loaded import Loaded

CALLED = {"optimize": "update"}  # sections with other names in scripts
INDENT, WIDTH = "    ", 110
BY_ONE = Affine(1, 0)  # one place per sample

SAMPLES_OF = '''

def samples_of(data, axis):
    """The number of samples in data, along an axis."""
    shape = np.shape(data)
    if len(shape) <= axis:
        raise ValueError(f"data of shape {shape}: samples along axis {axis} are wanted")
    return shape[axis]
'''


def _streams(loaded: Loaded) -> dict[str, tuple[str, ...]]:
    """Paths besides predict that only predict, from states that they carry, and their outputs."""
    found = {
        path: tuple(facts.get("outputs", [facts["output"]]))
        for path, facts in loaded.paths.items()
        if path != "predict" and not facts["backward"] and loaded.carried(path)
    }
    results = {name for name, facts in loaded.variables.items() if facts["kind"] == "result"}
    return {path: outputs for path, outputs in found.items() if {*outputs} <= results}


@dataclass(frozen=True)
class Parts:
    """The variables of a program that a script exposes, by name; figures are scalars that evaluate the model."""

    inputs: tuple[str, ...]
    targets: tuple[str, ...]
    outputs: tuple[str, ...]
    figures: Mapping[str, str]


def write(loaded: Loaded, parts: Parts, image: np.ndarray, path: str | PathLike[str]) -> None:
    """Write the script to ``path``, which ends with .py, and the persistent values to the same name with .npy.

    Raises
    ------
    UnsupportedOperator : a row has no text; nothing has been written then.
    FileError : a file cannot be written.
    """
    target = place(path)
    if target.suffix != ".py":
        raise CalcError(f"to_python: {str(path)!r} must end with .py: the weights are written beside it, with .npy")
    beside = target.with_suffix(".npy")
    text = script(loaded, parts, target.name).encode()
    cells = image.view(loaded.program.dtype) if _whole(loaded) else image

    def weights(file: BinaryIO) -> None:
        """Write the weights, then the script.  Most errors come from the larger file, and then both files are unchanged."""
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(cells))
        file.write(cells.view(np.uint8).data)  # unlike write_array, this raises OSError with errno if the disk is full
        replace(target, lambda script: script.write(text))

    for file in (target, beside):
        with telling(str(file), "written"):
            if file.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
    with telling(str(path), "written"):
        replace(beside, weights)


def _whole(loaded: Loaded) -> bool:
    """Whether the persistent bytes divide into elements of the program's type."""
    return all(end % loaded.program.itemsize == 0 for end in loaded.opened)


def script(loaded: Loaded, parts: Parts, name: str) -> str:
    """The text of a script of this name (UnsupportedOperator: a row has none)."""
    if loaded.program.page_bytes:
        raise UnsupportedOperator(
            "to_python: the program keeps values in a file, which scripts do not: compile it without page_bytes="
        )
    return _Script(loaded, parts, name).text()


class _Script:
    def __init__(self, loaded: Loaded, parts: Parts, name: str):
        self.loaded, self.program, self.parts, self.file = loaded, loaded.program, parts, name
        self.streams = _streams(loaded)
        self.called: Names[tuple[str, ...]] = Names()  # functions by path and section, parameters by placeholder
        for path in self.program.paths:
            for phase in (*PHASES, "step"):
                self.called.of((path, phase), f"{path}_{CALLED.get(phase, phase)}")
        for path in self.streams:
            self.called.of((path, "predict"), path)
        for name, facts in loaded.variables.items():
            if facts["kind"] == "placeholder":
                self.called.of((name,), f"{name}_data")
        self.listing = Listing(self.program, self.called.values())
        self.places = {name: self._name(name) for name in self._read_by_hand()}

    def _read_by_hand(self) -> list[str]:
        """Variables that the script's public functions use: data and results."""
        names = [name for name, facts in self.loaded.variables.items() if facts["kind"] == "placeholder"]
        losses = [facts["loss"] for facts in self.loaded.paths.values() if facts.get("loss")]
        streamed = [name for outputs in self.streams.values() for name in outputs]
        return [*dict.fromkeys([*names, *self.parts.outputs, *self.parts.figures, *losses, *streamed])]

    def _name(self, variable: str) -> str:
        return self.listing.name(self.loaded.variables[variable]["symbol"])

    # ------------------------------------------------------------ the whole
    def text(self) -> str:
        sections = [self._section(*section) for section in self.program.sections if self._lines(*section)]
        views, step, predict, main = self._views(), self._step(), self._predict(), self._main()
        if any("samples_of(" in text for text in (step, predict, main)):
            views += SAMPLES_OF
        used = functions([*sections, step, predict])
        slots = any(_has(text, name) for name in SLOTS for text in (*used, *sections))
        constants = [line for line in module_text(steps).splitlines() if slots and re.match(r"[A-Z_\d, ]+ = ", line)]
        hyper = ["# Indexes into an optimizer's array of numbers.", *constants] if constants else []
        if any("GOLDEN" in text for text in used):
            hyper.append(f"GOLDEN = 0x{helpers.GOLDEN:X}  # for the hash that draws random numbers")
        blocks = [
            self._head(),
            "\n".join(hyper),
            *([_rule("functions that NumPy lacks") + used[0], *used[1:]] if used else []),
            _rule("memory") + views,
            _rule("the network's rows") + sections[0],
            *sections[1:],
            _rule("training") + step,
            predict,
            main,
        ]
        return "\n\n".join(block.strip("\n") + "\n" for block in blocks if block.strip())

    def _head(self) -> str:
        inputs, targets = told(self.parts.inputs), told(self.parts.targets)
        return f'''"""A network as a program over one array of {self.program.heap_bytes:,} bytes.  It needs only NumPy.

    python {told([self.file])} --data data.npz --epochs 5     # arrays {inputs} and {targets}, samples first

`step` trains on a batch, `predict` returns outputs, `evaluate` returns figures.  Every value is a view of ``heap`` at its
planned offset; values that do not live at the same time share memory.  Weights come from the .npy beside this file.
"""

import argparse
import math
from pathlib import Path

import numpy as np

BATCH = {self.program.batch_size}  # the largest batch that the memory is planned for
'''

    # ------------------------------------------------------------ memory
    def _views(self) -> str:
        program, symbols = self.program, self.program.symbols
        elems = -(-program.heap_bytes // 8) * 8 // program.itemsize
        fixed: list[tuple[str, str]] = []
        sized: list[tuple[str, str]] = []
        for number, name in sorted(self.listing.names.items(), key=lambda item: symbols[item[0]].offset):
            symbol, shape = symbols[number], shape_of(symbols[number])
            more = "" if symbol.dtype == program.dtype else f", np.{symbol.dtype}"
            lies = f", {symbol.layout}" if symbol.layout and len(shape) > 2 else ""
            line = f"{name} = view({symbol.offset}, {show(shape)}{more})  # {symbol.kind}{lies}"
            (fixed if all(n.constant for n in shape) else sized).append((name, line))
        globals_ = textwrap.fill(
            "global " + ", ".join(["B", *(name for name, _ in sized)]), WIDTH, initial_indent=INDENT,
            subsequent_indent=INDENT, break_long_words=False,
        )  # fmt: skip
        globals_ = " \\\n".join(globals_.split("\n"))
        body = "\n".join(INDENT + line for _, line in sized)
        of_batch = f'''def of_batch(n):
    """Set up views for a batch of n samples, from 1 to BATCH; offsets are those of the largest batch."""
{globals_}
    if not 1 <= n <= BATCH:
        raise ValueError(f"a batch of {{n}}: the memory is planned for 1 to {{BATCH}} samples")
    B = n
{body}
'''
        return f'''heap = np.zeros({elems}, np.{program.dtype})
{self._state()} = np.load(Path(__file__).with_suffix(".npy"))


def view(offset, shape, dtype=np.{program.dtype}):
    """The heap's elements from ``offset`` on, as an array of a shape and type."""
    return heap.view(dtype)[offset : offset + math.prod(shape)].reshape(shape)


{chr(10).join(line for _, line in fixed)}


{of_batch}

of_batch(BATCH)


def feed(place, data):
    """Set a placeholder to data of its shape."""
    data = np.asarray(data)
    if data.shape != place.shape or data.dtype == object:
        raise ValueError(f"data of shape {{data.shape}} and type {{data.dtype}}: expected shape {{place.shape}}")
    place[...] = data
'''

    # ------------------------------------------------------------ sections
    def _lines(self, path: str, phase: str) -> list[ScriptLine]:
        return self.listing.sections.get((path, phase), [])

    def _function(self, path: str, phase: str) -> str:
        return self.called[path, phase]

    def _section(self, path: str, phase: str) -> str:
        lines = self._lines(path, phase)
        peak = max(line.live for line in lines)
        out = [
            f"def {self._function(path, phase)}():",
            f'    """{_about(path, phase)}  At most {peak:,} bytes live, at the largest batch."""',
        ]
        for line in lines:
            label = plain(line.label)
            said = f"{label}: {line.about}; {line.live:,} bytes live" if line.about else label
            out += textwrap.wrap(said, WIDTH, initial_indent=f"{INDENT}# ", subsequent_indent=f"{INDENT}# ")
            for text in line.texts:
                out += _wrapped(text)
        return "\n".join(out) + "\n"

    def _calls(self, path: str, phases: tuple[str, ...]) -> list[str]:
        """Calls of sections, after calls of the sections whose results they read."""
        wanted = [(other, phase) for other, of in self.loaded.before(path, phases) for phase in of]
        wanted += [(path, phase) for phase in phases]
        return [f"{self._function(*section)}()" for section in wanted if self._lines(*section)]

    # ------------------------------------------------------------ what users call
    def _fed(self, names: tuple[str, ...], indent: str) -> list[str]:
        return [f"{indent}feed({self.places[name]}, {self._argument(name)})" for name in names]

    def _argument(self, name: str) -> str:
        """The name of the function parameter for a placeholder."""
        return self.called[(name,)]

    def _axis(self, name: str) -> int | None:
        """The axis of a variable's samples."""
        return next((i for i, n in enumerate(self.loaded.forms[name]) if n.a), None)

    def _samples(self, names: Iterable[str], of: Callable[[str], str] | None = None) -> str:
        """An expression for the number of samples in the data of placeholders, preferably of one with samples first.

        Without one that has samples, it is the planned batch.

        of : the text of a placeholder's data (default: the function's parameter).
        """
        axes = {name: axis for name in names if (axis := self._axis(name)) is not None}
        if not axes:
            return "BATCH"
        name = min(axes, key=axes.__getitem__)
        said, n = (of or self._argument)(name), self.loaded.forms[name][axes[name]]
        if axes[name] == 0 and n == BY_ONE:
            return f"len({said})"
        count = f"samples_of({said}, {axes[name]})"
        count = f"({count} - {n.b})" if n.b else count
        return count if n.a == 1 else f"{count} // {n.a}"

    def _part(self, name: str, of: str, part: str) -> str:
        """A part of the samples of a placeholder's data; all data if they have no samples."""
        axis = self._axis(name)
        if axis is None or self.loaded.forms[name][axis] != BY_ONE:
            return of
        return f"np.asarray({of})[{axis * ':, '}{part}]" if axis else f"{of}[{part}]"

    def _sliced(self, names: tuple[str, ...]) -> list[str]:
        """Calls of `feed` with a part of the samples."""
        return [
            f"        feed({self.places[name]}, {self._part(name, self._argument(name), 'start : start + BATCH')})"
            for name in names
        ]

    def _joined(self, name: str, of: str) -> str:
        """A result for all samples, joined from those of the batches."""
        axis = self._axis(name)
        if axis is None:
            return f"{of}[-1]"
        return f"np.concatenate({of}, {axis})" if axis else f"np.concatenate({of})"

    def _step(self) -> str:
        return "\n\n".join(self._step_of(path) for path, facts in self.loaded.paths.items() if facts["backward"])

    def _step_of(self, path: str) -> str:
        feeds, facts = self.loaded.feeds(path), self.loaded.paths[path]
        arguments = ", ".join(map(self._argument, feeds))
        n = self._samples(feeds)
        loss, adds = self.places[facts["loss"]], facts["accumulate"]
        rounds = self._calls(path, ("forward", "loss", "backward"))
        ends = [call for phase in ("optimize", "end_round") for call in self._own(path, phase)]
        name = "step" if path == "learn" else self.called[path, "step"]
        if adds:
            seed = self.listing.names[facts["seed"]]
            share = self._share(facts["loss"], n)
            body = [
                f"def {name}({arguments}):",
                f'    """Train path {told([path])} on any number of samples; return the loss.  Gradients of batches add up."""',
                "    total_loss = 0.0",
                *self._apart([facts["loss"]], n),
                f"    for start in range(0, {n}, BATCH):",
                f"        of_batch(min(BATCH, {n} - start))",
                *self._sliced(feeds),
                f"        {seed}[...] = {share}",
                *(f"        {call}" for call in rounds),
                f"        total_loss += float({loss}.reshape(())) * {share}",
                *(f"    {call}" for call in ends),
                "    return total_loss",
            ]
        else:
            body = [
                f"def {name}({arguments}):",
                f'    """Train path {told([path])} on at most BATCH samples; return the loss."""',
                f"    of_batch({n})",
                *self._fed(feeds, INDENT),
                *(f"    {call}" for call in rounds),
                *(f"    {call}" for call in ends),
                f"    return float({loss}.reshape(()))",
            ]
        return "\n".join(body) + "\n"

    def _share(self, name: str, n: str) -> str:
        """The weight of a batch's result in that of all samples: its share for a mean, 1 for a sum."""
        return "1.0" if self.loaded.variables[name].get("over") == "sum" else f"B / {n}"

    def _apart(self, names: Iterable[str], n: str) -> list[str]:
        """A check that refuses several batches for results that are neither means nor sums over samples."""
        others = [name for name in names if self.loaded.variables[name].get("over") == "other"]
        if not others:
            return []
        return _refusal(n, f"{', '.join(others)}, neither a mean nor a sum over samples")

    def _own(self, path: str, phase: str) -> list[str]:
        return [f"{self._function(path, phase)}()"] if self._lines(path, phase) else []

    def _predict(self) -> str:
        predict = self._outputs("predict", "predict", self.parts.outputs)
        streams = [self._outputs(self.called[path, "predict"], path, outputs) for path, outputs in self.streams.items()]
        return "\n\n".join(filter(None, [predict, self._evaluate(), *streams]))

    def _outputs(self, name: str, path: str, outputs: tuple[str, ...]) -> str:
        """The function that returns a path's outputs."""
        feeds = self.loaded.feeds(path, ("forward",))
        n = self._samples(feeds)
        results = ", ".join(self._result(name) for name in outputs)
        if len(outputs) == 1:
            gathered = self._joined(outputs[0], "parts")
        elif all(self._axis(name) == 0 for name in outputs):
            gathered = "[np.concatenate(of) for of in zip(*parts)]"
        else:
            gathered = (
                f"[{', '.join(self._joined(name, f'[part[{i}] for part in parts]') for i, name in enumerate(outputs))}]"
            )
        whole = "" if self._by_sample(outputs) else "which has no axis of samples"
        if path in self.streams:
            whole = "whose samples have a state each"
        about = f"for {'at most BATCH' if whole else 'any number of'} samples"
        body = [
            f"def {name}({', '.join(map(self._argument, feeds))}):",
            f'    """{told(outputs)} {about}."""',
            *(_refusal(n, f"{', '.join(outputs)}, {whole}") if whole else []),
            "    parts = []",
            f"    for start in range(0, {n}, BATCH):",
            f"        of_batch(min(BATCH, {n} - start))",
            *self._sliced(feeds),
            *(f"        {call}" for call in self._calls(path, ("forward",))),
            f"        parts.append({f'({results})' if len(outputs) > 1 else results})",
            f"    return {gathered}",
        ]
        return "\n".join(body) + "\n"

    def _by_sample(self, names: Iterable[str]) -> bool:
        """Whether values have one place per sample."""
        axes = {name: self._axis(name) for name in names}
        return all(axis is not None and self.loaded.forms[name][axis] == BY_ONE for name, axis in axes.items())

    def _result(self, name: str) -> str:
        """A copy of a result, in the shape that users see."""
        symbol = self.loaded.symbol(name)
        shape: Shape = self.loaded.forms[name]
        text = self.places[name]
        if symbol.layout and len(shape) > 2:
            text += f".transpose({show(back(symbol.layout, len(shape)))})"
        elif shape_of(self.program.symbols[self.loaded.variables[name]["symbol"]]) != shape:
            text += f".reshape({show(shape)})"
        return f"{text}.copy()"

    def _totals(self, name: str) -> dict[str, str]:
        """The means and sums over samples that a figure is a function of."""
        return self.loaded.variables[name].get("totals") or {}

    def _view(self, name: str) -> str:
        """The view of a total, which has no public name."""
        return self.listing.names[self.loaded.variables[name]["symbol"]]

    def _row(self, path: str, pc: int) -> ScriptLine:
        """The statements of a row."""
        phase = next(
            phase for phase in ("forward", "loss") if pc in range(*self.program.sections.get((path, phase), (0, 0)))
        )
        return self._lines(path, phase)[pc - self.program.sections[path, phase][0]]

    def _evaluate(self) -> str:
        figures = self.parts.figures
        if not figures:
            return ""
        feeds = self.loaded.feeds("predict", ("forward", "loss"))
        n = self._samples(feeds)
        totals = {t: kind for name in figures for t, kind in self._totals(name).items()}
        body = [
            f"def evaluate({', '.join(map(self._argument, feeds))}):",
            '    """Figures for any number of samples: weighted means over batches, or sums."""',
            *self._apart([name for name in figures if not self._totals(name)], n),
            f"    sums = dict.fromkeys({[*figures.values()]}, 0.0)",
            *(["    totals = {}"] if totals else []),
            f"    for start in range(0, {n}, BATCH):",
            f"        of_batch(min(BATCH, {n} - start))",
            *self._sliced(feeds),
            *(f"        {call}" for call in self._calls("predict", ("forward", "loss"))),
            *(
                f"        sums[{called!r}] += float({self.places[name]}.reshape(())) * {self._share(name, n)}"
                for name, called in figures.items()
                if not self._totals(name)
            ),
            *(
                f"        totals[{t!r}] = totals.get({t!r}, 0.0) + {self._view(t)}.astype(np.float64) * "
                f"{'1.0' if kind == 'sum' else f'B / {n}'}"
                for t, kind in totals.items()
            ),
            *(f"    {self._view(t)}[...] = totals[{t!r}]" for t in totals),
        ]
        for name, called in figures.items():  # functions of the totals of all samples
            if totals := self._totals(name):
                for pc in self.loaded.making("predict", name, totals):
                    body += [line for text in self._row("predict", pc).texts for line in _wrapped(text)]
                body.append(f"    sums[{called!r}] = float({self.places[name]}.reshape(()))")
        body.append("    return sums")
        return "\n".join(body) + "\n"

    def _main(self) -> str:
        names = [name for name in (*self.parts.inputs, *self.parts.targets) if name in self.loaded.feeds("learn")]
        random = [f"        {name!r}: {self._random(name)}," for name in names]
        ordered = ", ".join(self._part(name, f"data[{name!r}]", "part") for name in self.loaded.feeds("learn"))
        counted = {name: self._samples([name], lambda name: f"data[{name!r}]") for name in names}
        sizes = ", ".join(f"{name!r}: {said}" for name, said in counted.items() if said != "BATCH")
        count = f"""sizes = {{{sizes}}}
    n = next(iter(sizes.values()))
    if other := [name for name in sizes if sizes[name] != n]:
        raise SystemExit(f"{{options.data}}: {{n}} samples of {{next(iter(sizes))}}, {{sizes[other[0]]}} of {{other[0]}}")"""
        return f'''def main():
    """Train on arrays of a file, or on random numbers."""
    options = argparse.ArgumentParser(description="Train on arrays {told(names)} of an .npz file")
    options.add_argument("--data", help="an .npz file; without one, random numbers show that it runs")
    options.add_argument("--epochs", type=int, default=1)
    options.add_argument("--seed", type=int, default=0, help="of the order of the samples")
    options.add_argument("--save", help="an .npy file for the final weights; it can replace this script's")
    options = options.parse_args()
    if options.epochs < 0:
        raise SystemExit(f"--epochs {{options.epochs}}: must be >= 0")
    rng = np.random.default_rng(options.seed)
    data = dict(np.load(options.data)) if options.data else {{
{chr(10).join(random)}
    }}
    names = {tuple(names)!r}
    if missing := [name for name in names if name not in data]:
        raise SystemExit(f"{{options.data}}: has {{', '.join(data) or 'no array'}}; {{', '.join(missing)}} must be there too")
    {count if sizes else "n = BATCH"}
    for epoch in range(options.epochs):
        order, total = rng.permutation(n), 0.0
        for start in range(0, n, BATCH):
            part = order[start : start + BATCH]
            total += step({ordered}) * len(part) / n
        print(f"epoch {{epoch + 1}}: {self._told()} {{total:.6g}}")
    if options.save:
        np.save(options.save, {self._state()})


if __name__ == "__main__":
    main()
'''

    def _told(self) -> str:
        """The label for an epoch's mean of the steps' losses."""
        over = self.loaded.variables[self.loaded.training("learn")["loss"]].get("over", "")
        return "mean of the steps' losses" if over else "loss"

    def _state(self) -> str:
        """The expression for the persistent part of the heap."""
        start, stop = self.loaded.opened
        size = self.program.itemsize
        return (
            f"heap[{start // size}:{stop // size}]" if _whole(self.loaded) else f"heap.view(np.uint8)[{start}:{stop}]"
        )

    def _random(self, name: str) -> str:
        classes, dtype = self.loaded.variables[name]["classes"], self.loaded.symbol(name).dtype
        forms = self.loaded.forms
        whole = all(n == BY_ONE for fed in self.loaded.feeds("learn") for n in forms[fed] if n.a)
        sizes = [
            ("2 * BATCH" if whole else "BATCH") if n == BY_ONE else show(n).replace("B", "BATCH") for n in forms[name]
        ]
        size = f"({', '.join(sizes)}{',' * (len(sizes) == 1)})"
        if classes is not None:
            return f"rng.integers(0, {classes}, {size})"
        if dtype == self.program.dtype:
            return f"rng.random({size}, np.{dtype})"
        return f"rng.integers(0, {2 if dtype == 'bool' else 100}, {size}).astype(np.{dtype})"


def _refusal(n: str, why: str) -> list[str]:
    """A check that raises if there are more samples than a batch has."""
    return [
        f"    if {n} > BATCH:",
        f'        raise ValueError(f"{{{n}}} samples, and BATCH is {{BATCH}}: give at most a batch of " + {why!r})',
    ]


def _wrapped(text: str) -> list[str]:
    """A statement in a function's body.  A long call is wrapped."""
    if not re.fullmatch(r"\w+\([^()]*\)", text):
        return [INDENT + text]
    return textwrap.wrap(text, WIDTH, initial_indent=INDENT, subsequent_indent=2 * INDENT, break_long_words=False)


def _rule(title: str) -> str:
    return f"# {'-' * 64} {title}\n"


def _has(text: str, name: str) -> bool:
    return bool(re.search(rf"\b{name}\b", text))


def told(names: Iterable[str]) -> str:
    """Names for a text in the script, escaped, because a name may hold any character."""
    return json.dumps(plain(", ".join(names)), ensure_ascii=False)[1:-1].replace("%", "%%")


def _about(path: str, phase: str) -> str:
    path = told([path])
    return {
        "forward": f"The results of path {path}.",
        "loss": f"The loss and metrics of path {path}.",
        "backward": f"The gradients of path {path}.",
        "optimize": f"A step of path {path}'s optimizer.",
        "end_round": f"Prepare path {path}'s next gradients.",
    }[phase]
