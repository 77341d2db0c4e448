"""Parse lines of the text into trees.  Nothing is executed; a line that is not a statement is rejected with its position."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

from calcvm.errors import CalcError
from calcvm.graph_text.words import BEFORE_NAMES, BEFORE_VALUES, CONSTANTS, SOURCES

TOKEN = re.compile(
    r"""(?P<space>\ +|\#.*)
    | (?P<number>-?(?:(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|(?:inf|nan)(?![\w.])))
    | (?P<name>[A-Za-z_]\w*(?:\.\w+)*)
    | (?P<text>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")
    | (?P<sign>[=()\[\]{},:%])""",
    re.VERBOSE | re.ASCII,
)
ESCAPE = re.compile(r"\\(?:([\\'\"])|([nrt])|x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8})|(.?))", re.ASCII)
CONTROL = {"n": "\n", "r": "\r", "t": "\t"}
DEEPEST = 70  # nested brackets: arrays have fewer axes
DIGITS = 4000  # of an integer: Python reads at most 4300
WINDOW = 100  # characters of a line shown in a message
CLOSING = {"(": ")", "[": "]", "{": "}"}


class Wrong(Exception):
    """An error in a line, with its position."""

    def __init__(self, at: int, why: str):
        super().__init__(why)
        self.at, self.why = at, why


@dataclass
class Token:
    kind: str  # number, name, text, sign; "end" after the last one
    text: str
    at: int


@dataclass
class Node:
    """A value: ``kind`` is "value" (a number or constant), "text", "name", "list", "tuple", "dict" or "call".

    items : elements of a list or tuple, or positional arguments of a call.
    pairs : keys and values of a dict, or named arguments of a call.
    """

    kind: str
    at: int
    value: Any = None
    items: list[Node] = field(default_factory=list)
    pairs: list[tuple[Node, Node]] = field(default_factory=list)


@dataclass
class Target:
    """A name that a line defines."""

    name: str
    unnamed: bool
    at: int


@dataclass
class Statement:
    """A line: its kind ("path", ..., "source" or "operator"), the names that it defines, and its right side.

    what : the kind of a source, or the name of an operator's type.
    name : the name of a path or layer, or of an operator if the line gives one.
    sizes, settings : of a source.
    call : of an operator or statement.
    flag : the word in parentheses after a path.
    """

    kind: str
    at: int
    targets: list[Target] = field(default_factory=list)
    what: str = ""
    name: str | None = None
    sizes: list[Node] = field(default_factory=list)
    settings: list[tuple[Node, Node]] = field(default_factory=list)
    call: Node | None = None
    flag: str = ""
    flag_at: int = 0


def shown(number: int, line: str, at: int, why: str) -> str:
    """A message on a position in a line: the number, the error, the line, and a caret under the position."""
    begin = max(0, at - WINDOW // 2) if len(line) > WINDOW else 0
    part = "".join(c if c.isprintable() else "?" for c in line[begin : begin + WINDOW])
    return f"line {number}, column {at + 1}: {why}\n    {part}\n    {' ' * (at - begin)}^"


def tokens(line: str) -> list[Token]:
    found, at = [], 0
    while at < len(line):
        match = TOKEN.match(line, at)
        if match is None:
            if line[at] in "'\"":
                raise Wrong(at, "the text that begins here does not end in this line: close its quotes")
            raise Wrong(
                at, f"{line[at]!r} is not a sign of the language: put names with signs in quotes, such as 'my name'"
            )
        if match.lastgroup != "space":
            found.append(Token(str(match.lastgroup), match[0], at))
        at = match.end()
    return [*found, Token("end", "", len(line.rstrip()))]


def unquoted(token: Token) -> str:
    def meant(escape: re.Match[str]) -> str:
        same, control, *codes, other = escape.groups()
        code = next(filter(None, codes), None)
        if code and int(code, 16) <= 0x10FFFF:
            return chr(int(code, 16))
        if code or other is not None:
            raise Wrong(
                token.at + 1 + escape.start(), f"{escape[0]} is not an escape sequence: write a backslash as \\\\"
            )
        return same or CONTROL[control]

    return ESCAPE.sub(meant, token.text[1:-1])


def statement(line: str) -> Statement | None:
    """The statement in a line; None if the line is empty or only a comment."""
    found = _Parser(tokens(line))
    return None if found.next.kind == "end" else found.statement()


class _Parser:
    def __init__(self, found: list[Token]):
        self.tokens, self.place, self.depth = found, 0, 0

    @property
    def next(self) -> Token:
        return self.tokens[self.place]

    def take(self) -> Token:
        token = self.next
        self.place += token.kind != "end"
        return token

    def fail(self, wanted: str) -> NoReturn:
        token = self.next
        raise Wrong(
            token.at, f"{wanted} is wanted here, not {repr(token.text) if token.text else 'the end of the line'}"
        )

    def sign(self, text: str) -> Token:
        if not self.at(text):
            self.fail(repr(text))
        return self.take()

    def at(self, text: str) -> bool:
        return self.next.kind == "sign" and self.next.text == text

    def name(self, what: str) -> tuple[str, int]:
        token = self.next
        if token.kind not in ("name", "text"):
            self.fail(f"the name of {what}")
        if token.kind == "name" and token.text in CONSTANTS:
            raise Wrong(
                token.at, f"{token.text} is a constant: as the name of {what} it must be in quotes, {token.text!r}"
            )
        self.take()
        name = token.text if token.kind == "name" else unquoted(token)
        if not name:
            raise Wrong(token.at, f"the name of {what} is empty")
        return name, token.at

    # ------------------------------------------------------------ statements
    def statement(self) -> Statement:
        token, after = self.next, self.tokens[min(self.place + 1, len(self.tokens) - 1)]
        word = token.text if token.kind == "name" else ""
        if word in BEFORE_NAMES and after.kind in ("name", "text"):
            self.take()
            name, at = self.name({"return": "the layer's result"}.get(word, f"the {word}"))
            made = Statement(word, at, name=name)
            if word == "path" and self.at("("):
                self.take()
                made.flag, made.flag_at = self.next.text, self.next.at
                self.take()
                self.sign(")")
            if word != "return":
                self.sign(":")
        elif word in BEFORE_VALUES and after.text == "(":
            self.take()
            made = Statement(word, token.at, call=self.call(Node("call", token.at, word)))
        else:
            made = self.definition()
        if self.next.kind != "end":
            self.fail("the end of the statement")
        return made

    def definition(self) -> Statement:
        targets = [self.target()]
        while self.at(","):
            self.take()
            targets.append(self.target())
        if not self.at("="):
            self.fail("'=', between results and operator,")
        self.take()
        at = self.next.at
        if self.next.kind == "name" and self.next.text in SOURCES and self.tokens[self.place + 1].text == "[":
            made = Statement("source", at, targets, self.take().text)
            made.sizes = self.series("]")
            while self.next.kind == "name":
                key = self.take()
                self.sign("=")
                made.settings.append((Node("name", key.at, key.text), self.value()))
            return made
        if self.next.kind not in ("name", "text"):
            self.fail(f"an operator such as add(x, y), or one of {', '.join(f'{kind}[...]' for kind in SOURCES)}")
        operator = self.take()
        what = operator.text if operator.kind == "name" else unquoted(operator)
        if not self.at("("):
            self.fail(
                f"'(' after the operator {what!r}"
                + (f", or '[' and its sizes, {what}[2, 3]," if what in SOURCES else "")
            )
        made = Statement("operator", at, targets, what, call=self.call(Node("call", at, what)))
        if self.next.kind == "name" and self.next.text == "as":
            self.take()
            made.name, _ = self.name("the operator")
        return made

    def target(self) -> Target:
        unnamed = self.at("%")
        self.place += unnamed
        return Target(*(name := self.name("a variable"))[:1], unnamed, name[1])

    # ------------------------------------------------------------ values
    def value(self) -> Node:
        token = self.next
        if token.kind == "sign" and token.text in CLOSING:
            kind = {"(": "tuple", "[": "list", "{": "dict"}[token.text]
            if kind == "dict":
                node = Node(kind, token.at)
                node.pairs = list(self.inside("}", self.pair))
                return node
            items = self.series(CLOSING[token.text])
            comma = self.tokens[self.place - 2].text == ","
            return items[0] if kind == "tuple" and len(items) == 1 and not comma else Node(kind, token.at, items=items)
        if token.kind == "number":
            self.take()
            whole = re.fullmatch(r"-?\d+", token.text)
            if whole and len(token.text) > DIGITS:
                raise Wrong(token.at, f"an integer of more than {DIGITS} digits")
            return Node("value", token.at, int(token.text) if whole else float(token.text))
        if token.kind == "text":
            self.take()
            return Node("text", token.at, unquoted(token))
        if token.kind == "name" and token.text in CONSTANTS:
            self.take()
            return Node("value", token.at, CONSTANTS[token.text])
        if token.kind != "name":
            self.fail("a value")
        self.take()
        node = Node("name", token.at, token.text)
        return self.call(Node("call", token.at, token.text)) if self.at("(") else node

    def inside(self, end: str, item: Callable[[], Any]) -> Iterator[Any]:
        """Items between brackets, separated by commas.  The next token is the opening bracket."""
        opening = self.take()
        self.depth += 1
        if self.depth > DEEPEST:
            raise Wrong(opening.at, f"brackets are nested {DEEPEST} deep")
        while not self.at(end):
            yield item()
            if not self.at(end):
                if not self.at(","):
                    self.fail(f"',' or {end!r}")
                self.take()
        self.take()
        self.depth -= 1

    def series(self, end: str) -> list[Node]:
        return list(self.inside(end, self.value))

    def pair(self) -> tuple[Node, Node]:
        key = self.value()
        self.sign(":")
        return key, self.value()

    def call(self, node: Node) -> Node:
        """The arguments in parentheses after a word: positional, then named."""
        if not self.at("("):
            self.fail(f"'(' behind {node.value!r}")

        def argument() -> None:
            key = self.next
            if (
                key.kind == "name"
                and self.tokens[self.place + 1].text == "="
                and self.tokens[self.place + 1].kind == "sign"
            ):
                self.take()
                self.take()
                if any(known.value == key.text for known, _ in node.pairs):
                    raise Wrong(key.at, f"{key.text}= is given twice")
                node.pairs.append((Node("name", key.at, key.text), self.value()))
            elif node.pairs:
                self.fail("a name with '=', as before,")
            else:
                node.items.append(self.value())

        for _ in self.inside(")", argument):
            pass
        return node


# ---------------------------------------------------------------- values of trees
def literal(node: Node) -> Any:
    """Numbers and texts, and tuples, lists and dictionaries of them."""
    if node.kind in ("value", "text"):
        return node.value
    if node.kind in ("list", "tuple"):
        items = [literal(item) for item in node.items]
        return items if node.kind == "list" else tuple(items)
    if node.kind == "dict":
        keys = [literal(key) for key, _ in node.pairs]
        for (key, _), k in zip(node.pairs, keys):
            if isinstance(k, (list, dict, tuple)):
                raise Wrong(key.at, "a key must be a number or a text")
        return dict(zip(keys, [literal(value) for _, value in node.pairs]))
    hint = f": a text must be in quotes, {node.value!r}" if node.kind == "name" else ""
    raise Wrong(node.at, f"a number, a text, or a tuple or list of them is wanted here, not {node.value!r}{hint}")


def title(line: str, name: str, version: int) -> None:
    """Check the first line of a text (Wrong: it is another)."""
    match = re.fullmatch(rf"{name} (\d{{1,9}}) *(?:#.*)?", line.rstrip(), re.ASCII)
    if match is None:
        raise Wrong(0, f"the text of a graph begins with the line {f'{name} {version}'!r}")
    if int(match[1]) != version:
        raise Wrong(
            len(name) + 1,
            f"the text has version {int(match[1])} of the language, and this calcvm reads version {version}: use the calcvm that "
            "wrote it, or write the graph again, by graph.text()",
        )


def error(number: int, line: str, wrong: Wrong) -> CalcError:
    return CalcError(shown(number, line, wrong.at, wrong.why))
