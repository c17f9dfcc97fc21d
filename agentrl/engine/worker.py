"""The thread that steps the scheduler, beside the server's event loop.

Used by the server, from its event loop. Commands run between steps, in the order in which they were given. Results
cross to the loop once a step, whatever their number.

Invariant: a submitted sequence's future always resolves: with the sequence, or, when the thread died, with EngineError
while `failed` carries the cause for whoever runs the process.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from agentrl.core.errors import EngineError, Ran
from agentrl.engine.scheduler import Scheduler
from agentrl.engine.sequence import Sequence

T = TypeVar("T")


class Worker:
    def __init__(self, scheduler: Scheduler) -> None:
        """To be made on the event loop that serves."""
        self.scheduler = scheduler
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = self._loop.create_future()
        """Never has a result; its exception is what killed the thread."""
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        """None ends the thread."""
        self._waited: dict[Sequence, asyncio.Future[Sequence]] = {}
        self._thread = threading.Thread(target=self._run, name="engine-scheduler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    async def stop(self) -> None:
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    def submit(self, sequence: Sequence) -> asyncio.Future[Sequence]:
        """Queue a sequence; the future has it once it has ended."""
        self._check()
        done = self._waited[sequence] = self._loop.create_future()
        self._commands.put(lambda: self.scheduler.add(sequence))
        return done

    async def call(self, function: Callable[[Scheduler], T]) -> T:
        """Run `function` between two steps."""
        self._check()
        answer: concurrent.futures.Future[T] = concurrent.futures.Future()

        def command() -> None:
            try:
                answer.set_result(function(self.scheduler))
            except Exception as error:
                answer.set_exception(error)

        self._commands.put(command)
        waited = asyncio.wrap_future(answer)
        either: list[asyncio.Future[Any]] = [waited, self.failed]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        self._check()
        return await waited

    def abort(self, which: Callable[[Sequence], bool]) -> None:
        """End those sequences before the next step."""
        self._commands.put(lambda: self._hand_over(self.scheduler.abort(which)))

    def _check(self) -> None:
        if self.failed.done():
            raise EngineError("the engine's scheduler has died; its process is ending", ran=Ran.NO)

    # --- on the thread ---

    def _run(self) -> None:
        try:
            while self._obey(wait=self.scheduler.idle):
                if not self.scheduler.idle:
                    self._hand_over(self.scheduler.step())
        except BaseException as error:
            self._loop.call_soon_threadsafe(self._die, error)

    def _obey(self, *, wait: bool) -> bool:
        """Run the commands given so far, or wait for one; False when one of them was to stop."""
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return True
            if command is None:
                self._hand_over(self.scheduler.abort(lambda sequence: True))
                return False
            command()
            wait = False

    def _hand_over(self, ended: list[Sequence]) -> None:
        if ended:
            self._loop.call_soon_threadsafe(self._deliver, ended)

    # --- on the loop ---

    def _deliver(self, ended: list[Sequence]) -> None:
        for sequence in ended:
            done = self._waited.pop(sequence)
            if not done.done():
                done.set_result(sequence)

    def _die(self, error: BaseException) -> None:
        self.failed.set_exception(error)
        self.failed.exception()
        lost = EngineError(f"the engine's scheduler died: {type(error).__name__}: {error}", ran=Ran.MAYBE)
        for done in self._waited.values():
            if not done.done():
                done.set_exception(lost)
                # Marks it as seen: nobody may be left to ask, since the caller can have disconnected.
                done.exception()
        self._waited.clear()
