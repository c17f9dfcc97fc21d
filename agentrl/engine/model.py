"""Runs a Hugging Face causal LM over the dense KV cache. Used by the scheduler's thread; torch lives here.

Invariant: with fp32 weights, logits equal those of a plain forward of the same tokens up to rounding (about 1e-6),
whatever else is in the batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import Cache
from transformers.utils import logging as transformers_logging

from agentrl.core.errors import ConfigError
from agentrl.engine.kv import KVCache


class RowCache(Cache):  # type: ignore[misc]
    """Transformers' view of the rows of one forward: writes new keys and values, and lends the rows' past."""

    def __init__(self, data: torch.Tensor) -> None:
        self.layers: list[Any] = []
        self._data = data
        self._rows = self._positions = torch.empty(0)
        self._source: torch.Tensor | None = None
        self._slice: slice | torch.Tensor = slice(0)
        self._length = 0

    def aim(
        self,
        rows: torch.Tensor,
        positions: torch.Tensor,
        source: torch.Tensor | None,
        attended: slice | torch.Tensor,
        length: int,
    ) -> None:
        """Where the next forward writes and reads.

        `rows`, `positions` [tokens] are the targets of the new tokens, which are all of the flattened batch or
        those at `source`. Attention sees the first `length` positions of the rows `attended`.
        """
        self._rows, self._positions, self._source = rows, positions, source
        self._slice, self._length = attended, length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        lent = []
        for kind, states in enumerate((key_states, value_states)):
            held = self._data[layer_idx, kind]
            new = states.transpose(1, 2).flatten(0, 1)
            held[self._rows, :, self._positions] = new if self._source is None else new[self._source]
            lent.append(held[:, :, : self._length][self._slice])
        return lent[0], lent[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


class ModelRunner:
    def __init__(self, folder: Path, *, rows: int, context: int, dtype: str = "auto", device: str = "cpu") -> None:
        """`dtype` is a torch dtype's name, or `auto` for the folder's own."""
        transformers_logging.disable_progress_bar()
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device)
        config = self.model.config
        _refuse_unsupported(config)
        self.context = min(context or config.max_position_embeddings, config.max_position_embeddings)
        self.vocab_size: int = config.vocab_size
        self.end_ids = frozenset(_listed(self.model.generation_config.eos_token_id) or _listed(config.eos_token_id))
        heads = config.num_attention_heads
        self.kv = KVCache(
            layers=config.num_hidden_layers,
            heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            rows=rows, context=self.context, dtype=self.model.dtype, device=device,
        )  # fmt: skip
        self._device = device
        self._cache = RowCache(self.kv.data)
        # transformers renamed the argument in 5.x; the old name warns on every call.
        takes_cache = "cache" in inspect.signature(self.model.forward).parameters
        self._cache_name = "cache" if takes_cache else "past_key_values"
        self._positions = torch.arange(self.context, device=device)

    def decode(self) -> torch.Tensor:
        """One token for every row of the decode slice; logits [top, vocab]."""
        kv, top = self.kv, self.kv.top
        at = kv.valid[:top]
        tokens = self._tensor(kv.tokens[np.arange(top), at])[:, None]
        positions = self._tensor(at.copy())
        length = int(at.max()) + 1
        self._cache.aim(self._positions[:top], positions, None, slice(0, top), length)
        mask = self._mask(positions[:, None], length)
        return self._forward(tokens, mask, positions[:, None])

    def prefill(self, rows: list[int], ends: list[int]) -> torch.Tensor:
        """Compute positions `valid[row]` up to `end` of each row; logits [rows, vocab] of the last one."""
        kv = self.kv
        index, last = np.array(rows), np.array(ends)
        starts = kv.valid[index]
        width = int((last - starts).max())
        # Padding is on the left, so that every row's last token is the batch's last column.
        at = last[:, None] - width + np.arange(width)
        real = at >= starts[:, None]
        at = np.where(real, at, starts[:, None])
        length = int(last.max())
        positions, attended = self._tensor(at), self._tensor(index)
        targets = np.broadcast_to(index[:, None], at.shape)[real]
        source = None if real.all() else self._tensor(np.flatnonzero(real))
        self._cache.aim(self._tensor(targets), self._tensor(at[real]), source, attended, length)
        tokens = self._tensor(kv.tokens[index[:, None], at])
        logits = self._forward(tokens, self._mask(positions, length), positions)
        kv.valid[index] = last
        return logits

    @torch.inference_mode()
    def score(self, tokens: list[int]) -> list[float]:
        """Log-probabilities of tokens[1:] under the serving weights."""
        ids = torch.tensor([tokens], device=self._device)
        logprobs = torch.log_softmax(self.model(input_ids=ids, use_cache=False).logits[0, :-1].float(), dim=-1)
        found: list[float] = logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()
        return found

    def tensors(self) -> dict[str, torch.Tensor]:
        """The serving weights by checkpoint name, tied ones under each of their names."""
        found: dict[str, torch.Tensor] = self.model.state_dict(keep_vars=True)
        return found

    @torch.no_grad()
    def install(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Overwrite the serving weights. The caller has checked names, shapes and dtypes; cached keys are void."""
        current = self.tensors()
        for name, tensor in weights.items():
            current[name].copy_(tensor)
        self.kv.clear()

    @torch.inference_mode()
    def _forward(self, tokens: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        output = self.model(
            input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1,
            **{self._cache_name: self._cache},
        )  # fmt: skip
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _mask(self, positions: torch.Tensor, length: int) -> torch.Tensor:
        """Additive causal mask [rows, 1, queries, length]."""
        ahead = self._positions[:length] > positions[..., None]
        mask = torch.zeros(ahead.shape, dtype=self.model.dtype, device=self._device)
        return mask.masked_fill_(ahead, -torch.inf)[:, None]

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


def _refuse_unsupported(config: Any) -> None:
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or hasattr(config, "kv_lora_rank"):
        raise ConfigError(
            f"model type {config.model_type!r} has layers {sorted(kinds)}: the embedded engine keeps a dense KV cache "
            "of full attention only; serve this model with vLLM (engine.kind = 'vllm', engine.urls)"
        )


def _listed(value: int | list[int] | None) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)
