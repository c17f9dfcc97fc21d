"""Saves and restores a trainer: weights, optimizer, random state, step and version. Used by `loop`.

Invariant: a checkpoint is seen whole or not at all. It is written beside its place, flushed to disk, and renamed;
one whose bytes do not match its checksums (a torn disk, a stray edit) is passed over for the one before it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from agentrl.core.errors import TrainError
from agentrl.core.files import flush
from agentrl.train.model import load_weights, weights_of
from agentrl.train.trainer import Trainer

log = logging.getLogger(__name__)

WEIGHTS = "model.safetensors"
REST = "trainer.pt"
SEAL = "checkpoint.json"
"""Written last: step, version, and the checksum of every other file."""
PREFIX = "step-"


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The checkpoints of one run."""

    folder: Path
    keep: int
    """Newest ones that stay on disk."""

    def save(self, trainer: Trainer) -> str:
        """Write the trainer's state; returns the checkpoint's name. Not while a step is running."""
        name = f"{PREFIX}{trainer.state.step:06d}"
        draft = self.folder / f".{name}.draft"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        tensors = {key: tensor.contiguous() for key, tensor in weights_of(trainer.model).items()}
        save_file(tensors, draft / WEIGHTS)
        rest = {"optimizer": trainer.optimizer.state_dict(), "rng": trainer.state.rng.get_state()}
        torch.save(rest, draft / REST)
        seal = {
            "step": trainer.state.step,
            "version": trainer.state.version,
            "sha256": {file: _digest(draft / file) for file in (WEIGHTS, REST)},
        }
        (draft / SEAL).write_text(json.dumps(seal))
        for file in (WEIGHTS, REST, SEAL):
            flush(draft / file)
        flush(draft)
        target = self.folder / name
        shutil.rmtree(target, ignore_errors=True)
        draft.rename(target)
        flush(self.folder)
        for old in self.names()[: -self.keep]:
            shutil.rmtree(self.folder / old)
        return name

    def restore(self, trainer: Trainer) -> str | None:
        """Load the newest whole checkpoint into the trainer; its name, or None when there is none at all.

        TrainError when there are checkpoints but none is whole: starting over would train on claimed groups twice.
        """
        names = self.names()
        for name in reversed(names):
            folder = self.folder / name
            problem = _problem(folder)
            if problem:
                log.warning("checkpoint %s is passed over: %s", folder, problem)
                continue
            seal = json.loads((folder / SEAL).read_text())
            rest = torch.load(folder / REST, weights_only=True)
            load_weights(trainer.model, load_file(folder / WEIGHTS))
            trainer.optimizer.load_state_dict(rest["optimizer"])
            trainer.state.rng.set_state(rest["rng"])
            trainer.state.step, trainer.state.version = seal["step"], seal["version"]
            return name
        if names:
            raise TrainError(
                f"{self.folder}: none of the checkpoints {', '.join(names)} is whole: restore one from a backup, or "
                "start a new run"
            )
        return None

    def names(self) -> list[str]:
        """Oldest first."""
        if not self.folder.exists():
            return []
        return sorted(path.name for path in self.folder.iterdir() if path.name.startswith(PREFIX))


def _problem(folder: Path) -> str:
    """What keeps a checkpoint from being whole; empty when nothing does."""
    try:
        seal = json.loads((folder / SEAL).read_text())
        for file, told in seal["sha256"].items():
            if _digest(folder / file) != told:
                return f"{file} does not match its checksum"
    except (OSError, ValueError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
