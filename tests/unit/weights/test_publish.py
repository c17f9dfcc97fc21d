from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import VOCAB, tiny_model, token_logprobs
from torch import Tensor

from agentrl.core.errors import WeightsError
from agentrl.core.types import WeightManifest
from agentrl.weights.manifest import FILE, MANIFEST, read_weights
from agentrl.weights.publish import LATEST, WeightFolder, probe_tokens


def tensors(seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {
        "a.weight": torch.randn(4, 3),
        "b.bias": torch.randn(5).to(torch.bfloat16),
        "c.scalar": torch.tensor(3.0),
        "d.strided": torch.randn(4, 6).t(),
    }


def flat(ids: tuple[int, ...]) -> tuple[float, ...]:
    return tuple(-1.0 for _ in ids[1:])


def store(folder: Path, keep: int = 3) -> WeightFolder:
    return WeightFolder(folder, vocab_size=100, tolerance=1e-4, keep=keep)


def test_a_published_version_reads_back_to_the_bit(tmp_path: Path) -> None:
    manifest, path = store(tmp_path).publish(tensors(), version=7, step=3, probe=flat)
    assert path == tmp_path / "v000007" / MANIFEST
    assert (tmp_path / LATEST).read_text() == "v000007\n"
    again, read = read_weights(path)
    assert again == manifest
    assert (again.version, again.step, again.file) == (7, 3, FILE)
    assert again.total_bytes == sum(t.nbytes for t in read.values())
    assert read.keys() == tensors().keys()
    assert all(torch.equal(read[name], value) for name, value in tensors().items())


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    weights = store(tmp_path, keep=2)
    assert weights.latest() == -1
    for version in range(4):
        weights.publish(tensors(version), version=version, step=version, probe=flat)
    assert weights.versions() == [2, 3]
    assert weights.latest() == 3


def test_a_version_is_never_written_twice(tmp_path: Path) -> None:
    weights = store(tmp_path)
    weights.publish(tensors(), version=1, step=1, probe=flat)
    with pytest.raises(WeightsError, match="two sets of weights"):
        weights.publish(tensors(1), version=1, step=2, probe=flat)


def test_a_version_is_found_by_what_it_holds(tmp_path: Path) -> None:
    weights = store(tmp_path)
    published = weights.publish(tensors(), version=1, step=1, probe=flat)
    assert weights.find(1, tensors()) == published
    assert weights.find(1, tensors(1)) is None
    assert weights.find(2, tensors()) is None
    file = published[1].parent / FILE
    file.write_bytes(file.read_bytes()[:-7])
    assert weights.find(1, tensors()) is None


def test_a_draft_left_by_a_crash_is_no_version(tmp_path: Path) -> None:
    draft = tmp_path / ".v000001.draft"
    draft.mkdir()
    (draft / MANIFEST).write_text("half")
    weights = store(tmp_path)
    assert weights.versions() == []
    _, path = weights.publish(tensors(), version=1, step=1, probe=flat)
    assert not draft.exists()
    assert read_weights(path)


@pytest.mark.parametrize("damage", ["torn", "flipped", "missing", "other", "miscounted"])
def test_a_damaged_version_is_refused(tmp_path: Path, damage: str) -> None:
    _, path = store(tmp_path).publish(tensors(), version=1, step=1, probe=flat)
    file = path.parent / FILE
    data = file.read_bytes()
    if damage == "torn":
        file.write_bytes(data[:-7])
    elif damage == "flipped":
        file.write_bytes(data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
    elif damage == "missing":
        file.unlink()
    elif damage == "other":
        _, other = store(tmp_path).publish(tensors(5), version=2, step=1, probe=flat)
        file.write_bytes((other.parent / FILE).read_bytes())
    else:
        manifest = WeightManifest.model_validate_json(path.read_bytes())
        path.write_text(manifest.model_copy(update={"total_bytes": 1}).model_dump_json())
    with pytest.raises(WeightsError, match="publish"):
        read_weights(path)


def test_the_probe_is_the_models_answer_and_tells_weights_apart(tmp_path: Path) -> None:
    model = tiny_model()
    named = {name: p.detach() for name, p in model.named_parameters()}
    weights = WeightFolder(tmp_path, vocab_size=VOCAB, tolerance=1e-4, keep=2)
    manifest, _ = weights.publish(named, version=0, step=0, probe=lambda ids: tuple(token_logprobs(model, ids)))
    assert manifest.probe.token_ids == probe_tokens(VOCAB)
    assert all(0 <= token < VOCAB for token in manifest.probe.token_ids)
    for parameter in model.parameters():
        with torch.no_grad():
            kept = parameter.clone()
            parameter += 0.1 * torch.randn_like(parameter)
        moved = token_logprobs(model, manifest.probe.token_ids)
        assert max(abs(a - b) for a, b in zip(moved, manifest.probe.logprobs, strict=True)) > 10 * 1e-4
        with torch.no_grad():
            parameter.copy_(kept)
