"""Sandboxes and what runs in them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

from pydantic import Field

from agentrl.core.types.value import Value


class SandboxLimits(Value):
    memory_mb: int = Field(512, gt=0)
    pids: int = Field(128, gt=0)
    cpus: float = Field(1.0, gt=0)
    disk_mb: int = Field(256, gt=0)


class SandboxSpec(Value):
    image: str = ""
    """Empty means the backend's default (on `local`: the host's own read-only root)."""
    snapshot: str = ""
    """Id of a snapshot whose files take the place of the image's; `files` are written over them."""
    files: Mapping[str, str] = Field(default_factory=dict)
    """Text files to write before READY; paths are relative to `workdir` or absolute."""
    workdir: str = "/work"
    env: Mapping[str, str] = Field(default_factory=dict)
    limits: SandboxLimits = SandboxLimits()
    ttl_s: float = Field(300.0, gt=0)
    """Lease: seconds without renew or exec after which the sandbox is closed."""


class SandboxState(StrEnum):
    QUEUED = "QUEUED"
    CREATING = "CREATING"
    READY = "READY"
    PAUSED = "PAUSED"
    CLOSING = "CLOSING"
    CLOSED = "CLOSED"
    FAILED = "FAILED"
    LOST = "LOST"


class SandboxView(Value):
    """What the controller says about a sandbox."""

    id: str
    state: SandboxState
    spec: SandboxSpec
    owner: str
    """Tenant or run that asked for it."""
    created_at: float
    """Unix seconds."""
    deadline: float
    """Unix seconds at which the lease ends."""
    cause: str = ""
    """Evidence, in FAILED, LOST and CLOSED."""


class Snapshot(Value):
    """The files of a sandbox as they were, to create others from."""

    id: str
    owner: str
    """Of the sandbox; sandboxes of its tenant may begin from it."""
    sandbox: str
    """Where its files come from."""
    created_at: float
    """Unix seconds."""
    deadline: float
    """Unix seconds at which it is forgotten."""


class ExecRequest(Value):
    argv: tuple[str, ...] = Field(min_length=1)
    stdin: bytes = b""
    cwd: str = ""
    """Empty means the sandbox's workdir."""
    env: Mapping[str, str] = Field(default_factory=dict)
    timeout_s: float = Field(30.0, gt=0)
    cap_bytes: int = Field(1 << 20, gt=0)
    """Most bytes kept of each stream: the first and last halves of the cap."""
    user: str = ""
    """Name or uid to run as; empty means the sandbox's own. UNSUPPORTED where the runtime may not change it."""


class ExecResult(Value):
    """Exists only if the command ran."""

    status: Literal["EXITED", "SIGNALED", "TIMEOUT", "OOM"]
    exit_code: int | None = None
    """Set when EXITED."""
    signal: int | None = None
    """Set when SIGNALED, and for TIMEOUT and OOM the signal that ended it."""
    stdout: bytes = b""
    stderr: bytes = b""
    stdout_total: int = 0
    """Bytes written, of which `stdout` holds at most the cap."""
    stderr_total: int = 0
    duration_s: float = 0.0


class TerminalSize(Value):
    rows: int = Field(24, gt=0, lt=1 << 16)
    columns: int = Field(80, gt=0, lt=1 << 16)


class ProcessRequest(Value):
    """A process to start and follow; it ends with the sandbox at the latest."""

    argv: tuple[str, ...] = Field(min_length=1)
    stdin: bytes = b""
    interactive: bool = False
    """Keep stdin open for more after `stdin`."""
    tty: TerminalSize | None = None
    """Run it in a terminal of that size: it is interactive, and all its output is stdout."""
    cwd: str = ""
    env: Mapping[str, str] = Field(default_factory=dict)
    user: str = ""
    keep_bytes: int = Field(1 << 20, gt=0, le=64 << 20)
    """Most bytes kept of each stream: the newest."""


class ProcessView(Value):
    id: str
    """Its idempotency key."""
    pid: int
    """As seen inside the sandbox."""
    status: Literal["RUNNING", "EXITED", "SIGNALED", "OOM"]
    exit_code: int | None = None
    signal: int | None = None
    stdout_total: int = 0
    """Bytes written so far."""
    stderr_total: int = 0
    duration_s: float = 0.0


class OutputChunk(Value):
    """A piece of a process's stdout or stderr."""

    offset: int
    """Of the first byte of `data`; more than was asked for when older bytes are no longer kept."""
    data: bytes
    total: int
    """Bytes written so far."""
    ended: bool
    """Nothing comes after `data`."""
