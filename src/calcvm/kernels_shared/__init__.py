"""Texts of kernels that are the same for a CPU and a GPU: plain functions, and families that each device compiles for itself.

A family is a function here that takes what a device computes with, such as its decorators, and registers or returns what it
compiles.  The file of a family has the name of the files that call it, in `kernels_cpu` and `kernels_cuda`: the kernels count
as theirs.
"""
