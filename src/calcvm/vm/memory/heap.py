"""The memory of a heap: one allocation of fixed size that models share, side by side or in turn.

It knows the models' records; `calcvm.model.CalcHeap` adds the models themselves.
"""

from __future__ import annotations

import os
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from time import monotonic, perf_counter, sleep
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from calcvm import checks
from calcvm.errors import CalcError, PlanError, ProgramError, Uncopied
from calcvm.system import at_fork
from calcvm.tables import html, some
from calcvm.vm.memory.cuda import DeviceMemory, PinnedStore
from calcvm.vm.memory.record import Record
from calcvm.vm.memory.slot import HostMemory, Memory, Slot
from calcvm.vm.memory.store import MemoryStore, Store
from calcvm.vm.memory.turns import FIRST_PAUSE, LONGEST_PAUSE, Turns, owner, stuck, unlocked
from calcvm.vm.program import schema
from calcvm.vm.program.facts import DIGEST, Facts
from calcvm.vm.program.program import Program
from calcvm.vm.run.device import device_of, heaps_of
from calcvm.vm.run.loaded import Loaded, loaded_of
from calcvm.vm.run.pieces import Pieces

if TYPE_CHECKING:
    from typing_extensions import Self

    from calcvm.vm.run.cuda.device import Cuda

MOST_DRAWN = 64  # slots from which one is drawn for eviction
SPARE_SLOTS = 64  # kept for reuse: creating one takes as long as two switches
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(memory: int | str, what: str = "memory") -> int:
    """Bytes from a number or a text such as ``"64 MiB"`` (or MB, GiB, ...); ``what`` names the value in errors."""
    if isinstance(memory, (int, np.integer)) and not isinstance(memory, bool) and memory >= 0:
        return int(memory)
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]*)\s*([A-Za-z]*)\s*", memory) if isinstance(memory, str) else None
    if match is None or match[2].upper() not in _UNITS or not 1 <= len(match[1].replace(".", "", 1)) <= 20:
        raise CalcError(f"{what} {checks.shown(memory)}: give bytes, or a text such as '64 MiB' or '1.5 GB'")
    return int(float(match[1]) * _UNITS[match[2].upper()])


@dataclass
class Stats:
    """Cost of switching: ``switches`` of models into the heap, ``bytes`` copied in and out, ``seconds``."""

    switches: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def reset(self) -> None:
        self.switches, self.bytes, self.seconds = 0, 0, 0.0


