"""`agentrl config`: check a file, or show the tree that it makes. Typed by people before they start a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.syntax import Syntax

from agentrl.core.config import dump_toml, load_config

app = typer.Typer()

File = Annotated[Path, typer.Argument(metavar="FILE", help="Config in TOML.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Settings that replace the file's.", show_default=False),
]


@app.command()
def check(file: File, overrides: Overrides = None) -> None:
    """Say whether a run can be started with this config; exit code 2 and the reasons if not."""
    config = load_config(file, overrides or ())
    typer.echo(f"{file}: ok (form {config.rollout.form}, environment {config.env.name}, {config.train.steps} steps)")


@app.command()
def show(file: File, overrides: Overrides = None) -> None:
    """Print the whole tree as TOML, defaults included."""
    console = Console(soft_wrap=True)
    text = dump_toml(load_config(file, overrides or ()))
    if console.is_terminal:
        console.print(Syntax(text, "toml", background_color="default", word_wrap=True))
    else:
        typer.echo(text, nl=False)
