"""The plan as tables: zones, statements with their live bytes, totals and bounds."""

from __future__ import annotations

from textwrap import wrap

from calcvm.planner.paging import moved_bytes
from calcvm.planner.plan_data import PlanData

WIDTH = 100


def describe(plan: PlanData, max_rows: int | None) -> str:
    """Zones, statements and totals, at most ``WIDTH`` columns wide."""
    lines = [
        f"plan: batch {plan.batch_size}, {plan.workers} worker{'s' * (plan.workers != 1)}, "
        f"float{8 * plan.itemsize}, {len(plan.statements)} rows, {sum(plan.sync)} barriers",
        "",
        f"{'zone':<12}{'start':>14}{'stop':>14}{'persistent':>14}{'resident':>16}{'transient':>16} bytes",
    ]
    for z in plan.zones.values():
        start, stop = (f"{z.start_elems:,}", f"{z.stop_elems:,}") if z.stop_elems else ("-", "-")
        lines.append(
            f"{z.name:<12}{start:>14}{stop:>14}{z.persistent_bytes:>14,}{z.resident_bytes:>16,}{z.transient_bytes:>16,}"
        )
    lines += ["", f"{'row':>6}  {'section':<20} {'instruction':<22} {'live bytes':>15}     label"]
    table = [_line(plan, t) for t in range(len(plan.statements))]
    if max_rows is not None and len(table) > max_rows:
        table = _elide(table, plan.peak, max_rows)
    lines += table
    over = plan.heap_bytes - plan.lower_bound_bytes
    lines += [
        "",
        f"heap         {plan.heap_bytes:>15,} bytes = {plan.heap_elems:,} elements",
        f"lower bound  {plan.lower_bound_bytes:>15,} bytes (the packing adds {over:,}, {100 * plan.gap:.2f} %)",
        f"save all     {plan.save_all_bytes:>15,} bytes if no two values shared memory",
        f"formula      {plan.formula}",
    ]
    if plan.recomputed or plan.page_bytes:
        bound = "" if plan.lower_bound is None else f" (at least {100 * plan.lower_bound:.2f} %)"
        lines.append(
            f"recomputed   {len(plan.recomputed)} rows of the forward, {'with paging ' if plan.page_bytes else ''}"
            f"{plan.costs} to take {100 * plan.overhead:.2f} % of a step"
            + (" (proved minimal)" if plan.proved else bound)
        )
    if plan.page_bytes:
        kept = plan.zones["pages"].persistent_bytes
        moved = sum(moved_bytes(st, plan.batch_size, plan.layout.machine) for st in plan.statements)
        lines += [
            f"in a file    {plan.page_bytes:>15,} bytes, {kept:,} of them from step to step",
            f"moved        {moved:>15,} bytes read and written per step",
        ]
    if plan.solver:
        lines += wrap(f"solver       {plan.solver}", WIDTH, subsequent_indent=" " * 13)
    if plan.seconds is not None:
        lines.append(f"a step       {1e3 * plan.seconds:,.3g} ms, from {plan.costs} costs of its rows")
    if plan.seconds is not None and plan.seconds_without is not None:
        more = plan.seconds / plan.seconds_without - 1
        lines.append(
            f"             {100 * more:+.2f} % over a step with as little scratch and no recomputation, caches counted"
        )
    if plan.device_bytes:
        parts = ", ".join(f"{name} {nbytes:,}" for name, nbytes in plan.device_bytes.items())
        lines.append(f"on the GPU   {plan.device_total:>15,} bytes: {parts}; without data sets and the driver's memory")
    return "\n".join(line.rstrip()[:WIDTH] for line in lines)


def _line(plan: PlanData, t: int) -> str:
    st = plan.statements[t]
    section = f"{st.path}.{st.phase}"
    mark = "<- peak" if t == plan.peak else ""
    sync = "|" if plan.sync[t] else " "
    head = f"{t:>6}  {section[:20]:<20} {st.spec.name[:22]:<22} {plan.live_bytes[t]:>15,}  {sync}  "
    room = WIDTH - len(head) - len(mark) - 1
    return f"{head}{st.label[:room]} {mark}"


def _elide(table: list[str], peak: int, max_rows: int) -> list[str]:
    """Head, the rows around the peak, and tail."""
    third = max(max_rows // 3, 1)
    keep = {*range(third), *range(len(table) - third, len(table))}
    keep |= {t for t in range(peak - third // 2, peak + third // 2 + 1) if 0 <= t < len(table)}
    out, last = [], -1
    for t in sorted(keep):
        if t > last + 1:
            out.append(f"{'...':>6}  {t - last - 1} rows")
        out.append(table[t])
        last = t
    return out
