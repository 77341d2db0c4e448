"""The engine on Ray: a fleet on each node, with its own heap.  The study stays in the process that searches."""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from calcvm import checks
from calcvm.errors import CalcError, MissingExtra
from calcvm.exploration.worker import Report, Task, Turn, Worker
from calcvm.model import Model, load

START_SECONDS = 60  # time for a worker to start
CONNECT_SECONDS = 5


@dataclass(frozen=True)
class RayEngine:
    """The Ray cluster that `explore` uses, and the number of workers to start there.

    Parameters
    ----------
    address : str, optional
        Of a cluster, as for ``ray.init``.  Default: the cluster that the process is connected to, or that of
        ``RAY_ADDRESS``; else Ray is started on this machine.
    actors : int, optional
        Workers, each with a heap of ``memory`` bytes (default: one per node).
    """

    address: str | None = None
    actors: int | None = None

    def __post_init__(self) -> None:
        if self.address is not None:
            checks.text("RayEngine: address", self.address, "auto")
        if self.actors is not None:
            object.__setattr__(self, "actors", checks.integer("RayEngine: actors", self.actors))


class _Actor:
    """A worker on a node."""

    def __init__(self, task: Task, cpus: int):
        self.worker = Worker(replace(task, workers=task.workers or cpus))

    def pid(self) -> int:
        return os.getpid()

    def turn(self, turn: Turn) -> tuple[list[Report], dict[int, bytes]]:
        files = {number: self.worker.file(number) for number in turn.keep}
        return self.worker.turn(replace(turn, release=[*turn.release, *turn.keep])), files


class Cluster:
    """Actors on Ray, one per home.  One that dies is replaced."""

    def __init__(self, options: RayEngine, task: Task):
        try:
            import ray
        except ImportError as error:
            raise MissingExtra("ray", "ray", 'engine="ray"') from error
        self.ray: Any = ray
        self._began = not ray.is_initialized()
        if self._began:
            _connect(ray, options.address)
        self._files: dict[int, bytes] = {}
        self._running: dict[Any, int] = {}  # home, by the reference of its result
        try:
            nodes = [n for n in ray.nodes() if n["Alive"] and n["Resources"].get("CPU", 0) >= 1]
            if not nodes:
                raise CalcError("Ray has no node with a CPU: start one, or search with engine='local'")
            self.homes = options.actors or len(nodes)
            seats = [nodes[home % len(nodes)] for home in range(self.homes)]
            self._seats = [(n["NodeID"], max(1, int(n["Resources"]["CPU"]) // seats.count(n))) for n in seats]
            self._task = self._put(task)
            self._actors = [self._actor(home) for home in range(self.homes)]
            for actor in self._actors:
                self._await(actor)
        except BaseException:
            self.close()
            raise

    def submit(self, home: int, turn: Turn) -> None:
        for number in turn.release:
            self._files.pop(number, None)
        self._running[self._actors[home].turn.remote(turn)] = home

    def wait(self) -> tuple[int, list[Report] | None]:
        (done,), _ = self.ray.wait(list(self._running))
        home = self._running.pop(done)
        try:
            reports, files = self.ray.get(done)
        except self.ray.exceptions.RayTaskError as error:
            raise CalcError(f"a worker failed: {error.cause!r}") from error
        except self.ray.exceptions.RayError:  # the worker died
            self._actors[home] = self._actor(home)
            self._await(self._actors[home])
            return home, None
        self._files |= files
        return home, reports

    def model(self, number: int) -> Model | None:
        if number not in self._files:
            return None
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.calc"
            path.write_bytes(self._files[number])
            return load(path)

    def close(self) -> None:
        for actor in getattr(self, "_actors", []):
            self.ray.kill(actor)
        if self._began:
            self.ray.shutdown()

    def _put(self, task: Task) -> Any:
        try:
            return self.ray.put(task)
        except (TypeError, AttributeError) as error:
            raise CalcError(f"build and data must be such that Ray can send them to its workers: {error}") from error

    def _actor(self, home: int) -> Any:
        """Start a worker on its node, or on another node if that one is gone."""
        node, cpus = self._seats[home]
        affinity = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=True)
        actor = self.ray.remote(_Actor).options(num_cpus=cpus, scheduling_strategy=affinity)
        return actor.remote(self._task, cpus)

    def _await(self, actor: Any) -> None:
        try:
            self.ray.get(actor.pid.remote(), timeout=START_SECONDS)
        except self.ray.exceptions.GetTimeoutError as error:
            raise CalcError(f"Ray did not start a worker within {START_SECONDS} s: has it free CPUs?") from error
        except self.ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[-1]
            raise CalcError(
                f"a worker on Ray does not start: {reason}; do all nodes have calcvm and your code?"
            ) from error


def _connect(ray: Any, address: str | None) -> None:
    import socket

    address = address or os.environ.get("RAY_ADDRESS")
    options = {"address": address} if address else {"include_dashboard": False}
    try:
        if address and (host := re.fullmatch(r"(?:ray://)?([^:/]+):(\d+)", address)):
            socket.create_connection((host[1], int(host[2])), CONNECT_SECONDS).close()  # Ray itself tries for minutes
        ray.init(**options, log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # Ray raises many types
        where = f"at {address}" if address else "on this machine"
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CalcError(f"Ray {where} cannot be reached: {reason}; is it running? engine='local' needs none") from error
