"""Recorded conversations of real harnesses, with a scripted engine in the model's part: no needless branch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.db import sqlite_url
from agentrl.core.http import Service
from agentrl.core.rendering import ConversationRenderer
from agentrl.core.types import Limits, Sampling
from agentrl.testing.engine import ScriptedEngine
from gateway.store import SessionStore, open_store
from gateway.tree import Branch
from gateway.wire.chat_messages import read_tools

from .conftest import StartGateway

RECORDED = Path(__file__).parents[2] / "data" / "wire"

NEW = (1, None)
"""Turn and branch of a call that begins a conversation."""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mini-swe", [NEW, (2, None)]),
        ("openai-stream", [NEW, (2, None)]),
        ("openai-sync", [NEW, (2, None)]),
        # The first call only asks for a title.
        ("opencode", [NEW, NEW, (2, None)]),
        ("qwen-code", [NEW, (2, None)]),
        # The harness goes on from a cut answer with a user message, which makes the template drop reasoning.
        ("qwen-code.cut1", [NEW, (2, Branch.REASONING_STRIPPED), NEW]),
        # The harness folds the call into the text of its history.
        ("smol-tool", [NEW, (1, Branch.EDITED)]),
    ],
)
async def test_recorded_conversations(
    start_gateway: StartGateway,
    renderer: ConversationRenderer,
    say: Any,
    tmp_path: Path,
    name: str,
    expected: list[tuple[int, Branch | None]],
) -> None:
    exchanges = [e for e in json.loads((RECORDED / f"{name}.json").read_text()) if e["method"] == "POST"]
    said = []
    for exchange in exchanges:
        reply = exchange["reply"]
        calls = [call["arguments"] for call in reply["tool_calls"]]
        names = [call["name"] for call in reply["tool_calls"]]
        whole = say(reply["text"], reasoning=reply["reasoning"], calls=calls, names=names)
        if exchange["body"].get("tool_choice") == "required":
            # The gateway itself begins the call that is demanded.
            tools = read_tools(exchange["body"]["tools"])
            whole = say(calls=calls, names=names)[len(renderer.opening(tools)) :]
        said.append(whole)
    if name.endswith("cut1"):
        said[0] = said[0][:-1]
    engine = ScriptedEngine(said, context=60_000)
    async with start_gateway([engine]) as gateway:
        limits = Limits(turns=10, tokens=60_000)
        grant = await gateway.open(limits=limits, sampling=Sampling(max_tokens=1000))
        harness = Service(gateway.url)
        try:
            for exchange in exchanges:
                body = exchange["body"]
                path = f"/s/{grant.key}{exchange['path']}"
                response = await harness.request("POST", path, json=body, headers={"x-stainless-retry-count": "0"})
                assert response.text.endswith("[DONE]\n\n") is bool(body.get("stream"))
        finally:
            await harness.close()
        trajectories = await gateway.admin.seal(grant.id)
    database = await open_store(sqlite_url(tmp_path / "gateway.db"))
    try:
        tree = await SessionStore(database).load_tree(grant.id)
    finally:
        await database.close()
    assert [(node.turn, node.branch) for node in tree] == expected
    assert sum(sum(trajectory.loss_mask) for trajectory in trajectories) == sum(map(len, said))
