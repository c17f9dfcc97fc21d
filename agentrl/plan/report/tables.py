"""The figures of a plan in tables by title, and the forms and simulations in rows. Read by the page and the CLI."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields

import numpy as np

from agentrl.plan.choice.choose import Choice
from agentrl.plan.figure import Figure, Quantity, find
from agentrl.plan.ledger import Ledger
from agentrl.plan.report.timeline import TITLES
from agentrl.plan.simulate import Result

Rows = tuple[tuple[str, ...], ...]
"""The first row is the head."""


def sections(ledger: Ledger, choice: Choice) -> Mapping[str, tuple[Figure, ...]]:
    """The ledger's tables (all GPUs colocated), then the choice's (the chosen form)."""
    parts = {
        "Time against FLOPs": (choice.by_time, choice.by_flops),
        "Staleness": _figures(choice.staleness),
        "Cost of weight sync": _figures(choice.sync),
        "Checkpoints and failures": _figures(choice.reliability),
        "Holding or releasing sandboxes": _figures(choice.sandboxes),
        "KV of waiting turns": _figures(choice.residency),
    }
    return {**ledger.sections, **{title: found for title, found in parts.items() if found}}


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


def _figures(part: object) -> tuple[Figure, ...]:
    """The figures among a part's fields; none when the plan has no such part."""
    if part is None:
        return ()
    values: Iterable[object] = (getattr(part, field.name) for field in fields(part))  # type: ignore[arg-type]
    return tuple(value for value in values if isinstance(value, Figure))
