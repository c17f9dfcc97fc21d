"""Role `evaluation`: plays held-out tasks with the newest policy, stores the results, ends."""

from __future__ import annotations

from contextlib import AsyncExitStack

from agentrl.launch.context import RoleContext
from agentrl.launch.roles.rollout import connected
from agentrl.rollout.episode import Player
from agentrl.rollout.evaluate import evaluate, held_out
from agentrl.rollout.store import open_store_database


async def run(context: RoleContext) -> None:
    """`context.argument` is the label to store the results under."""
    config = context.config
    async with AsyncExitStack() as held:
        database = await open_store_database(context.folder.store(config, "rollout"))
        held.push_async_callback(database.close)
        rooms = await held.enter_async_context(connected(context))
        player = Player(
            environment=rooms.environment, agent=rooms.agent, sessions=rooms.sessions, sandboxes=rooms.sandboxes,
            rewards=rooms.rewards, owner=config.name, score_s=config.reward.timeout_s,
            sampling=config.rollout.sampling.model_copy(update={"temperature": config.eval.temperature}),
        )  # fmt: skip
        tasks = held_out(rooms.environment, seed=config.seed, count=config.eval.tasks, limits=config.rollout.limits)
        await evaluate(
            player, database, label=context.argument, tasks=tasks, concurrency=config.rollout.concurrency,
            retries=config.rollout.reissues,
        )  # fmt: skip
