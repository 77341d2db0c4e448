"""`Model`: a network with a loss and an optimizer, trained, evaluated, saved."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import wraps
from io import BytesIO
from os import PathLike
from typing import Any, BinaryIO, TypeVar

import numpy as np

from calcvm import checks, compiler, nn
from calcvm import functions as F
from calcvm.errors import CalcError, CalcWarning, PlanError, ProgramError, ShapeError
from calcvm.graph import CalcGraph, Variable
from calcvm.ops.dims import show
from calcvm.optim import Optimizer, optimizer_of
from calcvm.planner import Plan
from calcvm.progress import reporter
from calcvm.vm import job as layout
from calcvm.vm import methods, schema
from calcvm.vm.binding import bind
from calcvm.vm.epoch import Epoch, shuffling_key
from calcvm.vm.facts import MAX_LEARNING, MAX_ROUNDS, MAX_SEED, check_learning_batch
from calcvm.vm.feeds import IN_PLACE, numbers
from calcvm.vm.heap import CalcHeap, parse_bytes
from calcvm.vm.program import Program, Symbol
from calcvm.vm.resident import Hyper, Resident
from calcvm.vm.schema import boolean, integer, record
from calcvm.vm.serialize import read_archive, write_archive
from calcvm.vm.slices import SLICE_SECONDS

FORMAT_VERSION = 2

LOSSES = {
    "softmax_cross_entropy": F.softmax_cross_entropy,
    "binary_cross_entropy": F.binary_cross_entropy,
    "mse": F.mse,
    "mae": F.mae,
    "huber": F.huber,
}
JUDGED = {"predict.loss": "loss", "accuracy": "accuracy"}  # results of the path predict: the figure each is called
METRICS = {"softmax_cross_entropy": ("accuracy", F.accuracy)}


Method = TypeVar("Method", bound=Callable[..., Any])


def _training(method: Method) -> Method:
    """A method of `Model` whose turns belong together: what changes the model meanwhile waits for its end."""

    @wraps(method)
    def whole(self: Model, *args: Any, **options: Any) -> Any:
        tenant = self.resident.tenant
        with tenant.change:
            try:
                tenant.begin_training()
                return method(self, *args, **options)
            finally:
                tenant.trains = 0

    return whole  # type: ignore[return-value]


@dataclass
class History:
    """Figures of each epoch, by name: ``loss``, ``seconds``, and with validation data ``val_loss``, ``val_accuracy``.

    ``stopped`` says why training ended, and from which epoch on the loss was not finite.
    """

    epochs: list[dict[str, float]] = field(default_factory=list)
    stopped: str = "all epochs done"

    def __getitem__(self, name: str) -> list[float]:
        known = dict.fromkeys(k for e in self.epochs for k in e)
        if self.epochs and not (isinstance(name, str) and name in known):
            raise CalcError(f"no figure {checks.shown(name)} of the epochs; there are {', '.join(known)}")
        return [e[name] for e in self.epochs if name in e]

    def __iter__(self) -> Iterator[dict[str, float]]:
        return iter(self.epochs)

    def __len__(self) -> int:
        return len(self.epochs)


class Model(methods.Native):
    """A network compiled for training.

    Parameters
    ----------
    net : nn.Layer
        Layers, composed by ``>>``.
    input_shape : tuple of int
        Shape of one sample.
    loss : str or callable
        "softmax_cross_entropy" (integer labels), "binary_cross_entropy", "mse", "mae", "huber", or a
        function of (output, target) variables.
    optimizer : Optimizer or str
        Such as ``cv.Adam(1e-3)``, or ``"adam"`` with its default learning rate.
    batch_size : int, optional
        Samples of a step; without it, as many as ``memory`` allows.
    learning_batch : int, optional
        Samples an update is made from, where that is more than ``batch_size``: rounds add up.
    target_shape : tuple of int, optional
        Shape of one target (default: a label for softmax_cross_entropy, else the output's shape).
    preprocess : nn.Layer, optional
        Layers without parameters applied to the raw input, as a path of their own.
    seed, dtype, workers, memory, device, mode, precision : see `calcvm.plan`.
    """

    def __init__(
        self,
        net: nn.Layer,
        *,
        input_shape: tuple[int, ...],
        loss: Any = "softmax_cross_entropy",
        optimizer: Optimizer | str,
        batch_size: int | None = None,
        learning_batch: int | None = None,
        target_shape: tuple[int, ...] | None = None,
        preprocess: nn.Layer | None = None,
        memory: int | str | None = None,
        seed: int = 0,
        dtype: str = "float32",
        device: str = "cpu",
        workers: int | None = None,
        mode: str | None = None,
        precision: str = "float32",
        heap: CalcHeap | None = None,
        name: str | None = None,
    ):
        if heap is not None:
            checks.one_of("Model: heap", heap, CalcHeap, 'a heap such as cv.CalcHeap("1 MiB")')
        if learning_batch is not None:
            learning_batch = checks.integer("learning_batch", learning_batch)
        graph = build_graph(net, input_shape, loss, optimizer, target_shape, preprocess)
        accumulate = learning_batch is not None
        self._plan: Plan | None = compiler.plan(
            graph, batch_size=batch_size, memory=memory, dtype=dtype, device=device, workers=workers,
            accumulate=accumulate, mode=mode, precision=precision,
        )  # fmt: skip
        program = compiler.compile(graph, plan=self._plan)
        if learning_batch is not None:
            check_learning_batch(program, learning_batch)
        self.resident: Resident = (heap or _heap_of(program)).load(program, seed=seed, name=name)
        self.learning_batch = learning_batch or program.batch_size

    @classmethod
    def on(cls, resident: Resident) -> Model:
        """A model of a heap (`CalcHeap.load`, `CalcHeap.open`) to fit, evaluate and save.

        Its program must be of a graph that `build_graph` makes: placeholders input and target, paths learn and predict, a
        result output.
        """
        checks.one_of("Model.on", resident, Resident, "a model of a heap (heap.load, heap.open)")
        missing = {"learn", "predict"} - {*resident.program.paths}
        missing |= {"input", "target", "output"} - {*resident.binding.variables}
        if missing:
            raise CalcError(
                f"the program of {resident!r} is not of build_graph: it has no {', '.join(sorted(missing))}"
            )
        model = cls.__new__(cls)
        model._plan, model.resident = None, resident
        return model

    # ------------------------------------------------------------ what it is
    def __repr__(self) -> str:
        sizes = ", ".join(f"{name} {show(self.resident.binding.forms[name])}" for name in ("input", "output"))
        n = sum(self.resident.binding.symbol(name).elems.b for name in self.program.info["parameters"])
        return f"<Model {self.resident.name!r}: {sizes}, {n:,} parameters, {self.epochs_done} epochs done>"

    @property
    def plan(self) -> Plan:
        """The plan it was compiled from (of a loaded model only the program is kept)."""
        if self._plan is None:
            raise CalcError(
                "a loaded model has no plan; its program has the offsets: print(model.program.disassemble())"
            )
        return self._plan

    @property
    def program(self) -> Program:
        return self.resident.program

    @property
    def heap(self) -> CalcHeap:
        return self.resident.heap

    @property
    def batch_size(self) -> int:
        return self.program.batch_size

    @property
    def learning_batch(self) -> int:
        """Samples an update is made from."""
        return self.resident.facts.get("learning_batch", self.batch_size)

    @learning_batch.setter
    def learning_batch(self, n: int) -> None:
        """At least the batch (CalcError: more than that, and the program does not add gradients up)."""
        self.resident.facts["learning_batch"] = n

    @property
    def epochs_done(self) -> int:
        return self.resident.facts["rounds"]

    @property
    def parameters(self) -> dict[str, np.ndarray]:
        """Parameters by name, as views into the heap (of a heap's several models: see `Resident.parameters`)."""
        return self.resident.parameters

    @property
    def hyper(self) -> Hyper:
        """Hyperparameters by name; setting one takes effect with the next step."""
        return self.resident.hyper("learn")

    def grad(self, name: str) -> np.ndarray:
        """Gradient of a parameter after the last step (kept for small parameters, or with `learning_batch`)."""
        return self.resident.grad(name, "learn")

    def __getitem__(self, name: str) -> Any:
        return self.resident[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.resident[name] = value

    # ------------------------------------------------------------ steps
    def step(self, x: Any, y: Any) -> float:
        """One training step on a batch of at most ``batch_size`` samples; returns its loss.

        The model is unchanged if the data are refused.
        """
        loss = self.resident.step(x, y, path="learn")
        assert loss is not None
        methods.offer(self)
        return loss

    def run_steps(self, n: int) -> float:
        """``n`` training steps on the data already in the heap, in one call; returns the last loss."""
        loss = self.resident.run_steps(n, "learn")
        assert loss is not None
        methods.offer(self)
        return loss

    def bind(self, x: Any, y: Any) -> Callable[[], float]:
        """A function that makes a training step on what ``x`` and ``y`` hold when it is called; returns its loss.

        They are read where they are: C-contiguous arrays of float32, float64, uint8, int32 or int64, of one batch.

        Raises
        ------
        CalcError : they are no such arrays, or do not fit.
        """
        for name, array in ("input", x), ("target", y):
            if not (isinstance(array, np.ndarray) and array.dtype in IN_PLACE and array.flags.c_contiguous):
                raise CalcError(
                    f"bind: {name} is to be read where it is, which needs a C-contiguous array of "
                    f"{', '.join(map(str, IN_PLACE))}, not {checks.called(array)}: np.ascontiguousarray(...), or step(x, y)"
                )
            self.resident.check(name, array)
        return methods.bound_step(self, (x, y))

    def run(self, inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Outputs by name for a batch of inputs by name."""
        checks.one_of("run: inputs", inputs, Mapping, 'a mapping such as {"input": X}')
        resident = self.resident
        arrays = {name: numbers(name, value) for name, value in inputs.items()}
        batches = {name: resident.check_placeholder(name, array) for name, array in arrays.items()}
        with resident.tenant.turn.mine:
            resident.place(arrays, batches)
            resident.run_round("predict", ("forward",))
            return {"output": resident["output"]}

    # ------------------------------------------------------------ whole data sets
    @_training
    def fit(
        self,
        X: Any,
        y: Any,
        epochs: int = 1,
        *,
        validation: tuple[Any, Any] | float | None = None,
        patience: int | None = None,
        shuffle: bool = True,
        check_finite: bool = False,
        terminate_on_nan: bool = False,
        progress: bool = True,
    ) -> History:
        """Train for whole epochs in compiled code, reading the arrays where they are.

        Parameters
        ----------
        X : ndarray, shape (n, *input_shape), float32, float64, uint8, int32 or int64
            C-contiguous arrays of these types, in the machine's byte order, are not copied; other numbers are converted.
        y : ndarray, shape (n, *target_shape) or (n,) labels
        validation : (X, y), or the share of samples at the end of the data to hold out.
        patience : int, optional
            Stop when the validation loss has not fallen for so many epochs.
        check_finite : bool
            Refuse data with NaN or Inf.
        terminate_on_nan : bool
            Stop after an epoch whose loss is not finite.  Otherwise training goes on, with a `CalcWarning`.
        progress : bool
            A bar on a terminal (extra ``cli``), one line an epoch elsewhere.

        Returns
        -------
        History : figures of each epoch.  Ctrl-C ends training between two steps; the model stays usable.
        """
        epochs = checks.integer("epochs", epochs)
        shuffle, check_finite = checks.flag("shuffle", shuffle), checks.flag("check_finite", check_finite)
        terminate_on_nan, progress = (
            checks.flag("terminate_on_nan", terminate_on_nan),
            checks.flag("progress", progress),
        )
        X, y, held = self._split(X, y, validation)
        if patience is not None:
            patience = checks.integer("patience", patience, 0)
            if held is None:
                raise CalcError("patience needs validation data: give validation=(X, y) or a share such as 0.2")
        train = Epoch(
            self.resident, {"input": X, "target": y}, "learn", train=True,
            learning=self.learning_batch, results=["loss"], check_finite=check_finite,
        )  # fmt: skip
        judge = self.judge({"input": held[0], "target": held[1]}, check_finite) if held is not None else None
        history, best, since, diverged = History(), np.inf, 0, ""
        report = reporter(epochs, train.rounds, progress)
        try:
            for epoch in range(epochs):
                start = time.perf_counter()
                train.begin(self._key() if shuffle else None)
                for done in train.slices(SLICE_SECONDS):
                    report.step(epoch, done, train.mean("loss"))
                self.resident.facts["rounds"] += 1
                self.resident.commit()
                figures = {"loss": train.mean("loss")}
                if judge is not None:
                    figures |= {f"val_{k}": v for k, v in judge().items()}
                report.epoch(epoch, figures)
                history.epochs.append({**figures, "seconds": time.perf_counter() - start})
                if not diverged and not np.isfinite(figures["loss"]):
                    diverged = f"the loss of epoch {epoch + 1} is {figures['loss']}"
                    if terminate_on_nan:
                        history.stopped = diverged
                        break
                if judge is not None and patience is not None:
                    best, since = (figures["val_loss"], 0) if figures["val_loss"] < best else (best, since + 1)
                    if since >= patience:
                        history.stopped = f"the validation loss has not fallen for {patience} epochs"
                        break
        except KeyboardInterrupt:
            history.stopped = "interrupted"
        finally:
            report.close()
        if diverged and not terminate_on_nan:
            history.stopped += f"; {diverged}"
            warnings.warn(
                f"{diverged}, and training went on: take a smaller learning rate, look for NaN in the data with "
                "check_finite=True, or stop there with terminate_on_nan=True",
                CalcWarning,
                stacklevel=3,  # the line that calls fit: `_training` is between
            )
        return history

    def evaluate(self, X: Any, y: Any, *, check_finite: bool = False) -> dict[str, float]:
        """Loss, and accuracy where it has a meaning, over a data set, without dropout."""
        return self.judge({"input": _samples("X", X), "target": _samples("y", y)}, check_finite)()

    def predict(self, X: Any, *, out: np.ndarray | None = None) -> np.ndarray:
        """Outputs of the network for a data set, shape (n, *output_shape), without dropout.

        out : where to put them: a C-contiguous array of this shape and the model's dtype.
        """
        X = _samples("X", X)
        n = self.resident.check("input", X, samples=True)
        shape = (n, *(size.b for size in self.resident.binding.forms["output"][1:]))
        if out is None:
            out = np.empty(shape, self.program.dtype)
        elif not (
            isinstance(out, np.ndarray) and out.shape == shape and out.dtype == self.program.dtype
            and out.flags.c_contiguous and out.flags.writeable
        ):  # fmt: skip
            raise ShapeError(
                f"predict: out must be a C-contiguous, writeable array of {self.program.dtype} {shape}, not "
                f"{checks.called(out)}"
            )
        tenant, run = self.resident.tenant, Epoch(self.resident, {"input": X}, "predict", outputs={"output": out})
        with tenant.turn.mine:
            start = time.perf_counter()
            run.whole(SLICE_SECONDS)
            if tenant.calls is not None and n <= self.batch_size:
                tenant.calls.arm(self.resident, layout.PREDICT, n, time.perf_counter() - start)
        methods.offer(self)
        return out

    def _trapped(self) -> None:
        """Say what a kernel trapped in a compiled method."""
        with self.resident.tenant.turn.mine:
            self.resident.frame.check()

    def judge(self, data: Mapping[str, np.ndarray], check_finite: bool = False) -> Callable[[], dict[str, float]]:
        """A function that evaluates the model as it is when called, on ``input`` and ``target``.

        With ``output`` in place of ``input`` it evaluates those outputs, whoever computed them.
        """
        names, check_finite = judged(self.program), checks.flag("check_finite", check_finite)
        run = Epoch(self.resident, data, "predict", results=names, check_finite=check_finite)

        def judge() -> dict[str, float]:
            with self.resident.tenant.turn.mine:
                run.whole(SLICE_SECONDS)
                return {JUDGED[name]: run.mean(name) for name in names}

        return judge

    def _split(self, X: Any, y: Any, validation: Any) -> tuple[np.ndarray, np.ndarray, Any]:
        X, y = _samples("X", X), _samples("y", y)
        if len(X) != len(y):
            raise ShapeError(f"X has {len(X)} samples, y has {len(y)}")
        if validation is None:
            return X, y, None
        if not checks.is_number(validation):
            return X, y, _held_out(validation)
        share = checks.number("validation", validation, 0, 1, ends="()", unless=", the share of samples, or (X, y)")
        keep = len(X) - round(len(X) * share)
        if not 0 < keep < len(X):
            raise CalcError(f"validation={share}: no samples are left on one side of {len(X)}")
        return X[:keep], y[:keep], (X[keep:], y[keep:])

    def _key(self) -> int:
        """Shuffling key of the next epoch."""
        return shuffling_key(self.resident.seed, self.epochs_done)

    # ------------------------------------------------------------ files
    def save(self, path: str | PathLike[str] | BinaryIO) -> None:
        """Write program, parameters, optimizer state and counters to one file, without pickle.

        ``path`` may be a binary file that is open.

        Raises
        ------
        FileError : it cannot be written; a file that was there is unchanged.
        """
        documents, arrays = self.program.to_parts()
        resident = self.resident
        with resident.tenant.turn.mine:
            documents["model"] = {
                "seed": resident.seed,
                "epochs": self.epochs_done,
                "learning_batch": self.learning_batch,
                "open": resident.adding,
            }
            image = resident.image()
        for key, cells in _state(self.program, image):
            arrays[key] = cells
        write_archive(path, documents, arrays, kind="model", version=FORMAT_VERSION)

    def __reduce__(self) -> Any:
        """Pickled and copied as the file that `save` writes; the copy has a heap of its own."""
        file = BytesIO()
        self.save(file)
        return _unpickled, (file.getvalue(),)


def _samples(what: str, data: Any) -> np.ndarray:
    """A data set as an array, samples first."""
    array = numbers(what, data)
    if array.ndim == 0:
        hint = f"; give its arrays, such as list({what}.values())" if isinstance(data, Mapping) else ""
        raise CalcError(f"{what}: an array of samples is wanted, not {checks.called(data)}{hint}")
    return array


def _held_out(validation: Any) -> tuple[np.ndarray, np.ndarray]:
    """The samples and targets of validation data."""
    if not isinstance(validation, (tuple, list)) or len(validation) != 2:
        n = f"a {type(validation).__name__} of {len(validation)}" if isinstance(validation, (tuple, list)) else None
        raise CalcError(
            "validation: (X, y) or a share of the samples such as 0.2 is wanted, not "
            f"{n or checks.called(validation)}"
            + (": there are no sample weights" if n and len(validation) == 3 else "")
        )
    X, y = validation
    return _samples("validation X", X), _samples("validation y", y)


def judged(program: Program) -> list[str]:
    """Results that a model is judged by, of those in `JUDGED`."""
    return [name for name in JUDGED if name in program.info["variables"]]


def persistent(program: Program) -> dict[int, Symbol]:
    """Symbols whose values a model is, by number: what a file must hold."""
    return {i: s for i, s in enumerate(program.symbols) if s.persistent and not s.members}


def _state(program: Program, image: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Views of all that persists in an image with its gradients, by the name of its array in a file: its number."""
    start, elements = bind(program).opened[0] // program.itemsize, image.view(program.dtype)
    for i, s in persistent(program).items():
        yield f"state/{i}", elements[s.offset - start : s.offset - start + s.elems.b]


def _heap_of(program: Program) -> CalcHeap:
    """A heap for one model of a program."""
    return CalcHeap(program.heap_bytes, device=program.info.get("device", "cpu"))


_MODEL = record(
    {"seed": integer(0, MAX_SEED), "epochs": integer(0, MAX_ROUNDS), "learning_batch": integer(1, MAX_LEARNING)},
    optional={"open": boolean},
)


def load(path: str | PathLike[str] | BinaryIO, *, memory: int | str | None = None) -> Model:
    """A model that `Model.save` wrote, in a heap of its own; its program is verified.

    Nothing of the file is trusted, and the memory for its content is that of its size.  Running a model takes its
    program's ``heap_bytes``, whatever the file's size: look at those of a stranger's file before, by
    ``cv.load_program(path).heap_bytes``, or set a limit.

    Parameters
    ----------
    path : path, or a binary file that is open.
    memory : int or str, optional
        The most bytes that the heap may take, or a text such as ``"64 MiB"`` (default: the machine's memory).

    Raises
    ------
    ProgramError : the file is truncated, altered, foreign, or of an unknown version.
    PlanError : the heap would be larger than ``memory``, or than the machine's (``needed`` and ``allowed`` bytes).
    FileError : it cannot be read.
    """
    archive = read_archive(path, kinds=("model",), versions=(FORMAT_VERSION,))
    program = Program.from_parts(archive.documents, archive.arrays, where=archive.name)
    where = f"{archive.name}: document 'model'"
    facts = {"program": program.hash, **schema.check(_MODEL, archive.document("model"), where)}
    facts["rounds"] = facts.pop("epochs")
    check_learning_batch(program, facts["learning_batch"], f"{where}.", ProgramError)
    for i, s in persistent(program).items():  # before any memory is asked for
        given = archive.array(f"state/{i}")
        if given.shape != (s.elems.b,) or given.dtype != program.dtype:
            raise ProgramError(
                f"{archive.name}: the state of {s.name!r} is {given.dtype} of shape {given.shape}, "
                f"{program.dtype} of shape {(s.elems.b,)} is wanted"
            )
    allowed = None if memory is None else parse_bytes(memory)
    if allowed is not None and program.heap_bytes > allowed:
        raise PlanError(
            f"{archive.name}: its heap takes {program.heap_bytes:,} bytes, memory= allows {allowed:,}",
            program.heap_bytes,
            allowed,
        )
    heap = _heap_of(program)
    start, stop = bind(program).opened
    image = np.zeros(stop - start, np.uint8)
    for key, cells in _state(program, image):
        cells.view(np.uint8)[:] = archive.array(key).view(np.uint8)
    return Model.on(heap.adopt(program, facts, image))


def _unpickled(data: bytes) -> Model:
    return load(BytesIO(data))


def build_graph(
    net: nn.Layer,
    input_shape: tuple[int, ...],
    loss: Any,
    optimizer: Optimizer | str,
    target_shape: tuple[int, ...] | None = None,
    preprocess: nn.Layer | None = None,
) -> CalcGraph:
    """The graph of a `Model`: paths preprocess (if given), learn, and predict (without dropout)."""
    loss_fn = LOSSES.get(loss) if isinstance(loss, str) else loss
    if not callable(loss_fn) or isinstance(loss_fn, (type, nn.Layer)):
        raise CalcError(f"loss {checks.shown(loss)} is unknown; take one of {', '.join(LOSSES)} or a function")
    input_shape = checks.sizes("input_shape, the shape of one sample,", input_shape)
    if target_shape is not None:
        target_shape = checks.sizes("target_shape, the shape of one target,", target_shape)
    optimizer = optimizer_of(optimizer)
    network = nn.Sequential(net)
    g = CalcGraph()

    def loss_of(y: Variable, target: Variable, name: str) -> Variable:
        wanted = "a function of (output, target) that returns a variable of one element"
        return checks.one_of("loss", loss_fn(y, target), Variable, wanted).rename(name)

    x = g.placeholder("input", (None, *input_shape))
    if preprocess is not None:
        with g.path("preprocess", adopt=False):
            x = nn.Sequential(preprocess).build(x, "preprocess.", training=False)
    with g.path("learn", backward=True, adopt=False) as learn:
        y = network.build(x, training=True)
        if target_shape is None:
            target_shape = () if loss == "softmax_cross_entropy" else tuple(s.b for s in y.shape[1:])
        target = g.placeholder("target", (None, *target_shape))
        learn.minimize(loss_of(y, target, "loss"), optimizer, output=y)
    with g.path("predict", adopt=False) as predict:
        predict.output = output = network.build(x, training=False).rename("output")
        loss_of(output, target, "predict.loss")
        if isinstance(loss, str) and loss in METRICS:
            name, metric = METRICS[loss]
            metric(output, target).rename(name)
    return g
