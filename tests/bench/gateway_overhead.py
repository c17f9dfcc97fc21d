"""What the gateway costs: CPU and wall time of a call, with an engine that answers at once.

`python tests/bench/gateway_overhead.py [EPISODES]` starts a gateway process over a scripted engine and plays episodes
of three calls (open, call, call, call, seal) from 32 coroutines. Prints one line.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import uvloop

from agentrl.core.config import GatewayConfig
from agentrl.core.db import sqlite_url
from agentrl.core.http import Service, free_port
from agentrl.core.rendering import load_renderer
from agentrl.core.types import Limits, Message, SessionRequest, ToolCall
from agentrl.testing.engine import ScriptedEngine
from agentrl.testing.tokenizer import write_tiny_tokenizer
from gateway.app import run_gateway
from gateway.client import GatewayClient

CALLS, WORKERS, TOKEN = 3, 32, "bench"
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
TOOLS = [{"type": "function", "function": {"name": "bash", "description": "Run a command", "parameters": SCHEMA}}]
START = [
    {"role": "system", "content": "You are an agent with a shell. " * 5},
    {"role": "user", "content": "Find the code in the vault and submit it. " * 2},
]


async def serve(folder: Path, port: int) -> None:
    call = ToolCall(id="", name="bash", arguments=None, raw='{"command": "ls -la"}')
    said = load_renderer(folder, "qwen3").sampled(Message(role="assistant", tool_calls=(call,)))
    await run_gateway(
        engines=[ScriptedEngine(lambda _: said)], tokenizer=folder, renderer="qwen3", config=GatewayConfig(),
        store_url=sqlite_url(folder / "gateway.db"), token=TOKEN, port=port,
    )  # fmt: skip


async def episode(admin: GatewayClient, harness: Service) -> None:
    grant = await admin.open(SessionRequest(task_id="bench", limits=Limits(tokens=4000)))
    messages: list[dict[str, Any]] = list(START)
    for _ in range(CALLS):
        body = {"model": "policy", "messages": messages, "tools": TOOLS}
        response = await harness.request("POST", f"/s/{grant.key}/v1/chat/completions", json=body)
        message = response.json()["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "total 8\nfile.txt " * 3}
        messages += [message, result]
    (trajectory,) = await admin.seal(grant.id)
    assert sum(trajectory.loss_mask) == trajectory.session_tokens


async def measure(process: psutil.Process, port: int, episodes: int) -> None:
    admin, harness = GatewayClient(f"http://127.0.0.1:{port}", TOKEN), Service(f"http://127.0.0.1:{port}")
    await episode(admin, harness)
    left = iter(range(episodes))

    async def worker() -> None:
        for _ in left:
            await episode(admin, harness)

    cpu, wall = sum(process.cpu_times()[:2]), time.monotonic()
    await asyncio.gather(*(worker() for _ in range(WORKERS)))
    cpu, wall = sum(process.cpu_times()[:2]) - cpu, time.monotonic() - wall
    requests = episodes * (CALLS + 2)
    print(
        f"{episodes} episodes of {CALLS} calls in {wall:.1f} s: gateway CPU {1000 * cpu / episodes:.2f} ms an episode, "
        f"{1000 * cpu / requests:.2f} ms a request (load average {os.getloadavg()[0]:.1f})"
    )
    await admin.close()
    await harness.close()


async def main(episodes: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        write_tiny_tokenizer(Path(name))
        port = free_port()
        child = await asyncio.create_subprocess_exec(sys.executable, __file__, "serve", name, str(port))
        try:
            await measure(psutil.Process(child.pid), port, episodes)
        finally:
            child.kill()
            await child.wait()


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        uvloop.run(serve(Path(sys.argv[2]), int(sys.argv[3])))
    else:
        uvloop.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 400))
