"""A gateway process over a scripted engine, for tests that kill it: `python process.py FOLDER PORT`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from agentrl.core.config import GatewayConfig
from agentrl.core.db import sqlite_url
from agentrl.core.rendering import load_renderer
from agentrl.core.types import GenerateRequest, Message, ToolCall
from agentrl.testing.engine import Reply, ScriptedEngine
from gateway.app import run_gateway


async def main(folder: Path, port: int) -> None:
    call = ToolCall(id="", name="bash", arguments=None, raw='{"command": "ls"}')
    said = load_renderer(folder, "qwen3").sampled(Message(role="assistant", content="next", tool_calls=(call,)))

    def script(request: GenerateRequest) -> Reply:
        return Reply(said, delay_s=0.02)

    await run_gateway(
        engines=[ScriptedEngine(script)], tokenizer=folder, renderer="qwen3", config=GatewayConfig(),
        store_url=sqlite_url(folder / "gateway.db"), token="admin-token", port=port,
    )  # fmt: skip


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
