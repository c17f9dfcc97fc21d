"""Calls over replicas that cut, fail and die: the harness sees one call."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import openai
import pytest

from agentrl.core.errors import EngineError, NotFound, Ran, ServiceUnavailable
from agentrl.core.http import Service
from agentrl.core.types import Completion, GenerateRequest, Trajectory
from agentrl.testing.engine import Reply, ScriptedEngine

from .conftest import TOKEN, Gateway, MortalEngine, StartGateway, until

ASK = {"role": "user", "content": "list the files"}


async def live(gateway: Gateway) -> set[str]:
    service = Service(gateway.url, token=TOKEN)
    try:
        response = await service.request("GET", "/v1/pool")
    finally:
        await service.close()
    return {row["url"] for row in response.json() if row["live"]}


async def all_live(gateway: Gateway, engines: Sequence[ScriptedEngine]) -> None:
    async def holds() -> bool:
        return len(await live(gateway)) == len(engines)

    await until(holds)


async def called(engines: Sequence[ScriptedEngine]) -> ScriptedEngine:
    """The first engine that gets a call."""

    async def holds() -> bool:
        return any(engine.requests for engine in engines)

    await until(holds)
    return next(engine for engine in engines if engine.requests)


def versions_of(trajectory: Trajectory) -> list[int | None]:
    return [v for v, bit in zip(trajectory.policy_versions, trajectory.loss_mask, strict=True) if bit]


async def test_a_cut_call_is_continued_under_the_rest_of_the_budget(
    start_gateway: StartGateway, connect: Any, say: Any
) -> None:
    said = say("a rather long answer to that")

    def script(request: GenerateRequest) -> Reply:
        done = len(request.token_ids) - prompt if engine.requests[:-1] else 0
        return Reply(said[done:], token_s=0.01)

    engine = ScriptedEngine(script, version=1)
    prompt = 0
    async with start_gateway([engine]) as gateway:
        grant = await gateway.open()
        async with connect(grant) as client:
            call = asyncio.create_task(client.chat.completions.create(model="policy", messages=[ASK], max_tokens=200))
            await called([engine])
            prompt = len(engine.requests[0].token_ids)
            await asyncio.sleep(0.05)
            engine.cut(engine.requests[0].request_id)
            engine.version = 2
            answer = await call
        (trajectory,) = await gateway.admin.seal(grant.id)
    first, second = engine.requests
    partial = len(second.token_ids) - len(first.token_ids)
    assert 0 < partial < len(said)
    assert second.sampling.max_tokens == 200 - partial
    assert trajectory.token_ids == first.token_ids + said
    assert versions_of(trajectory) == [1] * partial + [2] * (len(said) - partial)
    assert answer.usage.completion_tokens == len(said)


async def test_a_dying_replica_loses_its_call_to_the_other(start_gateway: StartGateway, connect: Any, say: Any) -> None:
    delays = iter((60.0, 0.0, 0.0))
    engines = [MortalEngine(lambda _: Reply(say("hello"), delay_s=next(delays)), url=url) for url in ("s://0", "s://1")]
    async with start_gateway(engines) as gateway:
        grant = await gateway.open()
        async with connect(grant, max_retries=0) as client:
            call = asyncio.create_task(client.chat.completions.create(model="policy", messages=[ASK]))
            victim = await called(engines)
            other = engines[1 - engines.index(victim)]
            victim.die()
            answer = await call
            assert answer.choices[0].message.content == "hello"
            assert [len(victim.requests), len(other.requests)] == [1, 1]
            assert victim.aborted == [victim.requests[0].request_id]
            assert await live(gateway) == {other.url}
            victim.revive()
            history = [ASK, {"role": "assistant", "content": "hello"}, ASK]
            await client.chat.completions.create(model="policy", messages=history)
            assert len(other.requests) == 2, "the session stays where its prefix is cached"
        await all_live(gateway, engines)
        (trajectory,) = await gateway.admin.seal(grant.id)
    assert sum(trajectory.loss_mask) == 2 * len(say("hello"))


async def test_calls_wait_while_no_replica_lives(start_gateway: StartGateway, connect: Any, say: Any) -> None:
    engine = MortalEngine([say("late")])
    engine.die()
    async with start_gateway([engine]) as gateway, connect(await gateway.open(), max_retries=0) as client:
        stream = await client.chat.completions.create(model="policy", messages=[ASK], stream=True)
        assert not engine.requests
        engine.revive()
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == "late"


async def test_a_call_that_nobody_serves_ends_at_its_timeout(
    start_gateway: StartGateway, connect: Any, say: Any
) -> None:
    engine = MortalEngine([])
    engine.die()
    async with start_gateway([engine], call_timeout_s=0.2) as gateway:
        grant = await gateway.open()
        async with connect(grant, max_retries=0) as client:
            with pytest.raises(openai.InternalServerError) as caught:
                await client.chat.completions.create(model="policy", messages=[ASK])
            assert caught.value.status_code == 503
            stream = await client.chat.completions.create(model="policy", messages=[ASK], stream=True)
            with pytest.raises(openai.APIError, match="no replica answered"):
                await anext(aiter(stream))
        assert await gateway.admin.seal(grant.id) == ()


async def test_an_engine_that_keeps_failing_ends_the_call(start_gateway: StartGateway, connect: Any) -> None:
    engine = ScriptedEngine(lambda _: Reply((), error=EngineError("out of memory", ran=Ran.MAYBE)))
    async with (
        start_gateway([engine], max_attempts=3) as gateway,
        connect(await gateway.open(), max_retries=0) as client,
    ):
        with pytest.raises(openai.InternalServerError, match="out of memory"):
            await client.chat.completions.create(model="policy", messages=[ASK])
    assert len(engine.requests) == 3


async def test_a_replica_that_is_not_accepting_gets_no_calls(
    start_gateway: StartGateway, connect: Any, say: Any
) -> None:
    engine = ScriptedEngine(lambda _: say("hello"))
    async with start_gateway([engine]) as gateway:
        await gateway.admin.set_replica(engine.url, version=0, accepting=False)
        async with connect(await gateway.open(), max_retries=0) as client:
            call = asyncio.create_task(client.chat.completions.create(model="policy", messages=[ASK]))
            await asyncio.sleep(0.1)
            assert not engine.requests
            await gateway.admin.set_replica(engine.url, version=7, accepting=True)
            await call
        assert engine.requests[0].cache_salt == "v7"
        with pytest.raises(NotFound):
            await gateway.admin.set_replica("scripted://unknown", version=0, accepting=True)


async def test_a_restarted_gateway_still_sends_no_calls_to_a_replica_that_updates(
    start_gateway: StartGateway, connect: Any, say: Any
) -> None:
    engine = ScriptedEngine(lambda _: say("hello"))
    async with start_gateway([engine]) as gateway:
        await gateway.admin.set_replica(engine.url, version=0, accepting=False)
    async with start_gateway([engine]) as gateway:
        await all_live(gateway, [engine])
        async with connect(await gateway.open(), max_retries=0) as client:
            call = asyncio.create_task(client.chat.completions.create(model="policy", messages=[ASK]))
            await asyncio.sleep(0.1)
            assert not engine.requests
            await gateway.admin.set_replica(engine.url, version=1, accepting=True)
            await call
    async with start_gateway([engine]) as gateway, connect(await gateway.open(), max_retries=0) as client:
        await client.chat.completions.create(model="policy", messages=[ASK])


async def test_a_replica_that_fell_behind_gets_no_calls(start_gateway: StartGateway, connect: Any, say: Any) -> None:
    engines = [ScriptedEngine(lambda _: say("a"), url=f"scripted://{n}", version=v) for n, v in enumerate((3, 5))]
    async with start_gateway(engines) as gateway:
        await all_live(gateway, engines)
        for _ in range(8):
            async with connect(await gateway.open()) as client:
                await client.chat.completions.create(model="policy", messages=[ASK])
    assert [len(engine.requests) for engine in engines] == [0, 8]


class Resetting(ScriptedEngine):
    """Breaks the connection of the first call, as a crash does."""

    async def generate(self, request: GenerateRequest) -> Completion:
        if not self.requests:
            self.requests.append(request)
            raise ServiceUnavailable(f"{self.url}: connection reset", ran=Ran.MAYBE)
        return await super().generate(request)


async def test_a_broken_connection_is_tried_again(start_gateway: StartGateway, connect: Any, say: Any) -> None:
    engine = Resetting([say("hello")])
    async with start_gateway([engine]) as gateway, connect(await gateway.open(), max_retries=0) as client:
        answer = await client.chat.completions.create(model="policy", messages=[ASK])
    assert answer.choices[0].message.content == "hello"
    assert len(engine.requests) == 2
