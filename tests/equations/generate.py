"""Random equations: windows, data places, conditions, functions, every reduction, scans; ``generate(seed)`` draws one again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

LETTERS = "abcdefg"
FUNCTIONS = (
    "tanh({})",
    "sin({})",
    "exp({}/3)",
    "sigmoid({})",
    "|{}|",
    "relu({})",
    "softplus({})",
    "atan({})",
    "erf({})",
)
FUNCTIONS += (
    "log(1 + ({})^2)",
    "sqrt(1 + ({})^2)",
    "({})^2",
    "({})^3",
    "1/(2 + cos({}))",
    "max({}, 0.1)",
    "min(0.3, {})",
)
REDUCTIONS = ("sum", "mean", "max", "min", "logsumexp", "var", "prod")
MOST_TERMS = 250  # of all indexes together: the interpreter visits each


@dataclass
class Drawn:
    """An equation's text, its operands, those by which it can be derived, and, where it is a plain contraction, that of `numpy.einsum`."""

    text: str
    values: dict[str, np.ndarray]
    wrt: list[str]
    einsum: str = ""


def generate(seed: int) -> Drawn:
    return _Draw(np.random.default_rng(seed)).all()


class _Draw:
    def __init__(self, rng: np.random.Generator):
        self.rng = rng
        n = int(rng.integers(2, 8))
        most = max(2, min(4, int(MOST_TERMS ** (1 / n))))
        self.sizes = {v: int(rng.integers(1 if rng.random() < 0.1 else 2, most + 1)) for v in LETTERS[:n]}
        self.values: dict[str, np.ndarray] = {}
        self.evident: set[str] = set()  # indexes that a plain place says the range of
        self.met: dict[str, None] = {}
        self.over: list[str] = []  # that a reduction has, and no place outside it

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def one(self, of: Any) -> Any:
        return of[int(self.rng.integers(len(of)))]

    def some(self, of: Any, least: int, most: int) -> list[str]:
        k = min(len(of), int(self.rng.integers(least, most + 1)))
        return [str(v) for v in self.rng.permutation(list(of))[:k]]

    # ------------------------------------------------------------ parts
    def place(self, index: str, name: str) -> tuple[str, int]:
        """A place that has the index, and the extent of its axis."""
        n, kind = self.sizes[index], self.rng.random()
        if kind < 0.6:
            self.evident.add(index)
            return index, n
        others = [v for v in self.sizes if v != index and v not in self.over]
        if kind < 0.8 and others:
            other = self.one(others)
            self.met[other] = None
            s, d, p = (int(self.rng.integers(1, 4)) for _ in range(3))
            size = max(1, (n - 1) * s + (self.sizes[other] - 1) * d + 1 - int(self.rng.integers(0, 3)))
            return f"{index}*{s} - {p - 1} + {other}*{d}", size
        if kind < 0.85:
            return f"{n - 1} - {index}", n + int(self.rng.integers(-1, 2)) or 1
        if kind < 0.9:
            return f"({index} + 1)/2", max(1, n // 2)
        if kind < 0.95:
            return f"{index}//2", n
        size, ids = int(self.rng.integers(1, 5)), f"{name}{index}s"
        self.values[ids] = self.rng.integers(-1, size + 1, n)
        self.evident.add(index)
        return f"{ids}[{index}]", size

    def element(self, name: str, indexes: list[str], plain: bool) -> str:
        for v in indexes:
            self.met[v] = None
        if plain:
            self.evident |= {*indexes}
            places = [(v, self.sizes[v]) for v in indexes]
        else:
            places = [self.place(v, name) for v in indexes]
            if self.chance(0.05):
                places.append(("0", 2))
        self.values[name] = self.rng.normal(size=[n for _, n in places])
        beyond = self.one(["", "", "; 0.5", "; -2"]) if not plain else ""
        return f"{name}[{', '.join(p for p, _ in places)}{beyond}]"

    def condition(self, indexes: list[str]) -> str:
        v = self.one(indexes)
        if len(indexes) > 1 and self.chance(0.6):
            w = self.one([u for u in indexes if u != v])
            return self.one(
                [f"{v} <= {w}", f"{v} == {w}", f"{v} == {w} + 1", f"2*{v} == {w}", f"not ({v} > {w}) and {w} != 1"]
            )
        return self.one([f"{v} < {self.sizes[v] - 1}", f"{v} % 2 == 0 or {v} == 1", f"{v} != 0", f"{v} == 1"])

    # ------------------------------------------------------------ the whole
    def all(self) -> Drawn:
        plain = self.chance(0.25)
        names = list("xyz")[: int(self.rng.integers(1, 4))]
        elements = [self.element(name, self.some(self.sizes, 1, 3), plain) for name in names]
        einsum = ",".join(e[2:-1].replace(", ", "") for e in elements) if plain else ""
        met = [*self.met]
        body = "*".join(elements) if plain else self.body(elements, met)
        over = self.over = self.some(met, 1, min(4, len(met)))
        kept = [v for v in met if v not in over]
        how = "sum" if plain or self.chance(0.4) else self.one(REDUCTIONS)
        value = f"{how}[{','.join(map(self.said, over))}] {body if plain else f'({body})'}"
        if plain:
            text = self.equation("r", kept, value)
            return Drawn(text, self.values, names, f"{einsum}->{''.join(kept)}")
        if self.chance(0.5):
            value = self.one(FUNCTIONS).format(value)
        if kept and self.chance(0.3):
            more = self.element("u", self.some(kept, 1, 2), False)
            value += f" + {more}*0.5"
            names.append("u")
            kept = [v for v in self.met if v not in over]
        text = self.equation("r", kept, value)
        if kept and self.chance(0.4):
            text += f"; {self.second(kept)}"
        elif self.chance(0.1):
            text += (
                "; s = 2*r*r"
                if not kept
                else f"; s = {self.one(['sum', 'mean'])}[{','.join(kept)}] r[{','.join(kept)}]^2"
            )
        return Drawn(text, self.values, names)

    def body(self, elements: list[str], met: list[str]) -> str:
        parts = [self.one(FUNCTIONS).format(e) if self.chance(0.3) else e for e in elements]
        out = parts[0]
        for part in parts[1:]:
            out = f"{out}{self.one(['*', '*', ' + ', ' - '])}{part}"
        if self.chance(0.2):
            out = f"where({self.condition(met)}, {out}, {self.one(['0', '0.3', parts[0]])})"
        if self.chance(0.1):
            out = f"({out})*({self.one(met)} + 1)"
        if self.chance(0.15):
            out = self.one(FUNCTIONS).format(out)
        return out

    def second(self, kept: list[str]) -> str:
        own = f"r[{','.join(kept)}]"
        along = self.one(kept)
        before = [f"{v} {self.one('-')} 1" if v == along else v for v in kept]
        match int(self.rng.integers(0, 5)):
            case 0:
                return f"s[{','.join(kept)}] = s[{', '.join(before)}]*{self.one(['0.5', f'tanh({own})'])} + {own}"
            case 1:
                behind = [p.replace(" - ", " + ") for p in before]
                return f"s[{','.join(kept)}] = sin(s[{', '.join(behind)}; 0.2]) + {own}"
            case 2:
                return f"s[{','.join(kept)}] = {own} - logsumexp[{along}_] r[{','.join(f'{v}_' if v == along else v for v in kept)}]"
            case 3:
                return f"s[{','.join(kept)}] = {own}*r[{', '.join(before)}]"
            case _:
                return f"s = sum[{','.join(kept)}] {own}*tanh({own})"

    def equation(self, name: str, kept: list[str], value: str) -> str:
        return f"{name}[{','.join(map(self.said, kept))}] = {value}" if kept else f"{name} = {value}"

    def said(self, index: str) -> str:
        return index if index in self.evident and self.chance(0.7) else f"{index}<{self.sizes[index]}"
