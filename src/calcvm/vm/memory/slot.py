"""Slots: pieces of a heap that models use in turn, and the heap's memory.

All access to a model's memory goes through methods of its slot, so that a device with separate memory can have its own
kind of slot (`calcvm.vm.memory.cuda`).  This module has the slots in host memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from calcvm.errors import PlanError, Trap
from calcvm.ops.layouts import back, laid
from calcvm.ops.sizes import evaluate
from calcvm.system import machine_memory
from calcvm.vm.memory.pages import Pages
from calcvm.vm.program.encoding import RESERVED, aligned, decode_row
from calcvm.vm.run import job as J
from calcvm.vm.run.slices import SLICE_SECONDS, ended, latest, sliced

if TYPE_CHECKING:
    from calcvm.vm.memory.store import Store
    from calcvm.vm.memory.turns import Turns
    from calcvm.vm.program.program import Program, Symbol
    from calcvm.vm.run.loaded import Loaded

BAD_INDEX, LOST_PAGES = 1, 2  # traps of kernels: an index out of range, pages that cannot be written or read
NO_TRAP = 0, 0


class Slot:
    """A piece of a heap, for models of one loaded program, and the model that is in it.

    The image is the persistent part (`Loaded.image`); ``open`` adds the gradients of an accumulation.

    Attributes
    ----------
    writable : writes to the views from `cells` change the heap.
    address : address of the piece, as compiled code sees it.
    record : the model in the slot (None: the slot is being filled).
    keeper : the turns that keep the model in the slot while they last, besides the model's own.
    bytes, elements, image : the piece and the image, as views; host memory only.
    pages : the page file, if the program has one.
    lasting : elements up to the last persistent one.
    job, job_address : a job for the piece, to be filled in.
    """

    __slots__ = (
        "address", "loaded", "bytes", "elements", "image", "job", "job_address", "keeper", "lasting", "start",
        "stop", "record", "traps", "view", "pages",
    )  # fmt: skip

    writable = True
    pages: Pages | None

    def __init__(self, loaded: Loaded, start: int, stop: int, piece: np.ndarray, folder: str | None = None):
        self._bind(loaded, start, stop, piece.ctypes.data)
        self.bytes = piece[: loaded.program.heap_bytes]
        self.elements = self.bytes.view(loaded.program.dtype)
        self.image = self.bytes[slice(*loaded.image)]
        self.lasting = self.elements[: lasting_elems(loaded)]
        self.view = self.image.data  # copied in half the time of an array
        self.traps = self.elements[:2]
        if loaded.program.page_bytes:
            self.pages = Pages(loaded.program, folder, self.bytes)
            self.pages.announce()

    def _bind(self, loaded: Loaded, start: int, stop: int, address: int) -> None:
        """Set the attributes that all kinds of slots have."""
        self.loaded, self.start, self.stop, self.address = loaded, start, stop, address
        self.record: Any = None  # a `Record`
        self.keeper: Turns | None = None
        self.pages = None
        self.job = np.zeros(J.JOB_WORDS, np.int64)
        self.job[[J.TABLE, J.HEAP]] = loaded.table_address, address
        self.job[[J.ROW_BYTES, J.PACE]] = loaded.program.row_bytes, 1
        self.job_address = self.job.ctypes.data

    # ------------------------------------------------------------ cells of symbols
    def cells(self, symbol: Symbol, shape: tuple[int, ...] | None = None) -> np.ndarray:
        """A symbol's cells: a view if the slot is writable, else a copy."""
        return cells_of(self.elements_of(symbol, self.elements), symbol, shape)

    def elements_of(self, symbol: Symbol, elements: np.ndarray) -> np.ndarray:
        """The array that a symbol's offset refers to: ``elements`` of the piece, or the page file."""
        return elements if self.pages is None or symbol.start < self.loaded.program.heap_bytes else self.pages.elements

    def write(self, symbol: Symbol, value: Any, shape: tuple[int, ...] | None = None) -> None:
        """Set a symbol's cells to a value, broadcast and converted to their type."""
        with np.errstate(over="ignore"):  # float64 to float32: numbers that are too large become infinite
            cells_of(self.elements_of(symbol, self.elements), symbol, shape)[...] = value

    def scalar(self, offset: int) -> float:
        """The element at an offset."""
        return float(self.elements[offset])

    # ------------------------------------------------------------ the whole piece, and its persistent part
    def clear(self) -> None:
        """Zero the traps and the persistent part.  Everything else is written before it is read."""
        self.lasting[:] = 0
        if self.pages is not None:
            self.pages.announce()

    def clear_pages(self) -> None:
        """Zero the persistent part of the page file."""
        if self.pages is not None:
            self.pages.bytes[slice(*self.loaded.paged)] = 0

    def clear_padding(self) -> None:
        """Zero the padding that block-wise updates read and nothing writes (`Loaded.padding`)."""
        self.elements[self.loaded.padding] = 0

    def blank(self) -> np.ndarray:
        """Zeros up to the last persistent element, to be set and passed to `fill`: here the piece itself."""
        self.clear()
        return self.lasting

    def snapshot(self) -> np.ndarray:
        """A copy of all elements of the piece, for `fill`."""
        return self.elements.copy()

    def fill(self, elements: np.ndarray) -> None:
        """Set the first elements of the piece, except the reserved ones."""
        if elements is not self.lasting:
            self.elements[RESERVED : len(elements)] = elements[RESERVED:]

    def renew(self, record: Any, elements: np.ndarray, facts: Mapping[str, Any]) -> None:
        """`fill` a model's piece between two learning batches, and set the matching facts.

        A signal is handled before or after all of it: CPython checks for signals at calls and jumps, and there are none
        between these statements.
        """
        piece, kept, closed = self.elements[RESERVED : len(elements)], record.facts.kept, set[str]()
        if elements is not self.lasting:
            self.traps.fill(0)
            elements = elements[RESERVED:]
            piece[:] = elements
        kept |= facts
        record.open, record.passing = closed, ()

    def renew_pages(self) -> None:
        """Give a forked child its own page file."""
        if (former := self.pages) is not None:
            self.pages = Pages(self.loaded.program, former.folder, self.bytes)
            kept = slice(*self.loaded.paged)
            self.pages.bytes[kept] = former.bytes[kept]
            self.pages.announce()

    # ------------------------------------------------------------ the image
    def get_image(self, open: bool = False) -> np.ndarray:  # noqa: A002
        """A copy of the image's bytes."""
        return np.concatenate(self._parts(open))

    def set_image(self, image: np.ndarray, open: bool = False) -> None:  # noqa: A002
        """Set the image's bytes."""
        at = 0
        for part in self._parts(open):
            part[:] = image[at : at + part.nbytes]
            at += part.nbytes

    def _parts(self, open: bool) -> list[np.ndarray]:  # noqa: A002
        """The image's bytes as views: in the piece, and in the page file."""
        within = self.bytes[slice(*(self.loaded.opened if open else self.loaded.image))]
        return [within] if self.pages is None else [within, self.pages.bytes[slice(*self.loaded.paged)]]

    def keep(self, store: Store, name: str, facts: Mapping[str, Any], open: bool) -> int:  # noqa: A002
        """Copy the image to a store; returns the number of bytes."""
        if self.pages is not None:  # a temporary copy in memory
            image = self.get_image(open).data
        else:
            image = self.bytes.data[slice(*self.loaded.opened)] if open else self.view
        store.put(name, facts, image)
        return image.nbytes

    def restore(self, store: Store, name: str, open: bool) -> int:  # noqa: A002
        """Copy the image from a store, clear traps and any gradients outside the image; returns the number of bytes."""
        if self.pages is not None:
            image = np.empty(self.loaded.image_bytes(open), np.uint8).data
            store.get(name, image)
            self.set_image(np.frombuffer(image, np.uint8), open)
        else:
            image = self.bytes.data[slice(*self.loaded.opened)] if open else self.view
            store.get(name, image)
        if self.elements[0]:
            self.traps.fill(0)
        if self.loaded.accumulating and not open:
            self.bytes[slice(*self.loaded.gradient)] = 0
        return image.nbytes

    # ------------------------------------------------------------ running
    def execute(self, code: str, job: np.ndarray, address: int, workers: int) -> None:
        """Run the job at ``address`` with ``code`` (see `Device.run`), and raise a kernel's trap.

        Steps of rows run in slices: Ctrl-C comes after a whole step, or in a step that has changed nothing yet.
        """
        if code == "run_rows" and (steps := job.item(J.STEPS)) > (1 if workers > 1 else self.loaded.short):
            self._run_steps(steps, job, address, workers)
        else:
            self._run(code, job, address, workers)

    def _run(self, code: str, job: np.ndarray, address: int, workers: int) -> None:
        self.loaded.device.run(code, job, address, workers, self.loaded)
        self.check()

    def _run_steps(self, steps: int, job: np.ndarray, address: int, workers: int) -> None:
        """Run rows many times, or a long step once."""
        loaded, span = self.loaded, (job.item(J.START), job.item(J.STOP))
        pieces, _ = loaded.cut((span,), workers)

        def run(count: int) -> None:
            for _ in range(count if len(pieces) > 1 else 1):
                for job[J.START], job[J.STOP] in pieces:
                    job[J.STEPS] = count if len(pieces) == 1 else 1
                    self._run("run_rows", job, address, workers)

        if len(pieces) == 1 and loaded.meets(span, workers):
            done = 0
            while done < steps:
                job[J.STEPS] = steps - done
                job[J.DEADLINE], job[J.UNTIL] = latest(), 0
                self._run("run_rows", job, address, workers)
                done += ended(job, steps - done)
        else:
            job[J.DEADLINE] = 0
            for _ in sliced(steps, loaded.runs(span), SLICE_SECONDS, run):
                pass

    def check(self) -> None:
        """Raise a kernel's trap, if there is one."""
        code, pc = self.trap()
        if code:
            program = self.loaded.program
            raise Trap(f"row {pc} ({program.spec(pc).name}, {program.labels[pc]}): {_met(program, pc, code)}")

    def trap(self) -> tuple[int, int]:
        """Code and row of a kernel's trap, which is cleared; zeros if there is none."""
        if not self.elements[0]:
            return NO_TRAP
        code, pc = int(self.elements[0]), int(self.elements[1])
        self.traps.fill(0)
        return code, pc


