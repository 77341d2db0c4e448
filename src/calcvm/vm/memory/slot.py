"""Slots: pieces of a heap that models take turns in, and the memory that they are pieces of.

All that is done to a model's memory is done by methods of its slot, so that a device with memory of its own
has slots of its own (`calcvm.vm.memory.cuda`).  Here are those of the host's.
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
from calcvm.vm.run import job as layout
from calcvm.vm.run.slices import SLICE_SECONDS, ended, latest, sliced

if TYPE_CHECKING:
    from calcvm.vm.memory.record import Record
    from calcvm.vm.memory.store import Store
    from calcvm.vm.memory.turns import Turns
    from calcvm.vm.program.program import Program, Symbol
    from calcvm.vm.run.loaded import Loaded

BAD_INDEX, LOST_PAGES = 1, 2  # traps of kernels: an index that is none, pages that cannot be written or read
NO_TRAP = 0, 0


class Slot:
    """A piece of a heap, for models of one loaded program, and the model that is in it.

    The image is what persists (`Loaded.image`); ``open`` adds the gradients of an accumulation.

    Attributes
    ----------
    writable : views that `cells` gives can be written to.
    address : of the piece, as compiled code sees it.
    record : the model that is in it (None: it is being filled).
    keeper : whose turn keeps the model in it, as long as it lasts, beside the model's own.
    bytes, elements, image : the piece and the image, as views; of memory on the host alone.
    pages : the file of its pages, where its program has some.
    lasting : elements up to the last that persists.
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
        self.view = self.image.data  # copied in half the time that an array takes
        self.traps = self.elements[:2]
        if loaded.program.page_bytes:
            self.pages = Pages(loaded.program, folder, self.bytes)
            self.pages.announce()

    def _bind(self, loaded: Loaded, start: int, stop: int, address: int) -> None:
        """What all kinds of slots have."""
        self.loaded, self.start, self.stop, self.address = loaded, start, stop, address
        self.record: Record | None = None
        self.keeper: Turns | None = None
        self.pages = None
        self.job = np.zeros(layout.JOB_WORDS, np.int64)
        self.job[[layout.TABLE, layout.HEAP]] = loaded.table_address, address
        self.job[[layout.ROW_BYTES, layout.PACE]] = loaded.program.row_bytes, 1
        self.job_address = self.job.ctypes.data

    # ------------------------------------------------------------ cells of symbols
    def cells(self, symbol: Symbol, shape: tuple[int, ...] | None = None) -> np.ndarray:
        """A symbol's cells: a view of them if the slot is writable, else a copy."""
        return cells_of(self.elements_of(symbol, self.elements), symbol, shape)

    def elements_of(self, symbol: Symbol, elements: np.ndarray) -> np.ndarray:
        """What a symbol's offset counts in: ``elements`` of the piece, or the file of pages."""
        return elements if self.pages is None or symbol.start < self.loaded.program.heap_bytes else self.pages.elements

    def write(self, symbol: Symbol, value: Any, shape: tuple[int, ...] | None = None) -> None:
        """Set a symbol's cells to a value that is broadcast and converted to their type."""
        with np.errstate(over="ignore"):  # of float64 in a heap of float32: what is too large is infinite
            cells_of(self.elements_of(symbol, self.elements), symbol, shape)[...] = value

    def scalar(self, offset: int) -> float:
        """The element at an offset."""
        return float(self.elements[offset])

    # ------------------------------------------------------------ the whole piece, and what of it lasts
    def clear(self) -> None:
        """Set to 0 what must be: traps and what persists.  All else is written before it is read."""
        self.lasting[:] = 0
        if self.pages is not None:
            self.pages.announce()

    def clear_pages(self) -> None:
        """Set to 0 what persists in the file of pages."""
        if self.pages is not None:
            self.pages.bytes[slice(*self.loaded.paged)] = 0

    def clear_padding(self) -> None:
        """Set to 0 what updates of whole blocks read, and nothing writes (`Loaded.padding`)."""
        self.elements[self.loaded.padding] = 0

    def blank(self) -> np.ndarray:
        """Zeros for the elements up to the last that persists, to be set and given to `fill`: here the piece itself."""
        self.clear()
        return self.lasting

    def snapshot(self) -> np.ndarray:
        """A copy of all elements of the piece, for `fill`."""
        return self.elements.copy()

    def fill(self, elements: np.ndarray) -> None:
        """Set the first elements of the piece; those that are reserved stay."""
        if elements is not self.lasting:
            self.elements[RESERVED : len(elements)] = elements[RESERVED:]

    def renew(self, record: Record, elements: np.ndarray, facts: Mapping[str, Any]) -> None:
        """`fill` a model's piece between two learning batches, and set the facts that go with that.

        A signal is heard before or after all of it: CPython looks for one at calls and jumps, and there is none between
        these statements.
        """
        piece, kept, closed = self.elements[RESERVED : len(elements)], record.facts.kept, set[str]()
        if elements is not self.lasting:
            self.traps.fill(0)
            elements = elements[RESERVED:]
            piece[:] = elements
        kept |= facts
        record.open, record.passing = closed, None

    def renew_pages(self) -> None:
        """In a forked child: a file of its own."""
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
        """The image's bytes as views: in the piece, and in the file of pages."""
        within = self.bytes[slice(*(self.loaded.opened if open else self.loaded.image))]
        return [within] if self.pages is None else [within, self.pages.bytes[slice(*self.loaded.paged)]]

    def keep(self, store: Store, name: str, facts: Mapping[str, Any], open: bool) -> int:  # noqa: A002
        """Copy the image to a store; the bytes copied."""
        if self.pages is not None:  # for a moment in memory
            image = self.get_image(open).data
        else:
            image = self.bytes.data[slice(*self.loaded.opened)] if open else self.view
        store.put(name, facts, image)
        return image.nbytes

    def restore(self, store: Store, name: str, open: bool) -> int:  # noqa: A002
        """Copy the image from a store, with no trap and no gradients but the image's; the bytes copied."""
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
        """Run the job at ``address`` by ``code`` (see `Device.run`), and raise what a kernel trapped.

        Steps of rows are run in slices: Ctrl-C finds whole steps done, or a step that has changed nothing yet.
        """
        if code == "run_rows" and (steps := job.item(layout.STEPS)) > (1 if workers > 1 else self.loaded.short):
            self._run_steps(steps, job, address, workers)
        else:
            self._run(code, job, address, workers)

    def _run(self, code: str, job: np.ndarray, address: int, workers: int) -> None:
        self.loaded.device.run(code, job, address, workers, self.loaded)
        self.check()

    def _run_steps(self, steps: int, job: np.ndarray, address: int, workers: int) -> None:
        """Run rows many times, or a step that is long."""
        loaded, span = self.loaded, (job.item(layout.START), job.item(layout.STOP))
        pieces, _ = loaded.cut((span,), workers)

        def run(count: int) -> None:
            for _ in range(count if len(pieces) > 1 else 1):
                for job[layout.START], job[layout.STOP] in pieces:
                    job[layout.STEPS] = count if len(pieces) == 1 else 1
                    self._run("run_rows", job, address, workers)

        if len(pieces) == 1 and loaded.meets(span, workers):
            done = 0
            while done < steps:
                job[layout.STEPS] = steps - done
                job[layout.DEADLINE], job[layout.UNTIL] = latest(), 0
                self._run("run_rows", job, address, workers)
                done += ended(job, steps - done)
        else:
            job[layout.DEADLINE] = 0
            for _ in sliced(steps, loaded.runs(span), SLICE_SECONDS, run):
                pass

    def check(self) -> None:
        """Raise what a kernel trapped."""
        code, pc = self.trap()
        if code:
            program = self.loaded.program
            raise Trap(f"row {pc} ({program.spec(pc).name}, {program.labels[pc]}): {_met(program, pc, code)}")

    def trap(self) -> tuple[int, int]:
        """Code and row of what a kernel trapped, once; zeros where there is nothing."""
        if not self.elements[0]:
            return NO_TRAP
        code, pc = int(self.elements[0]), int(self.elements[1])
        self.traps.fill(0)
        return code, pc


