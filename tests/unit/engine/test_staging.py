"""A version that does not match its manifest, or the serving model, is refused and changes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import publish, tiny_model

from agentrl.core.errors import WeightsError
from agentrl.engine.staging import load

Edit = Callable[[dict[str, Any]], None]


def edited(manifest: Path, edit: Edit) -> Path:
    tree = json.loads(manifest.read_text())
    edit(tree)
    manifest.write_text(json.dumps(tree))
    return manifest


def entry(tree: dict[str, Any], **values: Any) -> None:
    tree["tensors"][0].update(values)


@pytest.mark.parametrize("tied", [True, False])
def test_a_published_version_is_loaded_whole(tmp_path: Path, tied: bool) -> None:
    new, serving = tiny_model(tied=tied, seed=1), tiny_model(tied=tied)
    staged = load(publish(new, tmp_path, 3), serving.state_dict(keep_vars=True))
    assert staged.version == 3
    for name, value in new.named_parameters():
        assert torch.equal(staged.tensors[name], value)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tree: entry(tree, sha256="0" * 64), "sha256"),
        (lambda tree: entry(tree, dtype="bfloat16"), "dtype"),
        (lambda tree: entry(tree, shape=[1, 2]), "shape"),
        (lambda tree: entry(tree, nbytes=1), "bytes"),
        (lambda tree: entry(tree, name="model.other"), "model.other"),
        (lambda tree: tree["tensors"].pop(), "only one of them has"),
        (lambda tree: tree.update(total_bytes=1), "total_bytes"),
        (lambda tree: tree.update(file="absent.safetensors"), "cannot read"),
        (lambda tree: tree.pop("version"), "cannot read"),
    ],
)
def test_a_manifest_that_disagrees_is_refused(tmp_path: Path, edit: Edit, message: str) -> None:
    manifest = edited(publish(tiny_model(seed=1), tmp_path, 3), edit)
    with pytest.raises(WeightsError, match=message):
        load(manifest, tiny_model().state_dict(keep_vars=True))


def test_a_corrupted_file_is_refused(tmp_path: Path) -> None:
    manifest = publish(tiny_model(seed=1), tmp_path, 3)
    file = manifest.parent / "weights.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    with pytest.raises(WeightsError, match="sha256"):
        load(manifest, tiny_model().state_dict(keep_vars=True))


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_another_model_is_refused(tmp_path: Path, family: str) -> None:
    manifest = publish(tiny_model(family, seed=1), tmp_path, 3)
    with pytest.raises(WeightsError, match=r"missing|not a tensor of the serving model"):
        load(manifest, tiny_model("qwen2").state_dict(keep_vars=True))


def test_an_untied_version_is_refused_by_a_tied_model(tmp_path: Path) -> None:
    manifest = publish(tiny_model(tied=False, seed=1), tmp_path, 3)
    with pytest.raises(WeightsError, match="tied in the serving model but differ"):
        load(manifest, tiny_model(tied=True).state_dict(keep_vars=True))


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    manifest = publish(tiny_model(seed=1), tmp_path, 3)
    file = manifest.parent / "weights.safetensors"
    tensors = load_file(file)
    tensors.pop(next(iter(tensors)))
    save_file(tensors, file)
    with pytest.raises(WeightsError, match="manifest against file"):
        load(manifest, tiny_model().state_dict(keep_vars=True))
