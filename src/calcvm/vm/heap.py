"""The heap: one allocation of a fixed size that models share, side by side or one after the other."""

from __future__ import annotations

import os
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from calcvm import checks
from calcvm.errors import CalcError, PlanError, ProgramError
from calcvm.vm import schema
from calcvm.vm.binding import Binding, bind
from calcvm.vm.device import device_of, heaps_of
from calcvm.vm.facts import DIGEST, Facts
from calcvm.vm.frame import Frame
from calcvm.vm.pieces import Pieces
from calcvm.vm.program import Program
from calcvm.vm.store import Store

if TYPE_CHECKING:
    from calcvm.vm.resident import Resident

YIELD_SECONDS = 0.001
SPARE_FRAMES = 64  # kept to be used again: making one takes as long as two switches
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_bytes(memory: int | str) -> int:
    """Bytes from a number or a text such as ``"64 MiB"`` (or MB, GiB, ...)."""
    if isinstance(memory, (int, np.integer)) and not isinstance(memory, bool) and memory >= 0:
        return int(memory)
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]*)\s*([A-Za-z]*)\s*", memory) if isinstance(memory, str) else None
    if match is None or match[2].upper() not in _UNITS or not 1 <= len(match[1].replace(".", "", 1)) <= 20:
        raise CalcError(f"memory {checks.shown(memory)}: give bytes, or a text such as '64 MiB' or '1.5 GB'")
    return int(float(match[1]) * _UNITS[match[2].upper()])


@dataclass
class Stats:
    """What switching has cost: ``switches`` of models into the heap, ``bytes`` copied out and in, ``seconds``."""

    switches: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def reset(self) -> None:
        self.switches, self.bytes, self.seconds = 0, 0, 0.0


class Tenant:
    """What a heap knows of a model: where it is, and what its piece holds beside its image."""

    __slots__ = (
        "name",
        "binding",
        "workers",
        "facts",
        "frame",
        "changed",
        "exposed",
        "open",
        "graded",
        "held",
        "ran",
        "arena",
    )

    def __init__(self, name: str, binding: Binding | None, workers: int, facts: Facts):
        self.name, self.binding, self.workers, self.facts = name, binding, workers, facts
        self.frame: Frame | None = None
        self.changed = False  # since the store has its image
        self.exposed = False  # views of its memory were given out: it may change at any time
        self.open = False  # in the middle of an accumulation: the gradient is part of the image
        self.graded: set[str] = set()  # paths whose gradients its frame holds
        self.held: dict[str, int] = {}  # placeholders that hold data: the batch it has
        self.ran: dict[tuple[str, str], int] = {}  # paths and phases that were run: the batch
        self.arena: str | None = None  # the path whose transient values the piece holds

    @property
    def unsaved(self) -> bool:
        """Whether it may differ from what the store has."""
        return self.changed or self.exposed or self.facts.changed

    def forget(self) -> None:
        """Its placeholders and results are gone."""
        self.held.clear()
        self.ran.clear()
        self.arena = None


