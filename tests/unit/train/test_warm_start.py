from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from tiny_models import VOCAB, tiny_model

from agentrl.core.config import WarmStartConfig
from agentrl.core.errors import TrainError
from agentrl.train.packing import TokenSequence
from agentrl.train.warm_start import FLOOR, RAMP, WarmProgress, learning_rate, warm_start


def copying() -> Iterator[TokenSequence]:
    """Three random tokens, then the same again: only the second half is said by the model."""
    torch.manual_seed(0)
    while True:
        said = torch.randint(2, VOCAB, (3,))
        yield TokenSequence(torch.cat([said, said]), torch.arange(3, 6))


def test_supervised_steps_lower_the_loss_and_report_each() -> None:
    seen: list[WarmProgress] = []
    config = WarmStartConfig(steps=60, batch=32, lr=5e-3)
    warm_start(tiny_model(), copying(), config, progress=seen.append)
    assert [now.step for now in seen] == list(range(1, 61))
    assert seen[0].loss > 4.0
    assert seen[-1].loss < seen[0].loss - 0.5
    assert 0.0 <= seen[0].accuracy <= seen[-1].accuracy <= 1.0


def test_the_first_step_is_the_mean_over_trained_tokens() -> None:
    model = tiny_model()
    batch = list(itertools.islice(copying(), 4))
    expected = []
    for sequence in batch:
        table = torch.log_softmax(model(sequence.token_ids[None]).logits[0], -1)
        expected += [-table[i - 1, sequence.token_ids[i]].item() for i in sequence.targets.tolist()]
    seen: list[WarmProgress] = []
    warm_start(model, iter(batch), WarmStartConfig(steps=1, batch=4), progress=seen.append)
    assert seen[0].loss == pytest.approx(sum(expected) / len(expected), rel=1e-5)


def test_learning_rate_rises_then_falls_to_its_floor() -> None:
    config = WarmStartConfig(steps=200, lr=1.0)
    rates = [learning_rate(step, config) for step in range(200)]
    assert max(rates[:5]) < 5.5 / RAMP * (1 + FLOOR)
    assert rates.index(max(rates)) == RAMP - 1
    assert rates[RAMP:] == sorted(rates[RAMP:], reverse=True)
    assert rates[-1] == pytest.approx(FLOOR, abs=1e-3)


def test_a_loss_that_is_not_finite_stops_it() -> None:
    model = tiny_model()
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    with pytest.raises(TrainError, match=r"warm_start\.lr"):
        warm_start(model, copying(), WarmStartConfig(steps=2), progress=lambda now: None)
