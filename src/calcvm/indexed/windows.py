"""Sums, means and extrema over windows that slide along axes, as rows of convolution and of pooling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from calcvm import functions as F
from calcvm.graph import apply
from calcvm.indexed.products import Addend, Extents, summed, varies
from calcvm.indexed.values import Value, cut, numel, ordered, reshaped

MOST_AXES = 3  # along which a window may slide


@dataclass(frozen=True)
class Window:
    """One axis of places ``out*step + tap*apart - before``; or, transposed, ``(out + before - tap*apart)/step``.

    axis : x's index for it.  size, count, taps : the extents of x, out and tap.
    """

    axis: str
    out: str
    tap: str
    step: int
    apart: int
    before: int
    size: int
    count: int
    taps: int
    transposed: bool = False

    @property
    def span(self) -> int:
        return (self.taps - 1) * self.apart + 1

    @property
    def after(self) -> int:
        """Places read beyond the end."""
        return max(0, (self.count - 1) * self.step + self.span - self.before - self.size)

    @property
    def used(self) -> tuple[int, int]:
        """The part of x that the windows read, since rows would find more windows in all of x."""
        start, end = max(0, -self.before), self.size
        fits = (end - start + max(0, self.before) + self.after - self.span) // self.step + 1
        if fits > self.count:
            end = (self.count - 1) * self.step + self.span - self.before
        return start, end

    @property
    def sees(self) -> bool:
        """Whether the used part has any place."""
        start, end = self.used
        return self.transposed or 0 <= start < end

    @property
    def inside(self) -> bool:
        """Whether all places are inside."""
        return self.before <= 0 and not self.after


def convolution(
    x: Value, w: Value, windows: Sequence[Window], over: set[str], extents: Extents, addend: Addend | None
) -> Value | None:
    """The sum over taps of x and w, and over channels; None if no row computes it."""
    sliding, outs, taps = ([getattr(v, what) for v in windows] for what in ("axis", "out", "tap"))
    by_axis = {v.axis: v for v in windows}
    turned = windows[0].transposed
    fits = len(windows) <= MOST_AXES and all(v.sees for v in windows)
    if not fits or not {*taps} <= {*w.axes} or {*outs} & {*w.axes}:
        return None
    x = summed(x, [v for v in x.axes if v in over and v not in w.axes])
    w = summed(w, [v for v in w.axes if v in over and v not in x.axes and v not in taps])
    if any(varies(extents[v]) for v in w.axes):
        return None
    windows = [by_axis[v] for v in x.axes if v in by_axis]
    sliding, taps, outs = ([getattr(v, what) for v in windows] for what in ("axis", "tap", "out"))
    plain = [v for v in x.axes if v not in sliding]
    lead = [v for v in plain if v not in w.axes]
    groups, inner = ([v for v in plain if v in w.axes and (v in over) == summed_] for summed_ in (False, True))
    filters = [v for v in w.axes if v not in taps and v not in x.axes]
    more = [_output_padding(v) for v in windows] if turned else []
    if None in more:
        return None
    first, image = _image(x, windows, lead, [*groups, *inner], extents, whole=turned)
    n_groups, n_inner, n_filters = (int(numel(extents[v] for v in names)) for names in (groups, inner, filters))
    if turned:
        shape = (n_groups * n_inner, n_filters)
        weight = _weight(w, (*groups, *inner), filters, taps, shape, extents)
    else:
        shape = (n_groups * n_filters, n_inner)
        weight = _weight(w, (*groups, *filters), inner, taps, shape, extents)
    bias = None if addend is None else addend.bias((*groups, *filters), n_groups * n_filters)
    given: dict[str, Any] = {
        "stride": tuple(v.step for v in windows),
        "dilation": tuple(v.apart for v in windows),
        "groups": n_groups,
    }
    if turned:
        ends = [_full(v) - v.count for v in windows]
        given["padding"] = (*(v.before for v in windows), *(max(0, n) for n in ends))
        given["output_padding"] = tuple(max(0, -n) for n in ends)
        y = apply("conv_transpose", image, weight, bias, **given)
    else:
        given["padding"] = (*(max(0, v.before) for v in windows), *(v.after for v in windows))
        y = apply("conv", image, weight, bias, **given)
    return _seen(y, lead, (*groups, *filters), outs, first, extents)


def _full(v: Window) -> int:
    """Places of a transposed convolution, from the first one on."""
    return (v.size - 1) * v.step + v.span - v.before


def _output_padding(v: Window) -> int | None:
    """The output padding of a transposed convolution; None if no row computes it."""
    more = max(0, v.count - _full(v))
    return more if v.before >= 0 and (not more or more < max(v.step, v.apart)) else None


def pooled(how: str, x: Value, windows: Sequence[Window], extents: Extents, beyond: float) -> Value | None:
    """The largest, smallest, sum or mean over taps of x; None if no row computes it."""
    by_axis = {v.axis: v for v in windows}
    windows = [by_axis[v] for v in x.axes if v in by_axis]
    outside = beyond != {"max": float("-inf"), "min": float("inf")}.get(how, 0) and not all(v.inside for v in windows)
    narrow = any(max(v.before, v.after) >= v.span or v.apart > v.size or not v.sees for v in windows)
    spread = how in ("sum", "mean") and any(v.apart > 1 for v in windows)
    if x.constant or len(windows) > MOST_AXES or windows[0].transposed or outside or narrow or spread:
        return None
    at = min(k for k, v in enumerate(x.axes) if v in by_axis)
    lead = [*x.axes[:at]]
    tail = [v for v in x.axes[at:] if v not in by_axis]
    if not tail and len(lead) > 1:  # channels come first
        lead, tail = lead[:1], lead[1:]
    first, image = _image(x, windows, lead, tail, extents)
    pads = (*(max(0, v.before) for v in windows), *(v.after for v in windows))
    of: dict[str, Any] = {
        "kernel": tuple(v.taps for v in windows),
        "stride": tuple(v.step for v in windows),
        "padding": pads,
    }
    if how in ("max", "min"):
        apart = tuple(v.apart for v in windows)
        y = apply("max_pool", -image if how == "min" else image, **of, dilation=apart)
        y = -y if how == "min" else y
    else:
        y = apply("avg_pool", image, **of)
        y = y * float(numel(v.taps for v in windows)) if how == "sum" else y
    return _seen(y, lead, tail, [v.out for v in windows], first, extents)


# ---------------------------------------------------------------- images
def _image(
    x: Value,
    windows: Sequence[Window],
    lead: Sequence[str],
    channels: Sequence[str],
    extents: Extents,
    whole: bool = False,
) -> tuple[bool, Any]:
    """x as an image (N, C, *sizes), cut to the part that windows read; and whether channels come first in x."""
    sliding = [v.axis for v in windows]
    first = x.axes == (*lead, *channels, *sliding) and len(channels) > 0
    axes = (*lead, *channels, *sliding) if first else (*lead, *sliding, *channels)
    data, sizes = ordered(x, axes), [v.size for v in windows]
    for k, v in enumerate(windows):
        if not whole and v.used != (0, v.size):
            data, sizes[k] = cut(data, axes.index(v.axis), *v.used), v.used[1] - v.used[0]
    n, c = (numel(extents[v] for v in names) for names in (lead, channels))
    if first:
        return True, reshaped(data, (n, c, *sizes))
    return False, F.channels_first(reshaped(data, (n, *sizes, c)))


def _weight(
    w: Value, out: Sequence[str], inner: Sequence[str], taps: Sequence[str], shape: tuple[int, int], extents: Extents
) -> Any:
    """w as weights (out, inner, *window)."""
    window = [int(extents[v]) for v in taps]
    if w.axes == (*out, *inner, *taps):
        return reshaped(w.data, (*shape, *window))
    data = reshaped(ordered(w, (*taps, *inner, *out)), (*window, *shape[::-1]))
    return data.transpose((-1, -2, *range(len(window)))) if w.constant else apply("window_last", data)


def _seen(
    y: Any, lead: Sequence[str], channels: Sequence[str], outs: Sequence[str], first: bool, extents: Extents
) -> Value:
    """An image as a value, with its channels in the same place as in x."""
    if first and len(lead) == len(channels) == 1:
        return Value(y, (*lead, *channels, *outs))
    axes = (*lead, *outs, *channels)
    return Value(reshaped(F.channels_last(y), [extents[v] for v in axes]), axes)
