"""From a graph to statements, in the sections forward, loss, backward, optimize and end_round of each path.

An update of a large parameter comes directly after the last row that reads the parameter or touches its gradient: DeepDSL's
inlining, one row later.  Clipping by the norm needs all gradients at once, and forbids it.  Parameters with the same factors of
learning rate and decay share a copy of the hyperparameters and lie side by side, so their updates become one row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from calcvm.errors import CalcError
from calcvm.graph import CalcGraph, Operation, Path, Variable, in_same_order
from calcvm.lowering import inserted
from calcvm.lowering.autodiff import Backward
from calcvm.lowering.emit import Emitter
from calcvm.lowering.fuse import fuse_bias, fuse_epilogues, fuse_inputs
from calcvm.lowering.layers import LayerLine, lines_of
from calcvm.lowering.rounds import MEAN, OTHER, SAME, SUM, Rounds
from calcvm.lowering.simplify import simplified
from calcvm.lowering.state_names import state_names
from calcvm.ops.dims import Affine, numel
from calcvm.ops.gradient import GRADIENT
from calcvm.ops.optimizers import HYPER_SLOTS
from calcvm.ops.sizes import extent
from calcvm.ops.statement import PHASES, Lowered, Statement, Value
from calcvm.ops.transformers import PUT_LINE
from calcvm.ops.types import FLOAT, FLOATS
from calcvm.optim import Sampled

# Parameters from this size on are updated as soon as their gradient is final, so that the gradient's
# storage dies early.  Smaller ones are updated together at the end, where their rows merge into one.
# A MobileNetV2 of batch 1 takes 70.3 MB (with 16384 elements 70.6), a GoogLeNet 53.9 (54.2).
LARGE_PARAMETER = 5120
WHOLE = {"float32": 1 << 24, "float64": 1 << 53}  # a type represents all integers up to this one


@dataclass
class GraphFacts:
    """Facts of the graph for the program, besides its rows; JSON-able except ``constants``, values and lines.

    Keys are names that the user knows, of variables and paths.  Cells are referred to by a `Value`, which assembling
    replaces by its number among the program's symbols (None: it has no cells).

    variables : per variable its "symbol", "shape" and "kind", and the "path" and "phase" that compute it; "of", the variable
        that it is a view of (itself if it is none, or is copied for users); "unreadable", the reason if it cannot be read;
        "classes", the number of classes of labels, and the "ignored" label; for a view that reads its symbol's cells in another
        layout, that "layout".  For a number that is no mean over the samples, "over" says what it is (`calcvm.lowering.rounds`);
        if it is not a sum either, "why", and the "totals" that it is a function of.  "inner": it is kept for such a number only.
    parameters : "init" and "trainable"; their order determines their random numbers.
    buffers, carries : "init"; of some carries "steps", the most that they have room for.
    state : the initial value of each "symbol" of optimizers, counters and constants.
    paths : "needs", by phase, the variables that the path reads and does not compute: placeholders, and results of other
        paths; its "output" (of several the first, and all as "outputs").  For a path that trains also its "loss",
        "optimizer", "hyper" and "seed", the parameters' "moments" and "gradients", factors of the learning rate ("rates"),
        and parameters without weight decay ("no_decay").
    layers : the lines of each path, for printing; in a program the result of `Line.at` for its largest batch.
    called : names of layers, and the variables that they make.
    adapts : layers that learn numbers from data before training (`calcvm.nn.Standardize`): "of", the placeholder with these
        data (None: they are computed), the "shape" of a sample as the layer sees it, the "axis" of its features (None: all),
        and whether the data have "channels_last".
    state_names : names and forms of parameters and buffers in state dicts (`calcvm.lowering.state_names`).
    """

    variables: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)
    buffers: dict[str, Any] = field(default_factory=dict)
    carries: dict[str, Any] = field(default_factory=dict)
    state: list[dict[str, Any]] = field(default_factory=list)
    paths: dict[str, Any] = field(default_factory=dict)
    layers: dict[str, list[LayerLine]] = field(default_factory=dict)
    called: dict[str, str] = field(default_factory=dict)
    adapts: dict[str, Any] = field(default_factory=dict)
    state_names: dict[str, Any] = field(default_factory=dict)
    constants: dict[str, np.ndarray] = field(default_factory=dict)


def lower(
    graph: CalcGraph,
    *,
    dtype: str = "float32",
    workers: int = 1,
    device: str = "cpu",
    accumulate: bool = False,
    keep: Iterable[str] = (),
) -> tuple[Lowered, GraphFacts]:
    """The statements of a graph, and the facts for its program.

    Parameters
    ----------
    dtype : "float32" or "float64"
        Type of the heap's elements.
    workers, device : int, str
        The largest team that will run the program, and on what; scratch is sized for it.
    accumulate : bool
        Whether several rounds of forward and backward may precede an optimize (gradients persist and add up).
        Otherwise a step is one round, and large parameters (on "small" all) are updated inside the backward.
    keep : names of variables whose values must stay readable after a step.

    Raises
    ------
    CalcError : a kept name is unknown, a path has a backward but minimizes nothing, or paths read each other.
    UnsupportedOperator : the loss depends on parameters through an operator without a gradient.
    """
    return Lowering(graph, Emitter(dtype, workers, device, graph.variables), accumulate, set(keep)).run()


class Lowering:
    """A lowering in progress: of all paths (`run`), or of the part that `calcvm.lowering.derived` needs."""

    def __init__(self, graph: CalcGraph, emit: Emitter, accumulate: bool, keep: set[str]):
        self.graph, self.accumulate = graph, accumulate
        self.emit = emit
        self.facts = GraphFacts()
        self.layers = graph.layer_results()
        unknown = keep - {*graph.variables, *self.layers}
        if unknown:
            raise CalcError(f"keep: no variable and no layer is called {sorted(unknown)[0]!r}")
        self.rounds = Rounds()  # how variables depend on the samples of a batch
        self.inner: set[Variable] = set()  # kept only for figures that are functions of them
        self.kept = self._kept(keep)
        self.readable: set[Variable] = set()  # the roots of kept results
        self.phase: dict[Variable, str] = {}  # the phase that computes a result
        self.shown: dict[Variable, Value] = {}  # copies of outputs whose storage order is not the user's
        self.lines: dict[str, LayerLine] = {}  # by label of rows
        self.states: dict[tuple[Path, Any], Any] = {}  # values of optimizers' states, by path and role or parameter

    def _kept(self, keep: set[str]) -> set[Variable]:
        """Results that stay readable: named ones, losses, outputs, results without a reader, and inputs of other paths."""
        kept = {self.layers[n] if n in self.layers else self.graph.variables[n] for n in keep}
        for path in self.graph.paths.values():
            kept |= {*path.outputs, *(() if path.loss is None else (path.loss,))}
            used = {v for op in path.operations for v in op.inputs.values()} | {*path.carries.values()}
            kept |= {v for v in path.variables if v not in used}
            kept |= {v for v in used if v.kind == "result" and v.path is not path}
        self.inner = {t.source for v in kept for t in self._totals(v)} - kept
        return kept | self.inner

    def _totals(self, v: Variable) -> list[Variable]:
        """The means and sums over samples of which a kept result is a function, if it may be a figure.

        A trained loss, which every step computes, has totals only if all of them are single numbers.
        """
        if v.path is None or numel(v.shape) != 1 or v.type != FLOAT or self.rounds.of(v).what != OTHER:
            return []
        totals = self.rounds.totals(v) or []
        return totals if v is not v.path.loss or all(numel(t.shape) == 1 for t in totals) else []

    def run(self) -> tuple[Lowered, GraphFacts]:
        for v in self.graph.variables.values():
            if v.kind != "result":
                self.source(v)
        order = self._order()
        for path in order:
            self._path(path)
        kept_values = {self.emit.env[v] for v in self.kept if v in self.emit.env} | {*self.shown.values()}
        statements = self._without_unread(self.emit.statements)
        for s in statements:
            if s.phase == "forward" and s.label in self.lines:
                self.lines[s.label].rows.append(s)
        if not self.emit.on.gpu:  # there the products of all steps at once keep more workers busy
            statements = fuse_inputs(self.emit, statements, kept_values)
        statements = fuse_epilogues(statements, kept_values)
        for value in kept_values:
            if not value.persistent:
                value.resident = True
        used = {v for s in statements for v in s.operands.values() if v is not None}
        used |= {v for v in self.emit.values if v.persistent or v.kind == "placeholder"}
        labels = self._labels()
        self.readable = {self._root(v) for v in self.kept}
        for v in self.graph.variables.values():
            self._describe(v, used, labels.get(v, (None, None)))
        self.facts.called = {name: v.name for name, v in self.layers.items()}
        self.facts.state_names = state_names(self.graph)
        for scope, (v, axis) in self.graph.adapts.items():
            of = v.source.name if v.source.kind == "placeholder" else None
            shape, last = [n.b for n in v.shape[1:]], v.source.layout != ""
            self.facts.adapts[scope] = {"of": of, "shape": shape, "axis": axis, "channels_last": last}
        values = tuple(v for v in self.emit.values if v in used)
        return Lowered(values=values, statements=tuple(statements), paths=tuple(p.name for p in order)), self.facts

    def _without_unread(self, statements: list[Statement]) -> list[Statement]:
        """Remove saved values that no backward reads: drop the operand if it is optional, the row if nothing else is written."""
        unread = self.emit.saved - {v for s in statements for v in s.read_values}
        out = []
        for s in statements:
            idle = {o.name for o in s.spec.writes if s.operands[o.name] in unread}
            if idle and idle == {o.name for o in s.spec.writes}:
                continue
            dropped = {name for name in idle if s.spec.operand(name).optional}
            out.append(replace(s, operands={**s.operands, **dict.fromkeys(dropped)}) if dropped else s)
        return out

    def _order(self) -> list[Path]:
        """The paths, each after the paths whose results it reads."""
        order: dict[Path, None] = {}

        def read_by(path: Path) -> Iterator[Path]:
            read = (v.path for op in path.operations for v in op.inputs.values())
            return (other for other in read if other is not None and other is not path and other not in order)

        for first in self.graph.paths.values():
            behind = {} if first in order else {first: read_by(first)}
            while behind:
                path = next(reversed(behind))
                needed = next(behind[path], None)
                if needed in behind:
                    names = [p.name for p in behind]
                    names = names[names.index(needed.name) :] + [needed.name]
                    raise CalcError(
                        f"paths read each other's results ({' -> '.join(names)}): move operators to a separate path"
                    )
                if needed is None:
                    order[path] = None
                    del behind[path]
                else:
                    behind[needed] = read_by(needed)
        return [*order]

    # ------------------------------------------------------------ values
    def source(self, v: Variable) -> None:
        """The value of a placeholder, parameter, buffer, constant or state."""
        if v.kind == "placeholder":
            self.emit.variable(v, "placeholder", resident=True)
        elif v.kind == "parameter":
            self.emit.variable(v, "parameter", persistent=True)
            self.facts.parameters[v.name] = {"init": self._init(v), "trainable": v.trainable}
        elif v.kind == "buffer":
            self.emit.variable(v, "buffer", persistent=True)
            self.facts.buffers[v.name] = {"init": self._init(v)}
        elif v.kind == "carry":
            self.emit.variable(v, "carry", persistent=True)
            self.facts.carries[v.name] = {"init": self._init(v)} | ({"steps": v.steps} if v.steps else {})
        elif v.kind == "constant":
            self.emit.variable(v, "state", persistent=True)
            self._starts(self.emit.env[v], kind="constant", array=v.name)
            self.facts.constants[v.name] = v.init
        else:
            self.emit.variable(v, "state", persistent=True)
            self._starts(self.emit.env[v], **v.init)

    def _starts(self, symbol: Value, /, **how: Any) -> None:
        self.facts.state.append({"symbol": symbol, **how})

    def _init(self, v: Variable) -> dict[str, Any]:
        if isinstance(v.init, np.ndarray):
            self.facts.constants[v.name] = v.init
            return {"array": v.name}
        return {"class": type(v.init).__name__, "fields": dict(vars(v.init))}

    def _describe(self, v: Variable, used: set[Value], labels: tuple[int | None, int | None]) -> None:
        value = self._value(v)
        if value is not None and value.kind == "carry" and self._root(v).kind == "result":
            value = None  # a new state, in the place of the old one
        if value is None or value not in used:
            reason = "fused into another operator"
        elif (root := self._root(v)).kind == "result" and root not in self.readable:
            reason = "overwritten within the step"
        else:
            reason = ""
        facts = self.facts.variables[v.name] = {
            "symbol": value if value in used else None,
            "shape": [[s.a, s.b] for s in (v.laid if v.kind == "placeholder" else v.shape)],
            "kind": v.kind,
            "path": v.path.name if v.path else None,
            "phase": self.phase.get(v),
            "of": (v.source if self._value(v.source) is value else v).name,
            "unreadable": reason,
            "classes": labels[0],
        }
        if labels[1] is not None:
            facts["ignored"] = labels[1]
        if v.kind == "result" and v.type == FLOAT and numel(v.shape) == 1:
            facts |= self._over(v)
        if v in self.inner:
            facts["inner"] = True
        if (
            v.rank > 2
            and v.kind != "placeholder"
            and v not in self.shown
            and value is not None
            and v.layout != value.layout
        ):
            facts["layout"] = v.layout

    def _root(self, v: Variable) -> Variable:
        """The variable of which it is another shape, but not one that merely shares its value because both compute the same."""
        while (op := v.producer) is not None and (op.spec.view or op.spec.casts):
            x = op.inputs[op.spec.inputs[0]]
            if self.emit.env.get(x) is not self.emit.env.get(v):
                break
            v = x
        return v

    def _over(self, v: Variable) -> dict[str, Any]:
        """How a number depends on the samples of a batch, if it is no mean."""
        over = self.rounds.of(v)
        if over.what in (SAME, MEAN):
            return {}
        if over.what == SUM:
            return {"over": SUM}
        totals = self._totals(v) if v in self.kept else ()
        return {"over": OTHER, "why": over.why, "totals": {t.source.name: self.rounds.of(t).what for t in totals}}

    def _value(self, v: Variable) -> Value | None:
        """The value from which a variable is read."""
        return self.shown.get(v, self.emit.env.get(v))

    def _labels(self) -> dict[Variable, tuple[int, int | None]]:
        """For integer labels: the number of classes that their operators allow, if it is constant, and the label that all ignore."""
        found: dict[Variable, tuple[int, int | None]] = {}
        for op, words in self.emit.words.items():
            for operand in dict.fromkeys(o for row in op.spec.fwd for o in row.operands if o.below):
                if (labels := op.inputs.get(operand.name)) is None or words.get("dense"):
                    continue
                limit, (v, ignored) = extent(operand.below, words), _ignoring(_uncast(labels))
                if isinstance(limit, Affine) and limit.constant:
                    if v.kind == "placeholder" and v.type == FLOAT and limit.b > (most := WHOLE[self.emit.dtype]):
                        raise CalcError(
                            f"{v.name!r} holds numbers below {limit.b:,}, and {self.emit.dtype} does not represent all above {most:,}: "
                            f"make it g.placeholder({v.name!r}, ..., dtype='int64')"
                        )
                    least, other = found.get(v, (limit.b, ignored))
                    found[v] = min(limit.b, least), ignored if ignored == other else None
        return found

    # ------------------------------------------------------------ paths
    def _path(self, path: Path) -> None:
        emit = self.emit
        emit.path, emit.phase = path.name, "forward"
        operations, forward = self.operations(path)
        states = {state: emit.env[state] for state in path.carries}
        late = self._read_late(path, operations, forward) if states and not path.backward else states.keys()
        for state in (state for state in states if state in late):
            emit.env[state] = emit.tensor(f"{state.name}.before", "activation", state.shape, type=states[state].type)
            inserted.move(emit, states[state], emit.env[state], state, state.name)
        emit.env |= {
            new: states[s] for s, new in path.carries.items() if s not in late and self._in_place(s, new, operations)
        }
        needs: dict[str, list[str]] = {}
        for phase, wanted in (("forward", True), ("loss", False)):
            emit.phase = phase
            section = [op for op in operations if (next(iter(op.outputs.values())) in forward) == wanted]
            self.phase.update({v: phase for op in section for v in op.outputs.values()})
            read = [v.source for op in section for v in op.inputs.values()]
            if wanted:
                read += [v.source for v in (*path.outputs, *path.carries.values())]
            needs[phase] = [*dict.fromkeys(v.name for v in read if self._outside(v, path))]
            if phase == "forward":  # once per path: its backward draws the same numbers again
                for v in dict.fromkeys(v for op in operations for v in op.inputs.values() if v.kind == "state"):
                    if v.init["kind"] == "rng":
                        inserted.advance(emit, v)
            for op in section:
                if op.spec is GRADIENT:
                    self.gradient(op, operations)
                else:
                    emit.forward(op)
            for state, new in path.carries.items() if wanted else ():
                if emit.env[new] is not states[state]:
                    inserted.move(emit, emit.env[new], states[state], new, state.name)
            if wanted:
                self.facts.layers[path.name], lines = lines_of(path, section)
                self.lines |= lines
            turned = [v for v in self._outputs(path) if self.phase.get(v, "forward") == phase and not in_same_order(v)]
            self.shown |= {v: inserted.as_seen(emit, v) for v in turned}
        facts = self.facts.paths[path.name] = {
            "backward": path.loss is not None,
            "output": path.outputs[0].name if path.outputs else None,
            "needs": needs,
        }
        if len(path.outputs) > 1:
            facts["outputs"] = [v.name for v in path.outputs]
        if path.backward and path.loss is None:
            raise CalcError(
                f"path {path.name!r} has a backward but no loss: call {path.name}.minimize(loss, optimizer)"
            )
        if path.loss is not None and path.optimizer is None:
            raise CalcError(
                f"path {path.name!r} has a loss that nothing minimizes: call {path.name}.minimize(loss, optimizer); a "
                "figure of a path that only predicts needs no more than its name"
            )
        if path.loss is not None:
            self._check_buffers(path, operations)
            self._backward(path, operations, facts)
        emit.env |= states

    def _in_place(self, state: Variable, new: Variable, operations: list[Operation]) -> bool:
        """Whether the row of a new state changes the old one where it lies: nothing else reads that."""
        of = [op for op in operations if new in op.outputs.values() and op.spec.name == PUT_LINE]
        reads = [v for op in operations for v in op.inputs.values() if v.source is state]
        return len(of) == len(reads) == 1 and of[0].inputs["x"] is state and new not in self.kept

    @staticmethod
    def _read_late(path: Path, operations: list[Operation], forward: set[Variable]) -> set[Variable]:
        """What a path reads when its forward has left new states."""
        late = {v.source for op in operations if forward.isdisjoint(op.outputs.values()) for v in op.inputs.values()}
        return late | {v.source for v in (*path.carries.values(), *path.outputs)}

    def operations(self, path: Path) -> tuple[list[Operation], set[Variable]]:
        """The operators that become the path's rows, and the results that its forward computes."""
        left = {*path.carries.values()}
        operations = fuse_bias(path, self.kept | left)
        before_loss = self._ancestors(operations, [*path.outputs, *left]) if path.outputs else operations
        forward = {v for op in before_loss for v in op.outputs.values()}
        return simplified(operations, forward), forward

    def _outputs(self, path: Path) -> Iterable[Variable]:
        """Outputs of any path that this path computes, and its own outputs, without placeholders and results of other paths."""
        of_others = [v for p in self.graph.paths.values() for v in p.outputs if v.path is path]
        return dict.fromkeys([*of_others, *(v for v in path.outputs if not self._outside(v, path))])

    @staticmethod
    def _check_buffers(path: Path, operations: list[Operation]) -> None:
        """Refuse a backward that reads a buffer which its forward has already updated."""
        updated = {op.inputs[n] for op in operations for n in op.spec.updates}
        for op in operations:
            for n in op.spec.bwd_reads:
                if op.inputs.get(n) in updated:
                    v = op.inputs[n]
                    raise CalcError(
                        f"{op.name}: its backward in path {path.name!r} reads the buffer {v.name!r}, which the path's forward "
                        "updates: use a result in its place, or put the operator in a path that does not update the buffer"
                    )

    @staticmethod
    def _outside(v: Variable, path: Path) -> bool:
        """Whether ``v`` is an input of ``path``: a placeholder, or a result of another path."""
        return v.kind == "placeholder" or (v.kind == "result" and v.path is not path)

    @staticmethod
    def _ancestors(operations: list[Operation], variables: Iterable[Variable]) -> set[Operation]:
        wanted, out = {*variables}, set()
        for op in reversed(operations):
            if any(o in wanted for o in op.outputs.values()):
                wanted.update(op.inputs.values())
                out.add(op)
        return out

    def gradient(self, op: Operation, operations: list[Operation]) -> None:
        """The rows of a gradient operator of the graph."""
        y, x, dx = op.inputs["y"], op.inputs["x"], op.outputs["dx"]
        self._check_buffers(self.graph.paths[self.emit.path], operations)
        seed = self.emit.value(f"{op.name}.seed", "state", 1, persistent=True)
        self._starts(seed, kind="fill", value=1.0)
        self.emit.variable(dx, "gradient")
        Backward(self.emit, operations, False, {x: self.emit.env[dx]}).run(y, seed)

    def _backward(self, path: Path, operations: list[Operation], facts: dict[str, Any]) -> None:
        emit, opt = self.emit, path.optimizer
        emit.phase = "backward"
        start = len(emit.statements)
        seed = emit.value(f"{path.name}.seed", "state", 1, persistent=True)
        self._starts(seed, kind="seed")
        hyper = self._shared(path, "hyper", self._hyper)
        assert path.loss is not None
        backward = Backward(emit, operations, self.accumulate)
        trained = self._trained(path)
        large = 0 if emit.on.small else LARGE_PARAMETER
        inlined = set() if self.accumulate or opt.clip_norm else {p for p in trained if numel(p.shape).b >= large}
        for p in trained:
            stays = p not in inlined
            backward.parameter_gradient[p] = emit.tensor(
                f"d{p.name}", "gradient", p.shape, layout=p.layout, persistent=stays
            )
        backward.run(path.loss, seed)
        states = {p: self._shared(path, p, partial(self._optimizer_state, p)) for p in trained}
        factors = self._shared(path, "table", self._schedule_table)
        update = _Update(emit, path, hyper, factors, backward.parameter_gradient, states)
        if not self.accumulate:  # tick early, so that the updates do not wait for its divisions
            behind = emit.statements[start:]
            del emit.statements[start:]
            update.tick()
            emit.statements += behind
        update.inline([p for p in trained if p in inlined], start)
        emit.phase = "optimize"
        rest = [p for p in trained if p not in inlined]
        if self.accumulate:
            update.tick()
        update.all(rest)
        emit.phase = "end_round"
        if self.accumulate:
            for p in trained:
                inserted.zero(emit, backward.parameter_gradient[p], p.laid, p.name)
        facts.update(
            loss=path.loss.name,
            optimizer=type(opt).__name__,
            hyper=hyper,
            seed=seed,
            accumulate=self.accumulate,
            moments={p.name: state for p, state in states.items()},
            gradients={p.name: (None if p in inlined else g) for p, g in backward.parameter_gradient.items()},
        )
        if path.rates:
            facts["rates"] = dict(path.rates)
        if path.no_decay:
            facts["no_decay"] = [*path.no_decay]

    def _shared(self, path: Path, role: Any, made: Callable[[Path], Any]) -> Any:
        """A part of the state of a path's optimizer, which may be another path's."""
        owner = path.state_of or path
        if (owner, role) not in self.states:
            self.states[owner, role] = made(owner)
        return self.states[owner, role]

    def _hyper(self, path: Path) -> Value:
        hyper = self.emit.value(f"{path.name}.hyper", "state", len(HYPER_SLOTS), persistent=True, type="float64")
        self._starts(hyper, kind="hyper", slots=path.optimizer.slots())
        return hyper

    def _schedule_table(self, path: Path) -> Value | None:
        """The value in the heap with the factors of a tabulated schedule."""
        opt = path.optimizer
        if not isinstance(opt.schedule, Sampled):
            return None
        factors = np.array(opt.schedule.factors)
        table = self.emit.value(f"{path.name}.schedule", "state", len(factors), persistent=True)
        self._starts(table, kind="constant", array=table.name)
        self.facts.constants[table.name] = factors
        return table

    @staticmethod
    def _trained(path: Path) -> list[Variable]:
        assert path.loss is not None
        trained = path.trained_behind(path.loss) if path.parameters is None else [*path.parameters]
        if not trained:
            raise CalcError(f"path {path.name!r}: the loss {path.loss.name!r} depends on no trainable parameter")
        return trained

    def _optimizer_state(self, p: Variable, path: Path) -> dict[str, Value]:
        out = {}
        for name, start in path.optimizer.state.items():
            out[name] = self.emit.tensor(f"{p.name}.{name}", "optimizer", p.shape, layout=p.layout, persistent=True)
            if start:
                self._starts(out[name], kind="fill", value=start)
        return out


