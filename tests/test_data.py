"""The loaders, on small IDX files written here."""

from __future__ import annotations

import builtins
import gzip
import io
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest

from calcvm import data
from calcvm.errors import CalcError, MissingExtra

CODES = {"u1": 0x08, "i1": 0x09, ">i2": 0x0B, ">i4": 0x0C, ">f4": 0x0D, ">f8": 0x0E}


def idx_bytes(array: np.ndarray, dtype: str = "u1") -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, CODES[dtype], array.ndim, *array.shape) + array.astype(dtype).tobytes()


def write_mnist(directory: Path, images: np.ndarray, labels: np.ndarray, zipped: bool = False) -> None:
    for name, array in (("images-idx3", images), ("labels-idx1", labels)):
        content = idx_bytes(array)
        path = directory / f"train-{name}-ubyte{'.gz' if zipped else ''}"
        path.write_bytes(gzip.compress(content) if zipped else content)


@pytest.fixture
def images() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (7, 5, 3)).astype(np.uint8)


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("shape", [(), (4,), (3, 1, 2), (0, 5)])
def test_reads_back_what_was_written(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    written = np.random.default_rng(1).integers(0, 100, shape).astype(dtype)
    (tmp_path / "a").write_bytes(idx_bytes(written, dtype))
    read = data.read_idx(tmp_path / "a")
    assert read.dtype == np.dtype(dtype).newbyteorder("=") and read.dtype.isnative
    assert np.array_equal(read, written) and read.shape == shape


@pytest.mark.parametrize("zipped", [False, True])
def test_mnist_gives_flat_images_and_labels(tmp_path: Path, images: np.ndarray, zipped: bool) -> None:
    write_mnist(tmp_path, images, np.arange(7), zipped)
    X, y = data.mnist(tmp_path)
    assert X.dtype == y.dtype == np.uint8
    assert np.array_equal(X, images.reshape(7, 15)) and np.array_equal(y, np.arange(7))


def test_gzip_is_told_by_content_not_by_name(tmp_path: Path, images: np.ndarray) -> None:
    (tmp_path / "a.gz").write_bytes(idx_bytes(images))
    (tmp_path / "b").write_bytes(gzip.compress(idx_bytes(images)))
    assert np.array_equal(data.read_idx(tmp_path / "a.gz"), data.read_idx(tmp_path / "b"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b"", "not an IDX file"),
        (lambda b: b"\x89PNG" + b[4:], "not an IDX file .it begins with 89504e47"),
        (lambda b: b[:2] + b"\x0a" + b[3:], "not an IDX file"),  # no such element type
        (lambda b: b[:3] + b"\x01" + b[4:], "has 1 dimensions, expected 3"),
        (lambda b: b[:9], "truncated in its header .9 of 16 bytes"),
        (lambda b: b[:-1], "needs 105 bytes, the file has 104"),
        (lambda b: b + b"\0", "longer than shape"),
        (lambda b: b[:4] + b"\xff" * 12 + b[16:], "truncated: shape"),  # announces 7e28 bytes
    ],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_damaged_files_are_refused(tmp_path: Path, images: np.ndarray, change, message: str, zipped: bool) -> None:
    content = change(idx_bytes(images))
    (tmp_path / "a").write_bytes(gzip.compress(content) if zipped else content)
    with pytest.raises(CalcError, match=message):
        data.read_idx(tmp_path / "a", rank=3)


@pytest.mark.parametrize("keep", [12, 40, -9, -4])
def test_damaged_gzip_is_refused(tmp_path: Path, images: np.ndarray, keep: int) -> None:
    (tmp_path / "a").write_bytes(gzip.compress(idx_bytes(images))[:keep])
    with pytest.raises(CalcError, match="damaged gzip|truncated"):
        data.read_idx(tmp_path / "a")


def test_altered_gzip_is_refused(tmp_path: Path, images: np.ndarray) -> None:
    content = bytearray(gzip.compress(idx_bytes(images)))
    content[-6] ^= 1  # its checksum
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(CalcError, match="damaged gzip"):
        data.read_idx(tmp_path / "a")


def test_missing_files_are_named(tmp_path: Path, images: np.ndarray) -> None:
    with pytest.raises(CalcError, match="cannot be read"):
        data.read_idx(tmp_path / "nothing")
    with pytest.raises(CalcError, match="no such directory"):
        data.mnist(tmp_path / "nothing")
    with pytest.raises(CalcError, match=r"neither train-images-idx3-ubyte nor train-images-idx3-ubyte\.gz"):
        data.mnist(tmp_path)
    write_mnist(tmp_path, images, np.arange(7))
    with pytest.raises(CalcError, match="neither t10k-images"):
        data.mnist(tmp_path, "t10k")


CIFAR10 = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]


