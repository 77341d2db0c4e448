"""Packs for other processors: a program's steps as straight code, its heap to the byte, and a C header.

targets    processors, by name: what their code generator needs
narrow     a Numba whose integers have 32 bits, for processors of 32
straight   one LLVM module of a program: each row's kernel called with its words as constants
emission   that module as an object file, made in a separate process
pack       the files of a pack, and its numbers
"""
