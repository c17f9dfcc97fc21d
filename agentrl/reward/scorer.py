"""Scores one episode with its environment, and turns everything that goes wrong into a Failed. Called by `service`.

Invariant: an outcome is Scored only if the environment returned a Scored with finite numbers in time; there is
no path by which a failure becomes a number.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import traceback
from collections.abc import Coroutine, Mapping
from typing import Any

from agentrl.core.config import RewardConfig
from agentrl.core.environment import Environment
from agentrl.core.errors import AgentRLError, Blame, Ran
from agentrl.core.protocols import Sandboxes
from agentrl.core.types import Failed, Outcome, Scored, ScoreRequest

log = logging.getLogger(__name__)

DETAIL = 2000
"""Most characters of an error's text that travel with the outcome; the log has all of it."""


class Scorer:
    """The environments of this process, and the slots in which they may score."""

    def __init__(self, environments: Mapping[str, Environment], sandboxes: Sandboxes, config: RewardConfig) -> None:
        self._environments = environments
        self._sandboxes = sandboxes
        self._timeout_s = config.timeout_s
        self._slots = asyncio.Semaphore(config.concurrency)

    async def score(self, request: ScoreRequest) -> Outcome:
        environment = self._environments.get(request.task.env)
        if environment is None:
            served = ", ".join(sorted(self._environments)) or "none"
            detail = f"environment {request.task.env!r} is not served here (served: {served})"
            return Failed(code="UNKNOWN_ENV", blame=Blame.CALLER, ran=Ran.NO, detail=detail)
        outcome = await self._bounded(environment, request)
        return outcome.model_copy(update={"verifier": outcome.verifier or f"{environment.name}@{environment.version}"})

    async def _bounded(self, environment: Environment, request: ScoreRequest) -> Outcome:
        """Wait for a slot, then score; both within the deadline."""
        limit = min(self._timeout_s, request.deadline_s)
        started = time.monotonic()
        try:
            async with asyncio.timeout(limit):
                await self._slots.acquire()
        except TimeoutError:
            return _timed_out(request, f"no free slot of reward.concurrency within {limit:.1f} s")
        scoring = asyncio.create_task(_guarded(self._run(environment, request), environment, request))
        try:
            await asyncio.wait({scoring}, timeout=max(0.0, started + limit - time.monotonic()))
        finally:
            # One that ignores its cancellation goes on without a slot, so that it cannot starve the others.
            self._slots.release()
            finished = scoring.done()
            scoring.cancel()
        if finished and not scoring.cancelled():
            return scoring.result()
        return _timed_out(request, f"{environment.name} gave no score within {limit:.1f} s")

    async def _run(self, environment: Environment, request: ScoreRequest) -> Outcome:
        sandbox = await self._sandboxes.get(request.sandbox_id) if request.sandbox_id is not None else None
        outcome = await environment.score(request.task, request.attempt, sandbox)
        if isinstance(outcome, Failed):
            return Failed.model_validate(outcome.model_dump())
        if not isinstance(outcome, Scored):
            raise TypeError(
                f"{type(environment).__name__}.score returned {type(outcome).__name__}, not Scored or Failed"
            )
        numbers = {"reward": outcome.reward, **{f"parts.{name}": part for name, part in outcome.parts.items()}}
        bad = {name: number for name, number in numbers.items() if not math.isfinite(number)}
        if bad:
            return Failed(code="REWARD_NOT_FINITE", detail=f"{bad} is no number to train on")
        return Scored.model_validate(outcome.model_dump())


async def _guarded(scoring: Coroutine[Any, Any, Outcome], environment: Environment, request: ScoreRequest) -> Outcome:
    try:
        return await scoring
    # Verifiers call sys.exit, raise a CancelledError of their own and worse: none of it may end the service.
    except BaseException as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return _failed(error, environment, request)


def _failed(error: BaseException, environment: Environment, request: ScoreRequest) -> Failed:
    """Whatever was raised is the fault of the infrastructure: the policy is priced only by what `score` returns."""
    log.error("episode %s: scoring by %s raised", request.episode_id, environment.name, exc_info=error)
    # Formatted by `traceback`, which survives an error whose __str__ raises; surrogates would not survive JSON.
    what = traceback.format_exception_only(error)[-1].strip().encode(errors="backslashreplace").decode()[:DETAIL]
    if isinstance(error, AgentRLError):
        return Failed(code=error.code, ran=error.ran, retryable=error.retryable, detail=what)
    return Failed(code="SCORER_CRASHED", detail=what)


def _timed_out(request: ScoreRequest, what: str) -> Failed:
    log.error("episode %s: %s", request.episode_id, what)
    detail = f"{what}, the smaller of the request's deadline and reward.timeout_s"
    return Failed(code="SCORER_TIMEOUT", retryable=True, detail=detail)
