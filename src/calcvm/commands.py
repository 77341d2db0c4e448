"""The commands of ``calcvm``: demo, plan, train, dis, info (extra ``cli``)."""

from __future__ import annotations

import os
import platform
import zipfile
from collections.abc import Callable
from importlib import metadata
from inspect import signature
from math import isqrt
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

import calcvm as cv
from calcvm import data as datasets
from calcvm import nn
from calcvm.errors import CalcError, MissingExtra, ProgramError
from calcvm.files import place
from calcvm.kernels_cpu._native import NOWHERE, cache_root
from calcvm.kernels_cpu._target import host
from calcvm.system import n_cores
from calcvm.vm.run.feeds import readable

app = typer.Typer(
    help="Train small neural networks in known memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

HELD_OUT = 0.2
# held-out accuracy below which the demo has failed, after as many epochs as it takes by itself
ENOUGH = {"mlp": 0.96, "lenet": 0.98, "resnet18": 0.97}
LARGEST_LAYER, LARGEST_BATCH = 1 << 30, 1 << 40
ACTIVATIONS: dict[str, Callable[..., nn.Layer]] = {
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "elu": nn.ELU,
}
EXTRAS = {
    "cli": ("typer", "rich"),
    "plot": ("matplotlib",),
    "demo": ("scikit-learn",),
    "blas": ("scipy",),
    "solver": ("scipy", "ortools"),
    "cuda": ("numba-cuda",),
    "peers": ("torch", "jax", "onnxruntime"),
}

Layers = Annotated[str, typer.Argument(help="Sizes of the layers, the input's first: 784-64-64-10.")]
BatchSize = Annotated[int | None, typer.Option(min=1, max=LARGEST_BATCH, help="The largest batch.")]
Memory = Annotated[
    str | None,
    typer.Option(
        help='A budget, such as "64 MiB": the largest batch that fits; with --batch-size a cap, under which values are made again.'
    ),
]
Activation = Annotated[str, typer.Option(help=f"Of the hidden layers: {', '.join(ACTIVATIONS)}.")]
Seed = Annotated[int, typer.Option(min=0, help="Of the initial weights and the shuffling: same seed, same bits.")]
Workers = Annotated[int | None, typer.Option(min=1, help="Size of the team (default: chosen by the plan's cost).")]


def network(layers: str, activation: str) -> tuple[nn.Sequential, int, int]:
    """The layers of ``784-64-64-10``, and the sizes of input and output."""
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
        typer.Option("--version", is_eager=True, callback=lambda wanted: _say_version(wanted), help="Say which it is."),
    ] = False,
) -> None:
    pass


def _say_version(wanted: bool) -> None:
    if wanted:
        print(f"calcvm {cv.__version__}")
        raise typer.Exit


def check_target(path: Path, picture: bool = False) -> None:
    """Refuse a path that a result cannot be written to, before the work that leads to it."""
    if path.is_dir():
        raise CalcError(f"{path} is a folder: name a file")
    folder = place(path).parent
    if not folder.is_dir():
        raise CalcError(f"{path} cannot be written: there is no folder {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise CalcError(f"{path} cannot be written: the folder {folder} is read-only")
    if picture:
        try:
            from matplotlib.backend_bases import FigureCanvasBase
        except ImportError as error:
            raise MissingExtra("matplotlib", "plot", "a picture of a plan") from error
        formats = FigureCanvasBase.get_supported_filetypes()
        if path.suffix[1:].lower() not in formats:
            raise CalcError(
                f"{path}: no picture is written as {path.suffix or 'a file without suffix'!r}; take one of {', '.join(formats)}"
            )


@app.command()
def demo(
    network: Annotated[str, typer.Option(help="mlp, the paper's, lenet or resnet18.")] = "mlp",
    data: Annotated[
        Path | None,
        typer.Option(help="Directory of MNIST's or Fashion-MNIST's files, or CIFAR-10's (default: bundled digits)."),
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Default: 20; 30 of mlp on the digits.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, max=LARGEST_BATCH, help="Samples in a step.")] = 32,
    out: Annotated[Path, typer.Option(help="Where heap.png and model.calc are written.")] = Path("out"),
    seed: Seed = 0,
    workers: Workers = None,
) -> None:
    """Train a network on real images: the plan, the training, the accuracy on a held-out fifth."""
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
    seconds = sorted(history["seconds"])[len(history) // 2]  # the first epoch may compile what steps did not need
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
]  # layers, preparing, images, what it is, rate, epochs


def _coloured(X: np.ndarray) -> bool:
    return X.ndim == 4 and X.shape[1] > 1


