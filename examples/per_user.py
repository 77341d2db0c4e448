"""2000 people, 2000 models: a small recommender for each person, trained at once in a heap of 64 MiB and kept in a folder.

Each person rates films by an individual taste.  One network for all learns the average taste; one network per person
learns theirs.  Run the program again and every model continues where it stopped, even after a kill.

    python examples/per_user.py [--users N] [--quick]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

import calcvm as cv
from calcvm import nn

TRAITS, RATINGS, HELD_OUT = 16, 160, 40  # per film; per person; of those, for validation
BATCH = 20


def ratings(users: int) -> tuple[np.ndarray, np.ndarray]:
    """Made-up ratings: films (users * RATINGS, TRAITS) and their ratings, one person after the other."""
    rng = np.random.default_rng(0)
    films = rng.standard_normal((users, RATINGS, TRAITS))
    common, own = rng.standard_normal(TRAITS), rng.standard_normal((users, TRAITS))
    bored = rng.standard_normal((users, TRAITS)) / 2  # too much of a thing is as bad as too little
    liked = films @ (0.5 * common) + np.einsum("urt,ut->ur", films, own) - np.einsum("urt,ut->ur", films**2, bored)
    liked = np.tanh(liked / 4) + 0.1 * rng.standard_normal(liked.shape)
    return films.reshape(-1, TRAITS).astype("float32"), liked.reshape(-1, 1).astype("float32")


def network() -> nn.Sequential:
    return nn.Linear(24) >> nn.Tanh() >> nn.Linear(12) >> nn.Tanh() >> nn.Linear(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--users", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--store", type=Path, default=Path("out/users"), help="folder that keeps the models")
    parser.add_argument("--quick", action="store_true", help="few people and epochs: shows that it runs, learns little")
    args = parser.parse_args()
    users, epochs = (60, 5) if args.quick else (args.users, args.epochs)

    films, liked = ratings(users)
    graph = cv.build_graph(network(), (TRAITS,), "mse", cv.Adam(3e-3))
    program = cv.compile(graph, batch_size=BATCH, workers=1)
    fleet = cv.Fleet(memory="64 MiB", store=cv.FileStore(args.store))
    print(f"a model takes {program.heap_bytes:,} bytes: {fleet.heap.nbytes // program.heap_bytes:,} fit at once")

    known = {*fleet.heap.names}
    start = time.perf_counter()
    for user in range(users):
        first = user * RATINGS
        fleet.add(
            f"user-{user}" if f"user-{user}" in known else program,
            data=(films, liked),  # shared: each model reads a range of it
            samples=slice(first, first + RATINGS - HELD_OUT),
            validation=slice(first + RATINGS - HELD_OUT, first + RATINGS),
            seed=user,
            name=f"user-{user}",
            patience=3,  # each model stops by its own held-out ratings
        )
    before, added = sum(h.epochs_done for h in fleet.handles.values()), time.perf_counter()
    results = fleet.fit(epochs, checkpoint=10, progress=not args.quick)
    done, seconds = int(results.column("epochs").sum()) - before, time.perf_counter() - added
    print(f"{len(known)} models found in {args.store}, {users - len(known)} made, in {added - start:.1f} s")
    print(f"{done:,} epochs of {RATINGS - HELD_OUT} ratings in {seconds:.1f} s, writing {users} files included")

    held = np.arange(len(films)) % RATINGS >= RATINGS - HELD_OUT
    everyone = cv.Model(network(), input_shape=(TRAITS,), loss="mse", optimizer=cv.Adam(3e-3), batch_size=BATCH)
    everyone.fit(films[~held], liked[~held], epochs=1 if args.quick else 3, progress=False)
    common = everyone.evaluate(films[held], liked[held])["loss"]
    print(f"error on ratings that were held out: one model for all {common:.4f}, ", end="")
    print(f"one for each {results.column('val_loss').mean():.4f}")

    new = np.random.default_rng(1).standard_normal((1000, TRAITS)).astype("float32")
    for user in (0, users - 1):
        scores = fleet.handles[f"user-{user}"].model.predict(new)[:, 0]
        print(f"user-{user} would like the films {', '.join(map(str, scores.argsort()[:-6:-1]))}")
    fleet.heap.close()


if __name__ == "__main__":
    main()
