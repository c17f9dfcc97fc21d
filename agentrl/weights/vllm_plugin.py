"""The `staged` weight-transfer backend of vLLM 0.32: the receiving end of `EngineClient.stage_weights` inside vLLM.

Loaded by vLLM through its `vllm.general_plugins` entry point, in vLLM's own environment, where agentrl is not
installed: this file imports nothing of it. `lay_out` makes the folder that goes on vLLM's PYTHONPATH.

Invariant: `update_weights` checks a version in full and only keeps it; the serving weights change in
`finish_weight_update` alone, all at once. So a version that fails its checks leaves vLLM serving what it served.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

BACKEND = "staged"
MODULE = "agentrl_vllm_plugin"
"""The copy's name in the plugin folder."""
SERVE = (
    "--enable-scale-out", "--enable-prompt-tokens-details", "--scheduling-policy", "priority",
    "--weight-transfer-config", json.dumps({"backend": BACKEND}), "--served-model-name", "policy",
)  # fmt: skip
"""What vLLM's API server must be started with, besides the model, to be an engine of a run."""
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1"}
"""Without it there are no routes for weights."""
TIED = "lm_head.weight"
"""Left out of a checkpoint when it is tied to the embedding."""


def lay_out(folder: Path) -> Path:
    """Write the plugin into `folder`, for `PYTHONPATH=folder`; start vLLM with `--weight-transfer-config`
    `{"backend": "staged"}`. Returns the folder."""
    info = folder / f"{MODULE}-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(__file__, folder / f"{MODULE}.py")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {MODULE.replace('_', '-')}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\nagentrl_staged = {MODULE}:register\n")
    return folder


def register() -> None:
    """The entry point. vLLM calls it in each of its processes, in some more than once."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, staged_engine())


def read_version(manifest_path: Path, checkpoint: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """The tensors of a published version, checked against its manifest and the serving checkpoint's shapes.

    Raises ValueError that says what does not match.
    """
    manifest = json.loads(manifest_path.read_text())
    tensors: dict[str, torch.Tensor] = load_file(manifest_path.parent / manifest["file"])
    entries = {entry["name"]: entry for entry in manifest["tensors"]}
    _same(manifest_path, "names of manifest and file", sorted(entries), sorted(tensors))
    for name, tensor in tensors.items():
        entry = entries[name]
        told = [entry["dtype"], entry["shape"], entry["nbytes"], entry["sha256"]]
        digest = hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest()
        found = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), tensor.nbytes, digest]
        _same(manifest_path, f"dtype, shape, bytes, sha256 of {name}", told, found)
    _same(manifest_path, "total_bytes", manifest["total_bytes"], sum(entry["nbytes"] for entry in entries.values()))
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wrong = {name for name in shapes.keys() | checkpoint.keys() if shapes.get(name) != checkpoint.get(name)}
    if checkpoint and wrong - {TIED}:
        raise ValueError(f"{manifest_path}: not the serving model's names and shapes: {sorted(wrong)[:3]}")
    return tensors


def checkpoint_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the checkpoint that vLLM was started with; empty when it was no local folder."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return shapes


def _same(path: Path, what: str, told: object, found: object) -> None:
    if told != found:
        raise ValueError(f"{path}: {what}: the manifest says {told}, found {found}")


def _repack_tied_heads(model: torch.nn.Module) -> None:
    """The CPU build multiplies with a packed copy of the head, which a reload of a tied head leaves as it was."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if type(method).__name__ == "UnquantizedEmbeddingMethod":
            method.process_weights_after_loading(module)


def staged_engine() -> type[Any]:
    """The backend's class; made in a function, since its bases exist only where vLLM is installed."""
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    @dataclass
    class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
        """Nothing to agree on beforehand."""

    @dataclass
    class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
        path: str
        """The version's manifest, on a disk that vLLM sees."""

    class StagedEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
        init_info_cls = InitInfo
        update_info_cls = UpdateInfo
        staged: dict[str, torch.Tensor] | None = None

        def init_transfer_engine(self, init_info: InitInfo) -> None:
            """Nothing to connect to."""

        def start_weight_update(self) -> None:
            self.staged = None

        def update_weights(self, update_info: dict[str, Any]) -> None:
            # The base class also synchronises the accelerator, which raises on the CPU build.
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: UpdateInfo) -> None:
            self.staged = read_version(Path(update_info.path), checkpoint_shapes(Path(self.model_config.model)))

        @torch.no_grad()
        def finish_weight_update(self) -> None:
            if self.staged is None:
                raise RuntimeError("finish_weight_update: no version is staged")
            tensors, self.staged = self.staged, None
            initialize_layerwise_reload(self.model)
            self.model.load_weights(tensors.items())
            finalize_layerwise_reload(self.model, self.model_config)
            _repack_tied_heads(self.model)

        def shutdown(self) -> None:
            self.staged = None

    return StagedEngine
