"""The benchmarks run: smoke runs of the workloads' commands, without judging a time."""

import importlib.util
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from bench import gpu, harness, report
from bench.__main__ import WORKLOADS
from tests.conftest import no_gpu

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
def test_a_row_of_the_table(whole):
    some = () if whole else ("-k", "tanh or max_pool_bwd-32x28")
    out = run("pytest", "-q", "bench/test_micro.py", *some, "--benchmark-disable", "-p", "no:cacheprovider")
    assert " passed" in out


@pytest.fixture
def when_whole(whole):
    if not whole:
        pytest.skip("takes --whole")


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.usefixtures("when_whole")
@pytest.mark.parametrize(("workload", "shows"), [("operators", "max_pool backward"), ("images", "resnet18, batch 2")])
def test_operators_and_networks_for_images_beside_pytorch(workload, shows):
    pytest.importorskip("torch")
    out = run("bench", workload, "--quick")
    assert shows in out and "FAILED" not in out


@pytest.mark.slow
@pytest.mark.usefixtures("when_whole")
def test_the_search_of_architectures():
    pytest.importorskip("optuna")
    out = run("bench", "exploration", "--quick")
    assert "6 trials" in out and "FAILED" not in out


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.usefixtures("when_whole")
def test_convolutions_beside_onednn():
    pytest.importorskip("torch")
    out = run("bench", "convolution", "--quick")
    assert "mobilenet_v2" in out and "FAILED" not in out


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.usefixtures("when_whole")
def test_the_estimators_beside_scikit_learn():
    pytest.importorskip("sklearn", minversion="1.7")
    out = run("bench", "estimators", "--quick")
    assert "FleetSearchCV" in out and "FAILED" not in out


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.usefixtures("when_whole")
@pytest.mark.parametrize(("workload", "shows"), [("fleet", "4 architectures"), ("paper", "4.5: models of")])
def test_many_models_beside_pytorch(workload, shows):
    pytest.importorskip("torch")
    out = run("bench", workload, "--quick")
    assert shows in out and "torch eager" in out and "FAILED" not in out


@pytest.mark.slow
def test_stores():
    out = run("bench", "stores", "--quick")
    assert "every 5 epochs, durable" in out and "SQLite" in out and "FAILED" not in out


@pytest.mark.slow
def test_switching_models():
    out = run("bench", "switching", "--quick")
    assert "random switches among 20 models" in out and "FAILED" not in out


def test_every_workload_has_a_command():
    for module in (*WORKLOADS, "gpu", "report"):
        assert importlib.util.find_spec(f"bench.{module}")
    assert "--quick" in run("bench", "--help")


# ---------------------------------------------------------------- on a GPU
@pytest.mark.skipif(not no_gpu(), reason="there is a GPU")
def test_without_a_gpu_its_benchmark_says_so():
    command = [sys.executable, "-m", "bench", "gpu", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and gpu.NOT_MEASURED in done.stdout, done.stdout + done.stderr


def test_the_report_keeps_what_was_measured_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "OUTPUT", tmp_path / "RESULTS.md")
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    (tmp_path / "results").mkdir()

    def store(name, title, number, **more):
        target = {
            "number": number,
            "what": f"{name} is fast",
            "value": 2.0,
            "bound": ">= 1 x",
            "unit": "x",
            "reached": True,
        }
        monkeypatch.setattr(harness, "RESULTS", tmp_path / "results")
        data = {
            "title": title, "command": f"python -m bench {name}", "machine": {**harness.machine()}, "notes": ["a note"],
            "limits": {"fma_gflops": 100.0, "copy_gbs": 10.0}, "targets": [target], "pictures": [], **more,
            "tables": [{"title": "a table", "header": ["a", "b"], "rows": [["1", "2"]]}],
        }  # fmt: skip
        (tmp_path / "results" / f"{name}.json").write_text(json.dumps(data))

    store("mlp", "Steps", "P1")
    report.main()
    first = report.OUTPUT.read_text()
    assert "## Steps" in first and gpu.NOT_MEASURED in first and "1 of 1 reached" in first
    report.main()
    assert report.OUTPUT.read_text() == first
    (tmp_path / "results" / "mlp.json").unlink()
    store("gpu-tiny", f"{report.GPU}: a tiny network", "P12", gpu={"text": "some GPU"})
    report.main()
    second = report.OUTPUT.read_text()
    assert "## Steps" in second and "mlp is fast" in second and "2 of 2 reached" in second
    assert "GPU: some GPU." in second and gpu.NOT_MEASURED not in second


