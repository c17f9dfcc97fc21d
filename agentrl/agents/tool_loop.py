"""The in-process agent: ask the model, carry out its tool calls, until a tool says done, it answers, or a limit.

Constructed by `launch` from the entry point `tool_loop`; `rollout` runs it once an episode, many at a time.
Invariant: the model's mistakes come back to it as tool results; only bugs and broken services are raised.
"""

from __future__ import annotations

from typing import Any

import openai
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion
from openai.types.chat.chat_completion import Choice

from agentrl.agents.chat import message_from_wire, message_to_wire, tool_to_wire
from agentrl.core.errors import (
    AgentRLError,
    ContextOverflow,
    GatewayError,
    LimitReached,
    Ran,
    ServiceUnavailable,
    from_envelope,
)
from agentrl.core.http import http_client
from agentrl.core.protocols import AgentContext
from agentrl.core.types import Attempt, Message, Stop

LIMITS = {"tokens": Stop.TOKENS, "turns": Stop.TURNS, "calls": Stop.TURNS, "wall_s": Stop.DEADLINE}
"""What the gateway says was used up, as the end of an attempt that is still worth a score."""


class ToolLoop:
    """One OpenAI client serves every episode; each call brings its own session's URL and key."""

    def __init__(self, max_retries: int = 8) -> None:
        """`max_retries` with the SDK's backoff (0.5 s doubling to 8 s) outlasts a gateway's restart by far."""
        self._client = AsyncOpenAI(
            base_url="http://every-call-names-its-own.invalid",
            api_key="likewise",
            max_retries=max_retries,
            http_client=http_client(),  # type: ignore[arg-type]  # typed as httpx2; the SDK adapts httpx clients
        )

    async def run(self, context: AgentContext) -> Attempt:
        transcript = list(context.environment.messages(context.task))

        def ended(stop: Stop, turns: int) -> Attempt:
            return Attempt(stop=stop, turns=turns, transcript=tuple(transcript))

        for turn in range(1, context.limits.turns + 1):
            try:
                choice = await self._ask(context, transcript)
            except ContextOverflow:
                return ended(Stop.TOKENS, turn - 1)
            except LimitReached as error:
                return ended(LIMITS.get(str(error.detail.get("limit")), Stop.TURNS), turn - 1)
            reply = message_from_wire(choice.message)
            transcript.append(reply)
            if choice.finish_reason == "length":
                return ended(Stop.TOKENS, turn)
            if not reply.tool_calls:
                return ended(Stop.ANSWERED, turn)
            for call in reply.tool_calls:
                result = await context.environment.call_tool(context.task, call, context.sandbox)
                transcript.append(Message(role="tool", content=result.content, tool_call_id=call.id))
                if result.done:
                    return ended(Stop.DONE, turn)
        return ended(Stop.TURNS, context.limits.turns)

    async def close(self) -> None:
        await self._client.close()

    async def _ask(self, context: AgentContext, transcript: list[Message]) -> Choice:
        body: dict[str, Any] = {"model": context.model, "messages": [message_to_wire(m) for m in transcript]}
        if context.environment.tools:
            body["tools"] = [tool_to_wire(tool) for tool in context.environment.tools]
        try:
            # `chat.completions.create` walks every message through its typed schemas, 1 ms a call; `post` is the
            # layer below it, with the same retries and headers, and takes the episode's own address and key.
            completion = await self._client.post(
                f"{context.base_url}/chat/completions",
                body=body,
                cast_to=ChatCompletion,
                options={"headers": {"Authorization": f"Bearer {context.api_key}"}, "timeout": context.limits.wall_s},
            )
        except openai.APIStatusError as error:
            raise _typed(error) from error
        except openai.APIConnectionError as error:
            # Without its URL, which holds the session's key: errors are stored and logged.
            message = f"gateway, task {context.task.id}: no answer after retries: {error.__cause__ or error}"
            raise ServiceUnavailable(message, ran=Ran.MAYBE) from error
        if not completion.choices:
            raise GatewayError(f"gateway, task {context.task.id}: a completion without choices")
        return completion.choices[0]


def _typed(error: openai.APIStatusError) -> AgentRLError:
    """The error that the gateway sent, in the wording of its wire protocol or in our envelope."""
    if error.code == "context_length_exceeded":
        return ContextOverflow(error.message)
    body = error.body if isinstance(error.body, dict) else {}
    return from_envelope({"error": body}, f"gateway: HTTP {error.status_code}: {error.message}")
