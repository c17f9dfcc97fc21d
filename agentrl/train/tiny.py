"""Builds the demo's model from nothing: a tokenizer from demonstrations and a small random Qwen-style LM.

Called by `agentrl model init` and at the start of a run without `model.path`. Invariant: the same environment,
config and seed give the same files, in Hugging Face's format.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from agentrl.core.config import ModelConfig
from agentrl.core.environment import Environment
from agentrl.core.errors import TrainError
from agentrl.train.model import write_weights
from agentrl.train.tokenizer import END, PAD, save_tokenizer, train_tokenizer

DEMONSTRATIONS = 400
"""Conversations that the tokenizer is trained on."""


def build_tiny_model(folder: Path, environment: Environment, config: ModelConfig, *, seed: int) -> None:
    """Write a model folder. TrainError when the shape is impossible."""
    tiny = config.tiny
    if tiny.hidden % tiny.heads or tiny.heads % tiny.kv_heads:
        raise TrainError(
            f"model.tiny: hidden = {tiny.hidden} must be a multiple of heads = {tiny.heads}, and that of "
            f"kv_heads = {tiny.kv_heads}"
        )
    demonstrations = list(itertools.islice(environment.demonstrations(seed, 0.5), DEMONSTRATIONS))
    tokenizer = train_tokenizer(demonstrations, environment.tools, renderer=config.renderer, vocab_size=tiny.vocab_size)
    folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, folder, context=tiny.context)
    shape = Qwen2Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=tiny.hidden,
        intermediate_size=3 * tiny.hidden,
        num_hidden_layers=tiny.layers,
        num_attention_heads=tiny.heads,
        num_key_value_heads=tiny.kv_heads,
        max_position_embeddings=tiny.context,
        tie_word_embeddings=True,
        # At the usual 0.02 attention in so narrow a model is too faint to learn copying within a thousand steps.
        initializer_range=tiny.hidden**-0.5,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(END),
        pad_token_id=tokenizer.token_to_id(PAD),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(shape)
    shape.architectures = [Qwen2ForCausalLM.__name__]
    shape.save_pretrained(folder)
    write_weights(model, folder)