def _mlp(X: np.ndarray, scale: nn.Layer, small: bool) -> Demo:
    X = X.reshape(len(X), -1)
    layers = f"{X.shape[1]}-64-64-10"
    return network(layers, "sigmoid")[0], scale, X, f"{layers}, sigmoid", 1e-2 if small else 1e-3, 30 if small else 20


def _of_images(name: str, make: Callable[[int], nn.Sequential]) -> Callable[[np.ndarray, nn.Layer, bool], Demo]:
    """Scans of 8 by 8, which are too small for it, are scaled to 16 by 16; photographs are mirrored and shifted by chance."""

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


def graph(layers: str, activation: str, size: int | None = None) -> cv.CalcGraph:
    """A classifier's graph, trained by Adam; of images of ``size`` by ``size`` where it is one of the zoo's."""
    if layers in cv.zoo.__all__:
        if activation != "sigmoid":
            raise CalcError(f"--activation is of layers such as 784-64-64-10: {layers} has its own")
        make = getattr(cv.zoo, layers)
        size = size or signature(make).parameters["size"].default
        shape = (1 if layers == "lenet" else 3, size, size)
        return cv.build_graph(make(size=size), shape, "softmax_cross_entropy", cv.Adam(1e-3))
    if size is not None:
        raise CalcError(f"--size is of images, for one of {', '.join(cv.zoo.__all__)}")
    net, n_in, _ = network(layers, activation)
    g = cv.CalcGraph()
    x, target = g.placeholder("input", (None, n_in)), g.placeholder("target", (None,))
    with g.path("learn", backward=True) as learn:
        scores = net.build(x)
        learn.minimize(cv.softmax_cross_entropy(scores, target), optimizer=cv.Adam(1e-3), output=scores)
    return g