def cifar10_files(count: int = 4) -> dict[str, bytes]:
    rng = np.random.default_rng(2)
    records = (np.hstack([rng.integers(0, 10, (count, 1)), rng.integers(0, 256, (count, 3072))]) for _ in CIFAR10)
    return {name: array.astype(np.uint8).tobytes() for name, array in zip(CIFAR10, records)}


def write_cifar10(directory: Path, how: str, files: dict[str, bytes]) -> None:
    """As files, in the folder of the archive, or as the archive."""
    if how != "archive":
        folder = directory if how == "files" else directory / "cifar-10-batches-bin"
        folder.mkdir(exist_ok=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)
        return
    with tarfile.open(directory / "cifar-10-binary.tar.gz", "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


@pytest.mark.parametrize("how", ["files", "folder", "archive"])
def test_cifar10_gives_images_channels_first(tmp_path: Path, how: str) -> None:
    files = cifar10_files()
    write_cifar10(tmp_path, how, files)
    for part, names in (("train", CIFAR10[:5]), ("test", CIFAR10[5:])):
        X, y = data.cifar10(tmp_path, part)
        assert X.dtype == y.dtype == np.uint8 and X.shape == (4 * len(names), 3, 32, 32) and X.flags.c_contiguous
        records = np.frombuffer(b"".join(files[name] for name in names), np.uint8).reshape(-1, 3073)
        assert np.array_equal(y, records[:, 0])
        assert X[3, 2, 5, 7] == records[3, 1 + 2 * 1024 + 5 * 32 + 7]
    assert np.array_equal(data.images(tmp_path)[0], data.cifar10(tmp_path)[0])


@pytest.mark.parametrize("how", ["files", "archive"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b[:-1], r"data_batch_2\.bin: 12291 bytes are not a multiple of an image's 3073 bytes"),
        (lambda b: b"", r"data_batch_2\.bin: 0 bytes"),
        (lambda b: b[:3073] + b"\x0a" + b[3074:], r"data_batch_2\.bin: image 1 has the label 10, expected 0 to 9"),
    ],
)
def test_damaged_files_of_cifar10_are_refused(tmp_path: Path, how: str, change, message: str) -> None:
    files = cifar10_files()
    write_cifar10(tmp_path, how, {**files, CIFAR10[1]: change(files[CIFAR10[1]])})
    with pytest.raises(CalcError, match=message):
        data.cifar10(tmp_path)


@pytest.mark.parametrize("keep", [3, 200, -9, 0])
def test_damaged_archives_are_refused(tmp_path: Path, keep: int) -> None:
    write_cifar10(tmp_path, "archive", cifar10_files())
    archive = tmp_path / "cifar-10-binary.tar.gz"
    content = bytearray(archive.read_bytes())
    content[-6] ^= keep == 0  # its checksum
    archive.write_bytes(content[: keep or None])
    with pytest.raises(CalcError, match=r"cifar-10-binary\.tar\.gz: .*fetch it again"):
        data.cifar10(tmp_path)


