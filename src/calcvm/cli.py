"""The command ``calcvm``: `calcvm.commands` if the extra ``cli`` is installed, else only ``info`` and a hint to install it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn

from calcvm.errors import CalcError


def main() -> NoReturn:
    """Run the command line.  Bad input gives one line on stderr and exit status 1."""
    run: Callable[[], object]
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        from calcvm import __version__, report

        without: dict[str, Callable[[], object]] = {
            "info": report.info,
            "--version": lambda: print(f"calcvm {__version__}"),
        }
        if sys.argv[1:] not in [[name] for name in without]:
            print(
                f'the command calcvm needs {error.name}: pip install "calcvm[cli]" (without it: calcvm info)',
                file=sys.stderr,
            )
            sys.exit(2)
        run = without[sys.argv[1]]
    else:
        from calcvm.commands import app as run

    try:
        run()
    except (CalcError, OSError, MemoryError) as error:  # OSError, for example, if a disk is full
        print(f"calcvm: {error or type(error).__name__}", file=sys.stderr)
        sys.exit(1)
    sys.exit(0)