@app.command()
def plan(
    layers: Annotated[
        str, typer.Argument(help="Sizes of the layers, 784-64-64-10, or a network of the zoo, resnet18.")
    ],
    batch_size: BatchSize = None,
    memory: Memory = None,
    activation: Activation = "sigmoid",
    dtype: Annotated[str, typer.Option(help="float32 or float64.")] = "float32",
    size: Annotated[int | None, typer.Option(min=1, help="Of a zoo's network: sides of its images.")] = None,
    solver_seconds: Annotated[
        float, typer.Option(min=0, help="Of solvers that look for the least work where values are made again.")
    ] = 0.0,
    costs: Annotated[
        str, typer.Option(help="What making values again is told to take: reckoned, or measured on this machine.")
    ] = "reckoned",
    page_bytes: Annotated[
        str | None, typer.Option(help='With --memory: room for values in a file, such as "1 GiB".')
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Also draw the heap over the statements into this file.")] = None,
    html: Annotated[
        Path | None, typer.Option(help="Also write a page of the heap, the graph and the statements, linked.")
    ] = None,
) -> None:
    """Say what training a classifier with Adam needs, statement by statement.  Nothing is allocated."""
    wanted = graph(layers, activation, size)
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
        accumulate=False,
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
def train(
    data: Annotated[Path, typer.Argument(help="A .npz file with X (samples first) and y.")],
    layers: Layers,
    out: Annotated[Path, typer.Option(help="Where the model is saved.")] = Path("model.calc"),
    epochs: Annotated[int, typer.Option(min=1)] = 20,
    batch_size: Annotated[int, typer.Option(min=1, max=LARGEST_BATCH, help="Samples in a step.")] = 32,
    learning_rate: Annotated[float, typer.Option(help="Adam's.")] = 1e-3,
    activation: Activation = "sigmoid",
    held_out: Annotated[float, typer.Option(help="Fraction of the samples to validate on.")] = HELD_OUT,
    seed: Seed = 0,
    workers: Workers = None,
) -> None:
    """Train on a file: a classifier where y has integers, else a regression by the mean squared error."""
    check_target(out)
    X, y = _npz(data)
    net, n_in, n_out = network(layers, activation)
    X = readable("X", X, "float32").reshape(len(X), -1)
    classes = np.issubdtype(y.dtype, np.integer)
    width = n_out if classes else int(np.prod(y.shape[1:]))
    hint = ""
    if not classes and y.ndim == 1:
        hint = "; y is no integers, so that it is numbers to come near to: labels of classes are y.astype(int)"
    if X.shape[1] != n_in or width != n_out or (classes and y.ndim != 1):
        raise CalcError(
            f"{data}: X {X.shape} and y {y.shape} ({y.dtype}) do not fit layers {layers}, "
            f"which take {n_in} values and give {n_out}{hint}"
        )
    X_train, y_train, X_test, y_test = datasets.train_test_split(X, y, held_out)
    model = cv.Model(
        net,
        input_shape=(n_in,),
        loss="softmax_cross_entropy" if classes else "mse",
        optimizer=cv.Adam(learning_rate),
        batch_size=batch_size,
        seed=seed,
        workers=workers,
    )
    print(model.plan, end="\n\n", flush=True)
    history = model.fit(
        X_train, y_train, epochs=epochs, validation=(X_test, y_test), check_finite=True, terminate_on_nan=True
    )
    lost = next((i for i, loss in enumerate(history["loss"], 1) if not np.isfinite(loss)), None)
    if lost is not None:
        raise CalcError(
            f"the loss of epoch {lost} is {history['loss'][lost - 1]}: take a smaller --learning-rate; {out} is not written"
        )
    if classes:
        print(f"accuracy {model.evaluate(X_test, y_test)['accuracy']:.4f} on the held-out {len(X_test)}")
    else:
        error = model.predict(X_test) - y_test.reshape(len(y_test), -1)
        print(f"root mean squared error {np.sqrt(np.mean(error**2)):.4g} on the held-out {len(X_test)}")
    model.save(out)
    print(f"wrote {out}")


def _npz(path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            if not {"X", "y"} <= set(archive.files):
                raise CalcError(f"{path}: has arrays {', '.join(archive.files) or 'none'}; X and y are needed")
            X, y = archive["X"], archive["y"]
    except (OSError, EOFError, zipfile.BadZipFile) as error:
        raise CalcError(f"{path}: cannot be read as .npz ({error})") from error
    except (ValueError, AttributeError, TypeError) as error:  # pickled, or a bare .npy
        if isinstance(error, CalcError):
            raise
        raise CalcError(
            f"{path}: not an .npz file of plain arrays; write it with numpy.savez(path, X=X, y=y)"
        ) from error
    if X.ndim < 2 or y.ndim < 1 or len(X) != len(y):
        raise CalcError(f"{path}: X {X.shape} and y {y.shape}: give X (samples, ...) and as many y")
    if X.size == 0:
        raise CalcError(f"{path}: X {X.shape} holds nothing to learn from")
    return X, y


@app.command()
def dis(
    what: Annotated[str, typer.Argument(help="A program or model file, or sizes of layers: 784-64-64-10.")],
    batch_size: Annotated[int, typer.Option(min=1, max=LARGEST_BATCH, help="The largest batch, for layers.")] = 32,
    activation: Activation = "sigmoid",
) -> None:
    """Print a program, one line a row, as equations with names, shapes and offsets."""
    if Path(what).is_dir():
        raise CalcError(f"{what} is a folder: name a program, a model, or sizes of layers such as 784-64-64-10")
    if Path(what).exists():
        print(_program(Path(what)).disassemble())
    elif set(what) <= set("0123456789-"):
        print(cv.compile(graph(what, activation), batch_size=batch_size, accumulate=False).disassemble())
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
def info() -> None:
    """Versions, processor, vector width, the cache of compiled kernels, extras."""
    print(f"calcvm    {cv.__version__}  (Python {platform.python_version()}, {platform.system()} {platform.machine()})")
    print("          " + ", ".join(f"{name} {_version(name)}" for name in ("numpy", "numba", "llvmlite")))
    processor = host()
    print(f"processor {processor.cpu}, {n_cores()} cores, vectors of {processor.vectors[0]} bits")
    if cache_root() == NOWHERE:
        print("cache     nowhere: the user has no home folder; the environment variable CALCVM_CACHE_DIR names one")
    else:
        files = [p.stat().st_size for p in cache_root().rglob("*") if p.is_file()]
        print(f"cache     {cache_root()}: {len(files)} files, {sum(files) / 1e6:.1f} MB")
    print(f"gpu       {_gpu()}")
    for extra, packages in EXTRAS.items():
        print(f"extra     {extra:<6} {', '.join(f'{p} {_version(p)}' for p in packages)}")


def _gpu() -> str:
    """The device "cuda", or why there is none."""
    from calcvm.vm.run.cuda.driver import Driver

    try:
        driver = Driver.open()
    except cv.CalcError as error:
        return f"none: {error}"
    free, total = driver.memory()
    major, minor = driver.compute_capability
    return (
        f"{driver.name}, compute capability {major}.{minor}, {driver.multiprocessors} multiprocessors, "
        f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free, driver for CUDA {'.'.join(map(str, driver.version))}"
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "(not installed)"
