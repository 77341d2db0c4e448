"""Texts of optimizers' rows: updates as functions from their formulas, other steps copied from `formulas.steps`."""

from __future__ import annotations

import ast
import re
from functools import cache
from types import ModuleType

from calcvm.formulas import steps
from calcvm.formulas.declare import UPDATES, Update, arguments
from calcvm.formulas.number import traced
from calcvm.formulas.optimizers import HYPER_SLOTS
from calcvm.script.code import module_text, trace
from calcvm.script.row import FALLBACKS, Row, Writer, slot, writes

STEPS = ("tick", "rate_table", "rate_scale", "decay_scale")
SLOTS = tuple(
    name for name, value in vars(steps).items() if name.isupper() and isinstance(value, int) and name != "N_SLOTS"
)


def _update_row(name: str) -> Writer | None:
    return _updates if name in UPDATES else None


FALLBACKS.append(_update_row)


def _updates(r: Row) -> None:
    """A call of the function from `source_of`, which sets its arguments."""
    update = UPDATES[r.spec.name]
    others = (r.like(v, "p") for v in ("g", *update.state))
    call = r.call(update.name, r.x("p"), *others, r.x("hyper"), r.w.clip == 1)
    r.run(call)


@writes(*STEPS)
def _steps(r: Row) -> None:
    name = r.spec.name
    if name == "tick":
        r.run(r.call(name, r.x("hyper"), r.integer("schedule")))
    elif name == "rate_table":
        r.run(r.call(name, r.x("hyper"), r.w.n, r.integer("every"), r.x("table")))
    elif name == "rate_scale":
        r.run(r.call(name, r.x("hyper"), r.x("scaled"), r.w.factor))
    else:
        r.run(r.call(name, r.x("scaled"), r.w.factor))


def source_of(name: str) -> str:
    """The source of an update or a step, as it appears in a script."""
    if name in UPDATES:
        return _of_update(UPDATES[name])
    return re.sub(r"  # type: ignore\S*", "", function(steps, name))


def function(module: ModuleType, name: str) -> str:
    """The source of a function of a module."""
    return _functions(module)[name]


@cache
def _functions(module: ModuleType) -> dict[str, str]:
    text = module_text(module)
    lines, nodes = text.splitlines(), ast.parse(text).body
    found = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    return {node.name: "\n".join(lines[node.lineno - 1 : node.end_lineno]) + "\n" for node in found}


def _slot(name: str) -> str:
    return f"float(s[{name.upper()}])"


def _of_update(update: Update) -> str:
    """``def adam(p, g, m, v, s, clip)``, which updates each state and p in place."""
    lines = [
        f"def {update.name}(p, g, {''.join(f'{v}, ' for v in update.state)}s, clip):",
        f'    """{update.source}"""',
    ]
    wanted = sorted(
        {*update.slots, *(("weight_decay",) if update.decay else ())} & {*HYPER_SLOTS}, key=HYPER_SLOTS.index
    )
    lines += [f"    {name} = {_slot(name)}" for name in wanted]
    lines.append(f"    g = g * {_slot('clip_scale')} if clip else g")
    if update.decay:
        lines.append("    g = g + weight_decay * p")
    for name, fn in update.steps.items():
        values = trace()
        said = traced(fn, *(update.coefficient(v, values.of) for v in arguments(fn)))
        lines += [f"    {target} = {text}" for target, text in values.equations([(f"{name}[...]", said)])]
    return "\n".join(lines) + "\n"


@writes("clip_norm_scale")
def _clip_norm(r: Row) -> None:
    s = r.x("s")
    norm = (s * s).sum().sqrt()
    scale = r.call("min", r.number(1.0), slot(r, "clip_norm") / (r.call("float", norm) + 1e-6))
    r.put_at("hyper", "CLIP_SCALE", scale)
