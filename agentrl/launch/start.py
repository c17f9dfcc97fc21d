"""Decides which folder a launch works in, and with which config: a new run, or one that goes on.

Called by the commands that train. Invariant: a folder with a run in it is only ever entered by a resume, and
never by two launchers at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from agentrl.core.config import RunConfig, load_config
from agentrl.core.errors import ConfigError
from agentrl.launch.layout import RunFolder
from agentrl.launch.status import read_status

FIXED = ("name", "dir", "seed", "env", "model", "warm_start")
"""Settings that a run's state was made from: a resume cannot change them."""


def new_run(config: RunConfig, *, name: str | None) -> tuple[RunFolder, RunConfig]:
    """A fresh folder with the config in it. `name` insists on that name; without it a taken one gets a number."""
    wanted = config.model_copy(update={"name": name or config.name})
    if RunFolder(wanted.folder).exists:
        if name:
            raise ConfigError(
                f"{wanted.folder} already holds a run: continue it with `agentrl train --resume --name {name}`, or "
                "choose another --name"
            )
        names = (f"{config.name}-{n}" for n in itertools.count(2))
        fresh = next(one for one in names if not RunFolder(Path(config.dir) / one).exists)
        wanted = config.model_copy(update={"name": fresh})
    folder = RunFolder(wanted.folder)
    folder.create(wanted)
    return folder, wanted


def resumed_run(path: Path, overrides: Sequence[str]) -> tuple[RunFolder, RunConfig]:
    """An existing folder, with its own config and the overrides that a resume may bring."""
    folder = RunFolder(path)
    before = folder.config()
    status = read_status(folder.status)
    if status is not None and status.alive:
        raise ConfigError(f"{path} is being worked on by process {status.pid}: stop that one first")
    after = load_config(folder.config_file, overrides)
    for key in FIXED:
        if getattr(before, key) != getattr(after, key):
            raise ConfigError(f"{key} cannot change in a resume: {path} was made with {getattr(before, key)!r}")
    folder.create(after)
    return folder, after
