"""Samples one completion over a pool of replicas that may cut, fail or die. Called by `session`.

Invariant: the result is one gapless run of tokens, each with the logprob and version it was sampled with: a part
that an engine cut is continued from prompt + part, under what remains of the budget.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentrl.core.errors import EngineError, ServiceUnavailable
from agentrl.core.rendering import ConversationRenderer
from agentrl.core.telemetry import Metrics
from agentrl.core.types import Completion, GenerateRequest, Message, Sampling, VersionRun
from gateway.pool import Replica, ReplicaPool

BACKOFF_S = 0.05
"""Pause after a failed try; doubles with each, up to a second."""


@dataclass(frozen=True, slots=True)
class Sampled:
    completion: Completion
    """`finish_reason` is never "abort"."""
    engine: str
    """Name and version of the engines that took part."""


class Sampler:
    """Drives calls; holds no state of one."""

    def __init__(
        self, pool: ReplicaPool, metrics: Metrics, *, stop_token_ids: Sequence[int], max_attempts: int
    ) -> None:
        self._pool = pool
        self._metrics = metrics
        self._stop_token_ids = tuple(stop_token_ids)
        self._max_attempts = max_attempts

    async def sample(
        self,
        call_id: str,
        session_id: str,
        prompt_ids: tuple[int, ...],
        sampling: Sampling,
        *,
        seed: int | None = None,
        json_schema: str = "",
    ) -> Sampled:
        """Sample up to `sampling.max_tokens` tokens. The caller brings the timeout.

        Raises the last error once `max_attempts` tries failed, and ContextOverflow at once.
        """
        parts: list[Completion] = []
        engines: list[str] = []
        failures = 0
        for attempt in itertools.count():
            done = tuple(token for part in parts for token in part.token_ids)
            budget = sampling.max_tokens - len(done)
            if budget <= 0:
                break
            replica = await self._pool.acquire(session_id)
            request = GenerateRequest(
                request_id=f"{call_id}-{attempt}", token_ids=prompt_ids + done,
                sampling=sampling.model_copy(update={"max_tokens": budget}), stop_token_ids=self._stop_token_ids,
                session_id=session_id, cache_salt=f"v{replica.version}", json_schema=json_schema,
                seed=None if seed is None else _seed(session_id, seed, len(done)),
            )  # fmt: skip
            try:
                part = await self._try(replica, request)
            except (EngineError, ServiceUnavailable) as error:
                failures += 1
                if not error.retryable or failures >= self._max_attempts:
                    raise
                self._metrics.inc("gateway/resubmits_total", cause=error.code)
                await asyncio.sleep(min(1.0, BACKOFF_S * 2 ** (failures - 1)))
                continue
            if part.finish_reason == "abort" and json_schema:
                # The engine would begin the schema anew in the middle of its text.
                part = part.model_copy(update={"token_ids": (), "logprobs": (), "versions": ()})
            parts.append(part)
            if replica.name not in engines:
                engines.append(replica.name)
            if part.finish_reason != "abort":
                break
            self._metrics.inc("gateway/resubmits_total", cause="cut")
            if not part.token_ids:
                await asyncio.sleep(BACKOFF_S)
        return Sampled(join(parts), ",".join(engines))

    async def _try(self, replica: Replica, request: GenerateRequest) -> Completion:
        try:
            return await replica.generate(request)
        except ServiceUnavailable:
            await self._pool.suspect(replica)
            raise


def _seed(session_id: str, seed: int, done: int) -> int:
    """Of the session, too: harnesses send one seed in all attempts at a task, which must not become one attempt."""
    return int.from_bytes(hashlib.blake2b(f"{session_id}\n{seed}\n{done}".encode(), digest_size=4).digest()) >> 1


def join(parts: Sequence[Completion]) -> Completion:
    """One completion of the parts in order. A last part that was cut used up the budget: `length`."""
    versions: list[VersionRun] = []
    at = 0
    for part in parts:
        for run in part.versions:
            if versions and versions[-1].version == run.version:
                versions[-1] = versions[-1].model_copy(update={"end": at + run.end})
            elif run.end > run.start:
                versions.append(VersionRun(version=run.version, start=at + run.start, end=at + run.end))
        at += len(part.token_ids)
    last = parts[-1]
    return Completion(
        token_ids=tuple(token for part in parts for token in part.token_ids),
        logprobs=tuple(logprob for part in parts for logprob in part.logprobs),
        finish_reason="length" if last.finish_reason == "abort" else last.finish_reason,
        stop_reason=last.stop_reason,
        versions=tuple(versions),
        prompt_tokens=parts[0].prompt_tokens,
        cached_tokens=parts[0].cached_tokens,
    )


def cut_at_stop(completion: Completion, stop: Sequence[str], renderer: ConversationRenderer) -> Completion:
    """The completion up to the token that completes the first stop text; the rest counts as never sampled."""
    ids = completion.token_ids
    decode = renderer.tokenizer.decode

    def found(count: int) -> bool:
        text = decode(ids[:count])
        return any(word in text for word in stop)

    if not stop or not found(len(ids)):
        return completion
    count = _fewest(len(ids), found)
    word = next(word for word in stop if word in decode(ids[:count]))
    return _cut(completion, count, word)


def cut_after_first_call(completion: Completion, read: Callable[[tuple[int, ...]], Message]) -> Completion:
    """The completion up to the token that completes its first tool call, if more follow; the rest as never sampled."""
    ids = completion.token_ids
    calls = read(ids).tool_calls
    if len(calls) < 2:
        return completion

    def whole(count: int) -> bool:
        found = read(ids[:count]).tool_calls
        return len(found) > 1 or any(call.raw == calls[0].raw and call.name == calls[0].name for call in found)

    return _cut(completion, _fewest(len(ids), whole), None)


def _fewest(most: int, enough: Callable[[int], bool]) -> int:
    """The smallest count that is enough, given that `most` is and that more never is too many."""
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return low


def _cut(completion: Completion, count: int, stop: str | None) -> Completion:
    versions = [run.model_copy(update={"end": min(run.end, count)}) for run in completion.versions if run.start < count]
    return completion.model_copy(
        update={
            "token_ids": completion.token_ids[:count], "logprobs": completion.logprobs[:count],
            "versions": tuple(versions), "finish_reason": "stop", "stop_reason": stop,
        }
    )  # fmt: skip
