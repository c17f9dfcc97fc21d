"""What requests to the controller hold, and how it is read. Used by `api` and `verb_routes`.

Invariant: what is malformed is a RequestError that names the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from pydantic import Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from agentrl.core.errors import RequestError
from agentrl.core.types import SandboxSpec, Value
from sandbox.states import Record

V = TypeVar("V", bound=Value)


class CreateRequest(Value):
    """Body of `POST /v1/sandboxes`."""

    owner: str
    spec: SandboxSpec = SandboxSpec()


class GroupRequest(Value):
    """Body of `POST /v1/groups`."""

    owner: str
    members: Mapping[str, SandboxSpec] = Field(min_length=1)
    """Specs by idempotency key."""


class RenewRequest(Value):
    """Body of `POST /v1/sandboxes/{id}/renew`."""

    ttl_s: float = Field(gt=0)


class PauseRequest(Value):
    """Body of `POST /v1/sandboxes/{id}/pause`."""

    ttl_s: float | None = Field(None, gt=0)
    """Lease from now on; None means as after a command."""


class SnapshotRequest(Value):
    """Body of `POST /v1/sandboxes/{id}/snapshots`."""

    ttl_s: float = Field(gt=0)
    """Seconds until it is forgotten."""


async def body_of(request: Request, kind: type[V]) -> tuple[V, bytes]:
    raw = await request.body()
    try:
        return kind.model_validate_json(raw), raw
    except ValidationError as error:
        raise RequestError(f"{request.method} {request.url.path}: {error}") from None


def query_of(request: Request, name: str) -> str:
    value = request.query_params.get(name, "")
    if not value:
        raise RequestError(f"{request.method} {request.url.path}: the query parameter {name!r} is missing")
    return value


def key_of(request: Request) -> str:
    key = request.headers.get("idempotency-key", "")
    if not key or not (key.isascii() and key.isprintable()):
        raise RequestError(f"{request.method} {request.url.path}: send an Idempotency-Key header of printable ASCII")
    return key


def view_of(record: Record) -> Response:
    return Response(record.view().model_dump_json(), media_type="application/json")
