"""Routes that go on to sandboxd as they came: processes, shells, files and archives. Part of `api`.

Invariant: the controller looks at neither path nor body; what starts something carries a key, and extends the lease.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentrl.core.errors import RequestError
from sandbox.standby import controller_of

SLACK_S = 15.0
"""Seconds beyond the wait that a request asks for in which sandboxd must answer."""
PASSED_HEADERS = ("x-sha256", "x-size")


async def forward(request: Request) -> Response:
    controller = controller_of(request)
    sandbox_id, key = request.path_params["id"], request.headers.get("idempotency-key", "")
    if key and not (key.isascii() and key.isprintable()):
        raise RequestError(f"{request.method} {request.url.path}: the Idempotency-Key must be printable ASCII")
    # The path as it was sent: decoding it would turn %2F inside a process's id into a separator.
    path = request.scope["raw_path"].decode("latin-1").partition("?")[0].split("/", 4)[4]
    target = f"/{path}?{request.url.query}"
    try:
        wait_s = float(request.query_params.get("wait_s", "0"))
    except ValueError as error:
        raise RequestError(f"{request.method} {request.url.path}: wait_s: {error}") from None
    body = await request.body()
    answer = await controller.relay.forward(
        sandbox_id, request.method, target, body, key, timeout_s=SLACK_S + max(60.0, wait_s)
    )
    headers = {name: answer.headers[name] for name in PASSED_HEADERS if name in answer.headers}
    return Response(answer.body, status_code=answer.status, media_type=answer.kind, headers=headers)


PASSED = [
    Route("/v1/sandboxes/{id}/processes", forward, methods=["GET", "POST"]),
    Route("/v1/sandboxes/{id}/processes/{rest:path}", forward, methods=["GET", "POST"]),
    Route("/v1/sandboxes/{id}/shells", forward, methods=["POST"]),
    Route("/v1/sandboxes/{id}/shells/{rest:path}", forward, methods=["GET", "POST"]),
    Route("/v1/sandboxes/{id}/files", forward, methods=["GET", "PUT"]),
    Route("/v1/sandboxes/{id}/tar", forward, methods=["GET", "PUT"]),
]
