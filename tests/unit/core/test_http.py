"""The app factory and the calling side, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from fastapi import FastAPI
from pydantic import BaseModel

from agentrl.core.errors import (
    AgentRLError,
    CapacityError,
    NotFound,
    Ran,
    RequestError,
    ServiceUnavailable,
    Unauthorized,
)
from agentrl.core.http import Service, create_app, free_port, http_client, serving
from agentrl.core.telemetry import Metrics, MetricSpec


class Body(BaseModel):
    n: int


def app(token: str = "", ready: Callable[[], Awaitable[str]] | None = None) -> FastAPI:
    metrics = Metrics([MetricSpec("shop/visits_total", "counter", "Visits")])
    built = create_app("shop", metrics=metrics, token=token, ready=ready, exempt=lambda path: path.startswith("/s/"))

    @built.post("/double")
    async def double(body: Body) -> dict[str, int]:
        metrics.inc("shop/visits_total")
        return {"n": 2 * body.n}

    @built.get("/full")
    async def full() -> None:
        raise CapacityError("no room for 1 more", detail={"retry_after_s": 3})

    @built.get("/bug")
    async def bug() -> None:
        raise ZeroDivisionError("n / 0")

    @built.get("/s/{key}/bug")
    async def bug_in_a_session(key: str) -> None:
        raise ZeroDivisionError("n / 0")

    @built.get("/slow")
    async def slow() -> None:
        await asyncio.sleep(0.3)

    @built.get("/s/key")
    async def own_auth() -> dict[str, str]:
        return {"hello": "session"}

    return built


@asynccontextmanager
async def shop(token: str = "", given: str | None = None) -> AsyncIterator[Service]:
    async with serving(app(token)) as url:
        service = Service(url, token=token if given is None else given)
        yield service
        await service.close()


async def test_a_call_carries_json_both_ways() -> None:
    async with shop() as service:
        assert (await service.request("POST", "/double", json=Body(n=4))).json() == {"n": 8}
        assert (await service.request("POST", "/double", json={"n": 5})).json() == {"n": 10}


async def test_the_token_guards_all_but_health_metrics_and_exempt_paths() -> None:
    async with shop(token="right", given="wrong") as service:
        with pytest.raises(Unauthorized):
            await service.request("POST", "/double", json={"n": 1})
        for path in ("/healthz", "/readyz", "/metrics", "/s/key"):
            await service.request("GET", path)
    async with shop(token="right") as service:
        await service.request("POST", "/double", json={"n": 1})


async def test_metrics_are_served() -> None:
    async with shop() as service:
        await service.request("POST", "/double", json={"n": 1})
        assert "agentrl_shop_visits_total 1.0" in (await service.request("GET", "/metrics")).text


async def test_a_raised_error_arrives_as_it_was() -> None:
    async with shop() as service:
        with pytest.raises(CapacityError, match="no room for 1 more") as caught:
            await service.request("GET", "/full")
    assert caught.value.retry_after_s == 3


async def test_the_envelope_tells_sdks_whether_to_retry() -> None:
    async with serving(app()) as url, http_client(base_url=url) as client:
        full, bug = await client.get("/full"), await client.get("/bug")
    assert (full.status_code, full.headers["x-should-retry"], full.headers["retry-after"]) == (503, "true", "3")
    assert (bug.status_code, bug.headers["x-should-retry"]) == (500, "false")
    assert bug.json()["error"]["code"] == "INTERNAL"


@pytest.mark.parametrize(
    ("method", "path", "error", "said"),
    [
        ("POST", "/double", RequestError, "n: Input should be a valid integer"),
        ("GET", "/nowhere", NotFound, "GET /nowhere"),
        ("GET", "/double", RequestError, "Method Not Allowed"),
        ("GET", "/bug", AgentRLError, "ZeroDivisionError: n / 0"),
    ],
)
async def test_every_failure_has_the_envelope(method: str, path: str, error: type[AgentRLError], said: str) -> None:
    async with shop() as service:
        with pytest.raises(error, match=said):
            await service.request(method, path, json={"n": "x"} if method == "POST" else None)


async def test_readiness_says_what_it_waits_for() -> None:
    waiting = "3 replicas"

    async def ready() -> str:
        return waiting

    async with serving(app(ready=ready)) as url, http_client(base_url=url) as client:
        service = Service(url)
        answer = await client.get("/readyz")
        assert (answer.status_code, answer.json()["waiting_for"]) == (503, "3 replicas")
        assert not await service.healthy()
        waiting = ""
        assert await service.healthy()
        await service.close()


async def test_a_refused_connection_did_not_run_and_a_lost_answer_may_have() -> None:
    away = Service(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ServiceUnavailable, match="cannot connect") as caught:
        await away.request("GET", "/healthz")
    assert (caught.value.ran, caught.value.retryable) == (Ran.NO, True)
    await away.close()
    async with shop() as service:
        with pytest.raises(ServiceUnavailable, match="no answer") as caught:
            await service.request("GET", "/slow", timeout_s=0.05)
    assert caught.value.ran is Ran.MAYBE


async def test_a_connection_that_breaks_after_the_request_may_have_run() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    listener = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    service = Service(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
    with pytest.raises(ServiceUnavailable, match="no answer") as caught:
        await service.request("POST", "/x", content=b"")
    assert caught.value.ran is Ran.MAYBE
    await service.close()
    listener.close()
    await listener.wait_closed()


async def test_an_answer_that_is_no_envelope_is_quoted() -> None:
    plain = FastAPI()

    @plain.get("/x", status_code=502)
    async def bad_gateway() -> str:
        return "upstream is sad"

    async with serving(plain) as url:
        service = Service(url)
        with pytest.raises(AgentRLError, match=r"HTTP 502: .*upstream is sad"):
            await service.request("GET", "/x")
        await service.close()


async def test_a_key_in_the_path_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with shop() as service:
        with pytest.raises(AgentRLError):
            await service.request("GET", "/s/sk-very-secret/bug")
    assert "GET /s/{key}/bug" in caplog.text
    assert "sk-very-secret" not in caplog.text
