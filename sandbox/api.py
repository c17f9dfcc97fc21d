"""The controller over HTTP. `run_sandbox` is started by `launch`; `create_sandbox_app` also by tests.

Invariant: bodies of commands and files pass through as they came, since they are the bulk of the traffic.
Routes are Starlette's own: they skip FastAPI's per-call machinery, of which nothing is needed here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from fastapi import FastAPI
from pydantic import Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentrl.core.config import SandboxConfig
from agentrl.core.db import open_database, sqlite_url
from agentrl.core.errors import ConfigError, RequestError
from agentrl.core.http import create_app, server
from agentrl.core.telemetry import Metrics
from agentrl.core.types import ExecRequest, SandboxSpec, Value
from sandbox.backends.base import Backend
from sandbox.backends.local.backend import LocalBackend
from sandbox.channel import Answer
from sandbox.controller import Controller
from sandbox.metrics import SPECS
from sandbox.states import Record
from sandbox.store import SandboxStore

V = TypeVar("V", bound=Value)

MIGRATIONS = Path(__file__).parent / "migrations"


class CreateRequest(Value):
    """Body of `POST /v1/sandboxes`."""

    owner: str
    spec: SandboxSpec = SandboxSpec()


class RenewRequest(Value):
    """Body of `POST /v1/sandboxes/{id}/renew`."""

    ttl_s: float = Field(gt=0)


def make_backend(config: SandboxConfig, folder: Path) -> Backend:
    if config.backend == "local":
        return LocalBackend(folder, require_isolation=config.require_isolation)
    raise ConfigError(f"sandbox.backend = {config.backend!r} is not built yet: use 'local'")


def create_sandbox_app(
    config: SandboxConfig,
    *,
    folder: Path,
    store_url: str = "",
    token: str = "",
    sweep_s: float = 3.0,
) -> FastAPI:
    """The service. `folder` holds the backend's state, and the SQLite store when `store_url` is empty."""
    metrics = Metrics(SPECS)
    backend = make_backend(config, folder / "sandbox")

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        url = store_url or sqlite_url(folder / "sandbox.db")
        store = SandboxStore(await open_database(url, room="sandbox", migrations=MIGRATIONS))
        controller = Controller(backend, store, metrics=metrics, capacity=config.capacity, sweep_s=sweep_s)
        await controller.start()
        app.state.controller = controller
        try:
            yield
        finally:
            await controller.stop()

    app = create_app(
        "sandbox", metrics=metrics, token=token, lifespan=lifespan, facts=lambda: {"isolation": backend.isolation}
    )
    app.router.routes.extend(ROUTES)
    return app


async def run_sandbox(
    config: SandboxConfig, *, folder: Path, store_url: str = "", host: str = "127.0.0.1", port: int, token: str = ""
) -> None:
    """Serve until SIGTERM, then close every sandbox."""
    app = create_sandbox_app(config, folder=folder, store_url=store_url, token=token)
    await server(app, host=host, port=port).serve()


def _controller(request: Request) -> Controller:
    controller: Controller = request.app.state.controller
    return controller


async def _body(request: Request, kind: type[V]) -> tuple[V, bytes]:
    raw = await request.body()
    try:
        return kind.model_validate_json(raw), raw
    except ValidationError as error:
        raise RequestError(f"{request.method} {request.url.path}: {error}") from None


def _query(request: Request, name: str) -> str:
    value = request.query_params.get(name, "")
    if not value:
        raise RequestError(f"{request.method} {request.url.path}: the query parameter {name!r} is missing")
    return value


def _key(request: Request) -> str:
    key = request.headers.get("idempotency-key", "")
    if not key or not key.isprintable():
        raise RequestError(f"{request.method} {request.url.path}: send an Idempotency-Key header")
    return key


def _view(record: Record) -> Response:
    return Response(record.view().model_dump_json(), media_type="application/json")


def _passed(answer: Answer) -> Response:
    return Response(answer.body, status_code=answer.status, media_type=answer.kind)


async def create(request: Request) -> Response:
    body, _ = await _body(request, CreateRequest)
    return _view(await _controller(request).create(body.owner, _key(request), body.spec))


async def listing(request: Request) -> Response:
    live = request.query_params.get("live", "true") != "false"
    records = await _controller(request).list(owner=request.query_params.get("owner"), live=live)
    views = ",".join(record.view().model_dump_json() for record in records)
    return Response(f'{{"sandboxes":[{views}]}}', media_type="application/json")


async def close_by_key(request: Request) -> Response:
    return _view(await _controller(request).close_key(_query(request, "owner"), _query(request, "key")))


async def get(request: Request) -> Response:
    return _view(await _controller(request).get(request.path_params["id"]))


async def close(request: Request) -> Response:
    return _view(await _controller(request).close(request.path_params["id"], "closed"))


async def execute(request: Request) -> Response:
    body, raw = await _body(request, ExecRequest)
    return _passed(await _controller(request).exec(request.path_params["id"], body, raw, _key(request)))


async def exec_result(request: Request) -> Response:
    return _passed(await _controller(request).exec_result(request.path_params["id"], _query(request, "key")))


async def renew(request: Request) -> Response:
    body, _ = await _body(request, RenewRequest)
    return _view(await _controller(request).renew(request.path_params["id"], body.ttl_s))


async def read_file(request: Request) -> Response:
    return _passed(await _controller(request).read(request.path_params["id"], _query(request, "path")))


async def write_file(request: Request) -> Response:
    path, mode = _query(request, "path"), request.query_params.get("mode", "420")
    if not mode.isdecimal():
        raise RequestError(f"{request.method} {request.url.path}: mode {mode!r} is no number")
    data = await request.body()
    return _passed(await _controller(request).write(request.path_params["id"], path, data, int(mode)))


ROUTES = [
    Route("/v1/sandboxes", create, methods=["POST"]),
    Route("/v1/sandboxes", listing, methods=["GET"]),
    Route("/v1/sandboxes", close_by_key, methods=["DELETE"]),
    Route("/v1/sandboxes/{id}", get, methods=["GET"]),
    Route("/v1/sandboxes/{id}", close, methods=["DELETE"]),
    Route("/v1/sandboxes/{id}/exec", execute, methods=["POST"]),
    Route("/v1/sandboxes/{id}/exec", exec_result, methods=["GET"]),
    Route("/v1/sandboxes/{id}/renew", renew, methods=["POST"]),
    Route("/v1/sandboxes/{id}/files", read_file, methods=["GET"]),
    Route("/v1/sandboxes/{id}/files", write_file, methods=["PUT"]),
]
