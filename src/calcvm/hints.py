"""Hints for unknown names: the calcvm name of what other libraries call differently, and corrections of typing errors."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial, wraps
from types import FunctionType
from typing import Any, TypeVar

from calcvm.errors import CalcError

Function = TypeVar("Function", bound=Callable[..., Any])
Kind = TypeVar("Kind", bound=type)
_PLACED = inspect.Parameter.POSITIONAL_OR_KEYWORD


class UnknownArgument(CalcError, TypeError):
    """A function does not take these arguments; the message suggests others."""


class UnknownName(CalcError, AttributeError):
    """A module or an object has no such name; the message suggests one."""


class ReadOnly(CalcError, AttributeError):
    """A read-only attribute cannot be set."""


# Names of arguments in other libraries: our names, of which the function has one, or (with a blank) the end of a sentence, after the
# pattern of the callables that it fits.
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "activation": (r"\bLinear? it is a separate layer: nn.Linear(8) >> nn.ReLU()", "Conv? it is a separate layer: nn.Conv2d(8, 3) >> nn.ReLU()"),
    "alpha": ("learning_rate",),
    "batch": ("batch_size",),
    "batch_size": ("it is the model's: cv.Model(..., batch_size=32)",),
    "amsgrad": ("[.]optim[.]? calcvm has no AMSGrad: leave it out",),
    "beta_1": ("beta1",),
    "beta_2": ("beta2",),
    "betas": ("optim[.](Ada|Lion)? they are two: beta1= and beta2=",),
    "bias_initializer": ("bias_init",),
    "callback": ("callbacks",),
    "ceil_mode": ("padding",),
    "center": ("affine",),
    "elementwise_affine": ("affine",),
    "clipnorm": ("clip_norm",),
    "max_norm": ("clip_norm",),
    "clipvalue": ("clip_value",),
    "global_clipnorm": ("clip_norm",),
    "criterion": ("loss",),
    "loss_fn": ("loss",),
    "ddof": ("correction",),
    "decay": ("weight_decay", "schedule"),
    "exclude_from_weight_decay": ("no_decay",),
    "data_format": ("[.]nn[.]|images? it is the model's: cv.Model(..., channels_last=True)",),
    "decay_rate": ("gamma",),
    "decay_steps": ("total_steps", "step_size"),
    "device": ("it is the model's: cv.Model(..., device=...)",),
    "dtype": ("it is the model's: cv.Model(..., dtype=...)",),
    "end_dim": ("[Ff]latten? each sample is flattened whole: leave it out",),
    "start_dim": ("[Ff]latten? each sample is flattened whole: leave it out",),
    "eta_min": ("min_lr",),
    "dim": ("axis",),
    "dims": ("axes", "axis"),
    "axis": ("axes", "normalized_axes"),
    "axes": ("axis", "normalized_axes"),
    "arrays": ("variables",),
    "tensors": ("variables",),
    "indices_or_sections": ("sections",),
    "ignore_class": ("ignore_index",),
    "keepdim": ("keepdims",),
    "key": ("by",),
    "dilation_rate": ("dilation",),
    "early_stopping": ("patience",),
    "epsilon": ("eps",),
    "factors": ("rates",),
    "filters": ("channels",),
    "out_channels": ("channels",),
    "in_channels": ("Conv? channels are those of the input: leave it out",),
    "batch_first": ("the batch always comes first: leave it out",),
    "in_features": (r"\bLinear? the sizes of the input are known: leave it out, nn.Linear(units)",),
    "input_dim": ("num_embeddings", "input_shape", r"\bLinear? the sizes of the input are known: leave it out, nn.Linear(units)"),
    "input_size": (
        "input_shape", r"\bLinear? the sizes of the input are known: leave it out, nn.Linear(units)",
        r"\b(RNN|GRU|LSTM)? the sizes of the input are known: leave it out",
    ),
    "units": ("hidden_size",),
    "num_features": ("[.]nn[.].*Norm? the sizes of the input are known: leave it out",),
    "normalized_shape": ("[.]nn[.].*Norm? the sizes of the input are known: leave it out",),
    "input_shape": ("it is the model's: cv.Model(..., input_shape=(4,))",),
    "out_features": ("units",),
    "output_dim": ("units", "embedding_dim"),
    "depth": ("num_classes",),
    "embeddings_initializer": ("init",),
    "index": ("indexes",),
    "indices": ("indexes",),
    "mask": ("where",),
    "mask_zero": ("padding_idx",),
    "src": ("updates",),
    "vocab_size": ("num_embeddings",),
    "gamma": ("factor",),
    "initial_learning_rate": ("learning_rate",),
    "inplace": ("[.]nn[.]? the planner decides it: leave it out",),
    "inputs": ("X", "x", "net"),
    "layers": ("net",),
    "outputs": ("net", "out"),
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
    "learning_rate_init": ("learning_rate",),
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
    "name": ("[.]nn[.]? layers are named by their kind and order, such as linear_1: leave it out", '[.](functions|gathers|images)[.]? y.rename("name") names a result'),
    "norm_type": ("p",),
    "num_channels": ("[.]nn[.].*Norm? the sizes of the input are known: leave it out",),
    "num_groups": ("groups",),
    "num_parameters": ("per_channel",),
    "n_jobs": ("workers",),
    "num_threads": ("workers",),
    "no_weight_decay": ("no_decay",),
    "num_workers": ("workers",),
    "n_workers": ("workers",),
    "threads": ("workers",),
    "negative_slope": ("alpha",),
    "optim": ("optimizer",),
    "optimiser": ("optimizer",),
    "output_size": ("size",),
    "p": ("rate",),
    "params": ("[.]optim[.]? the parameters are the model's: cv.Model(net, ..., optimizer=cv.Adam(1e-3))",),
    "prob": ("rate",),
    "random_state": ("seed",),
    "restore_best_weights": ("keep_best",),
    "save_best_only": ("keep_best",),
    "return_indices": ("[Pp]ool? calcvm returns none: leave it out",),
    "rho": ("alpha",),
    "scale": ("affine",),
    "scale_factor": ("scale",),
    "seed": ("it is the model's: cv.Model(..., seed=0)",),
    "sample_weight": ("evaluate? evaluation has no weights: leave it out",),
    "steps": ("steps_per_epoch", "n", "evaluate|predict? all samples are taken: leave it out"),
    "T_0": ("period",),
    "T_max": ("total_steps",),
    "T_mult": ("factor",),
    "target_shape": ("[.]nn[.].*Reshape? the sizes come one by one: nn.Reshape(8, 8)",),
    "threshold": ("min_delta",),
    "track_running_stats": ("BatchNorm? they are kept: leave it out",),
    "rounds": ("epochs",),
    "strides": ("stride",),
    "use_bias": ("bias",),
    "validation_data": ("validation",),
    "val_data": ("validation",),
    "eval_set": ("validation",),
    "validation_split": ("Model.fit|explore? validation=0.2 holds a share of the samples out",),
    "validation_fraction": ("Model.fit|explore? validation=0.2 holds a share of the samples out",),
    "val_split": ("Model.fit|explore? validation=0.2 holds a share of the samples out",),
    "verbose": ("progress", "it prints nothing: leave it out"),
    "weights": ("sample_weight",),
    "weighted_metrics": ("metrics",),
}  # fmt: skip

# What to write instead of arguments in the order of other libraries, by the callable's name without a number of axes.
_CONV = "the input's channels are known, PyTorch's nn.{0}(3, 16, 3) is nn.{0}(16, 3); a stride comes by name, stride=2"
_NORM = "the input's sizes are known, write nn.{0}()"
_RECURRENT = "the input's size is known, PyTorch's nn.{0}(16, 64) is nn.{0}(64); layers are given by name, num_layers=2"
_AXIS = "give axis=, such as axis=1: NumPy's default is the batch, or all axes"
CALLS = {
    "Activation": "take the layer of its name, such as nn.ReLU()", "Conv": _CONV, "ConvTranspose": _CONV,
    "Hyper.__call__": 'model.hyper["learning_rate"] is of path learn, model.hyper(path)["learning_rate"] of another',
    "Linear": "the input's size is known, PyTorch's nn.Linear(4, 8) is nn.Linear(8); an activation is a layer, nn.Linear(8) >> nn.ReLU()",
    "Model.fit": "epochs are given by name, fit(X, y, epochs=10), and the batch size to the model, cv.Model(..., batch_size=32)",
    "MultiHeadAttention": "the input's size is known, PyTorch's nn.MultiheadAttention(64, 4) is nn.MultiHeadAttention(4)",
    **{f"Transformer{kind}coderLayer": f"the input's size is known, PyTorch's (64, 4) is nn.Transformer{kind}coderLayer(4)" for kind in ("En", "De")},
    "RNN": _RECURRENT, "GRU": _RECURRENT, "LSTM": _RECURRENT,
    "split": _AXIS, "cumsum": _AXIS, "logcumsumexp": _AXIS,
    "BatchNorm": _NORM, "GroupNorm": "the input's sizes are known, write nn.GroupNorm(4)", "InstanceNorm": _NORM, "LayerNorm": _NORM, "RMSNorm": _NORM,
}  # fmt: skip

# Names of losses and metrics in other libraries, without case, blanks and "loss": ours.
FIGURES = {
    **dict.fromkeys(
        "categoricalcrossentropy crossentropy log nll sparsecategoricalcrossentropy".split(), "softmax_cross_entropy"
    ),
    **dict.fromkeys("bce bcewithlogits binarycrossentropy".split(), "binary_cross_entropy"),
    **dict.fromkeys("l2 meansquarederror mse squarederror".split(), "mse"),
    **dict.fromkeys("absoluteerror l1 mae meanabsoluteerror".split(), "mae"),
    **dict.fromkeys("huber smoothl1".split(), "huber"),
    **dict.fromkeys("acc binaryaccuracy categoricalaccuracy sparsecategoricalaccuracy".split(), "accuracy"),
    "rootmeansquarederror": "rmse",
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
        "Add": "nn.Residual", "CenterCrop": "nn.RandomCrop", "Dropout1d": "nn.Dropout2d", "Dropout3d": "nn.Dropout2d",
        "SpatialDropout2D": "nn.Dropout2d", "Identity": "nn.Sequential()", "LazyLinear": "nn.Linear", "ModuleList": "a list of layers",
        "Normalization": "nn.Standardize", "Parameter": 'self.parameter(x, "weight", shape) in the build of an nn.Layer',
        "RandomFlip": "nn.RandomHorizontalFlip", "RandomTranslation": "nn.RandomShift", "Rescaling": "nn.Scale",
        "MultiheadAttention": "nn.MultiHeadAttention", "Attention": "nn.MultiHeadAttention",
        "TransformerEncoder": "a list of nn.TransformerEncoderLayer", "TransformerDecoder": "nn.TransformerDecoderLayer, in a custom layer",
        "SimpleRNN": "nn.RNN", "Bidirectional": "nn.LSTM(8, bidirectional=True)", "RMSNormalization": "nn.RMSNorm", "Unflatten": "nn.Reshape", "functional": "cv.relu and other functions of cv",
        **{name: f'cv.Model(..., loss="{FIGURES[name[:-4].lower()]}")' for name in (
            "BCELoss", "BCEWithLogitsLoss", "CrossEntropyLoss", "HuberLoss", "L1Loss", "MSELoss", "NLLLoss", "SmoothL1Loss",
        )},
    },
    "calcvm": {
        "layers": "cv.nn", "optimizers": "cv.Adam and others", "losses": 'cv.Model(..., loss="mse")', "callbacks": "cv.Callback",
        "models": "cv.Model", "RMSprop": "cv.RMSProp", "ReduceLROnPlateau": "cv.ReduceOnPlateau", "CosineAnnealingLR": "cv.Cosine",
        "CosineAnnealingWarmRestarts": "cv.CosineRestarts", "StepLR": "cv.Step", "ExponentialLR": "cv.Exponential",
        "load_model": "cv.load", "Tensor": "cv.Variable", "tensor": "NumPy's arrays, as they are", "array": "NumPy's arrays, as they are",
        "cross_entropy": "cv.softmax_cross_entropy", "cat": "cv.concat", "concatenate": "cv.concat", "gather": "cv.take_along_axis",
        "index_select": "cv.take", "index_add": "cv.scatter_add", "scatter": "cv.scatter_add", "topk": "cv.top_k", "scaled_dot_product_attention": "cv.attention, with heads on the last axis", "unsqueeze": "cv.expand_dims", "chunk": "cv.split", "array_split": "cv.split",
        "arccos": "cv.acos", "arcsin": "cv.asin", "arctan": "cv.atan",
        "DataLoader": "model.fit(X, y), or an iterable of batches", "MLPClassifier": "calcvm.sklearn.MLPClassifier",
        "MLPRegressor": "calcvm.sklearn.MLPRegressor", "StandardScaler": "nn.Standardize", "device": 'cv.Model(..., device="cuda")',
        "fit": "cv.Model(net, ...).fit", "from_numpy": "NumPy's arrays, as they are", "functional": "cv.relu and others",
        "lr_scheduler": "cv.Adam(1e-3, schedule=cv.Cosine(1000))", "manual_seed": "cv.Model(..., seed=0)",
        "no_grad": "model.predict, which computes no gradients", "save": "model.save(path)", "set_seed": "cv.Model(..., seed=0)",
        "train_test_split": "calcvm.data.train_test_split", "utils": "model.fit(X, y), or an iterable of batches",
        "OpSpec": "calcvm.operators.OpSpec", "Resident": "cv.Model", "RowSpec": "calcvm.operators.RowSpec",
        "TensorDescriptor": "x.descriptor, of a variable x",
    },
    "Model": {
        "compile": "cv.Model(net, input_shape=..., loss=..., optimizer=...)", "train": "fit",
        "train_on_batch": "step", "predict_on_batch": "predict", "test_on_batch": "evaluate", "score": "evaluate",
        "load_weights": "cv.load, or set_weights", "save_weights": "save",
        "zero_grad": "step", "eval": "predict, which is without dropout", "count_params": "summary",
        "to": 'cv.Model(..., device="cuda")', "cuda": 'cv.Model(..., device="cuda")', "history": "what fit returns",
        "optimizer": "hyper, of its numbers", "lr": 'hyper["learning_rate"]', "learning_rate": 'hyper["learning_rate"]',
        "weights": "parameters", "trainable_weights": "parameters", "named_parameters": "parameters", "layers": "summary",
        "fit_generator": "fit", "partial_fit": "fit", "load": "cv.load", "resident": "parameters, step and others of the model itself",
        "get_layer": "parameters", "trainable": "parameters, which nn.Linear(..., trainable=False) freezes", "coef_": "parameters",
        "intercept_": "parameters", "classes_": "predict_classes", "metrics_names": "roles", "clone": "copy",
    },
    "Ensemble": dict.fromkeys("compile fit step train".split(), "fit of each model, before cv.Ensemble(models)"),
    "SplitModel": {
        **dict.fromkeys("fit train train_on_batch".split(), "step, on one batch after the other"),
        **dict.fromkeys("predict predict_classes predict_proba".split(), 'run("predict", X), on one batch'),
        "evaluate": 'run("predict", X, y), on one batch', "save": "state", "hyper": "cv.SGD(0.1) of the graph, fixed by the plan",
    },
    "Layer": {
        **dict.fromkeys("add append extend".split(), "nn.Linear(8) >> nn.ReLU(), or a list"),
        **dict.fromkeys("call forward".split(), "build"),
        **dict.fromkeys(
            "compile cpu cuda eval evaluate fit load_state_dict named_parameters parameters predict state_dict summary to train "
            "zero_grad".split(),
            "a model of the layers: cv.Model(net, input_shape=..., optimizer=...)",
        ),
        "weight": 'parameters["linear_1.weight"] of the model',
    },
    "Optimizer": {
        "apply_gradients": "model.step(x, y)", "load_state_dict": "cv.load(path)", "minimize": "model.step(x, y)",
        "param_groups": 'model.hyper["learning_rate"]', "state_dict": "model.save(path)", "step": "model.step(x, y)",
        "zero_grad": "model.step(x, y), which computes new gradients",
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
    "Handle": {"bytes": "nbytes", "epochs": "epochs_done", "fit": "fleet.fit, which trains all models", **{name: f"handle.model.{name}" for name in (
        "copy", "evaluate", "get_weights", "hyper", "load_state_dict", "parameters", "predict", "predict_classes", "predict_proba", "save",
        "state_dict", "summary", "to_python",
    )}},
    "Plan": {"again": "recomputed"},
    "Trial": {"rounds": "epochs"},
    "History": {"history": 'history["loss"]', "epoch": "epochs", "params": "epochs", "keys": "names"},
}  # fmt: skip

# Names that calcvm has no counterpart for, and what to do instead.
NONE_YET = {
    **dict.fromkeys((
        "ConvLSTM2D", "GRUCell", "LSTMCell", "RNNCell", "TimeDistributed", "Transformer", "fft", "norm", "prod", "repeat", "tile", "unique",
    ), ""),
    **dict.fromkeys((
        "log10", "log2",
    ), ": declare it by its formulas (calcvm.operators.elementwise)"),
}  # fmt: skip


# classes with hints also in methods
METHODS = "CalcGraph Ensemble Fleet Handle History Layer Model Path Plan Program Results Variable".split()


def close_to(name: str, known: Iterable[str]) -> str:
    """The nearest known name, or ""."""
    from difflib import get_close_matches

    by_lower = {k.lower(): k for k in known}
    return next((by_lower[k] for k in get_close_matches(name.lower(), by_lower, 1, 0.75)), "")


def meant(name: Any, known: Iterable[str]) -> str:
    """The end of an error for an unknown name of a loss, a metric or an optimizer: the known name that it may mean, or ""."""
    if not isinstance(name, str):
        return ""
    known = {*known}
    found = FIGURES.get(re.sub("loss$|[^a-z0-9]", "", name.lower()), "")
    found = found if found in known else close_to(name, known)
    return found and f" (did you mean {found!r}?)"


def unknown_name(owner: str, name: str, known: Mapping[str, str]) -> AttributeError:
    """The error for a name that ``owner`` lacks; ``known`` maps the names that it has to how they are written."""
    said = f"module {owner!r}" if owner.startswith("calcvm") else f"a{'n' * (owner[:1] in 'AEIOU')} {owner}"
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
        others = next((of for c in kind.__mro__ if (of := NAMES.get(c.__name__))), {})
        raise unknown_name(kind.__name__, name, {**{k: k for k in known if not k.startswith("_")}, **others})


class Elsewhere:
    """An attribute that other libraries have, on a class that gives hints for such names only.

    With ``__getattr__``, Python 3.10 and 3.11 take 80 ns longer to look up any method of a class: half of a small network's `predict`.
    """

    def __init__(self, owner: str, name: str):
        self.owner, self.name = owner, name
        self.__doc__ = f"Not here: {NAMES[owner][name]}."  # in help

    def __get__(self, of: Any, kind: type | None = None) -> Any:
        raise unknown_name(kind.__name__ if kind else self.owner, self.name, NAMES[self.owner])


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


def _wrong_call(
    function: Callable[..., Any], what: str, args: Any, options: Mapping[str, Any]
) -> UnknownArgument | None:
    """The error for arguments that a function, called ``what``, does not take; None if it takes them."""
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **options)
        return None
    except TypeError as error:
        why = str(error)
    kinds = {name: p.kind for name, p in signature.parameters.items() if name != "self"}
    names = [name for name, kind in kinds.items() if kind in (_PLACED, inspect.Parameter.KEYWORD_ONLY)]
    placed = [name for name in names if kinds[name] is _PLACED]
    order, place = CALLS.get(what.rstrip("123d"), "").format(what), f"{function.__module__}.{what}"
    for name in () if inspect.Parameter.VAR_KEYWORD in kinds.values() else options:
        if name not in names:
            said = (m.rpartition("? ") for m in ARGUMENTS.get(name, ()))
            fits = (m for where, _, m in said if m in names or (" " in m and re.search(where, place)))
            meant = next(fits, "") or close_to(name, names)
            if order and meant in placed[: len(args) - ("self" in signature.parameters)]:
                why = f"{name} is a second value of {meant}"
                break
            hint = (
                meant
                if " " in meant
                else f"did you mean {meant}=?"
                if meant
                else f"it takes {', '.join(names) or 'none'}"
            )
            return UnknownArgument(f"{what} has no argument {name!r}: {hint}")
    more = " and others by name" if len(placed) < len(names) else ""
    return UnknownArgument(f"{what} takes ({', '.join(placed)}){more}: {why}{order and f'; {order}'}")


def required(function: FunctionType) -> tuple[str, ...]:
    """The names of a function's parameters without a default."""
    code = function.__code__
    return code.co_varnames[: code.co_argcount - len(function.__defaults__ or ())]


def hinted(function: Function) -> Function:
    """The function, with a suggestion in the error for arguments that it does not take."""
    if hasattr(function, "is_hinted"):
        return function

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except TypeError as error:
            name, what = function.__name__, function.__qualname__
            if args and "." in what and "<locals>" not in what:
                of = (args[0] if isinstance(args[0], type) else type(args[0])).__name__
                what = of if name == "__init__" else f"{of}.{name}"
            if isinstance(error, CalcError) or (wrong := _wrong_call(function, what, args, options)) is None:
                raise
            raise wrong from None

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
            for cls in value.__mro__ if name in METHODS else (value,):
                public = [n for n in vars(cls) if not n.startswith("_")] if name in METHODS else []
                for method in ["__init__", *public] if cls.__module__.startswith("calcvm") else ():
                    of = vars(cls).get(method, cls.__init__)  # type: ignore[misc]
                    if isinstance(of, FunctionType) and not hasattr(of, "made"):  # compiled ones: `methods.native`
                        setattr(cls, method, hinted(of))
