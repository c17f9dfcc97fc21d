"""Runs a run's processes on this machine and keeps them running. Used by the commands that train, evaluate and serve.

Invariant: after the `async with` block none of the processes is left, however the block ended. A process that a
signal ended is started again; one that an exception ended takes everything down, with its traceback in the error.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from agentrl.core.errors import LaunchError
from agentrl.core.http import Service
from agentrl.launch.process import Process, Role

log = logging.getLogger(__name__)

BACKOFF_S = (0.1, 0.5, 1.0, 2.0, 5.0)
"""Waits before the restarts that follow each other; a process that lived for STABLE_S starts over."""
STABLE_S = 30.0
READY_S = 180.0
GRACE_S = 10.0


class Watcher(Protocol):
    """Is told what happens to the processes; the live view."""

    def process(self, role: str, state: str) -> None:
        """`state` is one of starting, ready, running (not waited for), restarting, ended."""
        ...


class Supervisor:
    """Starts roles, restarts them, waits for them, stops them."""

    def __init__(self, logs: Path, *, restarts: int, watcher: Watcher, grace_s: float = GRACE_S) -> None:
        self._logs = logs
        self._restarts = restarts
        self._watcher = watcher
        self._grace_s = grace_s
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._processes: dict[str, Process] = {}
        self._users: set[str] = set()
        self._stopping = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.shield(asyncio.ensure_future(self.stop()))

    def pid(self, role: str) -> int:
        return self._processes[role].pid

    async def start(self, roles: Sequence[Role]) -> None:
        """Start services together and wait until each one is ready."""
        for role in roles:
            self._keepers[role.name] = asyncio.create_task(self._keep(role, ends=False), name=f"keep-{role.name}")
        probes = [asyncio.create_task(self._ready(role), name=f"probe-{role.name}") for role in roles if role.url]
        try:
            await self._settle(probes)
        finally:
            for probe in probes:
                probe.cancel()
            await asyncio.gather(*probes, return_exceptions=True)

    async def finish(self, roles: Sequence[Role]) -> None:
        """Start roles that end by themselves and wait until each one ended with exit code 0."""
        keepers = [asyncio.create_task(self._keep(role, ends=True), name=f"keep-{role.name}") for role in roles]
        self._users = {role.name for role in roles}
        self._keepers |= {role.name: keeper for role, keeper in zip(roles, keepers, strict=True)}
        await self._settle(keepers)
        for role in roles:
            self._keepers.pop(role.name)
            self._processes.pop(role.name)
        self._users = set()

    async def _settle(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Wait for `tasks`; a failure of any role, among them or not, is raised at once."""
        waiting = set(tasks)
        while waiting:
            keepers = set(self._keepers.values())
            for task in keepers | waiting:
                if task.done():
                    task.result()
            waiting = {task for task in waiting if not task.done()}
            running = {keeper for keeper in keepers if not keeper.done()}
            if waiting:
                await asyncio.wait(waiting | running, return_when=asyncio.FIRST_COMPLETED)

    async def _keep(self, role: Role, *, ends: bool) -> None:
        """Run one role; returns when it ended well, raises LaunchError when it cannot go on."""
        restarts, in_a_row = 0, 0
        while not self._stopping.is_set():
            started = time.monotonic()
            process = await Process.start(role, self._logs)
            self._processes[role.name] = process
            self._watcher.process(role.name, "starting" if role.url and not restarts else "running")
            code = await process.wait()
            if self._stopping.is_set() or (ends and code == 0):
                break
            if code > 0 or restarts >= self._restarts:
                raise self._gone(role, process, code, restarts)
            in_a_row = in_a_row + 1 if time.monotonic() - started < STABLE_S else 0
            restarts += 1
            self._watcher.process(role.name, "restarting")
            log.warning("%s was ended by %s: restart %d of %d", role.name, _cause(code), restarts, self._restarts)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BACKOFF_S[min(in_a_row, len(BACKOFF_S) - 1)]):
                    await self._stopping.wait()
        self._watcher.process(role.name, "ended")

    def _gone(self, role: Role, process: Process, code: int, restarts: int) -> LaunchError:
        what = f"{role.name} ended with {_cause(code)}"
        if code <= 0:
            what = f"{role.name} was ended by {_cause(code)} after {restarts} restarts (launch.restarts)"
        message = f"{what}; its log is {self._logs / role.name}.log; the run can be continued with --resume"
        return LaunchError(message, detail={"role": role.name, "stderr": process.said()})

    async def _ready(self, role: Role) -> None:
        service = Service(role.url)
        try:
            deadline = time.monotonic() + READY_S
            while not await service.healthy():
                if time.monotonic() > deadline:
                    raise LaunchError(
                        f"{role.name} is not ready after {READY_S:.0f} s; its log is {self._logs / role.name}.log"
                    )
                await asyncio.sleep(0.05)
        finally:
            await service.close()
        self._watcher.process(role.name, "ready")

    async def stop(self) -> None:
        """Stop what runs: first the roles that use the services, then the services."""
        self._stopping.set()
        await asyncio.gather(*(self._stop(name) for name in self._users))
        await asyncio.gather(*(self._stop(name) for name in self._keepers if name not in self._users))

    async def _stop(self, name: str) -> None:
        """A role that is just being restarted is stopped as soon as its new process is there."""
        keeper = self._keepers[name]
        while not keeper.done():
            if name in self._processes:
                await self._processes[name].stop(self._grace_s)
            await asyncio.wait({keeper}, timeout=0.05)
        if name in self._processes:
            await self._processes[name].stop(self._grace_s)
        if (error := keeper.exception()) is not None:
            log.info("%s had ended before: %s", name, error)


def _cause(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


async def interruptible(work: Callable[[], Awaitable[Any]]) -> None:
    """Run `work`; Ctrl-C, TERM and a lost terminal cancel it once, and its `async with` blocks clean up."""
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work())
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def cancel() -> None:
        if not task.cancelling():
            task.cancel()

    for number in signals:
        loop.add_signal_handler(number, cancel)
    try:
        await task
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
