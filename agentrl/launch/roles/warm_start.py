"""Role `warm_start`: makes the policy that version 0 is made of, then ends.

Invariant: `model/` and `warm/` are there whole or not at all, so a run that was killed here starts here again.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from agentrl.core.config import RunConfig
from agentrl.core.environment import Environment
from agentrl.core.plugins import load_environment
from agentrl.core.rendering import load_renderer
from agentrl.core.telemetry import JsonlSink
from agentrl.launch.context import RoleContext
from agentrl.launch.layout import RunFolder
from agentrl.train.model import load_model, save_model
from agentrl.train.tiny import build_tiny_model
from agentrl.train.warm_start import WarmProgress, examples, warm_start

Progress = Callable[[WarmProgress], None]


async def run(context: RoleContext) -> None:
    folder, config = context.folder, context.config
    folder.warm_metrics.unlink(missing_ok=True)
    sink = JsonlSink(folder.warm_metrics)
    stopped = threading.Event()

    def progress(now: WarmProgress) -> None:
        if stopped.is_set():
            raise InterruptedError("the warm start was stopped")
        sink.write(now.step, {"train/warm_loss": now.loss, "train/warm_accuracy": now.accuracy})

    try:
        await asyncio.to_thread(prepare, folder, config, progress)
    finally:
        stopped.set()
        sink.close()


def prepare(folder: RunFolder, config: RunConfig, progress: Progress) -> None:
    """Fill `model/` and `warm/` as far as they are missing."""
    torch.set_num_threads(config.warm_start.threads)
    environment = load_environment(config.env.name, config.env.options)
    source = Path(config.model.path) if config.model.path else folder.model
    if not source.exists():
        initial_model(source, environment, config)
    if not folder.warm.exists():
        if config.warm_start.steps:
            warmed_model(source, folder.warm, environment, config, progress)
        else:
            folder.adopt_model(source)


def initial_model(target: Path, environment: Environment, config: RunConfig) -> None:
    """A tiny model and its tokenizer, made from the environment's demonstrations."""
    draft = _draft(target)
    build_tiny_model(draft, environment, config.model, seed=config.seed)
    draft.rename(target)


def warmed_model(source: Path, target: Path, environment: Environment, config: RunConfig, progress: Progress) -> None:
    """`source` after the supervised steps on the environment's demonstrations."""
    torch.manual_seed(config.seed)
    model = load_model(source, config.model.dtype)
    renderer = load_renderer(source, config.model.renderer)
    sequences = examples(environment, renderer, seed=config.seed, noise=config.warm_start.noise)
    warm_start(model, sequences, config.warm_start, progress=progress)
    draft = _draft(target)
    save_model(model, source, draft)
    draft.rename(target)


def _draft(target: Path) -> Path:
    draft = target.with_name(target.name + ".draft")
    shutil.rmtree(draft, ignore_errors=True)
    return draft
