"""The examples run, at a reduced size, and do what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import llvmlite.binding as llvm
import pytest

from tests.test_plan_page import BROWSER, QUIET

ROOT = Path(__file__).parent.parent


def run(name: str, *arguments: str) -> str:
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / f"{name}.py"), "--quick", *arguments],
        capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_architecture_search(tmp_path: Path) -> None:
    for package in ("optuna", "sklearn", "matplotlib"):
        pytest.importorskip(package)
    out = run("nas", "--out", str(tmp_path))
    assert "12 trials: " in out and "failed" not in out
    best, together = map(float, re.search(r"best model ([\d.]+), the five best together ([\d.]+)", out).groups())  # type: ignore[union-attr]
    assert best > 0.5 and together > 0.5
    assert (tmp_path / "nas.png").read_bytes()[:4] == b"\x89PNG"


def test_a_model_for_each_user_goes_on_where_it_stopped(tmp_path: Path) -> None:
    first, again = (run("per_user", "--store", str(tmp_path / "users")) for _ in range(2))
    assert "0 models found" in first and "60 made" in first and "300 epochs" in first
    assert "60 models found" in again and "0 made" in again
    errors = [float(re.search(r"one for each ([\d.]+)", out)[1]) for out in (first, again)]  # type: ignore[index]
    assert errors[1] < errors[0]


def test_sensors_learn_one_sample_at_a_time(tmp_path: Path) -> None:
    first, again = (run("online", "--store", str(tmp_path / "sensors")) for _ in range(2))
    assert "a model takes 3,840 bytes, 40 of them 153,600" in first
    assert "0 models found" in first and "40 models found" in again and "24,000 forecasts" in first
    early, middle, after, late = map(float, re.findall(r"error .+? ([\d.]+), of the value before", first))
    still = float(re.findall(r"of the value before ([\d.]+)", first)[-1])
    assert middle < early / 2 and after > 1.3 * middle and late < after / 2 and late < 0.7 * still


def test_each_means_of_the_planner_takes_less_memory(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = run("waterfall", "--out", str(tmp_path))
    apart, lifetimes, in_place, inlined, again, lasting = (
        int(n.replace(",", "")) for n in re.findall(r"[\d,]{7,}", out)
    )
    assert apart > lifetimes and in_place > inlined >= again > lasting
    assert (tmp_path / "waterfall.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("name", ["gan", "wgan_gp"])
def test_two_networks_draw_digits(tmp_path: Path, name: str) -> None:
    for package in ("sklearn", "matplotlib"):
        pytest.importorskip(package)
    out = run(name, "--out", str(tmp_path))
    sure = {what: float(share) for what, share in re.findall(r"(\w+) +a classifier is sure of ([\d.]+)", out)}
    assert sure["drawn"] > 0.3 and sure["noise"] < 0.1 < sure["scanned"]
    assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    if name == "wgan_gp":  # the critic's slope is near 1
        assert float(re.findall(r"penalty ([\d.]+)", out)[-1]) < 0.1


def test_a_network_solves_the_heat_equation(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = run("heat", "--out", str(tmp_path))
    assert float(re.search(r"the largest error is ([\d.]+)", out)[1]) < 0.1  # type: ignore[index]
    assert (tmp_path / "heat.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("name", ["filters", "saliency", "grad_cam"])
def test_a_trained_network_is_looked_into(name: str, tmp_path: Path, whole: bool) -> None:
    if name != "grad_cam" and not whole:
        pytest.skip("takes --whole")
    for package in ("sklearn", "matplotlib"):
        pytest.importorskip(package)
    out = run(name, "--out", str(tmp_path / "seen.png"))
    assert float(re.search(r"accuracy ([\d.]+)", out)[1]) > 0.9  # type: ignore[index]
    assert (tmp_path / "seen.png").read_bytes()[:4] == b"\x89PNG"


def figures(pattern: str, out: str) -> dict[str, float]:
    """The figures after the names that a pattern finds."""
    return {name.strip(): float(figure) for name, figure in re.findall(pattern, out)}


def test_a_stream_finds_what_is_wrong_with_a_machine(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = run("anomalies", "--out", str(tmp_path))
    auc = figures(r"(\S+) +AUC ([\d.]+)", out)
    assert auc["GRU"] > 0.8 and auc["GRU"] > auc["z-score"] + 0.03 and "us a reading" in out
    assert (tmp_path / "anomalies.png").read_bytes()[:4] == b"\x89PNG"


def test_a_forecast_is_better_than_last_year(tmp_path: Path) -> None:
    for package in ("statsmodels", "sklearn", "matplotlib"):
        pytest.importorskip(package)
    out = run("forecast", "--out", str(tmp_path))
    error = figures(r"(.{13}) error ([\d.]+) degrees", out)
    assert len(error) == 4 and error["networks"] < 0.85 * error["last year"]
    assert (tmp_path / "forecast.png").read_bytes()[:4] == b"\x89PNG"


def test_gestures_of_unequal_lengths_are_told_apart(tmp_path: Path) -> None:
    for package in ("seglearn", "sklearn", "matplotlib"):
        pytest.importorskip(package)
    out = run("gestures", "--out", str(tmp_path))
    accuracy = figures(r"(.{18}) accuracy ([\d.]+)", out)
    assert accuracy["GRU"] > accuracy["nearest neighbours"] > 0.4
    assert (tmp_path / "gestures.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(("name", "package"), [("forecast", "statsmodels"), ("gestures", "seglearn")])
def test_an_example_without_its_data_says_what_to_install(name: str, package: str, tmp_path: Path) -> None:
    (tmp_path / f"{package}.py").write_text("")  # a package of this name, and no data in it
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src")])
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py"), "--quick"],
        capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 1 and f"pip install {package}" in done.stderr and "Traceback" not in done.stderr


def test_a_gpt_learns_to_write(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = run("gpt", "--out", str(tmp_path))
    held, letters, bigrams, trigrams = map(
        float,
        re.search(r"held out: ([\d.]+) .+ letters ([\d.]+), .+ ([\d.]+), .+ ([\d.]+)", out).groups(),  # type: ignore[union-attr]
    )
    assert trigrams < bigrams < letters and held < (letters + bigrams) / 2
    assert "a character: The for stat" in out
    assert (tmp_path / "gpt.png").read_bytes()[:4] == b"\x89PNG"


def test_an_agent_that_remembers_balances_what_it_sees_in_part(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = run("remember", "--out", str(tmp_path))
    returns = figures(r"(with memory|without) +mean return +([\d.]+)", out)
    assert returns["with memory"] > 2 * returns["without"]
    assert (tmp_path / "remember.png").read_bytes()[:4] == b"\x89PNG"


def test_an_agent_learns_to_balance() -> None:
    out = run("agent")
    assert "the agent takes 55,808 bytes" in out
    returns = float(re.search(r"mean return (\d+) after 10,240 decisions", out)[1])  # type: ignore[index]
    assert returns > 50  # at first about 22
    assert "PyTorch" in out


def test_firmware_learns_digits_while_its_power_fails(tmp_path: Path) -> None:
    for package in ("sklearn", "ziglang", "matplotlib", "unicorn"):
        pytest.importorskip(package)
    out = run("firmware", "--out", str(tmp_path))
    assert out.count("the power fails") == 3
    accuracies = [float(a) for a in re.findall(r"accuracy ([\d.]+)", out)]
    assert len(accuracies) == 5 and accuracies[-1] == accuracies[-2] > 0.8  # the PC's is that of the last epoch
    assert (tmp_path / "firmware.png").read_bytes()[:4] == b"\x89PNG"


def test_a_hub_of_detectors_goes_on_after_its_power_fails(tmp_path: Path) -> None:
    for package in ("ziglang", "matplotlib"):
        pytest.importorskip(package)
    if not llvm.get_host_cpu_features().get("avx2", False):
        pytest.skip("this machine is no x86-64-v3")
    out = run("hub", "--out", str(tmp_path))
    size, heap = (int(n.replace(",", "")) for n in re.findall(r"([\d,]+) bytes; one heap of ([\d,]+)", out)[0])
    assert size + heap < 1_000_000
    early, late = map(float, re.findall(r"reading: ([\d.]+) of the pairs", out))
    assert early < 0.75 and late > early + 0.1
    assert (tmp_path / "hub.png").read_bytes()[:4] == b"\x89PNG"


def test_a_page_learns_digits(tmp_path: Path) -> None:
    """One file under 40 KB, which a browser opens without a server."""
    for package in ("sklearn", "ziglang"):
        pytest.importorskip(package)
    out = run("browser", "--out", str(tmp_path))
    size = (tmp_path / "learn.html").stat().st_size
    assert size < 40_000 and f"{size:,} bytes" in out
    if BROWSER is None:
        pytest.skip("no Chromium is installed")
    page = f"{(tmp_path / 'learn.html').as_uri()}#learn"
    command = [
        BROWSER,
        *QUIET,
        f"--user-data-dir={tmp_path / 'user'}",
        "--virtual-time-budget=5000",
        "--dump-dom",
        page,
    ]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    loss, right = re.search(r"Epoch 20: loss ([\d.]+); of 60 .*?, (\d+) are right", shown).groups()  # type: ignore[union-attr]
    assert float(loss) < 0.2 and int(right) > 50