class CalcHeap:
    """Memory for models: ``nbytes`` bytes, allocated once and never more.

    Models lie side by side while they fit.  Where room is needed, those used least recently are switched
    out: their persistent block (parameters, state, optimizer) is copied to the store, and back when they are
    used again.  Nothing is planned, compiled or allocated for it, and training goes on with the same bits.

    Parameters
    ----------
    memory : int or str
        Bytes, or a text such as ``"64 MiB"``.
    store : MemoryStore or FileStore, optional
        Where models are that are not in the heap (default: a `MemoryStore` of its own).
    device : str
        Whose memory it is: that of the device the models' programs are compiled for ("cpu" and "blas" share one).

    Attributes
    ----------
    nbytes : int
    device : Device
    stats : switches, bytes and seconds of switching
    """

    def __init__(self, memory: int | str, store: Store | None = None, device: str = "cpu"):
        self.nbytes = parse_bytes(memory)
        if store is not None and (isinstance(store, type) or not hasattr(store, "get_program")):
            raise CalcError(
                f"store: one such as cv.MemoryStore() or cv.FileStore(folder) is wanted, not {checks.called(store)}"
            )
        self.device = device_of(device)
        self.store: Store = self.device.store() if store is None else store
        self.stats = Stats()
        self._memory = self.device.memory(self.nbytes)
        self._pieces = Pieces(self.nbytes)
        self._frames: OrderedDict[Frame, None] = OrderedDict()  # least recently used first
        self._spare: dict[tuple[Binding, int], Frame] = {}
        self._tenants: dict[str, Tenant] = {}
        self._handles: weakref.WeakValueDictionary[str, Resident] = weakref.WeakValueDictionary()
        self._last: Tenant | None = None
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # a frame may be switched out again
        self._waiting = 0
        self._numbered = 0
        if self.store.persistent:  # a process that ends in order leaves nothing unsaved
            self._end = weakref.finalize(self, _flush_at_exit, self._tenants, self.store, os.getpid())

    # ------------------------------------------------------------ models
    def load(self, program: Program, seed: int = 0, workers: int | None = None, name: str | None = None) -> Resident:
        """A new model: place a program in the heap and initialize its parameters from ``seed``.

        Parameters
        ----------
        workers : int, optional
            Team that runs it (default: the program's).
        name : str, optional
            By which store and heap know it (default: ``model-0``, ``model-1``, ...).

        Raises
        ------
        PlanError : the program is larger than the heap (``needed`` and ``allowed`` bytes).
        CalcError : the name is in use, or the program is compiled for another device.
        """
        check_program(program)
        seed = checks.integer("seed", seed, 0)
        values = {"program": program.hash, "seed": seed, "rounds": 0}
        return self._start(program, values, workers, name, lambda model, frame: model.reset(seed))

    def adopt(
        self,
        program: Program,
        facts: Mapping[str, Any],
        image: np.ndarray,
        workers: int | None = None,
        name: str | None = None,
    ) -> Resident:
        """A model as it was elsewhere: its facts, and its image with its gradients (`Frame.get_image`); as `load`."""

        def start(model: Resident, frame: Frame) -> None:
            frame.set_image(image, open=True)
            model.tenant.changed, model.tenant.open = True, bool(facts.get("open"))

        return self._start(program, facts, workers, name, start)

    def _start(
        self,
        program: Program,
        values: Mapping[str, Any],
        workers: int | None,
        name: str | None,
        start: Callable[[Resident, Frame], None],
    ) -> Resident:
        """A new model, of which ``start`` sets what persists."""
        self._check_device(program)
        if program.heap_bytes > self.nbytes:
            raise PlanError(
                f"the program needs {program.heap_bytes:,} bytes, the heap has {self.nbytes:,}: "
                f"make the heap larger, or compile with memory={self.nbytes}",
                program.heap_bytes,
                self.nbytes,
            )
        workers = None if workers is None else checks.integer("workers", workers)
        if workers is not None and workers > program.workers:
            raise CalcError(
                f"workers={workers}: the program was planned for 1 to {program.workers}; compile with workers={workers}"
            )
        with self._lock:
            name = self._new_name(name)
            facts = Facts(program, values)
            if self.store.persistent:
                self.store.put_program(program)
            tenant = self._tenants[name] = Tenant(name, bind(program), workers or program.workers, facts)
            model = self._handle(tenant)
            try:
                self._enter(tenant, fresh=True)
                self.leave(model)
                with model as frame:
                    start(model, frame)
            except BaseException:
                model.close()
                raise
        return model

    def open(self, name: str, *, workers: int | None = None) -> Resident:
        """A model of the store, by name: one that an earlier process trained, for instance.

        Raises
        ------
        CalcError : there is no such model, or it is of another device.
        ProgramError : its file is torn, altered or foreign; the error names the file.
        """
        checks.text("a model's name", name)
        workers = None if workers is None else checks.integer("workers", workers)
        with self._lock:
            if name in self._tenants:
                return self._handle(self._tenants[name])
            if name not in self.store:
                raise CalcError(f"no model {name!r}; there are {_some(self.names)}")
            found, image = self.store.get(name)
            where = f"{self.store!r}, model {name!r}"
            program = self.store.get_program(schema.check(DIGEST, found.get("program"), f"{where}: its program"))
            facts = Facts(program, found, where)
            self._check_device(program)
            binding = bind(program)
            start, stop = binding.opened if facts.get("open") else binding.image
            if image.nbytes != stop - start or program.heap_bytes > self.nbytes:
                raise ProgramError(
                    f"{where}: an image of {image.nbytes:,} bytes for a program of {program.heap_bytes:,} "
                    f"({stop - start:,} persistent), in a heap of {self.nbytes:,}"
                )
            team = program.workers if workers is None else min(checks.integer("workers", workers), program.workers)
            tenant = Tenant(name, binding, team, facts)
            tenant.open = bool(facts.get("open"))
            self._tenants[name] = tenant
            return self._handle(tenant)

    def _check_device(self, program: Program) -> None:
        wanted = heaps_of(program.info.get("device", "cpu"))
        if wanted != heaps_of(self.device.name):
            raise CalcError(
                f"the program is compiled for {wanted!r}, the heap is of device {self.device.name!r}: "
                f"CalcHeap(..., device={wanted!r})"
            )

    def __repr__(self) -> str:
        names = _some(self.names)
        return f"<CalcHeap: {self.free_bytes:,} of {self.nbytes:,} bytes free on {self.device.name!r}, models: {names}>"

    def __getitem__(self, name: str) -> Resident:
        return self.open(name)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (name in self._tenants or name in self.store)

    @property
    def names(self) -> list[str]:
        """Names of all models, loaded or in the store."""
        return sorted({*self._tenants, *self.store.names()})

    @property
    def resident(self) -> Resident | None:
        """The model used last."""
        return None if self._last is None else self._handle(self._last)

    @property
    def free_bytes(self) -> int:
        """Bytes that no model holds (not necessarily in one piece)."""
        return self._pieces.free_bytes

    def flush(self) -> None:
        """Write every model that has changed to the store."""
        with self._lock:
            for tenant in list(self._tenants.values()):
                self._commit(tenant)

    def close(self) -> None:
        """Write what has changed, close the store, give the memory back; its models cannot be used afterwards."""
        with self._lock:
            self.flush()
            for name in list(self._tenants):
                self._drop(self._tenants.pop(name))
            self.store.close()
            if self.store.persistent:
                self._end.detach()
            self._spare.clear()
            self._memory.close()

    def __enter__(self) -> CalcHeap:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ------------------------------------------------------------ switching
    def enter(self, model: Resident) -> Frame:
        """Make a model resident and keep it so until `leave`; waits where other threads keep all others."""
        frame = self._enter(model.tenant)
        assert frame is not None
        return frame

    def try_enter(self, model: Resident) -> Frame | None:
        """As `enter`, but None where there is no room beside the models that are kept."""
        return self._enter(model.tenant, wait=False)

    def leave(self, model: Resident) -> None:
        """Allow a model that was entered to be switched out again."""
        with self._lock:
            model.tenant.frame.pins -= 1  # type: ignore[union-attr]
            if self._waiting:
                self._changed.notify_all()

    def _enter(self, tenant: Tenant, *, fresh: bool = False, wait: bool = True) -> Frame | None:
        with self._lock:
            if self._waiting and not (tenant.frame and tenant.frame.pins):
                self._changed.wait(YIELD_SECONDS)  # who has waited goes first
            frame = tenant.frame
            if frame is None:
                while (frame := tenant.frame or self._switch_in(tenant, fresh)) is None:
                    if not wait:
                        return None
                    self._wait(tenant)
            elif self._last is not tenant:
                self._frames.move_to_end(frame)
            self._last = tenant
            frame.pins += 1
            frame.thread = threading.get_ident()
            return frame

    def _switch_in(self, tenant: Tenant, fresh: bool) -> Frame | None:
        """Bring a model into a frame; None where all frames are kept."""
        binding, stats = tenant.binding, self.stats
        if binding is None:
            raise CalcError(f"model {tenant.name!r} is closed")
        started = perf_counter()
        frame = self._room(binding)
        if frame is None:
            return None
        if fresh:
            frame.clear()
        else:
            stats.bytes += frame.restore(self.store, tenant.name, tenant.open)
            stats.switches += 1
        frame.tenant, tenant.frame = tenant, frame
        stats.seconds += perf_counter() - started
        return frame

    def _room(self, binding: Binding) -> Frame | None:
        """A frame for a program that holds no model, making room where there is none."""
        while True:
            piece = self._pieces.take(binding.program.heap_bytes)
            if piece is not None:
                frame = self._spare.pop((binding, piece[0]), None) or self._memory.frame(binding, *piece)
                self._frames[frame] = None
                frame.clear_padding()  # of another program's model
                return frame
            victim: Frame | None = next(iter(self._frames))
            if victim is not None and victim.pins:
                victim = next((f for f in self._frames if not f.pins), None)
            if victim is None:
                return None
            tenant = victim.tenant
            if tenant is not None:
                if tenant.unsaved:
                    self.stats.bytes += put(tenant, victim, self.store)
                tenant.exposed = False
                tenant.graded.clear()
                tenant.frame = victim.tenant = None
                tenant.forget()
            if victim.binding is binding:
                self._frames.move_to_end(victim)
                return victim
            self._free(victim)

    def _wait(self, tenant: Tenant) -> None:
        """Wait until another thread leaves a model."""
        if all(f.thread == threading.get_ident() for f in self._frames):
            needed = tenant.binding.program.heap_bytes  # type: ignore[union-attr]
            raise PlanError(
                f"the program needs {needed:,} bytes, and the heap's {self.nbytes:,} are held by models in use: "
                "leave one of them first, or make the heap larger",
                needed,
                self.free_bytes,
            )
        self._await()

    def _await(self) -> None:
        """Wait until a model is left by who used it."""
        self._waiting += 1
        self._changed.wait()
        self._waiting -= 1

    def _free(self, frame: Frame) -> None:
        del self._frames[frame]
        self._pieces.give(frame.start, frame.stop)
        if len(self._spare) >= SPARE_FRAMES:
            del self._spare[next(iter(self._spare))]
        self._spare[frame.binding, frame.start] = frame

    def commit(self, model: Resident) -> None:
        """Write a model to the store now, if it has changed and the store outlives the process."""
        with self._lock:
            if self.store.persistent:
                self._commit(model.tenant)

    def _commit(self, tenant: Tenant) -> None:
        """Copy a model to the store if it may have changed; waits while another thread uses it."""
        while (frame := tenant.frame) is not None and frame.pins and frame.thread != threading.get_ident():
            self._await()
        if tenant.unsaved:
            self.stats.bytes += put(tenant, frame, self.store)

    def remove(self, model: Resident) -> None:
        """Give a model's room back (see `Resident.close`)."""
        with self._lock:
            tenant = model.tenant
            if self._tenants.get(tenant.name) is not tenant:
                return
            if tenant.frame is not None and tenant.frame.pins:
                raise CalcError(f"model {tenant.name!r} is in use: it cannot be closed now")
            self.commit(model)
            del self._tenants[tenant.name]
            self._drop(tenant)
            if not self.store.persistent:
                self.store.remove(tenant.name)

    def _drop(self, tenant: Tenant) -> None:
        frame = tenant.frame
        if frame is not None:
            frame.tenant = tenant.frame = None
            self._free(frame)
        if self._last is tenant:
            self._last = None
        tenant.binding = None

    # ------------------------------------------------------------ names
    def _handle(self, tenant: Tenant) -> Resident:
        from calcvm.vm.resident import Resident

        handle = self._handles.get(tenant.name)
        if handle is None or handle.tenant is not tenant:
            handle = self._handles[tenant.name] = Resident(self, tenant)
        return handle

    def _new_name(self, name: str | None) -> str:
        if name is None:
            while f"model-{self._numbered}" in self:
                self._numbered += 1
            return f"model-{self._numbered}"
        if not isinstance(name, str) or not name:
            raise CalcError(f"a model's name is a text that is not empty, not {name!r}")
        if name in self._tenants:
            raise CalcError(f"the heap has a model {name!r}: names differ; take heap[{name!r}] or another name")
        if name in self.store:
            raise CalcError(
                f"the store has a model {name!r}: go on with heap.open({name!r}), or remove it with store.remove"
            )
        return name