class Heap(Uncopied):
    """Memory for the records of models, and the switching between them (see `calcvm.CalcHeap`).

    Methods that change a model are called in its turn.
    """

    closed = False
    _instead = "copy its models, or keep them in a FileStore; another heap has its own memory"

    def __init__(
        self,
        memory: int | str,
        store: Store | None = None,
        device: str = "cpu",
        page_folder: str | os.PathLike[str] | None = None,
    ):
        self.nbytes = parse_bytes(memory)
        if page_folder is not None and (
            not isinstance(page_folder, (str, os.PathLike)) or "\0" in str(page_folder) or not str(page_folder)
        ):
            raise CalcError(f"page_folder: {checks.shown(page_folder)} is not the path of a folder")
        if store is not None and (isinstance(store, type) or not hasattr(store, "get_program")):
            raise CalcError(
                f"store: one such as cv.MemoryStore() or cv.FileStore(folder) is wanted, not {checks.called(store)}"
            )
        self.device = device_of(device)
        on_host, gpu = heaps_of(device) == "cpu", cast("Cuda", self.device)
        beside = MemoryStore() if on_host else PinnedStore(gpu)
        self.store: Store = beside if store is None else store
        self._reads = bool(getattr(store, "read_only", False))
        self._images = beside if self._reads else self.store  # of the models that are not in the heap
        self.stats = Stats()
        self._memory: Memory = (
            HostMemory(self.nbytes, None if page_folder is None else os.fspath(page_folder))
            if on_host
            else DeviceMemory(gpu, self.nbytes)
        )
        self._slots: OrderedDict[Slot, None] = OrderedDict()  # least recently used first
        self._pieces = Pieces(self.nbytes)  # free memory
        self._spare: dict[tuple[Loaded, int], Slot] = {}
        self._records: dict[str, Record] = {}
        self._models: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()  # those that users hold
        self._last: Record | None = None
        self._lock = threading.RLock()  # held briefly; a thread that has it waits for no turn
        self._torn = False  # a change of slots and pieces under `_lock` is unfinished
        self._orphaned = False  # adding a model failed: its slot belongs to no model
        self.turns: list[Turns] = []  # turns that keep models in this heap, besides the models' own
        self._numbered, self._draws = 0, 0
        if self._images.persistent:  # an orderly exit leaves nothing unsaved
            self._end = weakref.finalize(
                self, _flush_at_exit, self._records, self.store, os.getpid(), weakref.ref(self)
            )
        _users(self.store).add(self)
        _heaps[id(self)] = self

    # ------------------------------------------------------------ models
    def begin(
        self,
        program: Program,
        values: Mapping[str, Any],
        workers: int | None,
        name: str | None,
        fill: Callable[[Record], None],
    ) -> Record:
        """The record of a new model; ``fill`` sets its persistent part.  The heap lists the model only when it is complete."""
        self.check_open()
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
        record = Record(name or "new", loaded_of(program), workers or program.workers, Facts(program, values))
        try:
            with record.turn.mine:
                self._bring(record, fresh=True)
                fill(record)
                with self._lock:
                    record.name = self._new_name(name)  # another thread may have taken the name
                    record.turn.what = record.training.what = f"model {record.name!r}"
                    self._records[record.name] = record
                    return record
        except BaseException:
            self._orphaned = True
            raise

    def find(self, name: str, workers: int | None = None) -> Record:
        """The record of a model by name, also of one that is only in the store (see `calcvm.CalcHeap.open`)."""
        checks.text("a model's name", name)
        workers = None if workers is None else checks.integer("workers", workers)
        self.check_open()
        with self._lock:
            self._mend()
            if name in self._records:
                return self._records[name]
            self._check_elsewhere(name)
            if name not in self.store:
                raise CalcError(f"no model {checks.shown(name)}; there are {some(self.names)}")
            found, image = self.store.get(name)
            where = f"{self.store!r}, model {name!r}"
            program = self.store.get_program(schema.check(DIGEST, found.get("program"), f"{where}: its program"))
            facts = Facts(program, {**found, "program": program.hash}, where)
            self._check_device(program)
            loaded = loaded_of(program)
            lasting = loaded.image_bytes(bool(facts.get("open")))
            if image.nbytes != lasting:
                raise ProgramError(
                    f"{where}: an image of {image.nbytes:,} bytes for a program with {lasting:,} persistent bytes"
                )
            self._check_room(program)
            team = program.workers if workers is None else min(workers, program.workers)
            if self._reads:  # another process may rewrite the model: this copy is used until it is closed
                self._images.put(name, facts, image)
            record = Record(name, loaded, team, facts)
            record.open = open_paths(loaded, facts)
            self._records[name] = record
            return record

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
                record = self._records.get(name)
                nbytes = record.loaded.program.heap_bytes if record is not None and record.loaded is not None else None
                where = "in the heap" if record is not None and record.slot else "in the store"
                rows.append([name, where, "" if nbytes is None else f"{nbytes:,}"])
        return html(repr(self), ["model", "where it is", "bytes in the heap"], rows)

    def __contains__(self, name: object) -> bool:
        with self._lock:
            self._mend()
            return isinstance(name, str) and (name in self._records or name in self.store)

    @property
    def names(self) -> list[str]:
        """Names of all models, open or in the store."""
        with self._lock:
            self._mend()
            return sorted({*self._records, *self.store.names()})

    @property
    def free_bytes(self) -> int:
        """Free bytes (not necessarily contiguous)."""
        with self._lock:
            self._mend()
            return self._pieces.free_bytes

    def flush(self) -> None:
        """Write every changed model to the store; waits for the turn of each.

        Raises
        ------
        CalcError : some could not be written; all others were.
        """
        self._write_all()

    def close(self) -> None:
        """Write changed models, close the store (with the last of its heaps) and free the memory; models are unusable afterwards.

        Raises
        ------
        CalcError : a model is in use by a thread that waits for a model that this thread holds; or some could not be written.
            All others were written, and another `close` retries the rest.
        """
        while self._records:
            self._write_all(drop=True)
        with self._lock:
            self.closed = True
            users = _users(self.store)
            users.discard(self)
            if not users:
                self.store.close()
            if self._images.persistent:
                self._end.detach()
            self._spare.clear()
            self._memory.close()

    def check_open(self) -> None:
        """Raise a CalcError if the heap is closed."""
        if self.closed:
            raise CalcError(
                "the heap is closed: its models are in its store, if that is persistent; make another heap, or close it later"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ------------------------------------------------------------ switching
    @property
    def still(self) -> Any:
        """A lock, to be held briefly, during which no model is switched in or out."""
        return self._lock

    def enter(self, record: Record) -> Slot:
        """The slot of a model whose turn this thread has; the slot stays the model's until the turn ends.

        Brings the model into the heap.  Waits if other threads use all other slots (PlanError: this thread uses them).
        """
        if record.calls is not None and record.calls.behind():
            with self._lock:
                record.calls.look(record)
        slot = record._ready
        return slot if slot is not None and self._last is record else self._bring(record)

    def keep(self, record: Record, keeper: Turns) -> Slot | None:
        """Bring a model into the heap while this thread's turn at ``keeper`` lasts, or until `let_go`.

        Other threads that take the model's turn wait until then.  None : another thread has the turn, the model is closed, or
        there is no room.
        """
        with self._lock:
            record.ready = None  # a thread that takes its turn from now on checks here for a keeper
            if record.turn.taken or record.loaded is None:
                return None
            return self._find(record, False, keeper)

    def let_go(self, record: Record, keeper: Turns) -> None:
        """End `keep`."""
        slot = record.slot
        if slot is not None and slot.keeper is keeper:
            slot.keeper = None

    def _bring(self, record: Record, fresh: bool = False) -> Slot:
        """As `enter`, for a model that is not in the heap or was not used last."""
        slot = self._find(record, fresh)
        if slot is not None:
            return slot
        with (ticket := threading.Lock()):
            since = monotonic()
            while (slot := self._find(record, fresh)) is None:
                with self._lock:
                    for other in self._slots:  # threads that use these models repeatedly let this thread go first
                        if other.record is not None:
                            other.record.turn.after(ticket)
                if stuck(ticket, lambda: self._holders(record)):
                    needed = record.loaded.program.heap_bytes  # type: ignore[union-attr]
                    raise PlanError(
                        f"the program needs {needed:,} bytes, and the heap's {self.nbytes:,} are held by models in "
                        "use: leave one of them first, or make the heap larger",
                        needed,
                        self.free_bytes,
                    )
                sleep(min(max(FIRST_PAUSE, (monotonic() - since) / 8), LONGEST_PAUSE))
            return slot

    def _holders(self, record: Record) -> list[int]:
        """Threads of which one must go on before a model can come in, or is let go (0: none)."""
        with self._lock:
            if record.slot is not None:
                keeper = record.slot.keeper
                return [0 if keeper is None else owner(keeper.lock)]
            return [
                (0 if slot.keeper is None else owner(slot.keeper.lock))
                or (0 if slot.record is None else owner(slot.record.turn.lock))
                for slot in self._slots
            ] or [0]

    def _find(self, record: Record, fresh: bool, keeper: Turns | None = None) -> Slot | None:
        """A model's slot, after bringing the model in; None if other threads use all slots, or this one.

        The slot is either ready for the thread with the model's turn, or kept by ``keeper``, and never both.
        """
        with self._lock:
            self._mend()
            if record.loaded is None:
                raise record.closed()
            if record.lost:
                raise CalcError(
                    f"model {record.name!r} was in use by another thread when this process was forked, so it is in an "
                    "undefined state here: load it again, or fork while no thread uses it"
                )
            slot = record.slot
            if slot is None:
                slot = self._switch_in(record, record.loaded, fresh)
            elif slot.keeper is not None and slot.keeper.taken:
                return None
            if slot is not None:
                self._slots.move_to_end(slot)
                self._last = record
                if keeper is None:
                    record.ready = slot
                else:
                    slot.keeper = keeper
            return slot

    def _switch_in(self, record: Record, loaded: Loaded, fresh: bool) -> Slot | None:
        """Bring a model into a slot; None if all slots are in use."""
        stats, started = self.stats, perf_counter()
        self._torn = True
        slot = self._room(loaded)
        if slot is not None:
            if fresh:
                slot.clear()
            else:
                stats.bytes += slot.restore(self._images, record.name, bool(record.open))
                stats.switches += 1
            record.exposed = False
            record.graded.clear()
            record.forget()
            slot.record, record.slot = record, slot
            stats.seconds += perf_counter() - started
        self._torn = False
        return slot

    def _room(self, loaded: Loaded) -> Slot | None:
        """An empty slot for a program; evicts models if necessary."""
        while True:
            piece = self._pieces.take(loaded.program.heap_bytes)
            if piece is not None:
                slot = self._spare.pop((loaded, piece[0]), None) or self._memory.slot(loaded, *piece)
                self._slots[slot] = None
                slot.clear_padding()  # another program's model may have used it
                return slot
            while (oldest := next(iter(self._slots), None)) is not None and _used_since(oldest):
                self._slots.move_to_end(oldest)
            victim = self._victim()
            if victim is None:
                return None
            if victim.loaded is loaded:
                self._slots.move_to_end(victim)
                return victim
            self._free(victim)

    def _victim(self) -> Slot | None:
        """A slot, now empty, from among the less recently used ones that are not in use; None: there is none.

        The slot is drawn from the least recently used quarter.  With strict LRU, a cycle through one model more than fits would
        switch in every model each time around.  A model that cannot be written stays in place (CalcError: there is no other).
        """
        failed: CalcError | None = None
        last = min(len(self._slots) // 4, MOST_DRAWN)
        if last > 1:
            self._draws = (self._draws * 6364136223846793005 + 1442695040888963407) % 2**64
            drawn = next(islice(self._slots, (self._draws >> 33) % last, None))
            self._slots.move_to_end(drawn, last=_used_since(drawn))
        for slot in self._slots:
            if self._is_free(slot):
                try:
                    self._commit_to_leave(slot)
                except CalcError as error:
                    failed = failed or error
                else:
                    return slot
        if failed is not None:
            raise failed
        return None

    def _commit_to_leave(self, slot: Slot) -> None:
        """Copy a slot's model out, if it may have changed; the slot is empty then."""
        record = slot.record
        if record is not None:
            self._commit(record)
            slot.record = record.slot = None

    def _is_free(self, slot: Slot) -> bool:
        """Whether no thread uses the model in a slot, nor can start to without coming here first."""
        record, keeper = slot.record, slot.keeper
        if record is None:
            return True
        record.ready = None  # before looking: a thread that takes the turn later finds it not ready
        return unlocked(record.turn.lock) and (keeper is None or unlocked(keeper.lock))

    def _free(self, slot: Slot) -> None:
        del self._slots[slot]
        self._pieces.give(slot.start, slot.stop)
        slot.keeper = None
        if slot.loaded.program.page_bytes:  # its page file goes with it
            return
        if len(self._spare) >= SPARE_SLOTS:
            del self._spare[next(iter(self._spare))]
        self._spare[slot.loaded, slot.start] = slot

    def _mend(self) -> None:
        """Repair the state after an exception in the middle of a change.

        A slot's record is the truth: it is set when the model is in the slot, and unset when the store has the model.
        """
        if not (self._torn or self._orphaned):
            return
        self._torn, self._orphaned = True, False
        for slot in [*self._slots]:
            record = slot.record
            if record is None or not (self._has(record) or owner(record.turn.lock)):
                del self._slots[slot]
        for record in [*self._records.values()]:
            record.slot = record.ready = None
        for slot in self._slots:
            slot.record.slot = slot  # type: ignore[union-attr]
        self._pieces = Pieces(self.nbytes)
        self._pieces.leave([(slot.start, slot.stop) for slot in self._slots])
        self._torn = False
        for record in [*self._records.values()]:
            if record.loaded is None:
                self._drop(record)

    def commit_record(self, record: Record) -> None:
        """Write a model to the store now, if it has changed and the store is persistent."""
        if self._images.persistent:
            self._write(record)

    def write_kept(self, record: Record) -> None:
        """As `commit_record`, for a model that this thread keeps: the thread with its turn waits for that to end."""
        if self._images.persistent:
            with self._lock:
                self._mend()
                self._commit(record)

    def _write(self, record: Record, drop: bool = False) -> None:
        """Copy a model to the store, if it may have changed; ``drop`` : forget it.  A closed model was already written."""
        with record.turn.mine:
            self._reach(record)
            with self._lock:
                self._mend()
                if self._has(record):
                    self._commit(record)
                    if drop:
                        self._drop(record)

    def _write_all(self, drop: bool = False) -> None:
        """`_write` all models; a failure with one does not stop the others."""
        records = [*self._records.values()]
        _each(records, lambda record: self._write(record, drop))

    def _reach(self, record: Record) -> None:
        """Wait until no other thread keeps a model whose turn this thread has."""
        with self._lock:
            slot = record.slot
            kept = slot is not None and slot.keeper is not None and slot.keeper.taken
        if kept:
            self.enter(record)

    def opened(self, name: str) -> bool:
        """Whether a model of this name is open; other heaps call this while they hold their locks."""
        record = self._records.get(name)
        return record is not None and record.loaded is not None

    def _elsewhere(self, name: str) -> bool:
        """Whether another heap with this store, if it is writable, has a model of this name open."""
        return not self._reads and any(other.opened(name) for other in [*_users(self.store)] if other is not self)

    def _check_elsewhere(self, name: str) -> None:
        if self._elsewhere(name):
            raise CalcError(
                f"another heap of this store has a model {name!r} open: close it there, or give each heap its own store"
            )

    def _has(self, record: Record) -> bool:
        return self._records.get(record.name) is record

    def _commit(self, record: Record) -> None:
        """Copy a model to the store of images, if it may have changed; the caller has its turn."""
        if record.unsaved and not record.lost:
            self.stats.bytes += put(record, record.slot, self._images)

    def remove_record(self, record: Record) -> None:
        """Free a model's room, once no other thread trains it."""
        if record.turn.lock._is_owned():  # type: ignore[attr-defined]
            raise CalcError(f"model {record.name!r} is in use here: it cannot be closed now")
        with record.turn.mine:
            self._reach(record)
            with self._lock:
                self._mend()
                if not self._has(record):
                    return
                if self._images.persistent:
                    self._commit(record)
                self._drop(record)

    def _drop(self, record: Record) -> None:
        """Forget a model; `_mend` finishes this after an exception."""
        self._torn = True
        record.loaded = record.ready = None
        slot = record.slot
        if slot is not None:
            slot.record = record.slot = None
            self._free(slot)
        if self._last is record:
            self._last = None
        if not self._images.persistent:
            self._images.remove(record.name)
        del self._records[record.name]
        self._torn = False

    def _after_fork(self) -> None:
        """Reset in a forked child: other threads are gone, and their work is unfinished."""
        self._lock, self._torn = threading.RLock(), True
        for record in self._records.values():
            if record.calls is not None:
                record.calls.disarm()  # it reads locks that no longer exist
        keepers = {keeper for slot in self._slots if (keeper := slot.keeper) is not None and keeper.renew()}
        for slot in self._slots:
            if slot.record is not None and (slot.record.turn.taken or slot.keeper in keepers):
                slot.record.lost, slot.record.ready = True, None
        for record in self._records.values():
            record.training.renew()
            record.turn.renew()
            record.entering = []
        for turns in self.turns:
            turns.renew()
        for slot in self._slots:
            slot.renew_pages()

    # ------------------------------------------------------------ names
    def free_name(self, name: str | None = None) -> str:
        """An unused name: ``name`` (CalcError: it is in use), or a numbered one that is not given out again."""
        with self._lock:
            free = self._new_name(name)
            self._numbered += name is None
            return free

    def _new_name(self, name: str | None) -> str:
        if name is None:
            while (number := f"model-{self._numbered}") in self or self._elsewhere(number):
                self._numbered += 1
            return number
        if not isinstance(name, str) or not name:
            raise CalcError(f"a model's name is a non-empty text, not {checks.shown(name)}")
        if name in self._records:
            raise CalcError(f"the heap has a model {name!r}: names differ; take heap[{name!r}] or another name")
        if name in self.store:
            raise CalcError(
                f"the store has a model {name!r}: continue with heap.open({name!r}), or remove it with store.remove"
            )
        self._check_elsewhere(name)
        return name


def open_paths(loaded: Loaded, facts: Mapping[str, Any]) -> set[str]:
    """Paths whose gradients an image with these facts may hold."""
    return {*loaded.accumulating} if facts.get("open") else set()


def _used_since(slot: Slot) -> bool:
    """Whether compiled methods have used a slot's model since the last query."""
    return slot.record is not None and slot.record.calls is not None and slot.record.calls.used()


def put(record: Record, slot: Slot | None, store: Store) -> int:
    """Copy a model's image to the store, or only its facts if it is in no slot; returns the bytes copied."""
    facts = record.facts
    if record.open:
        facts["open"] = True
    elif "open" in facts:
        del facts["open"]
    try:
        record.changed = facts.changed = False  # first: later changes by other threads may be missing from the copy
        if slot is not None:
            return slot.keep(store, record.name, facts, bool(record.open))
        image = store.get(record.name)[1]
        store.put(record.name, facts, image)
        return image.nbytes
    except BaseException:
        record.changed = facts.changed = True
        raise


def _flush_at_exit(records: dict[str, Record], store: Store, pid: int, heap: weakref.ref[Heap]) -> None:
    if os.getpid() == pid:  # not a forked child

        def write(record: Record) -> None:
            slot = record.slot
            if record.turn.taken or (slot is not None and slot.keeper is not None and slot.keeper.taken):
                return  # another thread is changing it: the last written version stays
            if record.unsaved:
                put(record, slot, store)

        try:
            _each([*records.values()], write)
        finally:
            if not {*_users(store)} - {heap()}:
                store.close()


def _users(store: Store) -> weakref.WeakSet[Heap]:
    """The open heaps of a store; empty for a third-party store, which does not list them."""
    return getattr(store, "users", weakref.WeakSet())


def _each(records: Sequence[Record], write: Callable[[Record], None]) -> None:
    """Write each model, whatever happens to others (CalcError: some could not be written)."""
    failed: dict[str, CalcError] = {}
    for record in records:
        try:
            write(record)
        except CalcError as error:
            failed[record.name] = error
    if failed:
        first = next(iter(failed.values()))
        if len(failed) == 1:
            raise first
        raise CalcError(
            f"{len(failed)} of {len(records)} models could not be written: {some([*failed])}; the first error: {first}"
        )


# by id: another thread may change the size of a WeakSet during iteration
_heaps: weakref.WeakValueDictionary[int, Heap] = weakref.WeakValueDictionary()
_waits: list[tuple[int, int]] = []  # pipes for forks: the parent waits until its child has its own page files


def _living() -> list[Heap]:
    return [heap for ref in _heaps.valuerefs() if (heap := ref()) is not None]


def _before_fork() -> None:
    if any(slot.pages is not None for heap in _living() for slot in [*heap._slots]):
        _waits.append(os.pipe())


def _after_fork_in_parent() -> None:
    if _waits:
        mine, childs = _waits.pop()
        os.close(childs)
        with suppress(OSError):
            os.read(mine, 1)  # end of file: the child has closed its end
        os.close(mine)


def _after_fork() -> None:
    try:
        for heap in _living():
            heap._after_fork()
    finally:
        while _waits:
            for end in _waits.pop():
                os.close(end)


at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork)
