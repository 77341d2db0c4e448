"""A pack for browsers and Node: a WebAssembly module, and a JavaScript module that calls it."""

from __future__ import annotations

import json

from calcvm.edge.description import Description
from calcvm.edge.linker import linked
from calcvm.edge.on_board import TOLERANCE, TRAPPED
from calcvm.edge.targets import Processor

STACK = 16 << 10  # bytes more than the analysis says, for what the linker adds

MODULE = """// {name}: a model made by calcvm of program {program:.12}.  It needs no library.
//
// const model = await load();   // {name}.wasm beside this file; or load(bytes)
{usage}
// model.state has what lasts, as bytes; set it to go on from there.
const PACK = {facts};
const VIEWS = {{float32: Float32Array, float64: Float64Array, int32: Int32Array, uint8: Uint8Array, int8: Int8Array, bool: Uint8Array}};

const pattern = (k, {{classes, dtype}}) => classes ? (k + 1) % classes : 37 * k % 101 / (dtype.startsWith("float") ? 101 : 1) - 0.5 * dtype.startsWith("float");

export class Model {{
  constructor(exports) {{
    const end = exports.__heap_base.value, heap = Math.ceil(end / 64) * 64;
    const pages = Math.ceil((heap + PACK.ram) / 65536) - exports.memory.buffer.byteLength / 65536;
    if (pages > 0) exports.memory.grow(pages);
    this.exports = exports;
    this.heap = heap;
    this.arrays = {{}};
    for (const [name, {{at, shape, dtype}}] of Object.entries(PACK.arrays))
      this.arrays[name] = new VIEWS[dtype](exports.memory.buffer, heap + at, shape.reduce((a, b) => a * b, 1));
    for (const [name, {{takes, gives}}] of Object.entries(PACK.functions)) {{
      const run = exports["{name}_" + name], inputs = takes.map(t => this.arrays[t]), outputs = gives.map(g => this.arrays[g]);
      this[name] = (...given) => {{
        if (given.length !== inputs.length) throw new TypeError(`${{name}} takes ${{takes.join(", ")}}: ${{given.length}} arrays are given`);
        for (let i = 0; i < inputs.length; i++) {{
          if (given[i] === null || given[i] === undefined) throw new TypeError(`${{takes[i]}} is ${{given[i]}}: numbers are wanted`);
          const n = given[i].length ?? 1;
          if (n !== inputs[i].length) throw new RangeError(`${{takes[i]}} has ${{n}} numbers: ${{inputs[i].length}} are wanted`);
          if (given[i].length === undefined) inputs[i][0] = given[i];
          else inputs[i].set(given[i]);
          if (inputs[i].some(Number.isNaN)) throw new RangeError(`${{takes[i]}} has values that are no numbers`);
        }}
        const trap = run(heap);
        if (trap) throw new RangeError(`{trapped}`);
        const found = outputs.map(o => o.length === 1 ? o[0] : o.slice());
        return found.length === 1 ? found[0] : found;
      }};
    }}
    this.start();
  }}

  // Names of the functions that do not compute here what the PC has computed; the model is at its start, before and after.
  selfTest() {{
    this.start();
    const failed = Object.entries(PACK.self_test).filter(([name, outputs]) => {{
      this[name](...PACK.functions[name].takes.map(x => this.arrays[x].map((_, k) => pattern(k, PACK.arrays[x]))));
      return Object.entries(outputs).some(([y, wanted]) => {{
        const largest = Math.max(...wanted.map(Math.abs), 1e-6);
        return !wanted.every((value, k) => Math.abs(this.arrays[y][k] - value) <= {tolerance} * largest);
      }});
    }});
    this.start();
    return failed.map(([name]) => name);
  }}

  get state() {{
    return new Uint8Array(this.exports.memory.buffer, this.heap + PACK.state[0], PACK.state[1]).slice();
  }}

  set state(bytes) {{
    if (bytes.length !== PACK.state[1]) throw new RangeError(`a state has ${{PACK.state[1]}} bytes, not ${{bytes.length}}`);
    new Uint8Array(this.exports.memory.buffer, this.heap + PACK.state[0], PACK.state[1]).set(bytes);
  }}
}}

export async function load(source = new URL("{name}.wasm", import.meta.url)) {{
  const bytes = source instanceof ArrayBuffer || ArrayBuffer.isView(source) ? source : await (await fetch(source)).arrayBuffer();
  return new Model((await WebAssembly.instantiate(bytes, {{}})).instance.exports);
}}
"""


def wasm(code: bytes, processor: Processor, entries: list[str], stack: int) -> bytes:
    """The module of an object."""
    room = -(-(stack + STACK) // 16) * 16
    options = [*processor.zig, "-nostdlib", "-O2", "-Wl,--no-entry", "-Wl,--strip-all", f"-Wl,-z,stack-size={room}"]
    options += [f"-Wl,--export={name}" for name in (*entries, "__heap_base")]
    return linked({"pack.o": code}, options, "a pack for browsers")


def javascript(pack: Description) -> str:
    """The module that calls it."""
    usage = "\n".join(
        f"// const {f.outputs[0] if len(f.outputs) == 1 else '[' + ', '.join(f.outputs) + ']'} = model.{f.name}({', '.join(f.feeds)});"
        for f in pack.functions
    )
    return MODULE.format(
        name=pack.name,
        program=pack.program,
        trapped=TRAPPED.format("${name}", "${trap & 255}", "${trap >> 8}"),
        usage=usage,
        tolerance=TOLERANCE,
        facts=json.dumps(
            {k: v for k, v in pack.facts().items() if k in ("ram", "state", "functions", "arrays", "self_test")}
        ),
    )
