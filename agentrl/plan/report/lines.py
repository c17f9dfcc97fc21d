"""Pictures made of lines: the split curve, and what the simulation saw over time and over lags. Called by `page`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from agentrl.plan.choice.forms import Form
from agentrl.plan.choice.options import Option
from agentrl.plan.report.svg import BLUE, FAINT, GREEN, GREY, ORANGE, PURPLE, RED, Drawing, Scale, label
from agentrl.plan.report.timeline import TITLES
from agentrl.plan.simulate import Result, Series

FORM_COLOURS = {
    Form.COLOCATED: GREY, Form.COLOCATED_ASYNC: PURPLE, Form.SEPARATE_SYNC: RED, Form.ONE_STEP: ORANGE,
    Form.ASYNC: BLUE,
}  # fmt: skip
WIDTH, HEIGHT, LEFT, BOTTOM = 1000.0, 380.0, 80.0, 310.0


def draw_split(options: Sequence[Option]) -> str:
    """Step time over GPUs that generate, for each form with two pools; its best split is marked."""
    curves = [option for option in options if option.curve]
    drawing = Drawing(WIDTH, HEIGHT, "Step time by split of the GPUs")
    if not curves:
        return ""
    gpus = curves[0].curve[0].rollout_gpus + curves[0].curve[0].trainer_gpus
    # Extreme splits take many times as long; they would flatten what matters.
    most = 4 * min(option.step_s.value for option in curves)
    x, y = Scale(0, gpus, LEFT, WIDTH - 20), Scale(0, most, BOTTOM, 46)
    drawing.y_axis(y, LEFT, WIDTH - 20, "step (s)")
    drawing.x_axis(x, 46, BOTTOM, f"GPUs that generate, of {gpus} (the others train)")
    for option in curves:
        colour = FORM_COLOURS[option.form]
        for feasible in (True, False):
            points = [
                (x(split.rollout_gpus), y(split.step_s.value))
                for split in option.curve
                if split.feasible is feasible and split.step_s.value <= most
            ]
            drawing.path(points, colour if feasible else "#c9ced4", 2.5 if feasible else 2, "" if feasible else "3 4")
        best = option.split
        if best is not None:
            at = x(best.rollout_gpus), y(best.step_s.value)
            drawing.dot(*at, colour, f"{best.label}: {best.step_s.value:,.0f} s")
            # Labels of neighbouring forms' best splits would lie on each other.
            below = curves.index(option) % 2 == 0
            words = f"{best.rollout_gpus} + {best.trainer_gpus}"
            drawing.text(at[0], at[1] + (22 if below else -12), words, "middle", colour, 12, bold=True)
    shown = {TITLES[option.form]: FORM_COLOURS[option.form] for option in curves}
    drawing.legend(LEFT + 8, 22, {**shown, "does not fit into memory": "#c9ced4"}, WIDTH)
    return drawing.svg()


def draw_in_flight(results: Mapping[Form, Result], seconds: float) -> str:
    """Trajectories that hold a place, over the first `seconds`."""
    series = {TITLES[form]: (result.in_flight, FORM_COLOURS[form]) for form, result in results.items()}
    return _over_time("Trajectories in flight over time", "trajectories in flight", series, seconds)


def draw_sandboxes(results: Mapping[Form, Result], seconds: float) -> str:
    series = {TITLES[form]: (result.sandboxes, FORM_COLOURS[form]) for form, result in results.items()}
    return _over_time("Sandboxes in use over time", "sandboxes in use", series, seconds)


def _over_time(title: str, words: str, series: Mapping[str, tuple[Series, str]], seconds: float) -> str:
    """A panel a form, one below the other, with the same axes."""
    height, left = 84.0, 215.0
    bottom = 10 + len(series) * (height + 14)
    drawing = Drawing(WIDTH, bottom + 50, title)
    most = max(max(found.peak for found, _ in series.values()), 1)
    x = Scale(0, seconds, left, WIDTH - 20)
    drawing.x_axis(x, 10, bottom, "simulated seconds")
    for row, (name, (found, colour)) in enumerate(series.items()):
        base = 10 + row * (height + 14) + height
        y = Scale(0, most * 1.05, base, base - height)
        drawing.text(12, base - height + 16, name, bold=True, fill=colour)
        drawing.text(12, base - height + 34, f"peak {found.peak:,}", fill=FAINT, size=12)
        drawing.text(12, base - height + 50, words, fill=FAINT, size=12)
        for tick in y.ticks(2):
            drawing.line(left, y(tick), WIDTH - 20, y(tick))
            drawing.text(left - 6, y(tick) + 4, label(tick), "end", FAINT, 11)
        shown = found.values[: int(seconds / found.bin_s)]
        every = max(1, len(shown) // 600)
        points = [(x(at * found.bin_s), y(float(shown[at]))) for at in range(0, len(shown), every)]
        drawing.path(points, colour, 1.8)
    return drawing.svg()


def draw_lag(result: Result) -> str:
    """Share of the trained trajectories by lag, and the mean lag by length."""
    drawing = Drawing(WIDTH, HEIGHT, "Lag of the samples")
    counts = result.tally.trained
    by_lag, middle = counts.sum(axis=0), 520.0
    last = max(int(np.flatnonzero(by_lag).max(initial=0)), 3)
    shares = 100 * by_lag[: last + 1] / max(1, by_lag.sum())
    x, y = Scale(-0.6, last + 0.6, LEFT, middle - 40), Scale(0, float(shares.max()) * 1.1 or 1.0, BOTTOM, 30)
    drawing.y_axis(y, LEFT, middle - 40, "samples (%)")
    for lag, share in enumerate(shares):
        wide = 0.7 * (x(1) - x(0))
        drawing.rect(x(lag) - wide / 2, y(share), wide, BOTTOM - y(share), BLUE, f"lag {lag}: {share:.1f} %")
        drawing.text(x(lag), BOTTOM + 18, str(lag), "middle", FAINT, 12)
    drawing.text((LEFT + middle - 40) / 2, BOTTOM + 38, "lag (policy versions)", "middle")
    # Buckets with next to nothing in them would only spread the axis.
    lengths = np.flatnonzero(counts.sum(axis=1) > 0.002 * counts.sum())
    means = (counts * np.arange(counts.shape[1])).sum(axis=1) / np.maximum(counts.sum(axis=1), 1)
    left = middle + 70
    high = max(float(means[lengths].max(initial=0)), 1.0)
    x, y = (
        Scale(float(lengths.min()) - 0.6, float(lengths.max()) + 0.6, left, WIDTH - 20),
        Scale(0, high * 1.1, BOTTOM, 30),
    )
    drawing.y_axis(y, left, WIDTH - 20, "mean lag (versions)")
    for bucket in map(int, lengths):
        wide = 0.7 * (x(1) - x(0))
        mean = float(means[bucket])
        drawing.rect(x(bucket) - wide / 2, y(mean), wide, BOTTOM - y(mean), GREEN, f"lag {mean:.2f}")
        drawing.text(x(bucket), BOTTOM + 18, power(bucket), "middle", FAINT, 12)
    drawing.text((left + WIDTH - 20) / 2, BOTTOM + 38, "sampled tokens of a trajectory, from", "middle")
    return drawing.svg()


def power(exponent: int) -> str:
    """A power of two as people write token counts: 512, 1k, 32k."""
    return str(2**exponent) if exponent < 10 else f"{2 ** (exponent - 10)}k"
