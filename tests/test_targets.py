"""Kernels for processors other than this one: compiled beside each other in one process, and run where this one can."""

from __future__ import annotations

import multiprocessing
import platform
import struct
from concurrent.futures import ProcessPoolExecutor

import llvmlite.binding as llvm
import pytest
from numba.core import ir_utils

from calcvm import kernels_cpu
from calcvm.kernels_cpu import _native
from calcvm.kernels_cpu._common import KERNELS, ROUTINES
from calcvm.kernels_cpu._target import Target, current, host
from calcvm.operators import elementwise
from calcvm.ops import OPS
from tests import rowrun

DTYPES = ("float32", "float64")
X86 = "x86_64-unknown-linux-gnu"
SSE, AVX2, NEON = Target(X86, "x86-64-v2"), Target(X86, "x86-64-v3"), Target("aarch64-unknown-linux-gnu", "generic")
TARGETS = {"sse": SSE, "avx2": AVX2, "neon": NEON, "host": host()}
MACHINES = {"x86_64": 62, "aarch64": 183}  # of ELF
ON_X86 = platform.machine() in ("x86_64", "AMD64")
# What compiled code may call beside routines: the system's, and of libm what runs once a step (the cosine schedule).
LIBC = {"memset", "memcpy", "memmove"}
OF_ROWS = {
    "tick": {"cos", "fmod"},
    "page_in": {"pread"},
    "page_out": {"pwrite", "sync_file_range"},
    "page_ahead": {"posix_fadvise"},
}
SAMPLE = ("sigmoid_bwd", "adam", "transpose_fwd", "tick", "gemv", "page_out")

kernels_cpu.load()


# without what another library computes, and what tests of this process declare later
ALL = [name for name in (*KERNELS, *ROUTINES) if not name.startswith("blas_")]


def chosen(whole, dtype):
    """A sample; with --whole a quarter, of each type another: all of them are compiled for wheels, too."""
    return ALL[2 * (dtype == "float64") :: 4] if whole else SAMPLE


