"""Closing the pool ends its health checks, at whatever moment of theirs it comes."""

from __future__ import annotations

import asyncio

import pytest

from agentrl.core.errors import Ran, ServiceUnavailable
from agentrl.core.protocols import EngineStatus
from agentrl.core.telemetry import Metrics
from agentrl.testing.engine import ScriptedEngine
from gateway.metrics import SPECS
from gateway.pool import ReplicaPool


class Gone(ScriptedEngine):
    """Refuses after so many turns of the event loop."""

    def __init__(self, turns: int) -> None:
        super().__init__([])
        self.turns = turns

    async def status(self) -> EngineStatus:
        for _ in range(self.turns):
            await asyncio.sleep(0)
        raise ServiceUnavailable("cannot connect", ran=Ran.NO)


@pytest.mark.parametrize("waited", range(6))
async def test_it_ends_while_a_check_fails(waited: int) -> None:
    pool = ReplicaPool([Gone(2)], Metrics(SPECS))
    pool.start()
    for _ in range(waited):
        await asyncio.sleep(0)
    async with asyncio.timeout(20):
        await pool.close()
