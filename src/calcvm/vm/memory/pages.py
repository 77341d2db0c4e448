"""The file of a model's pages: what its program keeps outside the heap, or has moved there for a while."""

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

WORD = 6  # the int64 of the heap's first block in which kernels find the file: its descriptor plus 1


class Pages:
    """A file without a name, which no other process can open and which is gone with this object; all its room is taken at once.

    Pages lie as far from its begin as they do from the heap's, so that it begins with a hole.

    Attributes
    ----------
    bytes, elements : the file, mapped: what is looked at and set from outside of rows.

    Raises
    ------
    FileError : the folder is none, cannot be written to, or the disk has not so much room.
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
        """Tell the kernels."""
        self.piece[8 * WORD : 8 * WORD + 8].view(np.int64)[0] = self._file + 1
