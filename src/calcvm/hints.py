"""Hints for unknown names: the calcvm name of what other libraries call differently, and corrections of typing errors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial, wraps
from types import FunctionType
from typing import Any, TypeVar

from calcvm.errors import CalcError

Function = TypeVar("Function", bound=Callable[..., Any])
Kind = TypeVar("Kind", bound=type)


class UnknownArgument(CalcError, TypeError):
    """A function has no parameter of this name; the message suggests one."""


class UnknownName(CalcError, AttributeError):
    """A module or an object has no such name; the message suggests one."""


class ReadOnly(CalcError, AttributeError):
    """A read-only attribute cannot be set."""


# Names of arguments in other libraries: our names, of which the function has one, or (with a blank) the end of a sentence.
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "activation": ("it is a separate layer: nn.Linear(8) >> nn.ReLU()",),
    "alpha": ("learning_rate",),
    "batch": ("batch_size",),
    "batch_size": ("it is the model's: cv.Model(..., batch_size=32)",),
    "beta_1": ("beta1",),
    "beta_2": ("beta2",),
    "betas": ("they are two: beta1= and beta2=",),
    "bias_initializer": ("bias_init",),
    "callback": ("callbacks",),
    "ceil_mode": ("padding",),
    "clipnorm": ("clip_norm",),
    "max_norm": ("clip_norm",),
    "clipvalue": ("clip_value",),
    "criterion": ("loss",),
    "loss_fn": ("loss",),
    "ddof": ("correction",),
    "decay": ("weight_decay", "schedule"),
    "exclude_from_weight_decay": ("no_decay",),
    "device": ("it is the model's: cv.Model(..., device=...)",),
    "dim": ("axis",),
    "dims": ("axes", "axis"),
    "axis": ("axes", "normalized_axes"),
    "axes": ("axis", "normalized_axes"),
    "arrays": ("variables",),
    "tensors": ("variables",),
    "indices_or_sections": ("sections",),
    "ignore_class": ("ignore_index",),
    "keepdim": ("keepdims",),
    "dilation_rate": ("dilation",),
    "early_stopping": ("patience",),
    "epsilon": ("eps",),
    "factors": ("rates",),
    "filters": ("channels",),
    "out_channels": ("channels",),
    "in_channels": ("channels are those of the input: leave it out",),
    "in_features": ("the sizes of the input are known: leave it out, nn.Linear(units)",),
    "input_dim": ("input_shape", "the sizes of the input are known: leave it out, nn.Linear(units)"),
    "input_size": ("input_shape", "the sizes of the input are known: leave it out, nn.Linear(units)"),
    "num_features": ("the sizes of the input are known: leave it out",),
    "normalized_shape": ("the sizes of the input are known: leave it out",),
    "input_shape": ("it is the model's: cv.Model(..., input_shape=(4,))",),
    "out_features": ("units",),
    "output_dim": ("units",),
    "gamma": ("factor", "rate"),
    "initial_learning_rate": ("learning_rate",),
    "inputs": ("X", "x"),
    "data": ("X",),
    "x": ("X",),
    "labels": ("y",),
    "target": ("y",),
    "targets": ("y",),
    "kernel_initializer": ("init",),
    "weight_init": ("init",),
    "kernel_regularizer": ("regularizer",),
    "kernel_size": ("kernel",),
    "pool_size": ("kernel",),
    "lr": ("learning_rate", 'it is the optimizer\'s: cv.Adam(1e-3), later model.hyper["learning_rate"]'),
    "learning_rate": ('it is the optimizer\'s: cv.Adam(1e-3), later model.hyper["learning_rate"]',),
    "max_epochs": ("epochs",),
    "max_iter": ("epochs",),
    "n_epochs": ("epochs",),
    "nb_epoch": ("epochs",),
    "nb_epochs": ("epochs",),
    "num_epochs": ("epochs",),
    "n_epoch": ("epochs",),
    "mode": ("largest",),
    "monitor": ("figure",),
    "min_lr": ("min_rate",),
    "n_jobs": ("workers",),
    "num_threads": ("workers",),
    "no_weight_decay": ("no_decay",),
    "num_workers": ("workers",),
    "n_workers": ("workers",),
    "threads": ("workers",),
    "negative_slope": ("alpha",),
    "optim": ("optimizer",),
    "optimiser": ("optimizer",),
    "p": ("rate",),
    "prob": ("rate",),
    "random_state": ("seed",),
    "restore_best_weights": ("keep_best",),
    "save_best_only": ("keep_best",),
    "rho": ("alpha",),
    "rounds": ("epochs",),
    "strides": ("stride",),
    "use_bias": ("bias",),
    "validation_data": ("validation",),
    "val_data": ("validation",),
    "eval_set": ("validation",),
    "validation_split": ("validation=0.2 holds a share of the samples out",),
    "validation_fraction": ("validation=0.2 holds a share of the samples out",),
    "val_split": ("validation=0.2 holds a share of the samples out",),
    "verbose": ("progress", "it prints nothing: leave it out"),
    "weights": ("sample_weight",),
    "weighted_metrics": ("metrics",),
}  # fmt: skip

# Names in modules and objects of other libraries, and what to write instead.
NAMES: dict[str, dict[str, str]] = {
    "calcvm.nn": {
        "Dense": "nn.Linear", "Conv1D": "nn.Conv1d", "Conv2D": "nn.Conv2d", "Conv3D": "nn.Conv3d",
        "Conv1DTranspose": "nn.ConvTranspose1d", "Conv2DTranspose": "nn.ConvTranspose2d", "Conv3DTranspose": "nn.ConvTranspose3d",
        "MaxPooling1D": "nn.MaxPool1d", "MaxPooling2D": "nn.MaxPool2d", "MaxPooling3D": "nn.MaxPool3d",
        "AveragePooling1D": "nn.AvgPool1d", "AveragePooling2D": "nn.AvgPool2d", "AveragePooling3D": "nn.AvgPool3d",
        "GlobalAveragePooling1D": "nn.GlobalAvgPool", "GlobalAveragePooling2D": "nn.GlobalAvgPool",
        "GlobalMaxPooling1D": "nn.GlobalMaxPool", "GlobalMaxPooling2D": "nn.GlobalMaxPool",
        "AdaptiveAvgPool1d": "nn.AdaptiveAvgPool", "AdaptiveAvgPool2d": "nn.AdaptiveAvgPool", "AdaptiveMaxPool2d": "nn.AdaptiveMaxPool",
        "BatchNormalization": "nn.BatchNorm", "BatchNorm1d": "nn.BatchNorm", "BatchNorm2d": "nn.BatchNorm", "BatchNorm3d": "nn.BatchNorm",
        "InstanceNorm1d": "nn.InstanceNorm", "InstanceNorm2d": "nn.InstanceNorm", "InstanceNorm3d": "nn.InstanceNorm",
        "LayerNormalization": "nn.LayerNorm", "GroupNormalization": "nn.GroupNorm",
        "Hardswish": "nn.HardSwish", "Hardsigmoid": "nn.HardSigmoid", "Swish": "nn.SiLU", "Lambda": "nn.Function",
        "Concatenate": "nn.Concat", "UpSampling2D": "nn.Upsample", "ZeroPadding2D": "nn.Pad", "ZeroPad2d": "nn.Pad",
        "Module": "nn.Layer", "Input": "cv.Model(..., input_shape=(4,))", "InputLayer": "cv.Model(..., input_shape=(4,))",
        "CrossEntropyLoss": 'cv.Model(..., loss="softmax_cross_entropy")', "MSELoss": 'cv.Model(..., loss="mse")',
        "BCEWithLogitsLoss": 'cv.Model(..., loss="binary_cross_entropy")', "L1Loss": 'cv.Model(..., loss="mae")',
        "HuberLoss": 'cv.Model(..., loss="huber")', "SmoothL1Loss": 'cv.Model(..., loss="huber")',
    },
    "calcvm": {
        "layers": "cv.nn", "optimizers": "cv.Adam and others", "losses": 'cv.Model(..., loss="mse")', "callbacks": "cv.Callback",
        "models": "cv.Model", "RMSprop": "cv.RMSProp", "ReduceLROnPlateau": "cv.ReduceOnPlateau", "CosineAnnealingLR": "cv.Cosine",
        "CosineAnnealingWarmRestarts": "cv.CosineRestarts", "StepLR": "cv.Step", "ExponentialLR": "cv.Exponential",
        "load_model": "cv.load", "Tensor": "cv.Variable", "tensor": "NumPy's arrays, as they are", "array": "NumPy's arrays, as they are",
        "cross_entropy": "cv.softmax_cross_entropy", "cat": "cv.concat", "concatenate": "cv.concat", "gather": "cv.pick",
        "take_along_axis": "cv.pick", "unsqueeze": "cv.expand_dims", "chunk": "cv.split", "array_split": "cv.split",
        "arccos": "cv.acos", "arcsin": "cv.asin", "arctan": "cv.atan",
    },
    "Model": {
        "compile": "cv.Model(net, input_shape=..., loss=..., optimizer=...)", "train": "fit",
        "train_on_batch": "step", "predict_on_batch": "predict", "test_on_batch": "evaluate", "score": "evaluate",
        "state_dict": "get_weights", "load_state_dict": "set_weights", "load_weights": "cv.load, or set_weights", "save_weights": "save",
        "zero_grad": "step", "eval": "predict, which is without dropout", "count_params": "summary",
        "to": 'cv.Model(..., device="cuda")', "cuda": 'cv.Model(..., device="cuda")', "history": "what fit returns",
        "optimizer": "hyper, of its numbers", "lr": 'hyper["learning_rate"]', "learning_rate": 'hyper["learning_rate"]',
        "weights": "parameters", "trainable_weights": "parameters", "named_parameters": "parameters", "layers": "summary",
        "fit_generator": "fit", "partial_fit": "fit", "load": "cv.load", "resident": "parameters, step and others of the model itself",
    },
    "Variable": {
        "absolute": "cv.abs(x)", "arccos": "cv.acos(x)", "arcsin": "cv.asin(x)", "arctan": "cv.atan(x)",
        "clamp": "cv.clip(x, lo, hi)", "detach": "cv.stop_gradient(x)", "dim": "rank", "dot": "cv.matmul(x, y)",
        "double": 'cv.cast(x, "float64")', "dtype": "type", "float": "cv.cast(x, None)", "long": 'cv.cast(x, "int64")',
        "mm": "cv.matmul(x, y)", "ndim": "rank", "permute": "transpose", "rsqrt": "cv.pow(x, -0.5)", "size": "shape",
        "unsqueeze": "cv.expand_dims(x, axis)", "view": "reshape", "item": "model[name], which is its value", "numpy": "model[name], which is its value",
    },
    "CalcHeap": {"load": "heap.create(program)", "resident": "heap.latest", "copy": "model.copy(name)", "commit": "model.commit()",
                 "remove": "model.close()"},
    "Handle": {"bytes": "nbytes", "epochs": "epochs_done"},
    "Plan": {"again": "recomputed"},
    "Trial": {"rounds": "epochs"},
    "History": {"history": 'history["loss"]', "epoch": "epochs", "params": "epochs", "keys": "names"},
}  # fmt: skip

# Names that calcvm has no counterpart for, and what to do instead.
NONE_YET = {
    **dict.fromkeys((
        "Attention", "Bidirectional", "ConvLSTM2D", "Embedding", "GRU", "GRUCell", "LSTM", "LSTMCell", "MultiHeadAttention",
        "MultiheadAttention", "RNN", "RNNCell", "SimpleRNN", "TimeDistributed", "Transformer", "TransformerDecoder",
        "TransformerEncoder", "TransformerEncoderLayer", "argmax", "argmin", "argsort", "attention", "cumprod",
        "embedding", "fft", "norm", "one_hot", "prod", "repeat", "scaled_dot_product_attention", "scatter", "sort", "tile",
        "topk", "unique",
    ), ""),
    **dict.fromkeys((
        "log10", "log2",
    ), ": declare it by its formulas (calcvm.operators.elementwise)"),
}  # fmt: skip


METHODS = ("CalcGraph", "Ensemble", "Fleet", "Model", "Path", "Variable")  # methods called with arguments by name


def close_to(name: str, known: Iterable[str]) -> str:
    """The nearest known name, or ""."""
    from difflib import get_close_matches

    by_lower = {k.lower(): k for k in known}
    return next((by_lower[k] for k in get_close_matches(name.lower(), by_lower, 1, 0.75)), "")


def unknown_name(owner: str, name: str, known: Mapping[str, str]) -> AttributeError:
    """The error for a name that ``owner`` lacks; ``known`` maps the names that it has to how they are written."""
    said = f"module {owner!r}" if owner.startswith("calcvm") else f"a {owner}"
    if name in NONE_YET:
        return UnknownName(f"{said} has no {name!r}: calcvm has none yet{NONE_YET[name]}")
    meant = ""
    if not name.startswith("_"):
        others = {**NAMES["calcvm.nn"], **NAMES["calcvm"]} if owner == "calcvm" else NAMES.get(owner, {})
        meant = others.get(name) or known.get(name) or known.get(close_to(name, known), "")
    return UnknownName(f"{said} has no {name!r}{meant and f': did you mean {meant}?'}")


class Closed:
    """An object with a fixed set of attributes: setting another one, which would have no effect, is refused.

    Users' subclasses accept any attribute.
    """

    __slots__ = ()

    def __dir__(self) -> list[str]:
        kind = type(self)
        return [n for n in super().__dir__() if not isinstance(inspect.getattr_static(kind, n, None), Elsewhere)]

    def __setattr__(self, name: str, value: Any) -> None:
        kind = type(self)
        if (
            not name.startswith("_")
            and kind.__module__.startswith("calcvm.")
            and name not in (known := _attributes(kind))  # type: ignore[arg-type]
        ):
            raise unknown_name(kind.__name__, name, {k: k for k in known if not k.startswith("_")})
        told = getattr(kind, name, None)
        if isinstance(told, property) and told.fset is None:
            raise ReadOnly(f"{name!r} of a {kind.__name__} is fixed, and cannot be set: make another {kind.__name__}")
        super().__setattr__(name, value)


class Answering(Closed):
    """Closed; the error for a missing name suggests one."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        kind = next(c for c in type(self).__mro__ if c.__module__.startswith("calcvm."))
        known = _attributes(type(self))  # type: ignore[arg-type]
        if name.startswith("_") or name in known:  # a property that raises, or an attribute not set yet
            return object.__getattribute__(self, name)
        raise unknown_name(kind.__name__, name, {k: k for k in known if not k.startswith("_")})


