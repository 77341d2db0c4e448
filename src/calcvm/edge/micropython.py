"""A pack for MicroPython: a user C module with a class, and what MicroPython's builds read of its folder."""

from __future__ import annotations

from calcvm.edge.description import Description

MODULES = (  # of MicroPython, whose names a pack may not have
    "array", "asyncio", "binascii", "bluetooth", "btree", "builtins", "cmath", "collections", "cryptolib", "deflate", "esp", "esp32", "ffi",
    "framebuf", "frozen", "gc", "hashlib", "heapq", "io", "json", "lwip", "machine", "marshal", "micropython", "neopixel", "network", "openamp",
    "os", "platform", "pyb", "random", "re", "rp2", "select", "socket", "ssl", "stm", "struct", "sys", "termios", "thread", "tls", "uctypes",
    "vfs", "weakref", "webrepl", "websocket", "zephyr",
)  # fmt: skip
CALL = """static mp_obj_t call_{number}(size_t n, const mp_obj_t *given)
{{
    (void)n;
    return run({number}, given);
}}
static MP_DEFINE_CONST_FUN_OBJ_VAR_BETWEEN(call_{number}_obj, {given}, {given}, call_{number});
"""
MODULE = """}};
static MP_DEFINE_CONST_DICT(members, MEMBERS);
static MP_DEFINE_CONST_OBJ_TYPE(type, MP_QSTR_Model, MP_TYPE_FLAG_NONE, make_new, make_model, attr, attribute, locals_dict, &members);

static const mp_rom_map_elem_t GLOBALS[] = {{
    {{MP_ROM_QSTR(MP_QSTR___name__), MP_ROM_QSTR(MP_QSTR_{name})}},
    {{MP_ROM_QSTR(MP_QSTR_Model), MP_ROM_PTR(&type)}},
}};
static MP_DEFINE_CONST_DICT(globals, GLOBALS);
const mp_obj_module_t {name}_user_cmodule = {{.base = {{&mp_type_module}}, .globals = (mp_obj_dict_t *)&globals}};
MP_REGISTER_MODULE(MP_QSTR_{name}, {name}_user_cmodule);
"""
MAKE = """{upper}_DIR := $(USERMOD_DIR)
SRC_USERMOD_C += $({upper}_DIR)/{name}.c $({upper}_DIR)/{name}_module.c
CFLAGS_USERMOD += -I$({upper}_DIR)
"""
CMAKE = """add_library(usermod_{name} INTERFACE)
target_sources(usermod_{name} INTERFACE ${{CMAKE_CURRENT_LIST_DIR}}/{name}.c ${{CMAKE_CURRENT_LIST_DIR}}/{name}_module.c)
target_include_directories(usermod_{name} INTERFACE ${{CMAKE_CURRENT_LIST_DIR}})
target_link_libraries(usermod INTERFACE usermod_{name})
"""


def user_module(pack: Description, tables: str, body: str) -> str:
    """The module of a pack.  tables : its numbers and rows; body : micropython_module.c, which reads them."""
    name, upper, functions = pack.name, pack.name.upper(), pack.facts()["functions"]
    numbers, called, members = ["HEAP_BYTES", "STATE_OFFSET", "STATE_BYTES"], ["start"], ["array"]
    if pack.state[1]:
        numbers, called, members = [*numbers, "PAGE_BYTES"], [*called, "save", "load"], [*members, "page", "load"]
    if pack.self_test:
        called, members = [*called, "self_test"], [*members, "self_test"]
    return "\n".join([
        f"/* {name}: a user C module of MicroPython, made by calcvm of program {pack.program[:12]}. */",
        f'#include "{name}.h"',
        tables.rstrip(),
        f"enum {{{', '.join(f'{number} = {upper}_{number}' for number in numbers)}}};",
        *[f"#define {function.upper()} {name}_{function}" for function in called],
        "",
        body,
        *[CALL.format(number=k, given=1 + len(of["takes"])) for k, of in enumerate(functions.values())],
        "static const mp_rom_map_elem_t MEMBERS[] = {",
        *[f"    {{MP_ROM_QSTR(MP_QSTR_{f}), MP_ROM_PTR(&call_{k}_obj)}}," for k, f in enumerate(functions)],
        *[f"    {{MP_ROM_QSTR(MP_QSTR_{member}), MP_ROM_PTR(&{member}_obj)}}," for member in members],
        MODULE.format(name=name),
    ])  # fmt: skip


def build_files(name: str) -> dict[str, bytes | str]:
    """What make and CMake read, by name."""
    return {"micropython.mk": MAKE.format(name=name, upper=name.upper()), "micropython.cmake": CMAKE.format(name=name)}
