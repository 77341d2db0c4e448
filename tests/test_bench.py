"""The benchmarks run: smoke runs of the workloads' commands, without judging a time."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import WORKLOADS

ROOT = Path(__file__).parent.parent


def run(*arguments):
    done = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.peers
def test_the_training_step_beside_pytorch():
    pytest.importorskip("torch")
    out = run("bench", "mlp", "--quick", "--who", "ours,torch_eager")
    assert "torch eager" in out and "DISAGREES" not in out


@pytest.mark.slow
def test_a_row_of_the_table():
    out = run("pytest", "-q", "bench/test_micro.py", "-k", "tanh", "--benchmark-disable", "-p", "no:cacheprovider")
    assert " passed" in out


@pytest.mark.slow
def test_the_search_of_architectures():
    pytest.importorskip("optuna")
    out = run("bench", "exploration", "--quick")
    assert "60 trials" in out and "FAILED" not in out


@pytest.mark.slow
@pytest.mark.peers
def test_the_estimators_beside_scikit_learn():
    pytest.importorskip("sklearn", minversion="1.7")
    out = run("bench", "estimators", "--quick")
    assert "FleetSearchCV" in out and "FAILED" not in out


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.parametrize(("workload", "shows"), [("fleet", "4 architectures"), ("paper", "4.5: models of")])
def test_many_models_beside_pytorch(workload, shows):
    pytest.importorskip("torch")
    out = run("bench", workload, "--quick")
    assert shows in out and "torch eager" in out and "FAILED" not in out


@pytest.mark.slow
def test_switching_models():
    out = run("bench", "switching", "--quick")
    assert "random switches among 20 models" in out and "FAILED" not in out


def test_every_workload_has_a_command():
    for module in (*WORKLOADS, "report"):
        assert importlib.util.find_spec(f"bench.{module}")
    assert "--quick" in run("bench", "--help")
