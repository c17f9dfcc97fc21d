"""Retries, and another gateway process that goes on from the store."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from agentrl.core.db import sqlite_url
from agentrl.core.errors import Conflict, NotFound
from agentrl.core.http import Service
from agentrl.core.types import Limits, SessionGrant
from agentrl.testing.engine import Reply, ScriptedEngine
from gateway.store import SessionStore, nodes, open_store

from .conftest import BASH, Gateway, StartGateway, until

ASK = {"role": "user", "content": "list the files"}
BODY = {"model": "policy", "messages": [ASK], "tools": [BASH]}
RETRY = {"x-stainless-retry-count": "1"}


async def post(gateway: Gateway, grant: SessionGrant, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    service = Service(gateway.url)
    try:
        path = f"/s/{grant.key}/v1/chat/completions"
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return dict((await service.request("POST", path, json=body, headers=named)).json())
    finally:
        await service.close()


async def test_a_marked_retry_joins_the_running_call(start_gateway: StartGateway, say: Any) -> None:
    engine = ScriptedEngine([Reply(say("a"), delay_s=0.2)])
    async with start_gateway([engine]) as gateway:
        grant = await gateway.open()
        first = asyncio.create_task(post(gateway, grant, BODY))
        await asyncio.sleep(0.1)
        again = await post(gateway, grant, BODY, x_stainless_retry_count="1")
        assert again["choices"] == (await first)["choices"]
        assert len(engine.requests) == 1


async def test_a_marked_retry_replays_the_answer(start_gateway: StartGateway, say: Any) -> None:
    engine = ScriptedEngine([say(calls=['{"command": "ls"}'])])
    async with start_gateway([engine]) as gateway:
        grant = await gateway.open()
        first = await post(gateway, grant, BODY)
        again = await post(gateway, grant, BODY, x_stainless_retry_count="2")
        assert again["choices"] == first["choices"]
        counted = (await gateway.admin._service.request("GET", "/metrics")).text
        (trajectory,) = await gateway.admin.seal(grant.id)
    assert sum(trajectory.loss_mask) == len(say(calls=['{"command": "ls"}']))
    calls = [line for line in counted.splitlines() if line.startswith("agentrl_gateway_calls_total{")]
    assert calls == [
        'agentrl_gateway_calls_total{outcome="ok"} 1.0',
        'agentrl_gateway_calls_total{outcome="replayed"} 1.0',
    ]


async def test_a_call_outlives_its_connection(start_gateway: StartGateway, say: Any) -> None:
    engine = ScriptedEngine([Reply(say("a"), delay_s=0.2)])
    async with start_gateway([engine]) as gateway:
        grant = await gateway.open()
        gone = asyncio.create_task(post(gateway, grant, BODY))
        await asyncio.sleep(0.1)
        gone.cancel()
        answer = await post(gateway, grant, BODY, x_stainless_retry_count="1")
        assert answer["choices"][0]["message"]["content"] == "a"
        assert len(engine.requests) == 1


async def test_idempotency_keys(start_gateway: StartGateway, say: Any) -> None:
    engine = ScriptedEngine([say("a"), say("b")])
    async with start_gateway([engine]) as gateway:
        grant = await gateway.open()
        first = await post(gateway, grant, BODY, idempotency_key="k1")
        assert (await post(gateway, grant, BODY, idempotency_key="k1"))["choices"] == first["choices"]
        other = await post(gateway, grant, BODY, idempotency_key="k2")
        assert other["choices"] != first["choices"]
        with pytest.raises(Conflict):
            await post(gateway, grant, BODY | {"max_tokens": 3}, idempotency_key="k1")


async def test_unmarked_repeats_are_siblings_and_the_last_one_counts(start_gateway: StartGateway, say: Any) -> None:
    engine = ScriptedEngine([say("first try"), say("second try")])
    async with start_gateway([engine]) as gateway:
        grant = await gateway.open()
        for _ in range(2):
            await post(gateway, grant, BODY)
        (trajectory,) = await gateway.admin.seal(grant.id)
    assert trajectory.token_ids == engine.requests[1].token_ids + say("second try")


async def test_an_acknowledged_sibling_keeps_counting(start_gateway: StartGateway, say: Any) -> None:
    engine = ScriptedEngine([say("first try"), say("second try"), say("done")])
    async with start_gateway([engine]) as gateway:
        grant = await gateway.open()
        for _ in range(2):
            await post(gateway, grant, BODY)
        history = [ASK, {"role": "assistant", "content": "first try"}, ASK]
        await post(gateway, grant, BODY | {"messages": history})
        trajectories = await gateway.admin.seal(grant.id)
    trained = sorted(sum(trajectory.loss_mask) for trajectory in trajectories)
    assert trained == sorted([len(say("second try")), len(say("first try")) + len(say("done"))])


async def test_another_process_resumes_the_session(start_gateway: StartGateway, say: Any) -> None:
    said = [say("I look", reasoning="hm", calls=['{"command":  "ls"}']), say("done")]
    engine = ScriptedEngine(said, version=3)
    async with start_gateway([engine]) as gateway:
        grant = await gateway.open()
        first = await post(gateway, grant, BODY)
    async with start_gateway([engine]) as gateway:
        again = await post(gateway, grant, BODY, x_stainless_retry_count="1")
        assert again["choices"] == first["choices"]
        message = first["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "a.txt"}
        await post(gateway, grant, BODY | {"messages": [ASK, message, result]})
        sealed = await gateway.admin.seal(grant.id)
    async with start_gateway([engine]) as gateway:
        assert await gateway.admin.trajectories(grant.id) == sealed
        assert await gateway.admin.seal(grant.id) == sealed
    (trajectory,) = sealed
    assert trajectory.token_ids == engine.requests[1].token_ids + said[1]
    assert sum(trajectory.loss_mask) == len(said[0]) + len(said[1])
    assert set(trajectory.policy_versions) == {None, 3}


async def test_the_store_gives_back_what_it_was_given(start_gateway: StartGateway, say: Any, tmp_path: Path) -> None:
    engine = ScriptedEngine([say("a", reasoning="<|im_end|>", calls=["{}"]), say("b", cut=1)])
    async with start_gateway([engine]) as gateway:
        grant = await gateway.open()
        first = await post(gateway, grant, BODY)
        history = [
            ASK,
            first["choices"][0]["message"],
            {"role": "tool", "content": "é\ud83d\ude00", "tool_call_id": "c"},
        ]
        await post(gateway, grant, BODY | {"messages": history})
        sealed = await gateway.admin.seal(grant.id)
    database = await open_store(sqlite_url(tmp_path / "gateway.db"))
    try:
        nodes = (await SessionStore(database).load_tree(grant.id)).nodes
        again = (await SessionStore(database).load_tree(grant.id)).nodes
    finally:
        await database.close()
    assert [node.seq for node in nodes] == [0, 1]
    assert nodes[1].token_ids() == sealed[0].token_ids
    for one, other in zip(nodes, again, strict=True):
        linked = {"parent", "children"}
        fields = [field.name for field in dataclasses.fields(one) if field.name not in linked]
        assert [getattr(one, name) for name in fields] == [getattr(other, name) for name in fields]


async def test_sessions_whose_time_is_long_over_leave_the_store(
    start_gateway: StartGateway, say: Any, tmp_path: Path
) -> None:
    engine = ScriptedEngine(lambda _: say("a"))
    async with start_gateway([engine]) as gateway:
        over, abandoned = [await gateway.open(limits=Limits(wall_s=0.5)) for _ in range(2)]
        running = await gateway.open()
        for grant in (over, abandoned, running):
            await post(gateway, grant, BODY)
        sealed = await gateway.admin.seal(over.id)
        await asyncio.sleep(0.5)
        assert await gateway.admin.trajectories(over.id) == sealed, "for an hour it can be asked again"
    async with start_gateway([engine], keep_s=0.001) as gateway:

        async def purged() -> bool:
            try:
                await gateway.admin.trajectories(over.id)
            except NotFound:
                return True
            return False

        await until(purged)
        with pytest.raises(NotFound):
            await gateway.admin.seal(abandoned.id)
        (trajectory,) = await gateway.admin.seal(running.id)
    assert sum(trajectory.loss_mask) == len(say("a"))
    database = await open_store(sqlite_url(tmp_path / "gateway.db"))
    async with database.read() as connection:
        left = set((await connection.execute(select(nodes.c.session_id))).scalars())
    await database.close()
    assert left == {running.id}