def _met(program: Program, pc: int, code: int) -> str:
    """The cause of a kernel's trap."""
    if code == LOST_PAGES:
        return "the file of its pages could not be written or read: the disk is full or damaged; load the model as it was saved"
    spec = program.spec(pc)
    index = next((operand for operand in spec.operands if operand.below), None)
    if code != BAD_INDEX:
        return f"trap {code}"
    if index is None:
        from calcvm.vm.program.disassemble import equation_at  # not needed by successful runs

        return (
            f"an index from the data is out of range in {equation_at(program, pc)}: give a value for such places, "
            "as in x[t[i]; 0]"
        )
    words, _ = decode_row(spec, program.rows[pc])
    what = "a label" if index.name == "target" else "an index"
    name = program.symbols[program.symbol_of(pc, index.name)].name
    return f"{what} of {name!r} is not an integer in [0, {evaluate(index.below, words)})"


def shape_of(symbol: Symbol) -> tuple[int, ...]:
    """The shape of a symbol that does not depend on the batch."""
    return tuple(form.b for form in symbol.shape)


def cells_of(elements: np.ndarray, symbol: Symbol, shape: tuple[int, ...] | None = None) -> np.ndarray:
    """A symbol's cells among the elements of a piece; ``shape`` defaults to that of a symbol independent of the batch."""
    shape = shape_of(symbol) if shape is None else shape
    n = math.prod(shape)
    if elements.dtype == symbol.dtype:
        cells = elements[symbol.offset : symbol.offset + n]
    else:
        cells = elements.view(np.uint8)[symbol.start : symbol.start + n * symbol.itemsize].view(symbol.dtype)
    return as_seen(cells, symbol, shape)


