"""The default number of workers of a program: a setting of the process."""

from __future__ import annotations

import os

from calcvm import checks, system
from calcvm.errors import CalcError

VARIABLE = "CALCVM_WORKERS"
_most: int | None = None


def set_workers(n: int | None) -> None:
    """Set the largest default team of this process: the workers of models, programs and fleets created from now on.

    An explicit ``workers=`` takes precedence.  Without a setting, the environment variable ``CALCVM_WORKERS`` is the largest
    default, else ``OMP_NUM_THREADS``.  A default never exceeds the cores that the process may use, by its affinity and its
    container's quota.  Results are the same bits for any team.

    Parameters
    ----------
    n : int or None
        At least 1.  None removes the setting.

    Raises
    ------
    CalcError : n is not such a number.

    Examples
    --------
    >>> cv.set_workers(1)
    >>> cv.set_workers(None)
    """
    global _most
    _most = None if n is None else checks.integer("set_workers: n", n, 1)


def default_team() -> int:
    """The largest team without an explicit ``workers=`` (CalcError: ``CALCVM_WORKERS`` is no number)."""
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
            f"the environment variable {VARIABLE} is {checks.shown(text)}: give a number of workers, 1 or more, or unset it"
        )
    return int(text)


def _of_openmp() -> int | None:
    """``OMP_NUM_THREADS``; of a list, which OpenMP has for nested teams, the first.  Invalid values are ignored, not refused."""
    text = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(text) if text.isdecimal() and int(text) > 0 else None
