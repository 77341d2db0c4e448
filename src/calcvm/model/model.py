"""`Model`: a network with a loss and an optimizer, trained, evaluated, saved."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from functools import partial, wraps
from io import BytesIO, TextIOBase
from os import PathLike
from sys import intern
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn, TypeVar, overload

import numpy as np

from calcvm import checks, compiler, hints, nn
from calcvm.errors import CalcError, ShapeError, warn, within
from calcvm.graph import CalcGraph
from calcvm.lazy import cached_property
from calcvm.model import adapting, files, scores, state_dicts
from calcvm.model.callbacks import Callback, EarlyStopping, callbacks_of
from calcvm.model.data import (
    Arrays,
    Batches,
    arrays_of,
    by_name,
    check_steps,
    comes_in_batches,
    count_of,
    held_out,
    like_lengths,
    training_data,
)
from calcvm.model.generate import generated
from calcvm.model.heap import ModelHeap
from calcvm.model.history import History
from calcvm.model.networks import GraphChoices, GraphOptions, build_graph
from calcvm.model.roles import LEARN, LENGTHS, PREDICT, Roles, trained_paths
from calcvm.model.stream import Stream, stream_of
from calcvm.model.summary import summary
from calcvm.model.training import Training
from calcvm.nn.layers import Complete
from calcvm.ops.dims import show
from calcvm.planner import Plan
from calcvm.tables import Lines, preformatted
from calcvm.vm.calls import methods
from calcvm.vm.memory.base_model import BaseModel
from calcvm.vm.memory.epoch import Epoch
from calcvm.vm.memory.heap import parse_bytes
from calcvm.vm.memory.order import EpochInOrder, checked_order, run_order
from calcvm.vm.memory.store import checkpoint_epochs
from calcvm.vm.program.facts import check_learning_batch
from calcvm.vm.program.program import Program
from calcvm.vm.run import job as J
from calcvm.vm.run.feeds import IN_PLACE, plain
from calcvm.vm.run.loaded import loaded_of
from calcvm.vm.run.slices import SLICE_SECONDS

if TYPE_CHECKING:
    import onnx
    from typing_extensions import Unpack

    from calcvm.edge.pack import Pack
    from calcvm.optim import Optimizer

Method = TypeVar("Method", bound=Callable[..., Any])
BATCH = 32  # default batch size
_Plain = tuple[tuple[Any, ...], dict[str, Any]]


def _training(method: Method) -> Method:
    """A method of `Model` whose turns belong together: calls that change the model wait for its end."""

    @wraps(method)
    def whole(self: Model, *args: Any, **options: Any) -> Any:
        record = self.record
        with record.change:
            try:
                record.begin_training()
                return method(self, *args, **options)
            finally:
                record.trains = 0

    return whole  # type: ignore[return-value]


class ModelOptions(compiler.PlanOptions, total=False):
    """The options of a `Model`."""

    batch_size: int | None
    learning_batch: int | None
    memory: int | str | None
    seed: int
    page_folder: str | PathLike[str] | None
    heap: CalcHeap | None
    name: str | None


class NetworkOptions(ModelOptions, GraphOptions, total=False):
    """The options of a `Model` of layers."""


class CompleteOptions(ModelOptions, GraphChoices, total=False):
    """The options of a `Model` of an imported network."""

    input_shape: tuple[int, ...]
    optimizer: Optimizer | str | type[Optimizer]


@hints.names_of_others
class Model(methods.HasFastMethods, BaseModel, hints.Closed):
    """A network, or a custom graph, compiled for training.

    Parameters
    ----------
    net : nn.Layer, list of nn.Layer, or CalcGraph
        Layers, composed by ``>>`` or in a list; or a graph with a path learn, which trains, and a path predict, whose
        ``output`` `predict` returns (a variable or a tuple of them).  In a graph of several paths that train, such as a GAN's,
        these may have any names, and none need predict: see ``order`` of `fit`.  A graph defines its placeholders, losses and
        optimizers itself, so of the other parameters only those of `calcvm.plan` apply.  A network of another library knows its
        input's shape.  Without a loss it only predicts.
    input_shape : tuple of int
        Shape of one sample.
    loss : str or callable
        "softmax_cross_entropy" (integer labels), "binary_cross_entropy", "mse", "mae", "huber", or a
        function of (output, target) variables.
    optimizer : Optimizer or str
        Such as ``cv.Adam(1e-3)``, or ``"adam"`` with its default learning rate.
    batch_size : int, optional
        Maximum number of samples per step; default 32 (or a smaller ``learning_batch``), or with ``memory`` as many as that allows.
    learning_batch : int, optional
        Samples per update of `fit` on arrays, if more than ``batch_size``: gradients of several rounds are accumulated.  `step` and
        `run_steps` make an update per batch.
    target_shape : tuple of int, optional
        Shape of one target (default: the output's shape; for softmax_cross_entropy without the axis of classes: one label, or
        for images one per pixel).
    preprocess : nn.Layer, optional
        Layers without parameters that are applied to the raw input, in a separate path.  The first random layer, such as
        `nn.RandomCrop`, and those after it run randomly in training only.
    metrics : list of str or callable, optional
        Figures that `evaluate` returns besides the loss: "accuracy", "mse", "mae", "huber", or functions of (output, target)
        variables, by their names (default: the accuracy for softmax_cross_entropy).  Each covers the whole data set: a mean or
        a sum over samples, or a function of these, for instance `calcvm.rmse`.  Other metrics raise an error if there are several
        batches.  The accuracy of one output uses the threshold 0 for logits (binary_cross_entropy), and 1/2 for numbers (mse,
        mae, huber).
    train_metrics : bool
        Whether `fit` also reports metrics of the training data, besides the loss: means over the epoch, while the parameters
        change.  Each is a row in every step: 0.2 % to 5 % of a step of 20 us or more, 0.3 us of the shortest.
    sample_weight : bool
        Whether samples have weights in the loss, which is then the mean of each sample's loss times its weight.  A loss
        function then returns one term per sample.
    rates : mapping of str to float, optional
        Factors of the learning rate for parameters, by name.  A key that ends with a dot, such as "linear_1.", is a prefix of
        names; one that begins with a dot, such as ".bias", is a suffix.
    input_dtype, target_dtype : types of data that the heap stores unconverted, such as "uint8" for images and "int64" for labels
        (default: data become the model's floats, and int64 if the first layer is an `nn.Embedding`); see `CalcGraph.placeholder`.
    channels_last : bool
        The input's samples, of shape ``input_shape``, are images (*sizes, channels), and are read in this layout.
    ignore_index : int, optional
        A label of softmax_cross_entropy, such as -100 or 255: samples with it (or pixels of images) do not count in loss,
        gradients and accuracy, which are means over the others.  Without others they are 0.
    lengths : bool
        Samples are sequences of different lengths, at most ``input_shape[0]`` steps: data are lists of arrays (steps, ...), or arrays
        of padded sequences with their lengths, ``(X, lengths)``.  Loss and metrics count the steps that are there.
    stream : bool
        A path "stream" runs the network step by step, from states that its layers keep: `stream`.
    keep : list of str
        Names of results that stay readable after `run` or `step`: of layers, as in `summary` (``"relu_1"``: the layer's
        output in path predict; ``"learn.relu_1"``), or of variables.
    page_folder : path, optional
        Folder of the page file for values kept there with ``page_bytes`` (see `CalcHeap`; a given ``heap`` has its own).
    seed, dtype, workers, memory, device, mode, precision, recompute, solver_seconds, objective, costs, page_bytes,
    page_bandwidth, specialize : see `calcvm.plan`.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> X = rng.uniform(-1, 1, (400, 2)).astype("float32")
    >>> y = (X[:, 0] > X[:, 1]).astype("int64")
    >>> net = nn.Linear(16) >> nn.Tanh() >> nn.Linear(2)
    >>> model = cv.Model(net, input_shape=(2,), optimizer=cv.Adam(1e-2), batch_size=50, seed=0)
    >>> history = model.fit(X, y, epochs=20, progress=False)
    >>> model.evaluate(X, y)["accuracy"] > 0.95
    True
    """

    heap: CalcHeap
    _plan: Plan | None = None
    _source: tuple[CalcGraph, dict[str, Any]] | None = None  # its graph, and what of its plan holds on every device

    @overload
    def __init__(self, net: Complete, **options: Unpack[CompleteOptions]) -> None: ...
    @overload
    def __init__(self, net: nn.Layer | Iterable[nn.Layer], **options: Unpack[NetworkOptions]) -> None: ...
    @overload
    def __init__(self, net: CalcGraph, **options: Unpack[ModelOptions]) -> None: ...
    @hints.takes(build_graph, compiler.plan, without=("net", "graph", "accumulate", "progress"))
    def __init__(
        self,
        net: nn.Layer | Iterable[nn.Layer] | CalcGraph,
        *,
        batch_size: int | None = None,
        learning_batch: int | None = None,
        memory: int | str | None = None,
        seed: int = 0,
        page_folder: str | PathLike[str] | None = None,
        heap: CalcHeap | None = None,
        name: str | None = None,
        **options: Any,
    ) -> None:
        if heap is not None:
            checks.one_of("Model: heap", heap, CalcHeap, 'a heap such as cv.CalcHeap("1 MiB")')
        if learning_batch is not None:
            learning_batch = checks.integer("learning_batch", learning_batch)
        if batch_size is None and memory is None:
            batch_size = min(BATCH, learning_batch or BATCH)
        graph, planned = graph_of("Model", net, options)
        accumulate = learning_batch is not None
        self._plan = compiler.plan(graph, batch_size=batch_size, memory=memory, accumulate=accumulate, **planned)
        self._source = graph, {"accumulate": accumulate, "keep": planned.get("keep", ())}
        program = compiler.compile(graph, plan=self._plan)
        if learning_batch is not None:
            check_learning_batch(program, learning_batch)
        if isinstance(net, CalcGraph):  # checked before it takes room in a heap
            Roles.of(loaded_of(program))
        (heap or _heap_of(program, page_folder)).add(self, program, seed, name=name)
        self.learning_batch = learning_batch or program.batch_size

    # ------------------------------------------------------------ properties
    @cached_property
    def roles(self) -> Roles:
        """Its inputs, targets, outputs and figures, by name."""
        return Roles.of(self.loaded)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("learning_rate", "lr"):  # without this the assignment would have no effect
            raise CalcError(f'model.{name} is no setting: model.hyper["learning_rate"] = {checks.shown(value)}')
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        if self.record.loaded is None:
            return f"<Model {self.name!r}: closed>"
        paths, forms = self.loaded.paths, self.loaded.forms
        whole = {"learn", "predict"} <= paths.keys()
        names = (*self.roles.inputs, *self.roles.outputs) if whole else ()
        what = ", ".join(f"{name} {show(forms[name])}" for name in names) or f"paths {', '.join(paths)}"
        n = sum(self.loaded.symbol(name).elems.b for name in self.program.info["parameters"])
        return f"<Model {self.name!r}: {what}, {n:,} parameters, {self.epochs_done} epochs done>"

    def copy(self, name: str | None = None, heap: CalcHeap | None = None) -> Model:
        """A new model with the same parameters, buffers, optimizer state, counters and seed, in the same heap or in another.

        In the middle of a learning batch, the copy continues there, with the accumulated gradients.
        """
        if heap is not None:
            checks.one_of("copy: heap", heap, CalcHeap, 'a heap such as cv.CalcHeap("1 MiB")')
        with self.record.turn.mine:
            image = self.image()  # first: a fleet that trains the model updates its epochs when it releases it
            facts = {**self.facts, "open": self.adding}
        return (heap or self.heap).adopt(self.program, facts, image, self.workers, name)

    def summary(self) -> str:
        """A table of its layers, with outputs and costs, its parameters, its training, and its memory."""
        return Lines(summary(self, self.roles))

    def __str__(self) -> str:
        whole = self.record.loaded is not None and {"learn", "predict"} <= self.loaded.paths.keys()
        return self.summary() if whole else repr(self)

    def _repr_html_(self) -> str:
        return preformatted(str(self))

    @property
    def plan(self) -> Plan:
        """The plan it was compiled from (a loaded model has only the program)."""
        if self._plan is None:
            raise CalcError(
                "a loaded model has no plan; its program has the offsets: print(model.program.disassemble())"
            )
        return self._plan

    @property
    def notes(self) -> MutableMapping[str, Any]:
        """The user's notes on the model, by name: any JSON-able values.

        They are part of files from `save`, of copies and of heaps' stores; each model of a fleet has its own.
        ``model.notes = {...}`` replaces all.  CalcError: JSON cannot hold a value.
        """
        return files.Notes(self.facts)

    @notes.setter
    def notes(self, given: Mapping[str, Any]) -> None:
        files.Notes(self.facts).replace(given)

    # Arguments in the form that compiled methods take: see `calcvm.vm.calls.methods`.
    def _plain(self, data: Mapping[str, Any]) -> list[np.ndarray]:
        own = self.loaded.own_types
        return [plain(name, self.numbers(name, given), own.get(name, "")) for name, given in data.items()]

    def _plain_set(self, name: str, value: Any) -> _Plain:
        return (intern(name), *self._plain({name: value})), {}

    def _plain_step(self, x: Any, y: Any = None, *more: Any) -> _Plain:
        return tuple(self._plain(dict(zip(self.loaded.feeds("learn"), self._in_order(x, y, more), strict=True)))), {}

    def _plain_run_steps(self, n: int) -> _Plain:
        return (checks.integer("run_steps: the number of steps", n),), {}

    def _plain_run(self, inputs: Mapping[str, Any]) -> _Plain:
        return (dict(zip(map(intern, inputs), self._plain(inputs))),), {}

    def _plain_evaluate(self, X: Any, y: Any = None) -> _Plain:
        inputs, labels = self.roles.inputs, self.roles.labels
        of = [self._plain(by_name(*given, self.roles)) for given in (("X", inputs, X), ("y", labels, y))]
        return tuple(arrays[0] if len(arrays) == 1 else tuple(arrays) for arrays in of if arrays), {}

    def _plain_predict(self, X: Any, *, out: Any = None) -> _Plain:
        if isinstance(X, list) and self.roles.ragged:
            raise TypeError("a list of results")
        arrays = self._plain(by_name("X", self.roles.inputs, X, self.roles))
        return (arrays[0] if len(arrays) == 1 else tuple(arrays),), {} if out is None else {"out": out}

    @methods.native(_plain_set)
    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)

    # ------------------------------------------------------------ steps
    @methods.native(_plain_step)
    def step(self, x: Any = None, y: Any = None, *more: Any, path: str | None = None) -> float:
        """One training step on a batch of at most ``batch_size`` samples; returns its loss (None: the path names none).

        It is one update, whatever ``learning_batch`` is.
        With several inputs or targets, or with weights, pass the arrays of the path's placeholders in the order of
        declaration; or ``x`` and ``y`` are a tuple or mapping each, as in `fit`.  The model is unchanged if the data
        are rejected.

        path : default: path learn, or the first path that trains.
        """
        self._check_adapted()
        path = self.loaded.path(path)
        with self.record.change, self.record.turn.mine:
            start = time.perf_counter()
            loss = self.step_on(self._in_order(x, y, more), path)
            self._arm_step(path, start, 1)
        methods.offer(self)
        return loss  # type: ignore[return-value]  # most paths have a loss

    def _arm_step(self, path: str, start: float, n: int) -> None:
        """Let the next steps run compiled; called in the turn of ``n`` steps in Python that began at ``start``."""
        loss = self.loaded.paths[path].get("loss")
        if self.record.calls is not None and path == methods.CALLS[J.STEP].path and loss is not None:
            batch = self.record.ran[path, "forward"]
            methods.arm(self, J.STEP, batch, start, self.loaded.feeds(path), {loss: "loss"}, calls=n)

    def _in_order(self, x: Any, y: Any, more: tuple[Any, ...]) -> tuple[Any, ...]:
        """Data of a step in the order of the path's placeholders."""
        if not (isinstance(x, (tuple, Mapping)) and len(self.roles.inputs) > 1 and not more):
            return arrays_of(x, y, more)
        given = {**by_name("x", self.roles.inputs, x, self.roles), **by_name("y", self.roles.labels, y, self.roles)}
        return tuple(given[name] for name in self.loaded.feeds("learn") if name in given)

    def stream(self, path: str | None = None, *, batch: int = 1, place: int | None = None) -> Stream:
        """A stream: calls it with the next step of its samples, and keeps their state in between.

        Parameters
        ----------
        path : one that carries a state (`calcvm.carry`), and trains nothing (default: path stream if there is one, else predict).
        batch : samples of a call.
        place : its first place in the model's batch (default: the first that no stream has).  A place keeps its state, so that
            a stream at the same place goes on, also in a model that was loaded.

        Raises
        ------
        CalcError : the path keeps no state, or all places are taken.
        """
        return stream_of(self, path, place, batch)

    def generate(
        self,
        prompt: Any,
        tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | Sequence[int] | None = None,
        stop: int | None = None,
    ) -> np.ndarray:
        """Tokens that continue a prompt, each drawn by the softmax of the network's scores for the next one.

        The model is made with ``stream=True``: its path "stream" takes one token, and keeps keys, values and states of those before.
        The whole text is written in compiled code, with the model's workers; Ctrl-C ends it between two tokens.

        Parameters
        ----------
        prompt : integers, shape (length,), or n prompts, at most ``batch_size``: (n, length), or a list of arrays of any lengths.
        tokens : how many to draw after each prompt.
        temperature : scores are divided by it; 0 takes the best token, of equal ones the first.
        top_k : only the best so many are drawn; of equal ones the first count as better.
        top_p : only the best ones are drawn, until they have this probability together.
        seed : of the random numbers.  The numbers of prompt i follow from (seed, i), and with a list of n seeds from its own one, as if
            it were alone.  Nothing else changes a text: team, places in the batch, calls.  None: another text each time.
        stop : a token at which a text ends: all after it are ``stop`` too.

        Returns
        -------
        ndarray of int64, shape (tokens,), or (n, tokens): the tokens after each prompt, whatever its length

        Raises
        ------
        CalcError : the model has no path "stream" from a token to scores, a setting is out of range, a prompt is empty or has no
            integers of the vocabulary, prompt and tokens are longer than attention's cache or the positions, all places have
            streams, or scores are not finite.  In all cases but the last the model is unchanged.

        Examples
        --------
        >>> text = np.frombuffer(b"abcabcabcabcabcabcabcabcabcabcabc", np.uint8) - ord("a")
        >>> X, y = (np.lib.stride_tricks.sliding_window_view(text[i : len(text) - 1 + i], 8) for i in (0, 1))
        >>> net = cv.zoo.char_lstm(3, width=8)
        >>> model = cv.Model(net, input_shape=(8,), optimizer=cv.Adam(0.1), stream=True, seed=0)
        >>> history = model.fit(X, y, epochs=20, progress=False)
        >>> model.generate([0, 1], tokens=7, temperature=0)
        array([2, 0, 1, 2, 0, 1, 2])
        """
        return generated(self, prompt, tokens, temperature, top_k, top_p, seed, stop)

    @overload
    def run_steps(self, n: int, path: str | None = None) -> float: ...
    @overload
    def run_steps(self, n: int, *, order: Iterable[str]) -> dict[str, float]: ...
    @methods.native(_plain_run_steps)
    def run_steps(self, n: int, path: str | None = None, *, order: Iterable[str] | None = None) -> Any:
        """``n`` training steps on the data already in the heap, in one call; returns the last loss (None: the path names none).

        Each is one update of one batch, whatever ``learning_batch`` is.  Paths whose results the path reads run forward once,
        before the first step.

        order : paths that train, such as ``("critic", "critic", "generator")``: ``n`` times a step of each in turn, as in a loop
            over ``run_steps(1, path)``, in one call of compiled code.  Returns the last loss of each path, by name.
        """
        n = checks.integer("run_steps: the number of steps", n)
        if order is not None:
            if path is not None:
                raise CalcError("run_steps: order= names the paths already: leave path= out")
            paths = checked_order("run_steps", self.loaded, order)
            with self.record.change, self.record.turn.mine:
                return run_order(self, n, paths)
        path = self.loaded.path(path)
        with self.record.change, self.record.turn.mine:
            start = time.perf_counter()
            loss = self.run_whole(n, path)
            self._arm_step(path, start, n)
        methods.offer(self)
        return loss  # type: ignore[return-value]  # most paths have a loss

    def bind(self, x: Any, y: Any = None, *more: Any) -> Callable[[], float]:
        """A function that runs a training step on the current contents of ``x`` and ``y``, and returns its loss.

        The arrays are read in place.  They must be C-contiguous arrays of one batch, of float32, float64, uint8, int32 or int64, or
        of the model's ``input_dtype`` or ``target_dtype``.

        Raises
        ------
        CalcError : an argument is no such array, or does not fit.
        """
        data, names = arrays_of(x, y, more), self.loaded.feeds(self.loaded.path(LEARN))
        if len(data) != len(names):
            raise CalcError(f"bind takes {len(names)} arrays ({', '.join(names)}), not {len(data)}")
        for name, array in zip(names, data):
            own = self.loaded.own_types.get(name)
            types = IN_PLACE if own is None else (np.dtype(own),)
            if not (isinstance(array, np.ndarray) and array.dtype in types and array.flags.c_contiguous):
                given = checks.called(array)
                if isinstance(array, np.ndarray):
                    given = f"one of {array.dtype}{'' if array.flags.c_contiguous else ' that is not contiguous'}"
                raise CalcError(
                    f"bind: {name!r} is read where it is, and must be a C-contiguous array of "
                    f"{' or '.join(sorted(map(str, types)))}, not {given}: take np.ascontiguousarray(x, dtype), or step(x, y)"
                )
        self.check_batch({name: self.numbers(name, array) for name, array in zip(names, data)})
        return methods.bound_step(self, data)

    @methods.native(_plain_run)
    def run(self, inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Outputs by name for a batch of inputs by name."""
        self._check_adapted(PREDICT)
        checks.one_of("run: inputs", inputs, Mapping, 'a mapping such as {"input": X}')
        arrays = {name: self.numbers(name, value) for name, value in inputs.items()}
        batches = {name: self.check_placeholder(name, array) for name, array in arrays.items()}
        with self.before_turn(PREDICT), self.record.turn.mine:
            start = time.perf_counter()
            self.place(arrays, batches)
            self.run_round("predict", ("forward",))
            found = {name: self[name] for name in self.roles.outputs}
            if arrays.keys() == {*self.roles.inputs}:
                n = next(iter(batches.values()))
                methods.arm(self, J.RUN, n, start, self.roles.inputs, {name: name for name in found})
        methods.offer(self)
        return found

    # ------------------------------------------------------------ whole data sets
    def adapt(self, X: Any) -> Model:
        """Compute the mean and the deviation of data for each `nn.Standardize` of the network; returns the model.

        They cover all samples, in float64 and one pass; the deviation of a constant feature is 1.

        Parameters
        ----------
        X : as in `fit`: an array (one on disk is read block by block), or for several inputs a tuple or mapping; or an iterable of
            batches, alone or with their targets, such as a generator.

        Raises
        ------
        CalcError : no layer learns from data, a layer reads a computed value, or a number is not finite.
        """
        adapting.adapt(self, self.roles, X)
        return self

    def _check_adapted(self, path: str | None = None) -> None:
        """Warn, once, about layers that have seen no data; a ``path`` must be there."""
        if path is not None:
            self.loaded.path(path)
        if "_looked" in vars(self):
            return
        vars(self)["_looked"] = True
        if missing := adapting.missing(self):
            warn(f"layer {missing[0]!r} has seen no data, and changes nothing: call model.adapt(X) before training")

    @_training
    def fit(
        self,
        X: Any,
        y: Any = None,
        *,
        epochs: int = 1,
        validation: Any = None,
        patience: int | None = None,
        keep_best: bool = False,
        shuffle: bool = True,
        sample_weight: Any = None,
        class_weight: Mapping[int, float] | str | None = None,
        callbacks: Iterable[Callback | Callable[..., Any]] = (),
        steps_per_epoch: int | None = None,
        check_finite: bool = False,
        terminate_on_nan: bool = False,
        checkpoint: int | str = 1,
        progress: bool = True,
        order: Iterable[str] | None = None,
        bucket_by_length: bool = False,
    ) -> History:
        """Train for whole epochs in compiled code; arrays are read in place.

        Parameters
        ----------
        X : ndarray, shape (n, *input_shape), float32, float64, uint8, int32 or int64
            C-contiguous arrays of these types, in the machine's byte order, are not copied; other numbers are converted.
            For several inputs a tuple or a mapping; a placeholder without samples gets its whole value.
            Without ``y`` an iterable of batches, such as a generator: one step per batch.
        y : ndarray, shape (n, *target_shape) or (n,) labels
        validation : (X, y), or the share of samples at the end of the data to hold out.
        patience : int, optional
            Stop when the validation loss has not fallen for that many epochs; 0 and 1 stop at the first such epoch (see
            `EarlyStopping`).
        keep_best : bool
            At the end, restore the state after the epoch of this call with the smallest validation loss (without
            validation data: loss).
        sample_weight : ndarray, shape (n,), optional
            The weight of each sample; needs a model with ``sample_weight=True``.
        class_weight : mapping of label to number, or "balanced", optional
            The weight of each class's samples (default 1), times ``sample_weight``.  "balanced": all classes have the same
            total weight in the training data.
        callbacks : list of `Callback`, or of functions of (model, epoch, figures)
            Called after each epoch; returning True or a text (the reason) ends training.
        steps_per_epoch : int, optional
            Batches per epoch, if they come one by one (default: until there are no more).
        check_finite : bool
            Reject data that are NaN or Inf as the model's floats.
        terminate_on_nan : bool
            Stop after an epoch whose loss, or validation loss, is not finite.  Otherwise training continues, with a `CalcWarning`.
        checkpoint : int or "end"
            Epochs between two writes of a model in a heap with a `FileStore`: a killed process loses at most these epochs.
            "end": the model is written when training ends.
        progress : bool
            A bar on a terminal (extra ``cli``), one display in a notebook, elsewhere at most one line every two seconds.  If it
            cannot be written, training goes on without it.
        order : list of str, optional
            Paths that learn in turn, such as ``("critic", "critic", "generator")``, instead of path learn.  Without ``y``, X has
            arrays for all placeholders of these paths.  A path's turns take the epoch's batches one after the other (with a
            ``learning_batch`` these); the epoch ends when the paths with the most turns have seen all samples.  The figures are
            ``critic.loss``, ``generator.loss``: means over the samples that the path saw (for a loss that is no mean, over its steps).
        bucket_by_length : bool
            Make batches of sequences of like lengths (a model with ``lengths=True``).  Batches, and which
            sequences meet in one, are shuffled; without ``shuffle`` they come from short to long.

        Returns
        -------
        History : figures of each epoch.  Ctrl-C ends training between two steps; the model stays usable.
        """
        self._check_adapted()
        epochs = checks.integer("epochs", epochs)
        shuffle, check_finite = checks.flag("shuffle", shuffle), checks.flag("check_finite", check_finite)
        if checks.flag("bucket_by_length", bucket_by_length) and (
            order is not None or LENGTHS not in self.roles.inputs
        ):
            why = (
                "the model has no lengths: cv.Model(..., lengths=True)"
                if order is None
                else "paths that learn in turn have no buckets"
            )
            raise CalcError(f"bucket_by_length: {why}")
        terminate_on_nan, progress = (
            checks.flag("terminate_on_nan", terminate_on_nan),
            checks.flag("progress", progress),
        )
        keep_best, watchers = checks.flag("keep_best", keep_best), callbacks_of(callbacks)
        train: Epoch | Batches
        trained = self.roles.trained
        if order is not None:
            paths = checked_order("fit", self.loaded, order)
            roles = self.roles.in_order(self.loaded, paths, y)
            if steps_per_epoch is not None or comes_in_batches(X, y, roles):
                raise CalcError("order: batches that come one by one are steps: call step(..., path=...) for each")
            share = validation if checks.is_number(validation) else None
            data, held = training_data(self, roles, X, y, sample_weight, class_weight, share)
            held = held if share is not None or validation is None else held_out(validation, self.roles)
            if keep_best and held is None:
                raise CalcError(
                    "keep_best watches one loss: give validation data, or name it: "
                    f"callbacks=[cv.EarlyStopping(None, figure='{paths[0]}.loss', keep_best=True)]"
                )
            train, trained = (
                EpochInOrder(self, data, paths, self.learning_batch, check_finite=check_finite),
                roles.trained,
            )
        elif not trained_paths(self.loaded):
            raise CalcError("fit: the model only predicts, no path of it trains")
        elif not trained:
            raise CalcError(
                f"fit trains path {LEARN!r}, and the graph has several of other names: give the order in which they learn, "
                f"such as order={(*trained_paths(self.loaded),)}"
            )
        elif comes_in_batches(X, y, self.roles):
            train, held = self._stream(
                X, validation, steps_per_epoch, (sample_weight, class_weight, check_finite, bucket_by_length)
            )
        else:
            if steps_per_epoch is not None:
                raise CalcError(
                    "steps_per_epoch: of arrays an epoch is all their samples; it is for batches one by one"
                )
            data, held = training_data(self, self.roles, X, y, sample_weight, class_weight, validation)
            train = Epoch(
                self, self._of("learn", data), "learn", train=True,
                learning=self.learning_batch, results=[*self.roles.trained], of_totals=True, check_finite=check_finite,
                order=partial(like_lengths, data[LENGTHS], self.learning_batch) if bucket_by_length else None,
            )  # fmt: skip
        if patience is not None:
            patience = checks.integer("patience", patience, 0)
            if held is None:
                raise CalcError("patience needs validation data: give validation=(X, y) or a share such as 0.2")
        if patience is not None or keep_best:
            if held is not None and "loss" not in self.roles.figures.values():
                raise CalcError(
                    "patience and keep_best watch the loss of path 'predict', which has none: name a result of it 'predict.loss', "
                    "or watch another figure by callbacks=[cv.EarlyStopping(figure=...)]"
                )
            watchers.insert(0, EarlyStopping(patience, keep_best=keep_best))
        with within("validation"):
            judge = self.judge(held, check_finite) if held is not None else None
        training = Training(self, trained, train, judge, watchers, checkpoint_epochs(checkpoint))
        return training.epochs(epochs, shuffle, terminate_on_nan, progress)

    def _stream(
        self, batches: Any, validation: Any, steps: int | None, others: tuple[Any, ...]
    ) -> tuple[Batches, Arrays | None]:
        """A stream of batches, and the validation data."""
        if self.learning_batch > self.batch_size:
            raise CalcError(
                f"learning_batch={self.learning_batch}: batches that come one by one are an update each: give arrays, or make the "
                "model without learning_batch"
            )
        for what, given in zip(("sample_weight", "class_weight", "check_finite", "bucket_by_length"), others):
            if given is not None and given is not False:
                raise CalcError(f"{what}: not possible with batches that come one by one: make it part of them")
        if validation is not None and checks.is_number(validation):
            raise CalcError("validation: no share can be held out of batches that come one by one: give (X, y)")
        steps = None if steps is None else checks.integer("steps_per_epoch", steps)
        held = None if validation is None else held_out(validation, self.roles)
        return Batches(self, self.loaded.feeds("learn"), batches, steps, [*self.roles.trained]), held

    def _of(self, path: str, data: Mapping[str, np.ndarray]) -> Arrays:
        """The data sets that a path needs, by name."""
        names = self.loaded.feeds(path)
        return {name: array for name, array in data.items() if name in names or name in self.roles.outputs}

    @methods.native(_plain_evaluate)
    def evaluate(self, X: Any, y: Any = None, *, check_finite: bool = False) -> dict[str, float]:
        """Loss and metrics over a data set, without dropout; X and y as in `fit`."""
        self._check_adapted(PREDICT)
        inputs, labels = self.roles.inputs, self.roles.labels
        data = {**by_name("X", inputs, X, self.roles), **by_name("y", labels, y, self.roles)}
        if LENGTHS in data:
            check_steps(data[LENGTHS], y, self.roles)
        judge, n = self.judge(data, check_finite), count_of(data, self.roles)
        with self.before_turn(PREDICT), self.record.turn.mine:
            start = time.perf_counter()
            found = judge()
            methods.arm(self, J.EVALUATE, n, start, (*inputs, *labels), self.roles.figures, len(inputs))
        methods.offer(self)
        return found

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise CalcError(
            "a Model is not callable: model.predict(X) returns its outputs, and layers are composed by >> before it is made"
        )

    @methods.native(_plain_predict)
    def predict(self, X: Any, *, out: Any = None) -> np.ndarray:
        """Outputs of the network for a data set, shape (n, *output_shape), without dropout.

        Parameters
        ----------
        X : as in `fit`.
        out : destination: a C-contiguous array of this shape and the output's dtype (for several outputs a mapping).

        Returns
        -------
        ndarray, shape (n, *output_shape); for several outputs a dict by name.  For a list of sequences, if the output has a result for
        each step: a list of arrays (steps, ...), as long as each of them.
        """
        if isinstance(X, list) and self.roles.ragged and out is None:
            return self._of_sequences(X, self.predict)
        self._check_adapted(PREDICT)
        outputs = self.roles.outputs
        data = by_name("X", self.roles.inputs, X, self.roles)
        sizes = {name: self.check(name, array, samples=True) for name, array in data.items()}
        n = next((size for name, size in sizes.items() if name not in self.roles.whole), 1)
        if out is None:
            given = {}
        elif len(outputs) == 1:
            given = {outputs[0]: out}
        else:
            given = dict(checks.one_of("predict: out", out, Mapping, f"a mapping of arrays for {', '.join(outputs)}"))
        arrays = {name: self._place_for(name, n, given.get(name)) for name in outputs}
        over = [name for name, a in arrays.items() if any(np.may_share_memory(a, x) for x in data.values())]
        places = {name: np.empty_like(a) if name in over else a for name, a in arrays.items()}  # as NumPy does
        run = Epoch(self, data, "predict", outputs=places)
        with self.before_turn(PREDICT), self.record.turn.mine:
            start = time.perf_counter()
            run.whole(SLICE_SECONDS)
            if n <= self.batch_size or not given:
                methods.arm(self, J.PREDICT, n, start, [*data], {name: name for name in outputs})
        for name in over:
            arrays[name][...] = places[name]
        methods.offer(self)
        return arrays if len(outputs) > 1 else arrays[outputs[0]]  # type: ignore[return-value]  # most models have one

    def _of_sequences(self, X: Any, of: Callable[[Any], np.ndarray]) -> Any:
        """``of`` all sequences, or of a list of them its result for the steps of each."""
        if not (isinstance(X, list) and self.roles.ragged):
            return of(X)
        data = by_name("X", self.roles.inputs, X, self.roles)
        return [result[:n] for result, n in zip(of((*data.values(),)), data[LENGTHS])]

    def _place_for(self, name: str, n: int, out: Any) -> np.ndarray:
        """An array for a result of ``n`` samples: the given one, checked, or a new one."""
        loaded = self.loaded
        shape, dtype = (n, *(size.b for size in loaded.forms[name][1:])), loaded.symbol(name).dtype
        if out is None:
            return np.empty(shape, dtype)
        if not (
            isinstance(out, np.ndarray) and out.shape == shape and out.dtype == dtype
            and out.flags.c_contiguous and out.flags.writeable
        ):  # fmt: skip
            given = checks.called(out)
            if isinstance(out, np.ndarray):
                given = "one that is read-only" if not out.flags.writeable else f"one of {out.dtype} {out.shape}"
                given += "" if out.flags.c_contiguous else ", not contiguous"
            raise ShapeError(f"predict: out must be a C-contiguous, writeable array of {dtype} {shape}, not {given}")
        return out

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities of the classes: softmax of `predict`, or sigmoid with binary_cross_entropy.

        Raises
        ------
        CalcError : the loss is no cross-entropy, so the outputs are no scores of classes.
        """
        found = scores.needed(self.program)

        def probabilities(X: Any) -> np.ndarray:
            with np.errstate(all="ignore"):
                return found.probabilities(self.predict(X).astype(np.float64)).astype(self.program.dtype)

        return self._of_sequences(X, probabilities)

    def predict_classes(self, X: Any) -> np.ndarray:
        """The most probable class of each sample, int64; the lowest among equals.

        softmax_cross_entropy: shape (n,), for images (n, *sizes).  binary_cross_entropy: 1 if a score is above 0, else 0,
        shape (n, *output_shape).  CalcError: as `predict_proba`.
        """
        found = scores.needed(self.program)
        return self._of_sequences(X, lambda X: found.classes(self.predict(X)))

    # ------------------------------------------------------------ weights
    def get_weights(self) -> dict[str, np.ndarray]:
        """Copies of the parameters, followed by the buffers, such as running statistics, by name."""
        with self.record.turn.mine:  # no other thread trains it meanwhile
            states = {**self.parameters, **self.buffers}
            return {name: array.copy() for name, array in states.items()}

    def set_weights(self, weights: Mapping[str, Any] | Iterable[Any]) -> None:
        """Set the parameters, and optionally the buffers, by name or in the order of `get_weights`; all or none.

        Raises
        ------
        CalcError, ShapeError : the names or shapes do not match.
        """
        self.set_parameters(weights)

    def state_dict(self, *, prefix: str = "", names: Mapping[str, str] | None = None) -> dict[str, np.ndarray]:
        """Copies of the parameters and buffers as in PyTorch's ``module.state_dict()``: its names, weights as they lie there.

        The layers of a network have their numbers as names, as in torch.nn.Sequential: "0.weight", "2.bias"; a network of one layer
        has none, "weight".  Parts of custom layers keep their names: "encoder.0.weight".  Weights that `calcvm.linear` or a recurrent
        operator reads are transposed; scale, shift and slope are weight and bias.

        Parameters
        ----------
        prefix : the begin of every name, such as "encoder.".
        names : other names of layers or parameters, by their names here: ``{"lstm_1": "rnn", "linear_1": "head"}``.

        Raises
        ------
        CalcError : ``names`` has a layer that is not there, or gives two of them one name.

        Examples
        --------
        >>> net = nn.LSTM(8, return_sequences=False) >> nn.Linear(3)
        >>> model = cv.Model(net, input_shape=(10, 4), optimizer="adam")
        >>> [(name, array.shape) for name, array in model.state_dict(names={"linear_1": "head"}).items()][1:5:3]
        [('0.weight_hh_l0', (32, 8)), ('head.weight', (3, 8))]
        """
        return state_dicts.state_dict(self, self.get_weights(), prefix, names)

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        *,
        prefix: str = "",
        names: Mapping[str, str] | None = None,
    ) -> tuple[list[str], list[str]]:
        """Set parameters and buffers from PyTorch's ``module.state_dict()``; all or none.

        Parameters
        ----------
        state_dict : mapping of names to tensors or arrays, also as ``np.load("weights.npz")``.
        strict : whether every name must be there on both sides.  (PyTorch's num_batches_tracked is left out anyway.)
        prefix : the part of the state dict to read, such as "encoder."; other names are no concern.
        names : as in `state_dict`.

        Returns
        -------
        The names that are missing, and those that the model does not have; both are empty if ``strict``.

        Raises
        ------
        CalcError, ShapeError : names or shapes do not fit; the message has all of them, and the model is unchanged.

        Examples
        --------
        >>> model = cv.Model(nn.Linear(3) >> nn.ReLU() >> nn.Linear(1), input_shape=(2,), loss="mse", optimizer="adam")
        >>> np.savez("weights.npz", **model.state_dict())
        >>> with np.load("weights.npz") as file:
        ...     model.load_state_dict(file)
        ([], [])
        """
        values, missing, unexpected = state_dicts.values_of(self, state_dict, strict, prefix, names)
        self.set_values(values)
        return missing, unexpected

    def _calcvm_trapped(self) -> None:
        """Raise the trap of a kernel in a compiled method, and forget its results."""
        record = self.record
        with record.turn.mine:
            slot = self.slot
            record.ran.clear()
            record.arena = None
            slot.check()

    def judge(self, data: Mapping[str, np.ndarray], check_finite: bool = False) -> Callable[[], dict[str, float]]:
        """A function that evaluates the model's current state on ``input`` and ``target``.

        With ``output`` in place of ``input`` it evaluates these outputs, from any source.
        """
        figures, check_finite = self.roles.figures, checks.flag("check_finite", check_finite)
        if not figures:
            raise CalcError("path 'predict' has no single number that judges: build a loss or a metric in it")
        run = Epoch(self, self._of("predict", data), "predict", results=[*figures], check_finite=check_finite)

        def judge() -> dict[str, float]:
            with self.record.turn.mine:
                run.whole(SLICE_SECONDS)
                return {called: run.mean(name) for name, called in figures.items()}

        return judge

    # ------------------------------------------------------------ files
    def save(self, path: str | PathLike[str] | BinaryIO, *, state: bool = False) -> None:
        """Write program, parameters, optimizer state and counters to one file, without pickle.

        ``path`` may be an open binary file.

        state : whether the file has what paths carry from call to call (`calcvm.carry`); otherwise a loaded model begins at the start.

        Raises
        ------
        FileError : the file cannot be written; an existing file is unchanged.
        """
        files.write(self, path, checks.flag("save: state", state))

    def to_python(self, path: str | PathLike[str]) -> None:
        """Write the model as a script that trains and predicts with NumPy alone: ``path``, with its weights beside it as .npy.

        Each row is one line, on views of one array at the plan's offsets.  ``python train.py --data data.npz --epochs 5``
        trains; `step`, `predict` and `evaluate` of the script take batches of any size, as this model's do.  Paths that only predict, from
        states that they keep, are functions by their names: ``stream(x)`` is the next step of each sample.

        Parameters
        ----------
        path : such as "train.py": it ends with .py; existing files of both names are replaced, each completely or not at all.

        Raises
        ------
        UnsupportedOperator : a row has no NumPy text, such as that of a custom operator that is no formula.
        CalcError : the path does not end with .py.
        FileError : a file cannot be written; an existing one is unchanged.
        """
        from calcvm.script.document import Parts, write

        roles = self.roles
        for name in (LEARN, PREDICT):
            self.loaded.path(name)
        write(
            self.loaded,
            Parts(roles.inputs, roles.targets, roles.outputs, roles.figures),
            self.image(),
            path,
        )

    def to_onnx(self, path: str | PathLike[str] | BinaryIO | None = None, *, of: str = PREDICT) -> onnx.ModelProto:
        """The forward of a path, with the present weights, as a file of ONNX, which other programs run.

        Its inputs and outputs are those of the path, with their names; they hold for any batch.  Weights have the names and forms of
        `state_dict`.  A state that the path keeps (`calcvm.carry`) is one more input, and one more output, ``NAME.next``.

        Parameters
        ----------
        path : where it is written, also an open binary file; None: nowhere.
        of : the path of the graph, such as "stream".

        Returns
        -------
        onnx.ModelProto : checked by onnx.

        Raises
        ------
        MissingExtra : onnx is not installed (extra ``onnx``).
        UnsupportedOperator : operators have no counterpart in ONNX; the message names all of them, with their layers.
        CalcError : the model was loaded or copied, and has no graph; the path is unknown, or has no output.
        FileError : the file cannot be written; an existing one is unchanged.

        Examples
        --------
        >>> model = cv.Model(nn.Linear(3) >> nn.Tanh(), input_shape=(2,), loss="mse", optimizer="adam")
        >>> file = model.to_onnx("net.onnx")
        >>> [node.op_type for node in file.graph.node], [array.name for array in file.graph.initializer]
        (['Gemm', 'Tanh'], ['0.weight', '0.bias'])
        >>> X = np.ones((5, 2), "float32")
        >>> np.allclose(cv.Model(cv.load_onnx("net.onnx")).predict(X), model.predict(X))
        True
        """
        from calcvm.files import write
        from calcvm.frontends.onnx_writer import written

        of = self.loaded.path(checks.one_of("to_onnx: of", of, str, "a path's name, such as 'predict'"))
        if self._source is None:
            raise CalcError(
                "to_onnx: a model that was loaded or copied, or that is in a fleet, has no graph: build it again, and load_state_dict its "
                "weights"
            )
        names = self.program.info.get("state_names", {})
        file = written(self._source[0].paths[of], self.get_weights(), names, self.program.dtype)
        if path is None:
            return file
        if isinstance(path, TextIOBase):
            raise CalcError("to_onnx: the file is open for texts: open it for bytes, open(path, 'wb')")
        if hasattr(path, "write"):
            path.write(file.SerializeToString())
        else:
            write(path, lambda stream: stream.write(file.SerializeToString()))
        return file

    def export(
        self,
        folder: str | PathLike[str],
        target: str,
        name: str = "model",
        batch_size: int | None = None,
        paths: Iterable[str] | None = None,
        objective: str | None = None,
        format: str | None = None,
        flash: int | str | None = None,
        ram: int | str | None = None,
    ) -> Pack:
        """Write the model for another processor, to be called from C, Python or JavaScript; it needs no library there, or NumPy alone.

        The guide on microcontrollers lists the processors.  The functions are ``NAME_start``, ``NAME_step`` (of path learn), ``NAME_predict``, and
        ``NAME_stream`` if there is such a path; each takes a heap, memory of the size that the header says.

        Parameters
        ----------
        folder : where the files are written; existing ones are replaced.
        target : processor or board, such as "cortex-m4f" or "pico".
        name : with which files and functions begin.
        paths : names of the paths that become functions; by default those that train, predict, or keep a state.  If none trains,
            parameters are constants, and the heap has no room for them.
        batch_size : samples of a call; by default those of the program, which are the most if the model was loaded.
        objective : "size" or "speed"; by default "speed" in browsers and on x86-64, else "size"
            "size": as few bytes of code and heap as possible, products as plain loops.  "speed": loops are unrolled, and on processors
            with vectors the model's own program and kernels are taken, which pays for large networks and batches.
        format : "object" (a C header and an object file, the default) or "archive" (a header and a static library).  For processors
            without vectors also "c" (a header and a C source) and "micropython" (a user C module of MicroPython).  Where Linux runs also
            "shared" (a header and a shared library) and "python" (a package with a class Model).  For browsers "browser" alone
            (JavaScript and WebAssembly).
        flash, ram : hard caps of code with constants, and of the heap, in bytes or as a text such as "20 KiB".  If the heap would be
            larger, values are computed again in training.

        Returns
        -------
        Pack : what it takes of flash, RAM and stack, in bytes; ``print`` shows it.

        Raises
        ------
        CalcError : the target is unknown, lacks what a row needs, or has no such format.
        PlanError : it does not fit into ``flash`` or ``ram``; the message says how many bytes are needed.
        MissingExtra : ziglang is not installed, which all formats but "object", "c" and "micropython" need.
        FileError : a file cannot be written.
        """
        from calcvm.edge.pack import Order, export
        from calcvm.edge.targets import processor_of

        loaded, processor = self.loaded, processor_of(target)
        objective = checks.choice(
            "export: objective", processor.objective if objective is None else objective, ("size", "speed")
        )
        formats = processor.formats
        format = checks.choice(
            f"export: format, of those for {processor.name},", formats[0] if format is None else format, formats
        )
        caps = [None if cap is None else parse_bytes(cap, what) for what, cap in (("flash", flash), ("ram", ram))]
        small = None
        if (objective == "size" or processor.scalar) and loaded.device.name != "small" and self._source is not None:
            graph, planned = self._source
            batch = self.batch_size if batch_size is None else batch_size
            small = partial(
                compiler.compile, graph, batch_size=batch, device="small", dtype=self.program.dtype, **planned
            )
            loaded = loaded_of(small())
        if paths is None:
            chosen = [p for p, of in loaded.paths.items() if of["backward"] or p == PREDICT or loaded.carried(p)]
        else:
            chosen = [
                checks.choice("export: a path", p, loaded.paths)
                for p in checks.items("paths", paths, "a list of names")
            ]
        if small is not None and caps[1] is not None and loaded.program.heap_bytes > caps[1]:
            if any(loaded.paths[p]["backward"] for p in chosen):  # else parameters are not in the heap
                loaded = loaded_of(small(memory=caps[1]))
        functions = [("step" if p == LEARN else p, p) for p in dict.fromkeys(chosen)]
        return export(loaded, functions, self, folder, Order(processor, name, batch_size, objective, format, *caps))

    def __reduce__(self) -> Any:
        """Pickled and copied as the file that `save` writes; the copy has a new heap."""
        file = BytesIO()
        self.save(file, state=True)
        own = {
            name: value
            for name, value in vars(self).items()
            if name not in ("heap", "record", "_plan", "_source", "roles", "_streams", "_orders")
        }
        return _unpickled, (file.getvalue(), type(self)), own or None


def _unpickled(data: bytes, cls: type[Model] = Model) -> Model:
    return _read(cls, BytesIO(data), None)


def graph_of(caller: str, net: Any, options: Mapping[str, Any]) -> tuple[CalcGraph, dict[str, Any]]:
    """The graph of layers, or the custom graph, which must not come with options for layers; and the options of its plan."""
    planned = {what: value for what, value in options.items() if what in compiler.PlanOptions.__annotations__}
    given = {k: v for k, v in options.items() if k not in planned and v is not None and v is not False}
    if isinstance(net, CalcGraph):
        if given:
            raise CalcError(f"{caller}: a custom graph has its {next(iter(given))} already: leave it out")
        return net, planned
    if isinstance(net, Complete) and not given:
        return net.graph(), planned
    if isinstance(net, Complete) and "input_shape" not in given:
        given["input_shape"] = net.sample_shape()
    for what, example in ("input_shape", "(784,)"), ("optimizer", "cv.Adam(1e-3)"):
        if what not in given:
            raise CalcError(f"{caller}: {what} is missing; give {what}={example}")
    return build_graph(net, **{"loss": "softmax_cross_entropy", **given}), planned


def load(path: str | PathLike[str] | BinaryIO, *, memory: int | str | None = None) -> Model:
    """A model that `Model.save` wrote, in a new heap; its program is verified.

    Nothing in the file is trusted, and reading it takes only memory of the file's size.  Running the model takes the program's
    ``heap_bytes``, whatever the file's size.  For a file from an unknown source, check ``cv.load_program(path).heap_bytes``
    first, or set a limit.

    Parameters
    ----------
    path : path, or an open binary file.
    memory : int or str, optional
        Maximum bytes of the heap, or a text such as ``"64 MiB"`` (default: the machine's memory).

    Raises
    ------
    ProgramError : the file is truncated, altered, foreign, or of an unknown version.
    PlanError : the heap would exceed ``memory``, or the machine's memory (``needed`` and ``allowed`` bytes).
    FileError : the file cannot be read.

    Examples
    --------
    >>> model = cv.Model(nn.Linear(1), input_shape=(4,), loss="mse", optimizer=cv.SGD(0.1), batch_size=8)
    >>> model.save("model.calc")
    >>> cv.load("model.calc").predict(np.zeros((2, 4))).shape
    (2, 1)
    """
    return _read(Model, path, memory)


def _read(cls: type[Model], path: str | PathLike[str] | BinaryIO, memory: int | str | None) -> Model:
    program, facts, image = files.read(path, memory)
    return _heap_of(program).adopt(program, facts, image, kind=cls)


def _heap_of(program: Program, page_folder: str | PathLike[str] | None = None) -> CalcHeap:
    """A heap for one model of a program."""
    return CalcHeap(program.heap_bytes, device=program.info.get("device", "cpu"), page_folder=page_folder)


@hints.names_of_others
class CalcHeap(ModelHeap[Model]):
    """Memory for models: ``nbytes`` bytes, allocated once; it never grows.

    Models lie side by side while they fit.  When room is needed, less recently used models are switched out: their
    persistent block (parameters, buffers, state, optimizer) is copied to the store, and back before the next use.  A switch
    plans, compiles and allocates nothing, and training continues bit for bit.

    Parameters
    ----------
    memory : int or str
        Bytes, or a text such as ``"64 MiB"``.
    store : MemoryStore or FileStore, optional
        Holds the models that are not in the heap (default: a `MemoryStore` for this heap).
    device : str
        The device whose memory it is; the models' programs must be compiled for it ("cpu" and "blas" share memory).
    page_folder : str, optional
        Folder for the page files of models planned with ``page_bytes=``, one per model in the heap.  A file takes that much
        room, and no other process sees it (default: the system's folder for temporary files, which may itself be in memory).

    Attributes
    ----------
    nbytes : int
    device : Device
    stats : switches, bytes and seconds of switching
    closed : whether `close` has given the memory back

    Examples
    --------
    >>> graph = cv.build_graph(nn.Linear(1), (4,), "mse", cv.SGD(0.1))
    >>> heap = cv.CalcHeap("1 MiB")
    >>> model = heap.create(cv.compile(graph, batch_size=8), seed=0, name="first")
    >>> model["input"], model["target"] = np.ones((8, 4)), np.ones((8, 1))
    >>> model.run_steps(100) < 1e-3
    True
    >>> heap.names
    ['first']
    """

    kind = Model
