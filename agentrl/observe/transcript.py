"""One episode as a page that a person reads: what the model saw, wrote and got. Used by the report and by `runs`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from agentrl.core.types import Episode, Message, Scored, ToolCall


def transcript(episode: Episode) -> str:
    """Markdown: the facts as a table, then the conversation."""
    return "\n".join([*_head(episode), "", *_conversation(episode.attempt.transcript)]).rstrip() + "\n"


def _head(episode: Episode) -> Iterator[str]:
    attempt, outcome = episode.attempt, episode.outcome
    if isinstance(outcome, Scored):
        parts = ", ".join(f"{name} {value:g}" for name, value in outcome.parts.items())
        result = f"reward {outcome.reward:g}" + (f" ({parts})" if parts else "")
    else:
        result = f"failed: {outcome.code} (blame {outcome.blame}): {outcome.detail}"
    trained = sum(sum(path.loss_mask) for path in episode.trajectories)
    versions = sorted({v for path in episode.trajectories for v in path.policy_versions if v is not None})
    timings = episode.timings
    facts = {
        "Result": result,
        "Ended": f"{attempt.stop} after {attempt.turns} turns",
        "Task": f"`{episode.task.id}` of `{episode.task.env}` (version {episode.env_version})",
        "Sampled tokens": f"{trained}",
        "Policy version": ", ".join(map(str, versions)) or "none",
        "Sandbox": f"`{episode.sandbox_id}`" if episode.sandbox_id else "none",
        "Seconds": f"{timings.total_s:.2f} (model {timings.model_s:.2f}, sandbox {timings.sandbox_s:.2f}, "
        f"reward {timings.reward_s:.2f}, queue {timings.queue_s:.2f})",
        "Verifier": outcome.verifier or "none",
    }
    yield f"# Episode {episode.id}"
    yield ""
    yield "| | |"
    yield "|---|---|"
    for name, value in facts.items():
        yield f"| {name} | {_cell(value)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _conversation(messages: tuple[Message, ...]) -> Iterator[str]:
    titles = {"system": "System", "user": "User", "assistant": "Model", "tool": "Tool"}
    turn = 0
    for message in messages:
        turn += message.role == "assistant"
        number = f" (turn {turn})" if message.role == "assistant" else ""
        yield f"## {titles[message.role]}{number}"
        yield ""
        if message.reasoning:
            yield from _fenced(message.reasoning, "reasoning")
        if message.content or not (message.tool_calls or message.reasoning):
            yield from _fenced(message.content, "")
        for call in message.tool_calls:
            yield from _fenced(_arguments(call), f"call {call.name}")


def _arguments(call: ToolCall) -> str:
    """A call with one string argument, such as a shell command, reads best as that string."""
    if call.arguments is None:
        return call.raw
    values = list(call.arguments.values())
    return values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(dict(call.arguments), indent=1)


def _fenced(text: str, label: str) -> Iterator[str]:
    """A fence longer than any run of backticks inside, so that no content can close it."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    yield from (f"{fence}{label}", text, fence, "")
