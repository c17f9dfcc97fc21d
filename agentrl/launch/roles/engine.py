"""Role `engine-N`: one replica of the embedded engine, from the newest version that the trainer published.

Invariant: a restarted replica serves what the others serve, without waiting for the next publication.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from agentrl.core.types import WeightManifest
from agentrl.engine.server import run_engine
from agentrl.launch.context import RoleContext
from agentrl.launch.layout import RunFolder


async def run(context: RoleContext) -> None:
    model, version = newest_policy(context.folder, context.role)
    await run_engine(
        model, host=context.host, port=context.port, token=context.endpoints.token, version=version,
        config=context.config.engine, dtype=context.config.model.dtype,
    )  # fmt: skip


def newest_policy(folder: RunFolder, role: str) -> tuple[Path, int]:
    """A model folder with the newest published weights, and their version; version 0 is the warm start's result."""
    manifests = sorted(folder.weights.glob("v*/manifest.json"))
    if not manifests:
        return folder.warm, 0
    manifest = WeightManifest.model_validate_json(manifests[-1].read_bytes())
    composed = folder.engines / role
    shutil.rmtree(composed, ignore_errors=True)
    composed.mkdir(parents=True)
    for file in folder.warm.iterdir():
        if file.suffix != ".safetensors":
            (composed / file.name).symlink_to(file.resolve())
    # A copy, since old versions are deleted while this one may still be read.
    shutil.copyfile(manifests[-1].parent / manifest.file, composed / "model.safetensors")
    return composed, manifest.version
