from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from agentrl.core.errors import EngineError, ServiceUnavailable, WeightsError
from agentrl.core.protocols import EngineStatus
from agentrl.core.telemetry import Metrics
from agentrl.core.types import GenerateRequest, WeightManifest
from agentrl.testing.engine import ScriptedEngine
from agentrl.weights.metrics import SPECS
from agentrl.weights.publish import WeightFolder
from agentrl.weights.updater import Updater

Publish = Callable[[int], tuple[WeightManifest, Path]]


def reply(request: GenerateRequest) -> list[int]:
    return [1, 2, 3]


class MemoryPool:
    """See `protocols.Pool`."""

    def __init__(self) -> None:
        self.replicas: dict[str, tuple[int, bool]] = {}
        self.away = False
        self.calls = 0

    async def set_replica(self, url: str, *, version: int, accepting: bool) -> None:
        self.calls += 1
        if self.away:
            raise ServiceUnavailable("the gateway restarts")
        self.replicas[url] = (version, accepting)


class FailingCommit(ScriptedEngine):
    """Refuses the first `failures` commits."""

    failures = 1

    async def commit_weights(self, version: int) -> None:
        if self.failures:
            self.failures -= 1
            raise EngineError("out of memory")
        await super().commit_weights(version)


class Hanging(ScriptedEngine):
    """Never finishes staging until it is released."""

    def __init__(self, url: str) -> None:
        super().__init__(reply, url=url)
        self.released = asyncio.Event()

    async def stage_weights(self, manifest_path: Path) -> None:
        await self.released.wait()
        await super().stage_weights(manifest_path)


@pytest.fixture
def publish(tmp_path: Path) -> Publish:
    weights = WeightFolder(tmp_path, vocab_size=50, tolerance=1e-4, keep=5)
    return lambda version: weights.publish(
        {"w": torch.full((2,), float(version))}, version=version, step=version,
        probe=lambda ids: tuple(-0.01 * token - version for token in ids[1:]),
    )  # fmt: skip


def updater_of(pool: MemoryPool, *engines: ScriptedEngine, deadline_s: float = 10.0, settle_s: float = 10.0) -> Updater:
    return Updater(
        engines, pool, deadline_s=deadline_s, metrics=Metrics(SPECS), retry_s=0.01, poll_s=0.01, settle_s=settle_s
    )


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_every_replica_is_brought_up_and_told_to_the_pool(publish: Publish) -> None:
    pool, a, b = MemoryPool(), ScriptedEngine(reply, url="a"), ScriptedEngine(reply, url="b")
    updater = updater_of(pool, a, b)
    async with updater.running():
        for version in (0, 1):
            assert (await updater.apply(*publish(version))).urls == (
                "a",
                "b",
            )
            assert (a.version, b.version) == (version, version)
            assert pool.replicas == {"a": (version, True), "b": (version, True)}


async def test_a_replica_that_refuses_stays_out_at_its_old_version_and_is_retried(publish: Publish) -> None:
    pool, good, bad = MemoryPool(), ScriptedEngine(reply, url="good"), ScriptedEngine(reply, url="bad")
    updater = updater_of(pool, good, bad)
    async with updater.running():
        await updater.apply(*publish(0))
        bad.refuse_weights = WeightsError("checksum of w differs")
        assert (await updater.apply(*publish(1))).urls == ("good",)
        assert pool.replicas == {"good": (1, True), "bad": (0, False)}
        assert bad.version == 0
        bad.refuse_weights = None
        await until(lambda: pool.replicas["bad"] == (1, True))


async def test_a_replica_with_a_wrong_probe_takes_no_calls(publish: Publish) -> None:
    pool, good, bad = MemoryPool(), ScriptedEngine(reply, url="good"), ScriptedEngine(reply, url="bad")
    updater = updater_of(pool, good, bad)
    async with updater.running():
        bad.probe_error = 2e-4
        assert (await updater.apply(*publish(0))).urls == ("good",)
        assert pool.replicas["bad"] == (-1, False)
        bad.probe_error = 0.5e-4
        await until(lambda: pool.replicas["bad"] == (0, True))


@pytest.mark.parametrize("error", [float("nan"), float("inf")])
async def test_a_probe_that_is_not_finite_fails(publish: Publish, error: float) -> None:
    pool, engine = MemoryPool(), ScriptedEngine(reply, url="a")
    engine.probe_error = error
    updater = updater_of(pool, engine, deadline_s=0.1)
    async with updater.running():
        with pytest.raises(WeightsError, match="probe"):
            await updater.apply(*publish(0))
    assert pool.replicas["a"] == (-1, False)


