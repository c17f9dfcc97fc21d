"""Loads a published policy version beside the one that serves. Used by the server's weight routes, off the loop.

Invariant: what `load` returns fits the serving model name by name and was checked against its manifest in full; a
version that does not is refused before anything of the serving model is touched.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file

from agentrl.core.errors import WeightsError
from agentrl.core.types import TensorEntry, WeightManifest


@dataclass(frozen=True, slots=True)
class StagedWeights:
    version: int
    tensors: Mapping[str, torch.Tensor]


def load(path: Path, serving: Mapping[str, torch.Tensor]) -> StagedWeights:
    """Read the manifest at `path` and its file; WeightsError says what does not match."""
    try:
        manifest = WeightManifest.model_validate_json(path.read_bytes())
        tensors = load_file(path.parent / manifest.file)
    except (OSError, ValidationError, SafetensorError) as error:
        raise WeightsError(f"{path}: cannot read this version: {error}") from error
    entries = {entry.name: entry for entry in manifest.tensors}
    _same_names(f"{path}: manifest against file", set(entries), set(tensors))
    for name, tensor in tensors.items():
        _check_entry(path, entries[name], tensor)
    total = sum(entry.nbytes for entry in manifest.tensors)
    if total != manifest.total_bytes:
        raise WeightsError(f"{path}: tensors have {total} bytes, total_bytes says {manifest.total_bytes}")
    _check_serving(path, tensors, serving)
    return StagedWeights(manifest.version, tensors)


def _check_entry(path: Path, entry: TensorEntry, tensor: torch.Tensor) -> None:
    found = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.nbytes)
    told = (entry.dtype, entry.shape, entry.nbytes)
    if found != told:
        raise WeightsError(f"{path}: {entry.name} has dtype, shape, bytes {found}; the manifest says {told}")
    digest = hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest()
    if digest != entry.sha256:
        raise WeightsError(f"{path}: {entry.name} has sha256 {digest}; the manifest says {entry.sha256}")


def _check_serving(path: Path, tensors: Mapping[str, torch.Tensor], serving: Mapping[str, torch.Tensor]) -> None:
    """Each serving tensor is supplied once at least; names tied to one tensor may be left out or must agree."""
    supplied: dict[int, str] = {}
    for name, tensor in tensors.items():
        if name not in serving:
            raise WeightsError(f"{path}: {name} is not a tensor of the serving model")
        current = serving[name]
        if (current.shape, current.dtype) != (tensor.shape, tensor.dtype):
            raise WeightsError(
                f"{path}: {name} is {tensor.dtype} {tuple(tensor.shape)}; the serving model has {current.dtype} "
                f"{tuple(current.shape)}"
            )
        first = supplied.setdefault(current.data_ptr(), name)
        if not torch.equal(tensors[first], tensor):
            raise WeightsError(f"{path}: {first} and {name} are tied in the serving model but differ here")
    missing = sorted(name for name, tensor in serving.items() if tensor.data_ptr() not in supplied)
    if missing:
        raise WeightsError(f"{path}: {len(missing)} tensors of the serving model are missing: {missing[:3]}")


def _same_names(where: str, left: set[str], right: set[str]) -> None:
    if left != right:
        raise WeightsError(f"{where}: only one of them has {sorted(left ^ right)[:3]}")
