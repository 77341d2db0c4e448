"""The data of the experiments: MNIST where its files are given, made-up data of its size elsewhere, and the digits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from bench.mlp import BIG_BATCH, DIGITS
from bench.peers import Task

TEST_SAMPLES = 1000


@dataclass
class Source:
    """A classification task: what to train on and to judge by, and the paper's network for it."""

    name: str
    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray

    @property
    def sizes(self) -> list[int]:
        return [self.x.shape[1], *DIGITS[1:]]

    def first(self, n: int) -> Source:
        """The same with fewer samples to train on."""
        return Source(self.name, self.x[:n], self.y[:n], self.x_test, self.y_test)

    @contextmanager
    def files(self) -> Iterator[tuple[list[str], list[str]]]:
        """Paths of arrays to train on, and of those to judge by."""
        with TemporaryDirectory() as folder:
            paths = [str(Path(folder) / name) for name in ("x.npy", "y.npy", "x_test.npy", "y_test.npy")]
            for path, array in zip(paths, (self.x, self.y, self.x_test, self.y_test)):
                np.save(path, array)
            yield paths[:2], paths[2:]


def sources(folder: str | Path | None) -> list[Source]:
    """The large task, which is MNIST or made up; and the digits, where scikit-learn is installed."""
    from calcvm.data import digits, mnist, train_test_split
    from calcvm.errors import MissingExtra

    if folder is None:
        task = Task(DIGITS)
        found = [Source("made-up data of MNIST's size", *task.sample(BIG_BATCH), *task.sample(TEST_SAMPLES, seed=2))]
    else:
        (x, y), (x_test, y_test) = mnist(folder), mnist(folder, "t10k")
        held = x_test[:TEST_SAMPLES], y_test[:TEST_SAMPLES]
        found = [Source("MNIST", *_scaled(x[:BIG_BATCH], y[:BIG_BATCH], 255), *_scaled(*held, 255))]
    try:
        x, y, x_test, y_test = train_test_split(*digits())
    except MissingExtra:
        return found
    return [*found, Source("the digits", *_scaled(x, y, 16), *_scaled(x_test, y_test, 16))]


def _scaled(x: np.ndarray, y: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray]:
    return (x / top).astype(np.float32), y.astype(np.int64)
