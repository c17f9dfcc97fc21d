"""A gateway over scripted engines, served over HTTP in the test's own loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest
from openai import AsyncOpenAI

from agentrl.core.config import GatewayConfig
from agentrl.core.db import sqlite_url
from agentrl.core.errors import Ran, ServiceUnavailable
from agentrl.core.http import http_client, serving
from agentrl.core.protocols import Engine, EngineStatus
from agentrl.core.rendering import ConversationRenderer, load_renderer
from agentrl.core.types import Limits, Message, Sampling, SessionGrant, SessionRequest, ToolCall
from agentrl.testing.engine import ScriptedEngine
from agentrl.testing.tokenizer import write_tiny_tokenizer
from gateway.app import create_gateway_app
from gateway.client import GatewayClient
from gateway.store import open_store

TOKEN = "admin-token"
BASH = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}


class MortalEngine(ScriptedEngine):
    """A scripted engine whose process can be gone."""

    dead = False

    def die(self) -> None:
        self.dead = True

    def revive(self) -> None:
        self.dead = False

    async def status(self) -> EngineStatus:
        if self.dead:
            raise ServiceUnavailable(f"{self.url}: cannot connect", ran=Ran.NO)
        return await super().status()


@dataclass
class Gateway:
    """One running gateway and its admin client."""

    url: str
    admin: GatewayClient

    async def open(self, **fields: Any) -> SessionGrant:
        defaults: dict[str, Any] = {
            "task_id": "t",
            "limits": Limits(turns=50, tokens=4000, wall_s=60),
            "sampling": Sampling(max_tokens=400),
        }
        return await self.admin.open(SessionRequest(**(defaults | fields)))


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    """Wait, for a minute at most, for something that another task brings about."""
    async with asyncio.timeout(60):
        while not await holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


class StartGateway(Protocol):
    def __call__(self, engines: Sequence[Engine], **config: Any) -> AbstractAsyncContextManager[Gateway]: ...


@pytest.fixture(scope="session")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ConversationRenderer:
    return load_renderer(write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")), "qwen3")


@pytest.fixture
def start_gateway(renderer: ConversationRenderer, tmp_path: Path) -> StartGateway:
    """Starts gateways that share one store, one after the other."""

    @asynccontextmanager
    async def start(engines: Sequence[Engine], **config: Any) -> AsyncIterator[Gateway]:
        database = await open_store(sqlite_url(tmp_path / "gateway.db"))
        app = create_gateway_app(
            engines=engines, renderer=renderer, database=database, config=GatewayConfig(**config), token=TOKEN
        )
        try:
            async with serving(app) as url:
                admin = GatewayClient(url, TOKEN)
                try:
                    yield Gateway(url, admin)
                finally:
                    await admin.close()
        finally:
            await database.close()

    return start


@asynccontextmanager
async def openai_client(grant: SessionGrant, **options: Any) -> AsyncIterator[AsyncOpenAI]:
    client = AsyncOpenAI(base_url=grant.base_url, api_key=grant.key, http_client=http_client(), **options)
    try:
        yield client
    finally:
        await client.close()


@pytest.fixture
def connect() -> Any:
    return openai_client


def tool_call(raw: str, name: str) -> ToolCall:
    return ToolCall(id="c", name=name, arguments=None, raw=raw)


@pytest.fixture(scope="session")
def say(renderer: ConversationRenderer) -> Any:
    """The ids of an answer: text, reasoning and calls (argument strings), with the closer unless it is cut."""

    def say(
        text: str = "", *, reasoning: str = "", calls: Sequence[str] = (), names: Sequence[str] = (), cut: int = 0
    ) -> tuple[int, ...]:
        written = tuple(map(tool_call, calls, names or ["bash"] * len(calls)))
        message = Message(role="assistant", content=text, reasoning=reasoning or None, tool_calls=written)
        ids = renderer.sampled(message)
        return ids[:cut] if cut else ids

    return say
