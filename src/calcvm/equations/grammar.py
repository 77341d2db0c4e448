"""The parser: texts of equations become trees.

```
program    = equation {";" equation}
equation   = name ["[" [index {"," index}] "]"] ("=" | "+=" | "-=" | "*=") value
index      = name ["<" sum]
value      = and {"or" and};  and = truth {"and" truth};  truth = ["not"] relation
relation   = sum [("==" | "!=" | "<" | "<=" | ">" | ">=") sum]
sum        = product {("+" | "-") product}
product    = factor {("*" | "/" | "//" | "%") factor}
factor     = "-" factor | primary ["^" factor]
primary    = number | "inf" | name | name "[" place {"," place} [";" number] "]" | function "(" value {"," value} ")"
           | reduction "[" index {"," index} "]" product | "(" value ")" | "|" sum "|"
```
A reduction takes the product that follows it: ``sum[i] x[i]*y[i] + z`` is ``(sum[i] x[i]*y[i]) + z``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection

from calcvm.equations.tree import (
    COMPARISONS,
    REDUCTIONS,
    Call,
    Element,
    Equation,
    Index,
    Name,
    Node,
    Number,
    Reduction,
    said_beyond,
)
from calcvm.errors import CalcError

TOKEN = re.compile(
    r"(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)|(?P<name>[^\W\d]\w*)|(?P<sign><=|>=|==|!=|\+=|-=|\*=|//|\S)"
)
NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
WORDS = ("and", "or", "not", "inf", "where")
SIGNS = set("<=|>=|==|!=|+=|-=|*=|//".split("|")) | set("+-*/%^()[],;<>=|")
PRODUCT = ("*", "/", "//", "%")
MOST_LEVELS, MOST_TERMS = 40, 100
MOST_DIGITS, MOST_SHOWN = 309, 1000  # digits of a number; characters of a line shown in an error
ASSIGNMENTS = {"=": "", "+=": "+", "-=": "-", "*=": "*"}


def wrong(text: str, at: int, what: str, error: type[CalcError] = CalcError) -> CalcError:
    """An error with a caret below the wrong place in the text."""
    if at < 0 or not text:
        return error(f"{what}, in the equation {text!r}" if text else what)
    start = text.rfind("\n", 0, at) + 1
    line = text[start:].split("\n", 1)[0]
    if len(line) > MOST_SHOWN:  # only the part around the place
        start += (skipped := max(0, at - start - MOST_SHOWN // 2))
        line = line[skipped : skipped + MOST_SHOWN]
    return error(f"{what}\n    {line}\n    {' ' * (at - start)}^")


def read(text: str, arrays: Collection[str] = ()) -> tuple[Equation, ...]:
    """The equations of a text, which are separated by ";".

    arrays : names of operands.  An operand named like a reduction, such as ``mean``, hides it; so does a result.

    Raises
    ------
    CalcError : a syntax error; the message says what is expected, with a caret at the place.
    """
    if not isinstance(text, str):
        raise CalcError(f"an equation is a text, such as 'y[b,o] = sum[i] x[b,i]*w[i,o]', not {type(text).__name__}")
    return _Reader(text, arrays).program()


def read_declarations(text: str, arrays: Collection[str] = ()) -> tuple[Equation, ...]:
    """Declarations of arrays' axes, ``x[n,i<I,c]``, optionally with a number, the array's value if it is left out."""
    return _Reader(text, arrays).program(declared=True) if text else ()


class _Reader:
    def __init__(self, text: str, arrays: Collection[str]):
        self.text, self.arrays = text, {*arrays}
        self.tokens = [(m.lastgroup, m.group(), m.start()) for m in TOKEN.finditer(text)]
        self.place = 0
        self.depth = 0  # of nested operands; it is bounded, and so is the depth of the tree

    # ------------------------------------------------------------ tokens
    @property
    def next(self) -> str:
        return self.tokens[self.place][1] if self.place < len(self.tokens) else ""

    @property
    def at(self) -> int:
        return self.tokens[self.place][2] if self.place < len(self.tokens) else len(self.text.rstrip())

    def wrong(self, what: str, at: int | None = None) -> CalcError:
        return wrong(self.text or " ", self.at if at is None else at, what)

    def wanted(self, what: str) -> CalcError:
        if self.next and self.next not in SIGNS and not re.match(r"\w", self.next):
            return self.wrong(f"{self.next!r} is no part of an equation")
        return self.wrong(f"{what} is wanted here, not {self.next!r}" if self.next else f"{what} is wanted at the end")

    def has(self, *signs: str) -> str:
        """The next token, consumed, if it is one of these; else ""."""
        found = self.next
        if found not in signs or not found:
            return ""
        self.place += 1
        return found

    def take(self, sign: str) -> None:
        if not self.has(sign):
            raise self.wanted(repr(sign))

    def name(self, what: str) -> str:
        found = self.next
        if not NAME.fullmatch(found):
            raise self.wanted(what)
        if found in WORDS or found in REDUCTIONS and found not in self.arrays:
            raise self.wrong(f"{found!r} is a word of the language: {what} must have another name")
        self.place += 1
        return found

    def several(self, one: Callable[[], Node | Index], end: str) -> tuple:
        """One or more items, separated by commas, up to the token ``end``."""
        found = [one()]
        while self.has(","):
            found.append(one())
        if not self.next == end:
            raise self.wanted(f"',' or {end!r}")
        return tuple(found)

    # ------------------------------------------------------------ grammar
    def program(self, declared: bool = False) -> tuple[Equation, ...]:
        found = [self.equation(declared)]
        while self.has(";"):
            if not self.next:
                break
            found.append(self.equation(declared))
        if self.next:
            raise self.wanted("an operator or ';'")
        return tuple(found)

    def equation(self, declared: bool) -> Equation:
        at = self.at
        if self.next in REDUCTIONS:
            self.arrays.add(self.next)
        name = self.name("the name of a result")
        kept: tuple[Index, ...] | None = None
        if self.has("["):
            kept = () if self.next == "]" else self.several(self.index, "]")
            self.take("]")
        sign = self.next
        if declared and sign in ("", ";"):
            return Equation(name, kept, Number(0), self.text, at)
        if not self.has(*ASSIGNMENTS):
            raise self.wanted("'='")
        value = self.value()
        if operator := ASSIGNMENTS[sign]:
            before = Element(name, tuple(Name(i.name, i.at) for i in kept), at=at) if kept else Name(name, at)
            value = Call(operator, (before, value), at)
        return Equation(name, kept, value, self.text, at)

    def index(self) -> Index:
        at = self.at
        name = self.name("an index")
        if not name[0].islower():
            raise self.wrong(
                f"an index is lowercase: its capital is its extent, as {name.upper()!r} of {name.lower()!r}", at
            )
        return Index(name, self.sum() if self.has("<") else None, at)

    def deeper(self) -> None:
        self.depth += 1
        if self.depth > MOST_LEVELS:
            raise self.wrong(f"more than {MOST_LEVELS} nested levels: name a part of it in a separate equation")

    def value(self) -> Node:
        return self.chain(("or",), lambda: self.chain(("and",), self.truth))

    def chain(self, signs: tuple[str, ...], operand: Callable[[], Node]) -> Node:
        """A left-associative chain of operators of one level."""
        node, n = operand(), 0
        while sign := self.has(*signs):
            at, n = self.tokens[self.place - 1][2], n + 1
            if n > MOST_TERMS:
                raise self.wrong(
                    f"more than {MOST_TERMS} {signs[0]} in a row: name a part of it in a separate equation"
                )
            node = Call(sign, (node, operand()), at)
        return node

    def truth(self) -> Node:
        at = self.at
        if self.has("not"):
            self.deeper()
            negated = Call("not", (self.truth(),), at)
            self.depth -= 1
            return negated
        left = self.sum()
        at = self.at
        if not (sign := self.has(*COMPARISONS)):
            node: Node = left
        else:
            node = Call(sign, (left, self.sum()), at)
            if self.next in COMPARISONS:
                raise self.wrong("comparisons do not chain: write a < b and b < c")
        if self.next == "=":
            raise self.wrong("'=' sets a result: write == to compare, and ; before a further equation")
        return node

    def sum(self) -> Node:
        return self.chain(("+", "-"), self.product)

    def product(self) -> Node:
        return self.chain(PRODUCT, self.factor)

    def factor(self) -> Node:
        self.deeper()
        at = self.at
        if self.has("-"):
            of = self.factor()
            node: Node = Number(-of.value, at) if isinstance(of, Number) else Call("neg", (of,), at)
        else:
            node = self.primary()
            at = self.at
            if self.has("^"):
                node = Call("^", (node, self.factor()), at)
        self.depth -= 1
        return node

    def primary(self) -> Node:
        at, token = self.at, self.next
        kind = self.tokens[self.place][0] if token else ""
        if kind == "number":
            self.place += 1
            if self.next and self.tokens[self.place][0] == "name" and self.next not in WORDS:
                raise self.wrong(f"an operator is wanted between {token} and {self.next}, such as {token}*{self.next}")
            if len(token) > MOST_DIGITS:
                raise self.wrong(f"a number of {len(token)} characters: {MOST_DIGITS} are the most", at)
            whole = token.isdigit() and int(token) < 2**63  # larger numbers are no 64-bit integers
            return Number(int(token) if whole else float(token), at)
        if self.has("inf"):
            return Number(math.inf, at)
        if self.has("("):
            node = self.value()
            self.take(")")
            return node
        if self.has("|"):
            node = self.sum()
            self.take("|")
            return Call("abs", (node,), at)
        if token in REDUCTIONS and token not in self.arrays:
            self.place += 1
            return self.reduction(token, at)
        if token == "where":
            self.place += 1
            if self.next != "(":
                raise self.wanted("'(' after where, as in where(condition, a, b),")
            return self.function(token, at)
        name = self.name("a number, a name or '('")
        if self.next == "(":
            return self.function(name, at)
        return self.element(name, at) if self.has("[") else Name(name, at)

    def reduction(self, how: str, at: int) -> Node:
        if self.next == "(":
            if how in ("max", "min"):
                return self.function(how, at)
            raise self.wrong(f"indexes of {how} stand in brackets, such as {how}[i] x[i]")
        self.take("[")
        indexes = self.several(self.index, "]")
        self.take("]")
        if not self.next:
            raise self.wanted(f"what {how} is of")
        return Reduction(how, indexes, self.product(), at)

    def function(self, name: str, at: int) -> Node:
        self.take("(")
        arguments = self.several(self.value, ")")
        self.take(")")
        return Call(name, arguments, at)

    def element(self, array: str, at: int) -> Node:
        if self.next == "]":
            raise self.wrong(f"an array without axes is read without brackets: {array}")
        places = [self.sum()]
        while self.has(","):
            places.append(self.sum())
        beyond = 0.0
        if self.has(";"):
            start = self.at
            value = self.factor()
            if not isinstance(value, Number):
                raise self.wrong(f"the value of {array} beyond its ends is a number, such as 0 or -inf", start)
            beyond = said_beyond(value.value, tuple(places))
        if self.next != "]":
            raise self.wanted("',' or ']'")
        self.take("]")
        return Element(array, tuple(places), beyond, at)
