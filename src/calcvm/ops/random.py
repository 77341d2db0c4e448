"""Random operators: no mask is stored, every number is a hash of (seed, step, stream, element).

``rng`` is two int64 in the heap: the seed, and a counter that `rng_advance` raises once a forward pass,
before the first row that reads it.  So a backward recomputes what its forward drew, results do not
depend on the team, and saving the heap saves the state.
"""

from __future__ import annotations

from calcvm.ops.spec import SIZE, Attr, Example, R, RowSpec, U, W, Word, dims, operator, rows_cols, same_shape

STREAM = Word(name="stream", kind="int", lo=0, hi=2**31 - 1)


def _row(name: str, x: str, y: str) -> RowSpec:
    return RowSpec(
        name=name,
        synopsis=f"{y}[i] = {x}[i]/(1 - rate) if u(seed, counter, stream, i) >= rate else 0",
        words=(*dims("rows cols"), STREAM),
        operands=(R(x, SIZE, "rows"), R("rng", "2", type="int64"), R("rate", "1", type="float64"), W(y, SIZE, "rows")),
        in_place=((y, x),),
        flops=f"2*{SIZE}",
    )


operator(
    name="dropout",
    synopsis="y[i] = x[i]/(1 - rate) with probability 1 - rate, else 0",
    category="random",
    inputs=("x", "rng", "rate"),
    attrs=(
        Attr(
            name="stream",
            default=0,
            check=lambda v: isinstance(v, int) and 0 <= v < 2**31,
            doc="rows of one graph that must draw independently have different streams",
        ),
    ),
    shape=same_shape,
    words=lambda shapes, attrs: {**rows_cols(shapes["x"]), "stream": attrs.get("stream", 0)},
    fwd=(_row("dropout_fwd", "x", "y"),),
    bwd=(_row("dropout_bwd", "dy", "dx"),),
    anyhow=True,
    differentiable=("x",),
    onnx=("Dropout",),
    examples=(
        Example(shapes=((None, 5), (2,), ()), low=0.1, high=0.9),
        Example(shapes=((None, 19), (2,), ()), low=0.1, high=0.9, attrs={"stream": 3}),
        Example(shapes=((37,), (2,), ()), low=0.1, high=0.9, attrs={"stream": 2**31 - 1}),
        Example(shapes=((None, 64), (2,), ()), low=0.1, high=0.9, batch=256, bench=True),
    ),
    source="Srivastava et al. 2014, inverted scaling; the hash is SplitMix64's (Steele et al. 2014)",
)

operator(
    name="rng_advance",
    synopsis="counter += 1",
    category="system",
    inputs=("rng",),
    outputs=("rng",),
    shape=lambda shapes, attrs: {"rng": shapes["rng"]},
    words=lambda shapes, attrs: {},
    fwd=(
        RowSpec(
            name="rng_advance",
            synopsis="rng.counter += 1",
            words=(),
            operands=(U("rng", "2", "w0", type="int64"),),
        ),
    ),
    examples=(Example(shapes=((2,),)),),
)
