"""P6, P7: training steps and predictions of networks for images, in milliseconds, beside torch's.

P6 is LeNet from one image to 512; P7 is ResNet-18, VGG-16, a UNet and MobileNetV2 at small batches.  Contestants start from
the same weights and take the same steps by SGD on the same batch, by turns, in separate processes.  No time is printed
for one whose loss after `VERIFY_STEPS` steps, or whose prediction, differs.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from bench.harness import (
    QUICK_REPEATS,
    REPEATS,
    Process,
    Result,
    answers,
    idlest_core,
    interleave,
    n_cores,
    number,
    ratio,
    turn_ratio,
)

# number of the target, network, image's channels and side, batches, arguments of the network's function
CASES: list[tuple[str, str, tuple[int, int], list[int], dict[str, int]]] = [
    ("P6", "lenet", (1, 28), [1, 16, 64, 512], {}),
    ("P7", "resnet18", (3, 224), [8], {}),
    ("P7", "mobilenet_v2", (3, 224), [8], {}),
    ("P7", "unet", (3, 256), [2], {}),
    ("P7", "vgg16", (3, 224), [2], {}),
]
# (with 4 channels, channels last, oneDNN's products hang where there is no AVX-512)
QUICK_CASES = [("P6", "lenet", (1, 16), [4], {"width": 4}), ("P7", "resnet18", (3, 32), [2], {"width": 8})]
NAMES = {
    "ours": "calcvm",
    "torch": "torch eager",
    "torch_channels_last": "torch eager, channels last",
    "torch_compile": "torch.compile",
}
COMPILED = [("lenet", 16)]  # network, batch: also timed with torch.compile, which takes half a minute for each
TARGETS = {"P6": 3.0, "P7": 1.05}  # least ratio of the fastest torch's time to ours
PASSES = {"train": "training", "infer": "inference"}
VERIFY_STEPS = 3
LEARNING_RATE = 1e-3
SMALLER = {"mobilenet_v2": 1e-4}  # at 1e-3 the losses of torch's two layouts differ by 7e-4 after three steps
TOLERANCE = 1e-4  # relative, between losses, and between the norms of predictions
TURN_SECONDS, QUICK_TURN_SECONDS = 0.1, 0.01


# ---------------------------------------------------------------- in a separate process
class Contestant:
    """A network, one batch for it, and its initial weights."""

    def __init__(self, who: str, network: str, image: tuple[int, int], batch: int, of: dict[str, int], threads: int):
        import torch

        import calcvm as cv
        from tests.torch_networks import start_alike, theirs_of, without_dropout

        torch.set_num_threads(threads)
        torch.manual_seed(0)
        channels, size = image
        rate = SMALLER.get(network, LEARNING_RATE)
        ours = without_dropout(getattr(cv.zoo, network)(size=size, **of))
        net: Any = theirs_of(ours)
        rng = np.random.default_rng(0)
        x: Any = rng.standard_normal((batch, channels, size, size), np.float32)
        made = net.eval()(torch.tensor(x))
        images = made.dim() == 4
        y: Any = rng.standard_normal(made.shape, np.float32) if images else rng.integers(0, made.shape[1], batch)
        loss = torch.nn.functional.mse_loss if images else torch.nn.functional.cross_entropy
        self.passes: dict[str, Callable[[], Any]]
        self.flops: dict[str, float] = {}
        if who == "ours":
            model = cv.Model(
                ours,
                input_shape=x.shape[1:],
                loss="mse" if images else "softmax_cross_entropy",
                optimizer=cv.SGD(rate),
                batch_size=batch,
                workers=threads,
            )
            start_alike(model, net)
            self.state = {**model.parameters, **model.buffers}
            self.passes = {"train": lambda: model.step(x, y), "infer": lambda: model.predict(x)}
            self.flops = {"train": flops_of(model.program, "learn"), "infer": flops_of(model.program, "predict")}
        else:
            format_ = torch.channels_last if who == "torch_channels_last" else torch.contiguous_format
            net.to(memory_format=format_)
            self.state = {n: v.detach().numpy() for n, v in net.state_dict().items() if v.dim()}
            optimizer = torch.optim.SGD(net.parameters(), rate, fused=True)
            call = torch.compile(net, dynamic=False) if who == "torch_compile" else net
            x, y = torch.tensor(x).to(memory_format=format_), torch.tensor(y)

            def train() -> float:
                net.train()
                optimizer.zero_grad()
                out = loss(call(x), y)
                out.backward()
                optimizer.step()
                return out.item()

            def infer() -> np.ndarray:
                net.eval()
                with torch.inference_mode():
                    return call(x).numpy()

            self.passes = {"train": train, "infer": infer}
        self.initial = {n: v.copy() for n, v in self.state.items()}

    def restart(self) -> None:
        for name, value in self.initial.items():
            self.state[name][...] = value

    def seconds(self, which: str, n: int) -> float:
        run = self.passes[which]
        start = time.perf_counter()
        for _ in range(n):
            run()
        return (time.perf_counter() - start) / n


def flops_of(program: Any, path: str) -> float:
    """Floating-point operations that the rows of a path declare."""
    from calcvm.vm.run.slices import work_of

    spans = [span for (of, _), span in program.sections.items() if of == path]
    return float(sum(work_of(program, program.batch_size, span)[0].sum() for span in spans))


def serve(spec: dict[str, Any], core: int | None) -> None:
    """Serve one contestant: answer with seconds per call."""
    answer = answers(core)
    contestant = Contestant(**spec)
    norm = float(np.linalg.norm(contestant.passes["infer"]()))
    losses = [contestant.passes["train"]() for _ in range(VERIFY_STEPS)]
    answer(infer=norm, train=losses[-1], flops=contestant.flops)
    for line in sys.stdin:
        contestant.restart()
        answer(seconds=contestant.seconds(*json.loads(line)["run"]))


# ---------------------------------------------------------------- the comparison
def turn(process: Process, which: str, n: int) -> float:
    return process.ask(run=[which, n])["seconds"]


def time_case(
    result: Result, case: dict[str, Any], contestants: list[str], quick: bool
) -> dict[str, dict[str, list[float]]]:
    """Seconds of the passes of contestants that agree, by pass and contestant; print and store a table."""
    threads = case["threads"]
    core = idlest_core() if threads == 1 else None
    running = {}
    what = f"{case['network']}, batch {case['batch']}, {threads} thread{'s' if threads > 1 else ''}"
    for who in contestants:
        try:
            spec = json.dumps([{**case, "who": who}, core])
            running[who] = Process("-m", "bench.images", spec, threads=threads)
        except RuntimeError as error:
            text = f"{NAMES[who]} left out of {what}: {error}"
            result.fail(text) if who == "ours" else result.note(text)
    times: dict[str, dict[str, list[float]]] = {}
    rows = []
    try:
        for which in PASSES:
            right = median(p.ready[which] for p in running.values())
            runs = {}
            for who, process in running.items():
                if not abs(process.ready[which] - right) <= TOLERANCE * abs(right):
                    result.fail(
                        f"{NAMES[who]} DISAGREES in {which} of {what}: {process.ready[which]:.7g}, others {right:.7g}"
                    )
                    continue
                once = min(turn(process, which, 1) for _ in range(2))
                n = max(1, int((QUICK_TURN_SECONDS if quick else TURN_SECONDS) / once))
                runs[who] = partial(turn, process, which, n)
            times[which] = interleave(runs, QUICK_REPEATS if quick else REPEATS if case["network"] == "lenet" else 5)
            ours = times[which].get("ours")
            for who, t in times[which].items():
                flops = running["ours"].ready["flops"][which] if ours else 0.0
                limit = flops / (result.data["limits"]["fma_gflops"] * 1e9 * threads)
                against = [number(ratio(t, ours)), number(turn_ratio(t, ours))] if ours else ["-", "-"]
                ms = [number(min(t) * 1e3), number(median(t) * 1e3)]
                rows.append([PASSES[which], NAMES[who], *ms, *against, f"{100 * limit / min(t):.0f} %"])
    finally:
        for process in running.values():
            process.close()
    result.table(what, ["ms", "", "min", "median", "times ours", "by turns", "of limit"], rows)
    return times


def main(quick: bool = False) -> bool:
    """Run the workload; True if all agree."""
    result = Result("images", "Networks for images", quick)
    for target, network, image, batches, of in QUICK_CASES if quick else CASES:
        worst: dict[str, tuple[float, str]] = {}
        for batch in batches:
            who = [name for name in NAMES if name != "torch_compile" or (network, batch) in COMPILED]
            for threads in [n_cores()] if quick else sorted({1, n_cores()}):
                case = {"network": network, "image": image, "batch": batch, "of": of, "threads": threads}
                for which, times in time_case(result, case, who, quick).items():
                    others = [t for name, t in times.items() if name != "ours"]
                    if "ours" in times and others:
                        value = ratio(min(others, key=min), times["ours"])
                        found = value, f"batch {batch}, {threads} thread{'s' if threads > 1 else ''}"
                        worst[which] = min(worst.get(which, found), found)
        for which, name in PASSES.items():
            least, where = worst.get(which, (None, ""))
            what = f"{network}, {name}, against the best torch: {where or 'not measured'}"
            result.target(target, what, least, TARGETS[target], "x")
    return result.save()


if __name__ == "__main__":
    serve(*json.loads(sys.argv[1]))
