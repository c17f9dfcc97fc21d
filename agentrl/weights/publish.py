"""Writes policy versions to a folder that engines read. Called by the trainer's loop.

Invariant: a version is seen whole or not at all, and never changes once it is there. `latest` names the newest one.
"""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from agentrl.core.errors import WeightsError
from agentrl.core.files import flush
from agentrl.core.types import Probe, WeightManifest
from agentrl.weights.manifest import FILE, MANIFEST, describe, read_weights

log = logging.getLogger(__name__)

PROBE_TOKENS = 32
"""Length of a probe of scattered tokens; short enough to cost nothing, long enough to involve every weight."""
LATEST = "latest"


@dataclass(frozen=True, slots=True)
class WeightFolder:
    """`weights/vNNNNNN/{manifest.json,weights.safetensors}` and `weights/latest` of one run."""

    folder: Path
    vocab_size: int
    """Token ids of the probe are below it."""
    tolerance: float
    """Largest |logprob difference| that a replica may show on the probe."""
    keep: int
    """Newest versions that stay on disk."""

    def publish(
        self,
        tensors: Mapping[str, Tensor],
        *,
        version: int,
        step: int,
        prompt: tuple[int, ...] = (),
        probe: Callable[[tuple[int, ...]], tuple[float, ...]],
    ) -> tuple[WeightManifest, Path]:
        """Write a version; returns its manifest and the manifest's path.

        Replicas are probed with `prompt`, or with scattered tokens when it is empty; `probe` gives the logprobs of
        token_ids[1:]. WeightsError when the version exists already.
        """
        target = self._path(version)
        if target.exists():
            raise WeightsError(
                f"{target} exists: a version never names two sets of weights; publish under a new number"
            )
        ids = prompt or probe_tokens(self.vocab_size)
        held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        answers = Probe(token_ids=ids, logprobs=probe(ids), tolerance=self.tolerance)
        manifest = describe(held, version=version, step=step, probe=answers)
        draft = self.folder / f".{target.name}.draft"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        save_file(held, draft / FILE)
        (draft / MANIFEST).write_text(manifest.model_dump_json())
        for path in (draft / FILE, draft / MANIFEST, draft):
            flush(path)
        draft.rename(target)
        self._point(target)
        for old in self.versions()[: -self.keep]:
            shutil.rmtree(self._path(old))
        return manifest, target / MANIFEST

    def find(self, version: int, tensors: Mapping[str, Tensor]) -> tuple[WeightManifest, Path] | None:
        """The manifest of a version on disk and its path, if the version is whole and holds exactly these tensors."""
        path = self._path(version) / MANIFEST
        try:
            manifest, held = read_weights(path)
        except WeightsError as error:
            log.warning("version %d is published anew: %s", version, error)
            return None
        mine = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
        same = held.keys() == mine.keys() and all(_equal(held[name], mine[name]) for name in held)
        return (manifest, path) if same else None

    def versions(self) -> list[int]:
        """Versions on disk, oldest first."""
        return sorted(int(path.parent.name[1:]) for path in self.folder.glob(f"v*/{MANIFEST}"))

    def latest(self) -> int:
        """The newest version on disk, -1 before the first."""
        return max(self.versions(), default=-1)

    def _path(self, version: int) -> Path:
        return self.folder / f"v{version:06d}"

    def _point(self, target: Path) -> None:
        draft = self.folder / f".{LATEST}.draft"
        draft.write_text(target.name + "\n")
        flush(draft)
        draft.rename(self.folder / LATEST)
        flush(self.folder)


def probe_tokens(vocab_size: int) -> tuple[int, ...]:
    """The fixed prompt: scattered over the vocabulary, the same for every version."""
    draw = random.Random(0)
    return tuple(draw.randrange(vocab_size) for _ in range(PROBE_TOKENS))


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)
