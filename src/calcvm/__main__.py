"""``python -m calcvm``: the same as the command ``calcvm``."""

from calcvm.cli import main

main()
