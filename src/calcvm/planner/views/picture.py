"""The heap as a picture: offsets upward, statements to the right, one rectangle per value."""

from __future__ import annotations

from calcvm import files
from calcvm.errors import MissingExtra
from calcvm.planner.layout import Unit
from calcvm.planner.plan_data import PlanData

COLOURS = {"forward": "#4c78a8", "gradient": "#e45756", "optimizer": "#54a24b", "workspace": "#b279a2"}
MIN_LABEL = 0.018  # of the heap's height: smaller rectangles have no label


def picture(plan: PlanData, path: str) -> None:
    """Draw ``plan`` into the image file ``path``.

    Raises
    ------
    MissingExtra
        If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch, Rectangle
    except ImportError as e:
        raise MissingExtra("matplotlib", "plot", "a picture of a plan") from e

    n = max(len(plan.statements), 1)
    unit, scale = ("MB", 1e6) if plan.heap_bytes > 1e6 else ("kB", 1e3)
    figure = Figure(figsize=(min(9 + 0.12 * n, 22), 7), layout="constrained")
    axes = figure.add_subplot()
    layout = plan.layout
    fixed = [u for zone in layout.persistent.values() for u in zone] + list(layout.resident)
    for u in (*fixed, *layout.transient):
        v = u.values[0][0]
        start, height = plan.offsets[v] * layout.machine.element(v) / scale, layout.size(u, plan.batch_size) / scale
        colour = COLOURS[u.zone]
        alpha = 0.45 if u in layout.transient else 0.9
        box = (u.first - 0.5, start), u.last - u.first + 1, height
        axes.add_patch(Rectangle(*box, facecolor=colour, alpha=alpha, edgecolor="white", linewidth=0.6))
        if height > MIN_LABEL * plan.heap_bytes / scale:
            text = axes.text(
                (u.first + u.last) / 2, start + height / 2, _name(u, plan), ha="center", va="center", fontsize=7
            )
            text.set_clip_on(True)
    live = [b / scale for b in plan.live_bytes]
    lines = axes.step(range(len(live)), live, where="mid", color="black", linewidth=1, label="live")
    bound = plan.lower_bound_bytes / scale
    lines.append(axes.axhline(bound, color="black", linestyle=":", linewidth=1, label="lower bound"))
    axes.set(xlim=(-0.5, n - 0.5), ylim=(0, 1.02 * plan.heap_bytes / scale))
    axes.set(xlabel="statement", ylabel=f"offset in the heap ({unit})")
    axes.set_title(
        f"batch {plan.batch_size}: heap {plan.heap_bytes:,} bytes, lower bound {plan.lower_bound_bytes:,} bytes",
        fontsize=10,
    )
    if n <= 60:
        names = [f"{st.spec.name} {st.label}"[:34] for st in plan.statements]
        axes.set_xticks(range(len(names)), names, rotation=90, fontsize=6)
        axes.set_xlabel("")
    patches = [Patch(color=c, label=zone) for zone, c in COLOURS.items()]
    patches.append(Patch(color="grey", alpha=0.45, label="paler: shares its cells"))
    figure.legend(handles=[*patches, *lines], loc="outside right upper", fontsize=7, frameon=False)
    files.picture(path, figure, dpi=130)


def _name(u: Unit, plan: PlanData) -> str:
    names = [v.name for v, _ in u.values if v not in plan.blocks]
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
