"""Training memory of the networks of the zoo, as published, at batch 1, 8 and 32: planned, grown by, and PyTorch's.

*Planned* is the figure of `cv.plan`, before anything is allocated, and the size of the heap later.  *Grown* is the growth of
a process that has trained two such models and then creates and trains another one, at the end and at most.  (The first two
models also take memory for linked kernels, and for Python's objects of a program and of a model.)  *Peak* is the most
memory of two steps of SGD in a fresh process, above that after its imports.  Ours includes initialization, with compiled
kernels; PyTorch's is without dropout, in the better of its two layouts.  Cases planned larger than `MEASURED_BYTES`
are not run.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import Result, fresh, memory_bytes, n_cores, number

BATCHES, STEPS, RATE = (1, 8, 32), 2, 0.01
SHAPES = {"lenet": (1, 28), "overfeat": (3, 231), "unet": (1, 256)}  # channels and sides of images; (3, 224) for others
STEPS_OF = {"gpt": 1024}  # steps of sequences; 128 for others
FEATURES = 8  # of a step, where steps are no integers
MEASURED_BYTES = 1_200_000_000
FLOOR = 1.1  # least budget for a plan, relative to what a single statement needs
LAYOUTS = ("contiguous_format", "channels_last")
# the C library returns freed memory; otherwise memory freed after initialization hides that of training
GIVES_BACK = {"MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "65536"}
SLACK_BYTES = 1 << 17  # pages beside the heap's: Python's objects


def network(name: str, **reduced: int) -> tuple[Any, int, int, str]:
    """A network, channels and sides of its images, and its loss.  ``mlp``: 784-64-64-10."""
    import calcvm as cv
    from calcvm import nn

    if name == "mlp":
        net = nn.Linear(64) >> nn.ReLU() >> nn.Linear(64) >> nn.ReLU() >> nn.Linear(10)
        return net, 1, 28, "softmax_cross_entropy"
    channels, size = SHAPES.get(name, (3, 224))
    channels, size = reduced.pop("channels", channels), reduced.get("size", size)
    net = getattr(cv.zoo, name)(**{"size": size, **reduced})
    return net, channels, size, "mse" if name == "unet" else "softmax_cross_entropy"


def graph_of(name: str, **reduced: int) -> Any:
    """The graph that trains a network of images or sequences; of these ``steps`` are the steps, and ``stream=1`` adds a stream."""
    import calcvm as cv

    if name not in cv.zoo.SEQUENCES:
        net, channels, size, loss = network(name, **reduced)
        return cv.build_graph(net, (channels, size, size), loss, cv.SGD(RATE))
    make, steps = getattr(cv.zoo, name), reduced.get("steps", STEPS_OF.get(name, 128))
    sizes = {"steps": steps, **reduced}
    net = make(**{size: n for size, n in sizes.items() if size in inspect.signature(make).parameters})
    shape = (steps,) if net.layers[0].takes else (steps, FEATURES)
    loss = "softmax_cross_entropy" if net.layers[0].takes else "mse"
    return cv.build_graph(net, shape, loss, cv.SGD(RATE), stream=bool(reduced.get("stream")))


def planned(name: str, batch: int, share: float = 1, **reduced: int) -> tuple[Any, Any]:
    """The graph of a network and its plan, in a ``share`` of its memory: see `within`."""
    g = graph_of(name, **reduced)
    return g, within(g, share, batch_size=batch, workers=n_cores())


def within(graph: Any, share: float, **options: Any) -> Any:
    """A plan in a share of the memory of the default plan, but at least `FLOOR` times what a single statement needs.

    If the search does not reach that, it is a plan in the least memory that it reached.
    """
    import calcvm as cv

    whole = cv.plan(graph, **options)
    if share == 1:
        return whole
    try:
        return cv.plan(graph, memory=(budget := int(share * whole.heap_bytes)), **options)
    except cv.PlanError as refused:
        floor = refused.needed or 0
    try:
        return cv.plan(graph, memory=max(budget, int(FLOOR * floor)), **options)
    except cv.PlanError as refused:
        return cv.plan(graph, memory=refused.needed, **options)


def ours(name: str, batch: int, share: float = 1, **reduced: int) -> dict[str, int]:
    import calcvm as cv

    imported = memory_bytes("VmRSS")
    g, plan = planned(name, batch, share, **reduced)
    program = cv.compile(g, plan=plan)
    x, y = (
        np.zeros([s.at(batch) for s in v.shape], v.type or np.float32)
        for v in map(g.variables.__getitem__, ("input", "target"))
    )

    def train() -> Any:
        model = cv.CalcHeap(plan.heap_bytes).create(program, seed=0)
        forget_peak()
        for _ in range(STEPS):
            model.step(x, y)
        model.elements[...] += 0  # touch all pages: those that no row has used are not allocated yet
        return model

    models = [train()]
    peak = memory_bytes("VmHWM")
    models.append(train())  # Python's own memory grows by 90 kB with the second model, but not with the third
    before = memory_bytes("VmRSS")
    models.append(train())
    grown, most = memory_bytes("VmRSS") - before, memory_bytes("VmHWM") - before
    allocated = models[2].heap.nbytes
    return {"planned": plan.heap_bytes, "allocated": allocated, "grown": grown, "most": most, "peak": peak - imported}


def forget_peak() -> None:
    """Reset the peak `VmHWM` of this process."""
    Path("/proc/self/clear_refs").write_text("5")


def torchs(name: str, batch: int, layout: str, **reduced: int) -> dict[str, int]:
    import torch

    net, channels, size, loss = network(name, **reduced)
    torch.set_num_threads(n_cores())
    imported = memory_bytes("VmRSS")
    torch_training(net, (batch, channels, size, size), loss, layout, STEPS)
    return {"peak": memory_bytes("VmHWM") - imported}


def torch_training(net: Any, shape: tuple[int, ...], loss: str, layout: str, steps: int) -> None:
    """Create PyTorch's version of our network and train it, in one of its layouts."""
    import torch

    from tests.torch_networks import theirs_of

    theirs = theirs_of(net)
    x = torch.zeros(*shape)
    with torch.no_grad():
        one = theirs.eval()(x[:1])  # lazy layers infer their channels
    if len(shape) == 4:
        lies = getattr(torch, layout)
        x, theirs = x.to(memory_format=lies), theirs.to(memory_format=lies)
    theirs = theirs.train()
    if loss == "mse":
        y, of = torch.zeros(shape[0], *one.shape[1:]), torch.nn.functional.mse_loss
    else:
        y, of = torch.zeros(shape[0], dtype=torch.int64), torch.nn.functional.cross_entropy
    optimizer = torch.optim.SGD(theirs.parameters(), RATE)
    for _ in range(steps):
        optimizer.zero_grad()
        of(theirs(x), y).backward()
        optimizer.step()


