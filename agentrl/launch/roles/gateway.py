"""Role `gateway`: sessions and Chat Completions over the run's engines, with the policy's tokenizer."""

from __future__ import annotations

from contextlib import AsyncExitStack

from agentrl.engine.client import EngineClient
from agentrl.launch.context import RoleContext
from gateway.app import run_gateway


async def run(context: RoleContext) -> None:
    config, endpoints = context.config, context.endpoints
    async with AsyncExitStack() as held:
        engines = [EngineClient(url, endpoints.token) for url in endpoints.engines]
        for engine in engines:
            held.push_async_callback(engine.close)
        await run_gateway(
            engines=engines, tokenizer=context.folder.warm, renderer=config.model.renderer,
            store_url=context.folder.store(config, "gateway"), config=config.gateway, token=endpoints.token,
            host=context.host, port=context.port,
        )  # fmt: skip
