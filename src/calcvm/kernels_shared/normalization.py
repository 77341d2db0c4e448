"""Normalization: chunks of rows, whose partial results are in scratch, and rows that share a text."""

from __future__ import annotations

from calcvm.kernel import Float, Ptr

PARTIAL = 1 << 18  # as in ops.normalization


def chunking(compiled, CHUNKS, BLOCK):
    """The functions ``chunk_of``, ``chunks_of`` and ``most_chunks``, for at most CHUNKS chunks of at least BLOCK rows."""

    @compiled
    def chunk_of(rows):
        """Rows per partial result."""
        return max((rows + CHUNKS * BLOCK - 1) // (CHUNKS * BLOCK), 1) * BLOCK

    @compiled
    def chunks_of(rows):
        return (rows + chunk_of(rows) - 1) // chunk_of(rows)

    @compiled
    def most_chunks(N):
        """The most chunks for vectors of N: more than four only if their partial sums fit PARTIAL."""
        n = CHUNKS
        while n > 4 and n * N > PARTIAL:
            n //= 2
        return n

    return chunk_of, chunks_of, most_chunks


def register_channels(kernel, partial_products, joined_products, joined_inference):
    """Register the sums over all samples and places.  Chunks of rows are shared, and channels in the second phase."""

    @kernel
    def batch_norm_sums(
        me, phases, rows, inner, N, wn, dy: Ptr, x: Ptr, scale: Ptr, mean: Ptr, inv: Ptr,
        dscale: Ptr, dshift: Ptr, t_p: Ptr, t_q: Ptr, ws: Ptr,
    ):  # fmt: skip
        """dscale = sum dy*(x - mean)*inv, dshift = sum dy, and the coefficients of dx.  dy, x (R, N), others (N)."""
        if me.phase == 0:
            partial_products(me, rows * inner, N, dy, x, mean, ws)
        else:
            joined_products(me, rows * inner, N, scale, inv, dscale, dshift, t_p, t_q, ws)

    @kernel
    def batch_norm_inference_sums(
        me, phases, rows, inner, N, eps: Float, wn, dy: Ptr, x: Ptr, running_mean: Ptr, running_var: Ptr,
        dscale: Ptr, dshift: Ptr, ws: Ptr,
    ):  # fmt: skip
        """dscale = sum dy*(x - mean)/sqrt(var + eps), dshift = sum dy.  dy, x (rows*inner, N), others (N)."""
        if me.phase == 0:
            partial_products(me, rows * inner, N, dy, x, running_mean, ws)
        else:
            joined_inference(me, rows * inner, N, eps, running_var, dscale, dshift, ws)


def register_groups(kernel, CHUNKS, add_up, slopes):
    """Register the backward of groups.  Chunks of samples are shared, and channels in the second phase.

    Without dscale and dshift samples are.
    """

    @kernel
    def group_norm_bwd(
        me, phases, rows, inner, groups, D, affine, wn, dy: Ptr, x: Ptr, scale: Ptr, mean: Ptr, inv: Ptr,
        dx: Ptr, dscale: Ptr, dshift: Ptr, ws: Ptr,
    ):  # fmt: skip
        """dscale = sum dy*(x - mean)*inv, dshift = sum dy, dx = inv*(dy*scale - a - (x - mean)*inv*b), a and b means of groups.

        dy, x, dx (rows, inner, groups*D), scale (groups*D), mean, inv (rows, groups).  dx may be dy or x.
        """
        chunk = max((rows + CHUNKS - 1) // CHUNKS, 1) if affine else 1
        chunks = (rows + chunk - 1) // chunk
        if me.phase == 1:
            add_up(me, groups * D, chunks, 6 * groups * D, dscale, dshift, ws, True)
        else:
            slopes(me, chunk, chunks, rows, inner, groups, D, affine, dy, x, scale, mean, inv, dx, ws)


def register_vectors(kernel, compiled, most_chunks, forward, add_up, slopes):
    """Register the normalization of vectors, which are rows*inner.  Rows are shared; in place.

    In the backward chunks of vectors are shared, and columns in the second phase; without dscale and dshift rows are.
    """

    @kernel
    def layer_norm_fwd(me, rows, inner, N, eps: Float, x: Ptr, scale: Ptr, shift: Ptr, y: Ptr, mean: Ptr, inv: Ptr):
        """y = (x - mean)*inv*scale + shift.  x, y (rows*inner, N), scale, shift (N), mean, inv (rows*inner)."""
        forward(me, rows, inner, N, eps, x, scale, shift, y, mean, inv, True)

    @kernel
    def rms_norm_fwd(me, rows, inner, N, eps: Float, x: Ptr, scale: Ptr, y: Ptr, inv: Ptr):
        """y = x*inv*scale.  x, y (rows*inner, N), scale (N), inv (rows*inner)."""
        forward(me, rows, inner, N, eps, x, scale, scale, y, inv, inv, False)

    @compiled
    def backward(me, rows, inner, N, affine, dy, x, scale, mean, inv, dx, dscale, dshift, ws, centered):
        R, most = rows * inner, most_chunks(N)
        chunk = max((R + most - 1) // most, 1) if affine else inner
        chunks = (R + chunk - 1) // chunk if affine else rows
        if me.phase == 1:
            add_up(me, N, chunks, 2 * N, dscale, dshift, ws, centered)
        else:
            slopes(me, chunk, chunks, R, N, affine, dy, x, scale, mean, inv, dx, ws, centered)

    @kernel
    def layer_norm_bwd(
        me, phases, rows, inner, N, affine, wn, dy: Ptr, x: Ptr, scale: Ptr, mean: Ptr, inv: Ptr,
        dx: Ptr, dscale: Ptr, dshift: Ptr, ws: Ptr,
    ):  # fmt: skip
        """dscale = sum dy*(x - mean)*inv, dshift = sum dy, dx = inv*(dy*scale - a - (x - mean)*inv*b), a and b means of vectors.

        dy, x, dx (rows*inner, N), scale (N), mean, inv (rows*inner).  dx may be dy or x.
        """
        backward(me, rows, inner, N, affine, dy, x, scale, mean, inv, dx, dscale, dshift, ws, True)

    @kernel
    def rms_norm_bwd(
        me, phases, rows, inner, N, affine, wn, dy: Ptr, x: Ptr, scale: Ptr, inv: Ptr, dx: Ptr, dscale: Ptr, ws: Ptr
    ):
        """dscale = sum dy*x*inv, dx = inv*(dy*scale - x*inv*b), b means of vectors.

        dy, x, dx (rows*inner, N), scale (N), inv (rows*inner).  dx may be dy or x.
        """
        backward(me, rows, inner, N, affine, dy, x, scale, inv, inv, dx, dscale, dscale, ws, False)
