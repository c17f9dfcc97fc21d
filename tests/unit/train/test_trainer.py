from __future__ import annotations

import math
import random

import pytest
import torch
from tiny_models import tiny_model, token_logprobs
from train_batches import episode, make_batch, trajectory

from agentrl.core.config import LossConfig, TrainConfig
from agentrl.core.errors import TrainError
from agentrl.core.protocols import Batch
from agentrl.core.types import Failed, Group, Sampling, Scored, Task, Trajectory
from agentrl.train.metrics import SPECS
from agentrl.train.samples import rewards_of, samples_of
from agentrl.train.trainer import Trainer


def on_policy(batch: Batch, model: torch.nn.Module) -> Batch:
    """The batch with the model's own logprobs as the behaviour's."""

    def exact(one: Trajectory) -> Trajectory:
        logprobs = [None, *token_logprobs(model, one.token_ids)]
        kept = tuple(p if m else None for p, m in zip(logprobs, one.loss_mask, strict=True))
        return one.model_copy(update={"behavior_logprobs": kept})

    groups = tuple(
        group.model_copy(
            update={
                "episodes": tuple(
                    e.model_copy(update={"trajectories": tuple(exact(t) for t in e.trajectories)})
                    for e in group.episodes
                )
            }
        )
        for group in batch.groups
    )
    return Batch(batch.step, groups)


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def test_training_raises_the_probability_of_what_was_rewarded() -> None:
    model = tiny_model()
    batch = on_policy(make_batch(groups=2, size=4), model)

    def mean_logprob(reward: float) -> float:
        rows = [
            token_logprobs(model, t.token_ids)[i - 1]
            for g in batch.groups
            for e in g.episodes
            if isinstance(e.outcome, Scored) and e.outcome.reward == reward
            for t in e.trajectories
            for i, m in enumerate(t.loss_mask)
            if m
        ]
        return sum(rows) / len(rows)

    before = mean_logprob(1.0), mean_logprob(0.0)
    trainer = Trainer(model, TrainConfig(lr=1e-3))
    for _ in range(3):
        trainer.train_step(batch)
        trainer.state.version = 0
    assert mean_logprob(1.0) > before[0] + 0.1
    assert mean_logprob(0.0) < before[1] - 0.1


def test_on_policy_samples_show_no_mismatch_and_full_ess() -> None:
    model = tiny_model()
    metrics = Trainer(model, TrainConfig()).train_step(on_policy(make_batch(), model))
    assert metrics["train/mismatch_zero_lag_mean_abs"] <= 1e-5
    assert metrics["train/mismatch_zero_lag_tokens"] == metrics["train/trained_tokens"]
    assert metrics["train/ess_ratio"] == pytest.approx(1.0)
    assert metrics["train/chi2"] == pytest.approx(0.0, abs=1e-4)
    assert metrics["train/lag_max"] == 0


@pytest.mark.parametrize("proximal", ["loglinear", "behavior"])
def test_mismatch_is_measured_without_a_proximal_pass(proximal: str) -> None:
    model = tiny_model()
    config = TrainConfig.model_validate({"minibatches": 2, "lr": 1e-2, "loss": {"proximal": proximal}})
    metrics = Trainer(model, config).train_step(on_policy(make_batch(), model))
    assert metrics["train/mismatch_zero_lag_mean_abs"] <= 1e-5
    # Only the first minibatch is computed under the weights that sampled.
    assert 0 < metrics["train/mismatch_zero_lag_tokens"] < metrics["train/trained_tokens"]


def test_mismatch_counts_current_tokens_only() -> None:
    model = tiny_model()
    trainer = Trainer(model, TrainConfig())
    trainer.state.version = 2
    metrics = trainer.train_step(make_batch(version=1))
    assert metrics["train/mismatch_zero_lag_tokens"] == 0
    assert "train/mismatch_zero_lag_mean_abs" not in metrics
    assert metrics["train/lag_mean"] == metrics["train/lag_max"] == 1


def test_metrics_are_declared() -> None:
    declared = {spec.name for spec in SPECS}
    metrics = Trainer(tiny_model(), TrainConfig()).train_step(make_batch())
    assert {name for name in metrics if not name.startswith("reward/mean/")} <= declared
    assert metrics["reward/mean/even"] == metrics["reward/mean/odd"] == metrics["reward/mean"] == 0.5
    assert all(math.isfinite(value) for value in metrics.values())


def test_a_step_advances_step_and_version() -> None:
    trainer = Trainer(tiny_model(), TrainConfig())
    trainer.train_step(make_batch(step=1))
    trainer.train_step(make_batch(step=2, version=1))
    assert (trainer.state.step, trainer.state.version) == (2, 2)


