"""Packs for other processors: a program's steps as straight code, its heap to the byte, and what calls them there.

targets      processors, by name: what their code generator needs
narrow       a Numba whose integers have 32 bits, for processors of 32
places       where a pack has the bytes of a program's heap: in RAM, or among its constants
straight     one LLVM module of a program: each row's kernel called with its words as constants
libm         what LLVM calls of libm where a processor has no instruction
emission     that module as an object file, made in a separate process
elf          what an object file says of itself
description  what a pack is described by, whatever is written for it
c_header     its C header, with states in pages
web          its JavaScript module, for WebAssembly
on_board     its Python package, which calls python_module.c
micropython  a user C module of MicroPython, with micropython_module.c
linker       libraries and modules, by ziglang
formats      what it may be written as
state        what lasts, from a model to a device and back
pack         the files of a pack, and its numbers
"""
