"""Which folder a launch works in, and when it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.core.config import RunConfig, load_config
from agentrl.core.errors import ConfigError
from agentrl.launch.start import new_run, resumed_run
from agentrl.launch.status import RunStatus, read_status


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return load_config(None, [f"dir={tmp_path}", "name=demo"])


def test_a_new_run_has_its_config_in_its_folder(config: RunConfig) -> None:
    folder, made = new_run(config, name=None)
    assert made == config
    assert folder.config() == config
    assert folder.logs.is_dir()


def test_a_taken_name_gets_a_number(config: RunConfig) -> None:
    assert [new_run(config, name=None)[1].name for _ in range(3)] == ["demo", "demo-2", "demo-3"]


def test_a_name_that_was_asked_for_is_never_changed(config: RunConfig) -> None:
    new_run(config, name="mine")
    with pytest.raises(ConfigError, match=r"already holds a run.*--resume --name mine"):
        new_run(config, name="mine")


def test_a_resume_keeps_the_config_and_takes_overrides(config: RunConfig) -> None:
    folder, _ = new_run(config, name=None)
    _, resumed = resumed_run(folder.path, ["train.steps=99"])
    assert resumed.train.steps == 99
    assert folder.config() == resumed


def test_a_resume_cannot_change_what_the_state_was_made_from(config: RunConfig) -> None:
    folder, _ = new_run(config, name=None)
    with pytest.raises(ConfigError, match="seed cannot change"):
        resumed_run(folder.path, ["seed=1"])
    assert folder.config() == config


def test_only_a_folder_with_a_run_can_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        resumed_run(tmp_path / "nothing", [])


def test_a_folder_is_worked_on_by_one_launcher(config: RunConfig) -> None:
    folder, _ = new_run(config, name=None)
    status = RunStatus.begin()
    status.write(folder.status)
    with pytest.raises(ConfigError, match="is being worked on"):
        resumed_run(folder.path, [])
    status.ended("stopped").write(folder.status)
    resumed_run(folder.path, [])


def test_a_launcher_that_was_killed_is_not_believed(tmp_path: Path) -> None:
    status = RunStatus.begin()
    assert (status.alive, status.shown) == (True, "running")
    reused_pid = status.model_copy(update={"pid_born": status.pid_born - 60})
    assert (reused_pid.alive, reused_pid.shown) == (False, "killed")
    failed = status.ended("failed", "LAUNCH: trainer ended")
    failed.write(tmp_path / "status.json")
    assert read_status(tmp_path / "status.json") == failed
    assert failed.shown == "failed"
