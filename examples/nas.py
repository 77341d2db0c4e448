"""Neural architecture search: how deep, how wide, which activation?  On 1797 scanned digits, in less than a minute.

Needs ``pip install "calcvm[demo,explore]"``.  Prints the best architectures, and the accuracy of the five best together on
digits that the search has never seen; draws the search into out/nas.png.

    python examples/nas.py [--trials N] [--quick]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import calcvm as cv
from calcvm import nn
from calcvm.data import digits, train_test_split

ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "gelu": nn.GELU}
SPACE = {
    "depth": [0, 1, 2, 3],  # hidden layers; none: a linear classifier
    "width": (8, 64, 4),
    "activation": list(ACTIVATIONS),
    "learning_rate": (1e-4, 1e-1, "log"),
}


def build(trial: cv.Trial) -> cv.CalcGraph:
    """The network of a trial.  Another learning rate needs no other program, because it is a value in the heap."""
    net = nn.Sequential(nn.Scale(1 / 16))  # raw pixels are 0 to 16
    for _ in range(trial["depth"]):
        net = net >> nn.Linear(trial["width"]) >> ACTIVATIONS[trial["activation"]]()
    net = net >> nn.Linear(10)
    return cv.build_graph(net, (64,), "softmax_cross_entropy", cv.Adam(trial["learning_rate"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument(
        "--quick", action="store_true", help="few trials of few epochs: shows that it runs, finds little"
    )
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the picture")
    args = parser.parse_args()
    trials, epochs = (12, 3) if args.quick else (args.trials, 30)

    X, y, X_test, y_test = train_test_split(*digits(), seed=1)
    result = cv.explore(
        build,
        SPACE,
        data=(X, y),
        validation=0.25,  # for the search; the test digits are for the end
        n_trials=trials,
        epochs=epochs,
        metric="val_accuracy",
        memory="64 MiB",
        keep=5,
        progress=not args.quick,
    )
    print(result)
    print()
    best, ensemble = result.top(1)[0], result.ensemble(5)
    print(f"on {len(X_test)} unseen digits: best model {best.evaluate(X_test, y_test)['accuracy']:.4f}, ", end="")
    print(f"the five best together {ensemble.evaluate(X_test, y_test)['accuracy']:.4f}")

    args.out.mkdir(parents=True, exist_ok=True)
    result.picture(args.out / "nas.png")
    print(f"picture: {args.out / 'nas.png'}")


if __name__ == "__main__":
    main()
