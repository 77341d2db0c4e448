"""Loaders of data: .npz, .csv and .parquet files, IDX files (MNIST's format), CIFAR-10, scikit-learn's bundled digits."""

from __future__ import annotations

import csv
import gzip
import io
import math
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from calcvm.errors import CalcError, MissingExtra, telling
from calcvm.tables import some

__all__ = ["cifar10", "digits", "images", "mnist", "read_idx", "samples", "train_test_split"]

_IDX_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_CHUNK_BYTES = 1 << 20


def read_idx(path: str | Path, rank: int | None = None) -> np.ndarray:
    """Read an IDX file, gzipped or not (detected by its first bytes).

    Parameters
    ----------
    path : str or Path
    rank : int, optional
        The number of dimensions that the file must have: 3 for MNIST's images, 1 for its labels.

    Returns
    -------
    ndarray, of the file's shape and element type, in native byte order

    Raises
    ------
    CalcError
        The file is missing, is not an IDX file, has another rank, or is shorter or longer than its header says.

    References
    ----------
    http://yann.lecun.com/exdb/mnist/ ("the IDX file format")
    """
    path = Path(path)
    try:
        with path.open("rb") as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            if not zipped:
                return _read_idx(raw, path, rank)
            with gzip.open(raw) as unzipped:
                return _read_idx(unzipped, path, rank)  # type: ignore[arg-type]
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise CalcError(f"{path}: damaged gzip data ({error}); fetch the file again") from error
    except OSError as error:
        raise CalcError(f"{path}: cannot be read ({error.strerror or error})") from error


def _read_idx(file: BinaryIO, path: Path, rank: int | None) -> np.ndarray:
    magic = file.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in _IDX_TYPES:
        raise CalcError(f"{path}: not an IDX file (it begins with {magic.hex() or 'nothing'}, not 0000, type, rank)")
    dtype, file_rank = np.dtype(_IDX_TYPES[magic[2]]), magic[3]
    if rank is not None and file_rank != rank:
        raise CalcError(f"{path}: has {file_rank} dimensions, expected {rank} (images have 3, labels 1)")
    header = file.read(4 * file_rank)
    if len(header) < 4 * file_rank:
        raise CalcError(f"{path}: truncated in its header ({4 + len(header)} of {4 + 4 * file_rank} bytes)")
    shape = tuple(int(n) for n in np.frombuffer(header, ">u4"))
    expected = math.prod(shape) * dtype.itemsize
    data = bytearray()  # read in chunks: a damaged header may claim any size
    while len(data) <= expected and (chunk := file.read(min(_CHUNK_BYTES, expected + 1 - len(data)))):
        data += chunk
    if len(data) < expected:
        raise CalcError(f"{path}: truncated: shape {shape} needs {expected} bytes, the file has {len(data)}")
    if len(data) > expected:
        raise CalcError(f"{path}: longer than shape {shape}, which needs {expected} bytes")
    return np.frombuffer(data, dtype).reshape(shape).astype(dtype.newbyteorder("="), copy=False)


