"""Inline SVG: shapes, text and axes with round numbers. Used by the pictures of the report.

Invariant: dark text on white, every axis with its unit, nothing fetched from anywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from html import escape
from typing import Literal

INK, FAINT, GRID = "#1f2328", "#57606a", "#e3e6ea"
BLUE, LIGHT_BLUE, ORANGE, AMBER = "#2563a8", "#9cc3e6", "#d9730d", "#e9b44c"
GREEN, LIGHT_GREEN, PURPLE, TEAL = "#2e8b57", "#a5d6b7", "#7d5ba6", "#2a9d9d"
RED, GREY, IDLE = "#b3372f", "#8a8f98", "#eceff2"
PALE = (LIGHT_BLUE, LIGHT_GREEN, AMBER, IDLE)
Anchor = Literal["start", "middle", "end"]


def ink_on(fill: str) -> str:
    """The colour of words that stand on a shape."""
    return INK if fill in PALE else "white"


@dataclass(frozen=True, slots=True)
class Scale:
    """From values to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low
        return self.start + (self.end - self.start) * ((value - self.low) / span if span else 0.0)

    def ticks(self, about: int = 6) -> list[float]:
        return ticks(self.low, self.high, about)


def ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Round numbers within [low, high], about this many."""
    if high <= low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(step * at, 12) for at in range(first, math.floor(high / step + 1e-9) + 1)]


def label(value: float) -> str:
    """A number as an axis shows it."""
    if value == 0 or 0.01 <= abs(value) < 10_000:
        return f"{value:,.4g}"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:,.4g}{letter}"
    return f"{value:.1e}"


@dataclass(slots=True)
class Drawing:
    width: float
    height: float
    title: str
    """Read aloud instead of the picture."""
    _parts: list[str] = field(default_factory=list)

    def rect(
        self, x: float, y: float, width: float, height: float, fill: str, tip: str = "", stroke: str = "white"
    ) -> None:
        inner = f"<title>{escape(tip)}</title>" if tip else ""
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{max(height, 0):.1f}" fill="{fill}" '
            f'stroke="{stroke}">{inner}</rect>'
        )

    def line(
        self, x1: float, y1: float, x2: float, y2: float, stroke: str = GRID, width: float = 1, dash: str = ""
    ) -> None:
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self._parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}" '
            f'stroke-width="{width}"{dashes}/>'
        )

    def path(self, points: list[tuple[float, float]], stroke: str, width: float = 2, dash: str = "") -> None:
        if not points:
            return
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        steps = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(f'<polyline points="{steps}" fill="none" stroke="{stroke}" stroke-width="{width}"{dashes}/>')

    def dot(self, x: float, y: float, fill: str, tip: str = "") -> None:
        inner = f"<title>{escape(tip)}</title>" if tip else ""
        self._parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{fill}" stroke="white">{inner}</circle>')

    def text(
        self, x: float, y: float, words: str, anchor: Anchor = "start", fill: str = INK, size: int = 13,
        bold: bool = False, turn: bool = False,
    ) -> None:  # fmt: skip
        weight = ' font-weight="600"' if bold else ""
        rotate = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turn else ""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}" font-size="{size}"{weight}{rotate}>'
            f"{escape(words)}</text>"
        )

    def x_axis(self, scale: Scale, top: float, bottom: float, words: str, about: int = 8) -> None:
        for tick in scale.ticks(about):
            self.line(scale(tick), top, scale(tick), bottom)
            self.text(scale(tick), bottom + 18, label(tick), "middle", FAINT, 12)
        self.text((scale.start + scale.end) / 2, bottom + 38, words, "middle", INK, 13)

    def y_axis(self, scale: Scale, left: float, right: float, words: str, about: int = 5) -> None:
        for tick in scale.ticks(about):
            self.line(left, scale(tick), right, scale(tick))
            self.text(left - 8, scale(tick) + 4, label(tick), "end", FAINT, 12)
        self.text(left - 52, (scale.start + scale.end) / 2, words, "middle", INK, 13, turn=True)

    def legend(self, x: float, y: float, entries: dict[str, str], width: float) -> float:
        """Swatches by name, as many a row as fit into `width`; returns the y below."""
        at = x
        for name, colour in entries.items():
            needed = 26 + 7.2 * len(name)
            if at + needed > x + width and at > x:
                at, y = x, y + 20
            self.rect(at, y - 10, 13, 13, colour)
            self.text(at + 18, y + 1, name, "start", INK, 12)
            at += needed
        return y + 20

    def svg(self) -> str:
        return (
            f'<svg role="img" viewBox="0 0 {self.width:.0f} {self.height:.0f}" width="{self.width:.0f}" '
            f'xmlns="http://www.w3.org/2000/svg"><title>{escape(self.title)}</title>{"".join(self._parts)}</svg>'
        )
