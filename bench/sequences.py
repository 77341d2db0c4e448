"""Recurrent layers, attention, streams and generation, with one thread, beside PyTorch, recurrent layers also beside JAX and ONNX Runtime.

A row's time is the least of its turns.  Results are compared before times are printed.  "of the limit" is the share of a core's
FMA peak that products of matrices reach; the functions of gates count as nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bench.harness import QUICK_REPEATS, REPEATS, Result, interleave, number, ratio
from bench.recurrent_peers import peers

STEPS, INPUTS, UNITS = 50, 16, 64
WIDTH, LAYERS, HEADS = 64, 2, 4
GATES = {"lstm": 4, "gru": 3}
PEERS = ("torch", "JAX", "ONNX Runtime")
# least ratio to the fastest peer: kind, batch, what
TARGETS = {
    ("lstm", 1, "inference"): 1.5, ("lstm", 1, "training"): 3.3, ("lstm", 32, "inference"): 1.2, ("lstm", 32, "training"): 1.75,
    ("gru", 1, "inference"): 1.7, ("gru", 1, "training"): 3.3, ("gru", 32, "inference"): 1.6, ("gru", 32, "training"): 1.9,
}  # fmt: skip
TOLERANCE = 1e-5
Contestants = dict[str, Callable[[int], Any]]


def timed(run: Callable[[int], Any], n: int) -> Callable[[], float]:
    def seconds() -> float:
        start = time.perf_counter()
        run(n)
        return (time.perf_counter() - start) / n

    return seconds


def turns(contestants: Mapping[str, Callable[[int], Any]], quick: bool) -> dict[str, list[float]]:
    """Seconds of a run of each contestant, by turns of about 20 ms."""
    runs = {}
    for name, run in contestants.items():
        run(2)
        once = timed(run, 2)()
        runs[name] = timed(run, 2 if quick else max(2, int(0.02 / once)))
    return interleave(runs, QUICK_REPEATS if quick else 3 * REPEATS)


def model_of(net: Any, shape: tuple[int, ...], batch: int, **options: Any) -> Any:
    import calcvm as cv

    options = {"workers": 1} | options
    return cv.Model(net, input_shape=shape, loss="mse", optimizer=cv.Adam(1e-3), batch_size=batch, seed=0, **options)


def given(model: Any, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets, which are in their placeholders too."""
    rng = np.random.default_rng(0)
    x, t = (rng.standard_normal(model.loaded.shape(name, samples), np.float32) for name in ("input", "target"))
    model["input"], model["target"] = x, t
    return x, t


def same(label: str, ours: np.ndarray, theirs: np.ndarray, peer: str, result: Result) -> None:
    worst = np.abs(ours - theirs).max()
    if worst > TOLERANCE:
        result.fail(f"{label}: outputs differ from those of {peer} by {worst:.1e}")


def contest(
    label: str, model: Any, module: Any, outputs: Callable[[Any], Any], result: Result, prefix: str = ""
) -> tuple[Contestants, Contestants]:
    """Contestants of inference and of a training step with Adam, from the module's weights."""
    import torch

    model.load_state_dict(module.state_dict(), prefix=prefix)
    x, t = given(model, model.batch_size)
    of_x, of_t = torch.from_numpy(x), torch.from_numpy(t)
    module.eval()
    same(label, model.predict(x), outputs(of_x).detach().numpy(), "PyTorch", result)
    optimizer = torch.optim.Adam(module.parameters(), 1e-3, fused=True)

    def infer(n: int) -> None:
        module.eval()
        with torch.inference_mode():
            for _ in range(n):
                outputs(of_x)

    def train(n: int) -> None:
        module.train()
        for _ in range(n):
            optimizer.zero_grad(set_to_none=True)
            torch.nn.functional.mse_loss(outputs(of_x), of_t).backward()
            optimizer.step()

    model["input"], model["target"] = x, t
    return {"calcvm": inferring(model), "torch": infer}, {"calcvm": model.run_steps, "torch": train}


def inferring(model: Any) -> Callable[[int], Any]:
    return lambda n: model.run_round("predict", steps=n)


# ---------------------------------------------------------------- recurrent layers
def recurrent(kind: str, batch: int, result: Result) -> tuple[Contestants, Contestants]:
    import torch

    from calcvm import nn

    layer = {"lstm": nn.LSTM, "gru": nn.GRU}[kind](UNITS)
    theirs = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[kind](INPUTS, UNITS, batch_first=True)
    model, label = model_of(layer, (STEPS, INPUTS), batch), f"{kind}, batch {batch}"
    x, t = given(model, batch)
    infer, train, found = peers(kind, theirs, x, t)
    wanted = theirs(torch.from_numpy(x))[0].detach().numpy()
    for peer, y in found.items():
        same(f"{label}, PyTorch", wanted, y, peer, result)
    inference, training = contest(label, model, theirs, lambda x: theirs(x)[0], result)
    return inference | infer, training | train


