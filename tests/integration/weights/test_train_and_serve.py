"""Trainer, published weights, updater and the embedded engine over HTTP: one policy in two processes' eyes."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from tiny_models import VOCAB, tiny_model
from train_batches import episode, provenance

from agentrl.core.config import EngineConfig, TrainConfig
from agentrl.core.http import serving
from agentrl.core.protocols import Applied, Batch
from agentrl.core.telemetry import Metrics
from agentrl.core.types import Completion, GenerateRequest, Group, Sampling, Scored, Task, Trajectory
from agentrl.engine.client import EngineClient
from agentrl.engine.server import build_worker, create_engine_app
from agentrl.train.model import load_model, probe_logprobs, weights_of
from agentrl.train.trainer import Trainer
from agentrl.weights.metrics import SPECS
from agentrl.weights.publish import WeightFolder
from agentrl.weights.updater import Updater


@dataclass
class MemoryPool:
    """See `protocols.Pool`."""

    replicas: dict[str, tuple[int, bool]] = field(default_factory=dict)

    async def set_replica(self, url: str, *, version: int, accepting: bool) -> None:
        self.replicas[url] = (version, accepting)


@dataclass
class Stack:
    engines: list[EngineClient]
    pool: MemoryPool
    updater: Updater
    trainer: Trainer
    weights: WeightFolder

    async def publish(self) -> Applied:
        trainer = self.trainer
        manifest, path = self.weights.publish(
            weights_of(trainer.model), version=trainer.state.version, step=trainer.state.step,
            probe=lambda ids: probe_logprobs(trainer.model, ids),
        )  # fmt: skip
        return await self.updater.apply(manifest, path)


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    folder = tmp_path / "model"
    tiny_model().save_pretrained(folder)
    async with AsyncExitStack() as held:
        clients = []
        for _ in range(2):
            worker = build_worker(folder, version=0, config=EngineConfig(max_rows=8, cache_rows=16))
            url = await held.enter_async_context(serving(create_engine_app(worker)))
            clients.append(EngineClient(url))
            held.push_async_callback(clients[-1].close)
        pool = MemoryPool()
        updater = Updater(clients, pool, deadline_s=30.0, metrics=Metrics(SPECS))
        await held.enter_async_context(updater.running())
        trainer = Trainer(load_model(folder), TrainConfig(lr=1e-2, minibatches=4))
        weights = WeightFolder(tmp_path / "weights", vocab_size=VOCAB, tolerance=1e-4, keep=2)
        yield Stack(clients, pool, updater, trainer, weights)


def request(name: str, prompt: tuple[int, ...], tokens: int) -> GenerateRequest:
    return GenerateRequest(request_id=name, token_ids=prompt, sampling=Sampling(max_tokens=tokens))


def sampled(name: str, prompt: tuple[int, ...], completion: Completion) -> Trajectory:
    versions = [run.version for run in completion.versions for _ in range(run.start, run.end)]
    blank = (None,) * len(prompt)
    return Trajectory(
        id=name, session_id=name, token_ids=prompt + completion.token_ids,
        loss_mask=(0,) * len(prompt) + (1,) * len(versions), behavior_logprobs=blank + completion.logprobs,
        policy_versions=(*blank, *versions), finish="truncated", session_tokens=len(versions),
        provenance=provenance(),
    )  # fmt: skip


async def play(stack: Stack, step: int) -> Batch:
    """Groups sampled by the engines; rewarded by the parity of the sampled tokens."""
    rng = random.Random(step)
    groups = []
    for g in range(4):
        task = Task(env="parity", id=str(g), source="parity")
        prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(4, 20)))
        calls = [
            stack.engines[i % 2].generate(request(f"{step}.{g}.{i}", prompt, rng.randrange(4, 20))) for i in range(6)
        ]
        episodes = []
        for i, completion in enumerate(await asyncio.gather(*calls)):
            name = f"{step}.{g}.{i}"
            even = sum(token % 2 == 0 for token in completion.token_ids) / len(completion.token_ids)
            episodes.append(
                episode(name, str(g), Scored(reward=even), sampled(name, prompt, completion), task=task)
            )  # fmt: skip
        groups.append(Group(id=f"{step}.{g}", task=task, size=6, episodes=tuple(episodes)))
    return Batch(step, tuple(groups))


async def test_engine_and_trainer_agree_at_zero_lag_and_the_policy_learns(stack: Stack) -> None:
    rewards = []
    for step in range(1, 17):
        applied = await stack.publish()
        assert len(applied.urls) == 2
        for prompt, sampled in applied.samples:
            expected = probe_logprobs(stack.trainer.model, prompt + sampled.token_ids)[-len(sampled.token_ids) :]
            gaps = [abs(a - b) for a, b in zip(sampled.logprobs, expected, strict=True)]
            assert sum(gaps) / len(gaps) <= 1e-5
            assert {run.version for run in sampled.versions} == {stack.trainer.state.version}
        batch = await play(stack, step)
        metrics = await asyncio.to_thread(stack.trainer.train_step, batch)
        assert metrics["train/lag_max"] == 0
        assert metrics["train/mismatch_zero_lag_tokens"] > 0
        assert metrics["train/mismatch_zero_lag_mean_abs"] <= 1e-5
        rewards.append(metrics["reward/mean"])
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.05


async def test_a_long_call_spans_updates_and_every_token_fits_its_version(stack: Stack) -> None:
    policies: dict[int, torch.nn.Module] = {}
    prompt = (5, 6, 7, 8)
    policies[0] = copy.deepcopy(stack.trainer.model)
    await stack.publish()
    batch = await play(stack, 1)
    call = asyncio.create_task(stack.engines[0].generate(request("long", prompt, 140)))
    await asyncio.sleep(0)
    await asyncio.to_thread(stack.trainer.train_step, batch)
    policies[1] = copy.deepcopy(stack.trainer.model)
    await stack.publish()
    completion = await call
    ids = prompt + completion.token_ids
    expected = {version: probe_logprobs(policies[version], ids)[len(prompt) - 1 :] for version in policies}
    for run in completion.versions:
        for i in range(run.start, run.end):
            assert completion.logprobs[i] == pytest.approx(expected[run.version][i], abs=1e-4)


async def test_a_replica_that_the_file_does_not_reach_keeps_its_version(stack: Stack) -> None:
    await stack.publish()
    before = await stack.engines[0].prompt_logprobs((1, 2, 3))
    with torch.no_grad():
        next(stack.trainer.model.parameters()).add_(0.1)
    stack.trainer.state.version = 1
    manifest, path = stack.weights.publish(
        weights_of(stack.trainer.model), version=1, step=1, probe=lambda ids: probe_logprobs(stack.trainer.model, ids)
    )
    data = (path.parent / manifest.file).read_bytes()
    (path.parent / manifest.file).write_bytes(data[:-4] + bytes(4))
    applying = asyncio.create_task(stack.updater.apply(manifest, path))
    async with asyncio.timeout(20):
        while len(stack.pool.replicas) < 2 or any(accepting for _, accepting in stack.pool.replicas.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert set(stack.pool.replicas.values()) == {(0, False)}
    assert await stack.engines[0].prompt_logprobs((1, 2, 3)) == pytest.approx(before, abs=1e-6)
    # The file is repaired: the updater tries again by itself.
    (path.parent / manifest.file).write_bytes(data)
    assert len((await applying).urls) >= 1
    assert await stack.engines[0].prompt_logprobs(manifest.probe.token_ids) == pytest.approx(
        manifest.probe.logprobs, abs=1e-4
    )
