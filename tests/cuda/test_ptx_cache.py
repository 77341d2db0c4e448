"""PTX of single functions in the cache: what each one's place depends on, how they are joined, and how rows are found."""

from __future__ import annotations

import re

import pytest

from calcvm.equations.plain import Plain
from calcvm.equations.stated import Stated, known
from calcvm.kernels_cpu import _native
from calcvm.kernels_cuda import FAMILIES, _cuda, kernels
from calcvm.kernels_cuda._common import KERNELS, Kernel, Ptr
from calcvm.kernels_cuda._ptx import Piece, dispatch, joined, piece
from calcvm.kernels_cuda._routines import ROUTINES, symbol_of
from calcvm.kernels_cuda.plain import kernel
from calcvm.vm.run.cuda import build

LOOP = "the loop"
kernels()  # imports what has routines
TILES = {name for name, known in ROUTINES.items() if known.modules == ("kernels_cuda._tiles",)}


def forget():
    for remembered in (build._sources, _native._scan, _native._file):
        remembered.cache_clear()


def places():
    """The digests by which families' kernels are kept, routines and the loop."""
    of = {LOOP: ("vm.run.cuda.loop",), **{name: r.modules for name, r in ROUTINES.items()}}
    for name in sorted(kernels()):
        (module,) = kernels()[name].routine.modules
        assert module.removeprefix("kernels_cuda.") in FAMILIES
        of[module.removeprefix("kernels_cuda.")] = (module,)
    return {name: build._sources(modules) for name, modules in of.items()}


@pytest.mark.parametrize(
    "file, compiled_again",
    [
        ("kernels_cuda/losses.py", {"losses"}),
        ("kernels_cuda/optimizers.py", {"optimizers"}),
        ("formulas/optimizers.py", {"optimizers"}),
        ("kernels_cuda/_plain_loops.py", {"plain"}),
        ("kernels_cuda/_tiles.py", {"contraction", "convolution", *TILES}),
        ("kernels_cuda/_product.py", {"contraction", "convolution", *TILES, "put"}),
        ("kernels_cuda/_windows.py", {"contraction", "convolution", *TILES, "put"}),
        ("kernels_cuda/_ptx.py", {*FAMILIES, *ROUTINES, LOOP}),
        ("vm/run/cuda/loop.py", {LOOP}),
        ("vm/run/job.py", {LOOP}),
        ("vm/run/cuda/build.py", set()),  # what it writes itself is in no cache
        ("kernels_cpu/losses.py", set()),
    ],
)
def test_an_edit_compiles_again_what_is_made_of_it_and_nothing_else(package, file, compiled_again):
    before = places()
    (package / file).write_text((package / file).read_text() + "\n# edited\n")
    forget()
    after = places()
    assert {name for name in before if before[name] != after[name]} == compiled_again


def test_a_kernel_from_elsewhere_is_kept_by_its_code_and_the_types_of_its_words():
    def own_fwd(me, rows, x: Ptr):
        x[0] = x[0] + x[0]

    def other(me, rows, x: Ptr.int64):
        x[0] = x[0] + x[0]

    def changed(me, rows, x: Ptr):
        x[0] = x[0] * x[0]

    other.__qualname__ = changed.__qualname__ = own_fwd.__qualname__
    marks = [Kernel(fn, "own_fwd").routine.mark for fn in (own_fwd, own_fwd, other, changed)]
    assert marks[0] == marks[1] and len(set(marks)) == 3
    assert {"kernels_cuda._cuda", "kernels_cuda._reduce"} <= set(Kernel(own_fwd).routine.modules)


# ---------------------------------------------------------------- what is compiled
@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Names of the functions that are compiled, in order, with an empty cache; texts in place of the compiler's."""
    monkeypatch.setenv("CALCVM_CACHE_DIR", str(tmp_path))
    names = []

    def function(fn, signature, name, cc):
        names.append(name)
        return written(name, [symbol_of("tile", "float32")] if "linear" in name else [])

    def entry(fn, signature, name, cc, threads, blocks):
        names.append(name)
        return written(name, [symbol_of(build.DISPATCH, "float32")]).replace(".visible .func", ".visible .entry")

    monkeypatch.setattr(_cuda, "compile_function", function)
    monkeypatch.setattr(_cuda, "compile_ptx", entry)
    return names


def written(name, needs):
    declared = "".join(
        f".extern .func  (.param .b64 func_retval0) {need}\n(\n\t.param .b64 p\n)\n;\n" for need in needs
    )
    return f".version 9.0\n.target sm_90\n.address_size 64\n\n{declared}\n.visible .func {name}(\n)\n{{\n\tret;\n\n}}\n"


def test_a_users_equation_is_compiled_once_and_kept_by_its_text(compiled):
    def new(text):
        compiled.clear()
        row = known(Stated(text, ("B",), ("x",), ("y",)))
        KERNELS.pop(row.name, None)  # as in another process
        build.ptx("row", [row.name], "float32", build.Target())
        return {name.removeprefix("calcvm_row_").removesuffix("_float32") for name in compiled} - {"calcvm_row"}

    (one,), again, (other,) = map(new, ("y[b<B] = 2*x[b]", "y[b<B] = 2*x[b]", "y[b<B] = 3*x[b]"))
    assert one != other and again == set()