async def test_a_failed_commit_still_resumes_and_is_retried(publish: Publish) -> None:
    pool, engine = MemoryPool(), FailingCommit([[1, 2]], url="a")
    updater = updater_of(pool, engine)
    states: list[bool] = []
    resume = engine.resume

    async def watched() -> None:
        await resume()
        states.append(engine._resumed.is_set())

    engine.resume = watched  # type: ignore[method-assign]
    async with updater.running():
        assert (await updater.apply(*publish(3))).urls == ("a",)
    assert states == [True, True]
    assert pool.replicas["a"] == (3, True)


async def test_no_replica_by_the_deadline_says_why(publish: Publish) -> None:
    pool, engine = MemoryPool(), ScriptedEngine(reply, url="a")
    engine.refuse_weights = WeightsError("disk is full")
    updater = updater_of(pool, engine, deadline_s=0.1)
    async with updater.running():
        with pytest.raises(WeightsError, match=r"version 0: .*disk is full"):
            await updater.apply(*publish(0))


async def test_a_slow_replica_is_out_of_the_pool_until_it_catches_up(publish: Publish) -> None:
    pool, quick, slow = MemoryPool(), ScriptedEngine(reply, url="quick"), Hanging("slow")
    updater = updater_of(pool, quick, slow, settle_s=0.05)
    async with updater.running():
        assert (await updater.apply(*publish(0))).urls == ("quick",)
        assert pool.replicas["slow"] == (-1, False)
        slow.released.set()
        await until(lambda: pool.replicas["slow"] == (0, True))


async def test_a_replica_that_restarted_with_older_weights_is_brought_back(publish: Publish) -> None:
    pool, engine = MemoryPool(), ScriptedEngine(reply, url="a")
    updater = updater_of(pool, engine)
    async with updater.running():
        await updater.apply(*publish(0))
        await updater.apply(*publish(1))
        engine.version = 0
        await until(lambda: engine.version == 1)


async def test_a_pool_that_is_away_is_told_later(publish: Publish) -> None:
    pool, engine = MemoryPool(), ScriptedEngine(reply, url="a")
    pool.away = True
    updater = updater_of(pool, engine)
    async with updater.running():
        applying = asyncio.create_task(updater.apply(*publish(0)))
        await until(lambda: pool.calls >= 2)
        assert not applying.done()
        pool.away = False
        assert (await applying).urls == ("a",)
    assert pool.replicas == {"a": (0, True)}


async def test_a_newer_target_replaces_one_that_keeps_failing(publish: Publish) -> None:
    pool, good, bad = MemoryPool(), ScriptedEngine(reply, url="good"), ScriptedEngine(reply, url="bad")
    bad.refuse_weights = WeightsError("no")
    updater = updater_of(pool, good, bad)
    async with updater.running():
        await updater.apply(*publish(0))
        second = publish(1)
        bad.refuse_weights = None
        assert (await updater.apply(*second)).urls == (
            "good",
            "bad",
        )
    assert bad.version == 1


async def test_an_error_of_the_block_comes_out_as_it_is(publish: Publish) -> None:
    updater = updater_of(MemoryPool(), ScriptedEngine(reply, url="a"))

    async def block() -> None:
        async with updater.running():
            await updater.apply(*publish(0))
            raise EngineError("mine")

    with pytest.raises(EngineError, match="mine"):
        await block()


async def test_a_bug_while_updating_ends_the_block(publish: Publish) -> None:
    class Broken(ScriptedEngine):
        async def stage_weights(self, manifest_path: Path) -> None:
            raise KeyError("a bug")

    updater = updater_of(MemoryPool(), Broken([], url="a"))
    with pytest.raises(KeyError, match="a bug"):
        async with updater.running():
            await updater.apply(*publish(0))


class Foreign(ScriptedEngine):
    """After `forget` it serves weights that carry no policy version, as vLLM does after a restart by itself."""

    foreign = False

    def forget(self) -> None:
        self.foreign, self.version = True, -1

    async def status(self) -> EngineStatus:
        if self.foreign:
            raise EngineError("the engine's weights are labelled 'default', not a policy version")
        return await super().status()

    async def commit_weights(self, version: int) -> None:
        await super().commit_weights(version)
        self.foreign = False


async def test_a_replica_that_came_back_with_foreign_weights_is_brought_up_again(publish: Publish) -> None:
    pool, engine = MemoryPool(), Foreign(reply, url="a")
    updater = updater_of(pool, engine)
    async with updater.running():
        await updater.apply(*publish(4))
        engine.forget()
        await until(lambda: engine.version == 4 and pool.replicas["a"] == (4, True))
