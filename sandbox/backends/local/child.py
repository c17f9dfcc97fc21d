"""A sandbox as the fork server knows it, and what its end means. Used by `forkserver`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from sandbox.runtime.sandboxd import LEASE_ENDED

Done = Callable[[str], None]
"""Called once: with "" when it is done, or with what went wrong."""


class Child:
    """One sandbox's first process."""

    def __init__(self, name: str, pid: int, uid: int, spec: Mapping[str, Any], status_fd: int, created: Done) -> None:
        self.name, self.pid, self.uid, self.status_fd = name, pid, uid, status_fd
        self.ttl_s: float = spec["ttl_s"]
        self.disk_bytes: int = spec["limits"]["disk_mb"] << 20
        self.frozen = False
        self.created = created
        """Called once with "" when the sandbox serves, or with what went wrong."""
        self.error = b""
        self.destroyed: list[Callable[[], None]] = []
        """Called when it is gone; not empty means that somebody asked for it."""


def cause_of(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"sandboxd was killed by signal {os.WTERMSIG(status)}"
    code = os.WEXITSTATUS(status)
    return "the lease ended without renewal" if code == LEASE_ENDED else f"sandboxd exited with code {code}"
