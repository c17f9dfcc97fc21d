"""The trainer's control loop: take, optimise, checkpoint, commit, publish, apply, record. Run by `launch`.

Invariant: a batch's claim becomes final only after a checkpoint holds what was learnt from it, and a version number
never names two sets of weights: a resume publishes what it restored under a new number, unless the newest version is
just that, so that what was sampled since is as young as before.
"""

from __future__ import annotations

import asyncio
import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from agentrl.core.config import TrainConfig
from agentrl.core.protocols import Applied, Batch, MetricSink, Publisher, SampleSource
from agentrl.core.types import Completion, WeightManifest
from agentrl.train.checkpoint import Checkpoints
from agentrl.train.model import probe_logprobs, weights_of
from agentrl.train.trainer import Trainer

log = logging.getLogger(__name__)

PROBE_TOKENS = 512
"""Longest part of a trajectory that a new version is probed with."""


class WeightStore(Protocol):
    """Where versions are published; `agentrl.weights.publish.WeightFolder`."""

    def publish(
        self,
        tensors: Mapping[str, Tensor],
        *,
        version: int,
        step: int,
        prompt: tuple[int, ...] = (),
        probe: Callable[[tuple[int, ...]], tuple[float, ...]],
    ) -> tuple[WeightManifest, Path]:
        """Write a version to disk; the path is its manifest's. `probe` gives the logprobs of prompt[1:]."""
        ...

    def find(self, version: int, tensors: Mapping[str, Tensor]) -> tuple[WeightManifest, Path] | None:
        """The version on disk, if it holds exactly these tensors."""
        ...

    def latest(self) -> int:
        """The newest version on disk, -1 before the first."""
        ...


@dataclass(frozen=True, slots=True)
class TrainerParts:
    """What the loop drives."""

    trainer: Trainer
    source: SampleSource
    weights: WeightStore
    publisher: Publisher
    checkpoints: Checkpoints
    sink: MetricSink
    groups: int
    """Of one step."""


async def run_trainer(parts: TrainerParts, config: TrainConfig) -> None:
    """Train up to `config.steps`, from the newest checkpoint if there is one. Raises TrainError, WeightsError."""
    await _start(parts)
    state = parts.trainer.state
    while state.step < config.steps:
        await _step(parts, config, state.step + 1)


async def _start(parts: TrainerParts) -> None:
    """Restore, give back what was claimed later, and have the replicas serve the weights at hand."""
    trainer, source = parts.trainer, parts.source
    restored = await asyncio.to_thread(parts.checkpoints.restore, trainer)
    await source.rewind(trainer.state.step)
    if restored:
        # The process may have ended between the checkpoint and its commit; repeating a commit changes nothing.
        await source.commit(trainer.state.step, version=trainer.state.version, checkpoint=restored)
        log.info("resumed from %s at step %d", restored, trainer.state.step)
    # The disk may hold a version that was applied but never recorded.
    newest = max(await source.latest_version(), parts.weights.latest())
    if trainer.state.version == newest:
        known = await asyncio.to_thread(parts.weights.find, newest, weights_of(trainer.model))
        if known is not None:
            await _apply(parts, *known)
            return
    trainer.state.version = newest + 1
    await _publish(parts)


async def _step(parts: TrainerParts, config: TrainConfig, step: int) -> None:
    trainer, source = parts.trainer, parts.source
    watch = Stopwatch()
    batch = await source.take(step, version=trainer.state.version, groups=parts.groups)
    watch.lap("train/take_s")
    # Torch in a thread: the loop goes on answering health checks and metrics.
    metrics = await asyncio.to_thread(trainer.train_step, batch)
    watch.lap("train/train_s")
    if step % config.checkpoint_every == 0 or step == config.steps:
        name = await asyncio.to_thread(parts.checkpoints.save, trainer)
        await source.commit(step, version=trainer.state.version, checkpoint=name)
    watch.lap("train/checkpoint_s")
    mismatch = await _publish(parts, _probe_prompt(batch), watch)
    watched = {**watch.laps, "train/step_s": watch.total, "weights/mismatch_mean_abs": mismatch}
    parts.sink.write(step, {**metrics, **watched})
    log.info("step %d: reward %.3f, lag %.2f", step, metrics["reward/mean"], metrics["train/lag_mean"])


async def _publish(parts: TrainerParts, prompt: tuple[int, ...] = (), watch: Stopwatch | None = None) -> float:
    """Returns the mismatch at zero lag: of what each replica samples under the new version, the worst mean."""
    watch = watch or Stopwatch()
    manifest, path = await asyncio.to_thread(_write, parts, prompt)
    watch.lap("train/publish_s")
    applied = await _apply(parts, manifest, path)
    watch.lap("train/apply_s")
    model = parts.trainer.model
    return max((_mismatch(model, prompt, found) for prompt, found in applied.samples), default=math.nan)


async def _apply(parts: TrainerParts, manifest: WeightManifest, path: Path) -> Applied:
    """Have the replicas serve a version on disk, and record it unless an earlier process has."""
    applied = await parts.publisher.apply(manifest, path)
    if await parts.source.latest_version() < manifest.version:
        await parts.source.publish_version(manifest.version, step=manifest.step, path=str(path))
    return applied


def _mismatch(model: torch.nn.Module, prompt: tuple[int, ...], sampled: Completion) -> float:
    """Mean |trainer - engine| logprob of what a replica sampled under the trainer's own weights."""
    expected = probe_logprobs(model, prompt + sampled.token_ids)[-len(sampled.token_ids) :]
    return statistics.fmean(abs(a - b) for a, b in zip(expected, sampled.logprobs, strict=True))


def _probe_prompt(batch: Batch) -> tuple[int, ...]:
    """A trajectory that the policy really took, to measure engine against trainer where it matters.

    Without its last token: it may fill the engine's context, and a probe needs room for one more.
    """
    paths = (path for group in batch.groups for episode in group.episodes for path in episode.trajectories)
    return next((path.token_ids[:-1][:PROBE_TOKENS] for path in paths), ())


def _write(parts: TrainerParts, prompt: tuple[int, ...]) -> tuple[WeightManifest, Path]:
    model, state = parts.trainer.model, parts.trainer.state
    return parts.weights.publish(
        weights_of(model),
        version=state.version,
        step=state.step,
        prompt=prompt,
        probe=lambda ids: probe_logprobs(model, ids),
    )


class Stopwatch:
    """Seconds between laps."""

    def __init__(self) -> None:
        self._began = self._last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self._last = now - self._last, now

    @property
    def total(self) -> float:
        return time.perf_counter() - self._began
