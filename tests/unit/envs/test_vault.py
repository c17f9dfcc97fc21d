"""The vault environment: its tasks, and that its demonstrations tell the truth about a real shell."""

from __future__ import annotations

import itertools
import json
import subprocess
from pathlib import Path

import pytest

from agentrl.core.environment import Split
from agentrl.core.types import Demonstration, Message, Task
from envs.vault.environment import PRELUDE, SUBMITTED, Vault


def key(task: Task) -> str:
    return json.dumps(task.data, sort_keys=True)


def take(split: Split, seed: int, n: int) -> list[Task]:
    return list(itertools.islice(Vault().tasks(split, seed), n))


def demonstrations(noise: float, n: int, seed: int = 0) -> list[Demonstration]:
    return list(itertools.islice(Vault().demonstrations(seed, noise), n))


def command(message: Message) -> str:
    arguments = message.tool_calls[0].arguments
    assert arguments is not None
    return str(arguments["command"])


def solved(demonstration: Demonstration) -> bool:
    data = demonstration.task.data
    return command(demonstration.messages[-1]) == f"submit {data['codes'][data['target']]}"


def test_same_split_and_seed_give_the_same_tasks() -> None:
    assert take("train", 3, 50) == take("train", 3, 50)
    assert take("train", 3, 50) != take("train", 4, 50)


def test_no_task_is_in_both_splits_whatever_the_seeds() -> None:
    train = {key(task) for seed in range(4) for task in take("train", seed, 1000)}
    held_out = {key(task) for seed in range(4) for task in take("eval", seed, 250)}
    assert not train & held_out
    assert len(train) > 3900, "tasks hardly repeat"


def test_demonstrations_are_of_training_tasks_only() -> None:
    held_out = {key(task) for task in take("eval", 0, 2000)}
    assert not held_out & {key(d.task) for d in demonstrations(0.3, 1000)}


@pytest.mark.parametrize(("noise", "low", "high"), [(0.0, 1.0, 1.0), (0.3, 0.55, 0.75), (1.0, 0.0, 0.1)])
def test_noise_sets_the_share_of_demonstrations_that_fail(noise: float, low: float, high: float) -> None:
    shown = demonstrations(noise, 1000)
    assert low <= sum(map(solved, shown)) / len(shown) <= high


def test_demonstrations_show_what_a_real_shell_prints(tmp_path: Path) -> None:
    for i, demonstration in enumerate(demonstrations(0.5, 20)):
        folder = tmp_path / str(i)
        folder.mkdir()
        spec = Vault().sandbox(demonstration.task)
        assert spec is not None
        for name, text in spec.files.items():
            (folder / name).write_text(text)
        turns = demonstration.messages[2:]
        for call, result in itertools.zip_longest(turns[::2], turns[1::2]):
            ran = subprocess.run(["sh", "-c", PRELUDE + command(call)], cwd=folder, capture_output=True, text=True)
            if result is not None:
                assert (ran.stdout + ran.stderr).strip() == result.content
        assert ran.returncode == SUBMITTED
        assert (folder / ".answer").read_text() == command(turns[-1]).removeprefix("submit ")
