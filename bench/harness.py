"""The protocol of every workload: interleaved timing, measured limits, fresh processes, stored results.

On a shared machine absolute times drift and ratios hold, so contestants take turns (A B C, A B C, ...).  Reported are
the minimum and median of the times, the ratio of the minima, and the median of the ratios within each turn.
"""

import ctypes
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
REPEATS, QUICK_REPEATS = 7, 1
PACKAGES = ("numpy", "numba", "numba-cuda", "llvmlite", "scipy", "torch", "jax", "jaxlib", "scikit-learn")


# ---------------------------------------------------------------- timing
def interleave(contestants: Mapping[str, Callable[[], float]], repeats: int = REPEATS) -> dict[str, list[float]]:
    """Seconds of every contestant, one list entry per turn.  Each callable times itself and returns seconds."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(repeats):
        for name, run in contestants.items():
            times[name].append(run())
    return times


def ratio(theirs: Sequence[float], ours: Sequence[float]) -> float:
    """How many times faster ours is, by the fastest turns, which a busy machine disturbs least."""
    return min(theirs) / min(ours)


def turn_ratio(theirs: Sequence[float], ours: Sequence[float]) -> float:
    """The median of the ratios within each turn.  If it is far from `ratio`, the machine was busy."""
    return statistics.median(t / o for t, o in zip(theirs, ours))


def geomean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(math.log(v) for v in values))


# ---------------------------------------------------------------- the machine and its limits
def machine() -> dict[str, Any]:
    """Processor, cores, versions and date of this run."""
    model = "unknown"
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "cpu family", "model\t")):
                key, value = (part.strip() for part in line.split(":", 1))
                model = value if key == "model name" else f"{model}, {key} {value}"
            if not line:
                break  # the first core represents all
    except OSError:
        model = platform.processor() or model
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "cpu": model,
        "cores": n_cores(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": versions,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def n_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def idlest_core() -> int | None:
    """The core that was least busy over the last moment; one-thread contestants of a case share it."""

    def busy() -> dict[int, int]:
        lines = Path("/proc/stat").read_text().splitlines()
        fields = [line.split() for line in lines if line[:3] == "cpu" and line[3].isdigit()]
        return {int(f[0][3:]): sum(map(int, f[1:4])) for f in fields}

    try:
        allowed, before = os.sched_getaffinity(0), busy()
        time.sleep(0.2)
        after = busy()
    except (OSError, AttributeError):
        return None
    return min(allowed, key=lambda core: after[core] - before[core])


def best_seconds(run: Callable[[], object], repeats: int = 7) -> float:
    """Least seconds of `repeats` calls, after one call for warm-up."""
    run()
    best = math.inf
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def fma_gflops(n: int) -> float:
    """Peak GFLOP/s of one core: 12 independent chains of `n` float32 vector FMAs that never leave the registers.

    Each supported vector width is measured and the best taken, because a core may run its widest at half rate.
    """
    from llvmlite import ir
    from numba import njit, types
    from numba.core import cgutils
    from numba.extending import intrinsic

    def chains(lanes: int, n_chains: int = 12) -> Callable:
        vec, i32 = ir.VectorType(ir.FloatType(), lanes), ir.IntType(32)
        undefined, zero = ir.Constant(vec, ir.Undefined), ir.Constant(i32, 0)

        @intrinsic
        def loop(tc, n, x):
            def codegen(ctx, b, sig, args):
                n, x = args
                fma = cgutils.get_or_insert_function(b.module, ir.FunctionType(vec, [vec] * 3), f"llvm.fma.v{lanes}f32")
                mask = ir.Constant(ir.VectorType(i32, lanes), [0] * lanes)
                splat = b.shuffle_vector(b.insert_element(undefined, x, zero), undefined, mask)
                entry, body, done = b.block, b.append_basic_block("body"), b.append_basic_block("done")
                b.branch(body)
                b.position_at_end(body)
                i = b.phi(n.type)
                before = [b.phi(vec) for _ in range(n_chains)]
                after = [b.call(fma, [p, splat, splat]) for p in before]
                for p, q in zip(before, after):
                    p.add_incoming(splat, entry)
                    p.add_incoming(q, body)
                following = b.add(i, n.type(1))
                i.add_incoming(n.type(0), entry)
                i.add_incoming(following, body)
                b.cbranch(b.icmp_signed("<", following, n), body, done)
                b.position_at_end(done)
                total = after[0]
                for q in after[1:]:
                    total = b.fadd(total, q)
                return b.extract_element(total, zero)

            return types.float32(types.int64, types.float32), codegen

        return njit(nogil=True)(lambda n, x: loop(n, x))

    features = llvm.get_host_cpu_features()
    best = 0.0
    for lanes, feature in ((4, ""), (8, "avx2"), (16, "avx512f")):
        if feature and not features.get(feature):
            continue
        run = chains(lanes)
        best = max(best, 2 * 12 * lanes * n / best_seconds(partial(run, n, np.float32(0.5))) / 1e9)
    return best


def copy_gbs(nbytes: int) -> float:
    """Copy bandwidth of one core in GB/s, bytes read plus bytes written, for a source of `nbytes`."""
    nbytes = max(nbytes, 1 << 12)
    source, target = np.ones(nbytes // 4, np.float32), np.zeros(nbytes // 4, np.float32)
    n = max(1, (1 << 25) // nbytes)  # long enough to time

    def run() -> None:
        for _ in range(n):
            np.copyto(target, source)

    return 2 * nbytes * n / best_seconds(run) / 1e9


def compiled_loop(address: int, argument_types: list) -> Callable:
    """A compiled ``loop(n, *arguments)`` that calls the native function at `address`, n times."""
    from numba import njit

    function = ctypes.CFUNCTYPE(None, *argument_types)(address)
    names = ", ".join(f"a{i}" for i in range(len(argument_types)))
    scope: dict[str, Any] = {"function": function}
    exec(f"def loop(n, {names}):\n    for _ in range(n):\n        function({names})", scope)
    return njit(scope["loop"])


# ---------------------------------------------------------------- fresh processes
def environment(threads: int | None = None, **extra: str) -> dict[str, str]:
    """Environment of a fresh process that finds this tree and limits every library to `threads` threads.

    Settings of the libraries in the caller's environment are dropped: an ``OPENBLAS_CORETYPE`` left in a
    shell halved OpenBLAS's speed on a Zen 5.  Bytecode is cached, as for an installed package; otherwise each
    process would compile 128 of our modules.
    """
    tuned = (
        "OPENBLAS_",
        "MKL_",
        "OMP_",
        "KMP_",
        "GOMP_",
        "DNNL_",
        "ONEDNN_",
        "XLA_",
        "JAX_",
        "TORCH",
        "NUMBA_",
        "CALCVM_WORKERS",
    )
    dropped = (*tuned, "PYTHONDONTWRITEBYTECODE")
    env = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src"), env.get("PYTHONPATH", "")])
    if threads is not None:
        names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NPROC")
        env |= dict.fromkeys(names, str(threads))
    if threads == 1:
        env["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    return {**env, **extra}


def fresh(*args: str, threads: int | None = None, **extra: str) -> Any:
    """Run ``python *args`` in a fresh process and return the JSON of its last line."""
    done = subprocess.run(
        [sys.executable, *args], cwd=ROOT, env=environment(threads, **extra), capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(last_line(done.stderr) or f"exit status {done.returncode}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""


class Process:
    """A fresh process that answers JSON requests, one line each way; `ready` is its first answer, to ``asked``.

    Raises
    ------
    RuntimeError
        The process ended instead of answering; the message is the last line of its stderr.
    """

    def __init__(self, *args: str, threads: int | None = None, asked: Any = None, **extra: str):
        self.log = tempfile.TemporaryFile("w+")
        self.popen = subprocess.Popen(
            [sys.executable, *args],
            cwd=ROOT,
            env=environment(threads, **extra),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )
        self.ready = self._answer() if asked is None else self.ask(**asked)

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps(request) + "\n")
        self.popen.stdin.flush()
        return self._answer()

    def close(self) -> None:
        self.popen.kill()
        self.popen.communicate()
        self.log.close()

    def _answer(self) -> dict[str, Any]:
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        if line:
            return json.loads(line)
        self.popen.wait()
        self.log.seek(0)
        raise RuntimeError(last_line(self.log.read()) or f"exit status {self.popen.returncode}")


def answers(core: int | None) -> Callable[..., None]:
    """The other end of `Process`: call the returned function with an answer's fields.

    It pins this process to `core` (None: any), and keeps prints of libraries out of the pipe.
    """
    if core is not None:
        os.sched_setaffinity(0, {core})
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**reply: Any) -> None:
        print(json.dumps(reply), file=pipe, flush=True)

    return answer


def memory_bytes(field: str) -> int:
    """`VmRSS` (now) or `VmHWM` (peak) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


