"""`agentrl train`: start or resume a run, watch it, report on it. The command that everything else is for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from agentrl.cli.arguments import Words, find_run, split_arguments
from agentrl.cli.watch import view_of
from agentrl.core.config import RunConfig, load_config
from agentrl.core.errors import ConfigError
from agentrl.core.plugins import load_agent, load_environment
from agentrl.core.telemetry import setup_logging
from agentrl.launch.endpoints import kept_endpoints
from agentrl.launch.layout import RunFolder
from agentrl.launch.local import interruptible
from agentrl.launch.start import new_run, resumed_run
from agentrl.launch.training import recorded, train
from agentrl.observe.live import watching
from agentrl.observe.report import Places, write_report
from agentrl.observe.results import summary_table
from agentrl.observe.view import TRAINING


def command(
    words: Words = None,
    name: Annotated[str | None, typer.Option(help="Name of the run's folder; must be free unless resumed.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run from its last checkpoint.")] = False,
) -> None:
    """Train an agent by a config file, with a live view; the results lie in the run's folder. With --resume, give the
    run's folder instead of a config."""
    console = Console()
    if resume:
        folder, config = _resumed(words or (), name)
    else:
        folder, config = _started(words or (), name)
    setup_logging("launcher", config.telemetry.log_level, folder.log("launcher"))
    console.print(f"run {folder.path} ({'resumed' if resume else 'new'})", highlight=False, soft_wrap=True)
    try:
        asyncio.run(interruptible(lambda: _run(folder, config, console)))
    except asyncio.CancelledError:
        console.print(f"stopped; continue with: agentrl train --resume {folder.path}", highlight=False, soft_wrap=True)
        raise typer.Exit(130) from None


def _started(words: Sequence[str], name: str | None) -> tuple[RunFolder, RunConfig]:
    path, overrides = split_arguments(words)
    config = load_config(path, overrides)
    _check_plugins(config)
    named = any(override.startswith("name=") for override in overrides)
    return new_run(config, name=name or (config.name if named else None))


def _resumed(words: Sequence[str], name: str | None) -> tuple[RunFolder, RunConfig]:
    """The run is named by its folder, by --name, or by the config that it was started with."""
    path, overrides = split_arguments(words)
    if path is not None and path.is_file():
        config = load_config(path, [o for o in overrides if o.startswith(("name=", "dir="))])
        path = Path(config.dir) / (name or config.name)
    elif path is None and name is None:
        raise ConfigError("--resume needs the run: agentrl train --resume RUN_FOLDER")
    return resumed_run(find_run(str(path or name)).path, [o for o in overrides if not o.startswith(("name=", "dir="))])


def _check_plugins(config: RunConfig) -> None:
    """A wrong name or option is told before a folder is made, not by a process that dies of it."""
    load_environment(config.env.name, config.env.options)
    load_agent(config.agent.name, config.agent.options)


async def _run(folder: RunFolder, config: RunConfig, console: Console) -> None:
    endpoints = kept_endpoints(folder.endpoints, config)
    endpoints.write(folder.endpoints)
    view = view_of(folder, config, endpoints, TRAINING)
    async with recorded(folder), watching(view, console, live=config.launch.live):
        await train(folder, config, endpoints, view)
        view.phase("report")
        summary = await write_report(_places(folder, config), config, view)
    console.print(summary_table(summary))
    console.print(f"\n{folder.summary}\n{folder.curve}\n{folder.episodes}/", highlight=False, soft_wrap=True)


def _places(folder: RunFolder, config: RunConfig) -> Places:
    return Places(
        metrics=folder.metrics,
        store_url=folder.store(config, "rollout"),
        summary=folder.summary,
        curve=folder.curve,
        episodes=folder.episodes,
    )
