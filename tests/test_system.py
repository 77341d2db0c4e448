"""What a process may use, by its machine and its container, and what works where the system has less than Linux."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

import calcvm as cv
from calcvm import cgroups, nn, system, teams

UNLIMITED = 9223372036854771712  # of version 1


# ---------------------------------------------------------------- control groups that are made up
@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    return tmp_path


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")


V2 = "30 23 0:26 {root} {point} rw - cgroup2 cgroup2 rw"
V1 = "31 23 0:27 {root} {point} rw,relatime shared:5 - cgroup cgroup rw,{controller}"


def processor(version, quota, period=100_000):
    if version == 2:
        return {"cpu.max": f"{'max' if quota is None else quota} {period}"}
    return {"cpu.cfs_quota_us": -1 if quota is None else quota, "cpu.cfs_period_us": period}


def memory(version, limit, used=0):
    if version == 2:
        return {"memory.max": "max" if limit is None else limit, "memory.stat": f"anon {used}\nfile 99999999\nshmem 0"}
    unlimited = UNLIMITED if limit is None else limit
    return {"memory.limit_in_bytes": unlimited, "memory.stat": f"cache 9\nrss 1\ntotal_rss {used}\ntotal_shmem 0"}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("how", ["host", "namespace", "bind mount", "outside", "odd names"])
def test_limits_of_all_groups_around_the_process_count(root, version, how):
    """Three groups, one in the other, each with a limit or without; as a host, a container and an odd one mount them."""
    found = 0
    for number, limits in enumerate(itertools.product((None, 50_000, 150_000, 250_000), repeat=3)):
        here = root / str(number)
        cgroups.ROOT = here
        point, path, top = {
            "host": ("sys/fs/cgroup", "/a/b", "/"),
            "namespace": ("sys/fs/cgroup", "/a/b", "/"),
            "bind mount": ("sys/fs/cgroup", "/docker/1f/a/b", "/docker/1f"),
            "outside": ("sys/fs/cgroup", "/../../a", "/"),
            "odd names": (r"sys/fs/c\040group", "/a/b", "/"),
        }[how]
        inside = ("", "a/", "a/b/") if how != "outside" else ("",)
        mounted = point.replace(r"\040", " ")
        if version == 2:
            write(
                here, {"proc/self/cgroup": f"0::{path}", "proc/self/mountinfo": V2.format(root=top, point=f"/{point}")}
            )
            folders = {"cpu": mounted, "memory": mounted}
        else:
            mounts = [V1.format(root=top, point=f"/{point}/{c}", controller=c) for c in ("cpu,cpuacct", "memory")]
            write(
                here,
                {
                    "proc/self/cgroup": f"4:memory:{path}\n1:cpu,cpuacct:{path}\n0::/",
                    "proc/self/mountinfo": "\n".join(mounts),
                },
            )
            folders = {"cpu": f"{mounted}/cpu,cpuacct", "memory": f"{mounted}/memory"}
        for group, limit in zip(inside, limits):
            write(here, {f"{folders['cpu']}/{group}{name}": text for name, text in processor(version, limit).items()})
            bytes_ = None if limit is None else limit * 1000
            write(
                here,
                {f"{folders['memory']}/{group}{name}": text for name, text in memory(version, bytes_, 7000).items()},
            )
        given = [limit for limit in limits[: len(inside)] if limit is not None]
        assert cgroups.cpus() == (min(given) / 100_000 if given else None)
        room = cgroups.memory()
        assert (room and room.limit, room and room.left) == (
            (min(given) * 1000, min(given) * 1000 - 7000) if given else (None, None)
        )
        found += 1
    assert found == 64


@pytest.mark.parametrize(
    "quota, period, cores",
    [(None, 100_000, 8), (1000, 100_000, 1), (99_999, 100_000, 1), (100_000, 100_000, 1), (199_999, 100_000, 1),
     (200_000, 100_000, 2), (250_000, 100_000, 2), (50_000, 20_000, 2), (10**9, 100_000, 8), (0, 100_000, 8), (100, 0, 8)],
)  # fmt: skip
@pytest.mark.parametrize("version", [1, 2])
def test_cores_are_the_whole_ones_of_a_quota_and_at_least_one(root, monkeypatch, version, quota, period, cores):
    monkeypatch.setattr(system, "affinity", lambda: [*range(8)])
    at = "sys/fs/cgroup/" + ("" if version == 2 else "cpu/")
    mount = (
        V2.format(root="/", point="/sys/fs/cgroup")
        if version == 2
        else V1.format(root="/", point="/sys/fs/cgroup/cpu", controller="cpu")
    )
    write(root, {"proc/self/cgroup": "0::/" if version == 2 else "3:cpu:/", "proc/self/mountinfo": mount})
    write(root, {at + name: text for name, text in processor(version, quota, period).items()})
    assert system.n_cores() == cores


@pytest.mark.parametrize("swap, left", [("max", 900 + 500), ("0", 900), ("300", 900 + 250), (None, 900 + 500)])
def test_free_swap_counts_as_far_as_the_group_may_use_it(root, swap, left):
    write(root, {"proc/self/cgroup": "0::/", "proc/self/mountinfo": V2.format(root="/", point="/g")})
    write(root, {"proc/meminfo": f"MemTotal: 9 kB\nSwapFree: {500 << 10 >> 10} kB"})
    write(root, {"g/memory.max": 1000 << 10, "g/memory.stat": f"anon {60 << 10}\nshmem {40 << 10}"})
    if swap is not None:
        write(
            root, {"g/memory.swap.max": swap if swap == "max" else int(swap) << 10, "g/memory.swap.current": 50 << 10}
        )
    room = cgroups.memory()
    assert room.left == left << 10


@pytest.mark.parametrize(
    "files",
    [{}, {"proc/self/cgroup": "", "proc/self/mountinfo": ""}, {"proc/self/cgroup": "nonsense", "proc/self/mountinfo": "a b\nc - d"},
     {"proc/self/cgroup": "0::/", "proc/self/mountinfo": V2.format(root="/", point="/g"), "g/cpu.max": "x y", "g/memory.max": "?"},
     {"proc/self/cgroup": "0::/", "proc/self/mountinfo": V2.format(root="/", point="/g"), "g/cpu.max": "", "g/memory.max": "-5"},
     {"proc/self/cgroup": "0::/gone", "proc/self/mountinfo": V2.format(root="/", point="/nowhere")}],
)  # fmt: skip
def test_what_cannot_be_read_is_no_limit(root, files):
    write(root, files)
    assert cgroups.cpus() is None and cgroups.memory() is None


def test_heaps_of_all_kinds_above_a_containers_limit_are_refused(root):
    write(root, {"proc/self/cgroup": "0::/", "proc/self/mountinfo": V2.format(root="/", point="/g"), "g/memory.max": 10 << 20,
                 "g/memory.stat": f"anon {4 << 20}"})  # fmt: skip
    small = model(nn.Linear(2))  # fits
    large = 7 << 20
    for make in (
        lambda: cv.CalcHeap(large),
        lambda: cv.Fleet(large),
        lambda: model(nn.Linear(200) >> nn.Linear(8000) >> nn.Linear(1)),
        lambda: cv.CalcHeap("7 MB", store=cv.MemoryStore()),
    ):
        with pytest.raises(
            cv.PlanError, match=r"memory limit of the container is 10,485,760 bytes .*left 6,291,456"
        ) as error:
            make()
        assert error.value.needed > error.value.allowed == 6 << 20
    assert small.heap.nbytes < 6 << 20 and cv.CalcHeap(6 << 20).nbytes == 6 << 20


def model(net, **how):
    return cv.Model(net, input_shape=(3,), loss="mse", optimizer=cv.SGD(0.1), batch_size=4, **how)


# ---------------------------------------------------------------- a control group
@contextmanager
def group(controller, **files):
    """A control group with limits, where one can be made: "{1}" and "{2}" in names are of the versions."""
    why = "there are no control groups"
    for top in (Path("/sys/fs/cgroup") / controller, Path("/sys/fs/cgroup")):
        place = top / f"calcvm-test-{os.getpid()}"
        try:
            place.mkdir()
        except OSError as error:
            why = str(error)
            continue
        try:
            known = [name for name in files if (place / name.replace("__", ".")).exists()]
            if known:
                for name in known:
                    (place / name.replace("__", ".")).write_text(files[name])
                yield place
                return
            why = f"{place} has no limits of {controller}"
        finally:
            place.rmdir()
    pytest.skip(f"no control group can be made: {why}")


def run_in(place, code):
    enter = 'echo $$ > "$0/cgroup.procs"; exec "$1" -c "$2"'
    return subprocess.run(["sh", "-c", enter, str(place), sys.executable, code], capture_output=True, text=True)


LIMITED = """
import calcvm as cv
from calcvm import nn
try:
    cv.Model(nn.Linear(8000), input_shape=(20000,), loss="mse", optimizer=cv.SGD(1e-3), batch_size=8, workers=1)
