"""The record of a model in a heap; it exists whether or not the user holds a handle.

Fields that are hard to guess:

======== ==================================================================================================
keeper   of its slot: the turns (a fleet's training) whose owner keeps the model in the slot
held     placeholders that hold data, with the batch size of these data
ran      (path, phase) pairs whose results are in the heap, with the batch size they ran at
exposed  the user has views of its memory, so that it may change at any time
open     paths in the middle of a gradient accumulation; their gradients belong to the image
passing  the paths among these that a pass over data trains; the end of the pass drops their leftovers
graded   paths whose gradients are in the slot
arena    the path whose activations are in the piece; only its backward can run
ready    the slot, if the model may be used without the heap's lock; None as soon as another may take the slot
lost     another thread was in the middle of a call at a fork: the model cannot be used in the child
changed  the model has changed since the store's copy
======== ==================================================================================================

Model and record are two objects, because a heap has a record per model, a million if need be, and a `Model` exists only while
the user holds it.  A model holds its heap; if the heap held the model too, neither would be freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from threading import get_ident
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from calcvm.errors import CalcError
from calcvm.vm.memory.turns import FIRST_PAUSE, Turns, owner

if TYPE_CHECKING:
    from calcvm.vm.memory.slot import Slot
    from calcvm.vm.program.facts import Facts
    from calcvm.vm.run.loaded import Loaded

ENTRY_SECONDS = 0.1  # time a thread that was let in needs to take a free lock


class Record:
    """The record of a model: where it is, what its piece holds beside the image, whose turn it is.

    To use the model's memory or to change the record, take ``turn``.  To change the model, take ``change`` first.
    A sequence of rounds, such as those of `Model.fit`, keeps ``change`` from start to end, and releases the turn in between
    for threads that only read.
    """

    __slots__ = (
        "name", "loaded", "workers", "facts", "slot", "_ready", "calls", "turn", "entering", "training", "trains",
        "lost", "changed", "exposed", "open", "passing", "graded", "held", "ran", "arena",
    )  # fmt: skip

    def __init__(self, name: str, loaded: Loaded | None, workers: int, facts: Facts):
        self.name, self.loaded, self.workers, self.facts = name, loaded, workers, facts
        self.slot: Slot | None = None
        self.calls: Any = None  # the `CallLog` of its compiled methods
        self._ready: Slot | None = None
        self.turn, self.training = Turns(f"model {name!r}"), Turns(f"model {name!r}")
        self.entering: list[weakref.ref[Any]] = []  # pending ``__enter__`` calls, each until it has the turn
        self.trains = 0  # the thread in the middle of a training that takes several turns
        self.lost = False
        self.changed = False
        self.exposed = False
        self.open: set[str] = set()
        self.passing: tuple[str, ...] = ()
        self.graded: set[str] = set()
        self.held: dict[str, int] = {}
        self.ran: dict[tuple[str, str], int] = {}
        self.arena: str | None = None

    def closed(self) -> CalcError:
        """The error of a call after the model's end."""
        return CalcError(
            f"model {self.name!r} is closed: load it from its file, open it from its store, or make another"
        )

    @property
    def ready(self) -> Slot | None:
        """Its slot, unless a thread is about to take that."""
        return self._ready

    @ready.setter
    def ready(self, slot: Slot | None) -> None:
        """Set it; the caller has the heap's lock."""
        if self.calls is not None:
            if slot is None:
                self.calls.disarm()
            self.calls.look(self)
        self._ready = slot

    @property
    def unsaved(self) -> bool:
        """Whether it may differ from the store's copy."""
        if self.calls is not None:
            self.calls.look(self)
        return self.changed or self.exposed or self.facts.changed

    @property
    def change(self) -> Any:
        """The lock to take before ``turn`` in order to change the model, so that only whole changes follow each other.

        CalcError : another thread is in the middle of training, and waits for the turn that this thread has.
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
        """``__enter__`` of its turn's lock, for a block that may change the model; no training begins before it is called."""
        if self.turn.lock._is_owned():  # type: ignore[attr-defined]
            return self.turn.lock.__enter__
        with self.change:
            enter = partial(self.turn.mine.__enter__)
            self.entering = [*(ref for ref in self.entering if ref() is not None), weakref.ref(enter)]
            return enter

    def begin_training(self) -> None:
        """Admit the threads that had ``change`` before this one and still lack their turn.

        A thread that fetched ``__enter__`` but does not call it is not waited for: a caller takes a free lock at once.
        """
        self.trains, since = 0, monotonic()
        if self.turn.lock._is_owned():  # type: ignore[attr-defined]
            return  # no thread comes in before its end
        while any(ref() is not None for ref in self.entering) and monotonic() - since < ENTRY_SECONDS:
            with self.turn.mine:
                pass
            if self.turn.taken:
                since = monotonic()
            sleep(FIRST_PAUSE)
        self.entering = []

    def forget(self) -> None:
        """Forget its placeholders and results."""
        self.held.clear()
        self.ran.clear()
        self.arena = None

    def unset(self, name: str) -> None:
        """Note that a placeholder's data are gone, or about to be."""
        self.held.pop(name, None)
        if self.arena is not None and self.loaded is not None and name in self.loaded.needs(self.arena):
            self.arena = None  # backward would read other data than forward did

    def unmake(self, path: str, phases: tuple[str, ...]) -> None:
        """Note that the results of a path's phases, forward or loss, are gone, or about to be."""
        self.ran.pop((path, "loss"), None)  # it may belong to an earlier forward
        if "forward" in phases:
            self.ran.pop((path, "forward"), None)
        self.arena = None
