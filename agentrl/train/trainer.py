"""One training step: a batch of groups in, updated weights and numbers out. Driven by `loop`.

Invariant: an update is applied only when loss and gradient are finite, and the proximal policy is always the
weights at the start of the step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from agentrl.core.config import TrainConfig
from agentrl.core.errors import TrainError
from agentrl.core.protocols import Batch
from agentrl.train import losses
from agentrl.train.model import separates_rows, token_logprobs
from agentrl.train.packing import Pack, pack
from agentrl.train.report import PackNumbers, StepStatistics, batch_metrics
from agentrl.train.samples import Sample, rewards_of, samples_of


@dataclass
class TrainerState:
    """Where the trainer is; what a checkpoint holds besides weights and optimizer."""

    step: int = 0
    """Steps taken."""
    version: int = 0
    """Policy version of the current weights."""
    rng: torch.Generator = field(default_factory=torch.Generator)
    """Draws the minibatches."""


class Trainer:
    """Owns model and optimizer. Not thread-safe: `train_step` blocks, and runs in one thread at a time."""

    def __init__(self, model: torch.nn.Module, config: TrainConfig, *, seed: int = 0) -> None:
        self.model = model
        self.config = config
        self.state = TrainerState()
        self.state.rng.manual_seed(seed)
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
        )
        self._share_rows = separates_rows(model)

    def train_step(self, batch: Batch) -> dict[str, float]:
        """Train on the batch; the state advances by one step and one version. Returns the step's metrics.

        TrainError, and no update, when the batch cannot be trained on or a loss or gradient is not finite.
        """
        began = time.perf_counter()
        rewards = rewards_of(batch.groups, self.config)
        samples = samples_of(batch, rewards, self.config, self.state.version)
        statistics = StepStatistics()
        prepared = time.perf_counter()
        proximal = self._proximal(samples)
        compared = time.perf_counter()
        for chosen in self._minibatches(len(samples)):
            self._update([samples[i] for i in chosen], [proximal[i] for i in chosen] if proximal else None, statistics)
        metrics = batch_metrics(batch, rewards, samples, self.state.version)
        metrics.update(statistics.metrics(self.config.loss.tis_cap))
        metrics["train/prepare_s"] = prepared - began
        metrics["train/proximal_s"] = compared - prepared
        metrics["train/update_s"] = time.perf_counter() - compared
        self.state.step = batch.step
        self.state.version += 1
        return metrics

    def _minibatches(self, count: int) -> list[list[int]]:
        order = torch.randperm(count, generator=self.state.rng).tolist()
        share = math.ceil(count / self.config.minibatches)
        return [order[i : i + share] for i in range(0, count, share)]

    def _packs(self, samples: Sequence[Sample]) -> list[Pack]:
        sequences = [sample.sequence for sample in samples]
        return pack(sequences, self.config.pack_tokens, share_rows=self._share_rows)

    def _proximal(self, samples: Sequence[Sample]) -> list[Tensor] | None:
        """Each sample's logprobs under the weights at the start of the step; None when they aren't computed."""
        if self.config.loss.proximal != "recompute":
            return None
        found: list[Tensor] = [torch.empty(0)] * len(samples)
        with torch.no_grad():
            for one in self._packs(samples):
                logprobs = token_logprobs(self.model, one).logprobs
                sizes = [len(samples[i].behavior) for i in one.members]
                for i, part in zip(one.members, torch.split(logprobs, sizes), strict=True):
                    found[i] = part
        return found

    def _update(self, samples: Sequence[Sample], proximal: Sequence[Tensor] | None, statistics: StepStatistics) -> None:
        """One optimizer step on a minibatch."""
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        weights = self._token_weights(samples)
        for one in self._packs(samples):
            members = [samples[i] for i in one.members]
            prox = torch.cat([proximal[i] for i in one.members]) if proximal else None
            loss = self._loss(one, members, prox, torch.cat([weights[i] for i in one.members]), statistics)
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_clip))
        if not (math.isfinite(total) and math.isfinite(norm)):
            self.optimizer.zero_grad(set_to_none=True)
            raise TrainError(
                f"step {self.state.step + 1}: loss {total} and gradient norm {norm} are not finite: this update "
                "was not applied; the last checkpoint is intact: resume with a lower train.lr or train.grad_clip, or "
                "with model.dtype = 'float32'"
            )
        self.optimizer.step()
        statistics.add_update(total, norm)

    def _token_weights(self, samples: Sequence[Sample]) -> list[Tensor]:
        sizes = [len(sample.behavior) for sample in samples]
        sessions = torch.tensor([sample.session_tokens for sample in samples]).repeat_interleave(torch.tensor(sizes))
        loss = self.config.loss
        weights = losses.token_weights(loss.aggregation, sessions, constant_tokens=loss.constant_tokens)
        return list(torch.split(weights, sizes))

    def _loss(
        self, one: Pack, members: Sequence[Sample], start: Tensor | None, weights: Tensor, statistics: StepStatistics
    ) -> Tensor:
        config = self.config.loss
        current = token_logprobs(self.model, one)
        behavior = torch.cat([sample.behavior for sample in members])
        versions = torch.cat([sample.versions for sample in members])
        advantages = torch.cat([torch.full_like(s.behavior, s.advantage) for s in members])
        if config.proximal == "loglinear":
            produced = self.state.version + 1
            proximal = losses.loglinear_proximal(current.logprobs, behavior, versions, produced)
        else:
            proximal = behavior if start is None else start
        surrogate = losses.ppo_clip(
            current.logprobs, proximal, advantages,
            clip_low=config.clip_low, clip_high=config.clip_high, dual_clip=config.dual_clip,
        )  # fmt: skip
        importance, finite = losses.token_tis(proximal, behavior, config.tis_cap)
        if config.correction == "none":
            importance = torch.ones_like(importance)
        if start is None and statistics.updates == 0:
            start = current.logprobs.detach()
        statistics.add_pack(
            PackNumbers(
                entropy=current.entropy, current=current.logprobs.detach(), proximal=proximal, behavior=behavior,
                importance=importance, finite=finite & surrogate.finite, ratio=surrogate.ratio,
                clipped=surrogate.clipped, dual_clipped=surrogate.dual_clipped, start=start,
                zero_lag=versions == self.state.version, area=one.token_ids.numel(),
                tokens=sum(len(sample.sequence.token_ids) for sample in members),
            )
        )  # fmt: skip
        return losses.weighted_sum(surrogate.losses * importance, weights, surrogate.finite)
