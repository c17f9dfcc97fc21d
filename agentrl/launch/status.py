"""How a run stands: written by its launcher, read by `agentrl runs` and by whoever wants to start or resume it.

Invariant: `running` is only believed while the process that wrote it lives.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Literal

import psutil

from agentrl.core.types import Value

State = Literal["running", "done", "failed", "stopped"]


class RunStatus(Value):
    state: State
    pid: int
    """Of the launcher."""
    pid_born: float
    """When that process started, Unix seconds: a pid alone may name another process by now."""
    started_at: float
    """Unix seconds."""
    ended_at: float | None = None
    error: str = ""

    @classmethod
    def begin(cls) -> RunStatus:
        pid = os.getpid()
        return cls(state="running", pid=pid, pid_born=psutil.Process(pid).create_time(), started_at=time.time())

    def ended(self, state: State, error: str = "") -> RunStatus:
        return self.model_copy(update={"state": state, "ended_at": time.time(), "error": error})

    @property
    def alive(self) -> bool:
        """Whether its launcher runs now."""
        if self.state != "running":
            return False
        try:
            return bool(abs(psutil.Process(self.pid).create_time() - self.pid_born) < 1.0)
        except psutil.NoSuchProcess:
            return False

    @property
    def shown(self) -> str:
        """The state in a word; a launcher that was killed could not write it down."""
        return "killed" if self.state == "running" and not self.alive else self.state

    def write(self, path: Path) -> None:
        draft = path.with_suffix(".draft")
        draft.write_text(self.model_dump_json(indent=1))
        draft.replace(path)


def read_status(path: Path) -> RunStatus | None:
    """None when no launcher has worked on this folder yet."""
    return RunStatus.model_validate_json(path.read_bytes()) if path.exists() else None
