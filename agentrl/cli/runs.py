"""`agentrl runs`: what runs there are, how they went, whether their store is sound, what an episode looked like."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from agentrl.cli.arguments import RUNS, find_run
from agentrl.core.config import RunConfig, changed_settings
from agentrl.core.db import Database
from agentrl.core.errors import AgentRLError, NotFound
from agentrl.launch.layout import RunFolder
from agentrl.launch.status import read_status
from agentrl.observe.curve import draw
from agentrl.observe.history import read_history
from agentrl.observe.report import curve_of, find_episode, finding_line
from agentrl.observe.results import number, summary_table
from agentrl.observe.summary import read_summary
from agentrl.observe.transcript import transcript as page_of
from agentrl.rollout.audit import audit
from agentrl.rollout.store import open_store_database

app = typer.Typer()
T = TypeVar("T")

Run = Annotated[str, typer.Argument(help="Name or folder of a run.", show_default=False)]
Runs = Annotated[Path, typer.Option("--dir", help="Folder that holds the runs.")]


@app.command("list")
def list_runs(runs: Runs = RUNS) -> None:
    """All runs with their state and result."""
    table = Table()
    for column in ("run", "state", "environment", "form", "seed", "steps", "before", "after"):
        table.add_column(column, justify="left" if column in ("run", "state", "environment", "form") else "right")
    for folder in sorted((RunFolder(path.parent) for path in runs.glob("*/config.toml")), key=lambda f: f.name):
        table.add_row(*_row(folder))
    Console().print(table if table.row_count else f"no runs in {runs}")


def _row(folder: RunFolder) -> tuple[str, ...]:
    try:
        config, status, summary = folder.config(), read_status(folder.status), read_summary(folder.summary)
    except (AgentRLError, ValueError) as error:
        return folder.name, f"unreadable: {error}", "", "", "", "", "", ""
    rows = read_history(folder.metrics).rows
    done = int(rows[-1]["step"]) if rows else 0
    before, after = (summary.eval_before, summary.eval_after) if summary else (None, None)
    return (
        folder.name, status.shown if status else "new", config.env.name, config.rollout.form, str(config.seed),
        f"{done}/{config.train.steps}", number(before) if summary else "", number(after) if summary else "",
    )  # fmt: skip


@app.command()
def show(run: Run) -> None:
    """A run's summary, and the settings that differ from the defaults."""
    folder = find_run(run)
    console = Console()
    status, summary = read_status(folder.status), read_summary(folder.summary)
    console.print(f"[bold]{folder.path}[/]: {status.shown if status else 'never started'}", highlight=False)
    if status and status.error:
        console.print(status.error, style="red", markup=False)
    if summary:
        console.print(summary_table(summary))
    settings = changed_settings(folder.config())
    console.print("[bold]settings that are not defaults[/]" if settings else "all settings are defaults")
    for key, value in settings.items():
        console.print(f"  {key} = {value!r}", highlight=False, markup=False)


@app.command()
def plot(
    run: Run,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="PNG to write; curve.png of the run without it.")
    ] = None,
) -> None:
    """Draw the learning curve as far as the run has come."""
    folder = find_run(run)
    history = read_history(folder.metrics)
    if not history.rows:
        raise NotFound(f"{folder.path} has no training step yet, so there is nothing to draw")
    curve = _with_store(folder, lambda database: curve_of(database, folder.config(), history))
    target = out or folder.curve
    draw(curve, target)
    typer.echo(target)


@app.command()
def check(run: Run) -> None:
    """Prove from the store that no accepted episode was lost or trained twice; exit code 1 on findings."""
    folder = find_run(run)
    findings = _with_store(folder, audit).findings
    for finding in findings:
        typer.echo(finding_line(finding))
    typer.echo(f"{folder.path}: {len(findings)} findings" if findings else f"{folder.path}: sound")
    raise typer.Exit(1 if findings else 0)


@app.command()
def transcript(
    run: Run,
    episode: Annotated[str, typer.Argument(help="Episode id, or `won` or `lost` for an example.")] = "won",
) -> None:
    """Print an episode as a readable page."""
    folder = find_run(run)
    typer.echo(page_of(_with_store(folder, lambda database: find_episode(database, episode))), nl=False)


def _with_store(folder: RunFolder, work: Callable[[Database], Awaitable[T]]) -> T:
    """The result of `work` over the run's store."""

    async def opened(config: RunConfig) -> T:
        database = await open_store_database(folder.store(config, "rollout"))
        try:
            return await work(database)
        finally:
            await database.close()

    return asyncio.run(opened(folder.config()))
