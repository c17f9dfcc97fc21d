"""Role `reward`: the reward service over the run's environment."""

from __future__ import annotations

from agentrl.core.plugins import load_environment
from agentrl.launch.context import RoleContext
from agentrl.reward.service import run_reward
from sandbox.client import SandboxClient


async def run(context: RoleContext) -> None:
    config, endpoints = context.config, context.endpoints
    environment = load_environment(config.env.name, config.env.options)
    sandboxes = SandboxClient(endpoints.url("sandbox"), token=endpoints.token)
    try:
        await run_reward(
            {environment.name: environment},
            sandboxes,
            config.reward,
            host=context.host,
            port=context.port,
            token=endpoints.token,
        )
    finally:
        await sandboxes.close()
