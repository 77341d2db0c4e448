"""Functions of libm that LLVM calls where a processor has no instruction for them, in LLVM IR: a pack needs no libm."""

from __future__ import annotations

from collections.abc import Iterable

# (nounwind: else Arm's tables of exceptions would call its runtime)
# to the nearest integer: a number of at least 2^23 is one, and smaller ones lose their fraction beside it
ROUND = """define weak hidden float @rintf(float %x) nounwind {
  %size = call float @llvm.fabs.f32(float %x)
  %large = fcmp uge float %size, 8388608.0
  %by = call float @llvm.copysign.f32(float 8388608.0, float %x)
  %sum = fadd float %x, %by
  %near = fsub float %sum, %by
  %signed = call float @llvm.copysign.f32(float %near, float %x)
  %out = select i1 %large, float %x, float %signed
  ret float %out
}
"""
# then back by one, if it has gone the wrong way; the sign stays that of x, as that of -0.0
OTHER = """define weak hidden float @{name}(float %given) nounwind {{
  %x = {start}
  %near = call float @rintf(float %x)
  %beyond = fcmp {than} float %near, %x
  %back = fadd float %near, {step}
  %found = select i1 %beyond, float %back, float %near
  %out = call float @llvm.copysign.f32(float %found, float %given)
  ret float %out
}}
"""
SIZE = "call float @llvm.fabs.f32(float %given)"
FUNCTIONS = {
    "rintf": ROUND,
    "nearbyintf": ROUND.replace("@rintf", "@nearbyintf"),
    "floorf": OTHER.format(name="floorf", start="fadd float %given, -0.0", than="ogt", step="-1.0"),
    "ceilf": OTHER.format(name="ceilf", start="fadd float %given, -0.0", than="olt", step="1.0"),
    "truncf": OTHER.format(name="truncf", start=SIZE, than="ogt", step="-1.0"),
}
DECLARED = "declare float @llvm.fabs.f32(float)\ndeclare float @llvm.copysign.f32(float, float)\n"


def libm_of(names: Iterable[str]) -> str:
    """The text of those among the functions that are known, with what they call ("" for none)."""
    wanted = [name for name in FUNCTIONS if name in names]
    if wanted and "rintf" not in wanted:
        wanted.insert(0, "rintf")
    return DECLARED + "".join(FUNCTIONS[name] for name in wanted) if wanted else ""