def symbols(code):
    """The machine of an ELF file, and its global symbols: whether each is defined."""
    (machine,), (at,) = struct.unpack_from("<H", code, 18), struct.unpack_from("<Q", code, 40)
    size, n = struct.unpack_from("<HH", code, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", code, at + k * size) for k in range(n)]
    found = {}
    for _, kind, _, _, start, length, names, *_ in sections:
        for entry in range(start, start + length if kind == 2 else start, 24):
            name, info, _, section = struct.unpack_from("<IBBH", code, entry)
            if info >> 4:  # not local
                text = sections[names][4] + name
                found[code[text : code.index(b"\0", text)].decode()] = section != 0
    return machine, found


# ---------------------------------------------------------------- what is known of them
@pytest.mark.parametrize(
    "target, vectors, masks, free_masks",
    [
        (SSE, (128, 16), False, False),
        (AVX2, (256, 16), True, False),
        (Target(X86, "x86-64-v4"), (512, 32), True, True),
        (Target(X86, "x86-64-v4", "-avx512f"), (256, 16), True, False),
        (NEON, (128, 32), False, False),
    ],
    ids=lambda x: x.cpu + x.features if isinstance(x, Target) else "",
)
def test_what_is_read_off_the_code_generator(target, vectors, masks, free_masks):
    assert (target.vectors, target.masks, target.free_masks) == (vectors, masks, free_masks)
    assert target.lanes(32) == 2 * target.lanes(64) == vectors[0] // 32


def test_the_host_is_what_is_compiled_for_unless_told_otherwise():
    assert current() is host() and host().jit


# ---------------------------------------------------------------- objects
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kernel_compiles_for_every_target_in_one_process(dtype, whole):
    """Target by target for each: what is kept of one between two compilations must not get into another."""
    if dtype == "float64" and not whole:
        pytest.skip("takes --whole")
    for name in chosen(whole, dtype):
        native = KERNELS.get(name) or ROUTINES[name]
        code = {}
        for kind, target in TARGETS.items() if dtype == "float32" else (("neon", NEON), ("avx2", AVX2), ("sse", SSE)):
            made = native.compile(dtype, "cpu", target)
            machine, found = symbols(made.code)
            assert machine == MACHINES[target.triple.partition("-")[0]]
            assert [symbol for symbol, defined in found.items() if defined] == [native.symbol(dtype)]
            called = {symbol for symbol, defined in found.items() if not defined}
            ours = {routine.symbol(dtype) for routine in ROUTINES.values()}
            assert called - made.needs.keys() <= LIBC | OF_ROWS.get(name, set()), (name, kind)
            assert made.needs.keys() <= ours
            code[kind] = made.code
        # the host may be one of the others, and a row that only calls memset is alike on all x86
        assert len({*code.values()}) >= (3 if dtype == "float32" else 2), name
        assert native.compile(dtype, "cpu", SSE).code == code["sse"], name


def test_a_process_that_has_compiled_much_goes_on():
    """Numba numbers blocks from a count of the process, which a day of compiling brings to numbers too long for LLVM."""
    fresh = KERNELS["max_pool_fwd"].compile("float32", "cpu").code
    ir_utils._the_max_label._value = 2**5000
    assert KERNELS["max_pool_fwd"].compile("float32", "cpu").code == fresh


def test_objects_of_several_targets_lie_side_by_side_in_the_cache(tmp_path, monkeypatch, forgotten):
    monkeypatch.setenv("CALCVM_CACHE_DIR", str(tmp_path))
    _native.folder.cache_clear()
    try:
        linked = dict(_native._addresses)
        made = {target: kernels_cpu.emit(["linear_fwd"], "float32", target) for target in (SSE, NEON)}
        assert _native._addresses == linked, "nothing is loaded"
        needed = {f"calcvm_{name}_float32_cpu" for name in ("linear_fwd", "activate", "gemm", "gemv")}
        assert all(objects.keys() == needed for objects in made.values())
        kept = [*tmp_path.rglob("*.o")]
        assert len(kept) == len(needed) * len(made)

        def fail(*_):
            raise AssertionError("compiled again")

        @elementwise()
        class tripled:
            def y(x):
                return 3 * x

            def dx(dy):
                return 3 * dy

        assert [*kernels_cpu.emit(["tripled_fwd"], "float32", NEON)] == [KERNELS["tripled_fwd"].symbol("float32")]
        assert kept == [*tmp_path.rglob("*.o")], "a user's own is not kept"

        monkeypatch.setattr(kernels_cpu, "_build", fail)
        assert made == {target: kernels_cpu.emit(["linear_fwd"], "float32", target) for target in made}
    finally:
        _native.folder.cache_clear()


# ---------------------------------------------------------------- and they run
class Emitted(rowrun.Cpu):
    """Rows by kernels emitted for a target, linked where nothing else knows them."""

    def __init__(self, target):
        self.target, self.linked = target, {}

    def address(self, name, dtype):
        if (name, dtype) not in self.linked:
            engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), host().machine())
            for code in kernels_cpu.emit([name], dtype, self.target).values():
                engine.add_object_file(llvm.ObjectFileRef.from_data(code))
            engine.finalize_object()
            self.linked[name, dtype] = engine, engine.get_function_address(KERNELS[name].symbol(dtype))
        return self.linked[name, dtype][1]

    def run(self, name, dtype, cells, row, n_workers, phase, only, reverse):
        native = rowrun.NATIVE(self.address(name, dtype))
        workers = range(n_workers) if only is None else [only]
        for w in reversed(workers) if reverse else workers:
            native(cells.ctypes.data, row.ctypes.data, w, n_workers, phase)


def _rows_compute_the_same(target, names):
    rowrun.backend = Emitted(target)
    for name in names:
        for case in rowrun.cases(OPS[name], "float32"):
            rowrun.check_forward(case)
        for case in rowrun.cases(OPS[name], "float64"):
            rowrun.check_forward(case)
            if OPS[name].differentiable and OPS[name].category != "optimizer":
                rowrun.check_gradients(case)


@pytest.mark.skipif(not ON_X86, reason="runs code for x86-64")
def test_rows_of_other_targets_compute_the_same():
    """One operator: `make whole-levels` computes all rows so."""
    # by a process of their own: position-independent code must lie near its constants, and LLVM aborts where it does not,
    # as among a long process's many mappings
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        for target in (SSE, AVX2):
            process.submit(_rows_compute_the_same, target, ("softmax",)).result()
