"""Where everything of a run lies. Used by the launcher, by its children and by the commands that read a finished run.

Invariant: a path inside a run's folder is spelled here and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agentrl.core.config import RunConfig, dump_toml, load_config
from agentrl.core.db import sqlite_url
from agentrl.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder `runs/NAME`; docs/architecture.md lists what is in it."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config_file(self) -> Path:
        return self.path / "config.toml"

    @property
    def endpoints(self) -> Path:
        """Base URLs and the token of the run's services; only its owner may read it."""
        return self.path / "endpoints.json"

    @property
    def status(self) -> Path:
        """What the launcher is doing, or how it ended."""
        return self.path / "status.json"

    @property
    def model(self) -> Path:
        """The initial model and its tokenizer, Hugging Face format."""
        return self.path / "model"

    @property
    def warm(self) -> Path:
        """The model after the warm start, same format; the policy that version 0 is made of."""
        return self.path / "warm"

    @property
    def weights(self) -> Path:
        return self.path / "weights"

    @property
    def engines(self) -> Path:
        """A folder a replica: the model that it was last started from, composed of `warm` and published weights."""
        return self.path / "engines"

    @property
    def evals(self) -> Path:
        """What `agentrl eval` found of this run: a folder an evaluation, laid out as a run."""
        return self.path / "evals"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def warm_metrics(self) -> Path:
        """Losses of the warm start, one JSON line a step."""
        return self.path / "warm_start.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def curve(self) -> Path:
        return self.path / "curve.png"

    @property
    def episodes(self) -> Path:
        """Example transcripts: won.md and lost.md."""
        return self.path / "episodes"

    def log(self, role: str) -> Path:
        return self.logs / f"{role}.log"

    def store(self, config: RunConfig, room: str) -> str:
        """SQLAlchemy URL of a room's database."""
        return config.store.url or sqlite_url(self.path.absolute() / f"{room}.db")

    @property
    def exists(self) -> bool:
        return self.config_file.exists()

    def config(self) -> RunConfig:
        """The config that this run was started with."""
        if not self.exists:
            raise ConfigError(f"{self.path} holds no run: it has no config.toml (`agentrl runs list` shows the runs)")
        return load_config(self.config_file)

    def adopt_model(self, source: Path) -> None:
        """Make a given model the initial policy as it is."""
        self.warm.symlink_to(source.absolute(), target_is_directory=True)

    def create(self, config: RunConfig) -> None:
        """Make the folder and write the config into it."""
        self.logs.mkdir(parents=True, exist_ok=True)
        self.config_file.write_text(dump_toml(config))
