"""Kernels that move values between the heap and its pages, which are in a file.

The heap's first block holds the file's descriptor plus one (0: there is no file).  A page's offset in the file is its
operand's offset in the heap.  The system starts to write pages to the disk at once, and starts to read pages that will be
needed soon; its own threads do this while the next rows run.

A helper thread of calcvm would do no more than the system's threads, and would need a core.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from calcvm.kernel import LOST_PAGES, PAGES
from calcvm.kernels_cpu._common import Ptr, at, kernel, njit, share, trap

_pread = types.ExternalFunction("pread", types.int64(types.int32, types.int64, types.int64, types.int64))
_pwrite = types.ExternalFunction("pwrite", types.int64(types.int32, types.int64, types.int64, types.int64))
_fadvise = types.ExternalFunction("posix_fadvise", types.int32(types.int32, types.int64, types.int64, types.int32))
_write_behind = types.ExternalFunction("sync_file_range", types.int32(types.int32, *[types.int64] * 2, types.uint32))
WILL_NEED, START = 3, 2  # POSIX_FADV_WILLNEED, SYNC_FILE_RANGE_WRITE

I64 = ir.IntType(64)


@intrinsic
def address(tc, pointer):
    """A pointer as an integer."""
    return types.int64(pointer), lambda ctx, b, sig, args: b.ptrtoint(args[0], I64)


@intrinsic
def bytes_of(tc, pointer):
    """The bytes of an element that a pointer points to: a constant at compile time."""
    width = pointer.dtype.bitwidth // 8
    return types.int64(pointer), lambda ctx, b, sig, args: I64(width)


@intrinsic
def file_of(tc, heap):
    """The descriptor of the heap's file; -1 if there is none."""

    def codegen(ctx, b, sig, args):
        word = b.load(b.gep(b.bitcast(args[0], I64.as_pointer()), [I64(PAGES)]))
        return b.trunc(b.sub(word, I64(1)), ir.IntType(32))

    return types.int32(heap), codegen


def _mover(call):
    """Moves a worker's share between cells and a page by a system call; returns the bytes of the share, or traps."""

    @njit
    def move(me, n, cells, page):
        lo, hi = share(me, n)
        left, done = (hi - lo) * bytes_of(cells), 0
        start, at_cells = address(at(page, lo)) - address(me.heap), address(at(cells, lo))
        while done < left:
            moved = call(file_of(me.heap), at_cells + done, left - done, start + done)
            if moved <= 0:
                trap(me, LOST_PAGES)
                return start, 0
            done += moved
        return start, left

    return move


_write, _read = _mover(_pwrite), _mover(_pread)


@kernel
def page_out(me, n, x: Ptr.cells, page: Ptr.cells):
    """page = x; both n.  Elements are shared."""
    start, written = _write(me, n, x, page)
    if written > 0:
        _write_behind(file_of(me.heap), start, written, START)


@kernel
def page_ahead(me, n, page: Ptr.cells):
    """page (n) will be read soon.  Elements are shared."""
    lo, hi = share(me, n)
    if hi > lo:
        start = address(at(page, lo)) - address(me.heap)
        _fadvise(file_of(me.heap), start, (hi - lo) * bytes_of(page), WILL_NEED)


@kernel
def page_in(me, n, page: Ptr.cells, y: Ptr.cells):
    """y = page; both n.  Elements are shared."""
    _read(me, n, y, page)
