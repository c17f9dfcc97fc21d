"""The figures of a plan in tables by title, and the forms and simulations in rows. Read by the page and the CLI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from agentrl.plan.choice.choose import Choice, figures_of
from agentrl.plan.choice.forms import Form
from agentrl.plan.figure import Figure, Quantity, find
from agentrl.plan.ledger import Ledger
from agentrl.plan.report.simulated import simulated
from agentrl.plan.report.timeline import TITLES
from agentrl.plan.simulate import Result

Rows = tuple[tuple[str, ...], ...]
"""The first row is the head."""
STALENESS = "Staleness"
"""Begins the title of the lags; the form that has them follows."""


def sections(ledger: Ledger, choice: Choice) -> Mapping[str, tuple[Figure, ...]]:
    """The ledger's tables (all GPUs colocated), then the choice's (the chosen form).

    A name stands for one number in all of them: where the chosen form has another value than the ledger, it is
    called after the form.
    """
    chosen = TITLES[choice.chosen.form]
    streaming = f"{STALENESS}, {TITLES[choice.streaming.form]}" if choice.streaming else ""
    parts = {
        "Time against FLOPs": (choice.by_time, choice.by_flops),
        "Waiting": figures_of(choice.waiting),
        streaming: figures_of(choice.staleness),
        f"Cost of weight sync, {chosen}": figures_of(choice.sync),
        f"Checkpoints and failures, {chosen}": figures_of(choice.reliability),
        f"Communication left out of the times, {chosen}": figures_of(choice.uncounted),
        f"Episodes in flight, {chosen}": figures_of(choice.window),
        f"Holding or releasing sandboxes, {chosen}": figures_of(choice.sandboxes),
        f"KV of waiting turns, {chosen}": figures_of(choice.residency),
    }
    parts["Against pretraining on the same GPUs"] = figures_of(choice.pretraining)
    known = {part.name: part.value for figure in ledger.figures() for part in figure.walk()}
    found = {}
    for title, figures in parts.items():
        form = choice.streaming.form if choice.streaming and title == streaming else choice.chosen.form
        found[title] = tuple(_apart(figure, known, form) for figure in figures)
    return {**ledger.sections, **{title: figures for title, figures in found.items() if figures}}


def _apart(figure: Figure, known: dict[str, float], form: Form) -> Figure:
    if known.setdefault(figure.name, figure.value) == figure.value:
        return figure
    return replace(figure, name=f"{figure.name}.{form}")


def form_figures(choice: Choice) -> tuple[Figure, ...]:
    """Every number of the table of forms, and what each is faster than the simplest that fits."""
    options = choice.options
    found = [figure for option in options for figure in (*option.gpus, option.step_s, option.mfu, option.usd)]
    return (*found, *choice.speedups)


def named(ledger: Ledger, choice: Choice, name: str) -> Quantity:
    """A figure of the plan, or anything that one rests on. ConfigError names the nearest one."""
    printed = [figure for figures in sections(ledger, choice).values() for figure in figures]
    printed += form_figures(choice)
    for figure in printed:
        if figure.name == name:
            return figure
    return find((*printed, *choice.figures()), name)


def forms_rows(choice: Choice) -> Rows:
    head = ("form", "GPUs: generate + train", "step", "MFU", "GPU $ a step", "")
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
    for result in results:
        form, option = result.parameters.form, choice.option(result.parameters.form)
        found = {key: figure.value for key, figure in simulated(result).items()}
        rows.append((
            f"{TITLES[form]}; {result.parameters.policy}", f"{found['step_s']:,.0f} s",
            f"{option.step_s.value:,.0f} s" if option else "", f"{100 * found['tail_share']:.0f} %",
            f"{100 * found['trainer_idle']:.0f} %",
            f"{100 * found['replicas_idle_p10']:.0f}-{100 * found['replicas_idle_p90']:.0f} %",
            f"{100 * found['place_use']:.0f} %", f"{found['lag']:.2f}", f"{found['token_lag']:.2f}",
            f"{100 * found['dropped_share']:.1f} %", f"{found['sandboxes']:,.0f}",
        ))  # fmt: skip
    return (head, *rows)
