"""Finding environments and agents by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from agentrl.core.environment import Environment, Split
from agentrl.core.errors import PluginError
from agentrl.core.plugins import installed, load_agent, load_class, load_environment
from agentrl.core.protocols import Sandbox
from agentrl.core.types import Attempt, Failed, Message, Scored, Task, Tool, ToolCall, ToolResult


class Levels(Environment):
    """Takes an option, and has one tool."""

    name = "levels"
    version = "1"
    tools = (Tool(name="echo", description="Echo.", parameters={"type": "object"}),)

    def __init__(self, level: int = 1) -> None:
        self.level = level

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        yield Task(env=self.name, id="0", source=self.name)

    def messages(self, task: Task) -> Sequence[Message]:
        return ()

    async def act(self, task: Task, call: ToolCall, sandbox: Sandbox | None) -> ToolResult:
        return ToolResult(content=call.raw)

    async def score(self, task: Task, attempt: Attempt, sandbox: Sandbox | None) -> Scored | Failed:
        return Scored(reward=1.0)


def test_the_built_in_plugins_are_installed() -> None:
    assert installed("agentrl.envs")["vault"] == "envs.vault.environment:Vault"
    assert {"tool_loop", "external"} <= set(installed("agentrl.agents"))
    assert load_environment("vault", {}).name == "vault"


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(PluginError, match="did you mean 'vault'"):
        load_environment("vualt", {})


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("no.such.module:Class", "cannot import 'no.such.module'"),
        ("agentrl.core.types:NoSuchClass", "has no class 'NoSuchClass'"),
        ("agentrl.core.types:Task", "is not a subclass of agentrl.Environment"),
    ],
)
def test_a_target_that_is_no_environment_is_named(target: str, said: str) -> None:
    with pytest.raises(PluginError, match=said):
        load_environment(target, {})


def test_options_reach_the_constructor() -> None:
    environment = load_environment("envs.vault.environment:Vault", {})
    assert load_class("vault", "agentrl.envs") is type(environment)
    agent = load_agent("external", {"command": ["true"]})
    assert type(agent).__name__ == "External"


def test_an_unknown_option_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(PluginError, match=r"unknown option 'comand' .*did you mean 'command'"):
        load_agent("external", {"comand": ["true"]})


@pytest.mark.parametrize(
    ("name", "raw", "arguments", "content"),
    [
        ("echo", '{"a": 1}', {"a": 1}, '{"a": 1}'),
        ("eco", "{}", {}, "error: no tool 'eco', only echo"),
        ("echo", "[1]", None, "error: the arguments are not a JSON object"),
    ],
)
async def test_only_calls_that_make_sense_reach_act(
    name: str, raw: str, arguments: dict[str, object] | None, content: str
) -> None:
    environment = Levels(level=2)
    call = ToolCall(id="c", name=name, arguments=arguments, raw=raw)
    result = await environment.call_tool(next(environment.tasks("train", 0)), call, None)
    assert (result.content, result.done) == (content, False)
