"""Matrix products by CUDA kernels in the simulator: every micro-tile, sums of several blocks, bits of any team."""

from __future__ import annotations

import itertools
from itertools import repeat

import numpy as np
import pytest

from calcvm.kernels_cuda import _gemm, _product, _tensor, _tiles
from calcvm.kernels_cuda._cuda import SCRATCH_AT, at
from calcvm.ops.sizes import On, evaluate, workspace
from calcvm.ops.spec import ROWS
from calcvm.testing.cuda_threads import launch
from tests import rowrun
from tests.conftest import by_turns
from tests.cuda.simulated import Simulated
from tests.rowrun import EPS, close, run_row, same_bits

LAYOUTS = ((0, 0), (0, 1), (1, 0), (1, 1))  # transposed: A, B


# ---------------------------------------------------------------- tiles
def tile(
    which, m, n, S, G=1, *, threads=4, dtype="float32", trans=(0, 0), shift=0, ones=0, init=False, seed=0, of=np.asarray
):
    """C = A B by one tile of number ``which``, and in float64; A and B in the layouts ``trans``, ``shift`` elements off."""
    rng = np.random.default_rng(m + 31 * n + 997 * S)
    a = rng.uniform(-1, 1, (G, S, m) if trans[0] else (G, m, S)).astype(dtype)
    b = rng.uniform(-1, 1, (G, n, S) if trans[1] else (G, S, n)).astype(dtype)
    c = rng.uniform(-1, 1, (m, n)).astype(dtype)
    pad = 16
    heap = np.full(4 * pad + a.size + b.size + c.size + 3 * 16, np.nan, dtype)
    a_off = pad + shift
    b_off = -(-(a_off + a.size) // 16) * 16 + pad + shift
    c_off = b_off + b.size + 5
    heap[a_off : a_off + a.size], heap[b_off : b_off + b.size] = a.ravel(), b.ravel()
    heap[c_off : c_off + c.size] = c.ravel()
    a_rs, a_ks = (1, m) if trans[0] else (S, 1)
    b_ks, b_cs = (1, S) if trans[1] else (n, 1)

    def on_each(h):  # type: ignore[no-untyped-def]
        pc = at(h, c_off)
        mode = _product.FROM_INIT if init else _product.SET
        _product.product(h, S, _gemm.KC, m - ones, at(h, a_off), a_rs, a_ks, m * S, at(h, b_off), b_ks, b_cs, S * n,
                      pc, n, pc, n, mode, _product.NONE, 0.0, pc)  # fmt: skip
        _tiles.tile(h, which, 0, 0, m, n, 0, G * S, 0)

    launch(
        on_each,
        (heap,),
        blocks=1,
        threads=threads,
        shared_bytes=SCRATCH_AT + _product.shared_bytes(threads, c.itemsize),
    )
    wide_a = of(a).astype(np.float64).transpose((0, 2, 1) if trans[0] else (0, 1, 2)).copy()
    if ones:
        wide_a[:, -ones:] = 1
    want = (wide_a @ of(b).astype(np.float64).transpose((0, 2, 1) if trans[1] else (0, 1, 2))).sum(0)
    got = heap[c_off : c_off + c.size].reshape(m, n).copy()
    heap[c_off : c_off + c.size] = np.nan
    assert np.count_nonzero(~np.isnan(heap)) == a.size + b.size, "a tile wrote outside C"
    return got, want + c if init else want


def full(which, threads):
    RM, RN = _tiles.MICRO[which][:2]
    d = int(threads**0.5)
    return RM * d, RN * d


MICRO = range(len(_tiles.MICRO))


@pytest.mark.parametrize("trans", LAYOUTS)
@pytest.mark.parametrize("which", MICRO)
def test_tile(which, trans):
    """Whole and partial tiles of both layouts, for steps that end anywhere, aligned and not."""
    for threads, dtype in ((4, "float32"), (4, "float64"), (16, "float32")):
        M, N = full(which, threads)
        for m, n, S, shift in ((M, N, 9, 0), (M, N, 36, 0), (max(M - 1, 1), max(N - 3, 1), 34, 0), (1, 1, 67, 1)):
            got, want = tile(which, m, n, S, threads=threads, dtype=dtype, trans=trans, shift=shift, init=shift == 1)
            close(got.ravel(), want.ravel(), 64 * EPS[dtype], f"{m}x{n}x{S} of {threads} threads")


@pytest.mark.parametrize("threads, dtype", ((64, "float32"), (64, "float64"), (256, "float32")))
@pytest.mark.parametrize("which", MICRO)
def test_tile_fits(which, threads, dtype):
    """The blocks that devices run find room for the largest tiles: steps of the greatest depth, and results on their way out."""
    M, N = full(which, threads)
    for S in (5, 70) if threads == 64 else (5,):
        got, want = tile(which, M, N, S, threads=threads, dtype=dtype, trans=(1, 0))
        close(got.ravel(), want.ravel(), 64 * EPS[dtype], f"{M}x{N}x{S}")


def test_tiles_agree():
    """An element's bits do not depend on the tile that computes it, its layout, or the threads of the block."""
    m, n, S, G = 2, 2, 520, 1
    want = None
    for which, trans, threads in itertools.product(MICRO, ((0, 0), (1, 1)), (4, 16)):
        a_transposed, b_transposed = trans
        got = tile(which, m, n, S, G, threads=threads, trans=(a_transposed, b_transposed))[0]
        want = want or {}
        assert same_bits(got, want.setdefault(trans, got)), f"tile {which}, {threads} threads"


@pytest.mark.parametrize("which", (0, 2, 5, 7))
def test_sum_of_products(which):
    """Summands of many small products are one chain; rows beyond the last are ones."""
    M, N = full(which, 4)
    for S, G in ((7, 5), (4, 40), (1, 9), (300, 2)):
        for trans in ((0, 0), (1, 0), (0, 1)):
            got, want = tile(which, min(M, 4), min(N, 3), S, G, trans=trans, ones=1 if M > 1 else 0)
            close(got.ravel(), want.ravel(), 64 * EPS["float32"], f"{S} summands of {G} products, {trans}")


def test_tile_of_nothing():
    for which in (0, 7):
        got, want = tile(which, 2, 2, 0)
        assert (got == 0).all() and (want == 0).all()


def test_any_order():
    """The order in which threads come to each wait does not matter: none is missing."""
    for which in (2, 7):
        found = [tile(which, 5, 3, 70, threads=16, trans=(1, 0), seed=seed)[0] for seed in range(6)]
        assert all(same_bits(x, found[0]) for x in found)


# ---------------------------------------------------------------- tensor cores
def test_tf32_rounding():
    one = np.float32(1)
    assert _tensor.tf32(one + np.float32(2**-11)) == one + np.float32(2**-10), "ties go away from zero"
    assert _tensor.tf32(-one - np.float32(2**-11)) == -one - np.float32(2**-10)
    assert _tensor.tf32(one + np.float32(2**-12)) == one
    assert np.isnan(_tensor.tf32(np.float32(np.nan))) and np.isinf(_tensor.tf32(np.float32(np.inf)))


def rounded(x):
    return np.vectorize(lambda v: _tensor.tf32(np.float32(v)), otypes=[np.float32])(x)


@pytest.mark.parametrize("trans", LAYOUTS)
@pytest.mark.parametrize("which", range(len(_tiles.TENSOR)))
def test_tensor_tile(which, trans, monkeypatch):
    """Factors are rounded, sums are not; a heap of float64 is computed as ever."""
    monkeypatch.setattr(_tensor, "precision", "tf32")
    down, across, _ = _tiles.TENSOR[which]
    for threads, fragments in ((4, 1), (16, 4)):
        M, N = 4 * down * fragments, 4 * across
        for m, n, S, shift in ((M, N, 9, 0), (max(M - 3, 1), max(N - 1, 1), 35, 1), (1, 2, 67, 0)):
            got, want = tile(which, m, n, S, threads=threads, trans=trans, shift=shift, of=rounded)
            close(got.ravel(), want.ravel(), 64 * EPS["float32"], f"{m}x{n}x{S} of {threads} threads")
    got, want = tile(2, 5, 3, 9, dtype="float64", trans=trans)
    close(got.ravel(), want.ravel(), 64 * EPS["float64"], "float64")


def test_tensor_rows(monkeypatch):
    """Rows in tf32 are near those in float32, and have the same bits by any team."""
    for name in ("linear_fwd", "linear_bwd_w", "linear_bwd_x"):
        words = dict(rows=3, inner=175, N=3, K=5)
        exact = row(name, words, 4, 1)[1]
        monkeypatch.setattr(_tensor, "precision", "tf32")
        want = row(name, words, 4, 1)[1]
        for n, x in want.items():
            close(x, exact[n].astype(np.float64), 2.0**-9, f"{name}: {n}")
            assert not same_bits(x, exact[n])
        for threads, workers in ((16, 1), (4, 3), (16, 2)):
            made = row(name, words, threads, workers)[1]
            assert all(same_bits(made[n], x) for n, x in want.items()), f"{name}: {workers} workers of {threads}"
        monkeypatch.setattr(_tensor, "precision", "float32")


# ---------------------------------------------------------------- rows
def row(name, words, threads, workers, dtype="float32", acc=0):
    """What a row computes from values drawn for it, with the scratch that speed wants unless ``words`` have ``wn``."""
    spec = ROWS[name]
    env = {"acc": acc, "act": 0, "alpha": 0.0, **words}
    rng = np.random.default_rng(3)
    values = {}
    for o in spec.operands:
        if o.access != "s":
            values[o.name] = rng.uniform(-1, 1, int(evaluate(o.elems, env))).astype(dtype)
    rowrun.backend = Simulated(threads)
    return values, run_row(spec, {**env}, values, dtype, n_workers=workers)


@pytest.fixture(autouse=True)
def backend(monkeypatch):
    monkeypatch.setattr(rowrun, "backend", Simulated(4))


def teams():
    yield 4, 1
    yield from itertools.product((4, 16), (2, 3))
    yield 4, 5


LINEAR = [
    dict(rows=1, inner=1, N=9, K=17),
    dict(rows=17, inner=1, N=1, K=3),
    dict(rows=7, inner=3, N=17, K=16),
    dict(rows=2, inner=1, N=3, K=520),
    dict(rows=1030, inner=1, N=2, K=3),
    dict(rows=5, inner=110, N=1, K=2),
]


@pytest.mark.parametrize("words", LINEAR, ids=str)
@pytest.mark.parametrize("acc", (0, 1))
def test_linear(words, acc):
    """Values by NumPy, and the same bits by any team, with scratch for partial sums and without."""
    M, N, K = words["rows"] * words["inner"], words["N"], words["K"]
    for name in ("linear_fwd", "linear_bwd_w", "linear_bwd_x"):
        if name != "linear_bwd_w" and acc:
            continue
        values, want = row(name, words, 4, 1, acc=acc)
        v = {n: x.astype(np.float64) for n, x in values.items()}
        exact = {
            "linear_fwd": lambda v: {"y": v["x"].reshape(M, K) @ v["wt"].reshape(K, N) + v["b"]},
            "linear_bwd_w": lambda v: {
                "dwt": v["x"].reshape(M, K).T @ v["dy"].reshape(M, N) + acc * v["dwt"].reshape(K, N),
                "db": v["dy"].reshape(M, N).sum(0) + acc * v["db"],
            },
            "linear_bwd_x": lambda v: {"dx": v["dy"].reshape(M, N) @ v["wt"].reshape(K, N).T},
        }[name](v)
        for n, x in exact.items():
            close(want[n], x.ravel(), 64 * EPS["float32"], f"{name}: {n}")
        for (threads, workers), wn in (*zip(teams(), repeat({})), ((4, 3), {"wn": 0})):
            got = row(name, words | wn, threads, workers, acc=acc)[1]
            for n in exact:
                assert same_bits(got[n], want[n]), f"{name}: {n} differs with {workers} workers of {threads} threads"


@pytest.mark.parametrize("act", range(1, 6))
def test_activation(act):
    """Activations and their derivatives, where the last block of a sum ends and there only."""
    words = dict(rows=3, inner=1, N=5, K=515, act=act, alpha=0.3)
    values, got = row("linear_fwd", words, 4, 1)
    x = values["x"].reshape(3, 515).astype(np.float64) @ values["wt"].reshape(515, 5) + values["b"]
    f = {1: np.maximum(x, 0), 2: np.where(x < 0, 0.3 * x, x), 3: 1 / (1 + np.exp(-x)), 4: np.tanh(x),
         5: np.where(x < 0, 0.3 * np.expm1(x), x)}[act]  # fmt: skip
    close(got["y"], f.ravel(), 64 * EPS["float32"], "y")
    words = dict(rows=3, inner=1, N=515, K=5, act=act, alpha=0.3)
    values, got = row("linear_bwd_x", words, 4, 1)
    d = values["dy"].reshape(3, 515).astype(np.float64) @ values["wt"].reshape(5, 515).T
    y = values["ya"].reshape(3, 5).astype(np.float64)
    f = {1: y > 0, 2: np.where(y > 0, 1, 0.3), 3: y * (1 - y), 4: 1 - y * y, 5: np.where(y > 0, 1, y + 0.3)}[act]
    close(got["dx"], (d * f).ravel(), 64 * EPS["float32"], "dx")


PRODUCTS = [
    (1, 9, 5, 530, 0, 0, 1), (1, 520, 3, 2, 0, 0, 1), (3, 4, 9, 5, 1, 1, 0), (129, 4, 3, 2, 1, 0, 0), (129, 3, 4, 2, 0, 1, 0),
]  # fmt: skip


def pytest_generate_tests(metafunc):
    if metafunc.function is test_matmul:
        by_turns(metafunc, 2, sizes=PRODUCTS, ta=(0, 1), tb=(0, 1))


def test_matmul(sizes, ta, tb):
    """As `test_linear`, for all layouts, batches of products, and gradients of an operand that they share."""
    G, M, N, K, ab, bb, by = sizes
    words = dict(G=G, M=M, N=N, K=K, ta=ta, tb=tb, ab=ab, bb=bb, by=by)

    def stored(flat, batched, transposed, rows, cols):
        x = flat.astype(np.float64).reshape(G if batched else 1, *((cols, rows) if transposed else (rows, cols)))
        return x.transpose(0, 2, 1) if transposed else x

    def flat(x, batched, transposed):
        x = x if batched or by else x.sum(0, keepdims=True)
        return (x.transpose(0, 2, 1) if transposed else x).ravel()

    for name, out, acc in (("matmul_fwd", "y", 0), ("matmul_bwd_a", "da", 0), ("matmul_bwd_a", "da", 1),
                           ("matmul_bwd_b", "db", 0), ("matmul_bwd_b", "db", 1)):  # fmt: skip
        values, want = row(name, words, 4, 1, acc=acc)
        a = stored(values["a"], ab, ta, M, K) if "a" in values else None
        b = stored(values["b"], bb, tb, K, N) if "b" in values else None
        dy = values["dy"].astype(np.float64).reshape(G, M, N) if "dy" in values else None
        if out == "y":
            exact = (a @ b).ravel()
        elif out == "da":
            exact = flat(dy @ b.transpose(0, 2, 1), ab, ta) + acc * values["da"]
        else:
            exact = flat(a.transpose(0, 2, 1) @ dy, bb, tb) + acc * values["db"]
        close(want[out], exact, 64 * EPS["float32"], name)
        for threads, workers in ((16, 1), (4, 3)):
            got = row(name, words, threads, workers, acc=acc)[1]
            assert same_bits(got[out], want[out]), f"{name} differs with {workers} workers of {threads} threads"


# ---------------------------------------------------------------- scratch
def test_scratch_holds_partial_sums():
    """The table gives as much as the kernels use, for all sizes of sums and results."""
    rng = np.random.default_rng(5)
    for K, N, M in (10 ** rng.uniform(0, (4, 4, 6), (20_000, 3))).astype(int).tolist():
        shared = dict(N=N, K=K, acc=0)
        for name, result, words in (
            ("linear_bwd_w", (K + 1) * N, dict(rows=M, inner=1)),
            ("matmul_bwd_b", K * N, dict(G=1, M=M, ta=0, tb=0, ab=1, bb=0, by=1)),
            ("matmul_bwd_a", K * N, dict(G=M, M=N, N=1, ta=0, tb=0, ab=0, bb=1, by=0)),
        ):
            kc = _gemm.summands(M, result)
            assert kc % _gemm.KC == 0
            wanted = workspace(ROWS[name], {**shared, **words}, On(132, 1))[1].b
            split = _gemm.worth_splitting(132, M, kc, result, 1 << 60)
            assert split == _gemm.worth_splitting(132, M, kc, result, wanted), f"{name}: {words}, {shared}"
