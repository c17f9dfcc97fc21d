"""How `agentrl sandbox` shows sandboxes: tables and one page. Pure: values in, rich objects out.

Invariant: text that comes from a sandbox or its owner is escaped, so that it cannot draw over the table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table

from agentrl.core.types import SandboxState, SandboxView
from sandbox.views import CommandView, SandboxEvent

ENDED = frozenset({SandboxState.CLOSED, SandboxState.FAILED, SandboxState.LOST})
COLOURS = {
    SandboxState.READY: "green", SandboxState.CREATING: "cyan", SandboxState.QUEUED: "cyan",
    SandboxState.PAUSED: "yellow", SandboxState.FAILED: "red", SandboxState.LOST: "red",
}  # fmt: skip
OLDEST = 15
"""Sandboxes that `top` lists."""


def span(seconds: float) -> str:
    """A duration in two digits or so: 45s, 12m, 3h05m, 2d."""
    whole = max(0, round(seconds))
    if whole < 120:
        return f"{whole}s"
    if whole < 7200:
        return f"{whole // 60}m"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m" if whole < 172_800 else f"{whole // 86_400}d"


def state_of(view: SandboxView) -> str:
    colour = COLOURS.get(view.state, "dim")
    return f"[{colour}]{view.state}[/]"


def lease_of(view: SandboxView, now: float) -> str:
    return "" if view.state in ENDED else span(view.deadline - now)


def sandbox_table(views: Sequence[SandboxView], now: float) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("id", "state", "owner", "image", "age", "lease", "cause"):
        table.add_column(column, justify="right" if column in ("age", "lease") else "left", no_wrap=column != "cause")
    for view in sorted(views, key=lambda view: view.created_at):
        table.add_row(
            escape(view.id), state_of(view), escape(view.owner), escape(view.spec.image) or "[dim]default[/]",
            span(now - view.created_at), lease_of(view, now), escape(view.cause),
        )  # fmt: skip
    return table


def owners_table(views: Sequence[SandboxView], now: float) -> RenderableType:
    """Counts by owner and state over the oldest sandboxes."""
    counts = Counter((view.owner, view.state) for view in views)
    states = [state for state in SandboxState if any(found == state for _, found in counts)]
    table = Table(title=f"{len(views)} live sandboxes", box=None, pad_edge=False)
    table.add_column("owner")
    for column in (*states, "oldest", "next lease end"):
        table.add_column(str(column), justify="right")
    for owner in sorted({view.owner for view in views}):
        mine = [view for view in views if view.owner == owner]
        table.add_row(
            escape(owner), *(str(counts[owner, state]) for state in states),
            span(now - min(view.created_at for view in mine)), span(min(view.deadline for view in mine) - now),
        )  # fmt: skip
    oldest = sorted(views, key=lambda view: view.created_at)[:OLDEST]
    return Group(table, "", sandbox_table(oldest, now)) if views else table


def describe(console: Console, view: SandboxView, commands: Sequence[CommandView], now: float) -> None:
    """One sandbox on a page."""
    limits, spec = view.spec.limits, view.spec
    created = datetime.fromtimestamp(view.created_at, UTC)
    bounds = f"{limits.memory_mb} MB memory, {limits.cpus:g} CPUs, {limits.pids} processes, {limits.disk_mb} MB disk"
    rows = {
        "state": state_of(view),
        "cause": escape(view.cause),
        "owner": escape(view.owner),
        "created": f"{created:%Y-%m-%d %H:%M:%S} UTC, {span(now - view.created_at)} ago",
        "lease": f"{lease_of(view, now)} left; {span(spec.ttl_s)} after each command"
        if view.state not in ENDED
        else "",
        "image": escape(spec.image) or "the backend's default",
        "workdir": escape(spec.workdir),
        "limits": bounds,
        "files": escape(", ".join(spec.files)),
        "env": escape(", ".join(spec.env)),
    }
    table = Table(box=None, pad_edge=False, show_header=False, title=escape(view.id), title_justify="left")
    for name, value in rows.items():
        if value:
            table.add_row(f"[bold]{name}[/]", value)
    console.print(table)
    for command in commands:
        when = span(now - command.started_at)
        console.print(f"[dim]{when:>5} ago  {escape(command.key)}[/]  {escape(' '.join(command.argv))}")


def event_line(event: SandboxEvent) -> str:
    colour = COLOURS.get(event.state, "dim")
    when = f"{datetime.fromtimestamp(event.at, UTC):%H:%M:%S}"
    words = f"{event.seq:>6} {when} {escape(event.sandbox)} [{colour}]{event.state:<8}[/] {escape(event.owner)}"
    return f"{words}  {escape(event.cause)}".rstrip()
