"""Random equations over windows: strides, dilations, places before the first element, orders of axes, groups, reductions."""

from __future__ import annotations

import numpy as np


def random_windows(rng: np.random.Generator) -> tuple[str, dict[str, np.ndarray]]:
    """The text of an equation, and arrays for its operands."""

    def chance(p: float) -> bool:
        return rng.random() < p

    def shuffled(names: list[str]) -> list[str]:
        return [names[k] for k in rng.permutation(len(names))]

    n_axes = int(rng.integers(1, 4)) if chance(0.9) else 4
    outs, taps, inverse = [*"opqr"[:n_axes]], [*"tuhk"[:n_axes]], chance(0.25)
    sizes = {v: int(rng.integers(1, 4)) for v in ("n", "c", "g", "f", *taps)}
    places = {}
    for o, t in zip(outs, taps):
        size, step, far, before = (int(rng.integers(a, b)) for a, b in ((3, 8), (1, 4), (1, 3), (-1, 3)))
        sizes[f"{o}x"] = size
        if inverse:
            whole = (size - 1) * step + (sizes[t] - 1) * far + 1 - before
            sizes[o] = max(1, whole + int(rng.integers(-2, 3)))
            places[o] = f"({o} + {before} - {t}*{far})/{step}"
        else:
            sizes[o] = int(rng.integers(1, max(2, (size + before + 1) // step + 2)))
            places[o] = f"{o}*{step} - {before} {'-' if chance(0.1) else '+'} {t}*{far}"
    channels = [v for v, p in (("g", 0.4), ("c", 0.7)) if chance(p)]
    axes = [*outs, *channels] if chance(0.5) else [*channels, *outs]
    axes = shuffled(axes) if chance(0.3) else axes
    axes = ["n", *axes] if chance(0.85) else axes
    shape = [sizes.get(f"{v}x", sizes[v]) for v in axes]
    how = str(rng.choice(["sum", "sum", "max", "mean", "min"]))
    weighted = how == "sum" and chance(0.75)
    beyond = {"max": "; -inf", "min": "; inf"}.get(how, "") if chance(0.6) else ""
    x = f"x[{', '.join(places.get(v, v) for v in axes)}{beyond}]"
    arrays = {"x": rng.standard_normal(shape)}
    kept = [v for v in axes if v not in ("c", "n")] + ["f"] * (weighted and chance(0.7))
    kept = ["n"] * ("n" in axes) + (shuffled(kept) if chance(0.5) else kept)
    over, body, added = [*taps, *("c" for v in channels if v == "c")], x, ""
    if weighted:
        names = [*taps, *(v for v in channels if v == "c" or chance(0.8)), *(v for v in kept if v == "f")]
        names = shuffled(names) if chance(0.5) else names
        body, arrays["w"] = f"{x}*w[{','.join(names)}]", rng.standard_normal([sizes[v] for v in names])
        biased = [v for v in kept if v in ("g", "f")]
        if biased and chance(0.5):
            added, arrays["v"] = f" + v[{','.join(biased)}]", rng.standard_normal([sizes[v] for v in biased])
    elif chance(0.3):
        body = f"tanh({x})"
    left = ",".join(f"{v}<{sizes[v]}" if v in outs else v for v in kept)
    summed = ",".join(f"{v}<{sizes[v]}" if v in taps and not weighted else v for v in over)
    return f"y[{left}] = {how}[{summed}] {body}{added}", arrays
