"""Tiny random models, published versions of them, and plain forwards to compare with. For tests of the engine."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config
from transformers.utils import logging

from agentrl.core.types import Probe, TensorEntry, WeightManifest

VOCAB = 97
CONTEXT = 160
PROBE = (5, 1, 4, 1, 5, 9, 2, 6)
FAMILIES = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}


def tiny_model(
    family: str = "qwen2", *, tied: bool = True, seed: int = 0, hidden: int = 32, context: int = CONTEXT
) -> PreTrainedModel:
    """Two layers, grouped heads, and weights large enough for a distribution with peaks."""
    logging.disable_progress_bar()
    torch.manual_seed(seed)
    config = FAMILIES[family](
        vocab_size=VOCAB, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=hidden // 4, max_position_embeddings=context, tie_word_embeddings=tied,
        initializer_range=1.7 / hidden**0.5, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


@torch.inference_mode()
def logprobs(model: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """Log-distribution after each token [tokens, vocab], by one plain forward."""
    return torch.log_softmax(model(torch.tensor([list(token_ids)])).logits[0].float(), dim=-1)


def token_logprobs(model: PreTrainedModel, token_ids: Sequence[int]) -> list[float]:
    """Log-probabilities of token_ids[1:]."""
    table = logprobs(model, token_ids)[:-1]
    return table.gather(1, torch.tensor(list(token_ids[1:]))[:, None])[:, 0].tolist()


def publish(model: PreTrainedModel, folder: Path, version: int) -> Path:
    """Write the model as a published version; returns its manifest's path."""
    folder = folder / f"v{version:06d}"
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().contiguous() for name, value in model.named_parameters()}
    save_file(tensors, folder / "weights.safetensors")
    entries = tuple(
        TensorEntry(
            name=name, dtype=str(value.dtype).removeprefix("torch."), shape=tuple(value.shape), nbytes=value.nbytes,
            sha256=hashlib.sha256(value.numpy().tobytes()).hexdigest(),
        )
        for name, value in tensors.items()
    )  # fmt: skip
    probe = Probe(token_ids=PROBE, logprobs=tuple(token_logprobs(model, PROBE)), tolerance=1e-4)
    manifest = WeightManifest(
        version=version, step=version, file="weights.safetensors", tensors=entries, probe=probe,
        total_bytes=sum(entry.nbytes for entry in entries),
    )  # fmt: skip
    path = folder / "manifest.json"
    path.write_text(manifest.model_dump_json())
    return path
