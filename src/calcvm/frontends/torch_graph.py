"""The graph that `torch.export` makes of a module before it is decomposed, as plain data.

One graph serves both forms: PyTorch writes batch norm and dropout into the graph of evaluation with all their numbers.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch

from calcvm.errors import CalcError, UnsupportedOperator
from calcvm.frontends.aten import ACROSS, CHECKS, GETITEM, RANDOM, SIZE, counterpart
from calcvm.frontends.building import FLOATS
from calcvm.frontends.imported import Imported, Node, Shape, Tensor, Value

_alone = Lock()  # PyTorch exports in one thread at a time
MOST = 2**20  # samples in a batch
OF_SIZES = {operator.add: "add", operator.sub: "sub", operator.mul: "mul", operator.floordiv: "floordiv"}
TESTS = [getattr(operator, name) for name in "eq ne lt le gt ge and_ or_".split()]  # of sizes
VIEWS = "chunk expand narrow permute select slice split squeeze t transpose unbind unsqueeze view".split()
FILLED = {"zeros": 0, "empty": 0, "ones": 1, "full": None}  # with what; None: with an argument
FILLS = {form.format(name): value for name, value in FILLED.items() for form in ("new_{}", "{}_like")}
WITHOUT_GRADIENT = "wrap_with_set_grad_enabled"
BLOCKS = {WITHOUT_GRADIENT: (0, 1), "wrap_with_autocast": (2, 4)}  # the places of their setting, and of their body
UNREAD = ("device", "generator", "layout", "memory_format", "pin_memory")
IN_TWO_FORMS = {  # the argument that tells training
    "batch_norm": 5, "dropout": 2, "feature_dropout": 2, "gru": 6, "lstm": 6, "rnn_relu": 6, "rnn_tanh": 6,
}  # fmt: skip


def exported(module: torch.nn.Module, inputs: Sequence[torch.Tensor], axes: Sequence[int | None]) -> Imported:
    """The graph of a module.

    Raises
    ------
    CalcError : PyTorch cannot export it.
    UnsupportedOperator : operators have no counterpart.
    """
    sizes = {x.shape[axis] for x, axis in zip(inputs, axes) if axis is not None}
    if axes[0] is None or len(sizes) > 1 or 0 in sizes:
        raise CalcError(
            "from_torch: along the axes of the batch, all examples have one number of samples, at least 1, and the first has such an axis"
        )
    shapes: list[Shape] = [
        (*x.shape,) if axis is None else (*x.shape[:axis], None, *x.shape[axis + 1 :]) for x, axis in zip(inputs, axes)
    ]
    if sizes == {1}:  # of which torch.export would make a constant
        inputs = [x if axis is None else torch.cat([x, x], axis) for x, axis in zip(inputs, axes)]
    with _alone:
        modes = {path: m.training for path, m in module.named_modules()}
        try:
            program = _program_of(module.eval(), inputs, axes)
            for path, m in module.named_modules():
                m.training = modes[path] or not modes[""]
            forms, differ = _in_training(module, inputs, axes, program)
        finally:
            for path, m in module.named_modules():
                m.training = modes[path]
    if changed := _changed_buffers(program):
        raise UnsupportedOperator(
            f"from_torch: {type(module).__name__} changes {', '.join(changed)} in evaluation: make it an input and an output"
        )
    missing = _missing(program)
    in_two_forms = any(_name(n) in IN_TWO_FORMS for n in program.graph.nodes)
    if missing and not in_two_forms:  # their form in training would be lost
        known = dict(torch.export.default_decompositions().items())
        with _quiet():
            program = program.run_decompositions({op: known[op] for op in missing if op in known})
        missing = _missing(program)
    if missing:
        name = type(module).__name__
        told = "; ".join(
            f"{op} in {', '.join(dict.fromkeys(p or name for p in paths))}" for op, paths in missing.items()
        )
        part = ""
        if any(_name_of(op).endswith("_") for op in missing):
            part = "; one that ends with _ changes a part of a value: take torch.where or torch.cat"
        raise UnsupportedOperator(
            f"from_torch: no counterpart of {told}: write these parts by other operators, or as layers of calcvm.nn{part}"
        )
    reader = _Reader(module, program, forms)
    given = [(f"x{k}", shape, _type(x.dtype)) for k, (shape, x) in enumerate(zip(shapes, inputs))]
    outputs = [f"y{k}" for k in range(len(reader.results))]
    return Imported(
        "from_torch", type(module).__name__, given, [*axes], outputs, reader.given, reader.tensors, reader.nodes, reader.results, differ,
    )  # fmt: skip


def _type(dtype: Any) -> str | None:
    name = str(dtype).removeprefix("torch.")
    return None if name in FLOATS else name


def _program_of(module: torch.nn.Module, inputs: Sequence[torch.Tensor], axes: Sequence[int | None]) -> Any:
    batch = torch.export.Dim("batch", min=1, max=MOST)
    given = tuple(x.clone() for x in inputs)
    shapes = torch.export.ShapesCollection()  # by tensors: a forward may take *inputs
    for x, axis in zip(given, axes):
        if axis is not None:
            shapes[x] = {axis: batch}
    try:
        with _quiet():
            return _flat(torch.export.export(module, given, dynamic_shapes=shapes, strict=False))
    except Exception as error:  # whatever the module, or PyTorch, raises
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        told = f"{type(error).__name__}: {' '.join(lines[:3])[:500]}"
        hint = ""
        if "batch" in str(error) and "Constraints violated" in str(error):
            hint = (
                "  Its code uses the batch's size as a number: write x.shape[0] for len(x), x.flatten(1) for x.view(8, -1).  An input whose "
                "batch is not its first axis needs batch_axes=, such as (0, 1, 1) for the states of an LSTM"
            )
        raise CalcError(f"from_torch: PyTorch cannot export {type(module).__name__}: {told}.{hint}") from error


def _flat(program: Any) -> Any:
    """A program whose blocks under `torch.no_grad`, or without `torch.autocast`, are part of its graph."""
    graph = program.graph
    for block in [n for n in _calls(graph) if _name(n) in BLOCKS]:
        setting, (body, *given) = block.args[BLOCKS[_name(block)][0]], block.args[BLOCKS[_name(block)][1] :]
        if _name(block) == WITHOUT_GRADIENT or not setting:
            _inline(graph, block, getattr(program.graph_module, body.target).graph, given)
    return program


def _inline(graph: Any, block: Any, inner: Any, given: Sequence[Any]) -> None:
    copies = dict(zip([n for n in inner.nodes if n.op == "placeholder"], given))
    with graph.inserting_before(block):
        for n in _calls(inner):
            copies[n] = graph.node_copy(n, copies.__getitem__)
        (ends,) = (n for n in inner.nodes if n.op == "output")
        results = [copies[n] for n in ends.args[0]]
        if _name(block) == WITHOUT_GRADIENT and not block.args[0]:  # nothing is trained through them
            results = [graph.call_function(torch.ops.aten.detach.default, (n,)) for n in results]
    for n in [*block.users]:
        result = results[n.args[1]]
        result.meta = {**n.meta, "nn_module_stack": block.meta.get("nn_module_stack")}
        n.replace_all_uses_with(result)
        graph.erase_node(n)
    graph.erase_node(block)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without PyTorch's warnings about its own code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# ---------------------------------------------------------------- nodes of torch.fx
def _name(node: Any) -> str:
    return _name_of(node.target)


def _name_of(target: Any) -> str:
    """The name of an operator without its form: "conv2d" of aten.conv2d.default."""
    return str(target).removeprefix("aten.").partition(".")[0]


def _path(node: Any) -> str:
    """The path of the module that calls an operator, "" for the outermost."""
    stack = [str(path) for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    return next((path for path in stack[::-1] if "hook" not in path), "")


def _calls(graph: Any) -> list[Any]:
    return [n for n in graph.nodes if n.op == "call_function"]


def _missing(program: Any) -> dict[Any, list[str]]:
    """The operators without a counterpart, and the paths of the modules that call them."""
    read, missing = _that_depend(program.graph, _sources(program)), dict[Any, list[str]]()
    for n in _calls(program.graph):
        known = n.target in (*OF_SIZES, *TESTS, operator.getitem) or _name(n) in (SIZE, *CHECKS)
        if not known and (counterpart(_name(n)) is None or _changes_part(n) if n in read else _name(n) in RANDOM):
            missing.setdefault(n.target, []).append(_path(n))
    return missing


def _changes_part(node: Any) -> bool:
    """Whether it works in place on a part of a value that is read again, which would stay as it was."""
    of = node.args[0] if _name(node).endswith("_") else None
    return (
        isinstance(of, torch.fx.Node) and of.op == "call_function" and _name(of) in VIEWS and len(of.args[0].users) > 1
    )


def _sources(program: Any, weights: bool = True) -> set[Any]:
    """The inputs, and the weights and buffers of floats."""
    signature, values = program.graph_signature, {**program.state_dict, **program.constants}
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers} if weights else {}
    own = {n for n, name in names.items() if name in program.state_dict and values[name].is_floating_point()}
    return {n for n in program.graph.nodes if n.op == "placeholder" and n.name in {*signature.user_inputs, *own}}


def _that_depend(graph: Any, sources: set[Any]) -> set[Any]:
    """The sources, and the nodes that depend on them; PyTorch computes all others, once."""
    found = {*sources}
    for n in graph.nodes:
        if any(m in found for m in n.all_input_nodes) and not _is_filled(n):
            found.add(n)
    return found


def _is_filled(node: Any) -> bool:
    """Whether it makes a tensor of one number, of a size that is a number, like another in type alone."""
    return node.op == "call_function" and _name(node) in FILLS and all(type(n) is int for n in node.meta["val"].shape)


def _in_training(
    module: torch.nn.Module, inputs: Sequence[torch.Tensor], axes: Sequence[int | None], program: Any
) -> tuple[set[Any], str]:
    """The nodes that have another form in training, such as dropout's; and what else is other there, in words."""
    forms = {n for n in program.graph.nodes if _name(n) in IN_TWO_FORMS}
    try:
        other = _program_of(module, inputs, axes)
    except CalcError:
        return forms, "PyTorch cannot export its form in training"
    here, there = _of_inputs(program), _of_inputs(other)
    told = [[*map(_signature, nodes)] for nodes in (here, there)]
    if told[0] == told[1]:
        forms -= {n for n, m in zip(here, there) if n in forms and not m.args[IN_TWO_FORMS[_name(m)]]}
        dropped = any(_name(n) == "scaled_dot_product_attention" and _dropout(n) for n in there)
        return forms, "dropout of attention's weights" if dropped else ""
    k = next((k for k, (one, other) in enumerate(zip(*told)) if one != other), min(len(here), len(there)))
    first = (there if k < len(there) else here)[k]
    return forms, f"from {first.target} in {_path(first) or type(module).__name__} on"


