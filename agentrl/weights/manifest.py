"""Describes and checks a published policy version. Used by `publish`; engines check the same facts on their side.

Invariant: a manifest lists every tensor of its file with its exact bytes, so whoever loads the file can prove that
it holds what the trainer had.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from agentrl.core.errors import WeightsError
from agentrl.core.types import Probe, TensorEntry, WeightManifest

MANIFEST = "manifest.json"
FILE = "weights.safetensors"


def describe(tensors: Mapping[str, Tensor], *, version: int, step: int, probe: Probe) -> WeightManifest:
    """The manifest of contiguous CPU tensors."""
    entries = tuple(_entry(name, tensors[name]) for name in sorted(tensors))
    return WeightManifest(
        version=version,
        step=step,
        file=FILE,
        total_bytes=sum(entry.nbytes for entry in entries),
        tensors=entries,
        probe=probe,
    )


def read_manifest(path: Path) -> WeightManifest:
    try:
        return WeightManifest.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise WeightsError(f"{path}: not a weight manifest: {error}; publish the version again") from error


def read_weights(path: Path) -> tuple[WeightManifest, dict[str, Tensor]]:
    """A version's manifest and tensors, checked against each other. WeightsError names the first difference."""
    manifest = read_manifest(path)
    try:
        tensors = load_file(path.parent / manifest.file)
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{path.parent / manifest.file}: cannot be read: {error}; publish it again") from error
    found = describe(tensors, version=manifest.version, step=manifest.step, probe=manifest.probe)
    if found.tensors != manifest.tensors or found.total_bytes != manifest.total_bytes:
        told = {entry.name: entry for entry in manifest.tensors}
        held = {entry.name: entry for entry in found.tensors}
        differing = sorted(name for name in told.keys() | held.keys() if told.get(name) != held.get(name))
        what = ", ".join(differing[:3]) or f"total_bytes {manifest.total_bytes}"
        raise WeightsError(f"{path}: the file does not match its manifest at {what}; publish the version again")
    return manifest, tensors


def _entry(name: str, tensor: Tensor) -> TensorEntry:
    data = tensor.reshape(-1).view(torch.uint8).numpy().data
    return TensorEntry(
        name=name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        nbytes=tensor.nbytes,
        sha256=hashlib.sha256(data).hexdigest(),
    )