def test_kernels_of_equations_are_kept_by_their_texts():
    def mark(text):
        return kernel(Plain("own_fwd", text, ("B",), ("x", "y"))).mark

    assert mark("y[b<B] = 2*x[b]") == mark("y[b<B] = 2*x[b]") != mark("y[b<B] = 3*x[b]")


def test_a_program_compiles_what_no_program_had(compiled):
    target = build.Target()

    def new(*of, dtype="float32", target=target):
        compiled.clear()
        text = build.ptx(*of, dtype, target)
        return text, set(compiled)

    text, first = new("rows", ["neg_fwd", "linear_fwd"])
    tile = symbol_of("tile", "float32")
    assert first == {"calcvm_rows", "calcvm_row_neg_fwd_float32", "calcvm_row_linear_fwd_float32", tile}
    assert new("rows", ["linear_fwd", "neg_fwd", "neg_fwd"]) == (text, set())
    assert new("rows", ["neg_fwd", "linear_fwd", "abs_fwd"])[1] == {"calcvm_row_abs_fwd_float32"}
    assert new("rows", ["neg_fwd", "linear_bwd_x"])[1] == {"calcvm_row_linear_bwd_x_float32"}
    assert new("rounds", ["neg_fwd", "abs_fwd"])[1] == {"calcvm_rounds"}
    assert new("rows", ["neg_fwd"], target=build.Target(threads=64, blocks=6))[1] == {"calcvm_rows"}
    assert new("rows", ["neg_fwd"], target=build.Target(precision="tf32"))[1] == set()
    assert new("rows", ["neg_fwd"], target=build.Target((8, 0)))[1] == {"calcvm_rows", "calcvm_row_neg_fwd_float32"}
    kept = next((_native.cache_root() / "ptx").glob("calcvm_row_neg_fwd_float32-*.sm_90.ptx"))
    other = next((_native.cache_root() / "ptx").glob("calcvm_row_abs_fwd_float32-*.sm_90.ptx"))
    for damaged in (kept.read_bytes()[:-10], kept.read_bytes()[:-10] + b"-" * 10, other.read_bytes(), b""):
        kept.write_bytes(damaged)
        assert new("rows", ["linear_fwd", "neg_fwd"]) == (text, {"calcvm_row_neg_fwd_float32"})


# ---------------------------------------------------------------- texts
COMPILED = """//
.version 9.3
.target sm_90
.address_size 64

	// .globl	f
.extern .func  (.param .b64 func_retval0) callee
(
	.param .b64 callee_param_0
)
;
.weak .func  (.param .b32 func_retval0) _Zhelper
(
	.param .b64 _Zhelper_param_0
)
;
.common .global .align 8 .u64 _ZNumbaEnv1;
.extern .shared .align 16 .b8 calcvm_shared[];
.global .align 8 .b8 _Ztable[4] = {1, 2, 3, 4};

.visible .func  (.param .b64 func_retval0) f(
	.param .b64 f_param_0
)
{
	.reg .b64 	%rd<2>;
	mov.u64 %rd1, _Ztable;
	{ // callseq 0, 0
	call.uni (retval0),
	_Zhelper,
	(param0);
	} // callseq 0
	ret;

}
	// .globl	_Zhelper
.weak .func  (.param .b32 func_retval0) _Zhelper(
	.param .b64 _Zhelper_param_0
)
{
	ret;

}
"""


def test_what_is_a_functions_own_is_named_after_it():
    of_f = piece(COMPILED, "f")
    assert of_f.needs == ("callee",) and Piece.read(of_f.stored()) == of_f
    text = joined([of_f], (9, 0))
    assert text.count(".extern .shared") == 1 and "NumbaEnv" not in text and "_Z" not in text and ".weak" not in text
    assert re.findall(r"^\.(?:func|global)[^\n]*", text, re.M) == [
        ".func  (.param .b32 func_retval0) f$0",
        ".global .align 8 .b8 f$1[4] = {1, 2, 3, 4};",
        ".func  (.param .b64 func_retval0) f(",
        ".func  (.param .b32 func_retval0) f$0(",
    ]
    assert "mov.u64 %rd1, f$1;" in text and "\tf$0,\n" in text and "[f$0_param_0]" not in text


@pytest.mark.parametrize("n", [0, 1, 2, 3, 7, 30])
def test_dispatch_finds_each_row_by_its_number(n):
    table = {build.number(f"row{k}"): f"calcvm_row{k}" for k in range(n)}
    made = dispatch("calcvm_dispatch", table)
    assert sorted(made.needs) == sorted(table.values())
    lines = made.text.splitlines()
    for number in (*table, 0, 2**62):
        assert called_by(lines, number) == ([table[number]] if number in table else [])


def called_by(lines, number):
    """What the text calls for a row of a number, by its branches."""
    pc, taken, calls = 0, False, []
    for _ in range(1000):
        line = lines[pc].strip()
        pc += 1
        if m := re.match(r"setp\.(ne|lt)\.s64 %p, %rd5, (\d+);", line):
            taken = number != int(m[2]) if m[1] == "ne" else number < int(m[2])
        elif m := re.match(r"(@%p )?bra(?:\.uni)? (\S+);", line):
            if taken or not m[1]:
                pc = lines.index(f"{m[2]}:")
        elif m := re.match(r"call\.uni \(returned\), (\S+), ", line):
            calls.append(m[1])
        elif line == "ret;":
            return calls
    raise AssertionError("no end")
