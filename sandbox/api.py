"""The controller over HTTP. `run_sandbox` is started by `launch`; `create_sandbox_app` also by tests.

Invariant: bodies of commands and files pass through as they came, since they are the bulk of the traffic.
Routes are Starlette's own: they skip FastAPI's per-call machinery, of which nothing is needed here.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentrl.core.config import SandboxConfig
from agentrl.core.db import open_database, sqlite_url
from agentrl.core.errors import ConfigError, RequestError
from agentrl.core.http import create_app, server
from agentrl.core.telemetry import Metrics
from agentrl.core.types import ExecRequest
from sandbox.backends.base import Backend
from sandbox.backends.docker.backend import DockerBackend
from sandbox.backends.kubernetes.backend import KubernetesBackend
from sandbox.backends.local.backend import LocalBackend
from sandbox.channel import Answer
from sandbox.controller import Controller
from sandbox.egress import EgressProxy
from sandbox.election import Election
from sandbox.metrics import SPECS
from sandbox.passing import PASSED
from sandbox.requests import CreateRequest, GroupRequest, RenewRequest, body_of, key_of, query_of, view_of
from sandbox.standby import candidate, controller_of
from sandbox.states import Record
from sandbox.store import SandboxStore
from sandbox.verb_routes import VERBS

LONGEST_WAIT_S = 30.0
"""How long `GET /v1/events` waits at most."""
LOST_LEADERSHIP = 5
"""Exit code."""
MIGRATIONS = Path(__file__).parent / "migrations"


def leave() -> None:
    """End this process at once: closing what another leader has would be wrong. Whoever started us starts a standby."""
    os._exit(LOST_LEADERSHIP)


def make_backend(config: SandboxConfig, folder: Path, metrics: Metrics) -> Backend:
    if config.egress and config.backend == "kubernetes":
        raise ConfigError("sandbox.egress works on local and docker: on kubernetes use sandbox.kubernetes.egress")
    egress = EgressProxy(config.egress, metrics) if config.egress else None
    if config.backend == "local":
        return LocalBackend(
            folder, require_isolation=config.require_isolation, require_cgroups=config.require_cgroups, egress=egress
        )
    if config.backend == "kubernetes":
        return KubernetesBackend(config.kubernetes, require_isolation=config.require_isolation)
    return DockerBackend(folder, config.docker, egress=egress)


def create_sandbox_app(
    config: SandboxConfig,
    *,
    folder: Path,
    store_url: str = "",
    token: str = "",
    sweep_s: float = 3.0,
    address: str = "",
    lost: Callable[[], None] = leave,
) -> FastAPI:
    """The service. `folder` holds the backend's state, and the SQLite store when `store_url` is empty.

    With a leader's lease in the config, `address` is told to others, and `lost` is called when another one leads.
    """
    metrics = Metrics(SPECS)
    backend = make_backend(config, folder / "sandbox", metrics)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        url = store_url or sqlite_url(folder / "sandbox.db")
        database = await open_database(url, room="sandbox", migrations=MIGRATIONS)
        store = SandboxStore(database)
        settings: dict[str, Any] = {"metrics": metrics, "config": config, "sweep_s": sweep_s}
        if config.leader_lease_s:
            election = Election(database, url=config.advertise or address, lease_s=config.leader_lease_s)
            controller = Controller(backend, store, leads=lambda: election.leads, **settings)
            async with candidate(app.state, controller, election, lost):
                yield
            await store.close()
            return
        controller = Controller(backend, store, **settings)
        await controller.start()
        app.state.controller = controller
        try:
            yield
        finally:
            await controller.stop()

    async def ready() -> str:
        return "" if app.state.controller is not None else "leadership: another controller leads"

    app = create_app(
        "sandbox",
        metrics=metrics,
        token=token,
        ready=ready,
        lifespan=lifespan,
        facts=lambda: {"isolation": backend.isolation},
    )
    app.router.routes.extend(ROUTES)
    return app


async def run_sandbox(
    config: SandboxConfig, *, folder: Path, store_url: str = "", host: str = "127.0.0.1", port: int, token: str = ""
) -> None:
    """Serve until SIGTERM, then close every sandbox, or leave them to the next leader where there may be one."""
    address = f"http://{host}:{port}"
    app = create_sandbox_app(config, folder=folder, store_url=store_url, token=token, address=address)
    await server(app, host=host, port=port).serve()


def _listed(records: Sequence[Record]) -> Response:
    views = ",".join(record.view().model_dump_json() for record in records)
    return Response(f'{{"sandboxes":[{views}]}}', media_type="application/json")


def _passed(answer: Answer) -> Response:
    return Response(answer.body, status_code=answer.status, media_type=answer.kind)


async def create(request: Request) -> Response:
    body, _ = await body_of(request, CreateRequest)
    return view_of(await controller_of(request).create(body.owner, key_of(request), body.spec))


async def create_group(request: Request) -> Response:
    body, _ = await body_of(request, GroupRequest)
    return _listed(await controller_of(request).create_group(body.owner, body.members))


async def listing(request: Request) -> Response:
    live = request.query_params.get("live", "true") != "false"
    records = await controller_of(request).records.list(owner=request.query_params.get("owner"), live=live)
    return _listed(records)


async def close_by_key(request: Request) -> Response:
    return view_of(await controller_of(request).close_key(query_of(request, "owner"), query_of(request, "key")))


async def get(request: Request) -> Response:
    return view_of(await controller_of(request).records.get(request.path_params["id"]))


async def close(request: Request) -> Response:
    return view_of(await controller_of(request).close(request.path_params["id"], "closed"))


async def execute(request: Request) -> Response:
    body, raw = await body_of(request, ExecRequest)
    return _passed(await controller_of(request).relay.exec(request.path_params["id"], body, raw, key_of(request)))


async def exec_result(request: Request) -> Response:
    return _passed(await controller_of(request).relay.exec_result(request.path_params["id"], query_of(request, "key")))


async def commands(request: Request) -> Response:
    found = await controller_of(request).relay.commands(request.path_params["id"])
    views = ",".join(command.model_dump_json() for command in found)
    return Response(f'{{"commands":[{views}]}}', media_type="application/json")


async def events(request: Request) -> Response:
    try:
        after, wait_s = int(request.query_params.get("after", "0")), float(request.query_params.get("wait", "0"))
    except ValueError as error:
        raise RequestError(f"{request.method} {request.url.path}: {error}") from None
    page = await controller_of(request).events(after, wait_s=min(wait_s, LONGEST_WAIT_S))
    return Response(page.model_dump_json(), media_type="application/json")


async def sweep(request: Request) -> Response:
    swept = await controller_of(request).sweep()
    return Response(swept.model_dump_json(), media_type="application/json")


async def renew(request: Request) -> Response:
    body, _ = await body_of(request, RenewRequest)
    return view_of(await controller_of(request).relay.renew(request.path_params["id"], body.ttl_s))


ROUTES = [
    Route("/v1/sandboxes", create, methods=["POST"]),
    Route("/v1/sandboxes", listing, methods=["GET"]),
    Route("/v1/sandboxes", close_by_key, methods=["DELETE"]),
    Route("/v1/sandboxes/{id}", get, methods=["GET"]),
    Route("/v1/sandboxes/{id}", close, methods=["DELETE"]),
    Route("/v1/sandboxes/{id}/exec", execute, methods=["POST"]),
    Route("/v1/sandboxes/{id}/exec", exec_result, methods=["GET"]),
    Route("/v1/sandboxes/{id}/commands", commands, methods=["GET"]),
    Route("/v1/sandboxes/{id}/renew", renew, methods=["POST"]),
    *VERBS,
    *PASSED,
    Route("/v1/groups", create_group, methods=["POST"]),
    Route("/v1/events", events, methods=["GET"]),
    Route("/v1/sweep", sweep, methods=["POST"]),
]