def _met(program: Program, pc: int, code: int) -> str:
    """What a kernel met that it trapped."""
    if code == LOST_PAGES:
        return "the file of its pages could not be written or read: the disk is full or damaged; load the model as it was saved"
    spec = program.spec(pc)
    index = next((operand for operand in spec.operands if operand.below), None)
    if code != BAD_INDEX:
        return f"trap {code}"
    if index is None:
        from calcvm.vm.program.disassemble import equation_at  # which reads equations: a run that goes well needs none

        return (
            f"data say a place beyond the ends in {equation_at(program, pc)}: say what counts there, as in x[t[i]; 0]"
        )
    words, _ = decode_row(spec, program.rows[pc])
    what = "a label" if index.name == "target" else "an index"
    name = program.symbols[program.symbol_of(pc, index.name)].name
    return f"{what} of {name!r} is not an integer in [0, {evaluate(index.below, words)})"


def shape_of(symbol: Symbol) -> tuple[int, ...]:
    """The shape of one that does not depend on the batch."""
    return tuple(form.b for form in symbol.shape)


def cells_of(elements: np.ndarray, symbol: Symbol, shape: tuple[int, ...] | None = None) -> np.ndarray:
    """A symbol's cells among the elements of a piece; of one that does not depend on the batch, in its own shape."""
    shape = shape_of(symbol) if shape is None else shape
    n = math.prod(shape)
    if symbol.dtype == elements.dtype.name:
        cells = elements[symbol.offset : symbol.offset + n]
    else:
        cells = elements.view(np.uint8)[symbol.start : symbol.start + n * symbol.itemsize].view(symbol.dtype)
    return as_seen(cells, symbol, shape)


def as_seen(cells: np.ndarray, symbol: Symbol, shape: tuple[int, ...]) -> np.ndarray:
    """Cells in the order in which they lie, as the array that users see: a view of them."""
    if not symbol.layout:
        return cells.reshape(shape)
    return cells.reshape(laid(shape, symbol.layout)).transpose(back(symbol.layout, len(shape)))


def lasting_elems(loaded: Loaded) -> int:
    """Elements from a piece's begin to the last that persists."""
    return max(-(-loaded.opened[1] // loaded.program.itemsize), RESERVED)


class Memory(Protocol):
    """A heap's one allocation, of ``nbytes`` bytes."""

    nbytes: int

    def slot(self, loaded: Loaded, start: int, stop: int) -> Slot:
        """The slot of a loaded program at the bytes [start, stop), which begin on a cache line."""

    def close(self) -> None:
        """Give the memory back: its slots are not used any more."""


class HostMemory:
    """Memory of the host, zeroed; the system gives pages of it as they are touched.  ``folder`` : of files of models' pages."""

    def __init__(self, nbytes: int, folder: str | None = None):
        self.nbytes, self.folder = nbytes, folder
        there, limit = machine_memory()
        try:
            if nbytes > there:
                raise MemoryError
            self._bytes = aligned(nbytes)
        except MemoryError:
            text = f"a heap of {nbytes:,} bytes: {limit}: take smaller batches or models"
            raise PlanError(text, nbytes, there) from None

    def slot(self, loaded: Loaded, start: int, stop: int) -> Slot:
        return Slot(loaded, start, stop, self._bytes[start:stop], self.folder)

    def close(self) -> None:
        """It goes with the last view of it that was given out."""
