"""Plays an episode without a model: a policy writes the assistant's messages, the environment does the rest.

Used by `agentrl env play`, by the tests of plugin packages, and by ours. Differs from `agents.tool_loop` in that
nothing is sampled: there is no gateway, and so no trajectory to train on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from agentrl.core.environment import Environment
from agentrl.core.protocols import Sandbox
from agentrl.core.types import Attempt, Demonstration, Message, Stop, Task

Policy = Callable[[Sequence[Message]], Awaitable[Message | None]]
"""The next assistant message after a transcript; None gives up."""
Watch = Callable[[Message], None]


class Scripted:
    """The policy of a demonstration: its assistant messages in order, whatever the tools answer."""

    def __init__(self, demonstration: Demonstration) -> None:
        self._moves = [message for message in demonstration.messages if message.role == "assistant"]

    async def __call__(self, transcript: Sequence[Message]) -> Message | None:
        played = sum(message.role == "assistant" for message in transcript)
        return self._moves[played] if played < len(self._moves) else None


async def play(
    environment: Environment,
    task: Task,
    policy: Policy,
    sandbox: Sandbox | None,
    watch: Watch = lambda message: None,
) -> Attempt:
    """Play until a tool says done, the policy answers without a call, or it gives up. `watch` sees each message."""
    transcript: list[Message] = []

    def add(message: Message) -> None:
        transcript.append(message)
        watch(message)

    for message in environment.messages(task):
        add(message)
    stop, turns = Stop.TURNS, 0
    while stop is Stop.TURNS and (reply := await policy(transcript)) is not None:
        turns += 1
        add(reply)
        if not reply.tool_calls:
            stop = Stop.ANSWERED
        for call in reply.tool_calls:
            result = await environment.call_tool(task, call, sandbox)
            add(Message(role="tool", content=result.content, tool_call_id=call.id))
            if result.done:
                stop = Stop.DONE
                break
    return Attempt(stop=stop, turns=turns, transcript=tuple(transcript))