def _signature(node: Any) -> tuple[str, list[Any]]:
    """An operator's name, and its numbers, if they are the same in training."""
    name = _name(node)
    if name in IN_TWO_FORMS or name == "scaled_dot_product_attention":
        return name, []
    return name, [x for x in node.args if isinstance(x, (bool, int, float))]


def _changed_buffers(program: Any) -> list[str]:
    """Names of buffers that the module's form in evaluation changes."""
    names = program.graph_signature.inputs_to_buffers
    changed = [
        n.args[0]
        for n in _calls(program.graph)
        if _name(n).endswith("_") and n.args and isinstance(n.args[0], torch.fx.Node)
    ]
    return [*dict.fromkeys(names[n.name] for n in changed if n.name in names)]


def _of_inputs(program: Any) -> list[Any]:
    """The operators that depend on inputs, without those of sizes."""
    read = _that_depend(program.graph, _sources(program, False))
    return [
        n
        for n in _calls(program.graph)
        if n in read and n.target not in (*OF_SIZES, *TESTS) and _name(n) not in (SIZE, *CHECKS)
    ]


def _dropout(attention: Any) -> float:
    return attention.args[4] if len(attention.args) > 4 else attention.kwargs.get("dropout_p", 0.0)


class _Reader:
    """Nodes of torch.fx as nodes here."""

    def __init__(self, module: torch.nn.Module, program: Any, forms: set[Any]):
        self._forms = forms
        graph, signature = program.graph, program.graph_signature
        self._numbers: dict[Any, Value] = {}
        self._constants: dict[Any, Any] = {}
        sources = _sources(program)
        read = _that_depend(graph, sources)
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        names = {
            **signature.inputs_to_parameters,
            **signature.inputs_to_buffers,
            **signature.inputs_to_lifted_tensor_constants,
        }
        values = {**program.state_dict, **program.constants}
        self.given = [self._numbered(n) for n in placeholders if n.name in signature.user_inputs]
        self.tensors = [
            *self._tensors(module, [n for n in placeholders if n in sources and n.name in names], names, values)
        ]
        for n in placeholders:
            if n not in sources and n.name in names:
                self._constants[n] = values[names[n.name]].detach().clone()
        self.nodes: list[Node] = []
        with torch.no_grad():
            for n in _calls(graph):
                if n in read:
                    self._call(n)
                elif _is_filled(n):
                    value = FILLS[_name(n)]
                    value = self._folded(n.args[-1]) if value is None else value
                    self._constants[n] = torch.full(n.meta["val"].shape, value, dtype=n.meta["val"].dtype)
                else:
                    self._constants[n] = n.target(
                        *self._folded(n.args), **{k: self._folded(v) for k, v in n.kwargs.items()}
                    )
        (ends,) = (n for n in graph.nodes if n.op == "output")
        kinds = [spec.kind.name for spec in signature.output_specs]
        self.results = [
            self._argument(n) for n, kind in zip(ends.args[0], kinds) if kind == "USER_OUTPUT" and n is not None
        ]

    def _numbered(self, node: Any) -> Value:
        return self._numbers.setdefault(node, Value(len(self._numbers)))

    def _tensors(
        self,
        module: torch.nn.Module,
        nodes: Sequence[Any],
        names: Mapping[str, str],
        values: Mapping[str, torch.Tensor],
    ) -> Iterator[Tensor]:
        trains = {name: p.requires_grad for name, p in module.named_parameters(remove_duplicate=False)}
        first: dict[Any, Any] = {}  # nodes by the places of their numbers: tied weights have several
        tied: dict[Any, list[Any]] = {}
        for n in nodes:
            t = values[names[n.name]]
            of = first.setdefault((t.data_ptr(), *t.shape, *t.stride()) if names[n.name] in trains else n, n)
            tied.setdefault(of, []).append(n)
        for n, all_of in tied.items():
            name, array = names[n.name], values[names[n.name]].detach().cpu()
            across = (
                name in trains and all(_reads_across(m) for m in all_of if m.users) and any(m.users for m in all_of)
            )
            for m in all_of:
                self._numbers[m] = self._numbered(n)
            array = array.float() if array.dtype in (torch.float16, torch.bfloat16) else array
            yield Tensor(
                self._numbered(n), name, array.numpy().copy(), name not in trains, across, trains.get(name, False)
            )

    def _call(self, n: Any) -> None:
        name = _name(n)
        if n.target in TESTS or name in CHECKS or not (n.users or name.endswith("_")):
            return
        of_sizes = n.target in OF_SIZES
        name = OF_SIZES[n.target] if of_sizes else GETITEM if n.target is operator.getitem else name
        options = {k: self._argument(v) for k, v in n.kwargs.items() if k not in UNREAD}
        kind = str(getattr(n.meta.get("val"), "dtype", "")).removeprefix("torch.")
        value, args = self._numbered(n), self._argument(n.args)
        self.nodes.append(Node(value, name, _path(n), kind, args, options, n in self._forms, of_sizes))

    def _folded(self, x: Any) -> Any:
        """An argument of an operator that depends on nothing, for PyTorch."""
        if isinstance(x, (list, tuple)):
            return [self._folded(y) for y in x]
        return self._constants[x] if isinstance(x, torch.fx.Node) else x

    def _argument(self, x: Any) -> Any:
        """An argument as plain data."""
        if isinstance(x, torch.fx.Node):
            return self._argument(self._constants[x]) if x in self._constants else self._numbered(x)
        if isinstance(x, (list, tuple)):
            return [self._argument(y) for y in x]
        if isinstance(x, torch.Tensor):
            return x.detach().cpu().numpy() if x.ndim else x.item()
        return str(x).removeprefix("torch.") if isinstance(x, torch.dtype) else x


def _reads_across(node: Any) -> bool:
    """Whether all that read a weight take it as (inputs, outputs)."""

    def across(user: Any) -> bool:
        k = ACROSS.get(_name(user))
        return k is not None and (
            user.args[k] is node or (isinstance(user.args[k], (list, tuple)) and node in user.args[k])
        )

    return len(node.meta["val"].shape) == 2 and all(map(across, node.users))
