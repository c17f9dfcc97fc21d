"""The reward service: `POST /v1/score`. Served by `run_reward` in its own process; called by `reward.client`.

Invariant: one episode has one outcome while this process lives; asking again, even while the first
question is being answered, never scores twice.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from fastapi import Request, Response
from fastapi.applications import FastAPI
from pydantic import ValidationError

from agentrl.core.config import RewardConfig
from agentrl.core.environment import Environment
from agentrl.core.errors import Conflict, RequestError
from agentrl.core.http import create_app, server
from agentrl.core.protocols import Sandboxes
from agentrl.core.telemetry import Metrics
from agentrl.core.types import Outcome, ScoreRequest
from agentrl.reward.metrics import SPECS
from agentrl.reward.scorer import Scorer

REMEMBERED = 4096
"""Outcomes kept for repeated requests; older ones are scored anew, which has no side effect."""


@dataclass(frozen=True, slots=True)
class Answer:
    digest: bytes
    """Of what was asked, so that another question under the same episode is refused."""
    outcome: asyncio.Task[Outcome]


class OutcomeBook:
    """The latest answers by episode: each question is asked of the scorer once."""

    def __init__(self, scorer: Scorer, metrics: Metrics, size: int = REMEMBERED) -> None:
        self._scorer = scorer
        self._metrics = metrics
        self._size = size
        self._answers: OrderedDict[str, Answer] = OrderedDict()

    async def outcome(self, request: ScoreRequest) -> Outcome:
        asked = request.model_dump_json(exclude={"deadline_s"}).encode()
        digest = hashlib.blake2b(asked, digest_size=16).digest()
        answer = self._answers.get(request.episode_id)
        if answer is None:
            answer = Answer(digest, asyncio.create_task(self._score(request)))
            self._answers[request.episode_id] = answer
            while len(self._answers) > self._size:
                self._answers.popitem(last=False)
        elif answer.digest != digest:
            raise Conflict(f"episode {request.episode_id} was already scored with another task, attempt or sandbox")
        else:
            self._metrics.inc("reward/replays_total")
        # A caller that hangs up must not cut the answer of the others.
        return await asyncio.shield(answer.outcome)

    async def _score(self, request: ScoreRequest) -> Outcome:
        started = time.perf_counter()
        self._running(+1)
        try:
            outcome = await self._scorer.score(request)
        except BaseException:
            self._answers.pop(request.episode_id, None)
            raise
        finally:
            self._running(-1)
            self._metrics.observe("reward/score_seconds", time.perf_counter() - started)
        code = outcome.code if outcome.kind == "failed" else ""
        self._metrics.inc("reward/outcomes_total", kind=outcome.kind, code=code, env=request.task.env)
        if outcome.kind == "failed" and outcome.retryable:
            self._answers.pop(request.episode_id, None)
        return outcome

    def _running(self, by: int) -> None:
        self._metrics.set("reward/running_count", self._metrics.value("reward/running_count") + by)


def create_reward_app(
    environments: Mapping[str, Environment],
    sandboxes: Sandboxes,
    config: RewardConfig,
    *,
    metrics: Metrics | None = None,
    token: str = "",
) -> FastAPI:
    """The app over the environments (by the name that their tasks carry) and a client of the sandbox controller."""
    metrics = metrics or Metrics(SPECS)
    app = create_app("reward", metrics=metrics, token=token)
    book = OutcomeBook(Scorer(environments, sandboxes, config), metrics)

    @app.post("/v1/score")
    async def score(request: Request) -> Response:
        try:
            asked = ScoreRequest.model_validate_json(await request.body())
        except ValidationError as error:
            raise RequestError(f"POST /v1/score: not a ScoreRequest: {error}") from error
        outcome = await book.outcome(asked)
        return Response(outcome.model_dump_json(), media_type="application/json")

    return app


async def run_reward(
    environments: Mapping[str, Environment],
    sandboxes: Sandboxes,
    config: RewardConfig,
    *,
    port: int,
    host: str = "127.0.0.1",
    token: str = "",
) -> None:
    """Serve until SIGTERM."""
    await server(create_reward_app(environments, sandboxes, config, token=token), host=host, port=port).serve()
