"""Calls the gateway's admin routes. Constructed by `launch` for rollout (`Sessions`) and the weight updater (`Pool`).

Invariant: every request here is idempotent, so all of them are repeated while the gateway is away, for as long as
a restart takes; a session is opened once however often the request is sent.
"""

from __future__ import annotations

import asyncio
import time
from uuid import uuid4

import httpx
from pydantic import BaseModel, TypeAdapter

from agentrl.core.errors import ServiceUnavailable
from agentrl.core.http import Service
from agentrl.core.types import SessionGrant, SessionRequest, Trajectory, Value

_trajectories = TypeAdapter(tuple[Trajectory, ...])

PATIENCE_S = 60.0
"""How long a gateway that does not answer is asked again."""


class _ReplicaUpdate(Value):
    url: str
    version: int
    accepting: bool


class GatewayClient:
    """Implements the protocols Sessions and Pool."""

    def __init__(self, base_url: str, token: str, *, patience_s: float = PATIENCE_S) -> None:
        self._service = Service(base_url, token=token)
        self._patience_s = patience_s

    async def open(self, request: SessionRequest) -> SessionGrant:
        response = await self._send("POST", "/v1/sessions", json=request, headers={"idempotency-key": uuid4().hex})
        return SessionGrant.model_validate_json(response.content)

    async def seal(self, session_id: str) -> tuple[Trajectory, ...]:
        response = await self._send("POST", f"/v1/sessions/{session_id}/seal")
        return _trajectories.validate_json(response.content)

    async def trajectories(self, session_id: str) -> tuple[Trajectory, ...]:
        response = await self._send("GET", f"/v1/sessions/{session_id}/trajectories")
        return _trajectories.validate_json(response.content)

    async def set_replica(self, url: str, *, version: int, accepting: bool) -> None:
        update = _ReplicaUpdate(url=url, version=version, accepting=accepting)
        await self._send("PUT", "/v1/pool/replicas", json=update)

    async def close(self) -> None:
        await self._service.close()

    async def _send(
        self, method: str, path: str, *, json: BaseModel | None = None, headers: dict[str, str] | None = None
    ) -> httpx.Response:
        deadline = time.monotonic() + self._patience_s
        pause_s = 0.1
        while True:
            try:
                return await self._service.request(method, path, json=json, headers=headers)
            except ServiceUnavailable as error:
                if not error.retryable or time.monotonic() + pause_s > deadline:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(1.0, pause_s * 2)
