"""One session: admits calls, runs them, records them, and freezes when sealed. Owned by `sessions`.

Invariant: an answer leaves only after its call is in the store; every call in the tree was sampled by an engine;
the same request marked as a retry is never sampled twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass
from typing import NamedTuple
from uuid import uuid4

from agentrl.core.errors import (
    ContextOverflow,
    EngineError,
    GatewayError,
    LimitReached,
    Ran,
    RequestError,
    ServiceUnavailable,
    SessionSealed,
)
from agentrl.core.rendering import ConversationRenderer
from agentrl.core.telemetry import Metrics
from agentrl.core.types import Message, Provenance, Trajectory
from gateway.conversation import CallRequest
from gateway.export import check_exact, export
from gateway.pool import ReplicaPool
from gateway.renderer import Plan, plan_call
from gateway.retries import Retries
from gateway.sampler import Sampled, Sampler, cut_after_first_call, cut_at_stop
from gateway.store import SessionStore, StoredSession
from gateway.tree import Delivery, Node, Tree

log = logging.getLogger(__name__)

DRAIN_S = 10.0
"""How long a seal waits for calls in flight before it cuts them."""


@dataclass(frozen=True, slots=True)
class Services:
    """What every session of a gateway works with."""

    renderer: ConversationRenderer
    pool: ReplicaPool
    sampler: Sampler
    store: SessionStore
    metrics: Metrics
    call_timeout_s: float


class Begun(NamedTuple):
    """A call that was admitted."""

    call: asyncio.Future[Node]
    replayed: bool
    """It is an earlier one, running or answered."""


class Session:
    """A session in memory; the store has all of it but the calls in flight."""

    def __init__(self, stored: StoredSession, tree: Tree, services: Services) -> None:
        self.id, self.key = stored.id, stored.key
        self.request = stored.request
        self.sealed = stored.sealed
        self._opened_at = stored.opened_at
        self._tree = tree
        self._services = services
        self._retries = Retries(tree)
        self._asked = len(tree.nodes)
        self._in_flight: set[asyncio.Task[Node]] = set()
        self._sampling: set[asyncio.Task[Node]] = set()
        self._commit = asyncio.Lock()

    @property
    def idle(self) -> bool:
        return not self._in_flight

    def begin(self, request: CallRequest) -> Begun:
        """Start a call, or join the one it repeats. Raises at once what refuses it; `answer` waits for it."""
        known = self._retries.find(request)
        if known is not None:
            return Begun(known, replayed=True)
        self._admit()
        plan = plan_call(self._tree, self._services.renderer, request)
        task = asyncio.create_task(self._run(plan, request, self._budget(plan, request)))
        self._in_flight.add(task)
        self._sampling.add(task)
        self._retries.started(request, task)
        task.add_done_callback(self._ended)
        return Begun(task, replayed=False)

    async def answer(self, call: asyncio.Future[Node]) -> Node:
        """What `begin` started. The call goes on when the caller goes away, so that a retry finds its answer."""
        await asyncio.wait({call})
        if call.cancelled():
            raise SessionSealed(f"session {self.id} ended during the call; the answer is not recorded")
        return call.result()

    def flushed(self, node: Node) -> None:
        """The answer's last byte was handed to the connection."""
        if node.delivery is Delivery.SAMPLED:
            node.delivery = Delivery.FLUSHED

    async def seal(self) -> tuple[Trajectory, ...]:
        """Refuse new calls, drain, freeze, export. Idempotent."""
        self.sealed = True
        if self._in_flight:
            await asyncio.wait(self._in_flight, timeout=DRAIN_S)
        await self.close()
        flushed = [node.seq for node in self._tree if node.delivery is Delivery.FLUSHED]
        await self._services.store.seal(self.id, flushed)
        self._services.pool.release(self.id)
        return self.trajectories()

    def trajectories(self) -> tuple[Trajectory, ...]:
        return export(self.id, self._tree)

    async def close(self) -> None:
        """Cut what is still sampling. What is being recorded ends, so that store and tree agree."""
        for task in self._sampling:
            task.cancel()
        if self._in_flight:
            await asyncio.wait(self._in_flight)

    def _admit(self) -> None:
        if self.sealed:
            raise SessionSealed(f"session {self.id} is sealed: it takes no more calls")
        self._asked += 1
        if self._asked > self.request.calls:
            raise _limit(self.id, "calls", self.request.calls)
        if self._wall_left() <= 0:
            raise _limit(self.id, "wall_s", self.request.limits.wall_s)

    def _wall_left(self) -> float:
        return self._opened_at + self.request.limits.wall_s - time.time()

    def _budget(self, plan: Plan, request: CallRequest) -> int:
        """The new tokens that session, harness and window allow."""
        limits = self.request.limits
        if plan.turn > limits.turns:
            raise _limit(self.id, "turns", limits.turns)
        window = min(limits.tokens, self._services.pool.context or limits.tokens)
        room = window - len(plan.prompt_ids)
        if room <= 0:
            raise ContextOverflow(
                f"This model's maximum context length is {window} tokens. However, your messages resulted in "
                f"{len(plan.prompt_ids)} tokens. Please reduce the length of the messages."
            )
        return min(self.request.sampling.max_tokens, request.max_tokens or room, room)

    async def _run(self, plan: Plan, request: CallRequest, budget: int) -> Node:
        services, began = self._services, time.monotonic()
        wall_left = self._wall_left()
        try:
            async with asyncio.timeout(min(services.call_timeout_s, wall_left)):
                sampled = await services.sampler.sample(
                    f"{self.id}-{uuid4().hex[:8]}",
                    self.id,
                    plan.prompt_ids,
                    self.request.sampling.model_copy(update={"max_tokens": budget}),
                    seed=request.seed,
                    json_schema=request.json_schema,
                )
        except EngineError as error:
            if request.json_schema and error.detail.get("http_status") == 400:
                raise RequestError(
                    f"response_format: the engine cannot keep to it ({error.message}); ask for JSON in the messages, "
                    "or offer a tool with these parameters and name it in tool_choice",
                    detail={"param": "response_format"},
                ) from error
            raise
        except TimeoutError:
            if wall_left <= services.call_timeout_s:
                raise _limit(self.id, "wall_s", self.request.limits.wall_s) from None
            raise ServiceUnavailable(
                f"session {self.id}: no replica answered within {services.call_timeout_s:.0f} s", ran=Ran.NO
            ) from None
        finally:
            self._sampling.difference_update({asyncio.current_task()})
        services.metrics.observe("gateway/engine_seconds", time.monotonic() - began)
        node = await self._record(plan, request, sampled)
        self._count(node, len(plan.prompt_ids))
        return node

    async def _record(self, plan: Plan, request: CallRequest, sampled: Sampled) -> Node:
        renderer = self._services.renderer
        completion = cut_at_stop(sampled.completion, request.stop, renderer)
        tools = request.tools if request.parse_tools else ()
        prompt_ids = plan.prompt_ids[: len(plan.prompt_ids) - len(plan.opening)]

        def read(ids: tuple[int, ...]) -> Message:
            return renderer.parse(plan.opening + ids, tools, prompt_ids)

        if request.one_call:
            completion = cut_after_first_call(completion, read)
        if completion.finish_reason == "abort":
            raise GatewayError(f"session {self.id}: the engine's cut completion was not continued")
        reply = read(completion.token_ids)
        if completion.finish_reason == "stop" and isinstance(completion.stop_reason, str):
            reply = _without_stop(reply, completion.stop_reason)
        async with self._commit:
            node = Node(
                seq=len(self._tree.nodes), parent=plan.parent, follows=plan.follows, root_key=plan.root_key,
                turn=plan.turn, messages=plan.messages, reply=reply, prompt_delta=plan.prompt_delta,
                sampled=completion.token_ids, logprobs=completion.logprobs, versions=completion.versions,
                finish_reason=completion.finish_reason, branch=plan.branch, digest=request.digest,
                idempotency_key=request.idempotency_key, cached_tokens=completion.cached_tokens,
                constrained=bool(request.json_schema),
                # The session's sampling: how many tokens a call may take says nothing about how they are drawn.
                provenance=Provenance(
                    tokenizer=renderer.tokenizer_fingerprint, renderer=renderer.fingerprint,
                    engine=sampled.engine, sampling=self.request.sampling,
                ),
            )  # fmt: skip
            check_exact(node, plan.prompt_ids)
            await self._services.store.add_node(self.id, node)
            self._tree.add(node)
        return node

    def _count(self, node: Node, prompt_tokens: int) -> None:
        metrics = self._services.metrics
        metrics.inc("gateway/prompt_tokens_total", prompt_tokens)
        metrics.inc("gateway/cached_tokens_total", node.cached_tokens)
        metrics.inc("gateway/sampled_tokens_total", len(node.sampled))
        if node.constrained:
            metrics.inc("gateway/constrained_tokens_total", len(node.sampled))
        if node.branch:
            metrics.inc("gateway/branches_total", reason=node.branch.value)
        malformed = sum(call.arguments is None for call in node.reply.tool_calls)
        if malformed:
            metrics.inc("gateway/malformed_calls_total", malformed)

    def _ended(self, task: asyncio.Task[Node]) -> None:
        self._in_flight.discard(task)
        self._sampling.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("session %s: a call failed: %s", self.id, error)


def _limit(session_id: str, name: str, value: float) -> LimitReached:
    return LimitReached(f"session {session_id} used up its {name} ({value:g})", detail={"limit": name, "value": value})


def _without_stop(reply: Message, stop: str) -> Message:
    """The reply as the harness sees it: nothing from the stop text on."""
    with contextlib.suppress(ValueError):
        return reply.model_copy(update={"content": reply.content[: reply.content.index(stop)].strip()})
    return reply
