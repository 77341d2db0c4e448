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
# bit by bit, after fdlibm's e_sqrtf.c: ``twice`` the root so far, ``part`` what it leaves of the mantissa; correctly rounded
SQRT = """define weak hidden float @sqrtf(float %x) nounwind {
  %given = bitcast float %x to i32
  %less = add i32 %given, -1
  %plain = icmp ult i32 %less, 2139095039
  br i1 %plain, label %begin, label %other
other:
  %negative = icmp ugt i32 %given, 2147483648
  %special = select i1 %negative, float 0x7FF8000000000000, float %x
  ret float %special
begin:
  %field = lshr i32 %given, 23
  %subnormal = icmp eq i32 %field, 0
  br i1 %subnormal, label %shift, label %ready
shift:
  %low = phi i32 [ %given, %begin ], [ %up, %shift ]
  %of_low = phi i32 [ 1, %begin ], [ %of_up, %shift ]
  %up = shl i32 %low, 1
  %of_up = add i32 %of_low, -1
  %bit = and i32 %up, 8388608
  %again = icmp eq i32 %bit, 0
  br i1 %again, label %shift, label %ready
ready:
  %bits = phi i32 [ %given, %begin ], [ %up, %shift ]
  %biased = phi i32 [ %field, %begin ], [ %of_up, %shift ]
  %exponent = add i32 %biased, -127
  %odd = and i32 %exponent, 1
  %by = add i32 %odd, 1
  %fraction = and i32 %bits, 8388607
  %mantissa = or i32 %fraction, 8388608
  %whole = shl i32 %mantissa, %by
  br label %digits
digits:
  %digit = phi i32 [ 16777216, %ready ], [ %next_digit, %next ]
  %twice = phi i32 [ 0, %ready ], [ %new_twice, %next ]
  %part = phi i32 [ %whole, %ready ], [ %new_part, %next ]
  %try = add i32 %twice, %digit
  %fits = icmp ule i32 %try, %part
  br i1 %fits, label %take, label %next
take:
  %left = sub i32 %part, %try
  %more = add i32 %try, %digit
  br label %next
next:
  %new_twice = phi i32 [ %twice, %digits ], [ %more, %take ]
  %rest = phi i32 [ %part, %digits ], [ %left, %take ]
  %new_part = shl i32 %rest, 1
  %next_digit = lshr i32 %digit, 1
  %end = icmp eq i32 %next_digit, 0
  br i1 %end, label %done, label %digits
done:
  %root = lshr i32 %new_twice, 1
  %last = and i32 %root, 1
  %rounded = add i32 %root, %last
  %out_fraction = lshr i32 %rounded, 1
  %half = ashr i32 %exponent, 1
  %out_exponent = shl i32 %half, 23
  %head = add i32 %out_exponent, 1056964608
  %out_bits = add i32 %out_fraction, %head
  %out = bitcast i32 %out_bits to float
  ret float %out
}
"""
SIZE = "call float @llvm.fabs.f32(float %given)"
FUNCTIONS = {
    "rintf": ROUND,
    "nearbyintf": ROUND.replace("@rintf", "@nearbyintf"),
    "floorf": OTHER.format(name="floorf", start="fadd float %given, -0.0", than="ogt", step="-1.0"),
    "ceilf": OTHER.format(name="ceilf", start="fadd float %given, -0.0", than="olt", step="1.0"),
    "truncf": OTHER.format(name="truncf", start=SIZE, than="ogt", step="-1.0"),
    "sqrtf": SQRT,
}
DECLARED = "declare float @llvm.fabs.f32(float)\ndeclare float @llvm.copysign.f32(float, float)\n"


def libm_of(names: Iterable[str]) -> str:
    """The text of those among the functions that are known, with what they call ("" for none)."""
    wanted = [name for name in FUNCTIONS if name in names]
    if {"floorf", "ceilf", "truncf"} & {*wanted} and "rintf" not in wanted:
        wanted.insert(0, "rintf")
    return DECLARED + "".join(FUNCTIONS[name] for name in wanted) if wanted else ""
