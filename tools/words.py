"""Check the English of docs, comments, docstrings and messages: what CONTRIBUTING's list of words says, and long sentences.

python tools/words.py               # print what is wrong, as file:line: found -> say (exit status 1 if there is any)
python tools/words.py FILE ...      # of these files alone
python tools/words.py --lengths     # the mean length of the sentences of each page
"""

from __future__ import annotations

import argparse
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
# What is read; pages that a program writes, and history, are not.
PAGES = ("*.md", "docs/**/*.md")
CODE = ("src/**/*.py", "tools/*.py", "bench/**/*.py", "examples/*.py")
LEFT_OUT = ("docs/operators.md", "CHANGELOG.md", "tools/words.py")
LONGEST = 40  # words of a sentence of a page, between semicolons

# (what is not written, what is)
WORDS = (
    (r"\b(made|make|makes|making) (it |them |values |that |these )?(once more|again)\b", "recomputed, recompute"),
    (
        r"\bof (one's|your|their|its|a user's|users'|the user's|my|our) own\b",
        "custom, own: 'its own heap', 'a custom layer'",
    ),
    (
        r"\bwho(ever)? (asks|asked|wants|wanted|waits|calls|reads|writes|uses|takes|trains|knows)\b",
        "the caller, the reader",
    ),
    (r"\bas ever\b", "as usual"),
    (r"\b(is|are|was|were|be|being|been) (told|asked)\b", "say who does what: predicts, gets, requests, reports"),
    (r"\bdear(er|est)?\b", "expensive"),
    (r"\b(nobody|somebody|whoever)\b", "nothing, no thread, the caller: name what it is"),
    (r"(?:^|[.:;] +)Of (a|an|the|all|each|what|these|those|its|one|two|several|[A-Z])", "begin with the subject"),
    (
        r"\b(one|two|an?|a [a-z]+) an? (row|file|batch|model|program|step|call|path|worker|process|device|team|round|epoch|line"
        r"|statement|layer|sample|thread|value|operator|family|device|kernel)\b",
        "per: 'one per row'",
    ),
    (r"\bin vain\b", "without use, unused"),
    (r"\banew\b", "again"),
    (r"\bthereby|therein|thereof|hence\b", "so"),
    (r"\bwhat is (needed|wanted|asked|said|told) (at least|at most)\b", "the minimum, the maximum"),
)
PATTERNS = [
    (re.compile(pattern, re.MULTILINE | (0 if "[A-Z]" in pattern else re.IGNORECASE)), say) for pattern, say in WORDS
]


def files(given: Sequence[str] = ()) -> list[Path]:
    """What is checked, in order."""
    if given:
        return [Path(name).resolve() for name in given]
    found = {path for pattern in (*PAGES, *CODE) for path in ROOT.glob(pattern)}
    return sorted(path for path in found if path.relative_to(ROOT).as_posix() not in LEFT_OUT)


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Line numbers and texts: paragraphs of a page without its code, comments and texts of a module."""
    text = path.read_text("utf-8")
    if path.suffix == ".md":
        text = re.sub(r"^```.*?^```", lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)
        for m in re.finditer(r"[^\n]+(?:\n[^\n]+)*", text):
            yield text.count("\n", 0, m.start()) + 1, m[0]
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            yield token.start[0], token.string


def problems(path: Path) -> Iterator[tuple[int, str, str]]:
    """Line, what stands there, and what to say."""
    for line, text in prose(path):
        plain = re.sub(r"`[^`]*`", "``", text)
        for pattern, say in PATTERNS:
            for m in pattern.finditer(plain):
                yield line + plain.count("\n", 0, m.start()), m[0].strip(), say
        for words in sentences(plain.replace(";", ".")) if path.suffix == ".md" else ():
            if len(words) > LONGEST:
                yield line, f"{' '.join(words[:8])} ... ({len(words)} words)", "split the sentence"


def sentences(text: str) -> list[list[str]]:
    """The sentences of a paragraph; a row of a table or an item of a list is at least one."""
    lines = re.sub(r"\n(?=\s*([-*|#>]|\d+\. ))", "\n\n", text)
    parts = [part for block in lines.split("\n\n") for part in re.split(r"(?<=[.!?])\s+", block.replace("\n", " "))]
    found = [re.findall(r"[\w`'%.-]*\w[\w`'%.-]*", part) for part in parts if not re.match(r"\s*[|#]", part)]
    return [words for words in found if len(words) > 2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--lengths", action="store_true", help="print the mean length of each page's sentences")
    given = parser.parse_args()
    if given.lengths:
        for path in files(given.files):
            if path.suffix == ".md":
                found = [len(words) for _, text in prose(path) for words in sentences(text)]
                print(f"{sum(found) / max(len(found), 1):5.1f}  {path.relative_to(ROOT)}  ({sum(found)} words)")
        return 0
    wrong = 0
    for path in files(given.files):
        for line, found, say in problems(path):
            print(f"{path.relative_to(ROOT)}:{line}: {found!r} -> {say}")
            wrong += 1
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
