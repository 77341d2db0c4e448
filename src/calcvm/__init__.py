"""calcvm: train and run neural networks in known memory, with no Python in the loop."""

from __future__ import annotations

import builtins as _builtins
from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

from calcvm import hints as _hints
from calcvm import init, nn
from calcvm.compiler import compile, plan
from calcvm.ensemble import Ensemble, snapshot_ensemble
from calcvm.errors import (
    CalcError,
    CalcWarning,
    FileError,
    MissingExtra,
    NoSuchFile,
    PlanError,
    ProgramError,
    ShapeError,
    Trap,
    UnsupportedOperator,
)
from calcvm.fleet import Fleet, Handle, Results
from calcvm.functions import *  # noqa: F403
from calcvm.functions import __all__ as _functions
from calcvm.gathers import *  # noqa: F403
from calcvm.gathers import __all__ as _gathers
from calcvm.gradients import grad_cam, gradient, saliency
from calcvm.graph import LATER as _later
from calcvm.graph import CalcGraph, Path, Variable, apply
from calcvm.images import *  # noqa: F403
from calcvm.images import __all__ as _images
from calcvm.model import (
    CalcHeap,
    Callback,
    EarlyStopping,
    History,
    Model,
    ReduceOnPlateau,
    Stream,
    build_graph,
    load,
    pad_sequences,
)
from calcvm.operators import register_op
from calcvm.optim import *  # noqa: F403
from calcvm.optim import __all__ as _optimizers
from calcvm.planner import Plan
from calcvm.sequences import *  # noqa: F403
from calcvm.sequences import __all__ as _sequences
from calcvm.teams import set_workers
from calcvm.vm.memory.store import FileStore, MemoryStore
from calcvm.vm.program.program import Program, load_program

if _TYPE_CHECKING:
    from calcvm import zoo
    from calcvm.edge.pack import Pack
    from calcvm.exploration import Exploration, RayEngine, Trial, explore
    from calcvm.frontends.keras_model import KerasModel, from_keras
    from calcvm.frontends.onnx_model import OnnxModel, load_onnx
    from calcvm.frontends.pytorch import TorchModule, from_torch
    from calcvm.frontends.sklearn_model import from_sklearn
    from calcvm.graph_text import read_graph
    from calcvm.indexed import cell, einsum, equation, indexes
    from calcvm.quantization import quantize
    from calcvm.split_model import Processor, SplitModel, SplitPlan, plan_devices

__version__ = "0.2.0"

__all__ = [
    "CalcError", "CalcGraph", "CalcHeap", "CalcWarning", "Callback",
    "EarlyStopping", "Ensemble", "Exploration", "FileError", "FileStore", "Fleet", "Handle",
    "History", "KerasModel", "MemoryStore", "MissingExtra", "Model", "NoSuchFile", "OnnxModel", "Pack", "Path", "Plan", "PlanError", "Processor",
    "Program", "ProgramError", "RayEngine", "ReduceOnPlateau", "Results", "ShapeError", "SplitModel", "SplitPlan", "Stream",
    "TorchModule", "Trap", "Trial", "UnsupportedOperator", "Variable", "apply", "build_graph", "cell", "compile", "einsum", "equation", "explore", "from_keras", "from_sklearn", "from_torch", "grad_cam",
    "gradient", "indexes", "init", "load", "load_onnx", "load_program", "nn", "pad_sequences", "plan", "plan_devices", "quantize", "read_graph", "register_op", "saliency",
    "set_workers", "snapshot_ensemble", "zoo", *_functions, *_gathers, *_images, *_optimizers, *_sequences,
]  # fmt: skip
_public = __all__
# `from calcvm import *` must not hide Python's sum, abs, max, min, pow, slice and compile: write cv.sum
__all__ = [_name for _name in __all__ if not hasattr(_builtins, _name)]


def _write_out(path: Path, y: Variable) -> None:
    from calcvm.indexed.again import write_out

    write_out(path, y)


def _evaluate(path: Path, values: dict, seed: int) -> object:
    from calcvm.script.evaluation import evaluate_path

    return evaluate_path(path, values, seed)


def _gradient_of(path: Path, parameter: object) -> object:
    from calcvm.script.equations import gradient_of

    return gradient_of(path, parameter)


def _text(graph: CalcGraph) -> str:
    from calcvm.graph_text import text_of

    return text_of(graph)


_later |= {"gradient_of": _gradient_of, "evaluate": _evaluate, "write_out": _write_out, "text": _text}
_hints.NAMES["Variable"] |= {
    _name: f"cv.{_name}({', '.join(_hints.required(globals()[_name]))})"
    for _name in (*_functions, *_gathers, *_images, *_sequences)
    if not hasattr(Variable, _name)
}
_hints.hint(globals(), [_name for _name in _public if _name in globals()])


def __getattr__(name: str) -> object:
    """Import rarely used names on first access: searches take 4 ms of 90."""
    if name == "zoo":
        return _import_module("calcvm.zoo")
    if name in ("Processor", "SplitModel", "SplitPlan", "plan_devices"):
        return _later_name(name, "calcvm.split_model")
    if name == "Pack":
        return _later_name(name, "calcvm.edge.pack")
    if name in ("KerasModel", "from_keras"):
        return _later_name(name, "calcvm.frontends.keras_model")
    if name == "from_sklearn":
        return _later_name(name, "calcvm.frontends.sklearn_model")
    if name in ("TorchModule", "from_torch"):
        return _later_name(name, "calcvm.frontends.pytorch")
    if name in ("OnnxModel", "load_onnx"):
        return _later_name(name, "calcvm.frontends.onnx_model")
    if name == "quantize":
        return _later_name(name, "calcvm.quantization")
    if name == "read_graph":
        return _later_name(name, "calcvm.graph_text")
    if name in ("cell", "einsum", "equation", "indexes"):
        return _later_name(name, "calcvm.indexed")
    if name not in ("Exploration", "RayEngine", "Trial", "explore"):
        known = {**{layer: f"nn.{layer}" for layer in nn.__all__}, **{public: f"cv.{public}" for public in _public}}
        raise _hints.unknown_name(__name__, name, known)
    return _later_name(name, "calcvm.exploration")


def _later_name(name: str, module: str) -> object:
    globals().setdefault(name, getattr(_import_module(module), name))
    _hints.hint(globals(), [name])
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
