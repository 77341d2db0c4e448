"""`Model`: a network with a loss and an optimizer, trained, evaluated, saved."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import numpy as np

from calcvm import compiler, nn
from calcvm import functions as F
from calcvm.errors import CalcError, ProgramError, ShapeError
from calcvm.graph import CalcGraph
from calcvm.ops.dims import Affine
from calcvm.optim import Optimizer
from calcvm.planner import Plan
from calcvm.progress import reporter
from calcvm.vm.epoch import Epoch, shuffling_key
from calcvm.vm.heap import CalcHeap
from calcvm.vm.program import Program, Symbol
from calcvm.vm.resident import Hyper, Resident
from calcvm.vm.serialize import read_archive, write_archive

FORMAT_VERSION = 2
SLICE_SECONDS = 0.1  # compiled code returns to Python this often: for the bar, and for Ctrl-C

LOSSES = {
    "softmax_cross_entropy": F.softmax_cross_entropy,
    "binary_cross_entropy": F.binary_cross_entropy,
    "mse": F.mse,
    "mae": F.mae,
    "huber": F.huber,
}
JUDGED = {"predict.loss": "loss", "accuracy": "accuracy"}  # results of the path predict: the figure each is called
METRICS = {"softmax_cross_entropy": ("accuracy", F.accuracy)}


@dataclass
class History:
    """Figures of each epoch, by name: ``loss``, ``val_loss``, ``accuracy``, ``seconds``, ..."""

    epochs: list[dict[str, float]] = field(default_factory=list)
    stopped: str = "all epochs done"

    def __getitem__(self, name: str) -> list[float]:
        return [e[name] for e in self.epochs if name in e]

    def __len__(self) -> int:
        return len(self.epochs)


class Model:
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
    optimizer : Optimizer
        Such as ``cv.Adam(1e-3)``.
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
        optimizer: Optimizer,
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
        graph = build_graph(net, input_shape, loss, optimizer, target_shape, preprocess)
        accumulate = learning_batch is not None
        self._plan: Plan | None = compiler.plan(
            graph, batch_size=batch_size, memory=memory, dtype=dtype, device=device, workers=workers,
            accumulate=accumulate, mode=mode, precision=precision,
        )  # fmt: skip
        program = compiler.compile(graph, plan=self._plan)
        if learning_batch is not None and learning_batch < program.batch_size:
            raise CalcError(f"learning_batch={learning_batch} is below the batch of {program.batch_size}")
        self.resident: Resident = (heap or _heap_of(program)).load(program, seed=seed, name=name)
        self.learning_batch = learning_batch or program.batch_size

    @classmethod
    def on(cls, resident: Resident) -> Model:
        """A model of a heap (`CalcHeap.load`, `CalcHeap.open`) to fit, evaluate and save.

        Its program must be of a graph that `build_graph` makes: placeholders input and target, paths learn and predict.
        """
        missing = {"learn", "predict"} - {*resident.program.paths}
        missing |= {"input", "target"} - {*resident.binding.variables}
        if missing:
            raise CalcError(
                f"the program of {resident!r} is not of build_graph: it has no {', '.join(sorted(missing))}"
            )
        model = cls.__new__(cls)
        model._plan, model.resident = None, resident
        return model

    # ------------------------------------------------------------ what it is
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
        return loss

    def run_steps(self, n: int) -> float:
        """``n`` training steps on the data already in the heap, in one call; returns the last loss."""
        loss = self.resident.run_steps(n, "learn")
        assert loss is not None
        return loss

    def run(self, inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Outputs by name for a batch of inputs by name."""
        with self.resident:
            for name, value in inputs.items():
                self.resident[name] = value
            self.resident.run_round("predict", ("forward",))
            return {"output": self.resident["output"]}

    # ------------------------------------------------------------ whole data sets
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
        progress: bool = True,
    ) -> History:
        """Train for whole epochs in compiled code, reading the arrays where they are.

        Parameters
        ----------
        X : ndarray, shape (n, *input_shape), float32, float64, uint8, int32 or int64
            C-contiguous arrays of these types are not copied.
        y : ndarray, shape (n, *target_shape) or (n,) labels
        validation : (X, y), or the share of samples at the end of the data to hold out.
        patience : int, optional
            Stop when the validation loss has not fallen for so many epochs.
        check_finite : bool
            Refuse data with NaN or Inf.
        progress : bool
            A bar on a terminal (extra ``cli``), one line an epoch elsewhere.

        Returns
        -------
        History : figures of each epoch.  Ctrl-C ends training between two steps; the model stays usable.
        """
        X, y, held = self._split(X, y, validation)
        if patience is not None and held is None:
            raise CalcError("patience needs validation data: give validation=(X, y) or a share such as 0.2")
        train = Epoch(
            self.resident, {"input": X, "target": y}, "learn", train=True,
            learning=self.learning_batch, results=["loss"], check_finite=check_finite,
        )  # fmt: skip
        judge = self.judge({"input": held[0], "target": held[1]}, check_finite) if held is not None else None
        history, best, since = History(), np.inf, 0
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
                if judge is not None and patience is not None:
                    best, since = (figures["val_loss"], 0) if figures["val_loss"] < best else (best, since + 1)
                    if since >= patience:
                        history.stopped = f"the validation loss has not fallen for {patience} epochs"
                        break
        except KeyboardInterrupt:
            history.stopped = "interrupted"
        finally:
            report.close()
        return history

    def evaluate(self, X: Any, y: Any, *, check_finite: bool = False) -> dict[str, float]:
        """Loss, and accuracy where it has a meaning, over a data set, without dropout."""
        return self.judge({"input": np.asarray(X), "target": np.asarray(y)}, check_finite)()

    def predict(self, X: Any) -> np.ndarray:
        """Outputs of the network for a data set, shape (n, *output_shape), without dropout."""
        X = np.asarray(X)
        n = self.resident.check("input", X, samples=True)
        shape = [Affine(*s) for s in self.program.info["variables"]["output"]["shape"]]
        out = np.empty((n, *(s.b for s in shape[1:])), self.program.dtype)
        run = Epoch(self.resident, {"input": X}, "predict", outputs={"output": out})
        run.whole(SLICE_SECONDS)
        return out

    def judge(self, data: Mapping[str, np.ndarray], check_finite: bool = False) -> Callable[[], dict[str, float]]:
        """A function that evaluates the model as it is when called, on ``input`` and ``target``.

        With ``output`` in place of ``input`` it evaluates those outputs, whoever computed them.
        """
        names = judged(self.program)
        run = Epoch(self.resident, data, "predict", results=names, check_finite=check_finite)

        def judge() -> dict[str, float]:
            run.whole(SLICE_SECONDS)
            return {JUDGED[name]: run.mean(name) for name in names}

        return judge

    def _split(self, X: Any, y: Any, validation: Any) -> tuple[np.ndarray, np.ndarray, Any]:
        X, y = np.asarray(X), np.asarray(y)
        if len(X) != len(y):
            raise ShapeError(f"X has {len(X)} samples, y has {len(y)}")
        if isinstance(validation, float):
            keep = len(X) - round(len(X) * validation)
            if not 0 < keep < len(X):
                raise CalcError(f"validation={validation}: no samples are left on one side of {len(X)}")
            return X[:keep], y[:keep], (X[keep:], y[keep:])
        return X, y, None if validation is None else tuple(map(np.asarray, validation))

    def _key(self) -> int:
        """Shuffling key of the next epoch."""
        return shuffling_key(self.resident.seed, self.epochs_done)

    # ------------------------------------------------------------ files
    def save(self, path: str | PathLike[str]) -> None:
        """Write program, parameters, optimizer state and counters to one file, without pickle."""
        documents, arrays = self.program.to_parts()
        documents["model"] = {
            "seed": self.resident.seed,
            "epochs": self.epochs_done,
            "learning_batch": self.learning_batch,
        }
        with self.resident as frame:
            image = frame.get_image(open=True)
        for number, cells in _state(self.resident, image):
            arrays[f"state/{number}"] = cells
        write_archive(path, documents, arrays, kind="model", version=FORMAT_VERSION)


