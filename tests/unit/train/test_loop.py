from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor
from train_batches import MemorySource

from agentrl.core.config import TrainConfig
from agentrl.core.errors import WeightsError
from agentrl.core.protocols import Applied
from agentrl.core.types import Probe, WeightManifest
from agentrl.train.checkpoint import Checkpoints
from agentrl.train.loop import TrainerParts, run_trainer
from agentrl.train.metrics import SPECS
from agentrl.train.model import weights_of
from agentrl.train.trainer import Trainer


class MemoryWeights:
    """Publishes to a dictionary."""

    def __init__(self, events: list[str]) -> None:
        self.published: dict[int, dict[str, Tensor]] = {}
        self.manifests: dict[int, WeightManifest] = {}
        self.prompts: dict[int, tuple[int, ...]] = {}
        """What each version is probed with."""
        self._events = events

    def publish(
        self,
        tensors: Mapping[str, Tensor],
        *,
        version: int,
        step: int,
        prompt: tuple[int, ...] = (),
        probe: Callable[[tuple[int, ...]], tuple[float, ...]],
    ) -> tuple[WeightManifest, Path]:
        self._events.append(f"publish {version}")
        assert version not in self.published
        self.published[version] = {name: tensor.clone() for name, tensor in tensors.items()}
        self.prompts[version] = prompt
        ids = prompt or (1, 2, 3)
        answers = Probe(token_ids=ids, logprobs=probe(ids), tolerance=1e-4)
        manifest = WeightManifest(version=version, step=step, file="f", total_bytes=0, tensors=(), probe=answers)
        self.manifests[version] = manifest
        return manifest, Path(f"v{version}/manifest.json")

    def find(self, version: int, tensors: Mapping[str, Tensor]) -> tuple[WeightManifest, Path] | None:
        held = self.published.get(version)
        if held is None or not all(torch.equal(held[name], tensor) for name, tensor in tensors.items()):
            return None
        return self.manifests[version], Path(f"v{version}/manifest.json")

    def latest(self) -> int:
        return max(self.published, default=-1)


class Replica:
    """A publisher that applies at once, or dies at a version."""

    def __init__(self, events: list[str], dies_at: int | None = None) -> None:
        self._events, self._dies_at = events, dies_at

    async def apply(self, manifest: WeightManifest, path: Path) -> Applied:
        if manifest.version == self._dies_at:
            raise WeightsError("no replica")
        self._events.append(f"apply {manifest.version}")
        return Applied(urls=("replica",), samples=())


class Rows:
    """A sink that keeps its rows."""

    def __init__(self) -> None:
        self.rows: dict[int, Mapping[str, float]] = {}

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.rows[step] = values

    def close(self) -> None:
        """Nothing to release."""


class Run:
    """What survives a process: the store, the published versions and the checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.source = MemorySource()
        self.weights = MemoryWeights(self.source.events)
        self.checkpoints = Checkpoints(folder, keep=2)
        self.sink = Rows()

    async def process(self, config: TrainConfig, dies_at: int | None = None) -> Trainer:
        """One trainer process, started anew; every process begins with the same initial weights."""
        trainer = Trainer(tiny_model(), config, seed=7)
        publisher = Replica(self.source.events, dies_at)
        parts = TrainerParts(
            trainer=trainer, source=self.source, weights=self.weights, publisher=publisher,
            checkpoints=self.checkpoints, sink=self.sink, groups=2,
        )  # fmt: skip
        await run_trainer(parts, config)
        return trainer


async def test_a_step_goes_through_its_stations_in_order(tmp_path: Path) -> None:
    run = Run(tmp_path)
    await run.process(TrainConfig(steps=2))
    assert run.source.events == [
        "rewind 0", "publish 0", "apply 0", "record 0",
        "take 1", "commit 1 step-000001", "publish 1", "apply 1", "record 1",
        "take 2", "commit 2 step-000002", "publish 2", "apply 2", "record 2",
    ]  # fmt: skip
    assert run.source.claimed == {1: 0, 2: 1}
    declared = {spec.name for spec in SPECS}
    assert {name for name in run.sink.rows[2] if not name.startswith("reward/mean/")} <= declared


async def test_a_version_is_probed_with_less_than_a_whole_trajectory(tmp_path: Path) -> None:
    run = Run(tmp_path)
    await run.process(TrainConfig(steps=1))
    batch = await run.source.take(2, version=1, groups=2)
    whole = batch.groups[0].episodes[0].trajectories[0].token_ids
    assert run.weights.prompts[0] == ()
    # A trajectory may fill the context, in which a probe samples one token more.
    assert 0 < len(run.weights.prompts[1]) < len(whole)


async def test_a_resume_serves_the_checkpoint_under_the_version_that_it_has(tmp_path: Path) -> None:
    run = Run(tmp_path)
    config = TrainConfig(steps=4)
    with pytest.raises(WeightsError):
        await run.process(config, dies_at=3)
    # Version 3 is on disk but was never recorded.
    assert (run.weights.latest(), await run.source.latest_version()) == (3, 2)
    run.source.events.clear()
    await run.process(config)
    assert run.source.events[:5] == ["rewind 3", "commit 3 step-000003", "apply 3", "record 3", "take 4"]
    assert run.source.committed.keys() == {1, 2, 3, 4}


async def test_a_checkpoint_before_the_newest_version_gets_a_new_number(tmp_path: Path) -> None:
    run = Run(tmp_path)
    config = TrainConfig(steps=4, checkpoint_every=2)
    with pytest.raises(WeightsError):
        await run.process(config, dies_at=4)
    run.source.committed.pop(4)
    shutil.rmtree(tmp_path / "step-000004")
    run.source.events.clear()
    await run.process(config)
    assert run.source.events[:5] == ["rewind 2", "commit 2 step-000002", "publish 5", "apply 5", "record 5"]
    assert all(torch.equal(run.weights.published[2][n], t) for n, t in run.weights.published[5].items())


async def test_steps_since_the_checkpoint_are_given_back(tmp_path: Path) -> None:
    run = Run(tmp_path)
    config = TrainConfig(steps=4, checkpoint_every=2)
    with pytest.raises(WeightsError):
        await run.process(config, dies_at=3)
    assert run.source.claimed.keys() == {1, 2, 3}
    assert run.source.committed == {1: "step-000002", 2: "step-000002"}
    run.source.events.clear()
    await run.process(config)
    assert [event for event in run.source.events if event.startswith(("rewind", "take"))] == [
        "rewind 2", "take 3", "take 4",
    ]  # fmt: skip
    assert run.source.committed.keys() == {1, 2, 3, 4}


async def test_a_run_that_was_interrupted_ends_with_the_same_weights(tmp_path: Path) -> None:
    config = TrainConfig(steps=3, lr=1e-3, loss={"clip_low": 0.2})
    straight = await Run(tmp_path / "a").process(config)
    broken = Run(tmp_path / "b")
    with pytest.raises(WeightsError):
        await broken.process(config, dies_at=2)
    resumed = await broken.process(config)
    mine, theirs = weights_of(straight.model), weights_of(resumed.model)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


async def test_a_finished_run_takes_nothing_more(tmp_path: Path) -> None:
    run = Run(tmp_path)
    await run.process(TrainConfig(steps=1))
    run.source.events.clear()
    await run.process(TrainConfig(steps=1))
    assert not [event for event in run.source.events if event.startswith("take")]