def mnist(directory: str | Path, part: str = "train") -> tuple[np.ndarray, np.ndarray]:
    """MNIST, or a data set in its format such as Fashion-MNIST, from a directory of IDX files.

    The files are ``<part>-images-idx3-ubyte`` and ``<part>-labels-idx1-ubyte``, with or without ``.gz``.

    Parameters
    ----------
    directory : str or Path
    part : {"train", "t10k"}

    Returns
    -------
    X : ndarray, shape (n_images, height * width), uint8
    y : ndarray, shape (n_images,), uint8

    Raises
    ------
    CalcError
        A file is missing or damaged, or the numbers of images and labels differ.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise CalcError(f"{directory}: no such directory; name the one that holds {part}-images-idx3-ubyte")
    images_path, labels_path = (_find(directory, f"{part}-{name}-ubyte") for name in ("images-idx3", "labels-idx1"))
    images, labels = read_idx(images_path, rank=3), read_idx(labels_path, rank=1)
    if len(images) != len(labels):
        raise CalcError(f"{images_path} has {len(images)} images, but {labels_path} has {len(labels)} labels")
    if images.dtype != np.uint8 or labels.dtype != np.uint8:
        raise CalcError(f"{directory}: images are {images.dtype} and labels {labels.dtype}, expected unsigned bytes")
    if len(images) == 0:
        raise CalcError(f"{images_path}: holds no images")
    return images.reshape(len(images), -1), labels


def _find(directory: Path, name: str) -> Path:
    for path in (directory / name, directory / f"{name}.gz"):
        if path.exists():
            return path
    raise CalcError(f"{directory}: holds neither {name} nor {name}.gz")


CIFAR10_FILES = {"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]}
CIFAR10_FOLDER, CIFAR10_ARCHIVE = "cifar-10-batches-bin", "cifar-10-binary.tar.gz"
CIFAR10_SHAPE, CIFAR10_CLASSES = (3, 32, 32), 10


def cifar10(directory: str | Path, part: str = "train") -> tuple[np.ndarray, np.ndarray]:
    """CIFAR-10 in its binary version.

    Its files, ``data_batch_1.bin`` to ``data_batch_5.bin`` and ``test_batch.bin``, are in the directory, in
    ``cifar-10-batches-bin`` there, or inside ``cifar-10-binary.tar.gz`` there, which need not be unpacked.  The Python version
    is not read, because it is pickled and loading a pickle runs code in it.

    Parameters
    ----------
    directory : str or Path
    part : {"train", "test"}

    Returns
    -------
    X : ndarray, shape (n_images, 3, 32, 32), uint8, channels red, green, blue
    y : ndarray, shape (n_images,), uint8, classes 0 to 9

    Raises
    ------
    CalcError
        A file is missing or damaged.

    References
    ----------
    https://www.cs.toronto.edu/~kriz/cifar.html ("Binary version")
    """
    if part not in CIFAR10_FILES:
        raise CalcError(f"part {part!r} of CIFAR-10 is unknown: take one of {', '.join(CIFAR10_FILES)}")
    names = CIFAR10_FILES[part]
    directory = Path(directory)
    folder = next((d for d in (directory, directory / CIFAR10_FOLDER) if (d / names[0]).exists()), None)
    if folder is None and (directory / CIFAR10_ARCHIVE).exists():
        files = _inside(directory / CIFAR10_ARCHIVE, names)
    else:
        files = {path: _whole(path) for path in ((folder or directory) / name for name in names)}
    sets = [_cifar10(path, content) for path, content in files.items()]
    X, y = (np.concatenate(arrays) for arrays in zip(*sets))
    return X, y


def _whole(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        pickled = [d for d in (path.parent / path.stem, path.parent / "cifar-10-batches-py") if d.exists()]
        hint = f"; {pickled[0].name} is the version for Python, which is pickled and not read" if pickled else ""
        raise CalcError(
            f"{path.parent}: holds neither {path.name} nor {CIFAR10_ARCHIVE}, CIFAR-10's binary version{hint}"
        ) from error
    except OSError as error:
        raise CalcError(f"{path}: cannot be read ({error.strerror or error})") from error


def _inside(archive: Path, names: list[str]) -> dict[Path, bytes]:
    """Files of an archive, by path.  Nothing is unpacked to disk."""
    try:
        with gzip.open(archive) as unzipped:
            with tarfile.open(fileobj=unzipped, mode="r|") as tar:
                members = ((Path(member.name).name, member) for member in tar if member.isfile())
                found = {n: tar.extractfile(member).read() for n, member in members if n in names}  # type: ignore[union-attr]
            while unzipped.read(_CHUNK_BYTES):  # to the end, to verify the checksum
                pass
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise CalcError(f"{archive}: damaged archive ({error}); fetch it again") from error
    except OSError as error:
        raise CalcError(f"{archive}: cannot be read ({error.strerror or error})") from error
    if missing := [name for name in names if name not in found]:
        raise CalcError(f"{archive}: does not hold {missing[0]}; fetch it again")
    return {archive / name: found[name] for name in names}


def _cifar10(path: Path, content: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of one file, whose records are a label and an image."""
    size = 1 + math.prod(CIFAR10_SHAPE)
    if not content or len(content) % size:
        raise CalcError(f"{path}: {len(content)} bytes are not a multiple of an image's {size} bytes; fetch it again")
    records = np.frombuffer(content, np.uint8).reshape(-1, size)
    if (wrong := np.flatnonzero(records[:, 0] >= CIFAR10_CLASSES)).size:
        raise CalcError(
            f"{path}: image {wrong[0]} has the label {records[wrong[0], 0]}, expected 0 to 9; fetch it again"
        )
    return records[:, 1:].reshape(-1, *CIFAR10_SHAPE), records[:, 0]


