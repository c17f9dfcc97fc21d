"""Arguments that several commands share: a config file with overrides, and the name or folder of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from agentrl.core.config import RunConfig, load_config
from agentrl.core.errors import ConfigError
from agentrl.launch.layout import RunFolder

RUNS = Path("runs")

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG] [SECTION.KEY=VALUE]...",
        help="Config in TOML (all defaults without one), and settings that replace the file's.",
        show_default=False,
    ),
]
"""Arguments for `split_arguments`."""


def read_config(words: Sequence[str] | None) -> RunConfig:
    """The config that `Words` name."""
    path, overrides = split_arguments(words or ())
    return load_config(path, overrides)


def split_arguments(words: Sequence[str]) -> tuple[Path | None, tuple[str, ...]]:
    """`[FILE] [section.key=value ...]`: the file, if any, and the overrides."""
    files = [word for word in words if "=" not in word]
    if len(files) > 1:
        raise ConfigError(f"give one file and settings as section.key=value, not {' '.join(files)}")
    return (Path(files[0]) if files else None), tuple(word for word in words if "=" in word)


def find_run(name: str, runs: Path = RUNS) -> RunFolder:
    """A run by its folder or by its name under `runs`."""
    for path in (Path(name), runs / name):
        if RunFolder(path).exists:
            return RunFolder(path)
    raise ConfigError(
        f"no run {name!r}: neither {name} nor {runs / name} holds a config.toml (see `agentrl runs list`)"
    )