def layers(result: Result, quick: bool) -> None:
    rows, peak = [], result.data["limits"]["fma_gflops"] * 1e9
    for kind, gates in GATES.items():
        for batch in (1, 32):
            steps = batch * STEPS
            forward = 2 * steps * (INPUTS + UNITS) * gates * UNITS
            flops = {"inference": forward, "training": 2 * forward + 2 * steps * UNITS * gates * UNITS}
            for what, contestants in zip(flops, recurrent(kind, batch, result)):
                times = turns(contestants, quick)
                best, share = min(times["calcvm"]), flops[what] / min(times["calcvm"]) / peak
                label = f"{kind.upper()} {INPUTS}-{UNITS}, {STEPS} steps, batch {batch}, {what}"
                beside = {
                    name: f"{number(min(seconds) * 1e6)}, {ratio(seconds, times['calcvm']):.2f} x"
                    for name, seconds in times.items()
                }
                rows.append(
                    [label, number(best * 1e6), f"{100 * share:.0f} %", *(beside.get(name, "-") for name in PEERS)]
                )
                value = min(ratio(seconds, times["calcvm"]) for name, seconds in times.items() if name != "calcvm")
                result.target("P8", f"{label}, against the fastest peer", value, TARGETS[kind, batch, what], "x")
    result.table("Recurrent layers", ["", "calcvm us", "of the limit", *(f"{name} us, ratio" for name in PEERS)], rows)


def teams(result: Result, quick: bool) -> None:
    """Two workers, and sequences of unequal lengths, beside one worker and full lengths."""
    from calcvm import nn

    model, two, ragged = (
        model_of(nn.LSTM(UNITS), (STEPS, INPUTS), 32, **options) for options in ({}, {"workers": 2}, {"lengths": True})
    )
    for each in (model, two, ragged):
        given(each, 32)
    lengths = np.linspace(1, STEPS, 32).astype(np.int64)
    ragged["lengths"] = lengths
    runs = {"one": model, "two": two, "ragged": ragged}
    label, share = f"LSTM {INPUTS}-{UNITS}, {STEPS} steps, batch 32", float(lengths.sum()) / (32 * STEPS)
    rows = []
    for what in ("inference", "training"):
        if what == "training":
            contestants: Contestants = {name: each.run_steps for name, each in runs.items()}
        else:
            contestants = {name: inferring(each) for name, each in runs.items()}
        times = turns(contestants, quick)
        faster, part = ratio(times["one"], times["two"]), ratio(times["ragged"], times["one"]) / share
        rows.append([f"{label}, {what}", f"{faster:.2f} x", f"{part:.2f}"])
        result.target("P8", f"{label}, {what}, two workers", faster, 1.8, "x")
        result.target("P8", f"{label}, {what}, time of a step of unequal lengths", part, 1.1, "x", at_most=True)
    result.table(
        "Workers and lengths", ["", "two workers", f"time of each step, {100 * share:.0f} % of them there"], rows
    )


# ---------------------------------------------------------------- encoders
ENCODERS = {(32, 1): (1.9, 3.6), (32, 32): (1.45, 2.0), (256, 8): (1.6, 1.5)}  # least ratios by steps and batch


def encoders(result: Result, quick: bool) -> None:
    import torch

    from calcvm import nn

    rows = []
    for (steps, batch), asked in ENCODERS.items():
        net = nn.Sequential(
            *(nn.TransformerEncoderLayer(HEADS, dim_feedforward=128, dropout=0.0) for _ in range(LAYERS))
        )
        one = torch.nn.TransformerEncoderLayer(WIDTH, HEADS, 128, dropout=0.0, batch_first=True)
        module, label = torch.nn.TransformerEncoder(one, LAYERS), f"encoder, {steps} steps, batch {batch}"
        pairs = contest(label, model_of(net, (steps, WIDTH), batch), module, module, result, prefix="layers.")
        for what, least, contestants in zip(("inference", "training"), asked, pairs):
            times = turns(contestants, quick)
            value = ratio(times["torch"], times["calcvm"])
            rows.append([f"{label}, {what}", *(number(min(t) * 1e6) for t in times.values()), f"{value:.2f} x"])
            result.target("P8", f"{label}, {what}, against PyTorch", value, least, "x")
    result.table("Encoders, 2 layers, 64 features, 4 heads, us", ["", "calcvm", "PyTorch", "ratio"], rows)


