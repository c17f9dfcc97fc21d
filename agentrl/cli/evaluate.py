"""`agentrl eval`: how good is a policy on held-out tasks, now, with other settings, or before any training."""

from __future__ import annotations

import asyncio

import typer
from rich.console import Console

from agentrl.cli.arguments import Words, find_run, split_arguments
from agentrl.cli.watch import view_of
from agentrl.core.config import RunConfig, load_config
from agentrl.core.errors import ConfigError
from agentrl.core.telemetry import setup_logging
from agentrl.launch.endpoints import choose_endpoints
from agentrl.launch.evaluation import LABEL, evaluate_policy, evaluation_of
from agentrl.launch.layout import RunFolder
from agentrl.launch.local import interruptible
from agentrl.launch.start import new_run
from agentrl.observe.live import watching
from agentrl.observe.report import evaluation
from agentrl.observe.results import evaluation_table
from agentrl.observe.summary import EvalSummary
from agentrl.observe.view import EVALUATION
from agentrl.rollout.store import open_store_database


def command(words: Words = None) -> None:
    """Evaluate a run's newest policy (give its name or folder), or the model that a config starts from (give its
    file), on held-out tasks."""
    path, overrides = split_arguments(words or ())
    if path is None:
        raise ConfigError("name a run or a config file: agentrl eval RUN_OR_CONFIG [SECTION.KEY=VALUE]...")
    if path.is_file():
        config = load_config(path, overrides)
        folder, config = new_run(config.model_copy(update={"name": f"{config.name}-eval"}), name=None)
    else:
        folder, config = evaluation_of(find_run(str(path)), overrides)
    if config.eval.tasks == 0:
        raise ConfigError("eval.tasks is 0: nothing to evaluate")
    setup_logging("launcher", config.telemetry.log_level, folder.log("launcher"))
    console = Console()
    try:
        asyncio.run(interruptible(lambda: _run(folder, config, console)))
    except asyncio.CancelledError:
        raise typer.Exit(130) from None


async def _run(folder: RunFolder, config: RunConfig, console: Console) -> None:
    endpoints = choose_endpoints(config)
    endpoints.write(folder.endpoints)
    view = view_of(folder, config, endpoints, EVALUATION)
    async with watching(view, console, live=config.launch.live):
        await evaluate_policy(folder, config, endpoints, view)
    found = await _results(folder, config)
    console.print(evaluation_table(f"{folder.path}: {config.env.name}, seed {config.seed}", [found]))


async def _results(folder: RunFolder, config: RunConfig) -> EvalSummary:
    database = await open_store_database(folder.store(config, "rollout"))
    try:
        found = await evaluation(database, LABEL)
    finally:
        await database.close()
    assert found is not None, "the evaluation ended well without results"
    return found
