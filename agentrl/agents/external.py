"""Any program on this host as the agent: it gets a prompt and, in the usual variables, the session's URL and key.

Constructed by `launch` from the entry point `external`; `rollout` runs it once an episode. The gateway sees every
model call, so nothing of the program needs to change. Invariant: when `run` returns or is cancelled, no process of
the program's group is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import tempfile
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import IO

from agentrl.core.errors import ConfigError
from agentrl.core.protocols import AgentContext
from agentrl.core.types import Attempt, Message, Stop

log = logging.getLogger(__name__)

GRACE_S = 2.0
"""Between TERM and KILL."""
SPARE_S = 0.5
"""Kept back from the episode's wall clock, so that the program's output is read before the episode is cut."""
KEPT_BYTES = 64 * 1024
"""Most bytes kept of each output stream, from its end."""


class External:
    """Runs `command` in an empty folder. Words of it may hold {prompt}, {model}, {base_url}, {api_key}, {sandbox_id}.

    A command without {prompt} gets the prompt on stdin. `env` adds variables, with the same placeholders.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        if isinstance(command, str) or not command:
            raise ConfigError('agent.options.command: write a list of words, e.g. ["mini", "-t", "{prompt}"]')
        self._command = tuple(command)
        self._env = dict(env or {})
        self._on_stdin = not any("{prompt}" in word for word in self._command)

    async def run(self, context: AgentContext) -> Attempt:
        opening = tuple(context.environment.messages(context.task))
        prompt = "\n\n".join(message.content for message in opening)
        values = {
            "prompt": prompt,
            "model": context.model,
            "base_url": context.base_url,
            "api_key": context.api_key,
            "sandbox_id": _sandbox_id(context),
        }
        argv = [_filled(word, values) for word in self._command]
        given = {name: _filled(text, values) for name, text in self._env.items()}
        env = {**_host_variables(), **session_variables(context), **given}
        # Files instead of pipes: a background child that holds one open delays nothing.
        with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            stdin.write(prompt.encode() if self._on_stdin else b"")
            stdin.seek(0)
            async with _started(argv, env, stdin, out, err) as process:
                stop = await _ending(process, max(context.limits.wall_s - SPARE_S, SPARE_S))
            answer, stderr = _tail(out), _tail(err)
        if stop is Stop.ERROR:
            log.warning("task %s: %s: exit status %s: %s", context.task.id, argv[0], process.returncode, stderr[-500:])
        return Attempt(
            stop=stop,
            turns=0,
            transcript=(*opening, Message(role="assistant", content=answer)),
            detail=f"exit status {process.returncode}\n{stderr}".strip(),
        )

    async def close(self) -> None:
        """Holds nothing between episodes."""


def session_variables(context: AgentContext) -> dict[str, str]:
    """Where OpenAI's and Anthropic's SDKs, and the harnesses over them, look for a server and a key."""
    return {
        "OPENAI_BASE_URL": context.base_url,
        "OPENAI_API_BASE": context.base_url,
        "OPENAI_API_KEY": context.api_key,
        "OPENAI_MODEL": context.model,
        "ANTHROPIC_BASE_URL": context.base_url.removesuffix("/v1"),
        "ANTHROPIC_AUTH_TOKEN": context.api_key,
        "ANTHROPIC_API_KEY": context.api_key,
        "ANTHROPIC_MODEL": context.model,
        "AGENTRL_TASK_ID": context.task.id,
        "AGENTRL_SANDBOX_ID": _sandbox_id(context),
    }


def _sandbox_id(context: AgentContext) -> str:
    return context.sandbox.id if context.sandbox is not None else ""


def _host_variables() -> dict[str, str]:
    """The host's environment without our own variables: an agent must not find the run's tokens there."""
    return {name: value for name, value in os.environ.items() if not name.startswith("AGENTRL_")}


def _filled(text: str, values: Mapping[str, str]) -> str:
    """Placeholders replaced in one pass, so that a prompt which holds `{api_key}` stays as it is."""
    return re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], match[0]), text)


@asynccontextmanager
async def _started(
    argv: Sequence[str], env: Mapping[str, str], stdin: IO[bytes], out: IO[bytes], err: IO[bytes]
) -> AsyncIterator[Process]:
    """The program as leader of its own process group; the whole group is gone on the way out."""
    with tempfile.TemporaryDirectory(prefix="agent-", ignore_cleanup_errors=True) as folder:
        try:
            process = await asyncio.create_subprocess_exec(
                *argv, env=env, cwd=folder, stdin=stdin, stdout=out, stderr=err, start_new_session=True
            )
        except OSError as error:
            raise ConfigError(f"agent.options.command: cannot start {argv[0]!r}: {error}") from error
        try:
            yield process
        finally:
            _signal_group(process, signal.SIGTERM)
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(GRACE_S):
                        await process.wait()
            finally:
                _signal_group(process, signal.SIGKILL)
                await process.wait()


def _signal_group(process: Process, number: signal.Signals) -> None:
    # The group outlives its leader while children are left; a missing group means that none is.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


async def _ending(process: Process, limit_s: float) -> Stop:
    try:
        async with asyncio.timeout(limit_s):
            status = await process.wait()
    except TimeoutError:
        return Stop.DEADLINE
    return Stop.ANSWERED if status == 0 else Stop.ERROR


def _tail(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - KEPT_BYTES))
    return file.read().decode(errors="replace")
