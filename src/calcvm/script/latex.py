"""Write equations in NumPy's notation as LaTeX."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

SIGNS = {ast.Add: "+", ast.Sub: "-", ast.Mult: r"\odot", ast.MatMult: r"\,", ast.BitAnd: r"\wedge", ast.BitOr: r"\vee", ast.BitXor: r"\oplus"}  # fmt: skip
COMPARED = {ast.Lt: "<", ast.LtE: r"\le", ast.Gt: ">", ast.GtE: r"\ge", ast.Eq: "=", ast.NotEq: r"\ne"}
RANK = {ast.Add: 3, ast.Sub: 3, ast.Mult: 4, ast.MatMult: 5, ast.BitAnd: 2, ast.BitOr: 1, ast.BitXor: 1}


def latex(equations: Sequence[tuple[str, str]]) -> str:
    """``$$...$$``, with one equation per line."""
    lines = [rf"{', '.join(map(_name, name.split(', ')))} &= {_expression(text)}" for name, text in equations]
    return "$$\\begin{aligned}\n" + " \\\\\n".join(lines) + "\n\\end{aligned}$$"


def _expression(text: str) -> str:
    return _said(ast.parse(text, mode="eval").body, 0)


def _name(text: str) -> str:
    """A letter, or d and a letter, with the rest as its subscript; words unchanged."""
    if found := re.fullmatch(r"(d?[A-Za-z])_?(\d*)", text):
        return found[1] + (f"_{{{found[2]}}}" if found[2] else "")
    return rf"\mathrm{{{text}}}".replace("_", r"\_")


def _number(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return _number(node.left) and _number(node.right)
    return isinstance(node, ast.Constant) or (isinstance(node, ast.Name) and node.id == "B")


def _said(node: ast.expr, least: int) -> str:
    """An expression, in parentheses if it binds less tightly than its context."""
    text, rank = _form(node)
    return text if rank >= least else rf"\left({text}\right)"


def _form(node: ast.expr) -> tuple[str, int]:
    if isinstance(node, ast.Name):
        return _name(node.id), 9
    if isinstance(node, ast.Constant):
        return rf"\mathrm{{{node.value}}}" if isinstance(node.value, str) else repr(node.value), 9
    if isinstance(node, ast.Tuple):
        return rf"\left({', '.join(_said(e, 0) for e in node.elts)}\right)", 9
    if isinstance(node, ast.UnaryOp):
        sign = "-" if isinstance(node.op, ast.USub) else r"\neg "
        return sign + _said(node.operand, 4), 3
    if isinstance(node, ast.BinOp):
        return _binary(node)
    if isinstance(node, ast.Compare):
        return f"{_said(node.left, 3)} {COMPARED[type(node.ops[0])]} {_said(node.comparators[0], 3)}", 2
    if isinstance(node, ast.Attribute):
        return (_said(node.value, 9) + r"^\top", 8) if node.attr == "T" else (rf"\mathrm{{{ast.unparse(node)}}}", 9)
    if isinstance(node, ast.Call):
        return _call(node), 9
    if isinstance(node, ast.Subscript):
        return f"{_said(node.value, 9)}\\left[\\texttt{{{ast.unparse(node.slice)}}}\\right]", 9
    return rf"\texttt{{{ast.unparse(node)}}}", 9


def _binary(node: ast.BinOp) -> tuple[str, int]:
    if isinstance(node.op, ast.Div):
        return rf"\frac{{{_said(node.left, 0)}}}{{{_said(node.right, 0)}}}", 5
    if isinstance(node.op, ast.Pow):
        return f"{_said(node.left, 9)}^{{{_said(node.right, 0)}}}", 8
    rank, sign = RANK[type(node.op)], SIGNS[type(node.op)]
    if isinstance(node.op, ast.Mult) and (_number(node.left) or _number(node.right)):
        rank, sign = RANK[ast.MatMult], SIGNS[ast.MatMult]
    more = isinstance(node.op, (ast.Sub, ast.MatMult))
    return f"{_said(node.left, rank)} {sign} {_said(node.right, rank + more)}", rank


def _call(node: ast.Call) -> str:
    args = ", ".join(_said(a, 0) for a in node.args)
    if isinstance(node.func, ast.Attribute) and not (
        isinstance(node.func.value, ast.Name) and node.func.value.id == "np"
    ):
        of, name = _said(node.func.value, 9), node.func.attr
        if name == "sum":
            return rf"\textstyle\sum_{{{args}}} {of}" if args else rf"\textstyle\sum {of}"
        return of if name in ("reshape", "astype") else rf"\operatorname{{{name}}}_{{{args}}} {of}"
    name = ast.unparse(node.func).removeprefix("np.").replace("_", r"\_")
    if name == "where":
        condition, x, y = (_said(a, 0) for a in node.args)
        return rf"\begin{{cases}}{x} & {condition}\\ {y}\end{{cases}}"
    if name == "abs":
        return rf"\left|{args}\right|"
    return rf"\operatorname{{{name}}}\left({args}\right)"
