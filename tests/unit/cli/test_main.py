"""The command line as people meet it: help, errors in one line, exit codes, and a start that imports no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.cli.main import ENTRIES, build, main, report
from agentrl.core.config import load_config
from agentrl.core.errors import LaunchError


def agentrl(*arguments: str) -> int:
    """Run a command in this process; its exit code."""
    try:
        main(arguments)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert agentrl("--help") == 0
    shown = capsys.readouterr().out
    for name in ENTRIES:
        assert f" {name} " in shown


@pytest.mark.parametrize("name", ENTRIES)
def test_every_command_has_help_of_its_own(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert agentrl(name, "--help") == 0
    assert f"agentrl {name}" in capsys.readouterr().out


def test_help_starts_without_the_rooms() -> None:
    code = (
        "import sys\nfrom agentrl.cli.main import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'sqlalchemy', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_unknown_command_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert agentrl("trian") == 2
    assert "'train'" in capsys.readouterr().err


def test_a_wrong_setting_is_one_red_line_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("[rollout]\ngrups = 3\n")
    assert agentrl("config", "check", str(path)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "CONFIG" in error
    assert "did you mean 'rollout.groups'?" in error


def test_an_uncorrected_run_is_refused_by_its_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "uncorrected.toml"
    path.write_text("[train.loss]\ncorrection = 'none'\n")
    assert agentrl("config", "check", str(path)) == 2
    assert "train.loss.correction" in capsys.readouterr().err
    assert agentrl("config", "check", str(path), "rollout.form=sync") == 0


def test_show_prints_a_tree_that_reads_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    path.write_text("seed = 7\n[train]\nsteps = 3\n")
    assert agentrl("config", "show", str(path), "train.lr=0.001") == 0
    again = tmp_path / "again.toml"
    again.write_text(capsys.readouterr().out)
    assert load_config(again) == load_config(path, ["train.lr=0.001"])


def test_the_traceback_of_a_process_comes_before_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    error = LaunchError("trainer ended with exit code 1", detail={"stderr": "Traceback [most recent]\nKeyError: 'x'"})
    assert report(error) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["Traceback [most recent]", "KeyError: 'x'", "LAUNCH trainer ended with exit code 1"]


def test_only_the_chosen_command_is_imported() -> None:
    assert len(build("").registered_commands) == len(ENTRIES)


def test_a_run_that_cannot_start_leaves_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert agentrl("train", f"dir={tmp_path}", "env.name=vualt") == 2
    assert "did you mean 'vault'?" in capsys.readouterr().err
    assert agentrl("train", f"dir={tmp_path}", "env.options.colour=red") == 2
    assert "unknown option 'colour'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_resume_needs_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert agentrl("train", "--resume") == 2
    assert "agentrl train --resume RUN_FOLDER" in capsys.readouterr().err
    assert agentrl("train", "--resume", str(tmp_path / "nothing")) == 2
    assert "no run" in capsys.readouterr().err


def test_two_files_are_one_too_many(capsys: pytest.CaptureFixture[str]) -> None:
    assert agentrl("train", "a.toml", "b.toml") == 2
    assert "give one file" in capsys.readouterr().err


def test_runs_are_listed_whatever_their_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert agentrl("runs", "list", "--dir", str(tmp_path)) == 0
    assert "no runs in" in capsys.readouterr().out
    for name, text in (("fresh", "seed = 3\n"), ("odd", "no toml at all")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").write_text(text)
    assert agentrl("runs", "list", "--dir", str(tmp_path)) == 0
    shown = capsys.readouterr().out
    assert "fresh" in shown
    assert "new" in shown
    assert "unreadable" in shown
