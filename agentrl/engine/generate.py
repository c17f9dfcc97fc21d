"""`POST /inference/v1/generate`: the engine's hot path, as a bare ASGI endpoint. Mounted by the server.

Invariant: a caller that goes away takes its sequence with it.
"""

from __future__ import annotations

import asyncio
import uuid

from pydantic import ValidationError
from starlette.types import Receive, Scope, Send

from agentrl.core.errors import RequestError
from agentrl.engine.wire import GenerateBody, response, to_sequence
from agentrl.engine.worker import Worker


class GenerateEndpoint:
    def __init__(self, worker: Worker, model: str) -> None:
        self._worker = worker
        self._model = model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = _parse(await _read(receive))
        runner = self._worker.scheduler.runner
        sequence = to_sequence(
            body, context=runner.context, vocab_size=runner.vocab_size, end_ids=runner.end_ids
        )  # fmt: skip
        done = self._worker.submit(sequence)
        # After the body the only message left is the disconnect.
        gone = asyncio.ensure_future(receive())
        gone.add_done_callback(lambda task: None if task.cancelled() else self._worker.abort(lambda s: s is sequence))
        try:
            answer = response(await done, body, self._model)
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(answer)).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": answer})
        finally:
            gone.cancel()


async def _read(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RequestError("the caller disconnected before its request was whole")
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _parse(raw: bytes) -> GenerateBody:
    try:
        body = GenerateBody.model_validate_json(raw)
    except ValidationError as error:
        where = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise RequestError(f"POST /inference/v1/generate: {where}") from None
    return body if body.request_id else body.model_copy(update={"request_id": uuid.uuid4().hex})