# ---------------------------------------------------------------- one step at a time
def streams(result: Result, quick: bool) -> None:
    import torch

    import calcvm as cv
    from calcvm import nn

    rows = []
    for kind in GATES:
        layer, cell = {"lstm": (nn.LSTM, torch.nn.LSTMCell), "gru": (nn.GRU, torch.nn.GRUCell)}[kind]
        model = cv.Model(
            layer(UNITS), input_shape=(STEPS, INPUTS), loss="mse", optimizer=cv.Adam(1e-3), batch_size=1000, workers=1,
            stream=True, seed=0,
        )  # fmt: skip
        many, theirs = [model.stream() for _ in range(1000)], cell(INPUTS, UNITS)
        one, x = many[0], np.ones(INPUTS, np.float32)
        for stream in many:
            stream(x)
        of_x = torch.from_numpy(x[None])

        def ours(n: int, one: Any = one, x: np.ndarray = x) -> None:
            for _ in range(n):
                one(x)

        def in_turn(n: int, many: Any = many, x: np.ndarray = x) -> None:
            for k in range(n):
                many[k % 1000](x)

        def cells(n: int, theirs: Any = theirs, of_x: Any = of_x) -> None:
            with torch.inference_mode():
                state = None
                for _ in range(n):
                    state = theirs(of_x, state)

        times = turns({"calcvm": ours, "1000 in turn": in_turn, "torch": cells}, quick)
        label = f"a step of {kind.upper()} {INPUTS}-{UNITS} with its state kept"
        rows.append([label, *(number(min(seconds) * 1e6) for seconds in times.values())])
        result.target("P15", f"{label}, from Python", min(times["calcvm"]) * 1e6, 1.3, "us", at_most=True)
        value = min(times["1000 in turn"]) * 1e6
        result.target("P15", f"{label}, 1000 streams in turn, each", value, 1.8, "us", at_most=True)
    result.table("One step at a time, us", ["", "calcvm", "1000 streams in turn, each", "torch's cell"], rows)


# ---------------------------------------------------------------- texts
LETTERS, ROOM = 65, 128


def texts(result: Result, quick: bool) -> None:
    """Texts of as many tokens as a GPT has room for, each drawn by its softmax."""
    import torch
    from torch.nn import functional as F

    import calcvm as cv

    net = cv.zoo.gpt(LETTERS, width=WIDTH, layers=LAYERS, heads=HEADS, steps=ROOM)
    model = cv.Model(
        net, input_shape=(ROOM,), optimizer=cv.Adam(1e-3), batch_size=1, workers=1, stream=True, seed=0
    )  # fmt: skip
    w = {name: torch.from_numpy(array.copy()) for name, array in model.parameters.items()}
    keys, values = torch.zeros(2, LAYERS, HEADS, ROOM, WIDTH // HEADS)

    def scores(token: Any, step: int) -> Any:
        x = w["embedding_1.weight"][token] + w["positionalembedding_1.weight"][step]
        for i in range(LAYERS):
            own = f"transformerencoderlayer_{i + 1}."
            y = F.layer_norm(x, (WIDTH,), w[own + "norm1.scale"], w[own + "norm1.shift"])
            y = torch.addmv(w[own + "self_attn.in_proj_bias"], w[own + "self_attn.in_proj_weight"].T, y)
            q, k, v = y.view(3, HEADS, 1, -1)
            keys[i, :, step], values[i, :, step] = k[:, 0], v[:, 0]
            y = F.scaled_dot_product_attention(q[None], keys[i, None, :, : step + 1], values[i, None, :, : step + 1])
            x = x + torch.addmv(w[own + "self_attn.out_proj.bias"], w[own + "self_attn.out_proj.weight"].T, y.view(-1))
            y = F.layer_norm(x, (WIDTH,), w[own + "norm2.scale"], w[own + "norm2.shift"])
            y = F.gelu(torch.addmv(w[own + "linear1.bias"], w[own + "linear1.weight"].T, y))
            x = x + torch.addmv(w[own + "linear2.bias"], w[own + "linear2.weight"].T, y)
        return w["embedding_1.weight"] @ F.layer_norm(x, (WIDTH,), w["layernorm_1.scale"], w["layernorm_1.shift"])

    stream = model.stream()
    with torch.inference_mode():
        worst = max(np.abs(stream(k % LETTERS) - scores(k % LETTERS, k).numpy()).max() for k in range(ROOM))
    del stream
    if worst > TOLERANCE:
        result.fail(f"GPT: scores differ from PyTorch's by {worst:.1e}")

    def ours(n: int) -> None:
        for seed in range(n):
            model.generate([1], ROOM, seed=seed)

    def theirs(n: int) -> None:
        with torch.inference_mode():
            for _ in range(n):
                token = torch.tensor(1)
                for step in range(ROOM):
                    token = torch.multinomial(torch.softmax(scores(token, step), 0), 1)[0]

    times = turns({"calcvm": ours, "torch": theirs}, quick)
    label = f"a token of GPT, {WIDTH} wide, {LAYERS} layers, cache of {ROOM} steps"
    rows = [[label, *(number(min(seconds) / ROOM * 1e6) for seconds in times.values())]]
    result.table("Texts, us per token, drawn", ["", "calcvm", "PyTorch with a cache"], rows)
    result.target(
        "P15", f"{label}, cache written and sampled", min(times["calcvm"]) / ROOM * 1e6, 7.5, "us", at_most=True
    )
    result.target("P15", f"{label}, against PyTorch", ratio(times["torch"], times["calcvm"]), 20, "x")


def main(quick: bool = False) -> bool:
    """Run the workload; True if all results agree."""
    result = Result("sequences", "Sequences", quick)
    try:
        import torch
    except ImportError:
        result.fail("PyTorch is not installed")
        return result.save()
    torch.set_num_threads(1)
    layers(result, quick)
    teams(result, quick)
    encoders(result, quick)
    streams(result, quick)
    texts(result, quick)
    return result.save()
