"""The page file of a model, for values that its program keeps outside the heap or moves there for a while."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from typing import TYPE_CHECKING

import numpy as np

from calcvm.errors import telling
from calcvm.system import allocate

if TYPE_CHECKING:
    from calcvm.vm.program.program import Program

WORD = 6  # the int64 of the heap's first block that holds the file's descriptor plus 1, for the kernels


class Pages:
    """An anonymous file that no other process can open; it goes with this object, and its disk space is reserved at once.

    A page has the same offset in the file as from the heap's start, so the file begins with a hole.

    Attributes
    ----------
    bytes, elements : the mapped file, for access from outside rows.

    Raises
    ------
    FileError : the folder does not exist, cannot be written to, or the disk is too full.
    """

    def __init__(self, program: Program, folder: str | None, piece: np.ndarray):
        self.folder, self.piece = folder, piece
        where = f"the pages of a model, {program.page_bytes:,} bytes in {folder or tempfile.gettempdir()!r}"
        with telling(where, "written"):
            with tempfile.TemporaryFile(dir=folder, prefix="calcvm-pages-") as file:
                self._file = os.dup(file.fileno())
            weakref.finalize(self, os.close, self._file)
            allocate(self._file, program.heap_bytes, program.page_bytes)
            mapped = mmap.mmap(self._file, program.heap_bytes + program.page_bytes)
        self.bytes = np.frombuffer(mapped, np.uint8)
        self.elements = self.bytes.view(program.dtype)

    def announce(self) -> None:
        """Publish the file's descriptor to the kernels."""
        self.piece[8 * WORD : 8 * WORD + 8].view(np.int64)[0] = self._file + 1
