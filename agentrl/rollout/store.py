"""What the rollout process keeps in rollout.db: groups, episodes and the task cursor.

Called by the producer; the trainer's side of the same tables is `buffer`. Every method is one durable
transaction. Invariant: a group moves running -> ready | dropped here and nowhere else, by compare-and-set,
so that a transition that was already made is refused instead of repeated.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from agentrl.core.db import Database, open_database
from agentrl.core.errors import NotFound, RolloutError
from agentrl.core.types import Episode, Failed, Scored, Task, Trajectory
from agentrl.rollout.acceptance import Verdict, trained_tokens
from agentrl.rollout.staleness import Ledger
from agentrl.rollout.tables import (
    INTERRUPTED,
    PRUNED,
    ClaimState,
    DropReason,
    EpisodeState,
    GroupState,
    claims,
    cursors,
    episodes,
    evaluations,
    groups,
    identity,
    pack,
    samples,
    steps,
    unpack,
    versions,
)

MIGRATIONS = Path(__file__).parent / "migrations"
TRAIN_CURSOR = "train"


@dataclass(frozen=True, slots=True)
class Issue:
    """A group as it is issued: one episode id a slot."""

    group_id: str
    task: Task
    episode_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EndedSlot:
    """The last episode of a slot, as a restart finds it."""

    episode_id: str
    state: EpisodeState
    blame: str
    reward: float | None


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A group that was running when the process died."""

    group_id: str
    task: Task
    slots: tuple[EndedSlot, ...]
    """The newest episode of each slot, in order."""
    tries: tuple[int, ...]
    """Failed tries of each slot that count against `reissues`."""


async def open_store_database(url: str) -> Database:
    """Connect to the rollout database and bring its tables to the newest revision."""
    return await open_database(url, room="rollout", migrations=MIGRATIONS)


class Store:
    """The rollout process's side of the database."""

    def __init__(self, database: Database) -> None:
        self.database = database

    async def identity(self) -> str:
        """A random name of this store, the same for as long as it exists."""

        async def work(connection: AsyncConnection) -> str:
            known = await connection.scalar(select(identity.c.id))
            if known is None:
                known = secrets.token_hex(8)
                await connection.execute(insert(identity), [{"id": known}])
            return str(known)

        return await self.database.write(work)

    async def ledger(self) -> Ledger:
        """One consistent reading of what admission counts."""
        newest = select(func.coalesce(func.max(versions.c.version), -1)).scalar_subquery()
        live = (ClaimState.OPEN, ClaimState.FINAL)
        consumed = select(func.count()).where(claims.c.state.in_(live), claims.c.version >= newest)
        flat = select(func.count()).where(groups.c.reason == DropReason.FLAT, groups.c.ended_version >= newest)
        ready = select(func.count()).where(groups.c.state == GroupState.READY)
        committed = select(func.count()).select_from(steps)
        taken = select(func.count(claims.c.step.distinct())).where(claims.c.state.in_(live))
        served = select(func.coalesce(func.max(versions.c.step), -1)).where(versions.c.version == newest)
        columns = (newest, *(query.scalar_subquery() for query in (ready, consumed, flat, committed, taken, served)))
        async with self.database.read() as connection:
            row = (await connection.execute(select(*columns))).one()
        return Ledger(
            version=row[0], ready=row[1], consumed=row[2], flat=row[3], steps=row[4], taken=row[5], served=row[6]
        )

    async def cursor(self) -> int:
        """Tasks of the training stream that were issued."""
        async with self.database.read() as connection:
            row = await connection.scalar(select(cursors.c.position).where(cursors.c.name == TRAIN_CURSOR))
        return row or 0

    async def issue(self, issued: Issue, *, position: int, version: int) -> None:
        """Store a new group with its running episodes, and move the cursor to `position`."""
        now = time.time()

        async def work(connection: AsyncConnection) -> None:
            await connection.execute(
                insert(groups).values(
                    id=issued.group_id, seq=position, size=len(issued.episode_ids), task=pack(issued.task),
                    state=GroupState.RUNNING, issued_version=version, issued_at=now,
                )
            )  # fmt: skip
            rows = [_running(id_, issued.group_id, slot, 0) for slot, id_ in enumerate(issued.episode_ids)]
            await connection.execute(insert(episodes), rows)
            moved = await connection.execute(
                update(cursors).where(cursors.c.name == TRAIN_CURSOR).values(position=position)
            )
            if moved.rowcount == 0:
                await connection.execute(insert(cursors).values(name=TRAIN_CURSOR, position=position))

        await self.database.write(work)

    async def reissue(self, episode_id: str, group_id: str, slot: int) -> None:
        """Store a new running episode in a slot whose last one ended without acceptance."""
        earlier = select(func.count()).where(episodes.c.group_id == group_id, episodes.c.slot == slot)

        async def work(connection: AsyncConnection) -> None:
            issue = await connection.scalar(earlier) or 0
            await connection.execute(insert(episodes), [_running(episode_id, group_id, slot, issue)])

        await self.database.write(work)

    async def finish(self, episode: Episode, verdict: Verdict) -> None:
        """Record how an episode ended, with its samples when it was accepted."""
        accepted = verdict.state is EpisodeState.ACCEPTED
        values = {**_ended(episode, verdict), "ended_at": time.time(), "payload": pack(episode)}
        rows = [_sample(t, episode) for t in episode.trajectories if accepted and trained_tokens(t)]

        async def work(connection: AsyncConnection) -> None:
            where = (episodes.c.id == episode.id, episodes.c.state == EpisodeState.RUNNING)
            moved = await connection.execute(update(episodes).where(*where).values(values))
            if moved.rowcount != 1:
                raise RolloutError(f"episode {episode.id} is not running in the store: its result came twice")
            if rows:
                await connection.execute(insert(samples), rows)

        await self.database.write(work)

    async def end_group(self, group_id: str, reason: DropReason | None, *, version: int) -> None:
        """Make a running group ready, or drop it for `reason`."""
        state = GroupState.READY if reason is None else GroupState.DROPPED
        values = {"state": state, "reason": reason or "", "ended_version": version, "ended_at": time.time()}

        async def work(connection: AsyncConnection) -> None:
            where = (groups.c.id == group_id, groups.c.state == GroupState.RUNNING)
            moved = await connection.execute(update(groups).where(*where).values(values))
            if moved.rowcount != 1:
                raise RolloutError(f"group {group_id} is not running in the store: it ended twice")

        await self.database.write(work)

    async def unfinished(self) -> tuple[Unfinished, ...]:
        """The running groups of a process that died, oldest first; their running episodes become INTERRUPTED."""

        async def work(connection: AsyncConnection) -> tuple[Unfinished, ...]:
            await connection.execute(
                update(episodes)
                .where(episodes.c.state == EpisodeState.RUNNING)
                .values(state=EpisodeState.FAILED, reason=INTERRUPTED, blame="infra", ended_at=time.time())
            )
            query = select(groups.c.id, groups.c.task).where(groups.c.state == GroupState.RUNNING)
            rows = (await connection.execute(query.order_by(groups.c.seq))).all()
            return tuple([await _unfinished(connection, group_id, task) for group_id, task in rows])

        return await self.database.write(work)

    async def episode(self, episode_id: str) -> Episode:
        """A finished episode by id. NotFound when it is unknown or still running."""
        async with self.database.read() as connection:
            blob = await connection.scalar(select(episodes.c.payload).where(episodes.c.id == episode_id))
        if blob is None:
            raise NotFound(f"episode {episode_id} is not in the store, or has not ended")
        if blob == PRUNED:
            raise NotFound(f"episode {episode_id}: only its facts are kept, its step is long over (rollout.keep_steps)")
        return Episode.model_validate_json(unpack(blob))

    async def counts(self) -> Mapping[str, int]:
        """Groups and episodes by state, as `groups/ready`, and results by evaluation, as `evaluations/before`."""
        found: dict[str, int] = {}
        async with self.database.read() as connection:
            for name, table in (("groups", groups), ("episodes", episodes)):
                query = select(table.c.state, func.count()).group_by(table.c.state)
                found |= {f"{name}/{state}": count for state, count in (await connection.execute(query)).all()}
            results = select(evaluations.c.label, func.count()).group_by(evaluations.c.label)
            found |= {f"evaluations/{label}": count for label, count in (await connection.execute(results)).all()}
        return found

    async def failures(self) -> Mapping[str, int]:
        """Ended episodes that were not accepted, by failure code or defect."""
        lost = (EpisodeState.FAILED, EpisodeState.QUARANTINED)
        query = (
            select(episodes.c.reason, func.count().label("n"))
            .where(episodes.c.state.in_(lost))
            .group_by(episodes.c.reason)
        )
        async with self.database.read() as connection:
            return {row.reason: row.n for row in await connection.execute(query)}


