"""What the gateway keeps in memory, and how it ends calls."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from agentrl.core.http import Service
from agentrl.testing.engine import Reply, ScriptedEngine

from .conftest import StartGateway

ASK = {"role": "user", "content": "list the files"}


async def test_idle_sessions_leave_memory_and_come_back(
    start_gateway: StartGateway, connect: Any, say: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.sessions.IN_MEMORY", 2)
    engine = ScriptedEngine(lambda _: say("hello"))
    async with start_gateway([engine]) as gateway:
        grants = [await gateway.open() for _ in range(4)]
        history: list[dict[str, Any]] = [ASK]
        for _ in range(2):
            for grant in grants:
                async with connect(grant) as client:
                    await client.chat.completions.create(model="policy", messages=history)
            history = [*history, {"role": "assistant", "content": "hello"}, ASK]
        for grant in grants:
            (trajectory,) = await gateway.admin.seal(grant.id)
            assert sum(trajectory.loss_mask) == 2 * len(say("hello"))


async def test_a_seal_cuts_what_does_not_end(
    start_gateway: StartGateway, connect: Any, say: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.session.DRAIN_S", 0.05)
    engine = ScriptedEngine([say("a"), Reply(say("b"), delay_s=60)])
    async with start_gateway([engine]) as gateway:
        grant = await gateway.open()
        async with connect(grant, max_retries=0) as client:
            await client.chat.completions.create(model="policy", messages=[ASK])
            call = asyncio.create_task(client.chat.completions.create(model="policy", messages=[ASK, ASK]))
            while len(engine.requests) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            (trajectory,) = await gateway.admin.seal(grant.id)
            with pytest.raises(openai.ConflictError, match="ended during the call"):
                await call
    assert sum(trajectory.loss_mask) == len(say("a"))
    assert engine.requests[1].request_id in engine.aborted


async def test_a_silent_stream_is_kept_alive(
    start_gateway: StartGateway, connect: Any, say: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.serve.KEEP_ALIVE_S", 0.02)
    engine = ScriptedEngine(lambda _: Reply(say("slow"), delay_s=0.2))
    async with start_gateway([engine]) as gateway:
        grant = await gateway.open()
        bare = Service(gateway.url)
        try:
            body = {"model": "policy", "messages": [ASK], "stream": True}
            raw = await bare.request("POST", f"/s/{grant.key}/v1/chat/completions", json=body)
        finally:
            await bare.close()
        assert raw.text.startswith(": keep-alive\n\n: keep-alive\n\n")
        async with connect(grant) as client:
            stream = await client.chat.completions.create(model="policy", messages=[ASK], stream=True)
            assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "slow"
