from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model
from transformers import PreTrainedModel

from agentrl.engine.model import ModelRunner
from agentrl.engine.scheduler import Scheduler

torch.set_num_threads(1)

MakeScheduler = Callable[..., tuple[Scheduler, PreTrainedModel]]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Path]:
    """A saved tiny model of a family, made once."""
    root = tmp_path_factory.mktemp("models")

    def folder(family: str = "qwen2", tied: bool = True) -> Path:
        path = root / f"{family}-{tied}"
        if not path.exists():
            tiny_model(family, tied=tied).save_pretrained(path)
        return path

    return folder


@pytest.fixture(scope="session")
def make_scheduler(model_folder: Callable[[str, bool], Path]) -> MakeScheduler:
    """A scheduler over a tiny model, and that model for plain forwards."""

    def make(
        family: str = "qwen2", *, tied: bool = True, max_rows: int = 4, cache_rows: int = 6, seed: int = 0
    ) -> tuple[Scheduler, PreTrainedModel]:
        runner = ModelRunner(model_folder(family, tied), rows=cache_rows, context=0)
        return Scheduler(runner, version=1, max_rows=max_rows, seed=seed), tiny_model(family, tied=tied)

    return make
