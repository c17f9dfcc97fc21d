"""A Hugging Face causal LM as the trainer uses it: load, log-probabilities of packs, weights, save.

Called by `trainer`, `warm_start` and `launch`. Invariant: logits exist only at positions that predict a
trained token, and rows are shared only after this very model showed that it keeps sequences apart.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from agentrl.core.errors import TrainError
from agentrl.train.packing import Pack, TokenSequence, pack

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SEPARATION = 1e-4
"""Largest logprob difference, packed against alone, that counts as separate in fp32."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Of the trained tokens of one pack, fp32 [N] each."""

    logprobs: Tensor
    entropy: Tensor
    """Nats; detached."""
    first: Tensor
    """bool: the token is the model's first choice."""


def load_model(folder: Path, dtype: Literal["float32", "bfloat16"] = "float32") -> torch.nn.Module:
    """A causal LM from a Hugging Face folder, with PyTorch's attention. TrainError when it cannot be read."""
    transformers_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=DTYPES[dtype], attn_implementation="sdpa", local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise TrainError(f"{folder}: cannot load a causal LM: {error}; point model.path at a model folder") from error
    model.eval()  # dropout would make current and behaviour logprobs differ
    return model  # type: ignore[no-any-return]


def token_logprobs(model: torch.nn.Module, batch: Pack) -> TokenLogprobs:
    """Log-probabilities of the pack's trained tokens at their sampling temperature."""
    with _logits_at(model, batch.sources):
        output = model(input_ids=batch.token_ids, position_ids=batch.position_ids, attention_mask=None, use_cache=False)
    logits = output.logits[0].float() / batch.temperatures[:, None]
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(-1, batch.target_ids[:, None]).squeeze(-1)
    with torch.no_grad():
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        first = logprobs.amax(-1) <= chosen
    return TokenLogprobs(chosen, entropy, first)


@contextmanager
def _logits_at(model: torch.nn.Module, sources: Tensor) -> Iterator[None]:
    """Let the output head see only the flat positions `sources`, as one row of N."""
    head = model.get_output_embeddings()  # type: ignore[operator]

    def select(module: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Tensor]:
        hidden: Tensor = inputs[0]
        return (hidden.reshape(-1, hidden.shape[-1])[sources].unsqueeze(0),)

    handle = head.register_forward_pre_hook(select)
    try:
        yield
    finally:
        handle.remove()


def separates_rows(model: torch.nn.Module) -> bool:
    """Whether two sequences in one row give the same logprobs as each alone (recurrent models don't)."""
    vocabulary: int = model.get_output_embeddings().weight.shape[0]  # type: ignore[operator]
    ids = torch.arange(1, 25) % vocabulary
    pair = [TokenSequence(ids[:11], torch.arange(1, 11)), TokenSequence(ids[11:], torch.arange(1, 13))]
    with torch.no_grad():
        alone = [token_logprobs(model, pack([sequence], len(ids))[0]).logprobs for sequence in pair]
        both = _one_row(pair)
        together = token_logprobs(model, both).logprobs
    expected = torch.cat([alone[i] for i in both.members])
    return bool((together - expected).abs().max() <= SEPARATION)


def _one_row(pair: list[TokenSequence]) -> Pack:
    """`pair` in one row, which `pack` would do only if a longer sequence set the width."""
    ids = torch.cat([sequence.token_ids for sequence in pair])
    starts = [0, len(pair[0].token_ids)]
    sources = [start + sequence.targets - 1 for start, sequence in zip(starts, pair, strict=True)]
    return Pack(
        members=(0, 1),
        token_ids=ids[None],
        position_ids=torch.cat([torch.arange(len(sequence.token_ids)) for sequence in pair])[None],
        sources=torch.cat(sources),
        target_ids=torch.cat([sequence.token_ids[sequence.targets] for sequence in pair]),
        temperatures=torch.ones(sum(len(sequence.targets) for sequence in pair)),
    )


def weights_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Every weight once, by name: tied ones under their first name, and persistent buffers."""
    state = model.state_dict()
    named = {name: tensor.detach() for name, tensor in model.named_parameters()}
    named.update({name: tensor for name, tensor in model.named_buffers() if name in state})
    return named


def load_weights(model: torch.nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy every weight of `weights_of` in place. TrainError when names or shapes differ."""
    own = weights_of(model)
    differing = {name for name in own.keys() | tensors.keys() if _shape(own, name) != _shape(tensors, name)}
    if differing:
        raise TrainError(
            f"weights do not fit the model: {len(differing)} names or shapes differ, such as {min(differing)}; "
            "the run's model.path or model.tiny has changed since they were saved"
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


def _shape(tensors: Mapping[str, Tensor], name: str) -> torch.Size | None:
    return tensors[name].shape if name in tensors else None


def save_model(model: torch.nn.Module, source: Path, folder: Path) -> None:
    """Write a complete model folder: the weights, with every other file (config, tokenizer, template) of `source`."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.is_file() and not path.name.endswith((".safetensors", ".safetensors.index.json")):
            shutil.copyfile(path, folder / path.name)
    write_weights(model, folder)


def write_weights(model: torch.nn.Module, folder: Path) -> None:
    """Write `model.safetensors`, the file that `transformers` looks for."""
    tensors = {name: tensor.contiguous() for name, tensor in weights_of(model).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def probe_logprobs(model: torch.nn.Module, token_ids: tuple[int, ...]) -> tuple[float, ...]:
    """Log-probabilities of token_ids[1:] at temperature 1."""
    ids = torch.tensor(token_ids)
    with torch.no_grad():
        return tuple(
            token_logprobs(model, pack([TokenSequence(ids, torch.arange(1, len(ids)))], len(ids))[0]).logprobs.tolist()
        )
