"""Which containers are ours, and why those that ended did. Used by `backend`.

Invariant: an end is told once, to whoever creates the sandbox while it is being made, to the controller afterwards.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from sandbox.backends.base import Ended
from sandbox.backends.docker.container import SANDBOX, cause_of

KEPT_CAUSES = 10_000
OOM_S = 2.0
"""An OOM event and an end by KILL within this time are one happening."""


class Ends:
    def __init__(self) -> None:
        self.told: Ended = lambda sandbox_id, cause: None
        self.containers: dict[str, str] = {}
        """Container ids by sandbox id, of those that are created, started or live."""
        self.starting: dict[str, asyncio.Future[str]] = {}
        """Resolved with a cause when a container ends before it serves."""
        self.causes: OrderedDict[str, str] = OrderedDict()
        self._oom_at: dict[str, float] = {}

    def event(self, event: Mapping[str, Any]) -> tuple[str, str] | None:
        """The sandbox and the container, when the event is the end of one of ours."""
        attributes, container = event["Actor"]["Attributes"], event["Actor"]["ID"]
        sandbox_id = attributes[SANDBOX]
        if self.containers.get(sandbox_id) != container:
            return None
        if event["Action"] == "oom":
            self._oom_at[sandbox_id] = time.monotonic()
            return None
        oom = time.monotonic() - self._oom_at.get(sandbox_id, -OOM_S) < OOM_S
        self.gone(sandbox_id, cause_of(int(attributes["exitCode"]), oom=oom))
        return sandbox_id, container

    def gone(self, sandbox_id: str, cause: str) -> None:
        starting = self.starting.get(sandbox_id)
        if starting is not None:
            # Whoever creates it reads its logs, and destroys it.
            if not starting.done():
                starting.set_result(cause)
        elif self.containers.pop(sandbox_id, None) is not None:
            self.causes[sandbox_id] = cause
            self._oom_at.pop(sandbox_id, None)
            if len(self.causes) > KEPT_CAUSES:
                self.causes.popitem(last=False)
            self.told(sandbox_id, cause)

    def forget(self, sandbox_id: str) -> str | None:
        """It is destroyed; returns its container, if one is known."""
        self.causes.pop(sandbox_id, None)
        self._oom_at.pop(sandbox_id, None)
        return self.containers.pop(sandbox_id, None)
