"""The heap: one allocation of a fixed size that models share, side by side or one after the other."""

from __future__ import annotations

import os
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from time import monotonic, perf_counter, sleep
from typing import TYPE_CHECKING, Any

import numpy as np

from calcvm import checks
from calcvm.errors import CalcError, PlanError, ProgramError
from calcvm.tables import html, some
from calcvm.vm import schema
from calcvm.vm.binding import Binding, bind
from calcvm.vm.device import device_of, heaps_of
from calcvm.vm.facts import DIGEST, Facts
from calcvm.vm.frame import Frame
from calcvm.vm.pieces import Pieces
from calcvm.vm.program import Program
from calcvm.vm.store import Store
from calcvm.vm.turns import FIRST_PAUSE, LONGEST_PAUSE, Turns, owner, stuck, unlocked

if TYPE_CHECKING:
    from calcvm.vm.methods import Calls
    from calcvm.vm.resident import Resident

ENTRY_SECONDS = 0.1  # in which a thread that is let in takes a lock that is free
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
    """What a heap knows of a model: where it is, what its piece holds beside its image, whose turn it is.

    Whoever uses its memory or changes what is noted here has its ``turn``.  What changes the model itself has
    ``change`` before that: several rounds that belong together, such as those of `Model.fit`, keep it from the first
    to the last, and give the turn up in between, to those that only look.
    """

    __slots__ = (
        "name",
        "binding",
        "workers",
        "facts",
        "frame",
        "_ready",
        "calls",
        "turn",
        "entering",
        "training",
        "trains",
        "lost",
        "changed",
        "exposed",
        "open",
        "passing",
        "graded",
        "held",
        "ran",
        "arena",
    )

    def __init__(self, name: str, binding: Binding | None, workers: int, facts: Facts):
        self.name, self.binding, self.workers, self.facts = name, binding, workers, facts
        self.frame: Frame | None = None
        self.calls: Calls | None = None  # what its compiled methods know
        self._ready: Frame | None = None
        self.turn, self.training = Turns(f"model {name!r}"), Turns(f"model {name!r}")
        self.entering: list[weakref.ref[Any]] = []  # ``__enter__`` of those that come, each until it has the turn
        self.trains = 0  # the thread that is in the middle of a training of several turns
        self.lost = False  # a fork came in the middle of another thread's call
        self.changed = False  # since the store has its image
        self.exposed = False  # views of its memory were given out: it may change at any time
        self.open: set[str] = set()  # paths in the middle of an accumulation: gradients are part of the image
        self.passing: str | None = None  # of these, one that a pass over data trains, which is settled at its end
        self.graded: set[str] = set()  # paths whose gradients its frame holds
        self.held: dict[str, int] = {}  # placeholders that hold data: the batch it has
        self.ran: dict[tuple[str, str], int] = {}  # paths and phases that were run: the batch
        self.arena: str | None = None  # the path whose transient values the piece holds

    @property
    def ready(self) -> Frame | None:
        """Its frame, as long as nobody means to take it."""
        return self._ready

    @ready.setter
    def ready(self, frame: Frame | None) -> None:
        """Under the heap's lock."""
        if self.calls is not None:
            if frame is None:
                self.calls.disarm()
            self.calls.look(self)
        self._ready = frame

    @property
    def unsaved(self) -> bool:
        """Whether it may differ from what the store has."""
        if self.calls is not None:
            self.calls.look(self)
        return self.changed or self.exposed or self.facts.changed

    @property
    def change(self) -> Any:
        """What is to be taken before ``turn`` by who changes the model, so that only whole changes follow each other.

        CalcError : another thread is in the middle of training, and waits for the turn that this one has.
        """
        if not self.turn.lock._is_owned():  # type: ignore[attr-defined]
            return self.training.mine
        if self.trains and self.trains != get_ident() and self.trains == owner(self.training.lock):
            raise CalcError(
                f"model {self.name!r} is being trained by another thread, which waits for this one to leave it: it "
                "cannot be changed now"
            )
        return self.turn.lock

    @property
    def enter(self) -> Callable[[], Any]:
        """``__enter__`` of its turn's lock, for a block that may change it: no training begins until it is called."""
        if self.turn.lock._is_owned():  # type: ignore[attr-defined]
            return self.turn.lock.__enter__
        with self.change:
            enter = partial(self.turn.mine.__enter__)
            self.entering = [*(ref for ref in self.entering if ref() is not None), weakref.ref(enter)]
            return enter

    def begin_training(self) -> None:
        """Let those in who have had ``change`` before this thread, and have not yet their turn.

        Who has asked for ``__enter__`` and does not call it is not waited for: one does at once where the lock is free.
        """
        self.trains, since = 0, monotonic()
        if self.turn.lock._is_owned():  # type: ignore[attr-defined]
            return  # nobody comes in before its end
        while any(ref() is not None for ref in self.entering) and monotonic() - since < ENTRY_SECONDS:
            with self.turn.mine:
                pass
            if self.turn.taken:
                since = monotonic()
            sleep(FIRST_PAUSE)
        self.entering = []

    def forget(self) -> None:
        """Its placeholders and results are gone."""
        self.held.clear()
        self.ran.clear()
        self.arena = None

    def unset(self, name: str) -> None:
        """A placeholder's data are gone, or about to be."""
        self.held.pop(name, None)
        if self.arena is not None and self.binding is not None and name in self.binding.needs(self.arena):
            self.arena = None  # a backward would read other data than the forward did

    def unmake(self, path: str, phases: tuple[str, ...]) -> None:
        """What phases of a path compute, forward or its loss, is gone, or about to be."""
        self.ran.pop((path, "loss"), None)  # perhaps of an earlier forward
        if "forward" in phases:
            self.ran.pop((path, "forward"), None)
        self.arena = None


