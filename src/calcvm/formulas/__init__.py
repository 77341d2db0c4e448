"""Formulas, each written once: what an operator computes of an element, forward and backward side by side.

The table (`calcvm.ops`) makes operators of them, `kernels_cpu` and `kernels_cuda` the kernels of their rows; a formula
names what it reads, so that nothing else is kept for it.  Numbers: `calcvm.formulas.number`.
"""