class _Update:
    """The optimizer's rows: penalties, clipping, updates."""

    def __init__(
        self, emit: Emitter, path: Path, hyper: Value, table: Value | None, gradients: Mapping[Variable, Value], states: Any
    ):  # fmt: skip
        self.emit, self.opt, self.hyper, self.table = emit, path.optimizer, hyper, table
        self.gradients, self.states = gradients, states
        self.group = {p: (path.rates.get(p.name, 1.0), p.name not in path.no_decay) for p in gradients}
        self.hypers = {(1.0, True): hyper}  # per group of parameters

    def tick(self) -> None:
        inserted.tick(self.emit, self.hyper, self.opt.schedule_code)
        if self.table is not None:
            inserted.rate_table(self.emit, self.hyper, self.table, self.opt.schedule.every)
        if self.opt.clip_norm is None:
            self._scale()

    def _scale(self) -> None:
        """Emit the hyperparameters of each group, by its rate factor and decay, once the common ones are final."""
        for rate, decays in dict.fromkeys(self.group.values()):
            if (rate, decays) in self.hypers:
                continue
            scaled = self.hypers[rate, decays] = self.emit.value(
                f"{self.hyper.name}.scaled", "workspace", len(HYPER_SLOTS), type="float64"
            )
            inserted.rate_scale(self.emit, self.hyper, scaled, rate)
            if not decays:
                inserted.decay_scale(self.emit, scaled, 0.0)

    def prepare(self, p: Variable) -> None:
        """Apply the regularizer and clipping by value to one final gradient."""
        g, r = self.gradients[p], p.regularizer
        if r is not None:
            inserted.penalty(self.emit, p, g, r)
        if self.opt.clip_value is not None:
            inserted.clip_value(self.emit, p, g, self.hyper)

    def update(self, p: Variable) -> None:
        hyper = self.hypers[self.group[p]]
        operands = {"p": self.emit.env[p], "g": self.gradients[p], **self.states[p], "hyper": hyper}
        self.emit.elementwise(self.opt.row, p.laid, operands, p.name, clip=int(self.opt.clip_norm is not None))

    def all(self, parameters: list[Variable]) -> None:
        for p in parameters:
            self.prepare(p)
        if self.opt.clip_norm is not None:
            self._clip_norm(parameters)
            self._scale()
        for p in parameters:
            self.update(p)

    def _clip_norm(self, parameters: list[Variable]) -> None:
        """One partial sum of squares per row of each gradient, in one array; then the common scale."""
        n = sum(p.laid[0].b if p.shape else 1 for p in parameters)
        sums, at = self.emit.value("clip.sumsq", "workspace", n), 0
        for p in parameters:
            at = inserted.sums_of_squares(self.emit, p, self.gradients[p], sums, at)
        inserted.clip_norm(self.emit, sums, n, self.hyper)

    def inline(self, parameters: Collection[Variable], start: int) -> None:
        """Update each parameter right after the last row that reads it or touches its gradient."""
        out = self.emit.statements
        last = {v: i for i in range(start, len(out)) for v in out[i].operands.values()}
        after: dict[int, list[Statement]] = {}
        end = len(out)
        for p in parameters:
            self.prepare(p)
            self.update(p)
            at = max(last.get(v, start) for v in (self.emit.env[p], self.gradients[p]))
            after[at] = out[end:] + after.get(at, [])
            del out[end:]
        out[start:] = (row for i in range(start, end) for row in (out[i], *after.get(i, ())))


def _ignoring(labels: Variable) -> tuple[Variable, int | None]:
    """The original labels and the ignored one, if `calcvm.functions.counting` replaced it; else the labels and None."""
    op = labels.producer
    if op is None or op.spec.name != "where" or (test := op.inputs["c"].producer) is None:
        return labels, None
    if test.spec.name != "not_equal" or op.inputs["b"].kind != "constant":
        return labels, None
    v, ignored = _uncast(op.inputs["a"]), test.inputs["b"]
    number = ignored.init.item() if ignored.kind == "constant" and ignored.init.size == 1 else 0.5
    return (v, int(number)) if _uncast(test.inputs["a"]) is v and number == int(number) else (labels, None)


def _uncast(v: Variable) -> Variable:
    """The variable before casts that preserve its numbers."""
    while (op := v.producer) and op.spec.casts and _keeps(op.inputs["x"].type, op.outputs["y"].type):
        v = op.inputs["x"]
    return v.source


def _keeps(type_: str, to: str) -> bool:
    return to in FLOATS if type_ in FLOATS else to in FLOATS or bool(np.can_cast(type_, to))


assert PHASES == ("forward", "loss", "backward", "optimize", "end_round")
