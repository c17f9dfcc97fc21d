"""Environments and episodes on the terminal, and a person as the policy. Called by `agentrl env`."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.markup import escape

from agentrl.core.environment import Environment
from agentrl.core.types import Failed, Message, SandboxSpec, Scored, Tool, ToolCall

STYLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
MARGIN = 10
"""Columns of the role's name, left of what it said."""


def print_message(console: Console, message: Message) -> None:
    lines = [f"[dim]{escape(message.reasoning)}[/]"] if message.reasoning else []
    if message.content or not message.tool_calls:
        lines.append(escape(message.content))
    lines += [f"[bold]{escape(call.name)}[/] {escape(call.raw)}" for call in message.tool_calls]
    label = f"[{STYLES[message.role]}]{message.role:<{MARGIN}}[/]"
    console.print(label + f"\n{' ' * MARGIN}".join("\n".join(lines).split("\n")), highlight=False)


def print_tools(console: Console, tools: Sequence[Tool]) -> None:
    for tool in tools:
        console.print(f"[bold]tool[/] {escape(tool.name)}: {escape(tool.description)}")
        console.print_json(data=tool.parameters, indent=None)


def print_spec(console: Console, spec: SandboxSpec | None) -> None:
    if spec is None:
        console.print("[bold]sandbox[/] none")
        return
    limits = ", ".join(f"{name} {value}" for name, value in spec.limits)
    console.print(f"[bold]sandbox[/] image {spec.image or 'default'}, workdir {spec.workdir}, {limits}")
    for path, text in spec.files.items():
        console.print(f"  {escape(path)}: {escape(json.dumps(text))}", highlight=False)


def print_demonstration(console: Console, environment: Environment, seed: int) -> None:
    try:
        demonstration = next(environment.demonstrations(seed, 0.0))
    except NotImplementedError as error:
        console.print(f"[dim]{escape(str(error))}[/]")
        return
    console.rule(f"demonstration: task {demonstration.task.id}")
    for message in demonstration.messages:
        print_message(console, message)


def print_outcome(console: Console, outcome: Scored | Failed) -> None:
    if isinstance(outcome, Scored):
        parts = "".join(f", {name} {value:g}" for name, value in outcome.parts.items())
        console.print(f"[bold]reward {outcome.reward:g}[/]{escape(parts)}")
    else:
        console.print(f"[bold red]failed: {outcome.code}[/] (blame {outcome.blame}): {escape(outcome.detail)}")


class Human:
    """Reads moves from the terminal.

    Where there is one tool with one text parameter, a line is its argument. Elsewhere a move is `TOOL {JSON}`,
    and a line that begins with no tool's name is the answer. Ctrl-D or Ctrl-C gives up.
    """

    def __init__(self, console: Console, tools: Sequence[Tool]) -> None:
        self._console = console
        self._tools = {tool.name: tool for tool in tools}
        self._only = _only_text_parameter(tools)
        how = f"a line is the {self._only[1]} of {self._only[0]}" if self._only else "a move is TOOL {JSON}, or text"
        console.print(f"[dim]{how}; Ctrl-D gives up[/]")

    async def __call__(self, transcript: Sequence[Message]) -> Message | None:
        # Blocks the event loop, in which nothing else has to happen while the person thinks.
        try:
            with _ctrl_c_raises():
                line = self._console.input("[bold]> [/]")
        except (EOFError, KeyboardInterrupt):
            return None
        return self.move(line, f"call-{len(transcript)}")

    def move(self, line: str, call_id: str) -> Message:
        """The assistant message that a typed line stands for."""
        if self._only:
            name, parameter = self._only
            raw = json.dumps({parameter: line})
        else:
            name, _, raw = line.strip().partition(" ")
            raw = raw.strip() or "{}"
        if name not in self._tools:
            return Message(role="assistant", content=line)
        try:
            parsed = json.loads(raw)
        except ValueError:
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else None
        return Message(role="assistant", tool_calls=(ToolCall(id=call_id, name=name, arguments=arguments, raw=raw),))


@contextlib.contextmanager
def _ctrl_c_raises() -> Iterator[None]:
    """asyncio turns the first Ctrl-C into a cancellation, which a blocked prompt would not notice."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _only_text_parameter(tools: Sequence[Tool]) -> tuple[str, str] | None:
    """(tool, parameter) where there is nothing else to say."""
    if len(tools) != 1:
        return None
    properties = tools[0].parameters.get("properties", {})
    if len(properties) != 1:
        return None
    ((parameter, schema),) = properties.items()
    return (tools[0].name, parameter) if schema.get("type") == "string" else None
