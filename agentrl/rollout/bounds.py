"""Time limits, patience and company for awaits. Called by `episode`, `evaluate` and `service`.

Invariant: nothing awaited here under a limit outlives it by more than the cancel grace, whatever plugin code
does with its cancellation.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeVar

from pydantic import ValidationError

from agentrl.core.errors import AgentRLError, CapacityError, RolloutError

log = logging.getLogger(__name__)

T = TypeVar("T")
CANCEL_GRACE_S = 2.0
"""What does not end this long after its cancellation is left behind."""
TIDY_S = 30.0
"""How long a clean-up may take: the service may be restarting."""


class Expired(Exception):
    """A limit of `within` passed. Kept out of the error tree, and apart from a TimeoutError that plugin code raises."""


async def within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, or Expired. Work that ignores its cancellation is left behind, and logged."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=max(0.0, seconds))
        if not task.done():
            raise Expired(f"not done after {seconds:.1f} s")
        if task.cancelled():
            raise RolloutError("the attempt cancelled itself")
        return task.result()
    finally:
        if not task.done():
            await _stop(task)


async def _stop(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait({task}, timeout=CANCEL_GRACE_S)
    if not task.done():
        log.error("%r ignores its cancellation and is left behind", task.get_coro())
        task.add_done_callback(_report)
    else:
        _report(task)


def _report(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("an attempt that was out of time ended with %r", error)


async def patiently(call: Callable[[], Awaitable[T]]) -> T:
    """Repeat `call` while it fails with a retryable error; bounded by the caller's `within`."""
    pause = 0.1
    while True:
        try:
            return await call()
        except AgentRLError as error:
            if not error.retryable:
                raise
            log.debug("waiting to try again: %s", error)
            wait = error.retry_after_s if isinstance(error, CapacityError) else pause
        await asyncio.sleep(wait)
        pause = min(2.0, pause * 2)


async def tidy(work: Coroutine[Any, Any, Any], what: str) -> None:
    """A clean-up whose failure loses nothing: the other side's lease or limit does it later."""
    try:
        await within(TIDY_S, work)
    except (AgentRLError, ValidationError, Expired) as error:
        log.warning("%s failed, its lease will end it: %s", what, error)


@asynccontextmanager
async def released(lease: AbstractAsyncContextManager[T], what: str) -> AsyncIterator[T]:
    """Hold `lease`; a failure to release it is logged and does not lose what was done under it."""
    held = await lease.__aenter__()
    try:
        yield held
    finally:
        await tidy(_leave(lease), what)


async def _leave(lease: AbstractAsyncContextManager[Any]) -> None:
    await lease.__aexit__(None, None, None)


async def together(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Await all; the first exception cancels the others and is raised as it is, with its own traceback."""
    running = [asyncio.ensure_future(coroutine) for coroutine in work]
    try:
        if running:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
