"""The C header of a pack."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from calcvm.edge.description import OWN, Array, Description, c_name
from calcvm.edge.on_board import TOLERANCE

C_TYPES = {"float32": "float", "float64": "double", "int64": "int64_t", "int32": "int32_t", "uint8": "uint8_t", "int8": "int8_t", "bool": "uint8_t"}  # fmt: skip

PAGES = """
/* The state as a page, and back.  Write pages to two places in turn, with counters that grow by 1: power may fail at any byte. */
#define {upper}_PAGE_BYTES (16u + {upper}_STATE_BYTES)

static inline uint32_t {name}_checksum(uint32_t c, const unsigned char *p, uint32_t n) /* CRC-32 */
{{
    while (n--) {{
        c ^= *p++;
        for (int k = 0; k < 8; k++)
            c = (c >> 1) ^ (0xEDB88320u & (0u - (c & 1u)));
    }}
    return c;
}}

static inline void {name}_number(unsigned char *p, uint32_t x)
{{
    for (int k = 0; k < 4; k++)
        p[k] = (unsigned char)(x >> 8 * k);
}}

static inline uint32_t {name}_number_at(const unsigned char *p)
{{
    return p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}}

/* Sets `page`, {upper}_PAGE_BYTES bytes, to the state of a heap. */
static inline void {name}_save(const void *heap, uint32_t counter, void *page)
{{
    const unsigned char *state = (const unsigned char *)heap + {upper}_STATE_OFFSET;
    unsigned char *out = (unsigned char *)page;
    {name}_number(out, 0x{mark}u);
    {name}_number(out + 4, counter);
    {name}_number(out + 8, {upper}_STATE_BYTES);
    for (uint32_t k = 0; k < {upper}_STATE_BYTES; k++)
        out[16 + k] = state[k];
    {name}_number(out + 12, ~{name}_checksum({name}_checksum(~0u, out, 12), out + 16, {upper}_STATE_BYTES));
}}

/* Whether a page is whole and of this model. */
static inline int {name}_is_whole(const void *page)
{{
    const unsigned char *in = (const unsigned char *)page;
    return {name}_number_at(in) == 0x{mark}u && {name}_number_at(in + 8) == {upper}_STATE_BYTES
        && {name}_number_at(in + 12) == (uint32_t)~{name}_checksum({name}_checksum(~0u, in, 12), in + 16, {upper}_STATE_BYTES);
}}

/* Sets a heap that {name}_start has set to the newer whole one of two pages.  Returns that page, or NULL if none is whole. */
static inline const void *{name}_load(void *heap, const void *a, const void *b, uint32_t *counter)
{{
    const unsigned char *in = (const unsigned char *)({name}_is_whole(a) ? a : b);
    unsigned char *state = (unsigned char *)heap + {upper}_STATE_OFFSET;
    if (!{name}_is_whole(in))
        return 0;
    if (in == a && {name}_is_whole(b) && (int32_t)({name}_number_at((const unsigned char *)b + 4) - {name}_number_at(in + 4)) > 0)
        in = (const unsigned char *)b;
    for (uint32_t k = 0; k < {upper}_STATE_BYTES; k++)
        state[k] = in[16 + k];
    *counter = {name}_number_at(in + 4);
    return in;
}}
"""

INFINITE = {"float": 128, "double": 240}  # from there on, the second byte of a number whose exponent is all ones
SELF_TEST = """
static inline int {name}_apart(const {c_type} *found, const {c_type} *wanted, uint32_t n)
{{
    {c_type} largest = ({c_type})1e-6L, most = 0;
    for (uint32_t k = 0; k < n; k++) {{
        const unsigned char *high = (const unsigned char *)(found + k + 1) - 2; /* of the number's bytes */
        {c_type} size = wanted[k] < 0 ? -wanted[k] : wanted[k], apart = found[k] - wanted[k];
        if ((high[1] & 127) == 127 && high[0] >= {infinite}) /* no number: compilers may take it for one */
            return 1;
        largest = size > largest ? size : largest;
        apart = apart < 0 ? -apart : apart;
        most = apart > most ? apart : most;
    }}
    return most > ({c_type}){tolerance}L * largest;
}}

/* 0 if the functions compute here, of data by a formula, what the PC has computed; else the number of the first that does not, from 1
   on.  The heap is set to the model's start, before and after. */
