"""From a batch of groups to samples: what the loss needs of each trajectory. Called by `trainer`; pure.

Invariant: only attempts with a reward of their own become samples, and a sample that the configured loss
would treat wrongly (too old without correction, sampled greedily or from a cut distribution) is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.core.config import TrainConfig
from agentrl.core.errors import TrainError
from agentrl.core.protocols import Batch
from agentrl.core.types import Group, Scored, Trajectory
from agentrl.train.advantages import ESTIMATORS
from agentrl.train.packing import TokenSequence


@dataclass(frozen=True, slots=True)
class Sample:
    """A trajectory with its advantage. Tensors have one entry a trained token."""

    sequence: TokenSequence
    behavior: Tensor
    """fp32 [n], natural log."""
    versions: Tensor
    """int64 [n]"""
    advantage: float
    session_tokens: int


@dataclass(frozen=True, slots=True)
class Reward:
    """One scored attempt."""

    episode_id: str
    group_id: str
    source: str
    value: float
    advantage: float


def rewards_of(groups: Sequence[Group], config: TrainConfig) -> list[Reward]:
    """The scored attempts, with advantages over their own group."""
    estimate = ESTIMATORS[config.advantage]
    found: list[Reward] = []
    for group in groups:
        scored = [(e.id, e.outcome.reward) for e in group.episodes if isinstance(e.outcome, Scored)]
        if scored:
            advantages = estimate([reward for _, reward in scored])
            for (episode_id, value), advantage in zip(scored, advantages, strict=True):
                found.append(Reward(episode_id, group.id, group.task.source, value, advantage))
    return found


def samples_of(batch: Batch, rewards: Sequence[Reward], config: TrainConfig, version: int) -> list[Sample]:
    """The batch's trajectories that train at least one token, in the batch's order."""
    by_episode = {reward.episode_id: reward.advantage for reward in rewards}
    samples = [
        _sample(trajectory, by_episode[episode.id])
        for group in batch.groups
        for episode in group.episodes
        if episode.id in by_episode
        for trajectory in episode.trajectories
        if any(trajectory.loss_mask)
    ]
    if not samples:
        raise TrainError(
            f"step {batch.step}: none of the {len(batch.groups)} groups has a scored attempt with a trained token; "
            "look at the failures by code in `agentrl runs show`"
        )
    _refuse_uncorrected(samples, config, version, batch.step)
    return samples


def _sample(trajectory: Trajectory, advantage: float) -> Sample:
    sampling = trajectory.provenance.sampling
    if sampling.temperature <= 0 or sampling.top_p < 1 or sampling.top_k > 0:
        raise TrainError(
            f"trajectory {trajectory.id}: sampled with temperature {sampling.temperature}, top_p {sampling.top_p}, "
            f"top_k {sampling.top_k}, whose logprobs are not those of the trained distribution: set "
            "rollout.sampling to a temperature above 0, top_p = 1 and top_k = -1"
        )
    targets = [i for i, mask in enumerate(trajectory.loss_mask) if mask]
    if targets[0] == 0:
        raise TrainError(f"trajectory {trajectory.id}: token 0 is trained, but nothing comes before it to predict it")
    return Sample(
        sequence=TokenSequence(torch.tensor(trajectory.token_ids), torch.tensor(targets), sampling.temperature),
        behavior=torch.tensor([trajectory.behavior_logprobs[i] for i in targets], dtype=torch.float32),
        versions=torch.tensor([trajectory.policy_versions[i] for i in targets]),
        advantage=advantage,
        session_tokens=max(trajectory.session_tokens, len(targets)),
    )


def _refuse_uncorrected(samples: Sequence[Sample], config: TrainConfig, version: int, step: int) -> None:
    versions = torch.cat([sample.versions for sample in samples])
    lag = version - int(versions.min())
    if int(versions.max()) > version:
        raise TrainError(
            f"step {step}: a token was sampled by version {int(versions.max())}, but the trainer is at {version}: "
            "the weights that sampled it are not an ancestor of these; resume the run so that claims are rewound"
        )
    for setting, bad in (
        ("train.loss.correction = 'none'", config.loss.correction == "none"),
        ("train.loss.proximal = 'behavior'", config.loss.proximal == "behavior"),
    ):
        if bad and lag > 0:
            raise TrainError(
                f"step {step}: {setting} with samples {lag} versions old would train on them as if they were current: "
                "set train.loss.correction = 'token_tis' and train.loss.proximal = 'recompute', "
                "or rollout.form = 'sync'"
            )
