"""Answers one model call over HTTP, whatever its wire protocol. Called by the routes of `app`.

Invariant: what refuses a call comes as an HTTP status, before any byte of a stream; the terminal byte leaves
after the call is in the store; a harness never sees 429.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from pydantic_core import to_json
from starlette.background import BackgroundTask

from agentrl.core.errors import AgentRLError
from agentrl.core.telemetry import Metrics
from gateway.session import Begun, Session
from gateway.sessions import Sessions
from gateway.tree import Node
from gateway.wire.protocol import Wire, WireCall

log = logging.getLogger(__name__)

MAX_NOTED = 50
"""Names of unapplied fields that are logged."""
SESSION_DECIDES = frozenset(
    ("temperature", "top_p", "top_k", "min_p", "reasoning_effort", "verbosity", "chat_template_kwargs")
)
"""Fields that harnesses send by default and that the session, or the policy's template, has settled."""
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
        self._noted: set[str] = set()

    async def respond(self, request: Request) -> Response:
        began = time.monotonic()
        try:
            body = await request.body()
            session = await self._sessions.by_key(session_key(request))
            call = self._wire.parse(body, request.headers)
            begun = session.begin(call.request)
            self._note(call.unapplied)
            if call.stream:
                events = self._events(session, call, begun, began)
                return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
            node = await session.answer(begun.call)
        except AgentRLError as error:
            return self._refusal(error)
        self._done(begun, began)
        content = to_json(call.answer(node))
        return Response(content, media_type="application/json", background=BackgroundTask(_flushed, session, node))

    async def _events(self, session: Session, call: WireCall, begun: Begun, began: float) -> AsyncIterator[bytes]:
        waiting = asyncio.ensure_future(session.answer(begun.call))
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
        self._done(begun, began)
        session.flushed(node)

    def _done(self, begun: Begun, began: float) -> None:
        self._metrics.inc("gateway/calls_total", outcome="replayed" if begun.replayed else "ok")
        self._metrics.observe("gateway/call_seconds", time.monotonic() - began)

    def _note(self, unapplied: tuple[str, ...]) -> None:
        for field in unapplied:
            # Names that nobody knows share one label: a harness must not be able to fill the metrics.
            label = field if field in SESSION_DECIDES else "other"
            self._metrics.inc("gateway/unapplied_fields_total", field=label)
            if field not in self._noted and len(self._noted) < MAX_NOTED:
                self._noted.add(field)
                log.warning("requests carry %r, which is not applied (docs/gateway.md says what is)", field)

    def _refusal(self, error: AgentRLError) -> Response:
        self._metrics.inc("gateway/calls_total", outcome=error.code)
        headers = {"x-should-retry": "true" if error.retryable else "false"}
        content = to_json(self._wire.failure(error))
        return Response(content, status_code=error.status, headers=headers, media_type="application/json")


async def _flushed(session: Session, node: Node) -> None:
    session.flushed(node)