def images(directory: str | Path) -> tuple[np.ndarray, np.ndarray]:
    """The training set in a directory, by `mnist` or by `cifar10`, whichever has files there.

    Raises
    ------
    CalcError
        As for these two, or neither has files there.
    """
    directory = Path(directory)
    if any((directory / name).exists() for name in (*CIFAR10_FILES["train"], CIFAR10_FOLDER, CIFAR10_ARCHIVE)):
        return cifar10(directory)
    if directory.is_dir() and not any(directory.glob("train-*-ubyte*")):
        raise CalcError(
            f"{directory}: holds neither train-images-idx3-ubyte, of MNIST or a set in its format, nor {CIFAR10_ARCHIVE}, "
            "CIFAR-10's binary version"
        )
    return mnist(directory)


def digits() -> tuple[np.ndarray, np.ndarray]:
    """scikit-learn's bundled digits: 1797 scans of 8 by 8 pixels, grey levels 0 to 16.

    Returns
    -------
    X : ndarray, shape (1797, 64), uint8
    y : ndarray, shape (1797,), uint8

    Raises
    ------
    MissingExtra
        scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingExtra("scikit-learn", "demo", "the digits data set") from error
    X, y = load_digits(return_X_y=True)
    return X.astype(np.uint8), y.astype(np.uint8)


def train_test_split(
    X: np.ndarray, y: np.ndarray, held_out: float = 0.2, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Shuffle and split samples.  The same seed gives the same split.

    Parameters
    ----------
    X, y : ndarray, of equal lengths
    held_out : float
        The fraction of samples to hold out, in (0, 1); rounded to at least one sample on either side.
    seed : int

    Returns
    -------
    X_train, y_train, X_test, y_test : ndarray

    Raises
    ------
    CalcError
        Lengths differ, there are fewer than two samples, or ``held_out`` is not a fraction.
    """
    n = len(X)
    if n != len(y):
        raise CalcError(f"X has {n} samples, y has {len(y)}: they must be equal")
    if n < 2:
        raise CalcError(f"{n} samples cannot be split: at least two are needed")
    if not 0 < held_out < 1:
        raise CalcError(f"held_out is {held_out}, expected a fraction between 0 and 1")
    n_test = min(max(round(n * held_out), 1), n - 1)
    order = np.random.Generator(np.random.PCG64(seed)).permutation(n)
    test, train = np.sort(order[:n_test]), np.sort(order[n_test:])
    return X[train], y[train], X[test], y[test]


# ---------------------------------------------------------------- samples in files
TABLES = (".csv", ".parquet")


class Columns(NamedTuple):
    """Names of a table's columns: the inputs, in the model's order, and the one to predict."""

    columns: list[str]
    target: str


def samples(
    path: str | Path, target: str | None = None, labelled: bool = True, learned: Columns | None = None
) -> tuple[np.ndarray, np.ndarray | None, Columns | None]:
    """Samples and their targets, from a file.

    Parameters
    ----------
    path : str or Path
        A .npz file with arrays X (samples first) and y, or a table of numbers: .csv with names in its first line, or .parquet
        (extra ``pandas``).
    target : str, optional
        The column of a table that is y; default: that of ``learned``, or "y".  The others are X, in order.
    labelled : bool
        Whether y is required.  If not, a column of its name is still left out of X.
    learned : Columns, optional
        The columns that a model was trained on.  X has these columns of a table, in this order, wherever they are in the file.

    Returns
    -------
    X : ndarray, shape (n_samples, ...)
    y : ndarray, shape (n_samples, ...), or None.  From a table it is int64 if all values are integers, written without a
        point, or true and false, which are 1 and 0.
    columns : Columns, or None for a .npz file

    Raises
    ------
    CalcError : the file cannot be read, or has other contents; the message gives column and line.  A column of ``learned``
        is missing, or there is an additional one.
    MissingExtra : pandas or pyarrow is not installed, for .parquet.
    """
    path = Path(path)
    kind = path.suffix.lower()
    table = None
    if kind in TABLES:
        names, column = _csv(path) if kind == ".csv" else _parquet(path)
        if len({*names}) < len(names):
            raise CalcError(f"{path}: two columns are called {next(n for n in names if names.count(n) > 1)!r}")
        if target is None:
            target = learned.target if learned else "y"
        if labelled and target not in names:
            raise CalcError(f"{path}: no column {target!r}; name the one to predict: there are {some(names)}")
        if learned:
            _check_columns(path, names, target, learned)
        table = Columns(learned.columns if learned else [name for name in names if name != target], target)
        y = column(target, True) if labelled else None
        inputs = [column(name, False) for name in table.columns]
        X = np.stack(inputs, axis=1) if inputs else np.zeros((0 if y is None else len(y), 0))
    else:
        X, y = _npz(path, labelled)
    if X.ndim < 2 or (y is not None and (y.ndim < 1 or len(X) != len(y))):
        said = "" if y is None else f" and y {y.shape}"
        raise CalcError(f"{path}: X {X.shape}{said}: give X (samples, ...)" + ("" if y is None else " and as many y"))
    if X.size == 0:
        raise CalcError(f"{path}: X {X.shape} holds nothing to {'learn' if labelled else 'predict'} from")
    return X, y, table