class CalcHeap:
    """Memory for models: ``nbytes`` bytes, allocated once and never more.

    Models lie side by side while they fit.  Where room is needed, those used least recently are switched
    out: their persistent block (parameters, buffers, state, optimizer) is copied to the store, and back when they are
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
        self._frames: OrderedDict[Frame, None] = OrderedDict()  # least recently used first
        self._pieces = Pieces(self.nbytes)  # what no frame takes
        self._spare: dict[tuple[Binding, int], Frame] = {}
        self._tenants: dict[str, Tenant] = {}
        self._handles: weakref.WeakValueDictionary[str, Resident] = weakref.WeakValueDictionary()
        self._last: Tenant | None = None
        self._lock = threading.RLock()  # taken for moments; who has it waits for nobody's turn
        self._torn = False  # a change of frames and pieces, made under `_lock`, is not finished
        self._orphaned = False  # a model that was to be added was not: its frame is nobody's
        self.turns: list[Turns] = []  # those that keep models of this heap, beside the models' own
        self._numbered = 0
        if self.store.persistent:  # a process that ends in order leaves nothing unsaved
            self._end = weakref.finalize(self, _flush_at_exit, self._tenants, self.store, os.getpid())
        _heaps.add(self)

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
        return self._start(program, values, workers, name, lambda model: model.initialize(seed))

    def adopt(
        self,
        program: Program,
        facts: Mapping[str, Any],
        image: np.ndarray,
        workers: int | None = None,
        name: str | None = None,
    ) -> Resident:
        """A model as it was elsewhere: its facts, and its image with its gradients (`Frame.get_image`); as `load`."""

        def fill(model: Resident) -> None:
            model.frame.set_image(image, open=True)
            model.tenant.changed, model.tenant.open = True, _open(model.binding, facts)

        return self._start(program, facts, workers, name, fill)

    def _start(
        self,
        program: Program,
        values: Mapping[str, Any],
        workers: int | None,
        name: str | None,
        fill: Callable[[Resident], None],
    ) -> Resident:
        """A new model, of which ``fill`` sets what persists.  The heap has it when it is whole, and not before."""
        self._check_device(program)
        self._check_room(program)
        workers = None if workers is None else checks.integer("workers", workers)
        if workers is not None and workers > program.workers:
            raise CalcError(
                f"workers={workers}: the program was planned for 1 to {program.workers}; compile with workers={workers}"
            )
        with self._lock:
            self._new_name(name)
            if self.store.persistent:
                self.store.put_program(program)
        tenant = Tenant(name or "new", bind(program), workers or program.workers, Facts(program, values))
        try:
            with tenant.turn.mine:
                self._bring(tenant, fresh=True)
                fill(_resident(self, tenant))
                with self._lock:
                    tenant.name = self._new_name(name)  # another thread may have been faster
                    tenant.turn.what = tenant.training.what = f"model {tenant.name!r}"
                    self._tenants[tenant.name] = tenant
                    return self._handle(tenant)
        except BaseException:
            self._orphaned = True
            raise

    def open(self, name: str, *, workers: int | None = None) -> Resident:
        """A model of the store, by name: one that an earlier process trained, for instance.

        Raises
        ------
        CalcError : there is no such model, or it is of another device.
        PlanError : it is larger than the heap (``needed`` and ``allowed`` bytes).
        ProgramError : its file is torn, altered or foreign; the error names the file.
        """
        checks.text("a model's name", name)
        workers = None if workers is None else checks.integer("workers", workers)
        with self._lock:
            self._mend()
            if name in self._tenants:
                return self._handle(self._tenants[name])
            if name not in self.store:
                raise CalcError(f"no model {name!r}; there are {some(self.names)}")
            found, image = self.store.get(name)
            where = f"{self.store!r}, model {name!r}"
            program = self.store.get_program(schema.check(DIGEST, found.get("program"), f"{where}: its program"))
            facts = Facts(program, {**found, "program": program.hash}, where)
            self._check_device(program)
            binding = bind(program)
            start, stop = binding.opened if facts.get("open") else binding.image
            if image.nbytes != stop - start:
                raise ProgramError(
                    f"{where}: an image of {image.nbytes:,} bytes for a program of {stop - start:,} that persist"
                )
            self._check_room(program)
            team = program.workers if workers is None else min(workers, program.workers)
            tenant = Tenant(name, binding, team, facts)
            tenant.open = _open(binding, facts)
            self._tenants[name] = tenant
            return self._handle(tenant)

    def _check_room(self, program: Program) -> None:
        if program.heap_bytes > self.nbytes:
            raise PlanError(
                f"the program needs {program.heap_bytes:,} bytes, the heap has {self.nbytes:,}: "
                f"make the heap larger, or compile with memory={self.nbytes}",
                program.heap_bytes,
                self.nbytes,
            )

    def _check_device(self, program: Program) -> None:
        wanted = heaps_of(program.info.get("device", "cpu"))
        if wanted != heaps_of(self.device.name):
            raise CalcError(
                f"the program is compiled for {wanted!r}, the heap is of device {self.device.name!r}: "
                f"CalcHeap(..., device={wanted!r})"
            )

    def __repr__(self) -> str:
        names = some(self.names)
        return f"<CalcHeap: {self.free_bytes:,} of {self.nbytes:,} bytes free on {self.device.name!r}, models: {names}>"

    def _repr_html_(self) -> str:
        rows = []
        with self._lock:
            for name in self.names:
                tenant = self._tenants.get(name)
                nbytes = (
                    tenant.binding.program.heap_bytes if tenant is not None and tenant.binding is not None else None
                )
                where = "in the heap" if tenant is not None and tenant.frame else "in the store"
                rows.append([name, where, "" if nbytes is None else f"{nbytes:,}"])
        return html(repr(self), ["model", "where it is", "bytes in the heap"], rows)

    def __getitem__(self, name: str) -> Resident:
        return self.open(name)

    def __contains__(self, name: object) -> bool:
        with self._lock:
            self._mend()
            return isinstance(name, str) and (name in self._tenants or name in self.store)

    @property
    def names(self) -> list[str]:
        """Names of all models, loaded or in the store."""
        with self._lock:
            self._mend()
            return sorted({*self._tenants, *self.store.names()})

    @property
    def resident(self) -> Resident | None:
        """The model used last."""
        with self._lock:
            return None if self._last is None else self._handle(self._last)

    @property
    def free_bytes(self) -> int:
        """Bytes that no model holds (not necessarily in one piece)."""
        with self._lock:
            self._mend()
            return self._pieces.free_bytes

    def flush(self) -> None:
        """Write every model that has changed to the store; waits for the turn of each."""
        for tenant in [*self._tenants.values()]:
            self._write(tenant)

    def close(self) -> None:
        """Write what has changed, close the store, give the memory back; its models cannot be used afterwards.

        Raises
        ------
        CalcError : a model is in use by a thread that waits for one that this thread keeps.
        """
        while self._tenants:
            for tenant in [*self._tenants.values()]:
                self._write(tenant, drop=True)
        with self._lock:
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
    @property
    def still(self) -> Any:
        """A lock: who has it, for a moment, finds no model brought in or out."""
        return self._lock

    def enter(self, tenant: Tenant) -> Frame:
        """The frame of a model whose turn this thread has: its own until the turn ends.

        Brings it into the heap, and waits where other threads use all others (PlanError: this one uses them).
        """
        if tenant.calls is not None and tenant.calls.behind():
            with self._lock:
                tenant.calls.look(tenant)
        frame = tenant._ready
        return frame if frame is not None and self._last is tenant else self._bring(tenant)

    def keep(self, tenant: Tenant, keeper: Turns) -> Frame | None:
        """Bring a model into the heap for as long as this thread's turn at ``keeper`` lasts, or `let_go` is called.

        Until then whoever else takes the model's turn waits.  None : another thread has it, it is closed, or there is no
        room.
        """
        with self._lock:
            tenant.ready = None  # who takes its turn from now on looks here who keeps it
            if tenant.turn.taken or tenant.binding is None:
                return None
            frame = self._find(tenant, False)
            if frame is not None:
                frame.keeper, tenant.ready = keeper, None
            return frame

    def let_go(self, tenant: Tenant, keeper: Turns) -> None:
        """End `keep`."""
        frame = tenant.frame
        if frame is not None and frame.keeper is keeper:
            frame.keeper = None

    def _bring(self, tenant: Tenant, fresh: bool = False) -> Frame:
        """As `enter`, of a model that is not there, or was not the last."""
        frame = self._find(tenant, fresh)
        if frame is not None:
            return frame
        with (ticket := threading.Lock()):
            since = monotonic()
            while (frame := self._find(tenant, fresh)) is None:
                with self._lock:
                    for other in self._frames:  # those who use them again and again let this thread go first
                        if other.tenant is not None:
                            other.tenant.turn.after(ticket)
                if stuck(ticket, lambda: self._holders(tenant)):
                    needed = tenant.binding.program.heap_bytes  # type: ignore[union-attr]
                    raise PlanError(
                        f"the program needs {needed:,} bytes, and the heap's {self.nbytes:,} are held by models in "
                        "use: leave one of them first, or make the heap larger",
                        needed,
                        self.free_bytes,
                    )
                sleep(min(max(FIRST_PAUSE, (monotonic() - since) / 8), LONGEST_PAUSE))
            return frame

    def _holders(self, tenant: Tenant) -> list[int]:
        """Threads of which one must go on before a model can come in, or is let go (0: nobody)."""
        with self._lock:
            if tenant.frame is not None:
                keeper = tenant.frame.keeper
                return [0 if keeper is None else owner(keeper.lock)]
            return [
                (0 if frame.keeper is None else owner(frame.keeper.lock))
                or (0 if frame.tenant is None else owner(frame.tenant.turn.lock))
                for frame in self._frames
            ] or [0]

    def _find(self, tenant: Tenant, fresh: bool) -> Frame | None:
        """A model's frame, into which it is brought; None where all frames, or this one, are other threads'."""
        with self._lock:
            self._mend()
            if tenant.binding is None:
                raise CalcError(f"model {tenant.name!r} is closed")
            if tenant.lost:
                raise CalcError(
                    f"model {tenant.name!r} was in use by another thread when this process was forked, and is in the "
                    "middle of that here: load it anew, or fork while nobody uses it"
                )
            frame = tenant.frame
            if frame is None:
                frame = self._switch_in(tenant, tenant.binding, fresh)
            elif frame.keeper is not None and frame.keeper.taken:
                return None
            if frame is not None:
                self._frames.move_to_end(frame)
                self._last, tenant.ready = tenant, frame
            return frame

    def _switch_in(self, tenant: Tenant, binding: Binding, fresh: bool) -> Frame | None:
        """Bring a model into a frame; None where all frames are kept."""
        stats, started = self.stats, perf_counter()
        self._torn = True
        frame = self._room(binding)
        if frame is not None:
            if fresh:
                frame.clear()
            else:
                stats.bytes += frame.restore(self.store, tenant.name, bool(tenant.open))
                stats.switches += 1
            tenant.exposed = False
            tenant.graded.clear()
            tenant.forget()
            frame.tenant, tenant.frame = tenant, frame
            stats.seconds += perf_counter() - started
        self._torn = False
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
            while (oldest := next(iter(self._frames), None)) is not None and _used_since(oldest):
                self._frames.move_to_end(oldest)
            victim = next((frame for frame in self._frames if self._is_free(frame)), None)
            if victim is None:
                return None
            tenant = victim.tenant
            if tenant is not None:
                if tenant.unsaved and not tenant.lost:
                    self.stats.bytes += put(tenant, victim, self.store)
                victim.tenant = tenant.frame = None
            if victim.binding is binding:
                self._frames.move_to_end(victim)
                return victim
            self._free(victim)

    def _is_free(self, frame: Frame) -> bool:
        """Whether nobody uses the model in a frame, and nobody will who does not come here first."""
        tenant, keeper = frame.tenant, frame.keeper
        if tenant is None:
            return True
        tenant.ready = None  # before looking: who has the turn after this finds it not ready
        return unlocked(tenant.turn.lock) and (keeper is None or unlocked(keeper.lock))

    def _free(self, frame: Frame) -> None:
        del self._frames[frame]
        self._pieces.give(frame.start, frame.stop)
        if len(self._spare) >= SPARE_FRAMES:
            del self._spare[next(iter(self._spare))]
        frame.keeper = None
        self._spare[frame.binding, frame.start] = frame

    def _mend(self) -> None:
        """Make whole what an exception has left behind in the middle of a change.

        A frame's tenant is the truth: it is set when the model is in the frame, and unset when the store has it.
        """
        if not (self._torn or self._orphaned):
            return
        self._torn, self._orphaned = True, False
        for frame in [*self._frames]:
            tenant = frame.tenant
            if tenant is None or not (self._has(tenant) or owner(tenant.turn.lock)):
                del self._frames[frame]
        for tenant in [*self._tenants.values()]:
            tenant.frame = tenant.ready = None
        for frame in self._frames:
            frame.tenant.frame = frame  # type: ignore[union-attr]
        self._pieces = Pieces(self.nbytes)
        self._pieces.leave([(frame.start, frame.stop) for frame in self._frames])
        self._torn = False
        for tenant in [*self._tenants.values()]:
            if tenant.binding is None:
                self._drop(tenant)

    def commit(self, model: Resident) -> None:
        """Write a model to the store now, if it has changed and the store outlives the process."""
        _check_model("commit", model)
        if self.store.persistent:
            self._write(model.tenant)

    def write_kept(self, tenant: Tenant) -> None:
        """As `commit`, of a model that this thread keeps: whoever has its turn waits for that to end."""
        if self.store.persistent:
            with self._lock:
                self._mend()
                self._commit(tenant)

    def _write(self, tenant: Tenant, drop: bool = False) -> None:
        """Copy a model to the store, if it may have changed, and forget it if asked to; one that is closed was written then."""
        with tenant.turn.mine:
            self._reach(tenant)
            with self._lock:
                self._mend()
                if self._has(tenant):
                    self._commit(tenant)
                    if drop:
                        self._drop(tenant)

    def _reach(self, tenant: Tenant) -> None:
        """Wait until nobody else keeps a model whose turn this thread has."""
        with self._lock:
            frame = tenant.frame
            kept = frame is not None and frame.keeper is not None and frame.keeper.taken
        if kept:
            self.enter(tenant)

    def _has(self, tenant: Tenant) -> bool:
        return self._tenants.get(tenant.name) is tenant

    def _commit(self, tenant: Tenant) -> None:
        """Copy a model whose turn it is to the store, if it may have changed."""
        if tenant.unsaved and not tenant.lost:
            self.stats.bytes += put(tenant, tenant.frame, self.store)

    def remove(self, model: Resident) -> None:
        """Give a model's room back (see `Resident.close`)."""
        _check_model("remove", model)
        tenant = model.tenant
        in_use = tenant.turn.lock._is_owned()  # type: ignore[attr-defined]
        with tenant.turn.mine, self._lock:
            self._mend()
            if not self._has(tenant):
                return
            if in_use or (tenant.frame is not None and tenant.frame.keeper is not None and tenant.frame.keeper.taken):
                raise CalcError(f"model {tenant.name!r} is in use: it cannot be closed now")
            if self.store.persistent:
                self._commit(tenant)
            self._drop(tenant)

    def _drop(self, tenant: Tenant) -> None:
        """Forget a model; what an exception leaves of it, `_mend` drops."""
        self._torn = True
        tenant.binding = tenant.ready = None
        frame = tenant.frame
        if frame is not None:
            frame.tenant = tenant.frame = None
            self._free(frame)
        if self._last is tenant:
            self._last = None
        if not self.store.persistent:
            self.store.remove(tenant.name)
        del self._tenants[tenant.name]
        self._torn = False

    def _after_fork(self) -> None:
        """In a forked child: no other thread is there, and what one was doing is not finished."""
        self._lock, self._torn = threading.RLock(), True
        for tenant in self._tenants.values():
            if tenant.calls is not None:
                tenant.calls.disarm()  # it looks at locks that are not any more
        keepers = {keeper for frame in self._frames if (keeper := frame.keeper) is not None and keeper.renew()}
        for frame in self._frames:
            if frame.tenant is not None and (frame.tenant.turn.taken or frame.keeper in keepers):
                frame.tenant.lost, frame.tenant.ready = True, None
        for tenant in self._tenants.values():
            tenant.training.renew()
            tenant.turn.renew()
            tenant.entering = []
        for turns in self.turns:
            turns.renew()

    # ------------------------------------------------------------ names
    def _handle(self, tenant: Tenant) -> Resident:
        handle = self._handles.get(tenant.name)
        if handle is None or handle.tenant is not tenant:
            handle = self._handles[tenant.name] = _resident(self, tenant)
        return handle

    def free_name(self, name: str | None = None) -> str:
        """A name that no model has: ``name`` (CalcError: it is in use), or one that nobody else is given either."""
        with self._lock:
            free = self._new_name(name)
            self._numbered += name is None
            return free

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


