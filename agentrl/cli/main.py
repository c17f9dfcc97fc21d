"""The command `agentrl`. Installed as a console script.

Invariant: starting costs no more than the command that was asked for: only its module is imported, the others are
known by a line of help. An error of agentrl is one red line and an exit code, never a traceback.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import typer
from rich.console import Console
from rich.markup import escape

from agentrl.core.errors import AgentRLError, ConfigError, PluginError


@dataclass(frozen=True, slots=True)
class Entry:
    """One name under `agentrl`. Its module holds `app` (a group of commands) or `command` (one command)."""

    module: str
    help: str


ENTRIES = {
    "train": Entry("agentrl.cli.train", "Train an agent by a config file, with a live view."),
    "eval": Entry("agentrl.cli.evaluate", "Evaluate a run's newest policy, or a config's model, on held-out tasks."),
    "runs": Entry("agentrl.cli.runs", "List, show, plot and check runs; print transcripts."),
    "plan": Entry("agentrl.cli.plan", "Say what a step takes before it is run; fit and compare plans."),
    "config": Entry("agentrl.cli.config", "Check a config file, or show the whole tree with its defaults."),
    "env": Entry("agentrl.cli.env", "Make, list, show and play environments."),
    "sandbox": Entry(
        "agentrl.cli.sandbox", "Look after sandboxes: list, show, exec, shell, logs, copy, remove, sweep."
    ),
    "serve": Entry("agentrl.cli.serve", "Run one service alone: gateway, sandbox, reward or engine."),
    "model": Entry("agentrl.cli.model", "Build and warm-start a tiny model; prepare vLLM."),
}


def build(chosen: str) -> typer.Typer:
    """The command tree, with only the `chosen` entry's module imported."""
    app = typer.Typer(
        help="Train LLM agents with reinforcement learning in the harness, tools and sandboxes they are deployed with.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for name, entry in ENTRIES.items():
        if name != chosen:
            app.command(name, help=entry.help)(lambda: None)
            continue
        module = importlib.import_module(entry.module)
        if hasattr(module, "command"):
            app.command(name, help=entry.help)(module.command)
        else:
            app.add_typer(module.app, name=name, help=entry.help, no_args_is_help=True)
    return app


def report(error: AgentRLError) -> int:
    """Print an error as a person wants to read it; returns the exit code."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if stderr := error.detail.get("stderr"):
        console.print(escape(str(stderr)))
    console.print(f"[bold red]{error.code}[/] [red]{escape(error.message)}[/]")
    return 2 if isinstance(error, ConfigError | PluginError) else 1


def main(arguments: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if arguments is None else arguments)
    chosen = next((word for word in given if not word.startswith("-")), "")
    try:
        build(chosen)(given, prog_name="agentrl")
    except AgentRLError as error:
        raise SystemExit(report(error)) from None


if __name__ == "__main__":
    main()
