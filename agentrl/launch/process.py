"""One child process: started in a group of its own, stopped for certain. Used by `agentrl.launch.local`."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Role:
    """What to run, and how to see that it is up."""

    name: str
    argv: tuple[str, ...]
    url: str = ""
    """Base URL whose /readyz says that the role is up; empty for one that nobody waits for."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the launcher's environment."""


class Process:
    """A running child. Its output goes to `ROLE.err`, begun anew at every start, so that it holds one traceback."""

    def __init__(self, role: Role, process: asyncio.subprocess.Process, errors: Path) -> None:
        self.role = role
        self._process = process
        self._errors = errors

    @classmethod
    async def start(cls, role: Role, logs: Path) -> Process:
        errors = logs / f"{role.name}.err"
        # A group of its own: Ctrl-C in the terminal reaches the launcher alone, which stops the children in order.
        with errors.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *role.argv, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True, env={**os.environ, **role.env},
            )  # fmt: skip
        return cls(role, process, errors)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        """The exit code; minus the signal's number when a signal ended it."""
        return await self._process.wait()

    async def stop(self, grace_s: float) -> None:
        """TERM, then KILL to the whole group after `grace_s`."""
        if self._process.returncode is None:
            self._process.terminate()
            try:
                async with asyncio.timeout(grace_s):
                    await self._process.wait()
            except TimeoutError:
                self._kill_group()
                await self._process.wait()
        self._kill_group()

    def _kill_group(self) -> None:
        """Also ends what the child itself started and left in its group."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    def said(self, lines: int = 80) -> str:
        """The end of what it wrote to stderr: a traceback, when an exception ended it."""
        return "\n".join(self._errors.read_text(errors="replace").splitlines()[-lines:])
