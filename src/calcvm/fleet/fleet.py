"""`Fleet`: many models, of one shape or of many, trained at once in one heap."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import get_ident
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import numpy as np

from calcvm import checks
from calcvm.errors import CalcError, PlanError, Uncopied, within
from calcvm.fleet.handle import Handle
from calcvm.fleet.results import Results
from calcvm.model import Model
from calcvm.model.adapting import adapt_new
from calcvm.model.data import arrays_of
from calcvm.model.roles import figures
from calcvm.progress import Count
from calcvm.tables import preformatted, some
from calcvm.vm.memory.epoch import Epoch
from calcvm.vm.memory.heap import CalcHeap, check_program, parse_bytes
from calcvm.vm.memory.resident import Resident
from calcvm.vm.memory.slot import Slot
from calcvm.vm.memory.store import Store, checkpoint_epochs
from calcvm.vm.memory.turns import Turns, anyone_waits
from calcvm.vm.program.documents import MAX_BLOCKS, MAX_WORKERS
from calcvm.vm.program.encoding import aligned
from calcvm.vm.program.program import Program
from calcvm.vm.run import job as layout
from calcvm.vm.run.device import DEVICES
from calcvm.vm.run.feeds import readable
from calcvm.vm.run.loaded import Loaded
from calcvm.vm.run.signals import orderly_end
from calcvm.vm.run.slices import SLICE_SECONDS

FIRST_SLOTS = 64  # of the table of tasks
FIRST_ROUNDS = 8  # of a turn, before anything was measured
TURNS = 16  # a worker's share of turns in a slice, at least: what one waits for another at its end


@dataclass(frozen=True, eq=False)
class Converted:
    """An array that compiled code cannot read where it is, and one that it can.

    Models that read it keep it; while one does, ``given`` lives, and its id is no other object's.
    """

    given: Any
    array: np.ndarray


class Fleet(Uncopied):
    """Many models trained at once: each by one worker at a time, none waiting for another.

    Workers take the next model from a queue, train it for some rounds on its own slice of the heap, and go on,
    in compiled code.  Models of one program share its rows, different ones run side by side.  A model ends with
    the same bits as by `Model.fit` alone, for any number of workers and any order.

    Parameters
    ----------
    memory : int or str
        Bytes of the heap, or a text such as ``"1 GiB"``.
    workers : int, optional
        Default: as many as the device runs at once, such as the machine's cores.
    store : MemoryStore or FileStore, optional
        Where models are while others take their room, if they do not all fit at once.  In a `FileStore` each is
        also kept after every epoch, so that a process that is killed loses at most the epoch in flight (see `fit`).
    device : str
        What the models' programs are compiled for.

    Examples
    --------
    >>> fleet = cv.Fleet(memory="64 MiB")
    >>> handles = [fleet.add(program, data=(X, y), seed=s) for s in range(1000)]
    >>> print(fleet.fit(epochs=30))
    """

    _instead = "its models are, handle.model; save them, or hand their programs over and make another fleet"

    def __init__(self, memory: int | str, workers: int | None = None, store: Store | None = None, device: str = "cpu"):
        if workers is not None:
            most = MAX_WORKERS if checks.choice("device", device, DEVICES) != "cuda" else MAX_BLOCKS
            workers = checks.integer("workers", workers, 1, most)
        self.heap = CalcHeap(memory, store, device)
        self.workers = workers or self.heap.device.n_workers
        self.handles: dict[str, Handle] = {}
        self._converted: WeakValueDictionary[tuple[int, str], Converted] = (
            WeakValueDictionary()
        )  # by id and wanted type
        self._tasks, self._address = np.zeros((0, layout.TASK_WORDS), np.int64), 0
        self._free_places: list[int] = []
        self._per_round = 0.0  # seconds of the team, as last measured
        self.stops = False  # a model was stopped since the last slice
        self._adding: dict[int, str] = {}  # by thread: the model that it adds
        self._training, self.turn = Turns("the fleet"), Turns("the fleet")  # whole trainings; slices, and the rest
        self.heap.turns += [self._training, self.turn]

    def __len__(self) -> int:
        return len(self.handles)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Write what has changed, close the store and give the memory back (`CalcHeap.close`); `results` can still be read."""
        self.heap.close()

    def __repr__(self) -> str:
        return f"<fleet of {len(self)} models, {self.free_bytes:,} of {self.heap.nbytes:,} bytes free>"

    def _repr_html_(self) -> str:
        return f"{preformatted(repr(self))}{self.results._repr_html_()}"

    @property
    def free_bytes(self) -> int:
        """Bytes of the heap that no model takes now."""
        return self.heap.free_bytes

    @property
    def results(self) -> Results:
        """A row for each model, as it is when it is looked at."""
        return Results(self.handles)

    # ------------------------------------------------------------ models
    def add(
        self,
        program: Program | str,
        *,
        data: tuple[Any, ...] | Mapping[str, Any],
        samples: Any = None,
        validation: Any = None,
        seed: int = 0,
        hyper: Mapping[str, float] | None = None,
        name: str | None = None,
        epochs: int | None = None,
        patience: int | None = None,
        keep_best: bool = False,
        learning_batch: int | None = None,
        shuffle: bool = True,
        memory: int | str | None = None,
        check_finite: bool = False,
    ) -> Handle:
        """A new model, or by its name one that the store kept.

        Parameters
        ----------
        program : Program or str
            Of any graph with a path that trains.
        data : arrays for the placeholders of that path, in the order they were declared, or by name
            Read where they are; many models may share them.  What must be converted (lists, DataFrames, float16, another
            byte order, ...) is read as it is now: it is converted at each call, and kept once where it has not changed.
        samples : slice or ndarray of int, shape (n,), optional
            The samples of ``data`` to train on (default: all).  An `nn.Standardize` that has seen no data learns from these.
        validation : tuple or mapping of arrays, or slice or numbers of samples of ``data``, optional
            What to judge it by after each epoch.
        seed : int
        hyper : mapping, optional
            Hyperparameters that differ from the program's, by name: ``{"learning_rate": 1e-3}``.
        epochs : int, optional
            Its own number of epochs in each `fit`.
        patience : int, optional
            Stop when the validation loss has not fallen for so many epochs, of one `fit` or of several: for good, as the last of
            them left the model.  A fleet to which a model of a store is added knows nothing of its epochs there.
        keep_best : bool
            A `fit` that comes to its end, or what ends the model's training for good, gives it back the state after its epoch of the
            smallest validation loss, of this `fit` or an earlier one: parameters, the optimizer's state, step counters
            (`handle.kept` names the epoch).  It is kept beside the heap, in as many bytes as a `MemoryStore` takes for the model; of
            a process that is killed, not at all.
        learning_batch : int, optional
            Samples an update is made from, where that is more than the program's batch; the program must add gradients
            up (``accumulate=True``).
        memory : int or str, optional
            Quota: refuse a program that takes more bytes.

        Raises
        ------
        PlanError : the program is larger than its quota or the heap (``needed`` and ``allowed`` bytes).
        CalcError : data, name or hyperparameters do not fit; nothing has been added then.
        """
        if epochs is not None:
            epochs = checks.integer("epochs", epochs)
        if patience is not None:
            patience = checks.integer("patience", patience, 0)
        if learning_batch is not None:
            learning_batch = checks.integer("learning_batch", learning_batch)
        if hyper is not None:
            checks.one_of("hyper", hyper, Mapping, 'a mapping such as {"learning_rate": 1e-3}')
        shuffle, check_finite = checks.flag("shuffle", shuffle), checks.flag("check_finite", check_finite)
        watched = "keep_best" if checks.flag("keep_best", keep_best) else "patience" if patience is not None else ""
        left = self._adding.pop(get_ident(), None)
        if left is not None and left not in self.handles and left in self.heap:
            # an exception came when the heap had it, and the fleet had not
            self._give_up(self.heap.open(left), fresh=True)
        if isinstance(program, str):
            if program in self.handles:
                self._refuse_second(program)
            resident = self.heap.open(program)
        else:
            check_program(program)
            self._quota(program, memory, name)
            name = self.heap.free_name(name)
            self._adding[get_ident()] = name
            try:
                resident = self.heap.load(program, seed=seed, workers=1, name=name)
            except Exception:  # what the heap has by this name is another thread's
                del self._adding[get_ident()]
                raise
        with resident.record.change:  # of threads that add the same model of the store, one is the first
            if resident.name in self.handles:
                self._refuse_second(resident.name)
            try:
                self._quota(resident.program, memory, resident.name)
                if learning_batch is not None:
                    resident.facts["learning_batch"] = learning_batch
                sources: list[Converted] = []
                train, judge = self._runs(resident, data, samples, validation, check_finite, sources)
                if watched and judge is None:
                    raise CalcError(f"{watched} needs validation data: give validation=")
                if watched and "loss" not in figures(resident.loaded).values():
                    raise CalcError(
                        f"{watched} watches the loss of path 'predict', which has none: name a result of it 'predict.loss'"
                    )
                if keep_best and resident.loaded.paged != (0, 0):
                    raise CalcError(
                        "keep_best: the program keeps parameters in a file of pages: compile it without page_bytes"
                    )
                for name, value in (hyper or {}).items():
                    resident.hyper(train.trains)[name] = value
                job = train.job
                job[[layout.ROUNDS, layout.EPOCH, layout.SEED]] = train.rounds, resident.facts["rounds"], resident.seed
                job[[layout.SHUFFLE, layout.PATIENCE]] = shuffle, -1 if patience is None else patience
                job[layout.BEST] = np.array(np.inf).view(np.int64)
                if judge is not None:
                    judge.job[layout.ROUNDS] = judge.rounds
                with self.turn.mine:
                    handle = Handle(self, resident, train, judge, epochs, sources, keep_best)
                    self.handles[resident.name] = handle
                    self._adding.pop(get_ident(), None)
                    return handle
            except BaseException:
                if resident.name not in self.handles:
                    self._give_up(resident, fresh=not isinstance(program, str))
                raise

    def step(self, name: str, x: Any, y: Any = None, *more: Any) -> float:
        """One training step of one model on a batch; returns its loss (see `Model.step`)."""
        return self._model(name).step(*arrays_of(x, y, more))

    def predict(self, name: str, X: Any, *, out: Any = None) -> Any:
        """Outputs of one model for a data set (see `Model.predict`)."""
        model = self._model(name)
        return model.predict(X) if out is None else model.predict(X, out=out)

    def _model(self, name: str) -> Model:
        try:
            return self.handles[name].model
        except (KeyError, TypeError):
            raise CalcError(f"the fleet has no model {checks.shown(name)}; it has {some([*self.handles])}") from None

    def _runs(
        self, resident: Resident, data: Any, samples: Any, validation: Any, check_finite: bool, sources: list[Converted]
    ) -> tuple[Epoch, Epoch | None]:
        """A model's training on its data, and what judges it; ``sources`` keep what was converted for them."""
        loaded = resident.loaded
        path = loaded.path(None)
        loss = loaded.training(path)["loss"]
        if loss is None:
            raise CalcError(f"path {path!r} has no loss to follow")
        names = loaded.feeds(path)
        arrays = self._named(resident, names, _arrays("data", data, names), sources)
        train = Epoch(
            resident, arrays, path, samples=samples, train=True, learning=resident.facts.get("learning_batch"),
            results=[loss], of_totals=True, check_finite=check_finite,
        )  # fmt: skip
        with within(f"model {resident.name!r}"):
            adapt_new(resident, arrays, samples)
        if validation is None:
            return train, None
        if "predict" not in loaded.paths:
            raise CalcError(
                "validation: models are judged by a path called 'predict', and the program's paths are "
                f"{', '.join(loaded.paths)}: build one in the graph, as cv.build_graph does"
            )
        with within("validation"):
            own = isinstance(validation, (tuple, Mapping))
            if own:
                names = loaded.feeds("predict")
                arrays = self._named(resident, names, _arrays("validation", validation, names), sources)
            judge = Epoch(
                resident, arrays, "predict", samples=None if own else validation, check_finite=check_finite,
                results=sorted(figures(loaded), key=lambda name: figures(loaded)[name] != "loss"),  # which patience watches
            )  # fmt: skip
        for name, array in judge.held.items():
            if not np.array_equal(array, train.held.get(name, array), equal_nan=True) or name not in train.held:
                raise CalcError(
                    f"validation: {name!r} has no samples, and is the same for training and validation: give it in both"
                )
        return train, judge

    @staticmethod
    def _refuse_second(name: str) -> NoReturn:
        raise CalcError(f"the fleet has a model {name!r}: fleet.handles[{name!r}]")

    def _give_up(self, resident: Resident, fresh: bool) -> None:
        """Close a model that is not added; of a new one nothing stays in the store."""
        resident.close()
        if fresh:
            self.heap.store.remove(resident.name)

    def _quota(self, program: Program, memory: int | str | None, name: str | None) -> None:
        allowed = None if memory is None else parse_bytes(memory)
        if allowed is not None and program.heap_bytes > allowed:
            raise PlanError(
                f"model {name or 'new'}: needs {program.heap_bytes:,} bytes, its quota is {allowed:,}: raise memory=, "
                "or compile with a smaller batch",
                program.heap_bytes,
                allowed,
            )

    def _named(
        self, resident: Resident, names: Sequence[str], data: Any, sources: list[Converted]
    ) -> dict[str, np.ndarray]:
        """Arrays by placeholder, as compiled code can read them.

        What is converted is kept once for all models that read the same of it; ``sources`` keep it.
        """
        if not isinstance(data, Mapping):
            if len(data) != len(names):
                raise CalcError(f"data: {len(names)} arrays are wanted ({', '.join(names)}), not {len(data)}")
            data = dict(zip(names, data))
        elif {*data} != {*names}:
            raise CalcError(f"data for {', '.join(map(repr, data))}; wanted are {', '.join(names)}")
        out = {}
        for name, given in data.items():
            own = resident.loaded.own_types.get(name, "")
            array = readable(name, given, dtype=own)
            if array is given:
                out[name] = array
                continue
            source = self._converted.get((id(given), own))
            if source is None or not _equal(source.array, array):  # it has changed since
                source = self._converted[id(given), own] = Converted(given, array)
            sources.append(source)
            out[name] = source.array
        return out

    def _take_place(self, words: np.ndarray, judges: int | None = None) -> int:
        """A place in the table of tasks, holding ``words``; of the judge of the task in the place ``judges``."""
        if not self._free_places:  # but for what an exception has left in the middle of `add` and `Handle.close`
            used = {judges, *(place for h in self.handles.values() for place in (h._place, h._judge_place))}
            self._free_places = [place for place in range(len(self._tasks)) if place not in used]
        if not self._free_places:
            n, more = len(self._tasks), max(FIRST_SLOTS, 2 * len(self._tasks))
            table = aligned(8 * layout.TASK_WORDS * more).view(np.int64).reshape(more, layout.TASK_WORDS)
            table[:n] = self._tasks
            judge = table[:n, layout.JUDGE]
            address = table.ctypes.data
            judge[judge != 0] += address - self._address
            self._tasks, self._address, self._free_places = table, address, list(range(more - 1, n - 1, -1))
        place = self._free_places.pop()
        self._tasks[place] = words
        if judges is not None:
            self._tasks[judges, layout.JUDGE] = self._address + place * self._tasks.strides[0]
        return place

    def _forget(self, handle: Handle) -> None:
        with self.turn.mine:
            if handle._place >= 0:
                handle._train.job[:] = self._tasks[handle._place]  # its figures can still be read
                places = [place for place in (handle._place, handle._judge_place) if place >= 0]
                handle._place = handle._judge_place = -1
                self._free_places += places
            if self.handles.get(handle.name) is handle:
                del self.handles[handle.name]

    # ------------------------------------------------------------ training
    def fit(self, epochs: int = 1, *, progress: bool = True, checkpoint: int | str = 1) -> Results:
        """Train every model for whole epochs (its own number, where `add` gave one).

        Parameters
        ----------
        checkpoint : int or "end"
            Epochs after which a model is written to the fleet's `FileStore`: a process that is killed loses at most these.
            "end": it is written when its training ends, and where others take its room.

        Returns
        -------
        Results : a row for each model.  Ctrl-C and SIGTERM end training between two rounds of every model, with
            the store in order; ``results.stopped`` says so.  Other threads may look at the models meanwhile, each
            between two slices; another `fit` or `advance` waits for the end.
        """
        epochs, checkpoint = checks.integer("epochs", epochs), checkpoint_epochs(checkpoint)
        progress = checks.flag("progress", progress)
        self.heap.check_open()
        with self._training.mine:
            return self._fit(epochs, progress, checkpoint)

    def _fit(self, epochs: int, progress: bool, checkpoint: int) -> Results:
        with self.turn.mine:
            handles = [h for h in self.handles.values() if h.open]
            goals = self._goals(handles, [h.epochs or epochs for h in handles])
            places = np.array([h._place for h in handles], np.int64)
        start = int(self._tasks[places, layout.EPOCH].sum())
        report = Count(sum(goals.values()) - start, progress)
        stopped = ""
        try:
            with orderly_end() as check:
                for _ in self._passes(goals, checkpoint, whole=True):
                    report.step(int(self._tasks[places, layout.EPOCH].sum()) - start, lambda: _mean_loss(goals))
                    check()
        except KeyboardInterrupt:
            stopped = "interrupted"
        finally:
            report.close()
        return Results(self.handles, stopped)

    def advance(self, epochs: int | Mapping[Handle, int] = 1, *, checkpoint: int | str = 1) -> list[Handle]:
        """Train all models that can be trained for ``epochs`` more, or each by a number of its own.

        Returns
        -------
        list of Handle : those that were trained, in the order they were added.
        """
        checkpoint = checkpoint_epochs(checkpoint)
        self.heap.check_open()
        if isinstance(epochs, Mapping):
            wanted = {
                checks.one_of("advance", h, Handle, "a handle of the fleet"): checks.integer(f"epochs of {h}", n, 0)
                for h, n in epochs.items()
            }
            if foreign := next((h for h in wanted if h._fleet is not self), None):
                raise CalcError(f"advance: {foreign} is of another fleet")
        else:
            wanted = dict.fromkeys([*self.handles.values()], checks.integer("epochs", epochs, 0))
        with self._training.mine:
            with self.turn.mine:
                wanted = {h: n for h, n in wanted.items() if h.open and n > 0}
                goals = self._goals(wanted, wanted.values())
            for _ in self._passes(goals, checkpoint):
                pass
            return list(goals)

    def _goals(self, handles: Iterable[Handle], epochs: Iterable[int]) -> dict[Handle, int]:
        """Numbers of epochs after which handles have trained for ``epochs`` more."""
        done = self._tasks[[h._place for h in handles], layout.EPOCH].tolist()
        return {h: before + more for h, before, more in zip(handles, done, epochs)}

    def _passes(self, goals: Mapping[Handle, int], checkpoint: int, whole: bool = False) -> Iterator[None]:
        """Run models to their goals; yields after each slice of work.

        whole : a model at its goal is given back its best epoch, where that is kept; one that ends for good always is.
        """
        waiting = deque(goals)
        active: dict[int, tuple[Handle, Slot]] = {}  # by place
        heap, keeper = self.heap, self._training
        with self.turn.mine:
            for handle in self.handles.values():  # what an interrupted training has kept
                heap.let_go(handle.resident.record, keeper)
        try:
            while waiting or active:
                before = len(active)
                with self.turn.mine:
                    for _ in range(len(waiting)):
                        handle = waiting[0]
                        if handle.ends:  # another thread has closed or stopped it
                            waiting.popleft()
                            continue
                        slot = heap.keep(handle.resident.record, keeper)
                        if slot is not None:
                            active[handle._place] = handle, slot
                            waiting.popleft()
                            handle._enter(slot, goals[handle])
                        elif handle.ends or handle.resident.record.turn.taken:
                            waiting.rotate(-1)
                        else:  # there is no room
                            break
                    if active:
                        places = np.fromiter(active, np.int64, len(active))
                        self._ready(
                            places[before:], [h.limit(goals[h]) for h, _ in list(active.values())[before:]], checkpoint
                        )
                        self._slice(places, (slot.loaded for _, slot in active.values()))
                        if self.stops:
                            self._end_stopped(active)
                        ended = self._tasks[places, layout.STATUS] != layout.READY
                        if anyone_waits():  # who has a model's turn, and waits for the model to be let go
                            ended |= [h.resident.record.turn.taken for h, _ in active.values()]
                        for handle in self._rest(active, places[ended], goals if whole else {}):
                            if handle.status == "waiting" or handle.stops_later:
                                waiting.append(handle)  # after the thread that wants it
                            elif handle.status == "done" and handle.epochs_done < goals[handle]:
                                waiting.appendleft(handle)  # while it is there
                        waits = None
                    else:
                        waits = waiting[0].resident.record if waiting else None
                if waits is not None:
                    with waits.turn.mine:
                        if waits.loaded is not None:
                            heap.enter(waits)
                yield
        finally:
            with self.turn.mine:
                self._rest(active, np.fromiter(active, np.int64, len(active)), {})

    def _end_stopped(self, active: Mapping[int, tuple[Handle, Slot]]) -> None:
        """Let stopped models end with the epoch that they are in."""
        self.stops = False
        for place, (handle, _) in active.items():
            task = self._tasks[place]
            if handle.status == "stopped" and task[layout.STATUS] == layout.READY:
                task[layout.LIMIT] = handle.limit(0)
                task[layout.STATUS] = layout.FINISHED if handle.ends else layout.READY

    def _ready(self, places: np.ndarray, goals: list[int], checkpoint: int) -> None:
        """Let tasks run to their goals, or where models are kept in files to the next checkpoint."""
        limits = np.array(goals, np.int64)
        if self.heap.store.persistent:
            limits = np.minimum(limits, self._tasks[places, layout.EPOCH] + checkpoint)
        self._tasks[places, layout.LIMIT], self._tasks[places, layout.STATUS] = limits, layout.READY
        self._tasks[places, layout.PART] = self._tasks[self._judges(places)[1], layout.PART] = (
            0  # what was begun is gone
        )

    def _rest(
        self, active: dict[int, tuple[Handle, Slot]], places: np.ndarray, goals: Mapping[Handle, int]
    ) -> list[Handle]:
        """Leave the models of ``places``; those that have come to an end are kept in files, at their goals with their best epoch."""
        rested = []
        states = self._tasks[places][:, [layout.STATUS, layout.EPOCH, layout.FIRST]].tolist()
        for place, state in zip(places.tolist(), states):
            handle, slot = active[place]
            handle._leave(slot, *state)
            try:
                if handle.status != "waiting":
                    if handle.ends or handle.epochs_done >= goals.get(handle, np.inf):
                        handle._give_best(slot)
                    self.heap.write_kept(handle.resident.record)
            finally:
                self.heap.let_go(handle.resident.record, self._training)
                del active[place]
            if handle.status == "trapped":
                handle.resident.drop_added(handle.resident.loaded.path(None))
            rested.append(handle)
        return rested

    def _slice(self, places: np.ndarray, loaded: Iterable[Loaded]) -> None:
        """Some turns for each task: about `SLICE_SECONDS` of the team's time."""
        n = len(places)
        laps = -(-TURNS * self.workers // n)
        rounds = FIRST_ROUNDS
        if self._per_round:
            rounds = max(1, int(SLICE_SECONDS / self._per_round / (laps * n)))
        before = self._rounds_done(places)
        start = time.perf_counter()
        self.heap.device.run_fleet(self._tasks, places, rounds, laps, self.workers, loaded)
        elapsed = time.perf_counter() - start
        self._per_round = elapsed / max(self._rounds_done(places) - before, 1)

    def _judges(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which of ``places`` have judges, and the places of those."""
        judges = self._tasks[places, layout.JUDGE]
        judged = np.flatnonzero(judges)
        return judged, (judges[judged] - self._address) // self._tasks.strides[0]

    def _rounds_done(self, places: np.ndarray) -> int:
        """Of tasks and their judges."""
        tasks, (with_judges, of_judges) = self._tasks, self._judges(places)
        epochs, rounds, first = (tasks[places, word] for word in (layout.EPOCH, layout.ROUNDS, layout.FIRST))
        rounds[with_judges] += tasks[of_judges, layout.ROUNDS]
        return int((epochs * rounds + first).sum() + tasks[of_judges, layout.FIRST].sum())


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays of numbers have the same bits."""
    return (
        a.dtype == b.dtype != object
        and a.shape == b.shape
        and np.array_equal(a.reshape(-1).view(np.uint8), b.reshape(-1).view(np.uint8))
    )


def _arrays(what: str, data: Any, names: Sequence[str]) -> Any:
    """A tuple of arrays, or a mapping."""
    if not isinstance(data, (tuple, list, Mapping)):
        raise CalcError(
            f"{what}: a tuple of arrays ({', '.join(names)}), or a mapping of them by name, is wanted, not "
            f"{checks.called(data)}"
        )
    return data


def _mean_loss(handles: Iterable[Handle]) -> str:
    losses = [h.loss for h in handles if np.isfinite(h.loss)]
    return f"mean loss {np.mean(losses):.4g}" if losses else ""
