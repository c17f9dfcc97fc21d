"""Trains the demo model's tokenizer on demonstrations. Called by `tiny`.

Invariant: it is lossless on any text (byte-level BPE), and a word is the same token wherever it stands, so that
copying a word from a tool's output into a command is copying a token.
"""

from __future__ import annotations

import itertools
import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from agentrl.core.rendering import load_renderer
from agentrl.core.types import Demonstration, Tool

END = "<|im_end|>"
PAD = "<|endoftext|>"
SPECIAL = (
    PAD, "<|im_start|>", END, "<think>", "</think>",
    "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
)  # fmt: skip
"""Of the Qwen family, so that its typed renderers apply."""
PHRASE = 12
"""Characters from which text that every prompt holds becomes one token."""
PIECES = r"[A-Za-z]+|[0-9]|[^A-Za-z0-9]+"


def train_tokenizer(
    demonstrations: Sequence[Demonstration], tools: Sequence[Tool], *, renderer: str, vocab_size: int
) -> Tokenizer:
    """A tokenizer of at most `vocab_size` tokens for the conversations that `renderer` makes of these.

    What the template and the system prompt say alike in every conversation is a handful of tokens: it tells a
    tiny model nothing, and would be most of its context.
    """
    spans = _rendered(demonstrations, tools, renderer)
    phrases = _common_phrases(spans)
    tokenizer = _byte_level("|".join([*(re.escape(phrase) for phrase in phrases), PIECES]))
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(phrases), special_tokens=list(SPECIAL), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator((_without(text, phrases) for texts in spans for text, _ in texts), trainer)
    return _with_phrases(tokenizer, phrases)


def save_tokenizer(tokenizer: Tokenizer, folder: Path, *, context: int) -> None:
    """The files that `agentrl.core.rendering` and `PreTrainedTokenizerFast` read.

    Not `AutoTokenizer`: for a model of type qwen2 it replaces the pre-tokenizer of the file by Qwen2's.
    """
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def _byte_level(pieces: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pieces), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


Span = tuple[str, bool]
"""Text between special tokens, and whether the model spoke it."""


def _rendered(demonstrations: Sequence[Demonstration], tools: Sequence[Tool], renderer: str) -> list[list[Span]]:
    """Each conversation as the renderer writes it, through a tokenizer that has single bytes only."""
    plain = _byte_level(PIECES)
    plain.train_from_iterator(
        [], trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    )
    plain.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    special = {plain.token_to_id(token) for token in SPECIAL}
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(plain, Path(folder), context=1 << 20)
        speaking = load_renderer(Path(folder), renderer)
        conversations = [speaking.demonstration(one.messages, tools) for one in demonstrations]
    return [_spans(plain, ids, mask, special) for ids, mask in conversations]


def _spans(plain: Tokenizer, ids: Sequence[int], mask: Sequence[int], special: set[int]) -> list[Span]:
    runs = itertools.groupby(zip(ids, mask, strict=True), key=lambda pair: (pair[0] in special, bool(pair[1])))
    return [
        (plain.decode([token for token, _ in run], skip_special_tokens=False), spoken)
        for (is_special, spoken), run in runs
        if not is_special
    ]


def _common_phrases(conversations: Sequence[Sequence[Span]]) -> list[str]:
    """Spans and lines of what is not the model's own that every conversation holds, longest first."""
    held: Counter[str] = Counter()
    for spans in conversations:
        texts = {text for text, spoken in spans if not spoken}
        held.update(texts | {line for text in texts for line in re.findall(r"\n*[^\n]+", text)})
    common = [text for text, count in held.items() if count == len(conversations) and len(text) >= PHRASE]
    phrases: list[str] = []
    for text in sorted(common, key=lambda text: (-len(text), text)):
        if not any(text in longer for longer in phrases):
            phrases.append(text)
    return phrases


def _without(text: str, phrases: Iterable[str]) -> str:
    for phrase in phrases:
        text = text.replace(phrase, "\n")
    return text


def _with_phrases(tokenizer: Tokenizer, phrases: Sequence[str]) -> Tokenizer:
    """The tokenizer with each phrase as one more entry of its vocabulary, found whole because of `ignore_merges`."""
    tree = json.loads(tokenizer.to_str())
    vocabulary = tree["model"]["vocab"]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for phrase in phrases:
        [(encoded, _)] = byte_level.pre_tokenize_str(phrase)
        vocabulary.setdefault(encoded, len(vocabulary))
    return Tokenizer.from_str(json.dumps(tree))
