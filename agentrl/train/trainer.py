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


@dataclass(frozen=True, slots=True)
class Part:
    """One pack of a minibatch."""

    pack: Pack
    members: Sequence[Sample]
    """In the pack's order."""
    weights: Tensor
    """fp32 [N]: what each token's loss counts for in the minibatch."""


Minibatch = list[Part]
"""The parts of one optimizer step."""


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
        minibatches = self._minibatches(samples)
        prepared = time.perf_counter()
        # The first minibatch is itself computed under the weights at the start of the step.
        starts = [None, *(self._logprobs(minibatch) for minibatch in minibatches[1:])]
        compared = time.perf_counter()
        for minibatch, start in zip(minibatches, starts, strict=True):
            self._update(minibatch, start, statistics)
        metrics = batch_metrics(batch, rewards, samples, self.state.version)
        metrics.update(statistics.metrics(self.config.loss.tis_cap))
        metrics["train/lr"] = self.learning_rate
        metrics["train/prepare_s"] = prepared - began
        metrics["train/proximal_s"] = compared - prepared
        metrics["train/update_s"] = time.perf_counter() - compared
        self.state.step = batch.step
        self.state.version += 1
        return metrics

    @property
    def learning_rate(self) -> float:
        """Of the step under way; it falls linearly, so that late noise does not undo what was learnt."""
        config = self.config
        done = min(1.0, self.state.step / config.steps)
        return config.lr * (1.0 - done * (1.0 - config.lr_final))

    def _minibatches(self, samples: Sequence[Sample]) -> list[Minibatch]:
        order = torch.randperm(len(samples), generator=self.state.rng).tolist()
        share = math.ceil(len(samples) / self.config.minibatches)
        return [self._minibatch([samples[i] for i in order[at : at + share]]) for at in range(0, len(samples), share)]

    def _minibatch(self, samples: Sequence[Sample]) -> Minibatch:
        sequences = [sample.sequence for sample in samples]
        packs = pack(sequences, self.config.pack_tokens, share_rows=self._share_rows)
        members = [[samples[i] for i in one.members] for one in packs]
        sessions = [torch.cat([torch.full_like(s.versions, s.session_tokens) for s in some]) for some in members]
        loss = self.config.loss
        weights = losses.token_weights(loss.aggregation, torch.cat(sessions), constant_tokens=loss.constant_tokens)
        parts = torch.split(weights, [len(some) for some in sessions])
        return [Part(*row) for row in zip(packs, members, parts, strict=True)]

    def _logprobs(self, minibatch: Minibatch) -> list[Tensor] | None:
        """Each part's logprobs under the weights at hand; None when the loss doesn't use them."""
        if self.config.loss.proximal != "recompute":
            return None
        with torch.no_grad():
            return [token_logprobs(self.model, part.pack).logprobs for part in minibatch]

    def _update(self, minibatch: Minibatch, starts: Sequence[Tensor] | None, statistics: StepStatistics) -> None:
        """One optimizer step. `starts` are the parts' logprobs under the weights at the start of the step."""
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for i, part in enumerate(minibatch):
            loss = self._loss(part, starts[i] if starts else None, statistics)
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
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate
        self.optimizer.step()
        statistics.add_update(total, norm)

    def _loss(self, part: Part, start: Tensor | None, statistics: StepStatistics) -> Tensor:
        config, members = self.config.loss, part.members
        found = token_logprobs(self.model, part.pack)
        current = found.logprobs
        if start is None and statistics.updates == 0:
            start = current.detach()
        behavior = torch.cat([sample.behavior for sample in members])
        versions = torch.cat([sample.versions for sample in members])
        advantages = torch.cat([torch.full_like(s.behavior, s.advantage) for s in members])
        proximal = self._proximal(current, start, behavior, versions)
        surrogate = losses.ppo_clip(
            current, proximal, advantages,
            clip_low=config.clip_low, clip_high=config.clip_high, dual_clip=config.dual_clip,
        )  # fmt: skip
        importance, finite = losses.token_tis(proximal, behavior, config.tis_cap)
        if config.correction == "none":
            importance = torch.ones_like(importance)
        statistics.add_pack(
            PackNumbers(
                entropy=found.entropy, proximal=proximal, behavior=behavior, importance=importance,
                finite=finite & surrogate.finite, ratio=surrogate.ratio, clipped=surrogate.clipped,
                dual_clipped=surrogate.dual_clipped, start=start, zero_lag=versions == self.state.version,
                area=part.pack.token_ids.numel(), tokens=sum(len(s.sequence.token_ids) for s in members),
            )
        )  # fmt: skip
        return losses.weighted_sum(surrogate.losses * importance, part.weights, surrogate.finite)

    def _proximal(self, current: Tensor, start: Tensor | None, behavior: Tensor, versions: Tensor) -> Tensor:
        if self.config.loss.proximal == "behavior":
            return behavior
        if self.config.loss.proximal == "loglinear" or start is None:
            return losses.loglinear_proximal(current, behavior, versions, self.state.version + 1)
        return start
