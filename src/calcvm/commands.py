"""The commands of ``calcvm``: demo, plan, train, evaluate, predict, run, convert, export, dis, warm, info (extra ``cli``)."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from inspect import signature
from math import isqrt, prod
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Annotated

import numpy as np
import typer

import calcvm as cv
from calcvm import data as datasets
from calcvm import files, nn, report
from calcvm import warm as ahead
from calcvm.errors import CalcError, MissingExtra, ProgramError, telling
from calcvm.kernels_cpu._native import cache_root
from calcvm.model.scores import scores_of
from calcvm.vm.run.feeds import readable

app = typer.Typer(
    help="Train small neural networks in known memory.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"max_content_width": 120},
    rich_markup_mode=None,  # rich shows flags as options that take a <bool>
    pretty_exceptions_enable=False,
)

HELD_OUT = 0.2
# the demo fails below this held-out accuracy, after its default number of epochs
ENOUGH = {"mlp": 0.96, "lenet": 0.98, "resnet18": 0.97}
LARGEST_LAYER, LARGEST_BATCH = 1 << 30, 1 << 40
ACTIVATIONS: dict[str, Callable[..., nn.Layer]] = {
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "elu": nn.ELU,
}
USUAL = "relu"
Data = Annotated[
    Path, typer.Argument(help="A .npz file with X (samples first) and y, or a table, .csv with a header or .parquet.")
]
Target = Annotated[str, typer.Option(help="Of a table: the column to predict; the others are the input.")]
Labels = Annotated[
    str | None, typer.Option(help="Of a table: the column to predict (default: that of the training, or y).")
]
Layers = Annotated[
    str, typer.Argument(help="Sizes of the layers, the input's first: 784-64-64-10; or a file, net.onnx.")
]
OfFile = Annotated[
    str | None, typer.Option(help="For a file of ONNX: that of training it (default: it only predicts).")
]
BatchSize = Annotated[int | None, typer.Option(min=1, max=LARGEST_BATCH, help="The largest batch.")]
Memory = Annotated[
    str | None,
    typer.Option(
        help='A budget, such as "64 MiB": the largest batch that fits; with --batch-size a limit, met by recomputing values.'
    ),
]
Activation = Annotated[str, typer.Option(help=f"Of the hidden layers: {', '.join(ACTIVATIONS)}.")]
Seed = Annotated[int, typer.Option(min=0, help="Of the initial weights and the shuffling: same seed, same bits.")]
Workers = Annotated[int | None, typer.Option(min=1, help="Size of the team (default: chosen by the plan's cost).")]


def network(layers: str, activation: str) -> tuple[nn.Sequential, int, int]:
    """The layers of a text such as ``784-64-64-10``, and the sizes of input and output."""
    parts = layers.split("-")
    if len(parts) < 2 or not all(p.isdecimal() and int(p) > 0 for p in parts):
        hint = f" (networks of the zoo: {', '.join(cv.zoo.__all__)})" if parts[0][:1].isalpha() else ""
        raise CalcError(f"layers {layers!r}: give two sizes or more, joined by '-', such as 784-64-64-10{hint}")
    if activation not in ACTIVATIONS:
        raise CalcError(f"activation {activation!r} is unknown: take one of {', '.join(ACTIVATIONS)}")
    sizes = [int(p) for p in parts]
    if max(sizes) > LARGEST_LAYER:
        raise CalcError(f"layers {layers!r}: a layer has at most {LARGEST_LAYER:,} units")
    net = nn.Sequential(nn.Linear(sizes[1]))
    for size in sizes[2:]:
        net = net >> ACTIVATIONS[activation]() >> nn.Linear(size)
    return net, sizes[0], sizes[-1]


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=lambda wanted: _say_version(wanted), help="Print the version."
        ),
    ] = False,
) -> None:
    pass


def _say_version(wanted: bool) -> None:
    if wanted:
        print(f"calcvm {cv.__version__}")
        raise typer.Exit


def check_target(path: Path, *read: Path, picture: bool = False) -> None:
    """Raise CalcError early if a result cannot be written to a path, or the path is one of ``read``, the command's inputs."""
    if path.is_dir():
        raise CalcError(f"{path} is a folder: name a file")
    if any(path.exists() and other.exists() and path.samefile(other) for other in read):
        raise CalcError(f"{path} is an input of the command, and would be overwritten: name another file to write to")
    folder = files.place(path).parent
    if not folder.is_dir():
        raise CalcError(f"{path} cannot be written: there is no folder {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise CalcError(f"{path} cannot be written: the folder {folder} is read-only")
    with (
        telling(str(path), "written"),
        TemporaryFile(dir=folder),
    ):  # os.access says yes for some, such as /proc
        pass
    if picture:
        try:
            from matplotlib.backend_bases import FigureCanvasBase
        except ImportError as error:
            raise MissingExtra("matplotlib", "plot", "a picture of a plan") from error
        formats = FigureCanvasBase.get_supported_filetypes()
        if path.suffix[1:].lower() not in formats:
            raise CalcError(
                f"{path}: pictures cannot be written as {path.suffix or 'a file without suffix'!r}; take one of {', '.join(formats)}"
            )


@app.command()
def demo(
    network: Annotated[str, typer.Option(help="mlp, the paper's, lenet or resnet18.")] = "mlp",
    data: Annotated[
        Path | None,
        typer.Option(help="Directory of MNIST's or Fashion-MNIST's files, or CIFAR-10's (default: bundled digits)."),
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Default: 20; 30 for mlp on the digits.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, max=LARGEST_BATCH, help="Samples in a step.")] = 32,
    out: Annotated[Path, typer.Option(help="Where heap.png and model.calc are written.")] = Path("out"),
    seed: Seed = 0,
    workers: Workers = None,
) -> None:
    """Train a network on real images; print the plan, the training and the accuracy on a held-out fifth."""
    if network not in DEMOS:
        raise CalcError(f"--network {network} is unknown: take one of {', '.join(DEMOS)}")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CalcError(f"{out}: cannot be made a folder ({error.strerror})") from error
    check_target(out / "heap.png", picture=True)
    check_target(out / "model.calc")
    grey_levels, small = (16, True) if data is None else (255, False)
    X, y = datasets.digits() if data is None else datasets.images(data)
    net, preprocess, X, says, rate, usual = DEMOS[network](X, nn.Scale(1 / grey_levels), small)
    n_epochs = epochs or usual
    X_train, y_train, X_test, y_test = datasets.train_test_split(X, y, HELD_OUT)
    model = cv.Model(
        net,
        input_shape=X.shape[1:],
        preprocess=preprocess,
        loss="softmax_cross_entropy",
        optimizer=cv.Adam(rate),
        batch_size=batch_size,
        seed=seed,
        workers=workers,
    )
    print(f"network {says}, Adam; {len(X_train)} images to learn from, {len(X_test)} held out\n")
    print(model.plan, end="\n\n", flush=True)

    model.step(X_train[:batch_size], y_train[:batch_size])  # the first call compiles or loads the kernels
    history = model.fit(X_train, y_train, epochs=n_epochs, progress=True)
    seconds = sorted(history["seconds"])[len(history) // 2]  # the first epoch may compile more kernels
    n_steps = -(-len(X_train) // batch_size)
    accuracy = model.evaluate(X_test, y_test)["accuracy"]

    model.plan.picture(str(out / "heap.png"))
    model.save(out / "model.calc")
    print(f"accuracy {accuracy:.4f} on the held-out fifth after {n_epochs} epochs")
    print(
        f"{seconds / n_steps * 1e6:.1f} us per step of {batch_size} (median epoch: {n_steps} steps in {seconds * 1e3:.2f} ms)"
    )
    print(f"wrote {out / 'heap.png'} and {out / 'model.calc'}")
    if epochs is None and not _coloured(X) and accuracy < ENOUGH[network]:
        raise CalcError(f"accuracy {accuracy:.4f} is below {ENOUGH[network]}: the demo has failed")


Demo = tuple[
    nn.Sequential, nn.Layer, np.ndarray, str, float, int
]  # layers, preprocessing, images, description, rate, epochs


def _coloured(X: np.ndarray) -> bool:
    return X.ndim == 4 and X.shape[1] > 1


def _mlp(X: np.ndarray, scale: nn.Layer, small: bool) -> Demo:
    X = X.reshape(len(X), -1)
    layers = f"{X.shape[1]}-64-64-10"
    return network(layers, "sigmoid")[0], scale, X, f"{layers}, sigmoid", 1e-2 if small else 1e-3, 30 if small else 20


def _of_images(name: str, make: Callable[[int], nn.Sequential]) -> Callable[[np.ndarray, nn.Layer, bool], Demo]:
    """A demo that scales scans of 8 by 8, which are too small, to 16 by 16, and mirrors and shifts photographs at random."""

    def demo_of(X: np.ndarray, scale: nn.Layer, small: bool) -> Demo:
        if X.ndim == 2:
            X = X.reshape(-1, 1, isqrt(X.shape[1]), isqrt(X.shape[1]))
        side = X.shape[-1]
        size = max(side, 16)
        if side < size:
            scale = scale >> nn.Upsample(size=(size, size), mode="linear")
        if _coloured(X):
            scale = nn.RandomHorizontalFlip() >> nn.RandomShift(4) >> scale
        return make(size), scale, X, f"{name} on {size} by {size}", 1e-3, 20

    return demo_of


DEMOS = {
    "mlp": _mlp,
    "lenet": _of_images("LeNet", lambda size: cv.zoo.lenet(10, size=size)),
    "resnet18": _of_images("ResNet-18 of width 16", lambda size: cv.zoo.resnet18(10, width=16, size=size)),
}


def is_onnx(what: str | Path) -> bool:
    return str(what).lower().endswith(".onnx")


def graph(layers: str, activation: str, size: int | None = None, loss: str | None = None) -> cv.CalcGraph:
    """The graph of the classifier that `train` trains, of a network of the zoo for images of ``size`` by ``size``, or of a file of ONNX."""
    if is_onnx(layers):
        imported = cv.load_onnx(layers)
        if loss is None:
            return imported.graph()
        return cv.build_graph(imported, imported.sample_shape(), loss, cv.Adam(1e-3))
    if loss is not None:
        raise CalcError(f"--loss is for a file of ONNX, and {layers} is none")
    if layers in cv.zoo.__all__:
        if activation != USUAL:
            raise CalcError(f"--activation is for layers such as 784-64-64-10: {layers} has its own")
        make = getattr(cv.zoo, layers)
        size = size or signature(make).parameters["size"].default
        shape = (1 if layers == "lenet" else 3, size, size)
        return cv.build_graph(make(size=size), shape, "softmax_cross_entropy", cv.Adam(1e-3))
    if size is not None:
        raise CalcError(f"--size is for images, and one of {', '.join(cv.zoo.__all__)}")
    net, n_in, n_out = network(layers, activation)
    loss = "softmax_cross_entropy" if n_out > 1 else "binary_cross_entropy"
    return cv.build_graph(nn.Standardize() >> net, (n_in,), loss, cv.Adam(1e-3))


@app.command()
def plan(
    layers: Annotated[
        str,
        typer.Argument(help="Sizes of the layers, 784-64-64-10, a network of the zoo, resnet18, or a file, net.onnx."),
    ],
    batch_size: BatchSize = None,
    memory: Memory = None,
    activation: Activation = USUAL,
    dtype: Annotated[str, typer.Option(help="float32 or float64.")] = "float32",
    size: Annotated[int | None, typer.Option(min=1, help="Sides of the images, for a network of the zoo.")] = None,
    solver_seconds: Annotated[float, typer.Option(min=0, help="Time for solvers that minimize recomputation.")] = 0.0,
    costs: Annotated[
        str, typer.Option(help="Costs of recomputation: reckoned, or measured on this machine.")
    ] = "reckoned",
    page_bytes: Annotated[
        str | None, typer.Option(help='With --memory: room for values in a file, such as "1 GiB".')
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Also draw the heap over the statements into this file.")] = None,
    html: Annotated[
        Path | None, typer.Option(help="Also write a page of the heap, the graph and the statements, linked.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="A processor, such as cortex-m4f: its flash, RAM and stack instead.")
    ] = None,
    loss: OfFile = None,
) -> None:
    """Print what training a classifier by `train` needs, or a file of ONNX, statement by statement.  Nothing is allocated."""
    wanted = graph(layers, activation, size, loss)
    if target is not None:
        others = {"--picture": picture, "--html": html, "--solver-seconds": solver_seconds, "--page-bytes": page_bytes}
        if given := [name for name, value in others.items() if value]:
            raise CalcError(f"{given[0]} is of plans for this machine: leave it out, or --target")
        model = cv.Model(wanted, batch_size=batch_size or 1, dtype=dtype, workers=1)
        with TemporaryDirectory() as folder:
            print(model.export(folder, target, ram=memory))
        return
    if batch_size is None and memory is None:
        raise CalcError("give --batch-size, or --memory for the largest batch that fits")
    if picture is not None:
        check_target(picture, picture=True)
    if html is not None:
        check_target(html)
    planned = cv.plan(
        wanted,
        batch_size=batch_size,
        memory=memory,
        dtype=dtype,
        solver_seconds=solver_seconds,
        progress=True,
        costs=costs,
        page_bytes=page_bytes,
    )
    print(planned)
    if picture is not None:
        planned.picture(str(picture))
    if html is not None:
        planned.html(html)


@app.command()
def export(
    model: Annotated[Path, typer.Argument(help="A file that train has written, or Model.save.")],
    folder: Annotated[Path, typer.Argument(help="Where the files are written.")],
    target: Annotated[str, typer.Option(help="The processor or board, such as cortex-m4f, pico or browser.")],
    name: Annotated[str, typer.Option(help="With which files and functions begin.")] = "model",
    batch_size: Annotated[int, typer.Option(min=1, max=LARGEST_BATCH, help="Samples of a call.")] = 1,
    paths: Annotated[str | None, typer.Option(help="Which become functions, such as predict (default: all).")] = None,
    objective: Annotated[str | None, typer.Option(help="size or speed.")] = None,
    format: Annotated[
        str | None,
        typer.Option(help="object, archive, c, micropython, shared, python or browser, as the target has them."),
    ] = None,
    flash: Annotated[str | None, typer.Option(help='A hard cap of code and constants, such as "32 KiB".')] = None,
    ram: Annotated[str | None, typer.Option(help="A hard cap of the heap.")] = None,
) -> None:
    """Write a model for another processor, and print what it takes of flash, RAM and stack."""
    chosen = None if paths is None else paths.split(",")
    pack = cv.load(model).export(
        folder, target, name, batch_size, chosen, objective, format=format, flash=flash, ram=ram
    )
    print(pack)
    print(f"wrote {', '.join(map(str, pack.files))}")


TABLE = "table"


def _columns(model: cv.Model) -> datasets.Columns | None:
    """The columns that `train` has noted.  A note of this name in another form belongs to the user."""
    match model.notes.get(TABLE):
        case {"columns": [*columns], "target": str(target)} if all(isinstance(name, str) for name in columns):
            return datasets.Columns(columns, target)
    return None


def _samples(
    data: Path, target: str | None, model: cv.Model | None = None, labelled: bool = True
) -> tuple[np.ndarray, np.ndarray | None, datasets.Columns | None]:
    """Samples of a file, for training or for a model.  The numbers of a table must be finite, if the model is from a table."""
    learned = _columns(model) if model else None
    X, y, table = datasets.samples(data, target, labelled, learned)
    if table and (learned or not model):
        for name, column in zip((*table.columns, table.target), (*X.T, *([] if y is None else [y]))):
            if (wrong := np.flatnonzero(~np.isfinite(column))).size:
                said = f"column {name!r} has {column[wrong[0]]} in sample {wrong[0] + 1}"
                raise CalcError(f"{data}: {said}: fill it in, or drop the sample")
    return X, y, table


@app.command()
def train(
    data: Data,
    layers: Layers,
    target: Target = "y",
    out: Annotated[Path, typer.Option(help="The file to save the model to.")] = Path("model.calc"),
    epochs: Annotated[int, typer.Option(min=1)] = 20,
    batch_size: Annotated[int, typer.Option(min=1, max=LARGEST_BATCH, help="Samples in a step.")] = 32,
    learning_rate: Annotated[float, typer.Option(help="Adam's.")] = 1e-3,
    activation: Activation = USUAL,
    held_out: Annotated[
        float, typer.Option(help="Fraction of the samples, drawn at random, to validate on.")
    ] = HELD_OUT,
    seed: Seed = 0,
    workers: Workers = None,
) -> None:
    """Train on a file: a classifier if y holds labels (0 or 1 for a single output), else a regression.

    Inputs are standardized.  A regression's loss is the squared error, and each output is scaled to its target.  A file of ONNX, with
    the weights in it, takes its inputs as they are.
    """
    check_target(out, data)
    X, y, table = _samples(data, target)
    assert y is not None
    net, shape, n_out = _network(layers, activation)
    n_in = prod(shape)
    X = readable("X", X, "float32").reshape(len(X), -1)
    classes = n_out > 1 and y.ndim == 1
    binary = n_out == 1 and bool(np.isin(y, (0, 1)).all())
    if X.shape[1] != n_in or (not classes and np.prod(y.shape[1:]) != n_out):
        raise CalcError(
            f"{data}: X {X.shape} and y {y.shape} ({y.dtype}) do not fit layers {layers}, "
            f"which take {n_in} values and give {n_out}"
        )
    of = f"{data}: column {table.target!r}" if table else f"{data}: y"
    y = _classes(y, n_out, of) if classes else y.reshape(len(y), -1)
    if X.shape[1:] != shape:
        X = X.reshape(len(X), *shape)
    X_train, y_train, X_test, y_test = datasets.train_test_split(X, y, held_out)
    net = net if is_onnx(layers) else nn.Standardize() >> net
    wide = _wide(X_train) or not (classes or binary) and _wide(y_train)
    if wide:
        print("float64 is used, because numbers of a column are too near to each other for float32", end="\n\n")
    if not (classes or binary or is_onnx(layers)):
        spread, mean = y_train.std(axis=0), y_train.mean(axis=0)
        net = net >> nn.Function(_rescaled, tuple(np.where(spread > 0, spread, 1).tolist()), tuple(mean.tolist()))
    model = cv.Model(
        net,
        input_shape=shape,
        loss="softmax_cross_entropy" if classes else "binary_cross_entropy" if binary else "mse",
        metrics=["accuracy" if classes or binary else "rmse"],
        optimizer=cv.Adam(learning_rate),
        batch_size=batch_size,
        dtype="float64" if wide else "float32",
        seed=seed,
        workers=workers,
    )
    print(model.plan, end="\n\n", flush=True)
    if not is_onnx(layers):
        model.adapt(X_train)
    history = model.fit(
        X_train, y_train, epochs=epochs, validation=(X_test, y_test), check_finite=True, terminate_on_nan=True
    )
    lost = next((i for i, loss in enumerate(history["loss"], 1) if not np.isfinite(loss)), None)
    if lost is not None:
        raise CalcError(
            f"the loss of epoch {lost} is {history['loss'][lost - 1]}: use a smaller --learning-rate; {out} is not written"
        )
    if classes or binary:
        usual = np.bincount(y_train.ravel().astype(int)).argmax()
        found, least = f"accuracy {model.evaluate(X_test, y_test)['accuracy']:.4f}", f"{np.mean(y_test == usual):.4f}"
        least += f", of class {usual} alone"
    else:
        found = f"root mean squared error {_rms(model.predict(X_test) - y_test):.4g}"
        least = f"{_rms(y_train.mean(axis=0) - y_test):.4g}, of the mean alone"
    print(f"{found} on the held-out {len(X_test)} ({least})")
    if table is not None:
        model.notes[TABLE] = table._asdict()
    model.save(out)
    print(f"wrote {out}")


def _network(layers: str, activation: str) -> tuple[nn.Layer, tuple[int, ...], int]:
    """The layers, or the file of ONNX, the shape of a sample and the outputs."""
    if not is_onnx(layers):
        net, n_in, n_out = network(layers, activation)
        return net, (n_in,), n_out
    imported = cv.load_onnx(layers)
    (output,) = [*imported.outputs.values()][:1]
    return imported, imported.sample_shape(), prod(n for n in output[1:] if n is not None)


def _classes(y: np.ndarray, n: int, of: str) -> np.ndarray:
    """Labels of n classes as integers.  Floats must be whole numbers."""
    wrong = np.flatnonzero(~np.isin(y, np.arange(n)))
    if wrong.size:
        raise CalcError(
            f"{of} has {y[wrong[0]]} in sample {wrong[0] + 1}: if layers end in {n} outputs, labels of classes are integers "
            f"from 0 to {n - 1}; to predict a number, let them end in 1"
        )
    return y.astype(np.int64)


def _rescaled(y: cv.Variable, spread: tuple[float, ...], mean: tuple[float, ...]) -> cv.Variable:
    return y * np.array(spread) + np.array(mean)


def _wide(columns: np.ndarray) -> bool:
    """Whether a column has numbers that float32 can hardly distinguish, such as seconds since 1970."""
    spread, apart = columns.std(axis=0), np.spacing(np.abs(columns.mean(axis=0)).astype(np.float32))
    return bool(((spread > 0) & (spread < 100 * apart)).any())


def _rms(error: np.ndarray) -> float:
    return float(np.sqrt(np.mean(error**2)))


def _model(path: Path) -> cv.Model:
    model = cv.load(path)
    if len(model.roles.inputs) != 1 or len(model.roles.outputs) != 1 or len(model.roles.labels) > 1:
        raise CalcError(f"{path}: the command takes models of one input, one output and one target; use cv.load")
    return model


def _input(model: cv.Model, X: np.ndarray, data: Path) -> np.ndarray:
    """Samples in the model's shape; columns of a table are an image's pixels, row by row."""
    shape = tuple(size.b for size in model.loaded.forms[model.roles.inputs[0]][1:])
    if X.size != len(X) * prod(shape):
        table = "; --target names the column to predict" if data.suffix.lower() in datasets.TABLES else ""
        raise CalcError(f"{data}: X {X.shape} does not fit the model, whose samples are {shape}{table}")
    return X.reshape(len(X), *shape)


@app.command()
def evaluate(
    model: Annotated[Path, typer.Argument(help="A model file.")],
    data: Data,
    target: Labels = None,
) -> None:
    """Print a model's loss and metrics over a file of samples."""
    loaded = _model(model)
    X, y, _ = _samples(data, target, loaded)
    assert y is not None
    shape = tuple(size.b for size in loaded.loaded.forms[loaded.roles.labels[0]][1:])
    if y.size == len(y) * prod(shape):
        y = y.reshape(len(y), *shape)
    for name, value in loaded.evaluate(_input(loaded, X, data), y).items():
        print(f"{name} {value:.6g}")


@app.command()
def predict(
    model: Annotated[Path, typer.Argument(help="A model file.")],
    data: Data,
    out: Annotated[
        Path | None, typer.Option(help="A .csv, .npy or .parquet file (default: CSV on the standard output).")
    ] = None,
    what: Annotated[
        str, typer.Option(help="classes, probabilities or outputs (default: classes, if the model has any).")
    ] = "",
    target: Labels = None,
) -> None:
    """Predict the samples of a file.  Each sample gives a row: its class, or the model's outputs."""
    if out is not None:
        check_target(out, data, model)
        datasets.check_writable(out)
    loaded = _model(model)
    X, _, _ = _samples(data, target, loaded, labelled=False)
    X = _input(loaded, X, data)
    scored = scores_of(loaded.program)
    what = what or ("classes" if scored else "outputs")
    if what not in WHAT:
        raise CalcError(f"--what {what} is unknown: take one of {', '.join(WHAT)}")
    if what != "outputs" and not scored:
        raise CalcError(
            f"{model}: the model has no classes, because its loss is not a cross-entropy: take --what outputs"
        )
    found = WHAT[what](loaded, X)
    if out is None:
        datasets.write_table(sys.stdout.buffer, ".csv", what, found)
    else:
        files.write(out, lambda file: datasets.write_table(file, out.suffix.lower(), what, found))
        print(f"wrote {out}: {len(found)} rows")


@app.command()
def run(
    model: Annotated[Path, typer.Argument(help="A file of ONNX, or a model file.")],
    input: Annotated[list[str], typer.Option(help="A .npy file, x.npy, or name=x.npy for one input of several.")],
    out: Annotated[
        Path | None, typer.Option(help="A .npz file of the outputs by name (default: their shapes are printed).")
    ] = None,
) -> None:
    """Compute the outputs of a network for one batch."""
    if out is not None:
        check_target(out, model)
        if out.suffix.lower() != ".npz":
            raise CalcError(f"{out}: outputs are written by name into a .npz file: name one")
    given = dict(_named(text) for text in input)
    if len(given) < len(input):
        raise CalcError(f"{model}: an input is given twice: name each, --input name=x.npy")
    arrays = {name: datasets.array(path) for name, path in given.items()}
    batch = max((len(x) for x in arrays.values() if x.ndim), default=1)
    loaded = cv.Model(cv.load_onnx(model), batch_size=batch) if is_onnx(model) else cv.load(model)
    names = loaded.roles.inputs
    if len(names) == 1 and "" in arrays:
        arrays = {names[0]: arrays[""]}
    if {*arrays} != {*names}:
        raise CalcError(f"{model}: give its inputs {', '.join(names)} as --input name=x.npy, each once")
    found = loaded.run(arrays)
    if out is None:
        for name, y in found.items():
            print(f"{name} {np.shape(y)} {np.asarray(y).dtype}")
    else:
        files.write(out, lambda file: np.savez(file, **found))  # type: ignore[arg-type]
        print(f"wrote {out}: {', '.join(found)}")


def _named(text: str) -> tuple[str, Path]:
    name, equals, path = text.rpartition("=")
    return (name if equals else ""), Path(path)


@app.command()
def convert(
    model: Annotated[Path, typer.Argument(help="A file of ONNX.")],
    out: Annotated[Path, typer.Argument(help="The model file to write, net.calc.")],
    batch_size: Annotated[int, typer.Option(min=1, max=LARGEST_BATCH, help="The largest batch.")] = 32,
    loss: OfFile = None,
    dtype: Annotated[str, typer.Option(help="float32 or float64.")] = "float32",
) -> None:
    """Write a file of ONNX as a model, which predict, evaluate, run, export and cv.load take, without the package onnx."""
    check_target(out, model)
    if is_onnx(out):
        raise CalcError(f"{out}: a model of calcvm is written: name it net.calc, or so")
    if not is_onnx(model):
        raise CalcError(f"{model} is no file of ONNX: model.to_onnx writes one, where the model was made")
    made = cv.Model(graph(str(model), USUAL, loss=loss), batch_size=batch_size, dtype=dtype)
    made.save(out)
    print(f"wrote {out}: {made!r}, {made.program.heap_bytes:,} bytes of heap")


WHAT = {"classes": cv.Model.predict_classes, "probabilities": cv.Model.predict_proba, "outputs": cv.Model.predict}


@app.command()
def dis(
    what: Annotated[str, typer.Argument(help="A program, a model, a file of ONNX, or sizes of layers: 784-64-64-10.")],
    batch_size: Annotated[
        int, typer.Option(min=1, max=LARGEST_BATCH, help="The largest batch, for layers or ONNX.")
    ] = 32,
    activation: Activation = USUAL,
    loss: OfFile = None,
) -> None:
    """Print a program, one line per row, as equations with names, shapes and offsets."""
    if Path(what).is_dir():
        raise CalcError(f"{what} is a folder: name a program, a model, or sizes of layers such as 784-64-64-10")
    if Path(what).exists() and not is_onnx(what):
        print(_program(Path(what)).disassemble())
    elif set(what) <= set("0123456789-") or is_onnx(what):
        print(cv.compile(graph(what, activation, loss=loss), batch_size=batch_size).disassemble())
    else:
        raise CalcError(f"{what}: no such file; name a program, a model, or sizes of layers such as 784-64-64-10")


def _program(path: Path) -> cv.Program:
    try:
        return cv.load_program(path)
    except ProgramError as error:
        if "holds a model" not in str(error):
            raise
    return cv.load(path).program


@app.command()
def warm(
    models: Annotated[
        list[Path] | None, typer.Argument(help="Files of models or programs: what they need (default: everything).")
    ] = None,
) -> None:
    """Compile ahead into the cache: when an image is built, for a machine without a cache folder, or before a first step counts."""
    programs, root = [_program(path) for path in models or ()], cache_root()
    with telling(str(root), "written"):
        root.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=root):
            pass

    def tell(n: int) -> None:
        if n:
            print(f"compiling {n} functions; two a second is usual for a core", flush=True)

    print(f"compiled {ahead.warm(programs, tell)} functions into {root}; a wheel, or the cache, has all others")


@app.command()
def info() -> None:
    """Print versions, processor, vector width, the cache of compiled kernels, and extras."""
    report.info()
