"""What a heap knows of a model, whether a handle of it is held or none."""

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
    from calcvm.vm.memory.methods import Calls
    from calcvm.vm.memory.slot import Slot
    from calcvm.vm.program.facts import Facts
    from calcvm.vm.run.loaded import Loaded

ENTRY_SECONDS = 0.1  # in which a thread that is let in takes a lock that is free


class Record:
    """What a heap knows of a model: where it is, what its piece holds beside its image, whose turn it is.

    Whoever uses its memory or changes what is noted here has its ``turn``.  What changes the model itself has
    ``change`` before that: several rounds that belong together, such as those of `Model.fit`, keep it from the first
    to the last, and give the turn up in between, to those that only look.
    """

    __slots__ = (
        "name", "loaded", "workers", "facts", "slot", "_ready", "calls", "turn", "entering", "training", "trains",
        "lost", "changed", "exposed", "open", "passing", "graded", "held", "ran", "arena",
    )  # fmt: skip

    def __init__(self, name: str, loaded: Loaded | None, workers: int, facts: Facts):
        self.name, self.loaded, self.workers, self.facts = name, loaded, workers, facts
        self.slot: Slot | None = None
        self.calls: Calls | None = None  # what its compiled methods know
        self._ready: Slot | None = None
        self.turn, self.training = Turns(f"model {name!r}"), Turns(f"model {name!r}")
        self.entering: list[weakref.ref[Any]] = []  # ``__enter__`` of those that come, each until it has the turn
        self.trains = 0  # the thread that is in the middle of a training of several turns
        self.lost = False  # a fork came in the middle of another thread's call
        self.changed = False  # since the store has its image
        self.exposed = False  # views of its memory were given out: it may change at any time
        self.open: set[str] = set()  # paths in the middle of an accumulation: gradients are part of the image
        self.passing: str | None = None  # of these, one that a pass over data trains, which is settled at its end
        self.graded: set[str] = set()  # paths whose gradients its slot holds
        self.held: dict[str, int] = {}  # placeholders that hold data: the batch it has
        self.ran: dict[tuple[str, str], int] = {}  # paths and phases that were run: the batch
        self.arena: str | None = None  # the path whose transient values the piece holds

    @property
    def ready(self) -> Slot | None:
        """Its slot, as long as nobody means to take it."""
        return self._ready

    @ready.setter
    def ready(self, slot: Slot | None) -> None:
        """Under the heap's lock."""
        if self.calls is not None:
            if slot is None:
                self.calls.disarm()
            self.calls.look(self)
        self._ready = slot

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
        if self.arena is not None and self.loaded is not None and name in self.loaded.needs(self.arena):
            self.arena = None  # a backward would read other data than the forward did

    def unmake(self, path: str, phases: tuple[str, ...]) -> None:
        """What phases of a path compute, forward or its loss, is gone, or about to be."""
        self.ran.pop((path, "loss"), None)  # perhaps of an earlier forward
        if "forward" in phases:
            self.ran.pop((path, "forward"), None)
        self.arena = None
