"""A shell in a sandbox, a line at a time over exec. Used by `agentrl sandbox shell`.

Each line is one command of its own, so whatever it does to its shell (a syntax error, `exec`, a kill) the next line
works. Invariant: folder and exported variables pass from line to line through a file in the sandbox.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
import uuid
from collections.abc import Iterator

import typer

from agentrl.core.types import ExecRequest, ExecResult
from sandbox.client import RemoteSandbox
from sandbox.runtime.processes import MARKER

LINE = f"""
state=$1
[ -f "$state.env" ] && . "$state.env"
[ -f "$state.cwd" ] && cd -- "$(cat "$state.cwd")"
trap 'code=$?; (unset {MARKER}; export -p) >"$state.env"; pwd >"$state.cwd"; exit $code' EXIT
eval "$2"
"""
LEAVE = frozenset({"exit", "logout"})


class Shell:
    def __init__(self, sandbox: RemoteSandbox, *, timeout_s: float) -> None:
        self.status = 0
        """Exit code of the last line."""
        self._sandbox, self._timeout_s = sandbox, timeout_s
        self._state = f"/tmp/.shell-{uuid.uuid4().hex[:8]}"

    def lines(self) -> Iterator[str]:
        """What the person types, until the end of input or `exit`; with history and editing on a terminal."""
        terminal = sys.stdin.isatty()
        if terminal:
            # Importing it is what gives `input` its line editing.
            importlib.import_module("readline")
        while True:
            try:
                line = input(f"{self._sandbox.id}$ " if terminal else "")
            except EOFError:
                return
            except KeyboardInterrupt:
                typer.echo()
                continue
            if line.strip() in LEAVE:
                return
            if line.strip():
                yield line

    def run(self, runner: asyncio.Runner, line: str) -> ExecResult | None:
        """One line's result; None when the person stopped waiting for it."""
        request = ExecRequest(argv=("sh", "-c", LINE, "sh", self._state, line), timeout_s=self._timeout_s)
        try:
            return runner.run(self._sandbox.exec(request))
        except KeyboardInterrupt:
            typer.echo(f"[not waiting any longer; the command goes on for at most {self._timeout_s:.0f} s]", err=True)
            return None
