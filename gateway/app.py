"""The gateway's HTTP service, built from the parts it is given. Called by `launch` and by tests.

Invariant: every route but the harness's own needs the admin token; the harness's routes need a session key.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Header, Request, Response
from fastapi.responses import JSONResponse
from pydantic import TypeAdapter
from starlette.routing import Route

from agentrl.core.config import GatewayConfig
from agentrl.core.db import Database
from agentrl.core.errors import RequestError
from agentrl.core.http import create_app, server
from agentrl.core.protocols import Engine
from agentrl.core.rendering import ConversationRenderer, load_renderer
from agentrl.core.telemetry import Metrics
from agentrl.core.types import SessionGrant, SessionRequest, Trajectory, Value
from gateway.metrics import SPECS
from gateway.pool import ReplicaPool, ReplicaView
from gateway.sampler import Sampler
from gateway.serve import CallServer, session_key
from gateway.session import Services
from gateway.sessions import Sessions
from gateway.store import SessionStore, open_store
from gateway.wire.chat import ChatWire

_trajectories = TypeAdapter(tuple[Trajectory, ...])
_session_id = re.compile(r"[A-Za-z0-9_.-]{1,64}")

SHUTDOWN_S = 5
"""Seconds that open connections get to end after SIGTERM; harnesses retry what is cut."""


class ReplicaUpdate(Value):
    """Body of `PUT /v1/pool/replicas`."""

    url: str
    version: int
    accepting: bool


def create_gateway_app(
    *,
    engines: Sequence[Engine],
    renderer: ConversationRenderer,
    database: Database,
    config: GatewayConfig,
    token: str = "",
) -> FastAPI:
    """The service. Engines and database stay the caller's to close."""
    metrics = Metrics(SPECS)
    pool = ReplicaPool(engines, metrics)
    sampler = Sampler(pool, metrics, stop_token_ids=renderer.stop_token_ids, max_attempts=config.max_attempts)
    store = SessionStore(database)
    sessions = Sessions(Services(renderer, pool, sampler, store, metrics, config.call_timeout_s))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        pool.start(await store.held_back())
        tidying = asyncio.create_task(sessions.keep_tidy(config.keep_s))
        yield
        tidying.cancel()
        await asyncio.gather(tidying, return_exceptions=True)
        await sessions.close()
        await pool.close()

    async def ready() -> str:
        return "" if any(view.live for view in pool.views()) else "a live engine replica"

    app = create_app("gateway", metrics=metrics, token=token, ready=ready, lifespan=lifespan, exempt=_harness_path)
    chat = CallServer(ChatWire(renderer), sessions, metrics)
    app.router.routes[:0] = _harness_routes(sessions, pool, chat)
    app.include_router(_admin_routes(sessions, pool, store))
    return app


def _harness_path(path: str) -> bool:
    return path.startswith(("/s/", "/v1/chat/", "/v1/models"))


def _admin_routes(sessions: Sessions, pool: ReplicaPool, store: SessionStore) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/sessions")
    async def open_session(
        body: SessionRequest, request: Request, idempotency_key: Annotated[str, Header()] = ""
    ) -> SessionGrant:
        if idempotency_key and not _session_id.fullmatch(idempotency_key):
            raise RequestError("Idempotency-Key becomes the session's id: 1 to 64 letters, digits and any of _ . -")
        session = await sessions.open(body, idempotency_key=idempotency_key)
        return SessionGrant(id=session.id, key=session.key, base_url=f"{request.base_url}s/{session.key}/v1")

    @router.post("/v1/sessions/{session_id}/seal")
    async def seal(session_id: str) -> Response:
        return _json(_trajectories.dump_json(await sessions.seal(session_id)))

    @router.get("/v1/sessions/{session_id}/trajectories")
    async def trajectories(session_id: str) -> Response:
        return _json(_trajectories.dump_json((await sessions.by_id(session_id)).trajectories()))

    @router.get("/v1/pool")
    async def replicas() -> list[ReplicaView]:
        return pool.views()

    @router.put("/v1/pool/replicas")
    async def set_replica(body: ReplicaUpdate) -> list[ReplicaView]:
        await pool.set_replica(body.url, version=body.version, accepting=body.accepting)
        # Before the updater hears of it: a gateway that restarts during an update must not send calls into it.
        await store.set_accepting(body.url, body.accepting)
        return pool.views()

    return router


def _harness_routes(sessions: Sessions, pool: ReplicaPool, chat: CallServer) -> list[Route]:
    """Plain routes: FastAPI's checks of parameters and results cost more than the call itself."""

    async def models(request: Request) -> Response:
        await sessions.by_key(session_key(request))
        return JSONResponse({"object": "list", "data": [_model("policy", pool.context)]})

    async def model(request: Request) -> Response:
        await sessions.by_key(session_key(request))
        return JSONResponse(_model(request.path_params["name"], pool.context))

    routes = []
    for prefix in ("/s/{key}/v1", "/v1"):
        routes.append(Route(f"{prefix}/chat/completions", chat.respond, methods=["POST"]))
        routes.append(Route(f"{prefix}/models", models))
        routes.append(Route(f"{prefix}/models/{{name:path}}", model))
    return routes


def _model(name: str, context: int | None) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "agentrl", "max_model_len": context}


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")


async def run_gateway(
    *,
    engines: Sequence[Engine],
    tokenizer: Path,
    renderer: str,
    store_url: str,
    config: GatewayConfig,
    token: str,
    host: str = "127.0.0.1",
    port: int = 0,
) -> None:
    """Serve until SIGTERM. `tokenizer` is a folder with tokenizer.json, `renderer` a name that `renderers` knows."""
    loaded = load_renderer(tokenizer, renderer)
    database = await open_store(store_url)
    try:
        app = create_gateway_app(engines=engines, renderer=loaded, database=database, config=config, token=token)
        service = server(app, host=host, port=port)
        service.config.timeout_graceful_shutdown = SHUTDOWN_S
        await service.serve()
    finally:
        await database.close()