except cv.PlanError as error:
    print(error)
"""


def test_the_memory_limit_of_a_control_group_is_a_plan_error():
    limit = str(400 << 20)
    with group("memory", memory__limit_in_bytes=limit, memory__max=limit) as place:
        done = run_in(place, LIMITED)
        assert done.returncode == 0, done.stderr
        assert f"the memory limit of the container is {400 << 20:,} bytes ({place})" in done.stdout


@pytest.mark.parametrize("quota", [1.5])
def test_the_quota_of_a_control_group_is_the_default_team(quota):
    code = "import os; os.environ.pop('CALCVM_WORKERS'); from calcvm.teams import default_team; from calcvm import system\n"
    code += "system.affinity = lambda: [0, 1, 2]; os.environ.pop('OMP_NUM_THREADS', None); print(default_team())"
    with group("cpu", cpu__cfs_quota_us=f"{int(quota * 1e5)}", cpu__max=f"{int(quota * 1e5)} 100000") as place:
        done = run_in(place, code)
        assert (done.returncode, done.stdout.strip()) == (0, "1"), done.stderr


# ---------------------------------------------------------------- the default team
@pytest.mark.parametrize(
    "most, variable, openmp, team",
    [(None, None, None, 8), (None, None, "3", 3), (None, None, "3,2", 3), (None, None, "x", 8), (None, None, "0", 8),
     (None, "5", "3", 5), (None, "", "3", 3), (None, "100", "1", 8), (2, "5", "3", 2), (100, "5", "3", 8), (1, None, None, 1)],
)  # fmt: skip
def test_the_first_of_the_settings_is_the_largest_default_team(monkeypatch, most, variable, openmp, team):
    monkeypatch.setattr(system, "n_cores", lambda: 8)
    for name, value in (("CALCVM_WORKERS", variable), ("OMP_NUM_THREADS", openmp)):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    cv.set_workers(most)
    try:
        assert teams.default_team() == team
        wide = nn.Linear(512) >> nn.Tanh() >> nn.Linear(512)
        g = cv.build_graph(wide, (512,), "mse", "adam")
        assert cv.plan(g, batch_size=256).workers == team == cv.Fleet("1 MiB").workers
        assert cv.plan(g, batch_size=256, workers=3).workers == 3 == cv.Fleet("1 MiB", workers=3).workers
        assert cv.plan(cv.build_graph(nn.Linear(1), (2,), "mse", "adam"), batch_size=4).workers == 1
    finally:
        cv.set_workers(None)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "2", True])
def test_settings_that_are_no_number_are_refused(monkeypatch, wrong):
    with pytest.raises(cv.CalcError, match="set_workers: n"):
        cv.set_workers(wrong)
    if wrong not in ("2", True):
        monkeypatch.setenv("CALCVM_WORKERS", str(wrong))
        with pytest.raises(cv.CalcError, match="CALCVM_WORKERS is .*give a number of workers"):
            teams.default_team()


def test_tests_have_teams_of_all_cores():
    """`OMP_NUM_THREADS` is 1 for other libraries; our default teams are tested."""
    assert teams.default_team() == system.n_cores() == len(os.sched_getaffinity(0))


# ---------------------------------------------------------------- systems that have less
HIDDEN = {
    "fcntl": "sys.modules['fcntl'] = None",
    "resource": "sys.modules['resource'] = None",
    **{f"os.{name}": f"vars(os).pop({name!r}, None)" for name in (
        "fork", "sched_getaffinity", "sched_setaffinity", "posix_fallocate", "posix_fadvise", "pread", "pwrite", "sysconf", "fchmod",
        "getuid", "sched_yield", "register_at_fork",
    )},
    **{f"signal.{name}": f"vars(signal).pop({name!r}, None)" for name in ("SIGKILL", "pthread_sigmask", "setitimer", "SIGALRM")},
    "mmap.MADV_DONTNEED": "import mmap; vars(mmap).pop('MADV_DONTNEED', None)",
    "/proc": "from calcvm import cgroups; import pathlib; cgroups.ROOT = pathlib.Path('/nowhere')",
    "Linux": "sys.platform = 'darwin'",
}  # fmt: skip
PROGRAM = """
import os, random, signal, sys, tempfile, threading, subprocess, concurrent.futures
import numpy as np, numba, llvmlite.binding
{hide}
import calcvm as cv
from calcvm import nn
rng = np.random.default_rng(0)
X = rng.uniform(-1, 1, (200, 2)).astype("float32")
y = (X[:, 0] * X[:, 1] > 0).astype("int64")
net = nn.Linear(16) >> nn.Tanh() >> nn.Linear(2)
g = cv.build_graph(net, (2,), "softmax_cross_entropy", cv.Adam(1e-2))
bytes_ = cv.plan(g, batch_size=50, workers=1).heap_bytes
model = cv.Model(g, batch_size=50, seed=0, workers={workers})
model.fit(X, y, epochs=10, progress=False)
for _ in range(40):
    loss = model.step(X[:50], y[:50])
