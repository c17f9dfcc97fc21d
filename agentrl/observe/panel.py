"""The live view's picture: a RunView as something rich can draw. Pure; drawn twice a second by `live`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from agentrl.observe.history import mismatch
from agentrl.observe.view import TITLES, RunView

BARS = "▁▂▃▄▅▆▇█"
STATES = {"ready": "green", "running": "green", "starting": "yellow", "restarting": "yellow", "ended": "dim"}


def panel(view: RunView) -> RenderableType:
    config = view.config
    title = f"[bold]agentrl[/] {view.name}: {config.env.name}, {config.rollout.form}, seed {config.seed}"
    body: list[RenderableType] = [_phases(view), _progress(view), _figures(view), _processes(view)]
    return Panel(Group(*body), title=title, title_align="left", border_style="blue", padding=(0, 1))


def _phases(view: RunView) -> Text:
    text = Text()
    done = {phase.name: phase for phase in view.phases}
    for name in view.plan:
        title, phase = TITLES[name], done.get(name)
        if phase is None:
            text.append(f"{title}   ", style="dim")
        elif phase.ended is None:
            text.append(f"▶ {title} {clock(phase.seconds)}   ", style="bold cyan")
        else:
            text.append(f"✓ {title} {clock(phase.seconds)}   ", style="green")
    return text


def _progress(view: RunView) -> Table:
    done, total, unit = view.progress
    row = Table.grid(padding=(0, 1), expand=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True)
    eta = f", about {clock(view.eta_s)} left" if view.now == "train" and view.eta_s is not None else ""
    label = f"{done:.0f}/{total:.0f} {unit}{eta}" if total else ""
    row.add_row(ProgressBar(total=max(total, 1), completed=done), label)
    return row


def _figures(view: RunView) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, value in figures(view):
        table.add_row(name, value)
    return table


def figures(view: RunView) -> Iterator[tuple[str, str]]:
    """The lines of the view that have something to say."""
    if view.warm and not view.rows:
        row = view.warm[-1]
        yield (
            "warm start",
            f"loss {row.get('train/warm_loss', 0):.3f}, accuracy {row.get('train/warm_accuracy', 0):.2f}",
        )
    if view.rows:
        rewards = [row["reward/mean"] for row in view.rows if "reward/mean" in row]
        sources = view.by_source()
        named = ", ".join(f"{source} {value:.2f}" for source, value in sorted(sources.items())) if sources else ""
        yield "reward", f"{rewards[-1] if rewards else 0:.3f}  {spark(rewards[-40:])}  {named}"
        yield "lag", f"mean {view.latest('train/lag_mean') or 0:.2f}, max {view.latest('train/lag_max') or 0:.0f}"
        yield "mismatch", f"{mismatch(view.rows[-1]) or 0:.1e} (mean |Δ logprob|, zero lag)"
        yield "step", f"{view.latest('train/step_s') or 0:.1f} s, waiting {view.latest('train/take_s') or 0:.1f} s"
    if rates := view.success_rates():
        yield "held out", ", ".join(f"{label} {rate:.3f}" for label, rate in rates.items())
    if busy := ", ".join(_busy(view)):
        yield "now", busy
    if view.status.waiting_for and not view.gauges.total("agentrl_rollout_running_episodes"):
        yield "waiting for", view.status.waiting_for
    if failures := view.failures():
        yield "failures", ", ".join(f"{code} {count:.0f}" for code, count in sorted(failures.items()))


def _busy(view: RunView) -> Iterator[str]:
    """What the services are doing, as far as they say."""
    gauges = view.gauges
    if (rate := view.tokens_per_s) is not None:
        yield f"{rate:,.0f} tokens/s"
    for name, what in (
        ("agentrl_rollout_running_episodes", "episodes"),
        ("agentrl_sandbox_live_sandboxes", "sandboxes"),
        ("agentrl_rollout_ready_groups", "groups ready"),
    ):
        if (value := gauges.total(name)) is not None:
            yield f"{value:.0f} {what}"
    if accepted := view.status.episodes("accepted"):
        yield f"{accepted:,} episodes accepted"


def _processes(view: RunView) -> Text:
    text = Text()
    for role, state in view.processes.items():
        again = f" ×{view.restarts[role]}" if view.restarts[role] else ""
        text.append("● ", style=STATES.get(state, "red")).append(f"{role}{again}  ", style="dim")
    return text


def spark(values: Sequence[float]) -> str:
    """A line of bars over the range 0 to 1, wider when the values are."""
    low, high = min([0.0, *values]), max([1.0, *values])
    return "".join(BARS[round((value - low) / (high - low) * (len(BARS) - 1))] for value in values)


def clock(seconds: float) -> str:
    """m:ss"""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
