"""Role `rollout`: evaluation before, episodes for the trainer, evaluation after."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from agentrl.core.plugins import load_agent, load_environment
from agentrl.launch.context import RoleContext
from agentrl.reward.client import RewardClient
from agentrl.rollout.service import Listen, Rooms, run_rollout
from agentrl.rollout.store import open_store_database
from gateway.client import GatewayClient
from sandbox.client import SandboxClient


async def run(context: RoleContext) -> None:
    endpoints = context.endpoints
    async with AsyncExitStack() as held:
        database = await open_store_database(context.folder.store(context.config, "rollout"))
        held.push_async_callback(database.close)
        rooms = await held.enter_async_context(connected(context))
        await run_rollout(context.config, rooms, database, Listen(context.port, endpoints.token))


@asynccontextmanager
async def connected(context: RoleContext) -> AsyncIterator[Rooms]:
    """The agent, the environment, and clients of the services that episodes use."""
    config, endpoints = context.config, context.endpoints
    async with AsyncExitStack() as held:
        agent = load_agent(config.agent.name, config.agent.options)
        held.push_async_callback(agent.close)
        sessions = GatewayClient(endpoints.url("gateway"), token=endpoints.token)
        held.push_async_callback(sessions.close)
        sandboxes = SandboxClient(endpoints.url("sandbox"), token=endpoints.token)
        held.push_async_callback(sandboxes.close)
        rewards = RewardClient(endpoints.url("reward"), token=endpoints.token)
        held.push_async_callback(rewards.close)
        environment = load_environment(config.env.name, config.env.options)
        yield Rooms(environment, agent, sessions, sandboxes, rewards)
