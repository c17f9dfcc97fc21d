"""Programs on the host as agents: what they are given, and that none of them outlives its episode."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from agentrl.agents.external import External
from agentrl.core.environment import Environment, Split
from agentrl.core.errors import ConfigError
from agentrl.core.protocols import AgentContext, Sandbox
from agentrl.core.types import Attempt, Failed, Limits, Message, Scored, Stop, Task


class Riddle(Environment):
    name = "riddle"
    version = "1"

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        yield Task(env=self.name, id="r0", source=self.name)

    def messages(self, task: Task) -> Sequence[Message]:
        return (Message(role="system", content="Be brief."), Message(role="user", content="What is {api_key}?"))

    async def score(self, task: Task, attempt: Attempt, sandbox: Sandbox | None) -> Scored | Failed:
        return Scored(reward=1.0)


PROMPT = "Be brief.\n\nWhat is {api_key}?"


def context(wall_s: float = 20.0) -> AgentContext:
    environment = Riddle()
    task = next(environment.tasks("train", 0))
    return AgentContext(task, environment, "http://gw/s/k/v1", "secret", "policy", Limits(wall_s=wall_s), None)


def python(code: str, *words: str) -> External:
    return External([sys.executable, "-c", code, *words])


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_the_prompt_comes_on_stdin() -> None:
    attempt = await External(["cat"]).run(context())
    assert attempt.stop is Stop.ANSWERED
    assert attempt.transcript[-1] == Message(role="assistant", content=PROMPT)
    assert [m.role for m in attempt.transcript] == ["system", "user", "assistant"]


async def test_or_in_the_command_where_it_is_not_filled_twice() -> None:
    attempt = await External(["printf", "%s|", "{model}", "{prompt}", "{unknown}"]).run(context())
    assert attempt.transcript[-1].content == f"policy|{PROMPT}|{{unknown}}|"


async def test_the_session_comes_in_the_usual_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRL_TOKEN", "the run's")
    names = ["OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_AUTH_TOKEN", "MINE", "AGENTRL_TOKEN"]
    agent = External(["sh", "-c", "; ".join(f'echo "${name}"' for name in names)], env={"MINE": "at {base_url}"})
    attempt = await agent.run(context())
    seen = dict(zip(names, attempt.transcript[-1].content.split("\n"), strict=False))
    assert seen == {
        "OPENAI_BASE_URL": "http://gw/s/k/v1",
        "OPENAI_API_KEY": "secret",
        "ANTHROPIC_BASE_URL": "http://gw/s/k",
        "ANTHROPIC_AUTH_TOKEN": "secret",
        "MINE": "at http://gw/s/k/v1",
        "AGENTRL_TOKEN": "",
    }


async def test_a_program_that_fails_is_an_attempt_with_its_evidence() -> None:
    attempt = await python("import sys; print('so far'); sys.exit('broke')").run(context())
    assert attempt.stop is Stop.ERROR
    assert attempt.detail == "exit status 1\nbroke"
    assert attempt.transcript[-1].content == "so far\n"


async def test_at_the_deadline_the_whole_group_ends_and_its_output_is_kept() -> None:
    code = "sleep 600 & echo $! ; trap '' TERM; wait; sleep 600"
    attempt = await External(["sh", "-c", code]).run(context(wall_s=0.8))
    assert attempt.stop is Stop.DEADLINE
    assert not alive(int(attempt.transcript[-1].content))


async def test_children_left_behind_end_with_the_program() -> None:
    attempt = await External(["sh", "-c", "sleep 600 & echo $!"]).run(context())
    assert attempt.stop is Stop.ANSWERED
    child = int(attempt.transcript[-1].content)
    for _ in range(100):
        if not alive(child):
            return
        await asyncio.sleep(0.02)
    pytest.fail(f"process {child} is left")


async def test_cancelling_ends_the_program(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    running = asyncio.create_task(External(["sh", "-c", f"echo $$ > {pid_file}; exec sleep 600"]).run(context()))
    for _ in range(1000):
        if pid_file.exists() and pid_file.read_text().strip():
            break
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not alive(int(pid_file.read_text()))


async def test_long_output_keeps_its_end() -> None:
    attempt = await python("print('x' * 200_000 + 'end')").run(context())
    content = attempt.transcript[-1].content
    assert len(content) == 64 * 1024
    assert content.endswith("end\n")


async def test_a_program_that_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot start '/no/such/agent'"):
        await External(["/no/such/agent"]).run(context())


@pytest.mark.parametrize("command", [[], "mini -t {prompt}"])
def test_a_command_is_a_list_of_words(command: list[str] | str) -> None:
    with pytest.raises(ConfigError, match="list of words"):
        External(command)


async def test_each_episode_has_an_empty_folder_that_goes_away() -> None:
    attempt = await External(["sh", "-c", "pwd; ls -A; touch left"]).run(context())
    lines = attempt.transcript[-1].content.splitlines()
    assert len(lines) == 1
    assert not os.path.exists(lines[0])
