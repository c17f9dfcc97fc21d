"""Role `sandbox`: the sandbox controller, with its state in the run's folder."""

from __future__ import annotations

from agentrl.launch.context import RoleContext
from sandbox.api import run_sandbox


async def run(context: RoleContext) -> None:
    folder, config = context.folder, context.config
    await run_sandbox(
        config.sandbox, folder=folder.path, store_url=folder.store(config, "sandbox"),
        host=context.host, port=context.port, token=context.endpoints.token,
    )  # fmt: skip