# ---------------------------------------------------------------- results
class Result:
    """The measurements of one workload: tables, targets and notes, printed at once and stored as JSON."""

    def __init__(self, name: str, title: str, quick: bool):
        self.failed = False
        self.data: dict[str, Any] = {
            "title": title,
            "command": f"python -m bench {name}",
            "quick": quick,
            "machine": machine(),
            "limits": {
                "fma_gflops": fma_gflops(1000 if quick else 1_000_000),
                "copy_gbs": copy_gbs(1 << 16 if quick else 1 << 28),
            },
            "tables": [],
            "pictures": [],
            "targets": [],
            "notes": [],
        }
        self.path = RESULTS / f"{name}.json"
        limits = self.data["limits"]
        say(f"\n{title}: one core {limits['fma_gflops']:.0f} GFLOP/s FMA, {limits['copy_gbs']:.1f} GB/s copy")

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self.data["tables"].append({"title": title, "header": list(header), "rows": [list(r) for r in rows]})
        say(f"\n{title}\n{format_table(header, rows)}")

    def picture(self, name: str, title: str, draw: Callable[[Any], None]) -> None:
        """Draw a picture by ``draw`` on a Matplotlib figure, unless Matplotlib is missing or this is a smoke run."""
        try:
            figure_of = import_module("matplotlib.figure").Figure
        except ImportError:
            self.note(f"no picture of {title}: Matplotlib is not installed")
            return
        figure = figure_of(figsize=(7.2, 4.5), layout="constrained")
        draw(figure)
        if not self.data["quick"]:
            self.path.parent.mkdir(exist_ok=True)
            figure.savefig(self.path.parent / f"{name}.png", dpi=100)
            self.data["pictures"].append({"title": title, "file": f"{name}.png"})

    def target(
        self, which: str, what: str, value: float | None, bound: float, unit: str, at_most: bool = False
    ) -> None:
        """Add a line to the target table; `value` None means that it could not be measured."""
        reached = value is not None and (value <= bound if at_most else value >= bound)
        sign = "<=" if at_most else ">="
        entry = {"number": which, "what": what, "value": value, "bound": f"{sign} {number(bound)} {unit}", "unit": unit}
        self.data["targets"].append({**entry, "reached": reached})

    def note(self, text: str) -> None:
        self.data["notes"].append(text)
        say(f"note: {text}")

    def fail(self, text: str) -> None:
        """Record a failed correctness check: the run exits nonzero."""
        self.failed = True
        self.note(f"FAILED: {text}")

    def save(self) -> bool:
        """Print the targets and store the result, except of a smoke run; True if every check held."""
        say("\n" + format_table(TARGET_HEADER, target_rows(self.data["targets"])))
        if not self.data["quick"]:
            self.path.parent.mkdir(exist_ok=True)
            self.path.write_text(json.dumps(self.data, indent=1))
        return not self.failed


TARGET_HEADER = ("target", "workload", "asked", "measured", "")


def target_rows(targets: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Rows of the target table, under `TARGET_HEADER`."""
    rows = []
    for t in targets:
        measured, verdict = "-", "not measured"
        if t["value"] is not None:
            measured, verdict = f"{number(t['value'])} {t['unit']}", "reached" if t["reached"] else "missed"
        rows.append([t["number"], t["what"], t["bound"], measured, verdict])
    return rows


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value == 0 or not math.isfinite(value):
        return str(value)
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table that also lines up as plain text."""
    widths = [max(len(str(row[i])) for row in [header, *rows]) for i in range(len(header))]
    lines = [
        "| " + " | ".join(str(cell).ljust(w) for cell, w in zip(row, widths)) + " |"
        for row in [header, ["-" * w for w in widths], *rows]
    ]
    return "\n".join(lines)


def say(text: str) -> None:
    print(text, flush=True)
