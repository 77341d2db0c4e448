"""The experiments of the CalcGraph paper: sections 4.2 to 4.5, each beside torch and JAX at their best.

J. Lorentz, T. Hartmann, A. Moawad, F. Fouquet, D. Aouada, Y. Le Traon: CalcGraph: taming the high costs of deep
learning using models.  Software and Systems Modeling, 2022.  https://doi.org/10.1007/s10270-022-01052-7
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from bench.harness import Result

EXPERIMENTS = {"4.2": "accuracy", "4.3": "cost", "4.4": "scale", "4.5": "room"}


def main(quick: bool = False, data: str | Path | None = None, only: str | None = None) -> bool:
    """Run the experiments; True when every contestant computes the same.

    Parameters
    ----------
    data : path, optional
        Folder of MNIST's files, used in place of made-up data of their size.
    only : str, optional
        One experiment, such as "4.4" (nothing is stored then).
    """
    result = Result("paper", "The paper's experiments", quick or only is not None)
    found = import_module("bench.paper.samples").sources(data)
    for section, experiment in EXPERIMENTS.items():
        if only in (None, section):
            import_module(f"bench.paper.{experiment}").run(result, found, quick)
    return result.save()