folder = tempfile.mkdtemp()
model.save(folder + "/m.calc")
same = np.array_equal(cv.load(folder + "/m.calc").predict(X), model.predict(X))
fleet = cv.Fleet("1 MiB")
fleet.add(model.program, data=(X, y))
fleet.fit(2, progress=False)
split = cv.SplitModel(cv.plan_devices(g, [cv.Processor("a")], batch_size=50))
try:
    cv.FileStore(folder + "/store").close()
    store = ""
except cv.CalcError as error:
    store = str(error)
import json
print(json.dumps([bytes_, float(loss), same, store, fleet.workers]))
"""


def trained(hide, workers="None"):
    code = PROGRAM.format(hide=hide, workers=workers)
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_what_a_system_has_not_keeps_nothing_else_from_working(whole):
    """Each alone, and all at once; what needs it is refused in words."""
    together = "\n".join(HIDDEN.values())
    cases = {"nothing": "", "all": together, **(HIDDEN if whole else {})}
    found = {name: trained(hide) for name, hide in cases.items()}
    for name, (nbytes, loss, same, store, workers) in found.items():
        assert (nbytes, loss, same) == (*found["nothing"][:2], True), name
        assert ("has no locks of POSIX" in store) if name in ("all", "fcntl") else store == ""
        assert workers == (1 if name in ("all", "Linux") else found["nothing"][4])
    if whole:
        assert trained(HIDDEN["Linux"], workers="3")[:2] == found["nothing"][:2]  # the bits of any team


@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_what_cannot_run_says_so_in_a_sentence(monkeypatch, platform):
    made, paged = model(nn.Linear(2)).program, "pages are written by calls that Linux alone has"
    g = cv.build_graph(nn.Linear(64) >> nn.Tanh() >> nn.Linear(64), (64,), "mse", "adam")
    monkeypatch.setattr(sys, "platform", platform)
    assert cv.plan(g, batch_size=4).workers == 1
    if platform == "win32":
        with pytest.raises(cv.CalcError, match="plans on Windows but cannot run there.*take WSL or Linux"):
            cv.CalcHeap("1 MiB").create(cv.compile(g, batch_size=4))
    else:
        cv.CalcHeap("1 MiB").create(made)
    with pytest.raises(cv.CalcError, match=paged if platform != "win32" else "Windows"):
        system.check_runs("device 'cpu'", paged=True)


def test_room_on_the_disk_is_taken_where_the_system_has_no_call_for_it(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "posix_fallocate")
    with open(tmp_path / "pages", "w+b") as file:
        system.allocate(file.fileno(), 4096, (3 << 20) + 5)
        assert os.fstat(file.fileno()).st_size == 4096 + (3 << 20) + 5
        assert os.fstat(file.fileno()).st_blocks * 512 >= 3 << 20


@pytest.mark.parametrize("executable, frozen, answer", [
    ("/usr/bin/python3", False, True), ("/usr/bin/python3.13t", False, True), ("/usr/bin/python3", True, False), ("/opt/app/app", False, False),
    ("", False, False), (None, False, False), ("/usr/bin/uwsgi", False, False),
])  # fmt: skip
def test_an_applications_executable_is_not_started_again(monkeypatch, executable, frozen, answer):
    monkeypatch.setattr(sys, "executable", executable)
    monkeypatch.setattr(sys, "frozen", frozen, raising=False)
    assert system.interpreter() == (executable if answer else None)
