"""Windows over images: the places of A's elements in a product whose A is an image, seen through the taps of a window.

A's rows are pixels of a grid and its columns channels of taps, or the other way round.  Nothing is copied first (im2col):
a step of A is gathered, with zeros beside the image.  The window's description and a table of the tile's rows are at
the end of shared scratch.
"""

from __future__ import annotations

from calcvm.kernels_cuda._cuda import as_i32, as_i64, at, device, shared, thread, threads

PIXELS, TAPS = 1, 2  # meanings of A's rows
# The words of a window's description, and their number.
(
    CHANNELS, PIXEL, I0, I1, I2, O0, O1, O2, K1, K2, S0, S1, S2, P0, P1, P2, L0, L1, L2, W0, W1, W2, TO, TO0, TO1, TO2,
) = range(26)  # fmt: skip
WORDS = 32


@device
def scratch_bytes():
    """The block's shared scratch, as in `calcvm.kernels_cuda._product.shared_bytes`."""
    return max(min(192 * threads(), 47104), 8192)


@device
def table_bytes(rows):
    """The scratch that a window uses, with a table of so many rows."""
    return 8 * WORDS + 16 * rows


@device
def words(h):
    return at(as_i64(shared(h)), scratch_bytes() // 8 - WORDS)


@device
def window(h, channels, pixel, I, O, K, S, P, L, W, to):
    """Describe, for the products that follow, a window of K taps over an image of sizes I, and the grid O of its pixels.

    Pixels of the image are ``pixel`` elements apart.  Tap k reads, for pixel o of the grid, the image's pixel o*S - P + k*L.
    W : the distance of the taps' weights, by axes.  to : the same of the grid's results, by images and axes.
    """
    w = words(h)
    if thread() == 0:
        w[CHANNELS], w[PIXEL] = channels, pixel
        w[I0], w[I1], w[I2] = I
        w[O0], w[O1], w[O2] = O
        w[K1], w[K2] = K[1], K[2]
        w[S0], w[S1], w[S2] = S
        w[P0], w[P1], w[P2] = P
        w[L0], w[L1], w[L2] = L
        w[W0], w[W1], w[W2] = W
        w[TO], w[TO0], w[TO1], w[TO2] = to


@device
def place(i, sizes):
    """The image of a pixel, and its indexes along the axes."""
    line = i // sizes[2]
    plane = line // sizes[1]
    n = plane // sizes[0]
    return n, plane - n * sizes[0], line - plane * sizes[1], i - line * sizes[2]


@device
def pixel_at(h, i):
    """The image of pixel i of the grid, and the pixel that its first tap reads."""
    w = words(h)
    n, o0, o1, o2 = place(i, (w[O0], w[O1], w[O2]))
    return n, o0 * w[S0] - w[P0], o1 * w[S1] - w[P1], o2 * w[S2] - w[P2]


@device
def tap_at(h, f):
    """The channel of summand f of a window, and its tap's offset from the first."""
    w = words(h)
    t = f // w[CHANNELS]
    _, k0, k1, k2 = place(t, (t + 1, w[K1], w[K2]))
    return f - t * w[CHANNELS], k0 * w[L0], k1 * w[L1], k2 * w[L2]


@device
def weights_at(h, t):
    """The offset of tap t's weights."""
    w = words(h)
    _, k0, k1, k2 = place(t, (t + 1, w[K1], w[K2]))
    return k0 * w[W0] + k1 * w[W1] + k2 * w[W2]


@device
def image(h):
    """The image's sizes, and the elements of a pixel."""
    w = words(h)
    return w[I0], w[I1], w[I2], w[PIXEL]


@device
def lies(image, by_pixels, row, column):
    """The offset in the image of A's element in a row and a column; -1 beside the image."""
    n, c = (row[0], column[0]) if by_pixels else (column[0], row[0])
    i0, i1, i2 = row[1] + column[1], row[2] + column[2], row[3] + column[3]
    if i0 < 0 or i1 < 0 or i2 < 0 or i0 >= image[0] or i1 >= image[1] or i2 >= image[2]:
        return -1
    return (((n * image[0] + i0) * image[1] + i1) * image[2] + i2) * image[3] + c


# ---------------------------------------------------------------- rows of a tile
@device
def _entry(h, i):
    return at(as_i32(shared(h)), (scratch_bytes() - 8 * WORDS) // 4 - 4 * (i + 1))


@device
def note_rows(h, by_pixels, first, rows):
    """Write the table's entry for each row of a tile, whose first row is A's row ``first``."""
    i = thread()
    while i < rows:
        e = _entry(h, i)
        e[0], e[1], e[2], e[3] = pixel_at(h, first + i) if by_pixels else tap_at(h, first + i)
        i += threads()


@device
def of_row(h, i):
    """The table's entry for a row."""
    e = _entry(h, i)
    return int(e[0]), int(e[1]), int(e[2]), int(e[3])


@device
def result_at(h, pixel):
    """The offset of the results of a pixel of the grid, for steps of 1."""
    w, (n, o0, o1, o2) = words(h), pixel
    return n * w[TO] + (o0 + w[P0]) * w[TO0] + (o1 + w[P1]) * w[TO1] + (o2 + w[P2]) * w[TO2]


@device
def apart(i, h, first):
    """The same for row i after a tile's ``first``."""
    return result_at(h, of_row(h, first + i))
