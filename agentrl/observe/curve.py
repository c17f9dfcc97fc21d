"""The learning curve as a picture. Drawn by the report and by `agentrl runs plot`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, GREY = "#2563a8", "#d9730d", "#2e8b57", "#8a8f98"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A success rate on held-out tasks."""

    step: float
    """Training steps behind the policy that was evaluated."""
    rate: float
    tasks: int

    @property
    def spread(self) -> float:
        """Half the width of the 95 percent interval (Wilson) of the rate."""
        if not self.tasks:
            return 0.0
        n, p, z = self.tasks, self.rate, 1.96
        return z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))


@dataclass(frozen=True, slots=True)
class Curve:
    """What the picture shows."""

    title: str
    steps: Sequence[float]
    rewards: Sequence[float]
    """Mean reward of each step's samples."""
    evaluations: Sequence[Evaluation]
    lag: Sequence[float] = ()
    """Mean lag of each step; empty leaves the lower panel out."""


def draw(curve: Curve, path: Path) -> None:
    """Write the picture as PNG; needs no display."""
    matplotlib.use("Agg")
    figure = Figure(figsize=(8, 5), dpi=130, layout="constrained")
    if curve.lag:
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
        _draw_lag(lower, curve)
        lower.set_xlabel("training step")
    else:
        upper = figure.subplots()
        upper.set_xlabel("training step")
    _draw_rewards(upper, curve)
    figure.savefig(path, format="png")


def _draw_rewards(axes: Axes, curve: Curve) -> None:
    axes.plot(curve.steps, curve.rewards, color=BLUE, alpha=0.3, linewidth=1)
    axes.plot(
        curve.steps, _smooth(curve.rewards), color=BLUE, linewidth=2, label="training reward (thin: step, thick: mean)"
    )
    if curve.evaluations:
        at = [evaluation.step for evaluation in curve.evaluations]
        rates = [evaluation.rate for evaluation in curve.evaluations]
        axes.errorbar(
            at, rates, yerr=[evaluation.spread for evaluation in curve.evaluations],
            fmt="o", color=ORANGE, markersize=7, capsize=4, linewidth=1.5, zorder=5,
            label=f"success on {curve.evaluations[0].tasks} held-out tasks (95 %)",
        )  # fmt: skip
        for evaluation in curve.evaluations:
            axes.annotate(
                f"{evaluation.rate:.2f}", (evaluation.step, evaluation.rate - evaluation.spread), xytext=(0, -5),
                textcoords="offset points", ha="center", va="top", color=ORANGE, fontweight="bold",
            )  # fmt: skip
    axes.set_title(curve.title, loc="left", fontsize=12, fontweight="bold")
    axes.set_ylabel("reward / success rate")
    shown = [*curve.rewards, *(evaluation.rate for evaluation in curve.evaluations)]
    if all(0 <= value <= 1 for value in shown):
        axes.set_ylim(0, 1.06)
    axes.legend(loc="lower right", frameon=False, fontsize=9)
    _bare(axes)


def _draw_lag(axes: Axes, curve: Curve) -> None:
    axes.fill_between(curve.steps, curve.lag, color=GREEN, alpha=0.25, step="mid", linewidth=0)
    axes.plot(curve.steps, curve.lag, color=GREEN, linewidth=1.2, drawstyle="steps-mid")
    axes.set_ylabel("mean lag")
    axes.set_ylim(bottom=0)
    _bare(axes)


def _bare(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=GREY, alpha=0.25, linewidth=0.8)
    axes.tick_params(colors="#3c4048", labelsize=9)


def _smooth(values: Sequence[float], width: int = 5) -> list[float]:
    """Centred moving mean, narrower at both ends."""
    half = width // 2
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]