def test_missing_files_of_cifar10_are_named(tmp_path: Path) -> None:
    with pytest.raises(CalcError, match=r"neither data_batch_1\.bin nor cifar-10-binary\.tar\.gz"):
        data.cifar10(tmp_path)
    (tmp_path / "cifar-10-batches-py").mkdir()
    with pytest.raises(CalcError, match="cifar-10-batches-py is the version for Python, which is pickled and not read"):
        data.cifar10(tmp_path)
    with pytest.raises(CalcError, match=r"neither train-images-idx3-ubyte, .* nor cifar-10-binary"):
        data.images(tmp_path)
    files = cifar10_files()
    write_cifar10(tmp_path, "files", {name: files[name] for name in CIFAR10[:3]})
    with pytest.raises(CalcError, match=r"neither data_batch_4\.bin"):
        data.images(tmp_path)
    with pytest.raises(CalcError, match="no such directory"):
        data.images(tmp_path / "nothing")
    with pytest.raises(CalcError, match="part"):
        data.cifar10(tmp_path, "t10k")
    (tmp_path / "other").mkdir()
    write_cifar10(tmp_path / "other", "archive", {name: files[name] for name in CIFAR10[1:]})
    with pytest.raises(CalcError, match=r"does not hold data_batch_1\.bin"):
        data.cifar10(tmp_path / "other")


def test_sets_that_do_not_fit_are_refused(tmp_path: Path, images: np.ndarray) -> None:
    write_mnist(tmp_path, images, np.arange(6))
    with pytest.raises(CalcError, match="7 images.* 6 labels"):
        data.mnist(tmp_path)
    write_mnist(tmp_path, images[:0], np.arange(0))
    with pytest.raises(CalcError, match="holds no images"):
        data.mnist(tmp_path)
    write_mnist(tmp_path, images, np.zeros((7, 1, 1)))
    with pytest.raises(CalcError, match="has 3 dimensions, expected 1"):
        data.mnist(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx_bytes(np.arange(7), ">i4"))
    with pytest.raises(CalcError, match="labels int32, expected unsigned bytes"):
        data.mnist(tmp_path)


def test_digits_are_the_1797_scans() -> None:
    pytest.importorskip("sklearn")
    X, y = data.digits()
    assert X.shape == (1797, 64) and X.dtype == y.dtype == np.uint8
    assert X.max() == 16 and sorted(set(y.tolist())) == list(range(10))


def test_digits_without_scikit_learn_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args, **kwargs):
        if name.startswith("sklearn"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingExtra, match=r"calcvm\[demo\]"):
        data.digits()


@pytest.mark.parametrize(("n", "held_out", "n_test"), [(10, 0.2, 2), (1797, 0.2, 359), (2, 0.01, 1), (3, 0.99, 2)])
def test_split_is_a_partition_and_deterministic(n: int, held_out: float, n_test: int) -> None:
    X, y = np.arange(2 * n).reshape(n, 2), np.arange(n)
    parts = data.train_test_split(X, y, held_out, seed=3)
    X_train, y_train, X_test, y_test = parts
    assert len(X_test) == n_test
    assert sorted([*y_train, *y_test]) == list(range(n))
    assert np.array_equal(X_train, X[y_train]) and np.array_equal(X_test, X[y_test])
    assert all(np.array_equal(a, b) for a, b in zip(parts, data.train_test_split(X, y, held_out, seed=3)))
    if n > 3:
        assert not np.array_equal(y_test, data.train_test_split(X, y, held_out, seed=4)[3])


@pytest.mark.parametrize(
    ("X", "y", "held_out", "message"),
    [
        (np.zeros(3), np.zeros(4), 0.2, "X has 3 samples, y has 4"),
        (np.zeros(1), np.zeros(1), 0.2, "at least two"),
        (np.zeros(0), np.zeros(0), 0.2, "at least two"),
        (np.zeros(5), np.zeros(5), 1.0, "between 0 and 1"),
        (np.zeros(5), np.zeros(5), float("nan"), "between 0 and 1"),
    ],
)
def test_split_refuses(X: np.ndarray, y: np.ndarray, held_out: float, message: str) -> None:
    with pytest.raises(CalcError, match=message):
        data.train_test_split(X, y, held_out)
