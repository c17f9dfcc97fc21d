"""Commands, files and renewals on their way to sandboxd. Used by `controller`.

Invariant: a lease does not end under a running command, and what runs extends it; reads never do.
"""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from urllib.parse import quote

from agentrl.core.errors import AgentRLError, Conflict, Ran, RequestError, SandboxError, SandboxLost, ServiceUnavailable
from agentrl.core.telemetry import Metrics
from agentrl.core.types import ExecRequest, SandboxState
from sandbox import leases
from sandbox.backends.base import Backend
from sandbox.channel import Answer, Channel
from sandbox.records import Records
from sandbox.runtime.wire import MAX_BODY
from sandbox.states import Record
from sandbox.views import CommandView

KEPT_COMMANDS, KEPT_WORDS, KEPT_CHARACTERS = 64, 16, 200
"""Of each live sandbox, the commands that are remembered for operators, and how much of each."""
SLACK_S = 10.0
"""Seconds beyond a command's timeout in which sandboxd must answer: TERM, KILL and the drain are inside."""


class Relay:
    def __init__(
        self, backend: Backend, records: Records, explain: Callable[[str], Awaitable[str]], *, metrics: Metrics
    ) -> None:
        self.busy: Counter[str] = Counter()
        """Commands that run now."""
        self.changing: Counter[str] = Counter()
        """Requests on their way that may change something inside: all but looks."""
        self._backend, self._records, self._metrics = backend, records, metrics
        self._explain = explain
        """Why a sandbox does not answer; "" when the backend still has it."""
        self._channels: dict[str, Channel] = {}
        self._commands: dict[str, deque[CommandView]] = {}
        self._idle_deadline: dict[str, float] = {}
        """Of the busy ones: where the lease would end if no command ran."""

    async def exec(self, sandbox_id: str, request: ExecRequest, body: bytes, key: str) -> Answer:
        """Run a command; `body` is the request as it came, and goes on to sandboxd as it is."""
        record = await self._records.ready(sandbox_id)
        self._begin(record, request.timeout_s)
        self._remember(sandbox_id, request, key)
        started = time.monotonic()
        try:
            return await self._ask(sandbox_id, "POST", "/exec", body, key, request.timeout_s + SLACK_S)
        finally:
            self._done(sandbox_id)
            self._metrics.observe("sandbox/exec_seconds", time.monotonic() - started)

    async def commands(self, sandbox_id: str) -> Sequence[CommandView]:
        """The newest commands of a live sandbox, oldest first; those of an earlier controller are not known."""
        await self._records.get(sandbox_id)
        return tuple(self._commands.get(sandbox_id, ()))

    def _remember(self, sandbox_id: str, request: ExecRequest, key: str) -> None:
        known = self._commands.setdefault(sandbox_id, deque(maxlen=KEPT_COMMANDS))
        if not any(command.key == key for command in known):
            words = tuple(word[:KEPT_CHARACTERS] for word in request.argv[:KEPT_WORDS])
            known.append(CommandView(key=key, argv=words, started_at=time.time()))

    async def exec_result(self, sandbox_id: str, key: str) -> Answer:
        """The result of an earlier command; waits while it still runs."""
        await self._records.ready(sandbox_id)
        return await self._ask(sandbox_id, "GET", f"/exec?key={quote(key, safe='')}", timeout_s=3600.0)

    async def forward(
        self, sandbox_id: str, method: str, target: str, body: bytes, key: str, *, timeout_s: float
    ) -> Answer:
        """Any other request, as it is. One with a key starts something, which extends the lease."""
        record = await self._records.ready(sandbox_id)
        if not key:
            return await self._ask(sandbox_id, method, target, body, timeout_s=timeout_s)
        self._begin(record, timeout_s)
        try:
            return await self._ask(sandbox_id, method, target, body, key, timeout_s)
        finally:
            self._done(sandbox_id)

    async def prolong(self, sandbox_id: str, ttl_s: float) -> None:
        """Tell sandboxd when its lease ends, whatever the record says."""
        await self._told(sandbox_id, "POST", "/renew", f'{{"ttl_s": {ttl_s}}}'.encode())

    async def prepare(self, record: Record) -> None:
        """Make a sandbox of the pool what its spec asks for. SandboxError when it cannot be made so."""
        wanted = {"ttl_s": record.spec.ttl_s, "files": dict(record.spec.files)}
        await self._told(record.id, "POST", "/prepare", json.dumps(wanted).encode())

    async def _told(self, sandbox_id: str, method: str, target: str, body: bytes) -> None:
        answer = await self._ask(sandbox_id, method, target, body)
        if answer.status >= 400:
            raise SandboxError(f"sandbox {sandbox_id}: {method} {target}: {answer.body[:500]!r}")

    async def renew(self, sandbox_id: str, ttl_s: float) -> Record:
        """Move the lease's end to `ttl_s` from now, also of one that is paused; durable on return."""
        record = await self._records.get(sandbox_id)
        if record.state is not SandboxState.PAUSED:
            await self._records.ready(sandbox_id)
            await self.prolong(sandbox_id, ttl_s)
            record = await self._records.ready(sandbox_id)
        record = leases.renewed(record, now=self._records.clock.now(), ttl_s=ttl_s)
        self._records.live[sandbox_id] = record
        if sandbox_id in self._idle_deadline:
            self._idle_deadline[sandbox_id] = record.deadline
        await self._records.save(record)
        return record

    def shift(self, step: float) -> None:
        """As of the records."""
        self._idle_deadline = {i: deadline + step for i, deadline in self._idle_deadline.items()}

    def interrupt(self, sandbox_id: str) -> None:
        """Looks on their way end now, since nobody inside will answer them."""
        if sandbox_id in self._channels:
            self._channels[sandbox_id].interrupt()

    def drop(self, sandbox_id: str) -> None:
        """The sandbox ended: close what leads to it."""
        self._commands.pop(sandbox_id, None)
        channel = self._channels.pop(sandbox_id, None)
        if channel is not None:
            channel.close()

    async def _ask(
        self, sandbox_id: str, method: str, target: str, body: bytes = b"", key: str = "", timeout_s: float = 60.0
    ) -> Answer:
        if len(body) > MAX_BODY:
            raise RequestError(
                f"{method} {target.partition('?')[0]}: {len(body)} bytes are more than {MAX_BODY} at once"
            )
        channel = self._channels.get(sandbox_id)
        if channel is None:
            channel = self._channels[sandbox_id] = self._backend.channel(sandbox_id)
        if method != "GET":
            self.changing[sandbox_id] += 1
        try:
            return await channel.request(method, target, body=body, key=key, timeout_s=timeout_s)
        except ServiceUnavailable as error:
            if self._records.frozen(sandbox_id):
                ran = Ran.NO if method == "GET" else error.ran
                raise Conflict(f"sandbox {sandbox_id} was paused: resume it first", ran=ran) from error
            try:
                cause = await self._explain(sandbox_id)
            except AgentRLError as silent:
                # Whether our request ran has nothing to do with whether the backend could be asked why.
                raise error from silent
            if not cause:
                raise
            raise SandboxLost(f"sandbox {sandbox_id} is gone: {cause}", ran=error.ran) from error
        finally:
            if method != "GET":
                self.changing[sandbox_id] -= 1
                if not self.changing[sandbox_id]:
                    del self.changing[sandbox_id]

    def _begin(self, record: Record, running_s: float) -> None:
        now = self._records.clock.now()
        extended = leases.extended(record, now=now)
        if self.busy[record.id] == 0:
            self._idle_deadline[record.id] = extended.deadline
        self.busy[record.id] += 1
        self._records.put(leases.held(extended, now=now, running_s=running_s))

    def _done(self, sandbox_id: str) -> None:
        self.busy[sandbox_id] -= 1
        if self.busy[sandbox_id]:
            return
        del self.busy[sandbox_id]
        deadline, record = self._idle_deadline.pop(sandbox_id), self._records.live.get(sandbox_id)
        if record is not None:
            ended = leases.extended(replace(record, deadline=deadline), now=self._records.clock.now())
            self._records.put(ended)
