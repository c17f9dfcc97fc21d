from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model
from train_batches import make_batch

from agentrl.core.config import TrainConfig
from agentrl.core.errors import TrainError
from agentrl.train.checkpoint import REST, SEAL, WEIGHTS, Checkpoints
from agentrl.train.model import weights_of
from agentrl.train.trainer import Trainer


def fresh(seed: int = 1) -> Trainer:
    return Trainer(tiny_model(seed=seed), TrainConfig(lr=1e-3, minibatches=3), seed=seed)


def trained(checkpoints: Checkpoints, steps: int) -> Trainer:
    trainer = fresh(seed=0)
    for step in range(1, steps + 1):
        trainer.train_step(make_batch(step=step, version=step - 1))
        checkpoints.save(trainer)
    return trainer


def test_a_resumed_trainer_takes_the_same_next_step_to_the_bit(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    kept = trained(checkpoints, 2)
    resumed = fresh(seed=1)
    assert checkpoints.restore(resumed) == "step-000002"
    assert (resumed.state.step, resumed.state.version) == (2, 2)
    batch = make_batch(step=3, version=2)
    one, other = kept.train_step(batch), resumed.train_step(batch)
    timed = {name for name in one if name.endswith("_s")}
    assert {k: v for k, v in one.items() if k not in timed} == {k: v for k, v in other.items() if k not in timed}
    mine, theirs = weights_of(kept.model), weights_of(resumed.model)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    trained(checkpoints, 4)
    assert checkpoints.names() == ["step-000003", "step-000004"]


def test_nothing_to_restore(tmp_path: Path) -> None:
    trainer = fresh()
    assert Checkpoints(tmp_path / "none", keep=2).restore(trainer) is None
    assert trainer.state.step == 0


@pytest.mark.parametrize("file", [WEIGHTS, REST, SEAL])
@pytest.mark.parametrize("damage", ["torn", "flipped", "missing"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, file: str, damage: str) -> None:
    checkpoints = Checkpoints(tmp_path, keep=3)
    trained(checkpoints, 2)
    path = tmp_path / "step-000002" / file
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "torn":
        path.write_bytes(data[: len(data) // 2])
    else:
        path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    trainer = fresh()
    assert checkpoints.restore(trainer) == "step-000001"
    assert trainer.state.step == 1


def test_a_draft_left_by_a_crash_is_no_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=3)
    trained(checkpoints, 1)
    (tmp_path / ".step-000002.draft").mkdir()
    (tmp_path / ".step-000002.draft" / WEIGHTS).write_bytes(b"half")
    assert checkpoints.restore(fresh()) == "step-000001"


def test_no_whole_checkpoint_is_an_error_and_not_a_fresh_start(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=3)
    trained(checkpoints, 1)
    (tmp_path / "step-000001" / WEIGHTS).write_bytes(b"")
    with pytest.raises(TrainError, match="step-000001"):
        checkpoints.restore(fresh())


def test_a_checkpoint_of_another_shape_is_refused(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=3)
    trained(checkpoints, 1)
    with pytest.raises(TrainError, match=r"model\.tiny"):
        checkpoints.restore(Trainer(tiny_model(hidden=16), TrainConfig()))
