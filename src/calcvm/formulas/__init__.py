"""Formulas, each written once: an operator's computation on an element, forward and backward side by side.

The table (`calcvm.ops`) makes operators of them, `kernels_cpu` and `kernels_cuda` the kernels of their rows.  A formula
names the values that it reads, so no other values are kept for it.  Numbers: `calcvm.formulas.number`.
"""