def _open(binding: Binding, facts: Mapping[str, Any]) -> set[str]:
    """Paths whose gradients an image of these facts may hold."""
    return {*binding.accumulating} if facts.get("open") else set()


def _check_model(what: str, model: Any) -> None:
    from calcvm.vm.resident import Resident

    checks.one_of(what, model, Resident, "a model of the heap, such as heap[name],")


def _used_since(frame: Frame) -> bool:
    """Whether compiled methods have used a frame's model since this was asked last."""
    return frame.tenant is not None and frame.tenant.calls is not None and frame.tenant.calls.used()


def put(tenant: Tenant, frame: Frame | None, store: Store) -> int:
    """Copy a model's image to the store, or where it is not in a frame its facts alone; the bytes copied."""
    facts = tenant.facts
    if tenant.open:
        facts["open"] = True
    elif "open" in facts:
        del facts["open"]
    try:
        tenant.changed = facts.changed = False  # before: what other threads set meanwhile may not be in it
        if frame is not None:
            return frame.keep(store, tenant.name, facts, bool(tenant.open))
        image = store.get(tenant.name)[1]
        store.put(tenant.name, facts, image)
        return image.nbytes
    except BaseException:
        tenant.changed = facts.changed = True
        raise


def _flush_at_exit(tenants: dict[str, Tenant], store: Store, pid: int) -> None:
    if os.getpid() == pid:  # not a forked child
        for tenant in tenants.values():
            frame = tenant.frame
            if tenant.turn.taken or (frame is not None and frame.keeper is not None and frame.keeper.taken):
                continue  # what another thread is changing stays as it was written last
            if tenant.unsaved:
                put(tenant, frame, store)
        store.close()


def _resident(heap: CalcHeap, tenant: Tenant) -> Resident:
    from calcvm.vm.resident import Resident

    return Resident(heap, tenant)


_heaps: weakref.WeakSet[CalcHeap] = weakref.WeakSet()


def _after_fork() -> None:
    for heap in _heaps:
        heap._after_fork()


os.register_at_fork(after_in_child=_after_fork)
