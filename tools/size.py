"""Count the lines of code of src/calcvm as tinygrad's sz.py does: without comments, docstrings and blank lines.

python tools/size.py            # a line per room, and the total of the product
python tools/size.py --check    # exit status 1 if the total is above MOST

The lines of `calcvm.testing` are shown apart: stand-ins for hardware are not part of the product.
A change that needs more lines than MOST raises it, and its commit says why.
"""

from __future__ import annotations

import argparse
import sys
import token
import tokenize
from collections import Counter
from pathlib import Path

try:
    from tools.rooms import ROOT, module_of, room_of
except ImportError:  # run as a file
    from rooms import ROOT, module_of, room_of  # type: ignore[import-not-found,no-redef]

MOST = 69_280
KINDS = (
    token.OP,
    token.NAME,
    token.NUMBER,
    token.STRING,
    token.FSTRING_MIDDLE if sys.version_info >= (3, 12) else token.STRING,
)


def lines_of(path: Path) -> int:
    """Lines on which there is code."""
    with tokenize.open(path) as file:
        tokens = [t for t in tokenize.generate_tokens(file.readline) if t.type in KINDS and not is_docstring(t)]
    return len({line for t in tokens for line in range(t.start[0], t.end[0] + 1)})


def is_docstring(t: tokenize.TokenInfo) -> bool:
    return t.type == token.STRING and t.string.startswith('"""') and t.line.strip().startswith('"""')


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="print one line; exit status 1 if there are too many")
    check = parser.parse_args().check
    rooms: Counter[str] = Counter()
    for path in ROOT.rglob("*.py"):
        rooms[room_of(module_of(path, ROOT)) or "calcvm"] += lines_of(path)
    testing = rooms.pop("testing")
    total = sum(rooms.values())
    if not check:
        for room, lines in rooms.most_common():
            print(f"{lines:>7,}  {room}")
        print(f"{testing:>7,}  testing (not counted)")
    print(f"{total:>7,}  lines of code; at most {MOST:,}")
    if check and total > MOST:
        print("too many: make the change smaller, or raise MOST in tools/size.py and say why in the commit")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
