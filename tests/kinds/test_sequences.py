"""Networks of sequences, drawn at random: beside PyTorch in float64, by teams of any size, and step by step."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable

import numpy as np
import pytest

import calcvm as cv

torch = pytest.importorskip("torch")

from tests.conftest import whole_of  # noqa: E402
from tests.kinds.sequences import Network  # noqa: E402

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore:softmax_cross_entropy takes scores")]
TRAINED, STREAMED, SAMPLE = 500, 300, 24


def numbers(metafunc, name, whole):  # type: ignore[no-untyped-def]
    if name in metafunc.fixturenames:
        metafunc.parametrize(name, range(whole if whole_of(metafunc) else SAMPLE))


def pytest_generate_tests(metafunc) -> None:  # type: ignore[no-untyped-def]
    numbers(metafunc, "trained", TRAINED)
    numbers(metafunc, "streamed", STREAMED)


def model_of(of: Network, program: cv.Program, workers: int = 1) -> cv.Model:
    model = cv.CalcHeap(program.heap_bytes).create(program, seed=0, workers=workers)
    model.set_parameters(of.weights)
    for name, value in of.data.items():
        model[name] = value
    return model


def close(found: np.ndarray, wanted: torch.Tensor, tolerance: float, what: str) -> None:
    wanted = wanted.detach().numpy()
    np.testing.assert_allclose(
        found, wanted, rtol=tolerance, atol=tolerance * max(1.0, np.abs(wanted).max(initial=0)), err_msg=what
    )


def test_beside_pytorch(trained: int) -> None:
    """Outputs, losses, all gradients and parameters of five steps by SGD, to 1e-9; teams of two and three have the bits of one."""
    of = Network(trained, stream=trained % 3 == 0)
    program = cv.compile(of.graph, batch_size=of.n, dtype="float64", workers=3, accumulate=True)
    bits = []
    for workers in (1, 2, 3):
        model, told, p = model_of(of, program, workers), [], of.learn()
        optimizer = torch.optim.SGD(p.values(), 0.02)
        for step in range(5):
            model.forward("learn")
            model.backward("learn")
            told.append([np.array(model[name]).tobytes() for name in ("out", "loss")])
            told.append([model.grad(name).tobytes() for name in p])
            if workers == 1:
                optimizer.zero_grad()
                y = of.expected(of.data["input"], of.there())
                loss = of.expected_loss(y)
                loss.backward() if loss.requires_grad else None
                on = of.there().numpy() if y.ndim == 3 else slice(None)
                close(model["out"][on], y[on], 1e-9, f"output, step {step} of {of}")
                close(model["loss"], loss, 1e-9, f"loss, step {step} of {of}")
                for name, q in p.items():
                    grad = torch.zeros_like(q) if q.grad is None else q.grad
                    close(model.grad(name), grad, 1e-9, f"gradient of {name}, step {step} of {of}")
                optimizer.step()
            model.optimize("learn")
            model.end_round("learn")
        told.append([model[name].tobytes() for name in p])
        bits.append(told)
        for name, q in p.items() if workers == 1 else ():
            close(model[name], q, 1e-9, f"{name} after five steps of {of}")
    assert bits[0] == bits[1] == bits[2], of


# ---------------------------------------------------------------- step by step
def from_a_file(model: cv.Model) -> cv.Model:
    file = io.BytesIO()
    model.save(file, state=True)
    file.seek(0)
    return cv.load(file)


def switched(model: cv.Model) -> cv.Model:
    """The same model, out of its heap, where another one changes its own state, and in again."""
    other = model.copy()
    assert model.record.slot is None
    other.reset_state()
    other.stream("stream", place=0)(np.zeros(model.loaded.shape("step", 1)))
    other.close()
    return model


MOVES: dict[str, Callable[[cv.Model], cv.Model]] = {
    "file": from_a_file, "copy": lambda m: m.copy(heap=cv.CalcHeap(m.program.heap_bytes)), "switch": switched,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
}  # fmt: skip


def played(
    of: Network, model: cv.Model, reset: tuple[int, list[int]], moves: dict[int, str]
) -> tuple[np.ndarray, dict]:
    """The answers to all steps of a stream of all samples, and of another one of the last sample, (steps, n + 1, ...).

    Before some step some samples begin again, and before others the model moves.  Also the states in the end.
    """
    x, found = of.data["input"], []
    for t in range(of.steps):
        if t in moves:
            model = MOVES[moves[t]](model)
        if t == reset[0]:
            model.reset_state(reset[1])
        pair = model.stream(batch=of.n, place=0), model.stream(batch=1, place=of.n)
        found.append(np.concatenate([pair[0](x[:, t]), pair[1](x[-1:, t])]))
    return np.array(found), {name: state.copy() for name, state in model.carries.items()}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_step_by_step(streamed: int, dtype: str) -> None:
    """Streams give what the sequence gives at once, also after a reset of single samples, and whatever moves the model in between."""
    of, rng = Network(streamed, stream=True), np.random.default_rng(streamed)
    if of.ragged:
        of.data["lengths"][:] = of.steps
    program, begin = cv.compile(of.graph, batch_size=of.n + 1, dtype=dtype, workers=2), int(rng.integers(of.steps))
    again = sorted(rng.choice(of.n, rng.integers(of.n + 1), replace=False).tolist())
    moves = {int(t): str(rng.choice([*MOVES])) for t in rng.integers(0, of.steps, 3)}
    model = model_of(of, program)
    model.forward("predict")
    at_once = model["output"]
    found, states = played(of, model, (begin, again), {})
    for workers, how in ((2, {}), (1, moves)):
        bits, after = played(of, model_of(of, program, workers), (begin, again), how)
        assert bits.tobytes() == found.tobytes(), f"{how}, {workers} workers: {of}"
        assert {name: v.tobytes() for name, v in after.items()} == {name: v.tobytes() for name, v in states.items()}

    of.learn()
    on = torch.ones(of.n, of.steps, dtype=torch.bool)
    whole, last = of.expected(of.data["input"], on).transpose(0, 1), of.states()
    far = np.abs(at_once.swapaxes(0, 1) - whole.detach().numpy()).max() / max(1.0, whole.abs().max().item())
    assert far < (1e-9 if dtype == "float64" else 1e-4), of
    # norms of two features that are almost equal make more of a rounding: then a few times that of the sequence at once
    tolerance = 1e-9 if dtype == "float64" else max(1e-6, 4 * far)
    part, later = of.expected(of.data["input"][:, begin:], on[:, begin:]).transpose(0, 1), of.states()
    for i in range(of.n + 1):
        k, first = min(i, of.n - 1), begin if i in again else of.steps
        close(found[:first, i], whole[:first, k], tolerance, f"sample {i} of {of}")
        close(found[first:, i], part[first - begin :, k], tolerance, f"sample {i} after its reset, of {of}")
        for name, state in (later if i in again else last).items():
            close(states[name][i], state[k], tolerance, f"{name} of sample {i} of {of}")
