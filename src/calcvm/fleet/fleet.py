"""`Fleet`: many models, of one shape or of many, trained at once in one heap."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from threading import get_ident
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import numpy as np

from calcvm import checks, compiler, hints, nn
from calcvm.errors import CalcError, PlanError, Uncopied, within
from calcvm.fleet.handle import Converted, Handle
from calcvm.fleet.programs import Programs
from calcvm.fleet.results import Results
from calcvm.fleet.tasks import Tasks
from calcvm.graph import CalcGraph
from calcvm.model import CalcHeap, Model, build_graph
from calcvm.model.adapting import adapt_new
from calcvm.model.data import arrays_of
from calcvm.model.model import BATCH, graph_of
from calcvm.model.roles import LEARN, figures, trained_paths
from calcvm.progress import Count
from calcvm.tables import preformatted, some
from calcvm.vm.memory.epoch import Epoch
from calcvm.vm.memory.heap import parse_bytes
from calcvm.vm.memory.order import EpochInOrder, checked_order
from calcvm.vm.memory.slot import Slot
from calcvm.vm.memory.store import Store, checkpoint_epochs
from calcvm.vm.memory.turns import Turns, anyone_waits
from calcvm.vm.program.documents import MAX_BLOCKS, MAX_WORKERS
from calcvm.vm.program.program import Program
from calcvm.vm.run import job as J
from calcvm.vm.run.device import DEVICES
from calcvm.vm.run.feeds import readable
from calcvm.vm.run.loaded import Loaded
from calcvm.vm.run.signals import orderly_end
from calcvm.vm.run.slices import SLICE_SECONDS

FIRST_ROUNDS = 8  # rounds per turn before anything was measured
STAY = 100  # if others wait, models stay in the heap this many times as long as it took to bring them in
TURNS = 16  # least turns per worker in a slice; a worker waits for at most one turn of another at the end


class Fleet(Uncopied):
    """Train many models at once in one heap.  One worker at a time trains a model, and no model waits for another.

    In compiled code, workers take the next model from a queue, train it for some rounds on its slice of the heap, and go
    on.  Models of one program share its rows; different programs run side by side.  A model ends with the same bits as
    by `Model.fit` alone, for any number of workers and any order.

    Parameters
    ----------
    memory : int or str
        Bytes of the heap, or a text such as ``"1 GiB"``.
    workers : int, optional
        Default: as many as the device runs at once, such as the machine's cores.
    store : MemoryStore or FileStore, optional
        Holds the models that are switched out if they do not all fit at once.  A `FileStore` also writes each model after
        every epoch, so a killed process loses at most the current epoch (see `fit`).
    device : str
        The device that the models' programs are compiled for.

    Examples
    --------
    >>> X, y = np.eye(8, 4, dtype="float32"), np.arange(8) % 2
    >>> fleet = cv.Fleet(memory="1 MiB")
    >>> for seed in range(100):
    ...     handle = fleet.add(nn.Linear(2), input_shape=(4,), optimizer="adam", data=(X, y), seed=seed)
    >>> results = fleet.fit(epochs=3, progress=False)
    >>> len(results), handle.status, cv.Ensemble(results.best(5)).predict(X).shape
    (100, 'done', (8, 2))
    """

    _instead = "copy its models, handle.model; save them, or pass their programs and make another fleet"

    def __init__(self, memory: int | str, workers: int | None = None, store: Store | None = None, device: str = "cpu"):
        if workers is not None:
            most = MAX_WORKERS if checks.choice("device", device, DEVICES) != "cuda" else MAX_BLOCKS
            workers = checks.integer("workers", workers, 1, most)
        self.heap = CalcHeap(memory, store, device)
        self.workers = workers or self.heap.device.n_workers
        self.handles: dict[str, Handle] = {}
        self.programs = Programs()
        # by id and required type
        self._converted: WeakValueDictionary[tuple[int, str], Converted] = WeakValueDictionary()
        self._tasks = Tasks(lambda: (place for h in self.handles.values() for place in h.places))
        self._per_round = 0.0  # seconds of the team per round, as last measured
        self._adding: dict[int, str] = {}  # by thread: the model being added
        self._training, self.turn = Turns("the fleet"), self._tasks.turn  # whole trainings; slices and other changes
        self.heap.turns += [self._training, self.turn]

    def __len__(self) -> int:
        return len(self.handles)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Write all changes, close the store and free the memory (`CalcHeap.close`).  `results` can still be read."""
        self.heap.close()

    def __repr__(self) -> str:
        return f"<fleet of {len(self)} models, {self.free_bytes:,} of {self.heap.nbytes:,} bytes free>"

    def _repr_html_(self) -> str:
        return f"{preformatted(repr(self))}{self.results._repr_html_()}"

    @property
    def free_bytes(self) -> int:
        """Bytes of the heap that no model occupies."""
        return self.heap.free_bytes

    @property
    def results(self) -> Results:
        """The handles as a table, current at the time of reading."""
        return Results(self.handles)

    # ------------------------------------------------------------ models
    @hints.takes(build_graph, compiler.plan, without=("net", "graph", "accumulate", "progress"))
    def add(
        self,
        net: nn.Layer | Iterable[nn.Layer] | CalcGraph | Model | Program | str,
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
        order: Iterable[str] | None = None,
        **options: Any,
    ) -> Handle:
        """Add a new model, a copy of one, or by its name one that the store has kept.

        Parameters
        ----------
        net : layers, graph, Model, Program or str
            Layers and graphs come with the ``options`` of `Model`.  Those that differ only in hyperparameters share one
            program.  To add thousands of models of one network, pass a graph (`calcvm.build_graph`), or a program of any
            graph with a path that trains: that spares building the network each time.  A `Model` is copied, with its
            parameters, optimizer state and epochs.
        data : arrays for the placeholders of the path that trains, in the order they were declared, or by name
            Arrays are read in place; many models may share them.  Data that must be converted (lists, DataFrames, float16,
            another byte order, ...) are converted at each call.  Equal results are kept once.
        samples : slice or ndarray of int, shape (n,), optional
            The samples of ``data`` to train on (default: all).  An `nn.Standardize` that has seen no data learns from these.
        validation : tuple or mapping of arrays, or slice or indexes of samples of ``data``, optional
            The data to evaluate the model on after each epoch.
        seed : int
            Of a new model; a copy and a model of the store keep theirs.
        hyper : mapping, optional
            Hyperparameters that differ from the program's, by name: ``{"learning_rate": 1e-3}``.
        epochs : int, optional
            The number of epochs of this model in each `fit`.
        patience : int, optional
            Stop for good when the validation loss has not fallen for this many epochs, counted across calls of `fit`.  The
            model keeps the state of its last epoch.  Epochs from before a model was added from a store do not count.
        keep_best : bool
            Restore the state after the epoch of the smallest validation loss, from this `fit` or an earlier one, when `fit`
            ends or the model stops for good.  The state is parameters, optimizer state and step counters; `handle.kept` is
            the epoch.  It is stored outside the heap, in as many bytes as a `MemoryStore` takes for the model.  A killed
            process loses it.
        learning_batch : int, optional
            Samples per update, if more than the program's batch.  A program must accumulate gradients
            (``accumulate=True``).
        memory : int or str, optional
            Quota: raise if the program takes more bytes.  Layers and graphs are planned to fit it, as by `Model`.
        order : list of str, optional
            Paths that learn in turn, as in `Model.fit`; ``hyper`` applies to all of them.  A graph with several paths that train,
            none of them called learn, needs it.
        options : of a new model, see `Model`: input_shape, loss, optimizer, batch_size, ...

        Raises
        ------
        PlanError : the program is larger than its quota or the heap (``needed`` and ``allowed`` bytes).
        CalcError : data, name, options or hyperparameters do not fit.  Nothing has been added.
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
        if options and isinstance(net, (Program, Model)):
            raise CalcError(f"Fleet.add: {next(iter(options))} is an option of layers and graphs: leave it out")
        if isinstance(net, Model) and seed:
            raise CalcError("Fleet.add: a Model keeps its seed and parameters: leave seed out, or add model.program")
        own: dict[str, float] = {}
        left = self._adding.pop(get_ident(), None)
        if left is not None and left not in self.handles and left in self.heap:
            # an exception came after the heap had added it, and before the fleet had
            self._give_up(self.heap.open(left), fresh=True)
        if isinstance(net, str):
            if net in self.handles:
                self._refuse_second(net)
            model = self.heap.open(net)
        else:
            program, own = self._program(net, options, learning_batch, memory)
            self._quota(program, memory, name)
            name = self.heap.free_name(name)
            self._adding[get_ident()] = name
            try:
                if isinstance(net, Model):
                    model = net.copy(name, self.heap)
                else:
                    model = self.heap.create(program, seed=seed, workers=1, name=name)
            except Exception:  # another thread owns what the heap has by this name
                del self._adding[get_ident()]
                raise
        with model.record.change:  # if several threads add one model of the store, the first wins
            if model.name in self.handles:
                self._refuse_second(model.name)
            try:
                self._quota(model.program, memory, model.name)
                if learning_batch is not None:
                    model.facts["learning_batch"] = learning_batch
                sources: list[Converted] = []
                train, judge = self._runs(model, data, samples, validation, check_finite, sources, order)
                if watched and judge is None:
                    raise CalcError(f"{watched} needs validation data: give validation=")
                if watched and "loss" not in figures(model.loaded).values():
                    raise CalcError(
                        f"{watched} needs the loss of path 'predict', which has none: name a result of it 'predict.loss'"
                    )
                if keep_best and model.loaded.paged != (0, 0):
                    raise CalcError(
                        "keep_best: the program keeps parameters in a file of pages: compile it without page_bytes"
                    )
                for path, values in ((None, own), *((path, hyper or {}) for path in train.trains)):
                    for setting, value in values.items():
                        model.hyper(path)[setting] = value
                job = train.job
                job[[J.ROUNDS, J.EPOCH, J.SEED]] = train.rounds, model.facts["epochs"], model.seed
                job[[J.SHUFFLE, J.PATIENCE]] = shuffle, -1 if patience is None else patience
                job[J.BEST] = np.array(np.inf).view(np.int64)
                if judge is not None:
                    judge.job[J.ROUNDS] = judge.rounds
                with self.turn.mine:
                    handle = Handle(self._tasks, self.handles, model, train, judge, epochs, sources, keep_best)
                    self.handles[model.name] = handle
                    self._adding.pop(get_ident(), None)
                    return handle
            except BaseException:
                if model.name not in self.handles:
                    self._give_up(model, fresh=not isinstance(net, str))
                raise

    def _program(
        self, net: Any, options: dict[str, Any], learning_batch: int | None, memory: int | str | None
    ) -> tuple[Program, dict[str, float]]:
        """The program of a model to add, and the hyperparameters in which the model differs from it."""
        if isinstance(net, (Program, Model)):
            return (net if isinstance(net, Program) else net.program), {}
        wanted = "layers, a graph, a cv.Model or a program (cv.compile)"
        checks.one_of("Fleet.add", net, (nn.Layer, list, tuple, CalcGraph), wanted)
        how = {"memory": memory, "accumulate": learning_batch is not None, "device": self.heap.device.name}
        how["mode"] = "fleet" if self.heap.device.name == "cuda" else None
        if memory is None and options.get("batch_size") is None:
            options["batch_size"] = min(BATCH, learning_batch or BATCH)
        how["batch_size"] = options.pop("batch_size", None)
        graph, planned = graph_of("Fleet.add", net, options)
        return self.programs.of(graph, **{**how, **planned})

    def step(self, name: str, x: Any, y: Any = None, *more: Any) -> float:
        """Train one model on one batch and return its loss (see `Model.step`)."""
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
        self,
        model: Model,
        data: Any,
        samples: Any,
        validation: Any,
        check_finite: bool,
        sources: list[Converted],
        order: Any,
    ) -> tuple[Epoch, Epoch | None]:
        """The epochs that train and evaluate a model; converted arrays are added to ``sources``, which keeps them alive."""
        loaded, learning = model.loaded, model.facts.get("learning_batch")
        trained = trained_paths(loaded)
        if order is None and len(trained) > 1 and LEARN not in trained:
            raise CalcError(
                f"Fleet.add: the graph has several paths that train: give the order in which they learn, such as order={(*trained,)}"
            )
        paths = (loaded.path(None),) if order is None else checked_order("Fleet.add", loaded, order)
        for path in paths:
            if loaded.training(path)["loss"] is None:
                raise CalcError(f"path {path!r} has no loss to report")
        read = {name for path in paths for name in loaded.feeds(path)}
        names = (*(name for name in loaded.variables if name in read),)
        arrays = self._named(model, names, _arrays("data", data, names), sources)
        train = (
            EpochInOrder(model, arrays, paths, learning, samples=samples, check_finite=check_finite)
            if order is not None
            else Epoch(
                model, arrays, paths[0], samples=samples, train=True, learning=learning,
                results=[loaded.training(paths[0])["loss"]], of_totals=True, check_finite=check_finite,
            )
        )  # fmt: skip
        with within(f"model {model.name!r}"):
            adapt_new(model, arrays, samples)
        if validation is None:
            return train, None
        if "predict" not in loaded.paths:
            raise CalcError(
                "validation: path 'predict' evaluates models, and the program's paths are "
                f"{', '.join(loaded.paths)}: build one in the graph, as cv.build_graph does"
            )
        with within("validation"):
            own = isinstance(validation, (tuple, Mapping))
            if own:
                names = loaded.feeds("predict")
                arrays = self._named(model, names, _arrays("validation", validation, names), sources)
            judge = Epoch(
                model, arrays, "predict", samples=None if own else validation, check_finite=check_finite,
                results=sorted(figures(loaded), key=lambda name: figures(loaded)[name] != "loss"),  # patience reads the first
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

    def _give_up(self, model: Model, fresh: bool) -> None:
        """Close a model that was not added.  A fresh one is also removed from the store."""
        model.close()
        if fresh:
            self.heap.store.remove(model.name)

    def _quota(self, program: Program, memory: int | str | None, name: str | None) -> None:
        allowed = None if memory is None else parse_bytes(memory)
        if allowed is not None and program.heap_bytes > allowed:
            raise PlanError(
                f"model {name or 'new'}: needs {program.heap_bytes:,} bytes, its quota is {allowed:,}: raise memory=, "
                "or compile with a smaller batch",
                program.heap_bytes,
                allowed,
            )

    def _named(self, model: Model, names: Sequence[str], data: Any, sources: list[Converted]) -> dict[str, np.ndarray]:
        """Arrays by placeholder, readable by compiled code.

        Models that read equal data share one conversion; ``sources`` keeps it alive.
        """
        if not isinstance(data, Mapping):
            if len(data) != len(names):
                raise CalcError(f"data: {len(names)} arrays are wanted ({', '.join(names)}), not {len(data)}")
            data = dict(zip(names, data))
        elif {*data} != {*names}:
            raise CalcError(f"data for {', '.join(map(repr, data))}; wanted are {', '.join(names)}")
        out = {}
        for name, given in data.items():
            own = model.loaded.own_types.get(name, "")
            array = readable(name, given, dtype=own)
            if array is given:
                out[name] = array
                continue
            source = self._converted.get((id(given), own))
            if source is None or not _equal(source.array, array):  # the data have changed
                source = self._converted[id(given), own] = Converted(given, array)
            sources.append(source)
            out[name] = source.array
        return out

    # ------------------------------------------------------------ training
    def fit(self, epochs: int = 1, *, progress: bool = True, checkpoint: int | str = 1) -> Results:
        """Train every model for ``epochs`` epochs, or for its own number if `add` gave one.

        Parameters
        ----------
        checkpoint : int or "end"
            Write a model to the fleet's `FileStore` after this many epochs, the most that a killed process can lose.
            "end": write it when its training ends, and when it is switched out.

        Returns
        -------
        Results : a table of the handles.  Ctrl-C and SIGTERM end training between two rounds of every model and leave the
            store consistent; ``results.stopped`` says so.  Meanwhile other threads may use the models between slices;
            another `fit` or `advance` waits for the end.
        """
        epochs, checkpoint = checks.integer("epochs", epochs), checkpoint_epochs(checkpoint)
        progress = checks.flag("progress", progress)
        self.heap.check_open()
        with self._training.mine:
            return self._fit(epochs, progress, checkpoint)

    def _fit(self, epochs: int, progress: bool, checkpoint: int) -> Results:
        with self.turn.mine:
            handles = [h for h in self.handles.values() if h.open]
            goals = self._goals(handles, [h.own_epochs or epochs for h in handles])
            places = np.array([h._place for h in handles], np.int64)
        start = int(self._tasks.rows[places, J.EPOCH].sum())
        report = Count(sum(goals.values()) - start, progress)
        stopped = ""
        try:
            with orderly_end() as check:
                for _ in self._passes(goals, checkpoint, whole=True):
                    report.step(int(self._tasks.rows[places, J.EPOCH].sum()) - start, lambda: _mean_loss(goals))
                    check()
        except KeyboardInterrupt:
            stopped = "interrupted"
        finally:
            report.close()
        return Results(self.handles, stopped)

    def advance(self, epochs: int | Mapping[Handle, int] = 1, *, checkpoint: int | str = 1) -> list[Handle]:
        """Train all models that are not finished for ``epochs`` more epochs, or for a number per handle.

        Returns
        -------
        list of Handle : the trained models, in the order they were added.
        """
        checkpoint = checkpoint_epochs(checkpoint)
        self.heap.check_open()
        if isinstance(epochs, Mapping):
            wanted = {
                checks.one_of("advance", h, Handle, "a handle of the fleet"): checks.integer(f"epochs of {h}", n, 0)
                for h, n in epochs.items()
            }
            if foreign := next((h for h in wanted if h._tasks is not self._tasks), None):
                raise CalcError(f"advance: {foreign} belongs to another fleet")
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
        """The total epochs of handles after ``epochs`` more."""
        done = self._tasks.rows[[h._place for h in handles], J.EPOCH].tolist()
        return {h: before + more for h, before, more in zip(handles, done, epochs)}

    def _passes(self, goals: Mapping[Handle, int], checkpoint: int, whole: bool = False) -> Iterator[None]:
        """Train models to their goals; yield after each slice of work.

        whole : restore the best epoch of a model at its goal, if one is kept.  For models that end for good this is always done.
        """
        waiting = deque(goals)
        active: dict[int, tuple[Handle, Slot]] = {}  # by place
        heap, keeper = self.heap, self._training
        exchange, until, leaving = True, 0.0, set[int]()  # whether others go next, when they may; places that make room
        with self.turn.mine:
            for handle in self.handles.values():  # held by an interrupted training
                heap.let_go(handle.model.record, keeper)
        try:
            while waiting or active:
                before = len(active)
                with self.turn.mine:
                    start, switches = time.perf_counter(), heap.stats.switches
                    if exchange:
                        waiting = deque(sorted(waiting, key=self._shares(waiting).__getitem__))
                    for _ in range(len(waiting)):
                        handle = waiting[0]
                        if handle.ends:  # another thread has closed or stopped it
                            waiting.popleft()
                            continue
                        slot = heap.keep(handle.model.record, keeper)
                        if slot is not None:
                            active[handle._place] = handle, slot
                            waiting.popleft()
                            handle._enter(slot, goals[handle])
                        elif handle.ends or (handle.model.record.turn.taken and not handle.wanted):
                            waiting.rotate(-1)
                        else:  # no room, or what there is is for another thread
                            break
                    if active:
                        places = np.fromiter(active, np.int64, len(active))
                        self._ready(
                            places[before:], [h.limit(goals[h]) for h, _ in list(active.values())[before:]], checkpoint
                        )
                        if exchange or heap.stats.switches > switches:
                            until = max(until, (now := time.perf_counter()) + STAY * (now - start))
                        self._slice(places, (slot.loaded for _, slot in active.values()))
                        if self._tasks.stops:
                            self._end_stopped(active)
                        ended = self._tasks.rows[places, J.STATUS] != J.READY
                        exchange = bool(waiting) and time.perf_counter() > until
                        if anyone_waits():  # for one of the models: a thread holds its turn and waits for its release
                            ended |= [h.model.record.turn.taken for h, _ in active.values()]
                            exchange = exchange or any(h.wanted for h in waiting)
                        if exchange:
                            most = self._most(places, waiting)
                            if heap.store.persistent:  # a file holds whole epochs
                                rows = self._tasks.rows
                                rows[most, J.LIMIT] = np.minimum(rows[most, J.LIMIT], rows[most, J.EPOCH] + 1)
                                leaving.update(most.tolist())
                            else:
                                ended |= np.isin(places, most)
                        for handle in self._rest(active, places[ended], goals if whole else {}):
                            if handle.status == "waiting" or handle.stops_later:
                                waiting.append(handle)  # behind the waiting thread
                            elif handle.status == "done" and handle.epochs_done < goals[handle]:
                                # at the left it goes on while it is in the heap
                                (waiting.append if handle._place in leaving else waiting.appendleft)(handle)
                        leaving &= active.keys()
                        waits = None
                    else:
                        waits = waiting[0].model.record if waiting else None
                if waits is not None:
                    with waits.turn.mine:
                        if waits.loaded is not None:
                            heap.enter(waits)
                yield
        finally:
            with self.turn.mine:
                self._rest(active, np.fromiter(active, np.int64, len(active)), {})

    def _shares(self, waiting: Iterable[Handle]) -> dict[Handle, int]:
        """The epochs that models have done, less than any for one that another thread waits for."""
        done = self._goals(waiting, repeat(0))
        return {h: -1 if h.wanted else n for h, n in done.items()} if anyone_waits() else done

    def _most(self, places: np.ndarray, waiting: Iterable[Handle]) -> np.ndarray:
        """Of ``places`` those that have done the most epochs, one for each model that waits and has done fewer."""
        done, others = self._tasks.rows[places, J.EPOCH], sorted(self._shares(waiting).values())
        order = np.argsort(-done, kind="stable")[: len(others)]
        return places[order[done[order] > others[: len(order)]]]

    def _end_stopped(self, active: Mapping[int, tuple[Handle, Slot]]) -> None:
        """Let stopped models finish their current epoch."""
        self._tasks.stops = False
        for place, (handle, _) in active.items():
            task = self._tasks.rows[place]
            if handle.status == "stopped" and task[J.STATUS] == J.READY:
                task[J.LIMIT] = handle.limit(0)
                task[J.STATUS] = J.FINISHED if handle.ends else J.READY

    def _ready(self, places: np.ndarray, goals: list[int], checkpoint: int) -> None:
        """Let tasks run to their goals, or to the next checkpoint if the store writes files."""
        limits = np.array(goals, np.int64)
        if self.heap.store.persistent:
            limits = np.minimum(limits, self._tasks.rows[places, J.EPOCH] + checkpoint)
        self._tasks.rows[places, J.LIMIT], self._tasks.rows[places, J.STATUS] = limits, J.READY
        self._tasks.rows[places, J.PART] = self._tasks.rows[self._tasks.judges(places)[1], J.PART] = (
            0  # a partial evaluation is lost
        )

    def _rest(
        self, active: dict[int, tuple[Handle, Slot]], places: np.ndarray, goals: Mapping[Handle, int]
    ) -> list[Handle]:
        """Release the models of ``places``.  Finished ones are written to files, at their goals with their best epoch."""
        rested = []
        states = self._tasks.rows[places][:, [J.STATUS, J.EPOCH, J.FIRST]].tolist()
        for place, state in zip(places.tolist(), states):
            handle, slot = active[place]
            handle._leave(slot, *state)
            try:
                if handle.status != "waiting":
                    if handle.ends or handle.epochs_done >= goals.get(handle, np.inf):
                        handle._give_best(slot)
                    self.heap.write_kept(handle.model.record)
            finally:
                self.heap.let_go(handle.model.record, self._training)
                del active[place]
            if handle.status == "trapped":
                for path in handle._train.trains:
                    handle.model.drop_added(path)
            rested.append(handle)
        return rested

    def _slice(self, places: np.ndarray, loaded: Iterable[Loaded]) -> None:
        """Run some turns of each task, for about `SLICE_SECONDS` of the team's time."""
        n = len(places)
        laps = -(-TURNS * self.workers // n)
        rounds = FIRST_ROUNDS
        if self._per_round:
            rounds = max(1, int(SLICE_SECONDS / self._per_round / (laps * n)))
        before = self._tasks.rounds_done(places)
        start = time.perf_counter()
        self.heap.device.run_fleet(self._tasks.rows, places, rounds, laps, self.workers, loaded)
        elapsed = time.perf_counter() - start
        self._per_round = elapsed / max(self._tasks.rounds_done(places) - before, 1)


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays have the same bits."""
    return (
        a.dtype == b.dtype != object
        and a.shape == b.shape
        and np.array_equal(a.reshape(-1).view(np.uint8), b.reshape(-1).view(np.uint8))
    )


def _arrays(what: str, data: Any, names: Sequence[str]) -> Any:
    """Data as a tuple or mapping of arrays, checked."""
    if not isinstance(data, (tuple, list, Mapping)):
        raise CalcError(
            f"{what}: a tuple of arrays ({', '.join(names)}), or a mapping of them by name, is wanted, not "
            f"{checks.called(data)}"
        )
    return data


def _mean_loss(handles: Iterable[Handle]) -> str:
    losses = [h.loss for h in handles if np.isfinite(h.loss)]
    return f"mean loss {np.mean(losses):.4g}" if losses else ""
