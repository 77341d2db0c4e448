"""The command line and the progress reports."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import metadata
from itertools import combinations, permutations, product
from pathlib import Path

import numpy as np
import pytest
from test_data import cifar10_files, write_cifar10, write_mnist

import calcvm as cv

pytest.importorskip("typer")
pytest.importorskip("rich")
from typer.testing import CliRunner  # noqa: E402

from calcvm.commands import app  # noqa: E402


def calcvm(*args: str) -> str:
    """Standard output of a command that must succeed."""
    result = CliRunner().invoke(app, [str(a) for a in args])
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*args: object) -> str:
    """The message of the CalcError that a command must end with."""
    result = CliRunner().invoke(app, [str(a) for a in args])
    assert isinstance(result.exception, cv.CalcError), result.output
    return str(result.exception)


def test_a_plan_for_another_processor_takes_no_option_of_this_one(tmp_path: Path) -> None:
    for option in (
        ("--picture", tmp_path / "p.png"),
        ("--html", tmp_path / "p.html"),
        ("--solver-seconds", 1),
        ("--page-bytes", "1 MiB"),
    ):
        assert f"{option[0]} is of plans for this machine" in refused("plan", "4-3", "--target", "pico", *option)
    assert not [*tmp_path.iterdir()]


# ---------------------------------------------------------------- the process
def process(*args: str, before: str = "") -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.argv = ['calcvm', *{list(args)!r}]; {before}\nfrom calcvm.cli import main\nmain()"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_inputs_and_targets_of_any_size_are_scaled(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(3e4, 1e4, 600), rng.normal(0, 1e-3, 600)
    np.savez(tmp_path / "d.npz", X=np.stack([a, b], axis=1), y=2e5 + a + 1e7 * b)
    how = ["--epochs", 60, "--out", tmp_path / "m.calc"]
    error = r"root mean squared error ([\d.e+]+) on the held-out 120 \(([\d.e+]+), of the mean alone\)"
    found = re.search(error, calcvm("train", tmp_path / "d.npz", "2-16-1", *how))
    assert found and float(found[1]) < 0.2 * float(found[2])


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_the_extra_the_command_names_it(package: str) -> None:
    result = process("plan", before=f"sys.modules[{package!r}] = None")
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr == f'the command calcvm needs {package}: pip install "calcvm[cli]" (without it: calcvm info)\n'
    core = process("info", before=f"sys.modules[{package!r}] = None")
    assert core.returncode == 0 and core.stdout.startswith(f"calcvm    {cv.__version__}  (Python ")
    assert re.search(r"^extra +cli +typer [\d.]+, rich [\d.]+$", core.stdout, re.M)
    assert process("--version", before=f"sys.modules[{package!r}] = None").stdout == f"calcvm {cv.__version__}\n"


def test_info_lists_every_extra() -> None:
    extras = metadata.metadata("calcvm").get_all("Provides-Extra")
    assert re.findall(r"^extra +(\w+)", process("info").stdout, re.M) == extras and len(extras) >= 12


def test_info_shows_what_is_missing_of_extras_in_extras() -> None:
    """Of every extra all packages, each with its version or that it is not there; never the name of another extra."""
    shown = dict(re.findall(r"^extra +(\w+) +(.*)$", calcvm("info"), re.M))
    packages = {extra: [part.split(" ")[0] for part in line.split(", ")] for extra, line in shown.items()}
    assert packages["demo"] == ["typer", "rich", "matplotlib", "scikit-learn"] and packages["ray"][-1] == "ray"
    assert {*packages["demo"], *packages["explore"], *packages["solver"]} < {*packages["dev"]}
    assert all(len({*names}) == len(names) for names in packages.values())
    for line in shown.values():
        for part in line.split(", "):
            name, version = part.split(" ", 1)
            try:
                assert version == metadata.version(name)
            except metadata.PackageNotFoundError:
                assert version == "(not installed)" and name not in shown


def test_bad_input_is_one_line_and_status_1() -> None:
    result = process("plan", "784--10", "--batch-size", "5")
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr.startswith("calcvm: layers '784--10': give two sizes") and result.stderr.count("\n") == 1


def test_module_is_the_command() -> None:
    result = subprocess.run([sys.executable, "-m", "calcvm", "--help"], capture_output=True, text=True)
    assert result.returncode == 0
    for command in ("demo", "plan", "train", "evaluate", "predict", "dis", "warm", "info"):
        assert command in result.stdout
    for command in ([], ["train"], ["predict"]):
        assert "bool" not in process(*command, "--help").stdout.lower()


def test_the_version_is_said() -> None:
    result = process("--version")
    assert (result.returncode, result.stdout) == (0, f"calcvm {cv.__version__}\n")


def test_an_error_of_the_system_is_one_line_too() -> None:
    result = process("info", before="import calcvm.report as r; r.host = lambda: open('/no/where')")
    assert result.returncode == 1
    assert result.stderr == "calcvm: [Errno 2] No such file or directory: '/no/where'\n"


# ---------------------------------------------------------------- where results go
def wrong_targets(tmp_path: Path) -> list[tuple[Path, str]]:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"")
    return [
        (Path("/proc/x.png"), "/proc/x.png: cannot be written"),
        (tmp_path / "none" / "x.png", "there is no folder"),
        (tmp_path / "file" / "x.png", "there is no folder"),
        (tmp_path / "folder", "is a folder: name a file"),
    ]


def no_work(*_: object, **__: object) -> None:
    raise AssertionError("the work has begun")


def test_what_cannot_be_written_is_found_out_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_samples(tmp_path)
    monkeypatch.setattr(cv, "Model", no_work)
    monkeypatch.setattr(cv, "plan", no_work)
    targets = wrong_targets(tmp_path)
    for path, message in targets:
        assert message in refused("train", tmp_path / "d.npz", "6-3", "--out", path)
        assert message in refused("plan", "6-3", "--batch-size", 2, "--picture", path)
    for name in ("x.xyz", "x"):
        assert "take one of eps" in refused("plan", "6-3", "--batch-size", 2, "--picture", tmp_path / name)
    assert "cannot be made a folder" in refused("demo", "--out", tmp_path / "file")
    (tmp_path / "out" / "model.calc").mkdir(parents=True)
    assert "model.calc is a folder" in refused("demo", "--out", tmp_path / "out")
    access = os.access
    monkeypatch.setattr("os.access", lambda path, mode: access(path, mode & ~os.W_OK) and not mode & os.W_OK)
    assert "is read-only" in refused("train", tmp_path / "d.npz", "6-3", "--out", tmp_path / "m.calc")


# ---------------------------------------------------------------- plan, dis, info
def test_plan_prints_the_plan_of_the_graph(tmp_path: Path) -> None:
    printed = calcvm("plan", "20-16-5", "--batch-size", 30, "--picture", tmp_path / "heap.png")
    assert "batch 30" in printed and "linear_1" in printed and "<- peak" in printed and "a step" not in printed
    printed = calcvm("plan", "20-16-5", "--batch-size", 30, "--costs", "measured")
    assert re.search(r"a step +[\d.e-]+ ms, from measured costs of its rows", printed)
    assert (tmp_path / "heap.png").read_bytes().startswith(b"\x89PNG")


def test_plan_fills_a_budget() -> None:
    batch = int(re.search(r"batch (\d+)", calcvm("plan", "20-16-5", "--memory", "64 KiB"))[1])
    heap = int(re.search(r"heap +([\d,]+) bytes", calcvm("plan", "20-16-5", "--batch-size", batch))[1].replace(",", ""))
    more = int(
        re.search(r"heap +([\d,]+) bytes", calcvm("plan", "20-16-5", "--batch-size", batch + 1))[1].replace(",", "")
    )
    assert heap <= 65536 < more


def test_plan_of_the_zoo_as_a_page(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    printed = calcvm("plan", "lenet", "--size", 16, "--batch-size", 8, "--html", page)
    assert "conv2d_1" in printed and "conv2d_1.weight" in page.read_text()
    cap = int(0.8 * int(re.search(r"heap +([\d,]+) bytes", printed)[1].replace(",", "")))
    assert "--size is for images" in refused("plan", "20-5", "--batch-size", 1, "--size", 16)
    assert "at least" in refused("plan", "lenet", "--batch-size", 8, "--size", 16, "--memory", "1 MB")
    assert re.search(r"heap +[\d,]+ bytes", calcvm("plan", "lenet", "--size", 16, "--memory", cap))


def test_plan_asks_solvers() -> None:
    pytest.importorskip("scipy")
    pytest.importorskip("ortools")
    how = ("plan", "resnet18", "--size", 32, "--batch-size", 64)
    heap = int(re.search(r"heap +([\d,]+) bytes", calcvm(*how))[1].replace(",", ""))
    printed = calcvm(*how, "--memory", int(0.8 * heap), "--solver-seconds", 1)
    assert re.search(r"^solver +HiGHS and CP-SAT: [\d.]+ s, (not )?proved", printed, re.MULTILINE)


def test_plan_keeps_values_in_a_file() -> None:
    printed = calcvm("plan", "64-256-256-10", "--batch-size", 16, "--memory", "1.2 MB", "--page-bytes", "64 MB")
    kept, moved = (
        int(re.search(rf"^{line} +([\d,]+) bytes", printed, re.M)[1].replace(",", ""))
        for line in ("in a file", "moved")
    )
    assert 0 < kept < moved
    assert "recomputed   0 rows of the forward, with paging reckoned to take" in printed
    assert "goes with memory" in refused("plan", "20-5", "--batch-size", 1, "--page-bytes", "1 MB")


def test_plan_refuses() -> None:
    assert "networks of the zoo: alexnet, " in refused("plan", "resnet19", "--batch-size", 1)
    assert "at most 1,073,741,824 units" in refused("plan", "99999999999999999999-3", "--batch-size", 1)
    assert "--batch-size, or --memory" in refused("plan", "20-5")
    assert "allowed" in refused("plan", "20-16-5", "--memory", "1 KiB")
    assert "layers '20'" in refused("plan", "20", "--batch-size", 1)
    assert "layers '20-0'" in refused("plan", "20-0", "--batch-size", 1)
    assert "take one of reckoned, measured" in refused("plan", "20-5", "--batch-size", 1, "--costs", "guessed")
    assert "networks of the zoo" in refused("plan", "resnet19")  # before what is missing
    assert "lenet has its own" in refused("plan", "lenet", "--batch-size", 1, "--activation", "tanh")
    assert "activation 'sine'" in refused("plan", "20-5", "--batch-size", 1, "--activation", "sine")


def test_info_names_versions_and_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CALCVM_CACHE_DIR", str(tmp_path))
    (tmp_path / "kernel").write_bytes(bytes(1_500_000))
    printed = calcvm("info")
    assert f"numpy {np.__version__}" in printed and f"{tmp_path}: 1 files, 1.5 MB" in printed
    assert re.search(r"vectors of (128|256|512) bits", printed)


def test_dis_shows_layers_programs_and_models(tmp_path: Path) -> None:
    layers = calcvm("dis", "6-4-3", "--batch-size", 7)
    assert "linear_fwd" in layers and "softmax_cross_entropy" in layers
    calcvm_train(tmp_path, epochs=1)
    model = cv.load(tmp_path / "m.calc")
    model.program.save(tmp_path / "p.calc")
    assert calcvm("dis", tmp_path / "m.calc") == model.program.disassemble() + "\n"
    assert calcvm("dis", tmp_path / "p.calc") == model.program.disassemble() + "\n"


def test_dis_refuses(tmp_path: Path) -> None:
    assert "no such file" in refused("dis", tmp_path / "nothing")
    assert "is a folder" in refused("dis", tmp_path)
    (tmp_path / "foreign").write_bytes(b"PK not really")
    assert "foreign" in refused("dis", tmp_path / "foreign")


# ---------------------------------------------------------------- train
def save_samples(tmp_path: Path, regression: bool = False, dtypes: tuple[str, str] = ("float32", "int64")) -> None:
    rng = np.random.default_rng(0)
    X = rng.standard_normal((400, 6)).astype("float32")
    y = X[:, :3] * 2 if regression else X[:, :3].argmax(axis=1).astype(dtypes[1])
    np.savez(tmp_path / "d.npz", X=X.astype(dtypes[0]), y=y)


def calcvm_train(tmp_path: Path, regression: bool = False, epochs: int = 30) -> str:
    save_samples(tmp_path, regression)
    options = ["--epochs", epochs, "--learning-rate", 0.02, "--out", tmp_path / "m.calc"]
    return calcvm("train", tmp_path / "d.npz", "6-16-3", *options)


def test_train_a_classifier(tmp_path: Path) -> None:
    printed = calcvm_train(tmp_path)
    assert float(re.search(r"accuracy ([\d.]+) on the held-out 80", printed)[1]) > 0.8
    X = np.load(tmp_path / "d.npz")["X"]
    assert cv.load(tmp_path / "m.calc").predict(X).shape == (400, 3)
    assert printed.startswith(calcvm("plan", "6-16-3", "--batch-size", 32))


def table(path: Path, columns: dict[str, np.ndarray]) -> Path:
    np.savetxt(path, np.stack([*columns.values()], 1), "%.3f", ",", header=",".join(columns), comments="")
    return path


def test_train_on_columns_far_from_zero_and_of_different_sizes(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=400)
    for far in (0.0, 1.7e9):
        data = table(tmp_path / "t.csv", {"x": x + far, "y": far + 100 * x})
        how = ("--epochs", 60, "--learning-rate", 0.01, "--out", tmp_path / "m.calc")
        printed = calcvm("train", data, "1-8-1", *how)
        assert ("float64 is used" in printed) == bool(far)
        assert float(re.search(r"error ([\d.]+) on", printed)[1]) < 3
        assert float(re.search(r"rmse ([\d.]+)", calcvm("evaluate", tmp_path / "m.calc", data))[1]) < 3
    model = tmp_path / "two.calc"
    np.savez(tmp_path / "two.npz", X=x[:, None], y=np.stack([1e4 * x, 1e-2 * x], 1))
    calcvm("train", tmp_path / "two.npz", "1-8-2", "--epochs", 60, "--learning-rate", 0.01, "--out", model)
    off = (cv.load(model).predict(x[:, None]) - np.stack([1e4 * x, 1e-2 * x], 1)).std(axis=0)
    assert (off < 0.05 * np.array([1e4, 1e-2])).all()


def test_what_a_command_reads_is_not_written_over(tmp_path: Path) -> None:
    calcvm_train(tmp_path, epochs=1)
    model, data = tmp_path / "m.calc", tmp_path / "d.csv"
    table(data, {name: np.arange(5.0) for name in "abcdefy"})
    before = model.read_bytes(), data.read_bytes()
    assert "would be overwritten" in refused("train", data, "6-3", "--out", data)
    for target in (data, model):
        assert "would be overwritten" in refused("predict", model, data, "--out", target)
    assert (model.read_bytes(), data.read_bytes()) == before


def test_train_a_regression(tmp_path: Path) -> None:
    printed = calcvm_train(tmp_path, regression=True)
    assert float(re.search(r"root mean squared error ([\d.]+) on", printed)[1]) < 1.0


@pytest.mark.parametrize(
    ("arrays", "layers", "message"),
    [
        ({"X": np.zeros((9, 6))}, "6-3", "X and y are needed"),
        ({"X": np.zeros((9, 6)), "y": np.zeros(8, int)}, "6-3", "as many y"),
        ({"X": np.zeros(9), "y": np.zeros(9, int)}, "6-3", "give X .samples"),
        ({"X": np.zeros((9, 5)), "y": np.zeros(9, int)}, "6-3", "do not fit layers 6-3"),
        ({"X": np.zeros((9, 6)), "y": np.zeros((9, 2))}, "6-3", "do not fit layers 6-3"),
        ({"X": np.zeros((9, 6)), "y": np.arange(9) / 2}, "6-3", r"y has 0.5 in sample 2: .* integers from 0 to 2"),
        ({"X": np.zeros((9, 6)), "y": np.arange(9) - 1}, "6-3", r"y has -1 in sample 1: .* integers from 0 to 2"),
        ({"X": np.zeros((0, 6)), "y": np.zeros(0, int)}, "6-3", "holds nothing to learn from"),
        ({"X": np.zeros((9, 0)), "y": np.zeros(9, int)}, "6-3", "holds nothing to learn from"),
        ({"X": np.array([{}] * 9), "y": np.zeros(9, int)}, "6-3", "not an .npz file of plain arrays"),
    ],
)
def test_train_refuses_data(tmp_path: Path, arrays: dict[str, np.ndarray], layers: str, message: str) -> None:
    np.savez(tmp_path / "d.npz", **arrays)
    assert re.search(message, refused("train", tmp_path / "d.npz", layers))


def test_a_loss_that_is_lost_ends_with_an_error_and_writes_nothing(tmp_path: Path) -> None:
    save_samples(tmp_path)
    options = ("6-3", "--epochs", 3, "--out", tmp_path / "m.calc")
    message = refused("train", tmp_path / "d.npz", *options, "--learning-rate", 1e300)
    assert re.search(
        r"the loss of epoch \d is (nan|inf): use a smaller --learning-rate; .*m.calc is not written", message
    )
    samples = dict(np.load(tmp_path / "d.npz"))
    samples["X"][7, 2] = np.nan
    np.savez(tmp_path / "d.npz", **samples)
    assert re.search("(?i)nan", refused("train", tmp_path / "d.npz", *options))
    assert not (tmp_path / "m.calc").exists()


def test_labels_of_any_numbers_train_the_same(tmp_path: Path) -> None:
    accuracies = []
    for dtypes in (("<f4", "<i8"), (">f4", ">i8"), (">f8", ">i2"), ("<f4", "<f8"), ("<f4", "u1")):
        save_samples(tmp_path, dtypes=dtypes)
        printed = calcvm("train", tmp_path / "d.npz", "6-16-3", "--epochs", 3, "--out", tmp_path / "m.calc")
        accuracies.append(re.search(r"accuracy ([\d.]+)", printed)[1])
    assert len(set(accuracies)) == 1


# ---------------------------------------------------------------- tables, evaluate, predict
def tables(tmp_path: Path, regression: bool = False, n: int = 400) -> tuple[list[Path], np.ndarray, np.ndarray]:
    """The same samples as .npz, .csv and .parquet, the last two with y among the columns."""
    tmp_path.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    X = rng.standard_normal((n, 4)).astype("float32")
    y = X[:, 0] * 2 + 1 if regression else X[:, :3].argmax(1)
    np.savez(tmp_path / "d.npz", X=X, y=y)
    paths = [tmp_path / "d.npz", tmp_path / "d.csv"]
    rows = [[*map(repr, map(float, x[:2])), repr(v.item()), *map(repr, map(float, x[2:]))] for x, v in zip(X, y)]
    paths[1].write_text("\ufeffa, b,kind,c,d\r\n" + "".join(",".join(row) + "\r\n" for row in rows), encoding="utf-8")
    try:
        import pandas
    except ImportError:
        return paths, X, y
    frame = pandas.DataFrame({"a": X[:, 0], "b": X[:, 1], "kind": y, "c": X[:, 2], "d": X[:, 3]})
    frame.to_parquet(tmp_path / "d.parquet")
    return [*paths, tmp_path / "d.parquet"], X, y


@pytest.mark.parametrize("regression", [False, True])
def test_tables_train_evaluate_and_predict_as_arrays_do(tmp_path: Path, regression: bool) -> None:
    paths, X, y = tables(tmp_path, regression)
    weights, said = [], []
    for path in paths:
        out = tmp_path / f"{path.suffix[1:]}.calc"
        layers = "4-16-1" if regression else "4-16-3"
        calcvm("train", path, layers, "--target", "kind", "--epochs", 20, "--learning-rate", 0.02, "--out", out)
        weights.append(cv.load(out).get_weights())
        said.append(calcvm("evaluate", out, path, "--target", "kind"))
        model = cv.load(out)
        names = ["outputs"] if regression else ["classes", "probabilities", "outputs"]
        for what in names:
            wanted = {"classes": "predict_classes", "probabilities": "predict_proba", "outputs": "predict"}[what]
            found = getattr(model, wanted)(X)
            printed = calcvm("predict", out, path, "--target", "kind", "--what", what).splitlines()
            assert len(printed) == 401 and printed[0].startswith(
                {"classes": "class", "probabilities": "prob"}.get(what, "out")
            )
            rows = np.array([[float(n) for n in row.split(",")] for row in printed[1:]])
            assert np.array_equal(rows.astype(found.dtype).reshape(found.shape), found)
            for suffix in (".npy", ".csv", ".parquet")[: 2 if len(paths) == 2 else 3]:
                to = tmp_path / f"p{suffix}"
                assert "400 rows" in calcvm("predict", out, path, "--target", "kind", "--what", what, "--out", to)
                if suffix == ".npy":
                    assert np.array_equal(np.load(to), found)
                elif suffix == ".csv":
                    assert to.read_text().splitlines() == printed
                else:
                    import pandas

                    assert np.array_equal(pandas.read_parquet(to).to_numpy().reshape(found.shape), found)
        assert (
            calcvm("predict", out, path, "--target", "kind")
            == "\n".join(calcvm("predict", out, path, "--target", "kind", "--what", names[0]).splitlines()) + "\n"
        )
    assert all(np.array_equal(a, b) for w in weights for a, b in zip(w.values(), weights[0].values()))
    assert len({*said}) == 1 and said[0].startswith("loss ")


def test_one_output_of_0_and_1_is_a_classifier(tmp_path: Path) -> None:
    paths, X, _ = tables(tmp_path)
    np.savez(tmp_path / "b.npz", X=X, y=(X[:, 0] > 0).astype(int))
    how = ("--epochs", 30, "--learning-rate", 0.02, "--out", tmp_path / "b.calc")
    assert float(re.search(r"accuracy ([\d.]+)", calcvm("train", tmp_path / "b.npz", "4-8-1", *how))[1]) > 0.9
    assert {*calcvm("predict", tmp_path / "b.calc", tmp_path / "b.npz").split()[1:]} == {"0", "1"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "the first line names the columns"),
        (b"1,2,3\n4,5,6\n", "the first line names the columns, such as x1,x2,y; found 1,2,3"),
        (b"a,y\n", "holds nothing"),
        (b"a,y\n1\n", "line 2 has 1 columns, the first line 2"),
        (b"a,y\n1,2,3\n", "line 2 has 3 columns"),
        (b"a,a,y\n1,2,3\n", "two columns are called 'a'"),
        (b"a,b\n1,2\n", "no column 'y'; name the one to predict: there are a, b"),
        (b"y\n1\n", "holds nothing"),
        (b"a,y\n1,setosa\n", "column 'y' has 'setosa' in sample 1: give numbers, of classes 0, 1, 2"),
        (b"a,y\n1,0\n,1\n", "column 'a' has nothing in sample 2"),
        (b"a,y\n\xff,1\n", "not text in UTF-8"),
        (b'a,y\n"1,1\n', "line 2"),
        (b"a|y\n1|1\n", "no column 'y'"),
        (b"a;y\n1,5;1\n", "column 'a' has '1,5' in sample 1"),
    ],
)
def test_tables_that_are_none(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "d.csv").write_bytes(text)
    assert message in refused("train", tmp_path / "d.csv", "1-3", "--out", tmp_path / "m.calc")


def test_what_evaluate_and_predict_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, X, y = tables(tmp_path)
    model = tmp_path / "m.calc"
    calcvm("train", paths[0], "4-3", "--epochs", 1, "--out", model)
    assert "--target names the column" in refused("predict", model, paths[1])
    assert "no column 'y'" in refused("evaluate", model, paths[1])
    assert "take a name that ends with one of .csv, .npy" in refused(
        "predict", model, paths[0], "--out", tmp_path / "p.txt"
    )
    assert "take one of classes" in refused("predict", model, paths[0], "--what", "labels")
    calcvm("train", tables(tmp_path / "r", regression=True)[0][0], "4-1", "--epochs", 1, "--out", tmp_path / "r.calc")
    assert "take --what outputs" in refused("predict", tmp_path / "r.calc", paths[0], "--what", "classes")
    assert "cannot be read" in refused("predict", tmp_path / "none.calc", paths[0])
    for name in ("none.npz", "none.csv", "none.parquet"):
        assert f"{name}: cannot be read" in refused("predict", model, tmp_path / name)
    monkeypatch.setattr(cv, "load", no_work)
    assert "/proc/p.csv: cannot be written" in refused("predict", model, paths[0], "--out", "/proc/p.csv")
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert 'needs pandas: install it with pip install "calcvm[pandas]"' in refused(
        "predict", model, tmp_path / "d.parquet"
    )
    assert 'pip install "calcvm[pandas]"' in refused("predict", model, paths[0], "--out", tmp_path / "p.parquet")


# ---------------------------------------------------------------- columns by name
@pytest.fixture(params=[".csv", ".parquet"])
def suffix(request: pytest.FixtureRequest) -> str:
    if request.param == ".parquet":
        pytest.importorskip("pandas")
    return request.param


def write_columns(path: Path, columns: dict[str, np.ndarray]) -> Path:
    """A table of these columns, in this order, as the path's suffix says."""
    if path.suffix == ".csv":
        rows = zip(*(array.tolist() for array in columns.values()))
        path.write_text("".join(",".join(map(str, row)) + "\n" for row in (columns, *rows)), encoding="utf-8")
    else:
        pytest.importorskip("pandas").DataFrame(columns).to_parquet(path)
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A model of columns a, b, c, which predicts label, and its table.  Each column matters in its own way."""
    rng = np.random.default_rng(0)
    columns = {name: rng.standard_normal(200) for name in "abc"}
    columns["label"] = (columns["a"] + 3 * columns["b"] - 9 * columns["c"] > 1).astype(int)
    folder = tmp_path_factory.mktemp("trained")
    table = write_columns(folder / "d.csv", columns)
    how = ("--target", "label", "--epochs", 5, "--learning-rate", 0.02, "--out", folder / "m.calc")
    calcvm("train", table, "3-8-2", *how)
    return folder / "m.calc", columns


def test_columns_are_found_by_their_names(tmp_path: Path, trained: tuple, suffix: str, whole: bool) -> None:
    """Every order, with and without the target, which has to be named only where it has another name."""
    model, columns = trained
    X = np.stack([columns[name] for name in "abc"], axis=1)
    loaded = cv.load(model)
    assert dict(loaded.notes) == {"table": {"columns": ["a", "b", "c"], "target": "label"}}
    classes = loaded.predict_classes(X).tolist()
    scores = [f"{name} {value:.6g}" for name, value in loaded.evaluate(X, columns["label"]).items()]
    orders = [*permutations(columns)]
    for order in orders if whole else orders[::7]:
        table = write_columns(tmp_path / f"t{suffix}", {name: columns[name] for name in order})
        assert calcvm("evaluate", model, table).splitlines() == scores
        assert [*map(int, calcvm("predict", model, table).split()[1:])] == classes
        inputs = [name for name in order if name != "label"]
        table = write_columns(tmp_path / f"u{suffix}", {name: columns[name] for name in inputs})
        assert [*map(int, calcvm("predict", model, table).split()[1:])] == classes
        assert f"no column 'label'; name the one to predict: there are {', '.join(inputs)}" in refused(
            "evaluate", model, table
        )
        named = {("truth" if name == "label" else name): columns[name] for name in order}
        table = write_columns(tmp_path / f"v{suffix}", named)
        assert calcvm("evaluate", model, table, "--target", "truth").splitlines() == scores
        assert "drop column 'truth': the model was trained on a, b, c" in refused("predict", model, table)
        assert [*map(int, calcvm("predict", model, table, "--target", "truth").split()[1:])] == classes


def test_columns_that_are_missing_or_unknown_are_named(
    tmp_path: Path, trained: tuple, suffix: str, whole: bool
) -> None:
    model, columns = trained
    missing_sets = [m for n in range(4) for m in combinations("abc", n)]
    cases = [*product(missing_sets, ([], ["d"], ["A", ""]), ([], ["label"]))]
    for missing, unknown, target in cases if whole else cases[::3]:
        names = [*unknown, *target, *(name for name in "abc" if name not in missing)]
        if not (missing or unknown) or names == []:
            continue  # all is well, or a file of nothing
        table = write_columns(tmp_path / f"t{suffix}", {name: columns.get(name, columns["a"]) for name in names})
        for command in ("predict", "evaluate") if target else ("predict",):
            said = refused(command, model, table)
            for name in missing or unknown:
                assert repr(name) in said.split("the model was trained on a, b, c")[0]
            assert all(repr(name) in said for name in unknown) and "'label'" not in said
    table = write_columns(tmp_path / f"t{suffix}", columns)
    said = refused("evaluate", model, table, "--target", "b")
    assert "column 'b' is an input of the model, which predicts 'label'" in said


def test_the_target_may_hold_anything_where_it_is_not_read(tmp_path: Path, trained: tuple, suffix: str) -> None:
    model, columns = trained
    for value in ("no", ""):
        table = write_columns(tmp_path / f"t{suffix}", {"label": np.full(200, value), **{n: columns[n] for n in "cab"}})
        assert calcvm("predict", model, table).count("\n") == 201
        assert "column 'label' has" in refused("evaluate", model, table)


def test_a_model_without_names_takes_columns_in_their_order(tmp_path: Path, trained: tuple, suffix: str) -> None:
    """One that was trained on arrays, or whose note is a user's own; and arrays go on without names."""
    model, columns = trained
    inputs = np.stack([columns[name] for name in "bca"], axis=1)
    table = write_columns(tmp_path / f"t{suffix}", {name: columns[name] for name in ("b", "c", "label", "a")})
    np.savez(tmp_path / "t.npz", X=inputs)
    loaded = cv.load(model)
    classes = loaded.predict_classes(inputs).tolist()
    assert [*map(int, calcvm("predict", model, tmp_path / "t.npz").split()[1:])] == classes
    for own in (
        None,
        3,
        "abc",
        ["a", "b", "c"],
        {"columns": "abc", "target": "label"},
        {"columns": [1], "target": "y"},
    ):
        loaded.notes = {} if own is None else {"table": own, "columns": ["mine"]}
        loaded.save(tmp_path / "m.calc")
        assert [*map(int, calcvm("predict", tmp_path / "m.calc", table, "--target", "label").split()[1:])] == classes
    loaded.notes = {**cv.load(model).notes, "mine": 1}
    loaded.save(tmp_path / "m.calc")
    assert [*map(int, calcvm("predict", tmp_path / "m.calc", table).split()[1:])] != classes


