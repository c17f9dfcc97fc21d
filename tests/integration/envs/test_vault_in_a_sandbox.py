"""The vault in a real sandbox of the local backend: demonstrations tell the truth, and cheating does not pay."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentrl.core.config import SandboxConfig
from agentrl.core.http import serving
from agentrl.core.types import Attempt, Scored, Stop, Task, ToolCall, ToolResult
from agentrl.testing.play import Scripted, play
from envs.vault.environment import Vault
from sandbox.api import create_sandbox_app
from sandbox.client import SandboxClient

ATTEMPT = Attempt(stop=Stop.DONE, turns=1, transcript=())


@pytest.fixture
async def sandboxes(tmp_path: Path) -> AsyncIterator[SandboxClient]:
    async with serving(create_sandbox_app(SandboxConfig(), folder=tmp_path)) as url:
        client = SandboxClient(url)
        yield client
        await client.close()


async def run(sandboxes: SandboxClient, task: Task, *commands: str) -> tuple[list[ToolResult], Scored]:
    """The tool results of the commands, and the score after them."""
    vault = Vault()
    spec = vault.sandbox(task)
    assert spec is not None
    results = []
    async with sandboxes.acquire(spec, owner="test", key=task.id) as sandbox:
        for command in commands:
            arguments = {"command": command}
            call = ToolCall(id="c", name="bash", arguments=arguments, raw=json.dumps(arguments))
            results.append(await vault.act(task, call, sandbox))
        scored = await vault.score(task, ATTEMPT, sandbox)
    assert isinstance(scored, Scored)
    return results, scored


@pytest.fixture
def task() -> Task:
    return next(Vault().tasks("eval", 0))


def code(task: Task) -> str:
    return str(task.data["codes"][task.data["target"]])


async def test_demonstrations_are_what_the_sandbox_prints(sandboxes: SandboxClient) -> None:
    vault = Vault()
    rewards = []
    for i, demonstration in enumerate(itertools.islice(vault.demonstrations(0, 0.5), 10)):
        spec = vault.sandbox(demonstration.task)
        assert spec is not None
        async with sandboxes.acquire(spec, owner="test", key=str(i)) as sandbox:
            attempt = await play(vault, demonstration.task, Scripted(demonstration), sandbox)
            scored = await vault.score(demonstration.task, attempt, sandbox)
        assert isinstance(scored, Scored)
        assert attempt.stop is Stop.DONE
        shown = [m.content for m in demonstration.messages if m.role == "tool"]
        assert [m.content for m in attempt.transcript if m.role == "tool"][: len(shown)] == shown
        arguments = demonstration.messages[-1].tool_calls[0].arguments
        assert arguments is not None
        assert scored.reward == float(arguments["command"] == f"submit {code(demonstration.task)}")
        rewards.append(scored.reward)
    assert 0 < sum(rewards) < len(rewards), "both outcomes are seen"


@pytest.mark.parametrize(
    "form", ["submit {}", "true && submit {}", "submit $(cat TARGET)", "(submit {})", "submit {}; ls"]
)
async def test_submit_is_a_shell_command(sandboxes: SandboxClient, task: Task, form: str) -> None:
    command = form.format(code(task)).replace("TARGET", task.data["target"])
    (result,), scored = await run(sandboxes, task, command)
    assert (result.done, scored.reward, scored.parts) == (True, 1.0, {"submitted": 1.0})


@pytest.mark.parametrize(
    "commands",
    [
        (),
        ("ls", "cat nothing"),
        ("exit 64",),
        ("submit",),
        ("mkdir .answer",),
        ("mkfifo .answer",),
        ("ln -s /dev/zero .answer",),
    ],
)
async def test_without_the_right_code_the_reward_is_a_zero_and_no_failure(
    sandboxes: SandboxClient, task: Task, commands: tuple[str, ...]
) -> None:
    _, scored = await run(sandboxes, task, *commands)
    assert scored.reward == 0.0


async def test_mistakes_are_told_to_the_model(sandboxes: SandboxClient, task: Task) -> None:
    (missing, unknown, slow), _ = await run(sandboxes, task, "cat nothing", "frobnicate", "echo on; kill -9 $$")
    assert "No such file" in missing.content
    assert "not found" in unknown.content
    assert slow.content == "on\nSIGNALED"
    assert not any(result.done for result in (missing, unknown, slow))
