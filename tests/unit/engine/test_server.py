"""What the embedded engine's process does besides its contract: refusals, the cache over HTTP, and how it dies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import torch
from fastapi import Request, Response
from tiny_models import CONTEXT, VOCAB, publish, tiny_model

from agentrl.core.config import EngineConfig
from agentrl.core.errors import EngineError, RequestError, ServiceUnavailable, Unauthorized
from agentrl.core.http import Service, free_port, serving
from agentrl.core.types import GenerateRequest, Sampling
from agentrl.engine.client import EngineClient
from agentrl.engine.scheduler import Scheduler
from agentrl.engine.server import build_worker, create_engine_app, run_engine

Folder = Callable[..., Path]
CONFIG = EngineConfig(max_rows=4, cache_rows=8)


def request(name: str, *token_ids: int, max_tokens: int = 8) -> GenerateRequest:
    return GenerateRequest(request_id=name, token_ids=token_ids, sampling=Sampling(max_tokens=max_tokens))


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": []},
        {"token_ids": [VOCAB]},
        {"token_ids": [-1]},
        {"sampling_params": {"min_p": 0.1}},
        {"sampling_params": {"logprobs": 5}},
        {"sampling_params": {"temperature": -1}},
        {"output_mode": "text"},
        {"stream": True},
    ],
)
async def test_what_it_does_not_do_is_refused(model_folder: Folder, change: dict[str, object]) -> None:
    worker = build_worker(model_folder(), version=0, config=CONFIG)
    async with serving(create_engine_app(worker)) as url:
        service = Service(url)
        body = {"token_ids": [1], "sampling_params": {}} | change
        with pytest.raises(RequestError):
            await service.request("POST", "/inference/v1/generate", json=body)
        await service.close()


async def test_it_serves_in_the_dtype_it_is_told_whatever_the_folder_holds(model_folder: Folder) -> None:
    worker = build_worker(model_folder(), version=0, config=CONFIG, dtype="bfloat16")
    assert {tensor.dtype for tensor in worker.scheduler.runner.tensors().values()} == {torch.bfloat16}


async def test_a_session_is_served_from_the_prefix_cache(model_folder: Folder) -> None:
    worker = build_worker(model_folder(), version=0, config=CONFIG)
    async with serving(create_engine_app(worker, token="secret")) as url:
        engine, stranger = EngineClient(url, "secret"), EngineClient(url, "guess")
        first = await engine.generate(request("a", *range(50)))
        second = await engine.generate(request("b", *range(50), *first.token_ids, 1, 2, 3))
        assert (first.cached_tokens, second.cached_tokens) == (0, 57)
        with pytest.raises(Unauthorized):
            await stranger.generate(request("c", 1))
        for client in (engine, stranger):
            await client.close()


async def test_a_pause_that_aborts_ends_the_calls_that_it_held(model_folder: Folder) -> None:
    worker = build_worker(model_folder(), version=0, config=CONFIG)
    async with serving(create_engine_app(worker)) as url:
        engine, service = EngineClient(url), Service(url)
        await engine.pause()
        call = asyncio.create_task(engine.generate(request("a", 1, 2)))
        while (await engine.status()).waiting == 0:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await service.request("POST", "/pause", params={"mode": "abort"})
        held = await call
        assert (held.token_ids, held.finish_reason) == ((), "abort")
        await engine.resume()
        assert len((await engine.generate(request("b", 1, 2))).token_ids) == 8
        await engine.close()
        await service.close()


async def test_weights_that_diverged_are_an_engine_error(model_folder: Folder) -> None:
    worker = build_worker(model_folder(), version=0, config=CONFIG)
    with torch.no_grad():
        for tensor in worker.scheduler.runner.tensors().values():
            tensor.fill_(float("nan"))
    async with serving(create_engine_app(worker)) as url:
        engine = EngineClient(url)
        with pytest.raises(EngineError, match="not a whole completion"):
            await engine.generate(request("a", 1, 2, 3))
        await engine.close()


async def test_every_update_prepares_the_engine_anew(model_folder: Folder, tmp_path: Path) -> None:
    """Since an engine that restarted between two updates, as vLLM may, knows nothing of the first."""
    worker = build_worker(model_folder(), version=0, config=CONFIG)
    app = create_engine_app(worker)
    paths: list[str] = []

    @app.middleware("http")
    async def note(request: Request, handle: Callable[[Request], Awaitable[Response]]) -> Response:
        paths.append(request.url.path)
        return await handle(request)

    async with serving(app) as url:
        engine = EngineClient(url)
        for version in (1, 2):
            await engine.stage_weights(publish(tiny_model(), tmp_path, version))
            await engine.commit_weights(version)
        await engine.close()
    update = ["/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"]
    assert paths == 2 * update


async def test_context_of_the_config_bounds_the_model(model_folder: Folder) -> None:
    worker = build_worker(model_folder(), version=0, config=CONFIG.model_copy(update={"context": 20}))
    async with serving(create_engine_app(worker)) as url:
        engine = EngineClient(url)
        completion = await engine.generate(request("a", *range(15), max_tokens=100))
        assert (len(completion.token_ids), (await engine.status()).context) == (5, 20)
        await engine.close()
    assert CONTEXT > 20


async def test_a_dead_scheduler_ends_the_process_with_its_cause(
    model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(self: Scheduler) -> None:
        raise ZeroDivisionError("a bug in the scheduler")

    monkeypatch.setattr(Scheduler, "step", explode)
    port = free_port()
    process = asyncio.create_task(run_engine(model_folder(), port=port, token="", version=0, config=CONFIG))
    engine = EngineClient(f"http://127.0.0.1:{port}")
    while True:
        try:
            await engine.status()
            break
        except ServiceUnavailable:
            await asyncio.sleep(0.02)
    with pytest.raises(EngineError, match="a bug in the scheduler"):
        await engine.generate(request("a", 1))
    with pytest.raises(ZeroDivisionError, match="a bug in the scheduler"):
        await process
    await engine.close()