@pytest.mark.parametrize("name", ["a", "c", "label"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_the_cell_that_is_not_finite_is_named(
    tmp_path: Path, trained: tuple, suffix: str, name: str, value: float
) -> None:
    model, columns = trained
    columns = {n: columns[n].astype(float) for n in ("label", *"cab")}
    columns[name][13:15] = value
    table = write_columns(tmp_path / f"t{suffix}", columns)
    commands = [("train", table, "3-1", "--target", "label", "--out", tmp_path / "m.calc"), ("evaluate", model, table)]
    for command in (*commands, *([("predict", model, table)] if name != "label" else [])):
        said = refused(*command)
        assert f"column {name!r} has {value} in sample 14: fill it in, or drop the sample" in said


def test_true_and_false_are_1_and_0(tmp_path: Path, suffix: str) -> None:
    rng = np.random.default_rng(0)
    flag, other = rng.random(60) > 0.5, rng.random(60) > 0.3
    said, words = set(), ((str, bool), (str.upper, bool), (str.lower, bool), (None, int))
    for write, kind in words if suffix == ".csv" else words[-2:]:
        columns = {"flag": flag, "a": np.arange(60) / 60, "y": other}
        for name in ("flag", "y"):
            text = write and suffix == ".csv"
            columns[name] = np.array([write(str(v)) for v in columns[name]]) if text else columns[name].astype(kind)
        table = write_columns(tmp_path / f"t{suffix}", columns)
        calcvm("train", table, "2-2", "--epochs", 2, "--out", tmp_path / "m.calc")
        said.add(calcvm("evaluate", tmp_path / "m.calc", table) + calcvm("predict", tmp_path / "m.calc", table))
    assert len(said) == 1 and "accuracy" in said.pop()


@pytest.mark.parametrize("target", [False, True])
@pytest.mark.parametrize("values", [[0.5, 1.5], [0, 1], [True, False]])
@pytest.mark.parametrize(
    ("wrong", "has", "advice"),
    [
        (None, "nothing", "fill it in, or drop the sample or the column"),
        ("red", "'red'", "encode texts as numbers, fill in missing values, or drop the column"),
        ("NA", "'NA'", "encode texts as numbers, fill in missing values, or drop the column"),
        ("2020-01-31", "'2020-01-31'", "encode texts as numbers, fill in missing values, or drop the column"),
        ("1,5", "'1,5'", "write numbers such as 1234.5"),
        ("1,000.5", "'1,000.5'", "write numbers such as 1234.5"),
    ],
)
def test_cells_that_are_no_numbers(
    tmp_path: Path, suffix: str, target: bool, values: list, wrong: str | None, has: str, advice: str
) -> None:
    """What is said of an input's cell is of inputs, of a label's of labels; it names the wrong cell, whatever stands around."""
    column = [str(value) for value in (*values, wrong, *values)]
    column[2] = wrong
    if suffix == ".csv":
        texts = ["" if v is None else f'"{v}"' for v in column]
        (tmp_path / "t.csv").write_text("x,y\n" + "".join(f"1,{v}\n" if target else f"{v},1\n" for v in texts))
    else:
        frame = {"x": [1] * 5, "y": column} if target else {"x": column, "y": [1] * 5}
        pytest.importorskip("pandas").DataFrame(frame).to_parquet(tmp_path / "t.parquet")
    if target:
        advice = "drop the sample" if wrong is None else advice if "1234.5" in advice else "give numbers, of classes"
    said = refused("train", tmp_path / f"t{suffix}", "1-2", "--out", tmp_path / "m.calc")
    assert f"column {'y' if target else 'x'!r} has {has} in sample 3: {advice}" in said


@pytest.mark.parametrize("content", [None, b"", b"PK\3\4 cut", b"\x93NUMPY"])
def test_train_refuses_files(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "d.npz").write_bytes(content)
    assert "d.npz" in refused("train", tmp_path / "d.npz", "6-3")


# ---------------------------------------------------------------- demo
def test_demo_on_the_digits(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    printed = calcvm("demo", "--out", tmp_path)  # exits 1 below 0.96
    assert float(re.search(r"accuracy (0\.\d+)", printed)[1]) >= 0.96
    assert printed.index("<- peak") < printed.index("accuracy") and "us per step" in printed
    assert (tmp_path / "heap.png").read_bytes().startswith(b"\x89PNG")
    assert cv.load(tmp_path / "model.calc").predict(np.zeros((2, 64), np.uint8)).shape == (2, 10)


def test_demo_of_lenet(tmp_path: Path, whole: bool) -> None:
    pytest.importorskip("sklearn")
    printed = calcvm("demo", "--network", "lenet", "--out", tmp_path, *(() if whole else ("--epochs", 3)))
    assert "LeNet on 16 by 16" in printed
    assert float(re.search(r"accuracy (0\.\d+)", printed)[1]) >= (0.985 if whole else 0.9)
    assert cv.load(tmp_path / "model.calc").predict(np.zeros((2, 1, 8, 8), np.uint8)).shape == (2, 10)
    assert "take one of mlp, lenet, resnet18" in refused("demo", "--network", "le", "--out", tmp_path)


@pytest.mark.parametrize("zipped", [False, True])
def test_demo_on_idx_files(tmp_path: Path, zipped: bool) -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, 500)
    images = rng.integers(0, 60, (500, 28, 28))  # noise, and a bright patch that tells the class
    for image, label in zip(images, labels):
        image[2 * label : 2 * label + 4, 4:20] += 180
    write_mnist(tmp_path, images, labels, zipped)
    printed = calcvm("demo", "--data", tmp_path, "--out", tmp_path, "--epochs", 30, "--seed", 1, "--workers", 1)
    assert "784-64-64-10" in printed and "400 images to learn from, 100 held out" in printed


def test_demo_on_photographs(tmp_path: Path, whole: bool) -> None:
    write_cifar10(tmp_path, "archive", cifar10_files(20))
    for network, says in (("lenet", "LeNet on 32 by 32"), ("mlp", "3072-64-64-10"), ("resnet18", "ResNet-18")):
        if whole or network == "lenet":
            how = ("--data", tmp_path, "--out", tmp_path / network, "--epochs", 1)
            printed = calcvm("demo", "--network", network, *how)
            assert says in printed and "80 images to learn from, 20 held out" in printed
            assert ("crop_fwd" in cv.load(tmp_path / network / "model.calc").program.disassemble()) == (
                network != "mlp"
            )


def test_demo_fails_below_its_accuracy(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    write_mnist(tmp_path, rng.integers(0, 256, (50, 4, 4)), rng.integers(0, 10, 50))
    assert "is below 0.96" in refused("demo", "--data", tmp_path, "--out", tmp_path)


def test_demo_of_few_epochs_has_not_failed(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    write_mnist(tmp_path, rng.integers(0, 256, (50, 4, 4)), rng.integers(0, 10, 50))
    assert "after 1 epochs" in calcvm("demo", "--data", tmp_path, "--out", tmp_path, "--epochs", 1)
