"""The figures of a plan in tables by title, and the forms and simulations in rows. Read by the page and the CLI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from agentrl.plan.choice.choose import Choice, figures_of
from agentrl.plan.figure import Figure, Quantity, find
from agentrl.plan.ledger import Ledger
from agentrl.plan.report.timeline import TITLES
from agentrl.plan.simulate import Result

Rows = tuple[tuple[str, ...], ...]
"""The first row is the head."""
STALENESS = "Staleness"
"""Begins the title of the lags; the form that has them follows."""


def sections(ledger: Ledger, choice: Choice) -> Mapping[str, tuple[Figure, ...]]:
    """The ledger's tables (all GPUs colocated), then the choice's (the chosen form)."""
    chosen = TITLES[choice.chosen.form]
    streaming = f"{STALENESS}, {TITLES[choice.streaming.form]}" if choice.streaming else ""
    parts = {
        "Time against FLOPs": (choice.by_time, choice.by_flops),
        streaming: figures_of(choice.staleness),
        f"Cost of weight sync, {chosen}": figures_of(choice.sync),
        f"Checkpoints and failures, {chosen}": figures_of(choice.reliability),
        "Episodes in flight": figures_of(choice.window),
        "Holding or releasing sandboxes": figures_of(choice.sandboxes),
        "KV of waiting turns": figures_of(choice.residency),
    }
    found = {title: tuple(figures) for title, figures in parts.items()}
    return {**ledger.sections, **{title: figures for title, figures in found.items() if figures}}


def named(ledger: Ledger, choice: Choice, name: str) -> Quantity:
    """A figure of the plan, or anything that one rests on. ConfigError names the nearest one."""
    return find((*ledger.figures(), *choice.figures()), name)


def forms_rows(choice: Choice) -> Rows:
    head = ("form", "GPUs: generate + train", "step", "MFU", "$ a step", "")
    rows = [
        (
            TITLES[option.form], option.split.label.replace(":", " + ") if option.split else "all do both",
            f"{option.step_s.value:,.0f} s", f"{100 * option.mfu.value:.1f} %", f"{option.usd.value:,.2f}",
            "chosen" if option.form is choice.chosen.form else "",
        )
        for option in choice.options
    ]  # fmt: skip
    return (head, *rows, *((TITLES[refused.form], "", "", "", "", refused.why) for refused in choice.refused))


def simulation_rows(choice: Choice, results: Sequence[Result]) -> Rows:
    head = (
        "form, policy", "step", "closed form", "tail", "trainer idle", "replicas idle", "places in use", "lag",
        "lag by token", "dropped", "sandboxes",
    )  # fmt: skip
    rows = []
    for found in results:
        form, option = found.parameters.form, choice.option(found.parameters.form)
        idle = np.quantile(found.idle_share, (0.1, 0.9)) * 100
        rows.append((
            f"{TITLES[form]}; {found.parameters.policy}", f"{found.step_s:,.0f} s",
            f"{option.step_s.value:,.0f} s" if option else "", f"{100 * found.tail_share:.0f} %",
            f"{100 * found.trainer_idle:.0f} %", f"{idle[0]:.0f}-{idle[1]:.0f} %", f"{100 * found.place_use:.0f} %",
            f"{found.lag_mean:.2f}", f"{found.token_lag_mean:.2f}", f"{100 * found.dropped_share:.1f} %",
            f"{found.sandboxes.peak:,}",
        ))  # fmt: skip
    return (head, *rows)
