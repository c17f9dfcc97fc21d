"""Plays held-out tasks once each and keeps the results under a label. Called by `service` and the CLI.

Invariant: an infra failure is tried again, then reported by itself; it is never counted as a zero. Results are
durable one by one, so that an evaluation that was cut short continues where it stopped.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import delete, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from agentrl.core.db import Database
from agentrl.core.environment import Environment
from agentrl.core.errors import Blame
from agentrl.core.types import Episode, Failed, Limits, Scored, Task
from agentrl.rollout.bounds import together
from agentrl.rollout.episode import Order, Player
from agentrl.rollout.tables import evaluations, pack, unpack
from agentrl.rollout.tasks import bounded

log = logging.getLogger(__name__)

SUCCESS = "success"
"""Name of the reward part that overrides `reward >= 1` as the meaning of success."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What an evaluation found."""

    label: str
    tasks: int
    """Tasks that were asked for."""
    answered: int
    """Tasks with a result that is the policy's: scored, or failed by blame `agent`."""
    infra_failures: int
    """Tasks without such a result after the last try; in no mean."""
    success_rate: float | None
    """Share of `answered`; None when nothing was."""
    mean_reward: float | None
    """Over the scored ones; None when there are none."""
    failures: Mapping[str, int]
    """Failed tasks by code."""
    mean_turns: float
    mean_tokens: float
    """Trained tokens of an episode."""
    versions: tuple[int, ...]
    """Policy versions that sampled a token."""


def held_out(environment: Environment, *, seed: int, count: int, limits: Limits) -> tuple[Task, ...]:
    """The first `count` tasks of the eval split; fewer when there are fewer."""
    return tuple(bounded(task, limits) for task in itertools.islice(environment.tasks("eval", seed), count))


async def evaluate(
    player: Player, database: Database, *, label: str, tasks: Sequence[Task], concurrency: int, retries: int
) -> Evaluation:
    """Play every task that has no result of the policy's under `label` yet, then summarise all of them."""
    known = {slot for slot, episode in await _stored(database, label) if not _lost(episode)}
    places = asyncio.Semaphore(concurrency)

    async def one(slot: int, task: Task) -> None:
        queued_at = time.monotonic()
        async with places:
            for _ in range(retries + 1):
                id_ = f"eval-{label}-{slot}-{secrets.token_hex(4)}"
                played = await player.play(Order(id_, f"eval-{label}", slot, task, queued_at))
                await _store(database, label, slot, played.episode)
                if not _lost(played.episode):
                    return

    began = time.monotonic()
    await together([one(slot, task) for slot, task in enumerate(tasks) if slot not in known])
    found = summarise(label, len(tasks), [episode for _, episode in await _stored(database, label)])
    rate = "none answered" if found.success_rate is None else f"success {found.success_rate:.3f}"
    log.info("evaluation %s: %s of %d tasks in %.1f s", label, rate, found.answered, time.monotonic() - began)
    return found


async def load_evaluation(database: Database, label: str) -> Evaluation | None:
    """The results stored under `label`, or None."""
    rows = await _stored(database, label)
    return summarise(label, len(rows), [episode for _, episode in rows]) if rows else None


async def evaluated_episodes(database: Database, label: str) -> tuple[Episode, ...]:
    """The stored episodes of an evaluation, in the order of its tasks."""
    return tuple(episode for _, episode in await _stored(database, label))


def succeeded(outcome: Scored | Failed) -> bool:
    return isinstance(outcome, Scored) and outcome.parts.get(SUCCESS, outcome.reward) >= 1.0


def summarise(label: str, tasks: int, episodes: Sequence[Episode]) -> Evaluation:
    answered = [episode for episode in episodes if not _lost(episode)]
    scored = [episode.outcome.reward for episode in answered if isinstance(episode.outcome, Scored)]
    codes = Counter(episode.outcome.code for episode in episodes if isinstance(episode.outcome, Failed))
    tokens = [sum(sum(t.loss_mask) for t in episode.trajectories) for episode in answered]
    sampled = {v for e in answered for t in e.trajectories for v in t.policy_versions if v is not None}
    return Evaluation(
        label=label,
        tasks=tasks,
        answered=len(answered),
        infra_failures=tasks - len(answered),
        success_rate=statistics.fmean(succeeded(e.outcome) for e in answered) if answered else None,
        mean_reward=statistics.fmean(scored) if scored else None,
        failures=dict(codes),
        mean_turns=statistics.fmean(episode.attempt.turns for episode in answered) if answered else 0.0,
        mean_tokens=statistics.fmean(tokens) if tokens else 0.0,
        versions=tuple(sorted(sampled)),
    )


def _lost(episode: Episode) -> bool:
    return isinstance(episode.outcome, Failed) and episode.outcome.blame is not Blame.AGENT


async def _stored(database: Database, label: str) -> list[tuple[int, Episode]]:
    query = select(evaluations.c.slot, evaluations.c.payload).where(evaluations.c.label == label)
    async with database.read() as connection:
        rows = (await connection.execute(query.order_by(evaluations.c.slot))).all()
    return [(slot, Episode.model_validate_json(unpack(blob))) for slot, blob in rows]


async def _store(database: Database, label: str, slot: int, episode: Episode) -> None:
    outcome = episode.outcome
    row = {
        "id": episode.id, "label": label, "slot": slot, "state": outcome.kind,
        "reason": outcome.code if isinstance(outcome, Failed) else "",
        "blame": outcome.blame if isinstance(outcome, Failed) else "",
        "reward": outcome.reward if isinstance(outcome, Scored) else None, "payload": pack(episode),
    }  # fmt: skip

    async def work(connection: AsyncConnection) -> None:
        await connection.execute(delete(evaluations).where(evaluations.c.label == label, evaluations.c.slot == slot))
        await connection.execute(insert(evaluations), [row])

    await database.write(work)
