"""What every CUDA kernel stands on: the kernel decorator, shares of the work, traps.

A kernel is written with its row's words as named parameters, after the worker's number and the team's size,
as on the CPU; names and order are the operator table's, and a test compares them:

    @kernel
    def sigmoid_fwd(w, nw, rows, cols, x: Ptr, y: Ptr): ...

A worker is a *thread block*: all of its threads run the kernel together, and the VM makes them wait for each
other after each row.  What the compiler and the simulator see is ``kernel(heap, row, worker, n_workers)``.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from calcvm.kernels_cuda._cuda import at, called, device, f64_of_bits, in_global, like, overload, thread
from calcvm.lazy import cached_property

PREFIX = 2  # words before a row's own: opcode, flags
FLAG_PC_SHIFT = 8  # flags above this bit: the row's own index, for traps
TRAP_CODE, TRAP_PC = 0, 1  # heap elements that a trap writes (the heap's first block is reserved)


class Ptr:
    """Annotation: the word is an element offset; the kernel sees a pointer to it."""


class Optional:
    """Annotation: as `Ptr`, of an operand that may be left out; ``has_NAME`` says whether it is there."""


class Float:
    """Annotation: the word holds the bits of a float64."""


# ---------------------------------------------------------------- shares
@device
def share(n, w, nw):
    """Half-open range of ``n`` units that worker ``w`` of ``nw`` owns."""
    if nw == 1:
        return 0, n
    return n * w // nw, n * (w + 1) // nw


@device
def trap(h, r, code):
    """Record that row ``r`` met what it cannot compute; the VM turns it into an error after the call."""
    h[TRAP_CODE] = like(h, code)
    h[TRAP_PC] = like(h, r[1] >> FLAG_PC_SHIFT)


@device
def first(w):
    """Whether this is the one thread that writes a scalar: thread 0 of worker 0."""
    return w == 0 and thread() == 0


# ---------------------------------------------------------------- registry
class Kernel:
    """One row kernel: ``words`` are its parameters, named and typed, in the order of the row's words.

    finish : the row's second half, run after all workers have done the first (they have met at a barrier).
    """

    def __init__(self, fn: Callable):
        self.name, self.fn = fn.__name__, fn
        parameters = list(inspect.signature(fn, eval_str=False).parameters.values())[2:]
        self.words = tuple((p.name, _kind(p.annotation)) for p in parameters)
        self.finish: Kernel | None = None

    @cached_property
    def bound(self) -> Callable:
        """The kernel as a function of (h, r, w, nw), for the simulator and for the compiler.

        Compiled, it stays a function of its own: its registers do not add to those of the loop that calls it.
        """
        simulated, native = _bind(self), _bind(self, "called()\nh = in_global(h)\n")
        overload(simulated, strict=False)(lambda h, r, w, nw: native)
        return simulated

    @cached_property
    def mark(self) -> str:
        """A digest of its source: what compiled code is kept by, for kernels from elsewhere too."""
        own = hashlib.sha256(_text(self.fn).encode()).hexdigest()[:12]
        return own + (self.finish.mark if self.finish else "")


KERNELS: dict[str, Kernel] = {}


def kernel(fn: Callable) -> Callable:
    """Register a row kernel."""
    KERNELS[fn.__name__] = Kernel(fn)
    return fn


def finish(fn: Callable) -> Callable:
    """Register the second half of the row kernel of the same name and parameters, which is registered already."""
    KERNELS[fn.__name__].finish = Kernel(fn)
    return fn


def kernel_from(text: str, scope: dict[str, Any]) -> None:
    """Register the kernel that ``text`` spells, in the module globals ``scope``: for kernels alike but for a formula."""
    exec(compile(text, scope["__file__"], "exec"), scope)
    definition = ast.parse(text).body[0]
    assert isinstance(definition, ast.FunctionDef)
    fn = scope[definition.name]
    fn.text = text
    kernel(fn)


def _kind(annotation: Any) -> str:
    name = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    return {"Ptr": "ptr", "Optional": "optional", "Float": "float"}.get(name, "int")


_UNPACK = {
    "int": "{n} = int(r[{k}])",
    "float": "{n} = f64_of_bits(r[{k}])",
    "ptr": "{n} = at(h, r[{k}])",
    "optional": "{n}, has_{n} = at(h, r[{k}]), r[{k}] >= 0",
}


def _text(fn: Callable) -> str:
    return getattr(fn, "text", None) or textwrap.dedent(inspect.getsource(fn))


def _bind(k: Kernel, before: str = "") -> Callable:
    """The kernel as a function of (h, r, w, nw): its parameters become reads of the row's words."""
    tree = ast.parse(_text(k.fn))
    node = tree.body[0]
    assert isinstance(node, ast.FunctionDef)
    lines = [_UNPACK[kind].format(n=name, k=i + PREFIX) for i, (name, kind) in enumerate(k.words)]
    node.decorator_list = []
    node.args = ast.parse("def f(h, r, w, nw): pass").body[0].args  # type: ignore[attr-defined]
    node.body = [*ast.parse(before + "\n".join(lines)).body, *node.body]
    ast.fix_missing_locations(tree)
    ast.increment_lineno(tree, k.fn.__code__.co_firstlineno - 1)
    scope: dict[str, Any] = {}
    names = k.fn.__globals__
    names.update(at=at, f64_of_bits=f64_of_bits, called=called, in_global=in_global)
    exec(compile(tree, k.fn.__code__.co_filename, "exec"), names, scope)
    return scope[k.fn.__name__]
