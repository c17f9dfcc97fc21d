"""The one way services are served and called. Used by every room that speaks HTTP.

Each app answers `/healthz`, `/readyz` and `/metrics`, checks a bearer token on everything else,
and turns every error into the envelope of `agentrl.core.errors`. `Service` is the calling side: it
raises the error that the other side sent, and says of a broken connection whether the request ran.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json as jsonlib
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any

import aiohttp
import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from httpx_aiohttp import HttpxAiohttpClient
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from agentrl.core.errors import (
    AgentRLError,
    CapacityError,
    NotFound,
    Ran,
    RequestError,
    ServiceUnavailable,
    Unauthorized,
    from_envelope,
)
from agentrl.core.telemetry import Metrics

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/metrics"})
CHUNK = 1 << 19
"""Bytes of a request's body that are sent in one piece."""
Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def error_response(error: AgentRLError) -> JSONResponse:
    headers = {"x-should-retry": "true" if error.retryable else "false"}
    if isinstance(error, CapacityError):
        headers["retry-after"] = f"{error.retry_after_s:.0f}"
    return JSONResponse(error.envelope(), status_code=error.status, headers=headers)


class BearerAuth:
    """ASGI middleware: 401 unless `Authorization: Bearer TOKEN`. `exempt` names paths with an auth of their own."""

    def __init__(self, app: ASGIApp, token: str, exempt: Callable[[str], bool]) -> None:
        self.app = app
        self.expected = f"Bearer {token}".encode()
        self.exempt = exempt

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not (scope["path"] in OPEN_PATHS or self.exempt(scope["path"])):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self.expected):
                refused = error_response(Unauthorized("wrong or missing bearer token"))
                await refused(scope, receive, send)
                return
        await self.app(scope, receive, send)


def create_app(
    name: str,
    *,
    metrics: Metrics,
    token: str = "",
    ready: Callable[[], Awaitable[str]] | None = None,
    lifespan: Lifespan | None = None,
    exempt: Callable[[str], bool] = lambda path: False,
    facts: Callable[[], Mapping[str, str]] = dict,
) -> FastAPI:
    """A FastAPI app with health, readiness, metrics, auth and the error envelope.

    `ready` returns "" when the service can work, else what it waits for (503 on /readyz).
    `facts` are further fields of /healthz. An empty `token` leaves the app open: for tests and loopback only.
    """
    app = FastAPI(title=name, lifespan=lifespan, docs_url=None, redoc_url=None)
    if token:
        app.add_middleware(BearerAuth, token=token, exempt=exempt)

    @app.exception_handler(AgentRLError)
    async def _known(request: Request, error: AgentRLError) -> JSONResponse:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def _malformed(request: Request, error: RequestValidationError) -> JSONResponse:
        where = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        return error_response(RequestError(f"{request.method} {request.url.path}: {where}"))

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        missing = NotFound(f"{request.method} {request.url.path}: {error.detail}")
        response = error_response(missing if error.status_code == 404 else RequestError(missing.message))
        response.status_code = error.status_code
        return response

    @app.exception_handler(Exception)
    async def _bug(request: Request, error: Exception) -> JSONResponse:
        log.exception("unhandled error in %s %s", request.method, _route(request), exc_info=error)
        return error_response(AgentRLError(f"{type(error).__name__}: {error}"))

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"service": name, "status": "ok", **facts()}

    @app.get("/readyz")
    async def readyz() -> Response:
        waiting = await ready() if ready else ""
        return JSONResponse({"service": name, "waiting_for": waiting}, status_code=503 if waiting else 200)

    @app.get("/metrics")
    async def prometheus() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return app


def _route(request: Request) -> str:
    """The path without what fills its parameters, since a session's key may be among them."""
    path = request.url.path
    for name, value in request.path_params.items():
        path = path.replace(str(value), f"{{{name}}}")
    return path


