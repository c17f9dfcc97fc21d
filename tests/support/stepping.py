"""Drives a coroutine await by await. For tests of what a cancellation leaves."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Coroutine, Generator
from types import coroutine
from typing import Any


@coroutine
def cancelled_at(number: int, work: Coroutine[Any, Any, Any]) -> Generator[Any, Any, bool]:
    """Run `work`, cancelled at the await of that number. False when it has fewer."""
    task = asyncio.current_task()
    assert task is not None
    count, step = 0, functools.partial(work.send, None)
    try:
        while True:
            waits_for = step()
            count += 1
            if count == number:
                task.cancel()
            try:
                step = functools.partial(work.send, (yield waits_for))
            except BaseException as error:
                step = functools.partial(work.throw, error)
    except StopIteration:
        return False
    except asyncio.CancelledError:
        task.uncancel()
        return True
