"""Messages to tokens and back, by a typed renderer of the `renderers` package over our own tokenizer adapter.

Called by the gateway for every call and by the trainer's warm start, so that demonstrations are tokenised
exactly as served conversations are. Needs neither torch nor transformers. Invariants: text that a message
or a tool brings never becomes a special token; `extend` keeps the tokens it is given, or returns None.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any
from uuid import uuid4

import renderers
from pydantic_core import from_json
from renderers.configs import config_from_name
from tokenizers import Tokenizer

from agentrl.core.errors import ConfigError
from agentrl.core.types import Message, Tool, ToolCall

# Unicode noncharacters. Every MARK in quoted text is followed by BREAK (inside a special token's literal) or by
# KEEP (the text itself held a MARK), so that quoting can be undone exactly.
MARK, KEEP, BREAK = "\ufdd0", "\ufdd1", "\ufdd2"

CACHED_PIECE = 4096
"""Characters up to which a text's tokens are kept for the next time."""

Ids = tuple[int, ...]


class TokenizerAdapter:
    """What `renderers` needs of a tokenizer, over `tokenizer.json` alone.

    Special tokens are recognised in template text only: in text that went through `quote`, the
    literal `<|im_end|>` is encoded as ordinary characters.
    """

    def __init__(self, folder: Path) -> None:
        data = _read(folder / "tokenizer.json")
        settings_path = folder / "tokenizer_config.json"
        settings: dict[str, Any] = json.loads(_read(settings_path)) if settings_path.exists() else {}
        tree = json.loads(data)
        literals = sorted((t["content"] for t in tree["added_tokens"]), key=len, reverse=True)
        self._full = Tokenizer.from_str(data.decode())
        # Without its added tokens the tokenizer has no way to turn text into a special token.
        self._plain = Tokenizer.from_str(json.dumps({**tree, "added_tokens": [], "post_processor": None}))
        self._special = re.compile("(" + "|".join(map(re.escape, literals)) + ")") if literals else re.compile("(?!)")
        # Templates repeat: headers, newlines, and the system prompt with its tools in every episode of a run.
        self._encode_piece = lru_cache(maxsize=4096)(self._encode_plain)
        self.fingerprint = hashlib.sha256(data).hexdigest()[:16]
        self.name_or_path = str(settings.get("name_or_path") or folder)
        self.vocab_size = int(self._full.get_vocab_size(with_added_tokens=True))
        self.eos_token_id = self._id_of(settings.get("eos_token"))
        self.unk_token_id = self._id_of(settings.get("unk_token"))

    def _id_of(self, token: str | Mapping[str, Any] | None) -> int | None:
        literal = token["content"] if isinstance(token, Mapping) else token
        return None if literal is None else self._full.token_to_id(literal)

    def quote(self, text: str) -> str:
        """Mark `text` as data, so that no special token is recognised in it."""
        if MARK in text:
            text = text.replace(MARK, MARK + KEEP)
        if self._special.search(text):
            text = self._special.sub(lambda found: found[0][:1] + MARK + BREAK + found[0][1:], text)
        return text

    def encode(self, text: str, **_: Any) -> list[int]:
        ids: list[int] = []
        for piece in self._special.split(text):
            if not piece:
                continue
            special = self._full.token_to_id(piece) if self._special.fullmatch(piece) else None
            if special is not None:
                ids.append(special)
            else:
                ids.extend(self._encode_piece(piece) if len(piece) <= CACHED_PIECE else self._encode_plain(piece))
        return ids

    def _encode_plain(self, piece: str) -> list[int]:
        if MARK in piece:
            piece = piece.replace(MARK + BREAK, "").replace(MARK + KEEP, MARK)
        ids: list[int] = self._plain.encode(piece, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False, **_: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return str(self._full.decode(ids, skip_special_tokens=skip_special_tokens))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self._full.token_to_id(tokens)
        return [self._full.token_to_id(token) for token in tokens]


class ConversationRenderer:
    """One model family's template, in the types of `core`. Stateless after construction."""

    def __init__(self, tokenizer: TokenizerAdapter, name: str) -> None:
        self.tokenizer = tokenizer
        config = config_from_name(name)
        self._renderer = renderers.create_renderer(tokenizer, config)
        retained = self._renderer.config.model_copy(update={"thinking_retention": "all"})
        self._retaining = renderers.create_renderer(tokenizer, retained)
        settings = self._renderer.config.model_dump_json()
        self.tokenizer_fingerprint = tokenizer.fingerprint
        digest = hashlib.sha256(settings.encode()).hexdigest()[:8]
        self.fingerprint = f"{self._renderer.config.name}@renderers-{renderers.__version__}+{digest}"
        self.stop_token_ids: Ids = tuple(self._renderer.get_stop_token_ids())

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Ids:
        """The whole conversation, ready for the model to answer."""
        rendered = self._renderer.render_ids(
            [self._message(m) for m in messages], tools=self._tools(tools), add_generation_prompt=True
        )
        return tuple(rendered)

    def extend(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        reasoned: bool = True,
    ) -> Ids | None:
        """`prompt_ids + completion_ids` kept as they are, plus the new messages; None when the template forbids it.

        `reasoned` says whether the kept turns hold reasoning: templates strip that at a new user message, so
        the tokens cannot be kept then. Closers of a cut completion are part of what is added.
        """
        renderer = self._renderer if reasoned else self._retaining
        kept = [*prompt_ids, *completion_ids]
        bridged = renderer.bridge_to_next_turn(
            list(prompt_ids), list(completion_ids), [self._message(m) for m in new_messages], tools=self._tools(tools)
        )
        if bridged is None or bridged.token_ids[: len(kept)] != kept:
            return None
        return tuple(bridged.token_ids)

    def parse(
        self, completion_ids: Sequence[int], tools: Sequence[Tool] = (), prompt_ids: Sequence[int] = ()
    ) -> Message:
        """The assistant message in sampled tokens. Without tools, call markup stays text.

        A call that is not well formed has `arguments` None and the model's own text in `raw`.
        """
        ids = list(completion_ids)
        parsed = self._renderer.parse_response(ids, tools=self._tools(tools), prompt_ids=list(prompt_ids))
        content, calls = parsed.content, parsed.tool_calls
        if calls and not tools:
            first = calls[0].token_span
            end = next((i for i, token in enumerate(ids) if token in self.stop_token_ids), len(ids))
            content += self.tokenizer.decode(ids[first[0] : end]) if first else "".join(c.raw for c in calls)
            calls = []
        return Message(
            role="assistant",
            content=content,
            reasoning=parsed.reasoning_content,
            tool_calls=tuple(_tool_call(call) for call in calls),
        )

    def sampled(self, message: Message, tools: Sequence[Tool] = ()) -> Ids:
        """An assistant message as the model would have sampled it, closer included; for demonstrations."""
        # A tool result behind it keeps the template from treating the message as the last one, which gets an
        # empty reasoning block that nobody wrote.
        frame = [Message(role="user"), message, Message(role="tool")]
        rendered = self._renderer.render([self._message(m) for m in frame], tools=self._tools(tools))
        rows = zip(rendered.token_ids, rendered.message_indices, rendered.sampled_mask, strict=True)
        return tuple(token for token, index, by_model in rows if by_model and index == 1)

    def opening(self, tools: Sequence[Tool], name: str = "") -> Ids:
        """How an answer begins that calls the tool `name`, or any tool: what all such calls have in common.

        () where no call can follow a prompt at once, as where the prompt has opened the model's reasoning.
        """
        # The pairs differ in their first character from where the choice is the model's.
        arguments: Sequence[Mapping[str, Any]] = ({}, {"a": 1})
        calls = [(name, given) for given in arguments] if name else [("a", {}), ("Z", {})]
        before = self.prompt([Message(role="user")], tools)
        written = [self._called(ToolCall(id="", name=n, arguments=a, raw=""), tools) for n, a in calls]
        if any(ids[: len(before)] != before for ids in written):
            return ()
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*written, strict=False))
        return tuple(token for token, _ in same)[len(before) :]

    def _called(self, call: ToolCall, tools: Sequence[Tool]) -> Ids:
        """A conversation in which an empty user message is answered by this call."""
        frame = [Message(role="user"), Message(role="assistant", tool_calls=(call,)), Message(role="tool")]
        return tuple(self._renderer.render_ids([self._message(m) for m in frame], tools=self._tools(tools)))

    def demonstration(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> tuple[Ids, Ids]:
        """A worked conversation as the gateway would have recorded it: token ids, and 1 where the model speaks."""
        ids: Ids = ()
        mask: list[int] = []
        spoken: Ids = ()
        waiting: list[Message] = []
        reasoned = False
        for message in messages:
            if message.role != "assistant":
                waiting.append(message)
                continue
            if not mask:
                prompt: Ids | None = self.prompt(waiting, tools)
            else:
                prompt = self.extend(ids[: -len(spoken)], spoken, waiting, tools, reasoned=reasoned)
            if prompt is None:
                raise ConfigError(
                    f"{self.fingerprint}: the template cannot extend a conversation over a message of role "
                    f"{waiting[-1].role if waiting else 'assistant'!r}: split the demonstration there"
                )
            spoken = self.sampled(message, tools)
            mask += [0] * (len(prompt) - len(ids)) + [1] * len(spoken)
            ids, waiting = prompt + spoken, []
            reasoned = reasoned or bool(message.reasoning)
        return ids, tuple(mask)

    def _message(self, message: Message) -> dict[str, Any]:
        quote = self.tokenizer.quote
        out: dict[str, Any] = {"role": message.role, "content": quote(message.content)}
        if message.reasoning:
            out["reasoning_content"] = quote(message.reasoning)
        if message.tool_call_id is not None:
            out["tool_call_id"] = quote(message.tool_call_id)
        if message.tool_calls:
            out["tool_calls"] = [self._call(call) for call in message.tool_calls]
        return out

    def _call(self, call: ToolCall) -> dict[str, Any]:
        arguments = self._quoted(call.raw if call.arguments is None else call.arguments)
        quote = self.tokenizer.quote
        return {
            "type": "function",
            "id": quote(call.id),
            "function": {"name": quote(call.name), "arguments": arguments},
        }

    def _tools(self, tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
        out = []
        for tool in tools:
            function: dict[str, Any] = {"name": tool.name, "description": tool.description}
            function["parameters"] = dict(tool.parameters)
            present = {key: value for key, value in function.items() if value or key == "name"}
            out.append({"type": "function", "function": self._quoted(present)})
        return out or None

    def _quoted(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.tokenizer.quote(value)
        if isinstance(value, Mapping):
            return {self._quoted(key): self._quoted(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._quoted(item) for item in value]
        return value


def load_renderer(folder: Path, name: str) -> ConversationRenderer:
    """The renderer `name` (e.g. "qwen3", or "auto") over the tokenizer in `folder`. ConfigError says what is wrong."""
    try:
        return ConversationRenderer(TokenizerAdapter(Path(folder)), name)
    except ConfigError:
        raise
    except (AssertionError, AttributeError, NotImplementedError, TypeError, ValueError) as error:
        raise ConfigError(f"model.renderer = {name!r} does not fit the tokenizer in {folder}: {error}") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the tokenizer: {error.strerror}") from error


def _tool_call(call: Any) -> ToolCall:
    """A call as parsed by `renderers`, with the argument string that the model wrote."""
    ok = call.status == renderers.ToolCallParseStatus.OK and isinstance(call.arguments, dict)
    written = _written_arguments(call.raw)
    if ok and _parsed(written) != call.arguments:
        written = json.dumps(call.arguments, ensure_ascii=False)
    return ToolCall(
        id=call.id or f"call_{uuid4().hex[:24]}",
        name=call.name or _written_name(call.raw),
        arguments=call.arguments if ok else None,
        raw=written,
    )


def _written_arguments(raw: str) -> str:
    found = re.search(r'"arguments"\s*:\s*', raw)
    if found is None:
        return raw
    try:
        _, end = json.JSONDecoder().raw_decode(raw, found.end())
    except ValueError:
        return raw[found.end() :]
    return raw[found.end() : end]


def _written_name(raw: str) -> str:
    found = re.search(r'"name"\s*:\s*"([^"\\]+)"', raw)
    return found[1] if found else "malformed_tool_call"


def _parsed(text: str) -> Any:
    try:
        return from_json(text)
    except ValueError:
        return None
