"""The reward service as `rollout` sees it: `core.protocols.Rewards` over HTTP. Constructed by `launch`.

Invariant: `score` returns an outcome, whatever happens. Scoring has no side effect, so a request that got no
answer is repeated until its deadline, across a restart of the service.
"""

from __future__ import annotations

import asyncio
import logging
import time

from pydantic import TypeAdapter

from agentrl.core.errors import AgentRLError, Blame, ServiceUnavailable
from agentrl.core.http import Service
from agentrl.core.types import Failed, Outcome, ScoreRequest

log = logging.getLogger(__name__)

OUTCOME: TypeAdapter[Outcome] = TypeAdapter(Outcome)
FIRST_WAIT_S, LONGEST_WAIT_S = 0.05, 1.0
GRACE_S = 2.0
"""The service answers SCORER_TIMEOUT at the deadline; this is how long that answer may travel."""


class RewardClient:
    def __init__(self, base_url: str, *, token: str = "") -> None:
        self.base_url = base_url
        self._service = Service(base_url, token=token)

    async def score(self, request: ScoreRequest) -> Outcome:
        try:
            return await self._until_answered(request)
        except AgentRLError as error:
            failed = Failed.of(error)
            # The call is never the policy's doing: blamed on it, a failure would be priced, and become a number.
            return failed if failed.blame is Blame.CALLER else failed.model_copy(update={"blame": Blame.INFRA})
        # Rewards.score never raises: an answer that is no outcome, or a request that is no JSON, is an infra failure.
        except Exception as error:
            log.exception("episode %s: the reward call failed", request.episode_id)
            return Failed(code="REWARD", detail=f"{type(error).__name__}: {error}")

    async def close(self) -> None:
        await self._service.close()

    async def _until_answered(self, request: ScoreRequest) -> Outcome:
        deadline = time.monotonic() + request.deadline_s
        wait_s = FIRST_WAIT_S
        while True:
            left_s = deadline - time.monotonic()
            asked = request.model_copy(update={"deadline_s": max(left_s, FIRST_WAIT_S)})
            try:
                answer = await self._service.request(
                    "POST", "/v1/score", json=asked, timeout_s=asked.deadline_s + GRACE_S
                )
            except ServiceUnavailable:
                if time.monotonic() + wait_s >= deadline:
                    raise
            else:
                return OUTCOME.validate_json(answer.content)
            await asyncio.sleep(wait_s)
            wait_s = min(wait_s * 2, LONGEST_WAIT_S)