def test_failures_are_neither_sampled_nor_in_the_baseline() -> None:
    task = Task(env="test", id="t", source="s")
    rng = random.Random(0)
    outcomes = [Scored(reward=1.0), Scored(reward=0.0), Failed(code="ENGINE"), Scored(reward=1.0)]
    episodes = tuple(episode(str(i), "g", o, trajectory(str(i), rng), task=task) for i, o in enumerate(outcomes))
    batch = Batch(1, (Group(id="g", task=task, size=4, episodes=episodes),))
    config = TrainConfig(advantage="rloo")
    rewards = rewards_of(batch.groups, config)
    assert [r.episode_id for r in rewards] == ["0", "1", "3"]
    assert [r.advantage for r in rewards] == pytest.approx([0.5, -1.0, 0.5])
    assert len(samples_of(batch, rewards, config, version=0)) == 3


def test_every_trajectory_of_an_episode_gets_its_advantage() -> None:
    task = Task(env="test", id="t", source="s")
    rng = random.Random(0)
    split = episode("a", "g", Scored(reward=1.0), trajectory("a1", rng), trajectory("a2", rng), task=task)
    other = episode("b", "g", Scored(reward=0.0), trajectory("b1", rng), task=task)
    config = TrainConfig()
    batch = Batch(1, (Group(id="g", task=task, size=2, episodes=(split, other)),))
    samples = samples_of(batch, rewards_of(batch.groups, config), config, version=0)
    assert [sample.advantage > 0 for sample in samples] == [True, True, False]


@pytest.mark.parametrize(
    ("loss", "named"),
    [
        (LossConfig(correction="none"), "train.loss.correction"),
        (LossConfig(proximal="behavior"), "train.loss.proximal"),
    ],
)
def test_lag_without_correction_is_refused(loss: LossConfig, named: str) -> None:
    model = tiny_model()
    trainer = Trainer(model, TrainConfig(loss=loss))
    trainer.train_step(make_batch(step=1, version=0))
    before = weights(model)
    with pytest.raises(TrainError, match=named):
        trainer.train_step(make_batch(step=2, version=0))
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))
    assert trainer.state.step == 1


def test_tokens_from_the_future_are_refused() -> None:
    with pytest.raises(TrainError, match="not an ancestor"):
        Trainer(tiny_model(), TrainConfig()).train_step(make_batch(version=3))


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(top_p=0.9), Sampling(top_k=5)])
def test_a_distribution_that_cannot_be_trained_on_is_refused(sampling: Sampling) -> None:
    task = Task(env="test", id="t", source="s")
    rng = random.Random(0)
    pair = [
        episode(str(i), "g", Scored(reward=float(i)), trajectory(str(i), rng, sampling=sampling), task=task)
        for i in range(2)
    ]
    with pytest.raises(TrainError, match=r"rollout\.sampling"):
        Trainer(tiny_model(), TrainConfig()).train_step(
            Batch(1, (Group(id="g", task=task, size=2, episodes=tuple(pair)),))
        )


def test_a_batch_without_scores_is_refused() -> None:
    task = Task(env="test", id="t", source="s")
    failed = episode("a", "g", Failed(code="ENGINE"), trajectory("a", random.Random(0)), task=task)
    with pytest.raises(TrainError, match="scored attempt"):
        Trainer(tiny_model(), TrainConfig()).train_step(
            Batch(1, (Group(id="g", task=task, size=1, episodes=(failed,)),))
        )


def test_a_gradient_that_is_not_finite_is_not_applied() -> None:
    model = tiny_model()
    trainer = Trainer(model, TrainConfig(minibatches=1))
    with torch.no_grad():
        next(model.parameters())[5] = math.nan
    before = weights(model)
    with pytest.raises(TrainError, match=r"train\.lr"):
        trainer.train_step(make_batch())
    after = weights(model)
    assert all(torch.equal(a, b) for a, b in zip(before[1:], after[1:], strict=True))
    assert trainer.state.step == 0


def test_every_aggregation_and_advantage_takes_a_step() -> None:
    for aggregation in ("token", "sequence", "constant"):
        for advantage in ("grpo", "rloo"):
            config = TrainConfig.model_validate({"advantage": advantage, "loss": {"aggregation": aggregation}})
            model = tiny_model()
            before = weights(model)
            assert Trainer(model, config).train_step(make_batch())["train/grad_norm"] > 0
            assert not all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))


def test_the_learning_rate_falls_linearly_to_its_final_share() -> None:
    trainer = Trainer(tiny_model(), TrainConfig(steps=10, lr=1e-3, lr_final=0.2))
    rates = []
    for step in (0, 5, 10, 12):
        trainer.state.step = step
        rates.append(trainer.learning_rate)
    assert rates == pytest.approx([1e-3, 6e-4, 2e-4, 2e-4])
    trainer.state.step = 5
    assert trainer.train_step(make_batch(step=6))["train/lr"] == pytest.approx(6e-4)
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(6e-4)