static inline int {name}_self_test(void *heap)
{{
    int failed = 0;
    {name}_start(heap);
{tests}
    {name}_start(heap);
    return failed;
}}
"""
TEST = """    {{
        static const {c_type} {wanted};
{data}
        if (!failed && ({name}_{function}(heap) || {apart}))
            failed = {number};
    }}"""


def c_header(pack: Description) -> str:
    """Sizes, functions, and where arrays lie."""
    name, upper, (state, lasting) = pack.name, pack.name.upper(), pack.state
    lines = [
        f"/* {name}: a model for {pack.processor.name} ({pack.processor.what}), made by calcvm of program {pack.program[:12]}.",
        "",
        f"   {pack.flash:,} bytes of code and constants, {pack.ram:,} bytes of heap; stack in bytes: "
        + ", ".join(f"{f} {size}" for f, size in pack.stack.items())
        + ".",
        "",
        f"   {name}_start sets a heap to the model's start.  The other functions return 0, or the code of a trap (low byte) and its row:",
        "   data that the program cannot use, such as a label that is no class.  A heap serves one call at a time.",
        "*/",
        f"#ifndef {upper}_H",
        f"#define {upper}_H",
        "#include <stdint.h>",
        "",
        "#ifdef __cplusplus",
        'extern "C" {',
        "#endif",
        "",
        f"#define {upper}_HEAP_BYTES {pack.ram}",
        f"#define {upper}_HEAP_ALIGN {pack.align}",
        f"#define {upper}_BATCH {pack.batch}",
        f"#define {upper}_STATE_OFFSET {state} /* what lasts: trained parameters, the optimizer's state, that of a stream */",
        f"#define {upper}_STATE_BYTES {lasting}",
        "",
        f"int32_t {name}_start(void *heap);",
        *(f"int32_t {name}_{f.name}(void *heap); /* {_said(f.feeds)} -> {_said(f.outputs)} */" for f in pack.functions),
        "",
        *(_accessor(pack, called, array) for called, array in pack.arrays.items()),
        *([_self_test(pack)] if pack.self_test else []),
        *([PAGES.format(name=name, upper=upper, mark=pack.program[:8])] if lasting else []),
        "#ifdef __cplusplus",
        "}",
        "#endif",
        "#endif",
        "",
    ]
    return "\n".join(lines)


def _said(names: Iterable[str]) -> str:
    """Names in a comment."""
    return re.sub(r"\*/|[\x00-\x1f]", "_", ", ".join(names))


def _called(pack: Description, array: str) -> str:
    """The function for the place of an array."""
    function = c_name(array)
    if function in {*OWN, *(f.name for f in pack.functions)}:
        function += "_data"
    return f"{pack.name}_{function}"


def _accessor(pack: Description, called: str, array: Array) -> str:
    c_type, size = C_TYPES[array.dtype], "".join(f"[{n}]" for n in array.shape) or "[1]"
    return f"static inline {c_type} *{_called(pack, called)}(void *heap) {{ return ({c_type} *)((char *)heap + {array.at}); }} /* {size} */"


def _self_test(pack: Description) -> str:
    """The function that compares what the pack computes with what the PC has computed."""
    tests = []
    for number, function in enumerate(pack.functions, 1):
        data: list[str] = []
        wanted: list[str] = []
        apart: list[str] = []
        for name in function.feeds:
            of, n = pack.arrays[name], math.prod(pack.arrays[name].shape)
            c_type, floats = C_TYPES[of.dtype], of.dtype.startswith("float")
            value = f"(k + 1) % {of.classes}" if of.classes else "37u * k % 101"
            value = f"({c_type})({value})" + f" / 101 - ({c_type})0.5L" * (floats and not of.classes)
            data.append(
                f"        for (uint32_t k = 0; k < {n}; k++)\n            {_called(pack, name)}(heap)[k] = {value};"
            )
        for name, values in pack.self_test[function.name].items():
            constant = f"wanted_{len(wanted)}"
            wanted.append(f"{constant}[] = {{{', '.join(f'{v!r}' for v in values)}}}")
            apart.append(f"{pack.name}_apart({_called(pack, name)}(heap), {constant}, {len(values)})")
        if wanted:
            how = {"name": pack.name, "function": function.name, "number": number, "c_type": _float(pack)}
            tests.append(TEST.format(wanted=", ".join(wanted), data="\n".join(data), apart=" || ".join(apart), **how))
    c_type = _float(pack)
    return SELF_TEST.format(
        name=pack.name, tests="\n".join(tests), tolerance=TOLERANCE, c_type=c_type, infinite=INFINITE[c_type]
    )


def _float(pack: Description) -> str:
    return "double" if any(a.dtype == "float64" for a in pack.arrays.values()) else "float"
