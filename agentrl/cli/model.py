"""`agentrl model`: the tiny model of a config, a warm start (what `train` does by itself), and the plugin for vLLM."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from agentrl.cli.arguments import Words, read_config
from agentrl.core.errors import ConfigError
from agentrl.core.plugins import load_environment
from agentrl.launch.roles.warm_start import initial_model, warmed_model
from agentrl.train.warm_start import WarmProgress
from agentrl.weights.vllm_plugin import ENVIRONMENT, SERVE, lay_out

app = typer.Typer()

Out = Annotated[Path, typer.Argument(help="Folder to write, Hugging Face format.", show_default=False)]


@app.command()
def init(out: Out, words: Words = None) -> None:
    """Build a tiny random model, and a tokenizer trained on the environment's demonstrations."""
    config = read_config(words)
    _must_be_new(out)
    initial_model(out, load_environment(config.env.name, config.env.options), config)
    typer.echo(out)


@app.command("warm-start")
def warm_start(
    source: Annotated[Path, typer.Argument(help="Model folder to start from.", show_default=False)],
    out: Out,
    words: Words = None,
) -> None:
    """Take supervised steps on the environment's demonstrations."""
    config = read_config(words)
    _must_be_new(out)
    environment = load_environment(config.env.name, config.env.options)
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("warm start", total=config.warm_start.steps)

        def progress(now: WarmProgress) -> None:
            said = f"loss {now.loss:.3f}, accuracy {now.accuracy:.2f}"
            bar.update(task, completed=now.step, description=said)

        warmed_model(source, out, environment, config, progress)
    typer.echo(out)


@app.command("vllm-plugin")
def vllm_plugin(
    out: Annotated[Path, typer.Argument(help="Folder to write, for vLLM's PYTHONPATH.", show_default=False)],
    model: Annotated[str, typer.Option(help="Model that vLLM is to serve.")] = "MODEL",
) -> None:
    """Write what lets vLLM take a run's weights, and print the command that starts vLLM with it."""
    folder = lay_out(out).absolute()
    settings = {**ENVIRONMENT, "PYTHONPATH": str(folder)}
    command = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", model, *SERVE]
    typer.echo(" ".join([*(f"{name}={shlex.quote(value)}" for name, value in settings.items()), shlex.join(command)]))


def _must_be_new(folder: Path) -> None:
    if folder.exists():
        raise ConfigError(f"{folder} exists already: name a new folder")
