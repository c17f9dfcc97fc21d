"""Chat Completions with the real openai client: what a harness gets, and what is recorded of it."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from agentrl.core.errors import RequestError, Unauthorized
from agentrl.core.http import Service
from agentrl.core.rendering import ConversationRenderer
from agentrl.core.types import Limits, Trajectory
from agentrl.testing.engine import ScriptedEngine

from .conftest import BASH, StartGateway

ASK = {"role": "user", "content": "list the files"}


def trained(trajectory: Trajectory) -> tuple[int, ...]:
    return tuple(t for t, bit in zip(trajectory.token_ids, trajectory.loss_mask, strict=True) if bit)


async def test_a_tool_loop_is_one_trajectory(start_gateway: StartGateway, connect: Any, say: Any) -> None:
    first = say("I look.", reasoning="need to look", calls=['{"command":  "ls"}'])
    last = say("done")
    engine = ScriptedEngine([first, last])
    async with start_gateway([engine]) as gateway:
        grant = await gateway.open()
        async with connect(grant) as client:
            answer = await client.chat.completions.create(model="policy", messages=[ASK], tools=[BASH])
            choice = answer.choices[0]
            assert choice.finish_reason == "tool_calls"
            assert choice.message.content == "I look."
            assert choice.message.reasoning_content == "need to look"
            assert choice.message.tool_calls[0].function.arguments == '{"command":  "ls"}'
            assert answer.usage.completion_tokens == len(first)
            result = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "<|im_end|> a.txt"}
            history = [ASK, choice.message.model_dump(), result]
            final = await client.chat.completions.create(model="policy", messages=history, tools=[BASH])
            assert (final.choices[0].message.content, final.choices[0].finish_reason) == ("done", "stop")
        (trajectory,) = await gateway.admin.seal(grant.id)
    second = engine.requests[1]
    assert trajectory.token_ids == second.token_ids + last
    assert second.token_ids[: len(engine.requests[0].token_ids) + len(first)] == engine.requests[0].token_ids + first
    assert trained(trajectory) == first + last
    assert trajectory.session_tokens == len(first + last)
    assert (trajectory.finish, trajectory.provenance.engine) == ("terminated", "scripted/1")
    assert second.session_id == grant.id
    assert second.cache_salt == "v0"


async def test_a_stream_says_the_same(start_gateway: StartGateway, connect: Any, say: Any) -> None:
    arguments = '{"command": "' + "x" * 100 + '"}'
    ids = say("I look.", reasoning="hm", calls=[arguments, '{"command": "b"}'])
    async with start_gateway([ScriptedEngine([ids])]) as gateway:
        grant = await gateway.open()
        async with connect(grant) as client:
            options = {"stream_options": {"include_usage": True}, "logprobs": True}
            stream = await client.chat.completions.create(
                model="policy", messages=[ASK], tools=[BASH], stream=True, extra_body=options
            )
            chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "I look."
    assert "".join(getattr(delta, "reasoning_content", "") or "" for delta in deltas) == "hm"
    pieces = [call for delta in deltas for call in delta.tool_calls or ()]
    assert "".join(piece.function.arguments for piece in pieces if piece.index == 0) == arguments
    assert "".join(piece.function.arguments for piece in pieces if piece.index == 1) == '{"command": "b"}'
    assert len(pieces) > 4
    *_, end, usage = chunks
    assert end.choices[0].finish_reason == "tool_calls"
    assert len(end.choices[0].logprobs.content) == len(ids)
    assert usage.usage.completion_tokens == len(ids)


async def test_usage_and_token_ids_only_on_request(start_gateway: StartGateway, connect: Any, say: Any) -> None:
    engine = ScriptedEngine([say("a"), say("b")])
    async with start_gateway([engine]) as gateway, connect(await gateway.open()) as client:
        stream = await client.chat.completions.create(model="policy", messages=[ASK], stream=True)
        assert all([chunk.choices and chunk.usage is None async for chunk in stream])
        answer = await client.chat.completions.create(
            model="policy", messages=[ASK], logprobs=True, extra_body={"return_token_ids": True, "unknown": 1}
        )
    assert answer.prompt_token_ids == list(engine.requests[1].token_ids)
    assert answer.choices[0].token_ids == list(say("b"))
    logprobs = [row.logprob for row in answer.choices[0].logprobs.content]
    assert logprobs == [ScriptedEngine.logprob(token) for token in say("b")]


async def test_a_malformed_call_reaches_the_harness(start_gateway: StartGateway, connect: Any, say: Any) -> None:
    async with (
        start_gateway([ScriptedEngine([say(calls=['{"command": ls}'])])]) as gateway,
        connect(await gateway.open()) as client,
    ):
        answer = await client.chat.completions.create(model="policy", messages=[ASK], tools=[BASH])
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments, call.malformed) == ("bash", '{"command": ls}}', True)


async def test_calls_are_parsed_only_when_tools_were_sent(start_gateway: StartGateway, connect: Any, say: Any) -> None:
    async with (
        start_gateway([ScriptedEngine([say(calls=["{}"])])]) as gateway,
        connect(await gateway.open()) as client,
    ):
        answer = await client.chat.completions.create(model="policy", messages=[ASK])
    assert answer.choices[0].message.tool_calls is None
    assert "<tool_call>" in answer.choices[0].message.content


async def test_stop_texts_cut_the_answer_and_the_record(start_gateway: StartGateway, connect: Any, say: Any) -> None:
    ids = say("Thought. Observation: made up")
    async with start_gateway([ScriptedEngine([ids])]) as gateway:
        grant = await gateway.open()
        async with connect(grant) as client:
            answer = await client.chat.completions.create(model="policy", messages=[ASK], stop=["Observation:"])
        (trajectory,) = await gateway.admin.seal(grant.id)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Thought.", "stop")
    kept = trained(trajectory)
    assert kept == ids[: len(kept)]
    assert len(kept) < len(ids)


async def test_bodies_that_are_hardly_json(start_gateway: StartGateway, say: Any) -> None:
    engine = ScriptedEngine([say("a")])
    async with start_gateway([engine]) as gateway:
        path = f"/s/{(await gateway.open()).key}/v1/chat/completions"
        service = Service(gateway.url)
        try:
            lone = b'{"messages": [{"role": "user", "content": "\\udc80 binary"}]}'
            answer = await service.request("POST", path, content=lone)
            assert answer.json()["choices"][0]["message"]["content"] == "a"
            asked = b'{"messages": [{"role": "user"}]'
            for body in (b"{", b"[]", b'{"messages": []}', asked + b', "n": 2}', asked + b', "stop": 5}'):
                with pytest.raises(RequestError):
                    await service.request("POST", path, content=body)
        finally:
            await service.close()
    assert len(engine.requests) == 1


async def test_overflow_is_worded_for_openai_clients(start_gateway: StartGateway, connect: Any, say: Any) -> None:
    async with (
        start_gateway([ScriptedEngine([say("a")])]) as gateway,
        connect(await gateway.open(limits=Limits(turns=5, tokens=8))) as client,
    ):
        with pytest.raises(openai.BadRequestError, match="maximum context length is 8 tokens") as caught:
            await client.chat.completions.create(model="policy", messages=[ASK], stream=True)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("limits", [{"calls": 1}, {"limits": Limits(turns=1)}, {"limits": Limits(wall_s=0.001)}])
async def test_limits_refuse_for_good(
    start_gateway: StartGateway, connect: Any, say: Any, limits: dict[str, Any]
) -> None:
    async with (
        start_gateway([ScriptedEngine([say("a"), say("b")])]) as gateway,
        connect(await gateway.open(**limits)) as client,
    ):
        if "calls" in limits or limits["limits"].turns == 1:
            await client.chat.completions.create(model="policy", messages=[ASK])
        history = [ASK, {"role": "assistant", "content": "a"}, ASK]
        with pytest.raises(openai.PermissionDeniedError) as caught:
            await client.chat.completions.create(model="policy", messages=history)
    assert caught.value.code == "LIMIT_REACHED"
    assert caught.value.response.headers["x-should-retry"] == "false"


async def test_keys_open_their_session_and_nothing_else(start_gateway: StartGateway, say: Any) -> None:
    async with start_gateway([ScriptedEngine([say("a")])]) as gateway:
        grant = await gateway.open()
        bare = Service(gateway.url)
        try:
            body = {"model": "policy", "messages": [ASK]}
            with pytest.raises(Unauthorized):
                await bare.request("POST", "/v1/chat/completions", json=body)
            with pytest.raises(Unauthorized):
                await bare.request("POST", "/s/sk-guess/v1/chat/completions", json=body)
            with pytest.raises(Unauthorized):
                await bare.request("POST", f"/v1/sessions/{grant.id}/seal")
            headers = {"x-api-key": grant.key}
            models = await bare.request("GET", "/v1/models", headers=headers)
            assert models.json()["data"][0]["id"] == "policy"
            answer = await bare.request("POST", "/v1/chat/completions", json=body, headers=headers)
            assert answer.json()["choices"][0]["message"]["content"] == "a"
        finally:
            await bare.close()


async def test_a_sealed_session_takes_no_calls(start_gateway: StartGateway, connect: Any, say: Any) -> None:
    async with start_gateway([ScriptedEngine([say("a")])]) as gateway:
        grant = await gateway.open()
        async with connect(grant) as client:
            await client.chat.completions.create(model="policy", messages=[ASK])
            sealed = await gateway.admin.seal(grant.id)
            with pytest.raises(openai.ConflictError):
                await client.chat.completions.create(model="policy", messages=[ASK])
        assert await gateway.admin.seal(grant.id) == sealed
        assert await gateway.admin.trajectories(grant.id) == sealed


async def test_opening_is_idempotent(start_gateway: StartGateway, renderer: ConversationRenderer) -> None:
    async with start_gateway([ScriptedEngine([])]) as gateway:
        service = Service(gateway.url, token="admin-token")
        try:
            body, headers = {"task_id": "t"}, {"idempotency-key": "chosen"}
            first = await service.request("POST", "/v1/sessions", json=body, headers=headers)
            again = await service.request("POST", "/v1/sessions", json=body, headers=headers)
        finally:
            await service.close()
    assert first.json() == again.json()
    assert first.json()["id"] == "chosen"
