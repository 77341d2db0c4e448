"""How many workers a program has where nobody says: the process's setting."""

from __future__ import annotations

import os

from calcvm import checks, system
from calcvm.errors import CalcError

VARIABLE = "CALCVM_WORKERS"
_most: int | None = None


def set_workers(n: int | None) -> None:
    """Set the largest default team of this process: workers of models, programs and fleets that are made from now on.

    What says ``workers=`` has as many as it says.  Without a setting the environment variable ``CALCVM_WORKERS`` is the largest
    default, else ``OMP_NUM_THREADS``.  A default is never above the cores that the process may use, by its affinity and its
    container's quota.  Results are the same bits for any team.

    Parameters
    ----------
    n : int or None
        At least 1.  None takes the setting back.

    Raises
    ------
    CalcError : n is no such number.

    Examples
    --------
    >>> cv.set_workers(1)
    >>> cv.set_workers(None)
    """
    global _most
    _most = None if n is None else checks.integer("set_workers: n", n, 1)


def default_team() -> int:
    """The largest team that is taken where nobody says (CalcError: ``CALCVM_WORKERS`` is no number)."""
    if not system.has_teams():
        return 1
    cores = system.n_cores()
    most = _most or _of_variable() or _of_openmp() or cores
    return min(most, cores)


def _of_variable() -> int | None:
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise CalcError(
            f"the environment variable {VARIABLE} is {text!r}: give a number of workers, 1 or more, or unset it"
        )
    return int(text)


def _of_openmp() -> int | None:
    """Of a list, which OpenMP has for teams inside teams, the first; what OpenMP would not take is not ours to refuse."""
    text = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(text) if text.isdecimal() and int(text) > 0 else None