def _check_columns(path: Path, names: list[str], target: str, learned: Columns) -> None:
    """Raise CalcError unless a table has exactly the columns that a model was trained on."""
    if target in learned.columns:
        raise CalcError(f"{path}: column {target!r} is an input of the model, which predicts {learned.target!r}")
    there, known = {*names}, {*learned.columns, learned.target, target}
    missing, unknown = [n for n in learned.columns if n not in there], [n for n in names if n not in known]
    if missing:
        rest = f"; the model does not know {_quoted(unknown)}" if unknown else ""
        raise CalcError(f"{path}: no column {_quoted(missing)}: the model was trained on {some(learned.columns)}{rest}")
    if unknown:
        raise CalcError(f"{path}: drop column {_quoted(unknown)}: the model was trained on {some(learned.columns)}")


def _quoted(names: list[str]) -> str:
    return some([*map(repr, names)])


def array(path: Path) -> np.ndarray:
    """The array of a .npy file (CalcError: it is none; FileError: it cannot be read)."""
    try:
        with telling(str(path), "read"), path.open("rb") as file:
            found = np.load(file, allow_pickle=False)
        if not isinstance(found, np.ndarray):
            raise ValueError("an archive of arrays")
        return found
    except CalcError:
        raise
    except (ValueError, EOFError) as error:
        raise CalcError(f"{path}: no .npy file of a plain array: write it with numpy.save(path, x)") from error


def _npz(path: Path, labelled: bool) -> tuple[np.ndarray, np.ndarray | None]:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            if not ({"X", "y"} if labelled else {"X"}) <= set(archive.files):
                wanted = "X and y are needed" if labelled else "X is needed"
                raise CalcError(f"{path}: has arrays {', '.join(archive.files) or 'none'}; {wanted}")
            return archive["X"], archive["y"] if labelled else None
    except (OSError, EOFError, zipfile.BadZipFile) as error:
        raise CalcError(f"{path}: cannot be read as .npz ({error})") from error
    except (ValueError, AttributeError, TypeError) as error:  # a pickle, or a bare .npy
        if isinstance(error, CalcError):
            raise
        raise CalcError(
            f"{path}: not an .npz file of plain arrays; write it with numpy.savez(path, X=X, y=y)"
        ) from error


def _csv(path: Path) -> tuple[list[str], Callable[[str, bool], np.ndarray]]:
    """Column names of a table, and a function from a name (and whether it is y) to the column's numbers."""
    try:
        with telling(str(path), "read"), path.open(encoding="utf-8-sig", newline="") as file:
            first = file.readline()
            file.seek(0)
            lines = csv.reader(file, strict=True, delimiter=max(",;\t", key=first.count))
            names = [name.strip() for name in next(lines, [])]
            if not names or any(_number(name) is not None for name in names):
                raise CalcError(
                    f"{path}: the first line names the columns, such as x1,x2,y; found {','.join(names) or 'none'}"
                )
            rows = []
            for row in lines:
                if len(row) != len(names) and row:
                    raise CalcError(
                        f"{path}: line {lines.line_num} has {len(row)} columns, the first line {len(names)}"
                    )
                if row:
                    rows.append(row)
    except UnicodeDecodeError as error:
        raise CalcError(f"{path}: not text in UTF-8 ({error.reason} at byte {error.start})") from error
    except csv.Error as error:
        raise CalcError(f"{path}: line {lines.line_num}: {error}") from error
    texts = dict(zip(names, zip(*rows) if rows else [()] * len(names)))
    return names, lambda name, labels: _column(path, name, labels, texts[name])


