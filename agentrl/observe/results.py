"""A finished run as people read it in the terminal. Printed by `agentrl train`, `eval` and `runs`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table

from agentrl.observe.panel import clock
from agentrl.observe.summary import EvalSummary, Summary


def evaluation_table(title: str, evaluations: Sequence[EvalSummary]) -> Table:
    """One column an evaluation."""
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("held-out tasks")
    for found in evaluations:
        table.add_column(found.label, justify="right")
    for name, read in ROWS.items():
        table.add_row(name, *(read(found) for found in evaluations))
    return table


def summary_table(summary: Summary) -> RenderableType:
    """Before against after, then the facts of the run."""
    title = f"{summary.name}: {summary.env}, {summary.form}, seed {summary.seed}"
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column()
    for name, value in _facts(summary):
        facts.add_row(name, value)
    return Group(evaluation_table(title, summary.evaluations), facts) if summary.evaluations else Group(title, facts)


def _facts(summary: Summary) -> Iterator[tuple[str, str]]:
    yield "training reward", f"{number(summary.reward_first)} at first, {number(summary.reward_last)} at last"
    yield "steps", f"{summary.steps}, {summary.trained_tokens:,} trained tokens"
    yield "episodes", _counts(summary.episodes)
    yield "groups", _counts(summary.groups)
    if summary.failures:
        yield "failures", _counts(summary.failures)
    yield "lag", f"mean {number(summary.lag_mean)}, max {number(summary.lag_max, 0)}"
    worst = summary.mismatch_zero_lag_max
    yield "mismatch", "no sample at zero lag" if worst is None else f"at most {worst:.1e} in any step, at zero lag"
    phases = ", ".join(f"{name.replace('_', ' ')} {clock(seconds)}" for name, seconds in summary.phases_s.items())
    yield "wall time", f"{clock(summary.wall_s)} ({phases})"
    if summary.restarts:
        yield "restarts", _counts(summary.restarts)
    findings = len(summary.audit.findings)
    yield "store", "sound" if summary.audit.ok else f"[red]{findings} findings: see `agentrl runs check`[/]"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{value:,} {name}" for name, value in sorted(counts.items())) or "none"


def number(value: float | None, digits: int = 3) -> str:
    return "none" if value is None else f"{value:.{digits}f}"


ROWS: dict[str, Callable[[EvalSummary], str]] = {
    "success rate": lambda found: number(found.success_rate),
    "mean reward": lambda found: number(found.mean_reward),
    "turns an episode": lambda found: number(found.mean_turns, 2),
    "sampled tokens an episode": lambda found: number(found.mean_tokens, 1),
    "tasks": lambda found: str(found.tasks),
    "tasks without a result (infra)": lambda found: str(found.infra_failures),
}