def free_port() -> int:
    """A TCP port on loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def server(app: FastAPI, *, host: str = "127.0.0.1", port: int = 0) -> uvicorn.Server:
    """A configured uvicorn server; `await server(...).serve()` runs it until SIGTERM."""
    config = uvicorn.Config(
        app, host=host, port=port, log_level="warning", access_log=False, loop="uvloop", http="httptools", ws="none",
        timeout_keep_alive=75, backlog=4096,
    )  # fmt: skip
    return uvicorn.Server(config)


@asynccontextmanager
async def serving(app: FastAPI) -> AsyncIterator[str]:
    """Serve `app` on a free loopback port in this event loop; yields its base URL. For tests and embedding."""
    # asyncio turns off Nagle's algorithm only on sockets that name the protocol; with it on, a call takes 40 ms.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    run = server(app)
    # Signals belong to the program that embeds the service: uvicorn would swallow its Ctrl-C.
    run.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    task = asyncio.create_task(run.serve(sockets=[listener]))
    try:
        while not run.started:
            if task.done():
                task.result()
                raise ServiceUnavailable("the service ended while starting", ran=Ran.NO)
            await asyncio.sleep(0.005)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        run.should_exit = True
        await task
        listener.close()


def http_client(
    *, base_url: str = "", token: str = "", timeout_s: float = 60.0, limit: int = 1000
) -> httpx.AsyncClient:
    """An httpx client over aiohttp's transport, which is several times faster under concurrency."""
    headers = {"authorization": f"Bearer {token}"} if token else {}
    client: httpx.AsyncClient = HttpxAiohttpClient(
        base_url=base_url, headers=headers, timeout=httpx.Timeout(timeout_s),
        limits=httpx.Limits(max_connections=limit, max_keepalive_connections=limit),
    )  # fmt: skip
    return client


class Service:
    """Calls one service. Connection refused is `ran=no`; a connection lost later is `ran=maybe`."""

    def __init__(self, base_url: str, *, token: str = "", timeout_s: float = 60.0) -> None:
        self.base_url = base_url.rstrip("/")
        self._client = http_client(base_url=self.base_url, token=token, timeout_s=timeout_s)

    async def request(
        self,
        method: str,
        path: str,
        *,
        json: BaseModel | Mapping[str, Any] | None = None,
        content: bytes | None = None,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> httpx.Response:
        """One request; any status from 400 up raises the error in the envelope."""
        where = f"{method} {self.base_url}{path}"
        sent = dict(headers or {})
        if json is not None:
            content = json.model_dump_json().encode() if isinstance(json, BaseModel) else _dump(json)
            sent["content-type"] = "application/json"
        body: bytes | AsyncIterator[bytes] | None = content
        if content is not None and len(content) > CHUNK:
            # In one piece it would hold up the event loop, of which aiohttp warns.
            body, sent["content-length"] = _chunks(content), str(len(content))
        with _connection_errors(where):
            response = await self._client.request(
                method, path, content=body, params=params, headers=sent,
                timeout=httpx.USE_CLIENT_DEFAULT if timeout_s is None else timeout_s,
            )  # fmt: skip
        if response.status_code >= 400:
            raise _error_of(response, f"{where}: HTTP {response.status_code}")
        return response

    async def healthy(self) -> bool:
        """Whether /readyz answers 200 within two seconds."""
        try:
            await self.request("GET", "/readyz", timeout_s=2.0)
        except AgentRLError:
            return False
        return True

    async def close(self) -> None:
        await self._client.aclose()


async def _chunks(content: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(content), CHUNK):
        yield content[start : start + CHUNK]


def _dump(body: Mapping[str, Any]) -> bytes:
    return jsonlib.dumps(body, separators=(",", ":")).encode()


@contextmanager
def _connection_errors(where: str) -> Iterator[None]:
    try:
        yield
    except httpx.HTTPError as error:
        # The transport also calls a connection that broke under way a connect error: its cause tells them apart.
        if isinstance(error.__cause__, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
            raise ServiceUnavailable(f"{where}: cannot connect: {error}", ran=Ran.NO) from error
        raise ServiceUnavailable(f"{where}: no answer: {type(error).__name__}: {error}", ran=Ran.MAYBE) from error


def _error_of(response: httpx.Response, fallback: str) -> AgentRLError:
    try:
        body = response.json()
    except ValueError:
        body = {}
    error = from_envelope(body if isinstance(body, dict) else {}, f"{fallback}: {response.text[:200]}")
    error.detail.setdefault("http_status", response.status_code)
    return error
