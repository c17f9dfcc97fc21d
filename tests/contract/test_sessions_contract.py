"""The contract of `protocols.Sessions`, on the scripted double and on the gateway over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from agentrl.core.config import GatewayConfig
from agentrl.core.db import sqlite_url
from agentrl.core.errors import NotFound
from agentrl.core.http import Service, serving
from agentrl.core.protocols import Sessions
from agentrl.core.rendering import load_renderer
from agentrl.core.types import Message, Sampling, SessionGrant, SessionRequest
from agentrl.rollout.acceptance import judge
from agentrl.rollout.tables import EpisodeState
from agentrl.testing.engine import ScriptedEngine
from agentrl.testing.episodes import scripted_episode
from agentrl.testing.sessions import ScriptedSessions
from agentrl.testing.tokenizer import write_tiny_tokenizer
from gateway.app import create_gateway_app
from gateway.client import GatewayClient
from gateway.store import open_store

REQUEST = SessionRequest(task_id="t", sampling=Sampling(temperature=0.7, max_tokens=32))


@dataclass(frozen=True)
class Setup:
    sessions: Sessions
    play: Callable[[SessionGrant], Awaitable[None]]
    """One model call as a harness makes it; the double invents its calls itself."""


@pytest.fixture(params=["scripted", "gateway"])
async def setup(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Setup]:
    if request.param == "scripted":

        async def nothing(grant: SessionGrant) -> None:
            return

        yield Setup(ScriptedSessions(turns=1), nothing)
        return
    renderer = load_renderer(write_tiny_tokenizer(tmp_path), "qwen3")
    engine = ScriptedEngine(lambda request: renderer.sampled(Message(role="assistant", content="hello")))
    database = await open_store(sqlite_url(tmp_path / "gateway.db"))
    app = create_gateway_app(
        engines=[engine], renderer=renderer, database=database, config=GatewayConfig(), token="admin"
    )
    async with serving(app) as url:
        client = GatewayClient(url, "admin")
        yield Setup(client, _call)
        await client.close()
    await database.close()


async def _call(grant: SessionGrant) -> None:
    harness = Service(grant.base_url, token=grant.key)
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
    await harness.request("POST", "/chat/completions", json=body)
    await harness.close()


async def test_every_session_has_an_id_and_a_key_of_its_own(setup: Setup) -> None:
    one, two = await setup.sessions.open(REQUEST), await setup.sessions.open(REQUEST)
    assert one.id != two.id
    assert one.key != two.key
    assert one.base_url.endswith("/v1")


async def test_a_sealed_session_exports_what_acceptance_accepts(setup: Setup) -> None:
    grant = await setup.sessions.open(REQUEST)
    await setup.play(grant)
    trajectories = await setup.sessions.seal(grant.id)
    (trajectory,) = trajectories
    assert trajectory.session_id == grant.id
    assert trajectory.session_tokens == sum(trajectory.loss_mask) > 0
    assert trajectory.provenance.sampling == REQUEST.sampling
    episode = scripted_episode("e", group_id="g").model_copy(
        update={"session_id": grant.id, "trajectories": trajectories}
    )
    assert judge(episode).state is EpisodeState.ACCEPTED


async def test_sealing_again_exports_the_same(setup: Setup) -> None:
    grant = await setup.sessions.open(REQUEST)
    await setup.play(grant)
    sealed = await setup.sessions.seal(grant.id)
    assert await setup.sessions.seal(grant.id) == sealed
    assert await setup.sessions.trajectories(grant.id) == sealed


async def test_an_unknown_session_is_not_found(setup: Setup) -> None:
    with pytest.raises(NotFound):
        await setup.sessions.seal("nobody")
    with pytest.raises(NotFound):
        await setup.sessions.trajectories("nobody")
