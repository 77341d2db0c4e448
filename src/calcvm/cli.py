"""The command ``calcvm``: `calcvm.commands` where the extra ``cli`` is installed, else a line that names it."""

from __future__ import annotations

import sys
from typing import NoReturn

from calcvm.errors import CalcError


def main() -> NoReturn:
    """Run the command line; bad input is one line on stderr and exit status 1."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        print(f'the command calcvm needs {error.name}: pip install "calcvm[cli]"', file=sys.stderr)
        sys.exit(2)
    from calcvm.commands import app

    try:
        app()
    except (CalcError, OSError, MemoryError) as error:  # of the last two such as a full disk
        print(f"calcvm: {error or type(error).__name__}", file=sys.stderr)
        sys.exit(1)
    sys.exit(0)