def as_seen(cells: np.ndarray, symbol: Symbol, shape: tuple[int, ...]) -> np.ndarray:
    """Cells in storage order, as a view with the layout that users see."""
    if not symbol.layout:
        return cells.reshape(shape)
    return cells.reshape(laid(shape, symbol.layout)).transpose(back(symbol.layout, len(shape)))


def lasting_elems(loaded: Loaded) -> int:
    """Elements from a piece's start to the last persistent one."""
    return max(-(-loaded.opened[1] // loaded.program.itemsize), RESERVED)


class Memory(Protocol):
    """The single allocation of a heap, of ``nbytes`` bytes."""

    nbytes: int

    def slot(self, loaded: Loaded, start: int, stop: int) -> Slot:
        """The slot of a loaded program at the bytes [start, stop), which start on a cache line."""

    def close(self) -> None:
        """Free the memory; its slots are not used any more."""


class HostMemory:
    """Zeroed host memory; the system allocates its pages at first touch.  ``folder`` : for page files of models."""

    def __init__(self, nbytes: int, folder: str | None = None):
        self.nbytes, self.folder = nbytes, folder
        there, limit = machine_memory()
        try:
            if nbytes > there:
                raise MemoryError
            self._bytes = aligned(nbytes)
        except MemoryError:
            text = f"a heap of {nbytes:,} bytes: {limit}: use smaller batches or models"
            raise PlanError(text, nbytes, there) from None

    def slot(self, loaded: Loaded, start: int, stop: int) -> Slot:
        return Slot(loaded, start, stop, self._bytes[start:stop], self.folder)

    def close(self) -> None:
        """Do nothing: the memory is freed with the last view of it."""