class Elsewhere:
    """An attribute that other libraries have, on a class that gives hints for such names only.

    With ``__getattr__``, Python 3.10 and 3.11 take 80 ns longer to look up any method of a class: half of a small network's `predict`.
    """

    def __init__(self, owner: str, name: str):
        self.owner, self.name = owner, name
        self.__doc__ = f"Not here: {NAMES[owner][name]}."  # in help

    def __get__(self, of: Any, kind: type | None = None) -> Any:
        raise unknown_name(self.owner, self.name, {})


def names_of_others(kind: Kind) -> Kind:
    """The class, with hints for names from other libraries (`NAMES`)."""
    for name in NAMES[kind.__name__]:
        setattr(kind, name, Elsewhere(kind.__name__, name))
    return kind


@cache
def _attributes(kind: Any) -> frozenset[str]:
    return frozenset(
        {
            *filter(partial(hasattr, kind), dir(kind)),
            *(name for c in kind.__mro__ for name in vars(c).get("__annotations__", ())),
        }
    )


def _unknown_argument(function: Callable[..., Any], what: str, given: Iterable[str]) -> UnknownArgument | None:
    """The error for the first argument that a function, called ``what``, lacks, if there is one."""
    parameters: Mapping[str, inspect.Parameter] = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return None
    names = [name for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = names[names[:1] == ["self"] :]
    for name in given:
        if name not in names:
            meant = next((m for m in ARGUMENTS.get(name, ()) if m in names or " " in m), "") or close_to(name, names)
            hint = (
                meant
                if " " in meant
                else f"did you mean {meant}=?"
                if meant
                else f"it takes {', '.join(names) or 'none'}"
            )
            return UnknownArgument(f"{what} has no argument {name!r}: {hint}")
    return None


def required(function: FunctionType) -> tuple[str, ...]:
    """The names of a function's parameters without a default."""
    code = function.__code__
    return code.co_varnames[: code.co_argcount - len(function.__defaults__ or ())]


def hinted(function: Function) -> Function:
    """The function, with a suggestion in the error for an unknown argument."""
    if hasattr(function, "is_hinted"):
        return function

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except TypeError as error:
            what = type(args[0]).__name__ if args and function.__name__ == "__init__" else function.__qualname__
            if isinstance(error, CalcError) or (unknown := _unknown_argument(function, what, options)) is None:
                raise
            raise unknown from None

    call.is_hinted = True  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


def takes(*functions: Callable[..., Any], without: Sequence[str]) -> Callable[[Function], Function]:
    """A function whose ``**options`` are the parameters of other functions, except some: its signature names them all."""

    def named(function: Function) -> Function:
        signature = inspect.signature(function)
        own = {name: p for name, p in signature.parameters.items() if p.kind is not p.VAR_KEYWORD}
        others = {
            name: p for of in functions for name, p in inspect.signature(of).parameters.items() if name not in without
        }
        more = {
            name: p.replace(kind=p.KEYWORD_ONLY, default=None if p.default is p.empty else p.default)
            for name, p in others.items()
            if name not in own
        }
        known = {*own, *more}

        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            if wrong := [name for name in options if name not in known]:
                raise TypeError(f"{function.__qualname__}() got an unexpected keyword argument {wrong[0]!r}")
            return function(*args, **options)

        call.__signature__ = signature.replace(parameters=[*own.values(), *more.values()])  # type: ignore[attr-defined]
        return call  # type: ignore[return-value]

    return named


def hint(namespace: dict[str, Any], names: Iterable[str]) -> None:
    """Add such hints to the functions and classes of a module, and to the methods of some classes (`METHODS`)."""
    for name in names:
        value = namespace[name]
        if isinstance(value, FunctionType):
            made = namespace[name] = hinted(value)
            made.__module__, made.__qualname__ = namespace["__name__"], name  # so that pickle finds it
        elif isinstance(value, type) and value.__module__.startswith("calcvm") and not issubclass(value, BaseException):
            for cls in [value, *(value.__mro__ if name in METHODS else ())]:
                public = [n for n in vars(cls) if not n.startswith("_")] if name in METHODS else []
                for method in ["__init__", *public] if cls.__module__.startswith("calcvm") else ():
                    of = vars(cls).get(method, cls.__init__)  # type: ignore[misc]
                    if isinstance(of, FunctionType) and not hasattr(of, "made"):  # compiled ones: `methods.native`
                        setattr(cls, method, hinted(of))
