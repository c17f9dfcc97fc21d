"""Published policy versions."""

from __future__ import annotations

from typing import Literal

from agentrl.core.types.value import Value


class TensorEntry(Value):
    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    sha256: str


class Probe(Value):
    """A fixed prompt with the log-probabilities that the trainer computes for it under these weights."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of token_ids[1:], so one shorter."""
    tolerance: float
    """Largest |difference| that a replica may show."""


class WeightManifest(Value):
    """Describes one published policy version on disk."""

    version: int
    step: int
    kind: Literal["full"] = "full"
    file: str
    """Name of the safetensors file beside the manifest."""
    total_bytes: int
    tensors: tuple[TensorEntry, ...]
    probe: Probe
