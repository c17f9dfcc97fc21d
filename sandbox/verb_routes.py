"""Routes of pause, resume and snapshots. Part of `api`.

Invariant: whatever changes a sandbox carries a key, so that it can be asked again.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentrl.core.types import Snapshot
from sandbox.requests import PauseRequest, SnapshotRequest, body_of, key_of, view_of
from sandbox.standby import controller_of


async def pause(request: Request) -> Response:
    body, _ = await body_of(request, PauseRequest)
    return view_of(await controller_of(request).pause(request.path_params["id"], key_of(request), body.ttl_s))


async def resume(request: Request) -> Response:
    return view_of(await controller_of(request).resume(request.path_params["id"], key_of(request)))


async def snapshot(request: Request) -> Response:
    body, _ = await body_of(request, SnapshotRequest)
    made = await controller_of(request).snapshot(request.path_params["id"], key_of(request), body.ttl_s)
    return _shown(made)


async def snapshots(request: Request) -> Response:
    found = controller_of(request).snapshots.list(request.query_params.get("owner"))
    views = ",".join(snapshot.model_dump_json() for snapshot in found)
    return Response(f'{{"snapshots":[{views}]}}', media_type="application/json")


async def forget(request: Request) -> Response:
    return _shown(await controller_of(request).forget_snapshot(request.path_params["id"]))


def _shown(snapshot: Snapshot) -> Response:
    return Response(snapshot.model_dump_json(), media_type="application/json")


VERBS = [
    Route("/v1/sandboxes/{id}/pause", pause, methods=["POST"]),
    Route("/v1/sandboxes/{id}/resume", resume, methods=["POST"]),
    Route("/v1/sandboxes/{id}/snapshots", snapshot, methods=["POST"]),
    Route("/v1/snapshots", snapshots, methods=["GET"]),
    Route("/v1/snapshots/{id}", forget, methods=["DELETE"]),
]
