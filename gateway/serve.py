"""Answers one model call over HTTP, whatever its wire protocol. Called by the routes of `app`.

Invariant: what refuses a call comes as an HTTP status, before any byte of a stream; the terminal byte leaves
after the call is in the store; a harness never sees 429.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from pydantic_core import to_json
from starlette.background import BackgroundTask

from agentrl.core.errors import AgentRLError
from agentrl.core.telemetry import Metrics
from gateway.session import Session
from gateway.sessions import Sessions
from gateway.tree import Node
from gateway.wire.protocol import Wire, WireCall

KEEP_ALIVE_S = 5.0
"""Longest silence of a stream."""


def session_key(request: Request) -> str:
    """The capability of a call: from the path, as Bearer or as x-api-key."""
    in_path = request.path_params.get("key")
    if in_path:
        return str(in_path)
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token if scheme.lower() == "bearer" and token else request.headers.get("x-api-key", "")


class CallServer:
    """One wire protocol's calls."""

    def __init__(self, wire: Wire, sessions: Sessions, metrics: Metrics) -> None:
        self._wire = wire
        self._sessions = sessions
        self._metrics = metrics

    async def respond(self, request: Request) -> Response:
        began = time.monotonic()
        try:
            body = await request.body()
            session = await self._sessions.by_key(session_key(request))
            call = self._wire.parse(body, request.headers)
            future = session.begin(call.request)
            if call.stream:
                events = self._events(session, call, future, began)
                return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
            node = await session.answer(future)
        except AgentRLError as error:
            return self._refusal(error)
        self._done(began)
        content = to_json(call.answer(node))
        return Response(content, media_type="application/json", background=BackgroundTask(_flushed, session, node))

    async def _events(
        self, session: Session, call: WireCall, future: asyncio.Future[Node], began: float
    ) -> AsyncIterator[bytes]:
        waiting = asyncio.ensure_future(session.answer(future))
        try:
            while not (await asyncio.wait({waiting}, timeout=KEEP_ALIVE_S))[0]:
                yield b": keep-alive\n\n"
            node = waiting.result()
        except AgentRLError as error:
            self._metrics.inc("gateway/calls_total", outcome=error.code)
            yield self._wire.failure_event(error)
            return
        finally:
            waiting.cancel()
        for event in call.events(node):
            yield event
        self._done(began)
        session.flushed(node)

    def _done(self, began: float) -> None:
        self._metrics.inc("gateway/calls_total", outcome="ok")
        self._metrics.observe("gateway/call_seconds", time.monotonic() - began)

    def _refusal(self, error: AgentRLError) -> Response:
        self._metrics.inc("gateway/calls_total", outcome=error.code)
        headers = {"x-should-retry": "true" if error.retryable else "false"}
        content = to_json(self._wire.failure(error))
        return Response(content, status_code=error.status, headers=headers, media_type="application/json")


async def _flushed(session: Session, node: Node) -> None:
    session.flushed(node)
