"""Run the installed library on processors that this machine is not, in an emulator of QEMU.

python -m tests.emulated arm [PYTEST_ARGS ...]   # files of tests on 64-bit Arm
python -m tests.emulated x86                     # a training on several x86 processors: those of a level must have the same bits

The emulator is Debian's qemu-user-static.  For Arm, Debian's Python and PyPI's wheels are fetched into .arm/, once; no system
folder is touched, and no right is needed.  The kernels are the code of our wheel, compiled here: compiling in the emulator would
take twenty times as long.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.test_shipped import TRAINING

ROOT = Path(__file__).resolve().parents[1]
ARM = ROOT / ".arm"
PYTHON = ARM / "root" / "usr" / "bin" / "python3"
PACKAGES = ("numpy", "numba", "llvmlite", "pytest", "hypothesis", "greenlet")
FILES = ("carry", "fit", "gemm", "lenet", "operators", "quantization", "recurrent", "streams", "switching", "training")
# tests that start processes
STARTING = (
    "switching.py::test_many_models_in_files_under_a_small_heap",
    "fit.py::test_ctrl_c_leaves_a_consistent_model",
)
X86 = {
    "x86-64-v2": ("Nehalem", "Westmere", "SandyBridge"),
    "x86-64-v3": ("Haswell", "EPYC-Rome", "Skylake-Client"),
}


def emulator(arch: str) -> str:
    """The path of an architecture's emulator."""
    found = shutil.which(f"qemu-{arch}-static") or shutil.which(f"qemu-{arch}")
    if found is None:
        sys.exit(f"there is no qemu-{arch}-static: install it (Debian: apt install qemu-user-static)")
    return found


# ---------------------------------------------------------------- 64-bit Arm
def fetched() -> None:
    """Debian's Python for Arm, and PyPI's wheels."""
    if (ARM / "site" / "numba").is_dir():
        return
    apt, root = ARM / "apt", ARM / "root"
    for folder in (apt / "lists" / "partial", apt / "archives" / "partial", root):
        folder.mkdir(parents=True, exist_ok=True)
    (apt / "status").touch()
    options = {
        "APT::Architecture": "arm64", "APT::Architectures": "arm64", "APT::Sandbox::User": "root", "Debug::NoLocking": "1",
        "Dir::State": apt, "Dir::State::status": apt / "status", "Dir::Cache": apt,
    }  # fmt: skip
    command = ["apt-get", "-qq", *(f"-o={name}={value}" for name, value in options.items())]
    subprocess.run([*command, "update"], check=True)
    wanted = ["install", "--download-only", "--no-install-recommends", "--yes", "python3", "libstdc++6"]
    subprocess.run([*command, *wanted], check=True)
    for package in (apt / "archives").glob("*.deb"):
        subprocess.run(["dpkg-deb", "--extract", package, root], check=True)
    version = (root / "usr" / "bin" / "python3").resolve().name.removeprefix("python")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", ARM / "site", "--only-binary=:all:"]
    platforms = [f"--platform=manylinux_2_{glibc}_aarch64" for glibc in (17, 27, 28)]
    subprocess.run([*pip, "--implementation=cp", f"--python-version={version}", *platforms, *PACKAGES], check=True)


def packaged() -> None:
    """A copy of the package with its kernels for Arm; what has not changed since is in the cache."""
    sys.path.insert(0, str(ROOT))
    from calcvm.kernels_cpu._target import of_level
    from tools import wheels

    package = ARM / "package" / "calcvm"
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(ROOT / "src" / "calcvm", package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "objects").mkdir(exist_ok=True)
    for level in wheels.levels("aarch64"):
        wheels.archive(package / "objects" / f"{level}.zip", of_level("aarch64", level))


def arm(arguments: list[str]) -> int:
    """Run the files: pytest's exit status."""
    qemu = emulator("aarch64")
    fetched()
    packaged()
    paths = {"PYTHONPATH": f"{ARM / 'package'}:{ARM / 'site'}:{ROOT}", "CALCVM_CACHE_DIR": ARM / "cache"}
    environment = {**os.environ, **{name: str(value) for name, value in paths.items()}, "PYTHONNOUSERSITE": "1"}
    files = [str(ROOT / "tests" / f"test_{name}.py") for name in FILES]
    command = [qemu, "-L", ARM / "root", PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--time-limit=3000"]
    command += [f"--deselect=tests/test_{name}" for name in STARTING]
    return subprocess.run([*command, *files, *arguments], env=environment, cwd=ROOT).returncode


# ---------------------------------------------------------------- x86
def x86() -> int:
    """Train on each processor, and on this one: 1 if two of a level have other bits."""
    qemu, differ = emulator("x86_64"), False
    for level, processors in X86.items():
        environment, bits = {**os.environ, "CALCVM_CPU": level}, {}
        for processor in (None, *processors):  # this one first: it compiles what the cache lacks
            command = [*([qemu, "-cpu", processor] if processor else []), sys.executable, "-c", TRAINING]
            done = subprocess.run(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, text=True
            )
            losses = done.stdout.rpartition("[")[2]
            bits[processor or "here"] = hashlib.sha256(losses.encode()).hexdigest()[:8]
        print(f"{level}: {', '.join(f'{name} {value}' for name, value in bits.items())}", flush=True)
        differ |= len({*bits.values()}) > 1
    return int(differ)


if __name__ == "__main__":
    what, *rest = sys.argv[1:] or [""]
    if what not in ("arm", "x86"):
        sys.exit(__doc__)
    sys.exit(arm(rest) if what == "arm" else x86())
