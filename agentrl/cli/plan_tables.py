"""How `agentrl plan` shows a plan in a terminal: tables of figures, of forms, of a comparison and of a fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.markup import escape
from rich.table import Table

from agentrl.plan.figure import Figure, show
from agentrl.plan.report.tables import Rows

TELLING = 0.001
"""Relative difference from which a comparison shows a figure."""


def rows_table(title: str, rows: Rows) -> Table:
    head, *body = rows
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for at, column in enumerate(head):
        table.add_column(column, justify="left" if at == 0 or not column else "right")
    for row in body:
        table.add_row(*map(escape, row), style="bold" if "chosen" in row else None)
    return table


def figures_table(title: str, figures: Sequence[Figure], width: int) -> Table:
    """Names and numbers whole; of the formulas what `width` leaves room for."""
    rows = [(figure.name, show(figure), figure.formula) for figure in figures]
    name, value, formula = (max(map(len, column)) for column in zip(*rows, strict=True))
    name, value = max(name, 28), max(value, 14)
    cut = name + value + formula + 4 > width
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, show_header=False, expand=cut)
    table.add_column(no_wrap=True, min_width=name)
    table.add_column(justify="right", no_wrap=True, min_width=value)
    table.add_column(style="dim", overflow="ellipsis", no_wrap=True, ratio=1 if cut else None)
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def comparison_table(names: tuple[str, str], first: Mapping[str, Figure], second: Mapping[str, Figure]) -> Table:
    """Figures that both plans have and that differ."""
    table = Table(box=None, pad_edge=False)
    table.add_column("figure")
    for column in (*map(escape, names), "ratio"):
        table.add_column(column, justify="right")
    for name, one in first.items():
        other = second.get(name)
        if other is None or abs(other.value - one.value) <= TELLING * max(abs(one.value), abs(other.value)):
            continue
        ratio = f"{other.value / one.value:.3g} x" if one.value else ""
        table.add_row(escape(name), escape(show(one)), escape(show(other)), ratio)
    return table