def _running(episode_id: str, group_id: str, slot: int, issue: int) -> dict[str, Any]:
    return {
        "id": episode_id, "group_id": group_id, "slot": slot, "issue": issue,
        "state": EpisodeState.RUNNING, "started_at": time.time(),
    }  # fmt: skip


def _ended(episode: Episode, verdict: Verdict) -> dict[str, Any]:
    outcome = episode.outcome
    accepted = verdict.state is EpisodeState.ACCEPTED
    return {
        "state": verdict.state,
        "reason": verdict.reason,
        "detail": verdict.detail,
        "blame": outcome.blame if isinstance(outcome, Failed) else "",
        "reward": outcome.reward if accepted and isinstance(outcome, Scored) else None,
        "turns": episode.attempt.turns,
        "tokens": sum(len(trajectory.token_ids) for trajectory in episode.trajectories),
        "total_s": episode.timings.total_s,
    }


def _sample(trajectory: Trajectory, episode: Episode) -> dict[str, Any]:
    rows = zip(trajectory.loss_mask, trajectory.policy_versions, strict=True)
    sampled = [version for bit, version in rows if bit and version is not None]
    return {
        "trajectory_id": trajectory.id,
        "episode_id": episode.id,
        "group_id": episode.group_id,
        "tokens": len(trajectory.token_ids),
        "trained_tokens": len(sampled),
        "min_version": min(sampled),
        "max_version": max(sampled),
    }


async def _unfinished(connection: AsyncConnection, group_id: str, task: bytes) -> Unfinished:
    query = select(
        episodes.c.slot, episodes.c.id, episodes.c.state, episodes.c.reason, episodes.c.blame, episodes.c.reward
    )
    ordered = query.where(episodes.c.group_id == group_id).order_by(episodes.c.slot, episodes.c.issue)
    slots: dict[int, EndedSlot] = {}
    tries: dict[int, int] = {}
    for slot, id_, state, reason, blame, reward in (await connection.execute(ordered)).all():
        slots[slot] = EndedSlot(id_, EpisodeState(state), blame, reward)
        lost = state != EpisodeState.ACCEPTED and reason != INTERRUPTED
        tries[slot] = tries.get(slot, 0) + int(lost)
    order: Sequence[int] = sorted(slots)
    return Unfinished(
        group_id, Task.model_validate_json(unpack(task)), tuple(slots[i] for i in order), tuple(tries[i] for i in order)
    )
