"""A controller that leads, or waits to lead. Used by `api` and `passing`.

Invariant: requests reach the controller only while it leads; before, each is told where the leader is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.datastructures import State
from starlette.requests import Request

from agentrl.core.errors import Ran, ServiceUnavailable
from sandbox.controller import Controller
from sandbox.election import Election

log = logging.getLogger(__name__)


def controller_of(request: Request) -> Controller:
    """The leading controller of this process. ServiceUnavailable names the leader's URL in `detail.leader`."""
    state = request.app.state
    controller: Controller | None = state.controller
    if controller is not None and controller.leads():
        return controller
    seat = state.election.seat if controller is None else None
    leader = seat.url if seat else ""
    raise ServiceUnavailable(
        f"this sandbox controller is a standby; {f'{leader} leads' if leader else 'nobody leads yet'}",
        ran=Ran.NO,
        detail={"leader": leader},
    )


@asynccontextmanager
async def candidate(
    state: State, controller: Controller, election: Election, lost: Callable[[], None]
) -> AsyncIterator[None]:
    """Serve as standby, then as leader. At the end the sandboxes are left to the next leader."""
    state.controller, state.election = None, election
    holding: list[asyncio.Task[None]] = []

    def step_down() -> None:
        state.controller = None
        lost()

    async def lead() -> None:
        await election.campaign()
        holding.append(asyncio.create_task(election.hold(step_down)))
        try:
            await controller.start()
        except Exception:
            log.exception("the new leader cannot work")
            step_down()
            raise
        state.controller = controller

    leading = asyncio.create_task(lead())
    try:
        yield
    finally:
        leading.cancel()
        await asyncio.gather(leading, return_exceptions=True)
        if state.controller is not None:
            state.controller = None
            await controller.detach()
        for task in holding:
            task.cancel()
        await asyncio.gather(*holding, return_exceptions=True)
        await election.resign()
