"""Objects of straight code, each made in a separate process: LLVM ends a process where it cannot go on, and Numba has one width."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from calcvm.edge.description import Labels
from calcvm.edge.places import Places
from calcvm.edge.targets import TARGETS, Processor
from calcvm.errors import CalcError
from calcvm.frozen import frozen
from calcvm.helper_process import HelperProcess
from calcvm.vm.program.program import Program, load_program

FRAME = re.compile(r"stack frame size \((\d+)\) exceeds limit \(0\) in function '([^']+)'")
Spans = Mapping[str, list[tuple[int, int]]]


@frozen
class Code:
    """An object file.

    frames : bytes of stack of each of its functions.  calls : by function those that it calls.
    source : the same in C, if it was wanted.
    """

    object: bytes
    frames: dict[str, int]
    calls: dict[str, list[str]]
    source: str

    def stack(self, name: str) -> int:
        """Bytes of stack that a function and all that it calls take, without functions that the object has not."""
        return self.frames.get(name, 0) + max(map(self.stack, self.calls.get(name, ())), default=0)


def emit(
    program: Program,
    batch: int,
    entries: Spans,
    processor: Processor,
    objective: str,
    places: Places,
    start: str,
    image: bytes,
    constants: bytes,
    labels: Mapping[str, list[Labels]],
    source: str = "",
) -> Code:
    """The object of a program's entries: for each name the spans of its rows; and ``start``, which sets a heap to an image.

    image : the bytes of ``places.state``; all others of the heap are 0.  constants : those of ``places.constants``.
    labels : by entry, what is looked at before any row runs.  source : the name of a C source that is made, too.

    Raises
    ------
    CalcError : the processor lacks something that a row needs, or the code generator gives up.
    """
    file = io.BytesIO()
    program.save(file)
    data = (image, constants, file.getvalue())
    request = {
        "target": processor.name, "batch": batch, "entries": entries, "start": start, "objective": objective, "places": asdict(places),
        "bytes": [*map(len, data)], "labels": labels, "source": source,
    }  # fmt: skip
    answer, told = answered(processor.bits, json.dumps(request).encode() + b"\n" + b"".join(data))
    head, _, code = answer.partition(b"\n")
    if not head:
        lines = [line for line in told.splitlines() if line.strip()]
        reason = next((line for line in lines if "LLVM ERROR" in line), (lines or ["it ended without a word"])[-1])
        raise CalcError(f"export: no code for {processor.name}: {reason}")
    found = json.loads(head)
    if "error" in found:
        raise CalcError(f"export: {found['error']}")
    frames = {name: int(size) for size, name in FRAME.findall(told)}
    return Code(code, frames | found["frames"], found["calls"], found["source"])


def answered(bits: int, request: bytes) -> tuple[bytes, str]:
    """What a process for processors of this width answers, and what it says meanwhile."""
    helper = HelperProcess(__name__, str(bits), errors=subprocess.PIPE)
    try:
        answer, told = helper.process.communicate(request)
    finally:
        helper.end()
    return answer, told.decode(errors="replace")


# ---------------------------------------------------------------- in the process
def serve(bits: str) -> None:
    """Answer requests for processors of a width."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing else may be written before the answer
    if bits == "32":
        from calcvm.edge.narrow import narrow

        narrow()
    for line in iter(sys.stdin.buffer.readline, b""):
        code, request = b"", json.loads(line)
        try:
            head, code = _made(request, TARGETS[request["target"]])
        except CalcError as error:
            head = {"error": str(error)}
        answers.write(json.dumps(head | {"bytes": len(code)}).encode() + b"\n" + code)
        answers.flush()


def _made(request: dict[str, Any], processor: Processor) -> tuple[dict[str, Any], bytes]:
    from calcvm.edge.c_source import c_source
    from calcvm.edge.straight import Straight

    if request["source"]:
        processor = replace(processor, target=replace(processor.target, dsp=False))
    image, constants, file = map(sys.stdin.buffer.read, request["bytes"])
    program, places = load_program(io.BytesIO(file)), Places(**request["places"])
    how = processor, request["objective"], places, constants, request["labels"]
    made = Straight(program, request["batch"], request["entries"], *how)
    made.start(request["start"], places.of(places.state[0])[0], image)
    made.finish()
    source = c_source(made.module, request["source"]) if request["source"] else ""
    return {"calls": made.calls_of, "frames": made.frames, "source": source}, made.code
