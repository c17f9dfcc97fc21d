"""What a training step's numbers say. Collected by `trainer` while it works; names are declared in `metrics`.

Invariant: token means are over every trained token of the step, whatever the packing.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.core.protocols import Batch
from agentrl.train import losses
from agentrl.train.samples import Reward, Sample


@dataclass(frozen=True, slots=True)
class PackNumbers:
    """Of one pack's forward pass; tensors are detached, [N]."""

    entropy: Tensor
    proximal: Tensor
    behavior: Tensor
    importance: Tensor
    finite: Tensor
    """bool: every log-ratio of the token was finite."""
    ratio: Tensor
    clipped: Tensor
    dual_clipped: Tensor
    start: Tensor | None
    """Logprobs under the weights at the start of the step; None where nobody computed them."""
    zero_lag: Tensor
    """bool: the token was sampled by exactly those weights."""
    area: int
    """Rows times length."""
    tokens: int


class StepStatistics:
    """Collects over packs and optimizer steps."""

    def __init__(self) -> None:
        self._packs: list[PackNumbers] = []
        self._losses: list[float] = []
        self._norms: list[float] = []

    @property
    def updates(self) -> int:
        """Optimizer steps so far."""
        return len(self._losses)

    def add_pack(self, numbers: PackNumbers) -> None:
        self._packs.append(numbers)

    def add_update(self, loss: float, grad_norm: float) -> None:
        self._losses.append(loss)
        self._norms.append(grad_norm)

    def metrics(self, tis_cap: float) -> dict[str, float]:
        importance, ratio, finite = self._joined("importance"), self._joined("ratio"), self._joined("finite")
        proximal, behavior = self._joined("proximal"), self._joined("behavior")
        drift = torch.where(finite, proximal - behavior, 0.0)
        return {
            "train/loss": statistics.fmean(self._losses),
            "train/grad_norm": statistics.fmean(self._norms),
            "train/entropy_nats": _mean(self._joined("entropy")),
            "train/clip_fraction": _mean(self._joined("clipped")),
            "train/dual_clip_fraction": _mean(self._joined("dual_clipped")),
            "train/tis_capped_fraction": _mean(importance >= tis_cap),
            "train/ess_ratio": losses.effective_sample_size(importance),
            "train/chi2": losses.chi_squared(drift),
            "train/log_ratio_mean_abs": _mean(ratio.log().abs()),
            "train/behavior_log_ratio_mean_abs": _mean(drift.abs()),
            "train/nonfinite_ratio_tokens": float((~finite).sum()),
            "train/pack_fill": sum(p.tokens for p in self._packs) / sum(p.area for p in self._packs),
            **self._mismatch(),
        }

    def _joined(self, name: str) -> Tensor:
        return torch.cat([getattr(numbers, name) for numbers in self._packs])

    def _mismatch(self) -> dict[str, float]:
        """Trainer against engine on tokens that both computed under the same weights."""
        gaps = [
            (numbers.start - numbers.behavior)[numbers.zero_lag].abs()
            for numbers in self._packs
            if numbers.start is not None
        ]
        found = torch.cat(gaps) if gaps else torch.empty(0)
        values = {"train/mismatch_zero_lag_tokens": float(len(found))}
        if len(found):
            values["train/mismatch_zero_lag_mean_abs"] = _mean(found)
            values["train/mismatch_zero_lag_max_abs"] = float(found.max())
        return values


def _mean(values: Tensor) -> float:
    return float(values.double().mean())


def batch_metrics(batch: Batch, rewards: Sequence[Reward], samples: Sequence[Sample], version: int) -> dict[str, float]:
    """Rewards by source, sizes and lag."""
    lag = version - torch.cat([sample.versions for sample in samples])
    values = {
        "train/version": float(version),
        "train/groups": float(len(batch.groups)),
        "train/flat_groups": float(_flat_groups(rewards)),
        "train/samples": float(len(samples)),
        "train/tokens": float(sum(len(sample.sequence.token_ids) for sample in samples)),
        "train/trained_tokens": float(len(lag)),
        "train/dropped_samples": float(batch.dropped_samples),
        "train/lag_mean": _mean(lag),
        "train/lag_max": float(lag.max()),
        "train/advantage_mean_abs": statistics.fmean(abs(sample.advantage) for sample in samples),
        "reward/mean": statistics.fmean(reward.value for reward in rewards),
        "reward/std": statistics.pstdev(reward.value for reward in rewards),
    }
    for source in {reward.source for reward in rewards}:
        values[f"reward/mean/{source}"] = statistics.fmean(r.value for r in rewards if r.source == source)
    return values


def _flat_groups(rewards: Sequence[Reward]) -> int:
    by_group: dict[str, set[float]] = {}
    for reward in rewards:
        by_group.setdefault(reward.group_id, set()).add(reward.value)
    return sum(len(values) == 1 for values in by_group.values())
