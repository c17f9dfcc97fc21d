"""Finds the call that a request repeats. Owned by one `session`.

Invariant: only a request that says so (a retry count, an idempotency key) is taken for a repetition; the same body
without a mark is another call.
"""

from __future__ import annotations

import asyncio

from agentrl.core.errors import Conflict
from gateway.conversation import CallRequest
from gateway.tree import Node, Tree


class Retries:
    """Calls in flight by body and by idempotency key; finished ones are found in the tree."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._by_digest: dict[str, asyncio.Task[Node]] = {}
        self._by_key: dict[str, tuple[str, asyncio.Task[Node]]] = {}

    def started(self, request: CallRequest, task: asyncio.Task[Node]) -> None:
        key, digest = request.idempotency_key, request.digest
        self._by_digest[digest] = task
        if key:
            self._by_key[key] = (digest, task)

        def ended(done: asyncio.Task[Node]) -> None:
            if self._by_digest.get(digest) is done:
                del self._by_digest[digest]
            self._by_key.pop(key, None)

        task.add_done_callback(ended)

    def find(self, request: CallRequest) -> asyncio.Future[Node] | None:
        """The call, running or answered, that `request` repeats. Conflict when a key comes with another body."""
        if request.idempotency_key:
            digest, known = self._find_key(request.idempotency_key)
            if known is not None and digest != request.digest:
                raise Conflict(f"Idempotency-Key {request.idempotency_key!r} was used for another request")
            return known
        if not request.retry:
            return None
        if request.digest in self._by_digest:
            return self._by_digest[request.digest]
        return _answered(next((n for n in reversed(self._tree.nodes) if n.digest == request.digest), None))

    def _find_key(self, key: str) -> tuple[str, asyncio.Future[Node] | None]:
        if key in self._by_key:
            return self._by_key[key]
        node = next((n for n in self._tree if n.idempotency_key == key), None)
        return (node.digest if node else "", _answered(node))


def _answered(node: Node | None) -> asyncio.Future[Node] | None:
    if node is None:
        return None
    future: asyncio.Future[Node] = asyncio.get_running_loop().create_future()
    future.set_result(node)
    return future
