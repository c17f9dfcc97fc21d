"""`agentrl env`: the package that `new` writes, and how environments are shown and played."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from agentrl.cli.conversation import Human
from agentrl.cli.main import main
from agentrl.cli.scaffold import write_package
from agentrl.core.errors import ConfigError
from agentrl.core.types import Tool
from envs.vault.environment import Vault

CALC = Tool(name="calc", description="", parameters={"properties": {"a": {"type": "number"}, "b": {"type": "number"}}})


def agentrl(*arguments: str) -> None:
    """Run a command in this process; it must succeed."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert not ended.value.code


def human(*tools: Tool) -> Human:
    return Human(Console(file=io.StringIO()), tools)


def test_a_new_package_installs_with_pip_and_passes_its_own_test(tmp_path: Path) -> None:
    folder, site = tmp_path / "bug_hunt", tmp_path / "site"
    agentrl("env", "new", "bug_hunt", "--folder", str(folder))
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(site), str(folder)], check=True)
    env = os.environ | {"PYTHONPATH": str(site)}
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)],
        cwd=tmp_path, env=env, capture_output=True, text=True,
    )  # fmt: skip
    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert "3 passed" in tested.stdout
    listed = subprocess.run(
        [sys.executable, "-m", "agentrl.cli.main", "env", "list"], env=env, check=True, capture_output=True, text=True
    )
    assert "agentrl-env-bug-hunt 0.1.0 (bug_hunt_env.environment:BugHunt)" in listed.stdout


def test_a_new_environment_is_short_and_formatted(tmp_path: Path) -> None:
    write_package("bug_hunt", tmp_path)
    environment = tmp_path / "bug_hunt_env" / "environment.py"
    assert len(environment.read_text().splitlines()) < 60
    for check in (["check", "--extend-select", "I,B,UP,RUF"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *check, "--line-length", "120", "--no-cache", "."]
        ran = subprocess.run(ruff, cwd=tmp_path, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout


@pytest.mark.parametrize("name", ["Bug", "bug-hunt", "2bugs", "class", "bug_", "vault"])
def test_names_that_python_or_others_have_taken_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"'{name}'"):
        write_package(name, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("work")
    with pytest.raises(ConfigError, match="not an empty folder"):
        write_package("bug_hunt", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_list_names_version_and_source(capsys: pytest.CaptureFixture[str]) -> None:
    agentrl("env", "list")
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("vault")]
    assert Vault.version in row
    assert "envs.vault.environment:Vault" in row


def test_show_has_task_tools_sandbox_and_demonstration(capsys: pytest.CaptureFixture[str]) -> None:
    agentrl("env", "show", "vault", "--seed", "5")
    shown = capsys.readouterr().out
    task = next(Vault().tasks("train", 5))
    target = task.data["target"]
    assert f"task {task.id}" in shown
    assert "tool bash: Run a command." in shown
    assert f'{target}: "{task.data["codes"][target]}\\n"' in shown
    assert f'bash {{"command": "submit {task.data["codes"][target]}"}}' in shown


def test_play_runs_a_demonstration_in_a_real_sandbox(capsys: pytest.CaptureFixture[str]) -> None:
    agentrl("env", "play", "vault", "--seed", "5")
    shown = capsys.readouterr().out
    assert "ended: done after 3 turns" in shown
    assert "reward 1, submitted 1" in shown
    agentrl("env", "play", "vault", "--seed", "5", "--noise", "1")
    assert "reward 0, submitted 1" in capsys.readouterr().out


def test_with_one_text_parameter_a_line_is_its_argument() -> None:
    (call,) = human(*Vault.tools).move('echo "hi" | cat', "c").tool_calls
    assert (call.name, call.arguments) == ("bash", {"command": 'echo "hi" | cat'})


@pytest.mark.parametrize(
    ("line", "arguments"),
    [('calc {"a": 1, "b": 2}', {"a": 1, "b": 2}), ("calc", {}), ("calc [1]", None), ("calc {", None)],
)
def test_otherwise_a_line_names_the_tool(line: str, arguments: dict[str, int] | None) -> None:
    (call,) = human(CALC).move(line, "c").tool_calls
    assert (call.name, call.arguments) == ("calc", arguments)


def test_a_line_that_names_no_tool_is_the_answer() -> None:
    message = human(CALC).move("It is 3.", "c")
    assert (message.content, message.tool_calls) == ("It is 3.", ())
