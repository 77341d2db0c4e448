"""The examples run, at a reduced size, and do what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_an_agent_learns_to_balance() -> None:
    out = run("agent")
    assert "the agent takes 55,808 bytes" in out
    returns = float(re.search(r"mean return (\d+) after 10,240 decisions", out)[1])  # type: ignore[index]
    assert returns > 50  # at first about 22
    assert "PyTorch" in out
