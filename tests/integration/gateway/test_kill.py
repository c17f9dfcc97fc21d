"""`kill -9` of the gateway in the middle of episodes: harnesses go on, and no answer they got is lost."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from agentrl.core.http import Service
from agentrl.core.types import Limits, SessionRequest, Trajectory
from agentrl.testing.tokenizer import write_tiny_tokenizer
from gateway.client import GatewayClient

from .conftest import BASH, TOKEN, until

EPISODES, TURNS = 12, 4


def quiet_port() -> int:
    """A free port below the ephemeral range, where a client that retries cannot be given the dead port as its own."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")


@asynccontextmanager
async def gateway_process(folder: Path, port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    script = Path(__file__).parent / "process.py"
    process = await asyncio.create_subprocess_exec(sys.executable, str(script), str(folder), str(port))
    service = Service(f"http://127.0.0.1:{port}")
    try:
        await until(service.healthy)
        yield process
    finally:
        await service.close()
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_killed_in_the_middle(tmp_path: Path, connect: Any) -> None:
    folder, port = write_tiny_tokenizer(tmp_path), quiet_port()
    admin = GatewayClient(f"http://127.0.0.1:{port}", TOKEN)
    answered = asyncio.Event()

    async def episode() -> tuple[list[list[int]], tuple[Trajectory, ...]]:
        """The ids that the harness got from each call, and the export."""
        grant = await admin.open(SessionRequest(task_id="t", limits=Limits(tokens=4000)))
        got: list[list[int]] = []
        messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
        async with connect(grant, max_retries=20) as client:
            for _ in range(TURNS):
                answer = await client.chat.completions.create(
                    model="policy", messages=messages, tools=[BASH], extra_body={"return_token_ids": True}
                )
                got.append(answer.prompt_token_ids + answer.choices[0].token_ids)
                answered.set()
                message = answer.choices[0].message
                result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "a.txt"}
                messages += [message.model_dump(), result]
        return got, await admin.seal(grant.id)

    try:
        async with gateway_process(folder, port) as first:
            running = [asyncio.create_task(episode()) for _ in range(EPISODES)]
            await answered.wait()
            first.send_signal(signal.SIGKILL)
            await first.wait()
            assert not all(task.done() for task in running)
        async with gateway_process(folder, port):
            for got, (trajectory,) in await asyncio.gather(*running):
                assert len(got) == TURNS
                assert all(tuple(ids) == trajectory.token_ids[: len(ids)] for ids in got)
                assert len(got[-1]) == len(trajectory.token_ids)
                assert trajectory.session_tokens == sum(trajectory.loss_mask)
    finally:
        await admin.close()
