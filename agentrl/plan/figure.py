"""A number that can say where it comes from. Every computed value of this room is a `Figure`.

A figure is made by one plain function with explicit inputs, which are figures or given values themselves, so that
`explain` can walk from any result back to the data sheets and settings that it rests on. Invariant: `formula` is
words for people and is never evaluated; the function beside it is what computes `value`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from agentrl.core.errors import ConfigError


@dataclass(frozen=True)
class Input:
    """A given value: a setting, a data-sheet entry, a model's shape."""

    name: str
    """snake_case, with the unit as suffix where there is one."""
    value: float
    unit: str = ""
    source: str = "setting"


@dataclass(frozen=True)
class Figure:
    """A computed value."""

    name: str
    value: float
    unit: str
    formula: str
    """In terms of the inputs' names."""
    inputs: tuple[Quantity, ...] = ()
    source: str = "definition"
    """Paper, data sheet or manual that the formula comes from."""

    def walk(self) -> Iterator[Quantity]:
        """This figure and all that it rests on, each name once, breadth first."""
        seen: set[str] = set()
        row: list[Quantity] = [self]
        while row:
            for quantity in row:
                if quantity.name not in seen:
                    seen.add(quantity.name)
                    yield quantity
            row = [i for q in row if isinstance(q, Figure) for i in q.inputs if i.name not in seen]


Quantity: TypeAlias = Figure | Input


def total(name: str, unit: str, parts: Iterable[Quantity]) -> Figure:
    """The sum of parts that share a unit."""
    parts = tuple(parts)
    return Figure(name, sum(part.value for part in parts), unit, " + ".join(part.name for part in parts), parts)


def share_of(name: str, part: Quantity, whole: Quantity) -> Figure:
    return Figure(name, part.value / whole.value, "share", f"{part.name} / {whole.name}", (part, whole))


def find(figures: Iterable[Figure], name: str) -> Quantity:
    """The quantity called `name` among figures and all that they rest on. ConfigError names the nearest one."""
    known: dict[str, Quantity] = {}
    for figure in figures:
        for quantity in figure.walk():
            known.setdefault(quantity.name, quantity)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        raise ConfigError(f"no figure {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    return known[name]


def explain(quantity: Quantity) -> str:
    """Formula, numbers put in and source of a quantity, then of all that it rests on, indented by depth."""
    lines: list[str] = []
    seen: set[str] = set()

    def visit(item: Quantity, depth: int) -> None:
        pad = "  " * depth
        lines.append(f"{pad}{item.name} = {show(item)}")
        if not isinstance(item, Figure):
            lines[-1] += f"   <- {item.source}"
            return
        if item.name in seen:
            lines[-1] += "   (above)"
            return
        seen.add(item.name)
        lines.append(f"{pad}  = {item.formula}   <- {item.source}")
        for part in item.inputs:
            visit(part, depth + 1)

    visit(quantity, 0)
    return "\n".join(lines)


_SCALES = ((1e24, "Y"), (1e21, "Z"), (1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))
_LONG_S = 1e5
"""Seconds from which days are easier to read."""
_SCALED = ("B", "FLOP", "B/s", "FLOP/s", "tokens")


def show(quantity: Quantity) -> str:
    """Value and unit for people: `9.33 TB`, `35.6 ms`, `13.2 %`."""
    value, unit = quantity.value, quantity.unit
    if unit == "share":
        return f"{100 * value:.3g} %"
    if unit == "s" and 0 < abs(value) < 1:
        return f"{1000 * value:.3g} ms"
    if unit == "s" and abs(value) >= _LONG_S:
        return f"{value / 86_400:,.3g} days" if value < 1000 * 86_400 else f"{value / 86_400:,.0f} days"
    if unit in _SCALED:
        for scale, prefix in _SCALES:
            if abs(value) >= scale:
                return (
                    f"{value / scale:.3g} {prefix}{unit}"
                    if unit != "tokens"
                    else f"{value / scale:.3g} {prefix} tokens"
                )
    number = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{number} {unit}".rstrip()
