"""What a pack is written as: an object and a header, a library, a package for Python, a module for browsers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from importlib.resources import files as resources

from calcvm.edge import on_board
from calcvm.edge.c_header import c_header
from calcvm.edge.description import Array, Description
from calcvm.edge.linker import archive, linked
from calcvm.edge.micropython import build_files, user_module
from calcvm.edge.web import javascript

Files = dict[str, bytes | str]
LIBRARY = (
    "-shared", "-nostdlib", "-Oz", "-s", "-Wl,-Bsymbolic", "-Wl,--gc-sections", "-Wl,--build-id=none", "-Wl,--hash-style=gnu",
    "-Wl,--no-eh-frame-hdr", "-Wl,-z,max-page-size=4096", "-Wl,-z,norelro", "-Wl,-z,now", "-fno-plt", "-fno-ident",
    "-fno-stack-protector", "-fno-sanitize=all",
)  # fmt: skip

CODES = {  # as of Python's struct
    "float32": "f", "float64": "d", "int64": "q", "int32": "i", "uint8": "B", "int8": "b", "bool": "B",
}  # fmt: skip


def written(format: str, pack: Description, code: bytes) -> Files:
    """The files of a pack, by name."""
    facts = json.dumps(pack.facts(), indent=1)
    return {f"{pack.name}.json": facts, **FORMATS[format](pack, code)}


def _object(pack: Description, code: bytes) -> Files:
    return {f"{pack.name}.o": code, f"{pack.name}.h": c_header(pack)}


def _c(pack: Description, code: bytes) -> Files:
    return {f"{pack.name}.c": code, f"{pack.name}.h": c_header(pack)}


def _archive(pack: Description, code: bytes) -> Files:
    return {f"lib{pack.name}.a": archive(code, f"{pack.name}.o"), f"{pack.name}.h": c_header(pack)}


def _shared(pack: Description, code: bytes) -> Files:
    library = _library({"pack.o": code}, pack, (), "a shared library")
    return {f"lib{pack.name}.so": library, f"{pack.name}.h": c_header(pack)}


def _library(files: Mapping[str, bytes], pack: Description, options: tuple[str, ...], purpose: str) -> bytes:
    return linked(files, ("-target", pack.processor.linux, *pack.processor.zig[2:], *LIBRARY, *options), purpose)


def _browser(pack: Description, code: bytes) -> Files:
    return {f"{pack.name}.wasm": code, f"{pack.name}.js": javascript(pack)}


# ---------------------------------------------------------------- Python
def _python(pack: Description, code: bytes) -> Files:
    """A package: functions on Python's stable ABI in a library that ctypes may load, too; and a class that calls them."""
    module = _resource("python_module.c").encode()
    functions = "".join(f"int {pack.name}_{name}(void *);\n" for name in pack.facts()["functions"])
    sources = {"pack.o": code, "module.c": module, "pack.h": (functions + _tables(pack)).encode()}
    options = ("-std=c99", "-fno-asynchronous-unwind-tables", "-fvisibility=hidden")
    library = _library(sources, pack, options, "a pack for Python")
    return {"_code.abi3.so": library, "__init__.py": _package(pack)}


def _resource(name: str) -> str:
    return resources("calcvm.edge").joinpath(name).read_text()


def _tables(pack: Description) -> str:
    """Numbers and rows of tables, as python_module.c and micropython_module.c know a pack."""
    names, functions = list(pack.arrays), pack.facts()["functions"]

    def rows(each: Iterable[str]) -> str:
        return "{" + ", ".join(each) + "}"

    def array(name: str, of: Array) -> str:
        numbers = (of.at, of.bytes, f"'{CODES[of.dtype]}'", len(of.shape), rows(map(str, of.shape or [0])))
        return rows([_quoted(name), *map(str, numbers)])

    def function(name: str, takes: list[str], gives: list[str]) -> str:
        numbers = [rows(str(names.index(a)) for a in of) if of else "{0}" for of in (takes, gives)]
        what = f"{name}({', '.join(takes)}) -> {', '.join(gives)}"
        return f'{{"{name}", {_quoted(what)}, {pack.name}_{name}, {len(takes)}, {len(gives)}, {", ".join(numbers)}}}'

    numbers = {
        "BATCH": pack.batch, "ALIGN": pack.align, "N_ARRAYS": len(names), "N_FUNCTIONS": len(functions),
        "MOST_AXES": max([1, *(len(a.shape) for a in pack.arrays.values())]),
        "MOST_ARRAYS": max([1, *(len(of[way]) for of in functions.values() for way in ("takes", "gives"))]),
    }  # fmt: skip
    trapped = json.dumps(on_board.TRAPPED.replace("{}", "%s", 1).replace("{}", "%d"))
    return "\n".join([
        f"enum {rows(f'{name} = {value}' for name, value in numbers.items())};",
        f"#define TRAPPED {trapped}",
        f"#define ARRAY_ROWS {rows(array(*a) for a in pack.arrays.items())}",
        f"#define FUNCTION_ROWS {rows(function(name, of['takes'], of['gives']) for name, of in functions.items())}",
        "",
    ])  # fmt: skip


def _quoted(text: str) -> str:
    """A text as C has it."""
    return json.dumps(text, ensure_ascii=False)


def _package(pack: Description) -> str:
    """The text of the package: `on_board`, with the pack's facts."""
    text, of = _resource("on_board.py"), pack.facts()
    facts = {
        name: of[name]
        for name in ("name", "program", "batch_size", "ram", "align", "state", "functions", "arrays", "self_test")
    }
    empty = 'PACK = {"arrays": {}}  # the facts of the pack\n'
    assert empty in text
    return text.replace(empty, f"PACK = {json.dumps(facts)}\n")


# ---------------------------------------------------------------- MicroPython
def _micropython(pack: Description, code: bytes) -> Files:
    """A user C module: the source and header of a pack, and the class that calls it."""
    module = user_module(pack, _tables(pack), _resource("micropython_module.c"))
    return {**_c(pack, code), f"{pack.name}_module.c": module, **build_files(pack.name)}


FORMATS = {
    "object": _object, "c": _c, "archive": _archive, "shared": _shared, "python": _python, "browser": _browser,
    "micropython": _micropython,
}  # fmt: skip
