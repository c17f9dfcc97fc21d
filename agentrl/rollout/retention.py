"""Takes the tokens and messages of long-trained episodes out of rollout.db. Called by the producer as steps commit.

Invariant: only groups that are trained or dropped lose anything, and none that a resume from a kept checkpoint can give
back. What happened stays: states, rewards, lengths, versions, claims, and every evaluation.
"""

from __future__ import annotations

from sqlalchemy import func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from agentrl.core.config import RunConfig
from agentrl.core.db import Database
from agentrl.rollout.tables import PRUNED, ClaimState, GroupState, claims, episodes, groups, steps


def kept_steps(config: RunConfig) -> int:
    """Committed steps whose episodes stay whole."""
    return max(config.rollout.keep_steps, config.train.checkpoint_every * config.train.keep_checkpoints)


async def prune(database: Database, *, after: int, upto: int) -> int:
    """Empty the episodes of the committed steps `after` < step <= `upto`, and of groups dropped meanwhile."""
    final = select(claims.c.group_id).where(
        claims.c.state == ClaimState.FINAL, claims.c.step > after, claims.c.step <= upto
    )
    committed = select(func.max(steps.c.committed_at))

    async def work(connection: AsyncConnection) -> int:
        began, ended = [await connection.scalar(committed.where(steps.c.step <= step)) or 0.0 for step in (after, upto)]
        dropped = select(groups.c.id).where(
            groups.c.state == GroupState.DROPPED, groups.c.ended_at >= began, groups.c.ended_at < ended
        )
        over = or_(episodes.c.group_id.in_(final), episodes.c.group_id.in_(dropped))
        whole = (episodes.c.payload.is_not(None), episodes.c.payload != PRUNED)
        done = await connection.execute(update(episodes).where(over, *whole).values(payload=PRUNED))
        return done.rowcount

    return await database.write(work)
