"""Writes a small byte-level tokenizer with Qwen's special tokens, so that the `qwen3` renderer applies. For tests."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
SAMPLE = (
    "system user assistant hello world the file is a tool and the answer is done",
    '{"name": "bash", "arguments": {"command": "ls -l && cat file.txt"}}',
    "You may call one or more functions to assist with the user query within XML tags",
)


def write_tiny_tokenizer(folder: Path) -> Path:
    """A `tokenizer.json` of about 400 tokens in `folder`; every text encodes, byte by byte where it must."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(SPECIAL), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(SAMPLE, trainer)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    return folder