def _column(path: Path, name: str, labels: bool, texts: tuple[str, ...]) -> np.ndarray:
    """A column's numbers; int64 if all are written as integers, or as true and false."""
    for read, kind in ((np.int64, np.int64), (np.float64, np.float64), (_boolean, np.int64)):
        try:
            return np.array([read(text) for text in texts], kind)
        except (ValueError, OverflowError):
            continue
    others = [i for i, text in enumerate(texts) if _number(text) is None]
    row = next((i for i in others if texts[i].strip().lower() not in BOOLEANS), others[0])
    text = texts[row]
    if not text.strip():
        advice = "drop the sample" if labels else "fill it in, or drop the sample or the column"
    elif _number(text.replace(",", "")) is not None:
        advice = "write numbers such as 1234.5"
    elif labels:
        advice = "give numbers, of classes 0, 1, 2 and so on"
    else:
        advice = "encode texts as numbers, fill in missing values, or drop the column"
    what = repr(text) if text.strip() else "nothing"
    raise CalcError(f"{path}: column {name!r} has {what} in sample {row + 1}: {advice}")


BOOLEANS = ("false", "true")


def _boolean(text: str) -> int:
    return BOOLEANS.index(text.strip().lower())


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _parquet(path: Path) -> tuple[list[str], Callable[[str, bool], np.ndarray]]:
    pandas = _pandas("a .parquet file")
    try:
        with telling(str(path), "read"), path.open("rb") as file:
            frame = pandas.read_parquet(file)
    except ImportError as error:
        raise MissingExtra("pyarrow", "pandas", "a .parquet file") from error
    except CalcError:
        raise
    except Exception as error:  # pyarrow has its own types
        raise CalcError(f"{path}: cannot be read as .parquet ({error})") from error
    frame.columns = [str(name).strip() for name in frame.columns]

    def column(name: str, labels: bool) -> np.ndarray:
        array = frame[name].to_numpy()
        if array.dtype.kind not in "iufb":  # such as decimals, numbers as text, or booleans with missing values
            texts = zip(array, frame[name].isna())
            return _column(path, name, labels, tuple("" if nothing else str(value) for value, nothing in texts))
        return array.astype(np.int64 if array.dtype.kind in "iub" else np.float64)

    return [*frame.columns], column


def _pandas(purpose: str) -> Any:
    try:
        import pandas
    except ImportError as error:
        raise MissingExtra("pandas", "pandas", purpose) from error
    return pandas


# ---------------------------------------------------------------- results in files
WRITTEN = (".csv", ".npy", ".parquet")


def check_writable(path: Path) -> None:
    """Raise CalcError if `write_table` cannot write a path of this name."""
    if path.suffix.lower() not in WRITTEN:
        raise CalcError(f"{path}: take a name that ends with one of {', '.join(WRITTEN)}")
    if path.suffix.lower() == ".parquet":
        _pandas("a .parquet file")


def write_table(file: BinaryIO, kind: str, what: str, found: np.ndarray) -> None:
    """Write predictions: .npy in their shape; .csv and .parquet with one row per sample."""
    rows = found.reshape(len(found), -1)
    names = columns(what, rows.shape[1])
    if kind == ".npy":
        np.save(file, found)
    elif kind == ".parquet":
        _pandas("a .parquet file").DataFrame(rows, columns=names).to_parquet(file)
    else:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(names)
        writer.writerows(rows.tolist())
        text.detach()


def columns(what: str, n: int) -> list[str]:
    """Column names of predictions: ``class``, or ``output_0``, ``output_1``, ..."""
    one = {"classes": "class", "probabilities": "probability", "outputs": "output"}[what]
    return [one] if n == 1 else [f"{one}_{i}" for i in range(n)]