def measured(who: str, **spec: Any) -> dict[str, int]:
    """`ours` or `torchs` in a fresh process."""
    return fresh("-m", "bench.memory", who, json.dumps(spec), threads=None, **GIVES_BACK)


def wrong(found: Mapping[str, int]) -> str:
    """The deviation from the plan, if any."""
    plan = found["planned"]
    if found["allocated"] != plan:
        return f"{found['allocated']:,} bytes are allocated, {plan:,} planned"
    for what, verb in (("grown", "grew"), ("most", "grew in between")):
        if abs(found[what] - plan) > SLACK_BYTES:
            return f"the process {verb} by {found[what]:,} bytes, {plan:,} were planned"
    return ""


def case(result: Result, name: str, batch: int, **reduced: int) -> list[str]:
    """A row of the table."""
    import calcvm as cv

    bytes_ = {"planned": planned(name, batch, **reduced)[1].heap_bytes}
    if bytes_["planned"] <= MEASURED_BYTES:
        bytes_ = measured("ours", name=name, batch=batch, **reduced)
        if text := wrong(bytes_):
            result.fail(f"{name}, batch {batch}: {text}")
        try:
            if name in cv.zoo.SEQUENCES:
                raise RuntimeError("only networks of images have a twin")
            peaks = [measured("torchs", name=name, batch=batch, layout=layout, **reduced)["peak"] for layout in LAYOUTS]
            bytes_["torch"] = min(peaks)
        except RuntimeError as error:
            result.note(f"torch left out of {name}, batch {batch}: {error}")
    columns = (bytes_.get(column) for column in ("planned", "grown", "peak", "torch"))
    theirs = bytes_.get("torch")
    share = number(theirs / bytes_["peak"]) if theirs else "-"
    return [name, str(batch), *(f"{n / 1e6:,.1f}" if n else "-" for n in columns), share]


def main(quick: bool = False) -> bool:
    """Run the workload; True if everything is as planned."""
    import calcvm as cv

    result = Result("memory", "Memory of the networks of the zoo", quick)
    if quick:
        rows = [case(result, "lenet", 8), case(result, "resnet18", 4, width=4, size=32)]
    else:
        rows = [case(result, name, batch) for name in cv.zoo.__all__ for batch in BATCHES]
    header = ["MB", "batch", "planned", "grown", "peak", "peak of torch", "times ours"]
    result.table("Two steps of SGD", header, rows)
    return result.save()


if __name__ == "__main__":
    print(json.dumps((ours if sys.argv[1] == "ours" else torchs)(**json.loads(sys.argv[2]))))
