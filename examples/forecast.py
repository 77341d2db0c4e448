"""Small GRUs forecast the temperature of the Pacific, twelve months ahead, and so an El Nino: real data, honest baselines.

The data are statsmodels' ``elnino``, the mean temperature of the sea off Peru in each month from 1950 to 2010.  The last 15 years are
forecast, from the months before alone, and never trained on.  Beside the networks: the same month of last year (seasonal naive), the
mean of the month in the years of training, and Holt-Winters, fitted again for each forecast.

Needs ``pip install "calcvm[demo]" statsmodels``.  Draws out/forecast.png.

    python examples/forecast.py [--quick] [--out FOLDER]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

import calcvm as cv
from calcvm import nn

PAST, AHEAD, TEST = 24, 12, 180  # months that a forecast reads; that it covers; at the end, for the test
MODELS = 8  # with other first weights; their mean is the forecast


def temperatures() -> np.ndarray:
    """Degrees Celsius of each month, from January 1950 to December 2010."""
    try:
        from statsmodels.datasets import elnino
    except ImportError:
        raise SystemExit("forecast.py takes its data from statsmodels: pip install statsmodels") from None
    return elnino.load_pandas().data.iloc[:, 1:].to_numpy().reshape(-1)


def holt_winters(past: np.ndarray) -> np.ndarray:
    from statsmodels.tsa.holtwinters import ExponentialSmoothing

    return ExponentialSmoothing(past, trend=None, seasonal="add", seasonal_periods=12).fit().forecast(AHEAD)


def networks(series: np.ndarray, epochs: int) -> cv.Ensemble:
    """Networks that read PAST months of a series of features, and forecast its first feature for the next AHEAD."""
    windows = np.lib.stride_tricks.sliding_window_view(series, PAST + AHEAD, axis=0).transpose(0, 2, 1)
    X, y = windows[:, :PAST], windows[:, PAST:, 0]
    fleet = cv.Fleet(memory="8 MiB")
    for seed in range(MODELS):
        net = nn.GRU(16, return_sequences=False) >> nn.Dropout(0.3) >> nn.Linear(AHEAD)
        schedule = cv.Cosine(epochs * (len(X) // 32))
        fleet.add(
            net, input_shape=X.shape[1:], loss="mae", optimizer=cv.AdamW(5e-3, schedule=schedule), batch_size=32, data=(X, y), seed=seed
        )  # fmt: skip
    return cv.Ensemble(fleet.fit(epochs=epochs, progress=False).best(MODELS))


def picture(months: np.ndarray, errors: dict[str, np.ndarray], shown: dict[int, np.ndarray], path: Path) -> None:
    """Draw some forecasts over the months, and the error of each method by how far ahead it forecasts."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (line, far) = plt.subplots(1, 2, figsize=(10, 4), width_ratios=(2, 1))
    years = 1950 + np.arange(len(months)) / 12
    line.plot(years[-TEST:], months[-TEST:], color="gray", label="measured")
    for k, (start, forecast) in enumerate(shown.items()):
        line.plot(years[start : start + AHEAD], forecast, color="C3", label="" if k else "networks, a year ahead")
    line.set(ylabel="degrees Celsius", title="the sea off Peru")
    line.legend()
    for name, error in errors.items():
        far.plot(range(1, AHEAD + 1), error.mean(axis=0), label=name)
    far.set(xlabel="months ahead", title="mean absolute error", ylim=(0, None))
    far.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few epochs and forecasts: shows that it runs")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the picture")
    args = parser.parse_args()

    months = temperatures()
    split = len(months) - TEST
    year = months[:split].reshape(-1, 12).mean(axis=0)  # the mean of each month
    usual, angle = np.resize(year, len(months)), np.arange(len(months)) * 2 * np.pi / 12
    series = np.stack([months - usual, np.sin(angle), np.cos(angle)], axis=1)
    ensemble = networks(series[:split], epochs=5 if args.quick else 40)

    starts = range(split, len(months) - AHEAD + 1, 24 if args.quick else 3)
    forecasts: dict[str, list[np.ndarray]] = {"networks": [], "last year": [], "mean year": [], "Holt-Winters": []}
    for start in starts:
        ahead = slice(start, start + AHEAD)
        forecasts["networks"].append(usual[ahead] + ensemble.predict(series[None, start - PAST : start])[0])
        forecasts["last year"].append(months[start - 12 : start])
        forecasts["mean year"].append(usual[ahead])
        forecasts["Holt-Winters"].append(holt_winters(months[:start]))
    truth = np.stack([months[start : start + AHEAD] for start in starts])
    errors = {name: np.abs(np.stack(found) - truth) for name, found in forecasts.items()}
    scale = np.abs(
        months[12:split] - months[: split - 12]
    ).mean()  # of the mean absolute scaled error, Hyndman and Koehler 2006
    print(f"{len(truth)} forecasts of {AHEAD} months, each from the months before it")
    for name, error in errors.items():
        near = error[:, :3].mean()
        print(
            f"{name:13} error {error.mean():.3f} degrees, of the next 3 months {near:.3f}; MASE {error.mean() / scale:.3f}"
        )
    picture(
        months,
        errors,
        {s: f for s, f in zip(starts, forecasts["networks"]) if (s - split) % 24 == 0},
        args.out / "forecast.png",
    )
    print(f"picture: {args.out / 'forecast.png'}")


if __name__ == "__main__":
    main()