def check_program(program: Any) -> None:
    """What is loaded is a compiled program; what it was made from is often given instead."""
    hint = {"Model": ": its .program", "CalcGraph": ": cv.compile(graph)", "Plan": ": cv.compile(graph, plan=plan)"}
    kind = type(program).__name__
    wanted = f"a compiled program{hint.get(kind, ' (cv.compile, cv.load_program)')}"
    checks.one_of("a model of the heap", program, Program, wanted)


def put(tenant: Tenant, frame: Frame | None, store: Store) -> int:
    """Copy a model's image to the store, or where it is not in a frame its facts alone; the bytes copied."""
    facts = tenant.facts
    if tenant.open:
        facts["open"] = True
    elif "open" in facts:
        del facts["open"]
    if frame is None:
        image = store.get(tenant.name)[1]
        store.put(tenant.name, facts, image)
        copied = image.nbytes
    else:
        copied = frame.keep(store, tenant.name, facts, tenant.open)
    tenant.changed = facts.changed = False
    return copied


def _flush_at_exit(tenants: dict[str, Tenant], store: Store, pid: int) -> None:
    if os.getpid() == pid:  # not a forked child
        for tenant in tenants.values():
            # what another thread is changing stays as it was written last
            if tenant.unsaved and not (tenant.frame is not None and tenant.frame.pins):
                put(tenant, tenant.frame, store)
        store.close()


def _some(names: list[str]) -> str:
    return ", ".join(names[:10]) + (f", ... ({len(names)})" if len(names) > 10 else "") if names else "none"