def judged(program: Program) -> list[str]:
    """Results that a model is judged by, of those in `JUDGED`."""
    return [name for name in JUDGED if name in program.info["variables"]]


def persistent(program: Program) -> dict[int, Symbol]:
    """Symbols whose values a model is, by number: what a file must hold."""
    return {i: s for i, s in enumerate(program.symbols) if s.persistent and not s.members}


def _state(resident: Resident, image: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Views of all that persists in an image with its gradients, by number of the symbol."""
    start, elements = resident.binding.opened[0] // resident.program.itemsize, image.view(resident.program.dtype)
    for number, s in persistent(resident.program).items():
        yield number, elements[s.offset - start : s.offset - start + s.elems.b]


def _heap_of(program: Program) -> CalcHeap:
    """A heap for one model of a program."""
    return CalcHeap(program.heap_bytes, device=program.info.get("device", "cpu"))


def load(path: str | PathLike[str]) -> Model:
    """A model that `Model.save` wrote; its program is verified.

    Raises
    ------
    ProgramError : the file is truncated, altered, foreign, or of an unknown version.
    """
    archive = read_archive(path, kind="model", versions=(FORMAT_VERSION,))
    where = os.fspath(path)
    program = Program.from_parts(archive.documents, archive.arrays, where=str(where))
    try:
        facts = archive.documents["model"]
        resident = _heap_of(program).load(program, seed=int(facts["seed"]))
        resident.facts.update(rounds=int(facts["epochs"]), learning_batch=int(facts["learning_batch"]))
        with resident as frame:
            image = frame.get_image(open=True)
            for number, cells in _state(resident, image):
                given = archive.arrays[f"state/{number}"]
                if given.shape != cells.shape or given.dtype != program.dtype:
                    name = program.symbols[number].name
                    raise ProgramError(
                        f"{where}: the state of {name!r} has shape {given.shape}, {cells.shape} is wanted"
                    )
                cells.view(np.uint8)[:] = given.view(np.uint8)
            frame.set_image(image, open=True)
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ProgramError(f"{where}: not a whole model ({error}): save it again") from None
    return Model.on(resident)


def build_graph(
    net: nn.Layer,
    input_shape: tuple[int, ...],
    loss: Any,
    optimizer: Optimizer,
    target_shape: tuple[int, ...] | None = None,
    preprocess: nn.Layer | None = None,
) -> CalcGraph:
    """The graph of a `Model`: paths preprocess (if given), learn, and predict (without dropout)."""
    loss_fn = LOSSES.get(loss) if isinstance(loss, str) else loss
    if loss_fn is None:
        raise CalcError(f"loss {loss!r} is unknown; take one of {', '.join(LOSSES)} or a function")
    network = nn.Sequential(net)
    g = CalcGraph()
    x = g.placeholder("input", (None, *input_shape))
    if preprocess is not None:
        with g.path("preprocess", adopt=False):
            x = nn.Sequential(preprocess).build(x, "preprocess.", training=False)
    with g.path("learn", backward=True, adopt=False) as learn:
        y = network.build(x, training=True)
        if target_shape is None:
            target_shape = () if loss == "softmax_cross_entropy" else tuple(s.b for s in y.shape[1:])
        target = g.placeholder("target", (None, *target_shape))
        learn.minimize(loss_fn(y, target).rename("loss"), optimizer, output=y)
    with g.path("predict", adopt=False) as predict:
        predict.output = output = network.build(x, training=False).rename("output")
        loss_fn(output, target).rename("predict.loss")
        if loss in METRICS:
            name, metric = METRICS[loss]
            metric(output, target).rename(name)
    return g
