"""`agentrl env`: make, list, show and play environments. Typed by people who write or choose one."""

from __future__ import annotations

import asyncio
from importlib.metadata import EntryPoint, entry_points
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from agentrl.cli.conversation import Human, print_demonstration, print_message, print_outcome, print_spec, print_tools
from agentrl.cli.sandboxes import sandbox_for
from agentrl.cli.scaffold import write_package
from agentrl.core.config import RunConfig, load_config
from agentrl.core.environment import Environment, Split
from agentrl.core.errors import AgentRLError, ConfigError
from agentrl.core.plugins import load_environment
from agentrl.core.types import Demonstration, Task
from agentrl.testing.play import Policy, Scripted
from agentrl.testing.play import play as play_episode

app = typer.Typer()

Name = Annotated[str, typer.Argument(metavar="NAME", help="Plugin name, or package.module:Class.", show_default=False)]
Seed = Annotated[int, typer.Option(help="Which tasks.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Settings, e.g. env.options.level=2.", show_default=False),
]


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="Lower-case words joined by _.", show_default=False)],
    folder: Annotated[Path | None, typer.Option(help="Where to write it; ./NAME by default.")] = None,
) -> None:
    """Write a package with a working environment, its test and its README."""
    target = folder or Path(name)
    for path in write_package(name, target):
        typer.echo(path)
    typer.echo(f"\nNext: pip install -e {target} && pytest {target} && agentrl env play {name}")


@app.command("list")
def list_environments() -> None:
    """The installed environments, with where they come from."""
    rows = [("environment", "version", "tools", "from"), *map(_row, sorted(entry_points(group="agentrl.envs")))]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for *cells, source in rows:
        typer.echo("  ".join([*(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)), source]))


def _row(point: EntryPoint) -> tuple[str, str, str, str]:
    source = f"{point.dist.name} {point.dist.version} ({point.value})" if point.dist else point.value
    try:
        environment = load_environment(point.name, {})
    # A plugin that does not load, or wants options, must not hide the others.
    except (AgentRLError, TypeError) as error:
        return point.name, "?", "?", f"{source}: {error}"
    return point.name, environment.version, ", ".join(tool.name for tool in environment.tools), source


@app.command()
def show(name: Name, overrides: Overrides = None, seed: Seed = 0, split: Split = "train") -> None:
    """A task of an environment: its messages, tools, sandbox and a demonstration."""
    console = Console()
    environment = _load(name, overrides)[1]
    task = _first_task(environment, split, seed)
    console.rule(f"{environment.name} {environment.version}: task {task.id} ({split})")
    console.print("[bold]data[/]", dict(task.data))
    print_tools(console, environment.tools)
    print_spec(console, environment.sandbox(task))
    for message in environment.messages(task):
        print_message(console, message)
    print_demonstration(console, environment, seed)


@app.command()
def play(
    name: Name,
    overrides: Overrides = None,
    seed: Seed = 0,
    policy: Annotated[
        Literal["demo", "human"], typer.Option(help="Who takes the turns: a demonstration, or you.")
    ] = "demo",
    noise: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of bad moves of the demonstration.")] = 0.0,
) -> None:
    """Play one episode in a real sandbox, and score it."""
    console = Console()
    config, environment = _load(name, overrides)
    if policy == "human":
        task = _first_task(environment, "train", seed)
        player: Policy = Human(console, environment.tools)
    else:
        demonstration: Demonstration = next(environment.demonstrations(seed, noise))
        task, player = demonstration.task, Scripted(demonstration)
    asyncio.run(_play(console, config, environment, task, player))


async def _play(console: Console, config: RunConfig, environment: Environment, task: Task, policy: Policy) -> None:
    async with sandbox_for(environment.sandbox(task), config.sandbox) as sandbox:
        attempt = await play_episode(environment, task, policy, sandbox, lambda m: print_message(console, m))
        console.print(f"[dim]ended: {attempt.stop} after {attempt.turns} turns[/]")
        print_outcome(console, await environment.score(task, attempt, sandbox))


def _load(name: str, overrides: list[str] | None) -> tuple[RunConfig, Environment]:
    config = load_config(None, [f"env.name={name!r}", *(overrides or ())])
    return config, load_environment(config.env.name, config.env.options)


def _first_task(environment: Environment, split: Split, seed: int) -> Task:
    for task in islice(environment.tasks(split, seed), 1):
        return task
    raise ConfigError(f"{environment.name} has no task in the {split} split for seed {seed}")