def test_the_operations_of_a_step_are_those_of_its_matrix_products():
    mlp, limits = import_module("bench.gpu.mlp"), import_module("bench.gpu.limits")
    gpu_ = limits.Limits("one of round numbers", 132, "9.0", "13.0", 1 << 30, flops=1.0, bandwidth=1e30)
    for sizes, batch in (cases for part in mlp.CASES.values() for cases in part):
        flops, _ = mlp.limit_of(gpu_, sizes, batch)
        products = mlp.Task(sizes).step_flops(batch)
        assert (
            products < flops < products + 40 * (batch * sum(sizes) + sum(a * b + b for a, b in zip(sizes, sizes[1:])))
        )


@pytest.mark.slow
@pytest.mark.peers
def test_the_contestants_on_a_gpu_compute_what_calcvm_computes():
    """On the processor, without CUDA graphs: the same losses and weights after the same steps."""
    pytest.importorskip("torch")
    peers = import_module("bench.gpu.peers")
    task = peers.Task([12, 16, 16, 5])
    x, y = task.sample(24)
    kinds = [peers.Ours, peers.TorchGraph, peers.TorchFunctional]
    if importlib.util.find_spec("jax"):
        kinds.append(peers.JaxScanPlain)
    outcomes = []
    for kind in kinds:
        contestant = kind(task, x, y, "cpu")
        contestant.restart()
        contestant.steps(5)
        contestant.restart()
        outcomes.append((contestant.steps(peers.VERIFY_STEPS), contestant.weights()))
    loss, weights = outcomes[0]
    for kind, (other, theirs) in zip(kinds, outcomes):
        assert other == pytest.approx(loss, rel=1e-5), kind
        for mine, their in zip(weights, theirs):
            for a, b in zip(mine, their):
                np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5, err_msg=str(kind))


@pytest.mark.slow
@pytest.mark.peers
def test_many_models_on_a_gpu_compute_what_calcvm_computes():
    pytest.importorskip("torch")
    many = import_module("bench.gpu.many")
    tasks = [many.Many([6, 8, 8, 3], 5, 8, 4), many.Many([6, 8, 3], 4, 8, 4)]
    names = ["ours", "ours_apart", "torch_stacked_graph", "torch_vmap_graph"]
    names += ["jax_vmap_plain"] if importlib.util.find_spec("jax") else []
    outcomes = {}
    for name in names:
        contestant = many.CONTESTANTS[name](tasks, "cpu")
        contestant.train(1)
        first = contestant.losses()
        contestant.train(2)
        outcomes[name] = np.concatenate([first, contestant.losses()])
        assert contestant.models == 9 and len(outcomes[name]) == 18
    for name, losses in outcomes.items():
        np.testing.assert_allclose(losses, outcomes["ours"], rtol=1e-5, err_msg=name)


def test_rows_that_measure_a_gpu_have_all_their_words_and_operands():
    machine = import_module("bench.gpu.machine")
    rows = [*machine.tiny_rows(1, True), *(machine.linear(*product, 132)[0] for product in machine.PRODUCTS)]
    for name, words, offsets, _ in rows:
        spec = machine.row_spec(name)
        assert [w.name for w in spec.words] == [*words] and {o.name for o in spec.operands} == {*offsets}, name


def test_the_chains_that_measure_a_gpu_are_fmas():
    pytest.importorskip("numba_cuda")
    assert ".entry fma(" in import_module("bench.gpu.limits").fma_ptx((9, 0))
