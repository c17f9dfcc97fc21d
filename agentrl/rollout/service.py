"""The rollout process: evaluation before, the producer until training is done, evaluation after.

Awaited by `launch` in the rollout child. Invariant: it returns only when every configured evaluation is
stored and the store holds all training steps; anything else ends it with an exception.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI

from agentrl.core.config import RunConfig
from agentrl.core.db import Database
from agentrl.core.environment import Environment
from agentrl.core.errors import NoProgress
from agentrl.core.http import create_app, server
from agentrl.core.protocols import Agent, Rewards, Sandboxes, Sessions
from agentrl.core.telemetry import Metrics
from agentrl.rollout.bounds import tidy, together
from agentrl.rollout.episode import Player
from agentrl.rollout.evaluate import evaluate, held_out
from agentrl.rollout.metrics import SPECS
from agentrl.rollout.producer import Producer
from agentrl.rollout.retention import kept_steps
from agentrl.rollout.store import Store

log = logging.getLogger(__name__)

BEFORE, AFTER = "before", "after"
POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Rooms:
    """What the rollout process talks to."""

    environment: Environment
    agent: Agent
    sessions: Sessions
    sandboxes: Sandboxes | None
    rewards: Rewards


@dataclass(frozen=True, slots=True)
class Listen:
    """Where /metrics and /v1/status are served."""

    port: int
    token: str = ""
    host: str = "127.0.0.1"


async def run_rollout(config: RunConfig, rooms: Rooms, database: Database, listen: Listen) -> None:
    """Everything the rollout process does, from start or restart to the end of the run."""
    owner = f"{config.name}-{await Store(database).identity()}"
    rollout = Rollout(config, rooms, database, owner=owner)
    http = server(rollout.app(listen.token), host=listen.host, port=listen.port)
    serving = asyncio.create_task(http.serve())
    try:
        await rollout.run()
    finally:
        http.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)


class Rollout:
    """The phases of a run, and what the status page says of them."""

    def __init__(self, config: RunConfig, rooms: Rooms, database: Database, *, owner: str) -> None:
        self._config = config
        self._rooms = rooms
        self._database = database
        self._store = Store(database)
        self._owner = owner
        self._metrics = Metrics(SPECS)
        self._phase = "starting"
        self._producer = Producer(
            config.rollout,
            player=self._player(),
            store=self._store,
            seed=config.seed,
            steps=config.train.steps,
            keep_steps=kept_steps(config),
            metrics=self._metrics,
        )

    async def run(self) -> None:
        patience_s = self._config.rollout.trainer_wait_s
        await self._close_leftovers()
        await self._served(0, limit_s=patience_s)
        # After a restart in mid-training the initial policy is gone: what was measured of it stays as it is.
        if (await self._store.ledger()).steps == 0:
            self._phase = f"evaluating {BEFORE}"
            await self._evaluate(BEFORE)
        self._phase = "training"
        await together([self._producer.run(), self._evaluate_periodically()])
        await self._served(self._config.train.steps, limit_s=patience_s)
        self._phase = f"evaluating {AFTER}"
        await self._evaluate(AFTER)
        self._phase = "done"

    def app(self, token: str) -> FastAPI:
        async def ready() -> str:
            return "" if self._phase != "starting" else self._producer.dispatcher.waiting_for()

        app = create_app("rollout", metrics=self._metrics, token=token, ready=ready)

        @app.get("/v1/status")
        async def status() -> dict[str, Any]:
            dispatcher = self._producer.dispatcher
            ledger = await self._store.ledger()
            return {
                "phase": self._phase, "version": ledger.version, "steps": ledger.steps, "ready": ledger.ready,
                "running": dispatcher.running, "open_groups": dispatcher.open_groups,
                "waiting_for": dispatcher.waiting_for(), **await self._store.counts(),
            }  # fmt: skip

        return app

    def _player(self, temperature: float | None = None) -> Player:
        config, rooms = self._config, self._rooms
        sampling = config.rollout.sampling
        if temperature is not None:
            sampling = sampling.model_copy(update={"temperature": temperature})
        return Player(
            environment=rooms.environment, agent=rooms.agent, sessions=rooms.sessions, sandboxes=rooms.sandboxes,
            rewards=rooms.rewards, sampling=sampling, owner=self._owner, score_s=config.reward.timeout_s,
        )  # fmt: skip

    async def _evaluate(self, label: str) -> None:
        """Run or continue the evaluation `label`; what it found is in the store."""
        count, rollout = self._config.eval.tasks, self._config.rollout
        tasks = held_out(self._rooms.environment, seed=self._config.seed, count=count, limits=rollout.limits)
        if tasks:
            found = await evaluate(
                self._player(self._config.eval.temperature), self._database, label=label, tasks=tasks,
                concurrency=rollout.concurrency, retries=rollout.reissues,
            )  # fmt: skip
            if found.success_rate is not None:
                self._metrics.set("rollout/eval_success_ratio", found.success_rate, label=label)

    async def _evaluate_periodically(self) -> None:
        every, steps = self._config.eval.every, self._config.train.steps
        if every == 0:
            return
        already = (await self._store.ledger()).served
        for step in range(every, steps, every):
            if already >= step + every:
                # Passed before this process began: what would be measured now is another policy than that step's.
                log.info("evaluation step-%d is left as it is: replicas serve the policy of step %d", step, already)
                continue
            # That this does not take forever is the producer's to see to.
            await self._served(step, limit_s=math.inf)
            await self._evaluate(f"step-{step}")

    async def _served(self, steps: int, *, limit_s: float) -> None:
        """Wait until replicas serve a policy that has had `steps` training steps."""
        deadline = time.monotonic() + limit_s
        while (await self._store.ledger()).served < steps:
            if time.monotonic() > deadline:
                what = "the trainer's first policy version" if steps == 0 else f"the policy of step {steps}"
                raise NoProgress(
                    f"rollout: waited {limit_s:g} s (rollout.trainer_wait_s) for {what}: see the trainer's log"
                )
            await asyncio.sleep(POLL_S)

    async def _close_leftovers(self) -> None:
        """Close the sandboxes of a process that died: their episodes are issued again under other ids."""
        if self._rooms.sandboxes is None:
            return
        for view in await self._rooms.sandboxes.list(owner=self._owner):
            await tidy(self._close(view.id), f"closing leftover sandbox {view.id}")

    async def _close(self, sandbox_id: str) -> None:
        assert self._rooms.sandboxes is not None
        await (await self._rooms.sandboxes.get(sandbox_id)).close()
