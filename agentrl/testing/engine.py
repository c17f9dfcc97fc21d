"""An engine that plays a script, in process. For tests and benches of the gateway, rollout and weights.

Keeps the engine's contract (`tests/contract/test_engine_contract.py`): version runs, pause, cancellation,
context overflow, staged weights. Invariant: what it returns is a function of the script and of the commands given.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.core.errors import AgentRLError, ContextOverflow, EngineError, Ran, WeightsError
from agentrl.core.protocols import EngineStatus
from agentrl.core.types import Completion, GenerateRequest, VersionRun, WeightManifest


@dataclass(frozen=True, slots=True)
class Reply:
    """What one call samples. A stop token of the request, or `max_tokens`, ends it earlier."""

    token_ids: Sequence[int]
    logprobs: Sequence[float] | None = None
    """None: `ScriptedEngine.logprob` of each token."""
    delay_s: float = 0.0
    """Before the first token."""
    token_s: float = 0.0
    """Before each token; with 0 the call never yields to the loop between tokens."""
    error: AgentRLError | None = None
    """Raised instead of an answer, after the delay."""


Script = Callable[[GenerateRequest], Reply | Sequence[int]]


class ScriptedEngine:
    """Implements `agentrl.core.protocols.Engine`.

    `script` is a function of the request, or a list of replies given out in turn, each a Reply or token ids.
    """

    def __init__(
        self,
        script: Script | Iterable[Reply | Sequence[int]],
        *,
        url: str = "scripted://0",
        version: int = 0,
        context: int = 4096,
    ) -> None:
        self.requests: list[GenerateRequest] = []
        """Every call, in order."""
        self.aborted: list[str] = []
        """Ids of the calls that `cut` or a cancellation ended."""
        self.sampled = 0
        """Tokens of all calls so far."""
        self.version = version
        self.probe_error = 0.0
        """Added to the logprobs that a probe sees; a replica with wrong weights."""
        self.refuse_weights: WeightsError | None = None
        """Raised by `stage_weights`."""
        self._url = url
        self._context = context
        self._script = script if callable(script) else _in_turn(script)
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._calls: dict[str, asyncio.Event] = {}
        self._staged: WeightManifest | None = None
        self._serving: WeightManifest | None = None

    @property
    def url(self) -> str:
        return self._url

    @staticmethod
    def logprob(token: int) -> float:
        return -0.1 * (1 + token % 7)

    async def generate(self, request: GenerateRequest) -> Completion:
        self.requests.append(request)
        limit = min(request.sampling.max_tokens, self._context - len(request.token_ids))
        if limit <= 0:
            raise ContextOverflow(f"{len(request.token_ids)} tokens fill the maximum context length {self._context}")
        if request.json_schema:
            refused = "structured outputs are not supported"
            raise EngineError(refused, ran=Ran.NO, retryable=False, detail={"http_status": 400})
        given = self._script(request)
        reply = given if isinstance(given, Reply) else Reply(given)
        stopped = self._calls[request.request_id] = asyncio.Event()
        try:
            if reply.delay_s:
                await asyncio.sleep(reply.delay_s)
            if reply.error is not None:
                raise reply.error
            return await self._play(request, reply, limit, stopped)
        except asyncio.CancelledError:
            self.aborted.append(request.request_id)
            raise
        finally:
            del self._calls[request.request_id]

    async def _play(self, request: GenerateRequest, reply: Reply, limit: int, stopped: asyncio.Event) -> Completion:
        tokens = list(reply.token_ids)[:limit]
        logprobs = list(reply.logprobs or map(self.logprob, tokens))[: len(tokens)]
        versions: list[int] = []
        reason = "length"
        for token in tokens:
            if reply.token_s:
                await asyncio.sleep(reply.token_s)
            await self._running(stopped)
            if stopped.is_set():
                reason = "abort"
                self.aborted.append(request.request_id)
                break
            versions.append(self.version)
            self.sampled += 1
            if token in request.stop_token_ids:
                reason = "stop"
                break
        n = len(versions)
        return Completion.model_validate(
            {
                "token_ids": tokens[:n],
                "logprobs": logprobs[:n],
                "finish_reason": reason,
                "stop_reason": tokens[n - 1] if reason == "stop" else None,
                "versions": _runs(versions),
                "prompt_tokens": len(request.token_ids),
            }
        )

    def cut(self, request_id: str) -> None:
        """End a running call as an engine does that is told to abort it: with what it has."""
        self._calls[request_id].set()

    async def status(self) -> EngineStatus:
        running = len(self._calls)
        return EngineStatus("scripted/1", self.version, running=running, waiting=0, kv_usage=0.0, context=self._context)

    async def prompt_logprobs(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """The serving manifest's own probe, if it is asked for; else `logprob` of each token."""
        probe = None if self._serving is None else self._serving.probe
        if probe is not None and probe.token_ids == tuple(token_ids):
            return tuple(value + self.probe_error for value in probe.logprobs)
        return tuple(self.logprob(token) + self.probe_error for token in token_ids[1:])

    async def pause(self) -> None:
        self._resumed.clear()

    async def resume(self) -> None:
        self._resumed.set()

    async def stage_weights(self, manifest_path: Path) -> None:
        if self.refuse_weights is not None:
            raise self.refuse_weights
        try:
            self._staged = WeightManifest.model_validate_json(manifest_path.read_bytes())
        except (OSError, ValueError) as error:
            raise WeightsError(f"{manifest_path}: cannot read this version: {error}") from error

    async def commit_weights(self, version: int) -> None:
        if self._staged is None:
            raise WeightsError(f"version {version}: no weights are staged")
        self._serving, self._staged = self._staged, None
        self.version = version

    async def close(self) -> None:
        """Nothing to release."""

    async def _running(self, stopped: asyncio.Event) -> None:
        """Wait while paused, unless the call is cut."""
        if self._resumed.is_set():
            return
        waits = [asyncio.ensure_future(self._resumed.wait()), asyncio.ensure_future(stopped.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()


def _in_turn(replies: Iterable[Reply | Sequence[int]]) -> Script:
    left = iter(replies)

    def play(request: GenerateRequest) -> Reply | Sequence[int]:
        try:
            return next(left)
        except StopIteration:
            raise AssertionError(f"the script has no reply for call {request.request_id}") from None

    return play


def _runs(versions: Sequence[int]) -> tuple[VersionRun, ...]:
    starts = [i for i, v in enumerate(versions) if i == 0 or versions[i - 1] != v]
    ends = [*starts[1:], len(versions)]
    pairs = zip(starts, ends, strict=False)
    return tuple(VersionRun(version=versions[start], start=start, end=end) for start, end in pairs)
