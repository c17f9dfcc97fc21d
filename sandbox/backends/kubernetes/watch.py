"""The one shared watch over a controller's pods, and what is known of them. Used by `backend`.

Invariants: `pods` never goes back to an older state of the cluster; a pod that vanished while the watch was
broken is reported like any other. After a break the watch goes on where it was, and lists again when the server
no longer has that version (410).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

from agentrl.core.errors import AgentRLError, SandboxError, ServiceUnavailable
from sandbox.backends.kubernetes.cluster import GONE, Cluster, Object, pause_between_tries

log = logging.getLogger(__name__)

WATCH_S = 60
"""Seconds after which the server ends a watch and we begin the next: a connection that died silently ends then."""
T = TypeVar("T")


class PodWatch:
    """`changed` is called with a name and the pod, or None when it is gone."""

    def __init__(self, cluster: Cluster, selector: str, changed: Callable[[str, Object | None], None]) -> None:
        self._cluster, self._selector, self._changed = cluster, selector, changed
        self.pods: dict[str, Object] = {}
        self.relists = 0
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        self._version = ""
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when every pod that there is now is known."""
        await self._list()
        self._task = asyncio.create_task(self._run(), name="pod-watch")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    def check(self) -> None:
        """Raises when the watch itself failed, so that nobody takes what it knew for what is."""
        if self._task is not None and self._task.done():
            raise SandboxError(f"the watch over the pods ended: {self._task.exception()!r}: restart the controller")

    async def until(self, name: str, check: Callable[[Object | None], T | None], timeout_s: float) -> T:
        """What `check` says of the pod, as soon as that is not None. TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while (found := check(self.pods.get(name))) is None:
                change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._waiting.setdefault(name, []).append(change)
                await change
            return found

    def learned(self, pod: Object) -> None:
        """A pod that the server told us of outside the watch; what the watch knows of it is newer."""
        self.pods.setdefault(pod["metadata"]["name"], pod)

    def forget(self, name: str) -> None:
        """The server says that this pod is gone."""
        if name in self.pods:
            self._apply(name, None)

    async def _run(self) -> None:
        failures = 0
        while True:
            try:
                if not self._version:
                    await self._list()
                await self._follow()
                failures = 0
            except AgentRLError as error:
                log.warning("the watch over the sandboxes' pods broke and goes on: %s", error)
                await pause_between_tries(failures)
                failures += 1

    async def _follow(self) -> None:
        async for event in self._cluster.watch("pods", self._selector, self._version, seconds=WATCH_S):
            found = event["object"]
            if event["type"] == "ERROR":
                self._version = ""
                if found.get("code") == GONE:
                    return
                raise ServiceUnavailable(f"the watch ended with {found.get('reason')}: {found.get('message')}")
            self._version = found["metadata"]["resourceVersion"]
            if event["type"] != "BOOKMARK":
                self._apply(found["metadata"]["name"], None if event["type"] == "DELETED" else found)

    async def _list(self) -> None:
        # Only what was known before may count as vanished: a list can be older than a pod created meanwhile.
        known = set(self.pods)
        items, version = await self._cluster.list("pods", self._selector)
        self.relists += 1
        for pod in items:
            self._apply(pod["metadata"]["name"], pod)
        for name in known - {pod["metadata"]["name"] for pod in items}:
            self._apply(name, None)
        self._version = version

    def _apply(self, name: str, pod: Object | None) -> None:
        if pod is None:
            self.pods.pop(name, None)
        else:
            self.pods[name] = pod
        self._changed(name, pod)
        for change in self._waiting.pop(name, ()):
            if not change.done():
                change.set_result(None)
