"""A shell task over several turns: list the files, read the right one, submit its code.

The built-in demo and the example to copy. Invariant: the sandbox is the only witness; `score` reads what
was submitted from it, and demonstrations show byte for byte what it would have printed.
"""

from __future__ import annotations

import itertools
import json
import random
import zlib
from collections.abc import Iterator, Sequence

from agentrl import (
    Attempt,
    Demonstration,
    Environment,
    ExecRequest,
    Failed,
    Message,
    Sandbox,
    SandboxFileError,
    SandboxSpec,
    Scored,
    Split,
    Task,
    Tool,
    ToolCall,
    ToolResult,
)

# Single words, so that a small vocabulary holds each as one token.
NAMES = ("alpha", "bravo", "cedar", "delta", "ember", "fjord", "grove", "heron")
CODES = ("otter", "pixel", "quartz", "raven", "silk", "tulip", "umbra", "velvet", "willow", "xenon", "yacht", "zebra")
FILES = 4
EVAL_SHARE = 8
"""One task in this many belongs to the eval split."""
SUBMITTED = 64
"""Exit status of a command that submitted; ends the episode."""
PRELUDE = f'submit() {{ printf %s "$1" > .answer; exit {SUBMITTED}; }}\n'


class Vault(Environment):
    name = "vault"
    version = "1"
    tools = (
        Tool(
            name="bash",
            description="Run a command.",
            parameters={"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        ),
    )

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        rng = random.Random(f"vault {split} {seed}")
        for i in itertools.count():
            yield Task(env=self.name, id=f"{split}-{seed}-{i}", source=self.name, data=_draw(rng, split))

    def messages(self, task: Task) -> Sequence[Message]:
        return (
            Message(role="system", content="Run one command a turn. End with submit CODE."),
            Message(role="user", content=f"Find the code in {task.data['target']}."),
        )

    def sandbox(self, task: Task) -> SandboxSpec:
        return SandboxSpec(files={name: f"{code}\n" for name, code in task.data["codes"].items()})

    async def act(self, task: Task, call: ToolCall, sandbox: Sandbox | None) -> ToolResult:
        assert sandbox is not None
        command = (call.arguments or {}).get("command")
        if not isinstance(command, str) or "\0" in command:
            return ToolResult(content="error: the command is no text")
        argv = ("sh", "-c", PRELUDE + command)
        result = await sandbox.exec(ExecRequest(argv=argv, timeout_s=5.0, cap_bytes=512))
        output = (result.stdout + result.stderr).decode(errors="replace").strip()
        if result.status != "EXITED":
            output = f"{output}\n{result.status}".strip()
        return ToolResult(content=output, done=result.exit_code == SUBMITTED)

    async def score(self, task: Task, attempt: Attempt, sandbox: Sandbox | None) -> Scored | Failed:
        assert sandbox is not None
        try:
            answer = (await sandbox.read(".answer")).decode(errors="replace").strip()
        except SandboxFileError:
            return Scored(reward=0.0, parts={"submitted": 0.0})
        right = answer == task.data["codes"][task.data["target"]]
        return Scored(reward=float(right), parts={"submitted": 1.0})

    def price(self, failure: Failed, task: Task) -> Scored:
        return Scored(reward=0.0, parts={"submitted": 0.0})

    def demonstrations(self, seed: int, noise: float) -> Iterator[Demonstration]:
        """Bad moves: the wrong file with probability `noise`, a code that was not read with a quarter of it."""
        rng = random.Random(f"vault demonstrations {seed}")
        for task in self.tasks("train", seed):
            codes, target = task.data["codes"], task.data["target"]
            wrong = rng.choice([name for name in codes if name != target])
            opened = wrong if rng.random() < noise else target
            code = rng.choice(CODES) if rng.random() < noise / 4 else codes[opened]
            first = _turn("ls", "\n".join(sorted(codes)))
            second = _turn(f"cat {opened}", codes[opened])
            # The last tool result ends the episode: no model ever reads it, so a demonstration ends before it.
            last = _turn(f"submit {code}", "")[:1]
            yield Demonstration(task=task, messages=(*self.messages(task), *first, *second, *last))


def _draw(rng: random.Random, split: Split) -> dict[str, object]:
    """The split is a property of the drawn task itself, so no seed can put one task in both."""
    while True:
        names = rng.sample(NAMES, FILES)
        codes = dict(zip(names, rng.sample(CODES, FILES), strict=True))
        data: dict[str, object] = {"codes": codes, "target": rng.choice(names)}
        if (zlib.crc32(json.dumps(data, sort_keys=True).encode()) % EVAL_SHARE == 0) == (split == "eval"):
            return data


def _turn(command: str, output: str) -> tuple[Message, Message]:
    call = ToolCall.of("bash", {"command": command}, id=f"call-{command}")
    return (
        Message(role="assistant", tool_calls=(call,)),
        Message(role="tool", content=output, tool_call_id=call.id),
    )
