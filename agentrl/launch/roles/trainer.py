"""Role `trainer`: takes groups from the store, trains, publishes each version to the run's engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import torch

from agentrl.core.http import create_app, server
from agentrl.core.protocols import MetricSink
from agentrl.core.telemetry import JsonlSink, Metrics, PrometheusSink, Sinks, TensorBoardSink
from agentrl.engine.client import EngineClient
from agentrl.launch.context import RoleContext
from agentrl.rollout.buffer import Buffer
from agentrl.rollout.staleness import Staleness
from agentrl.rollout.store import open_store_database
from agentrl.train.checkpoint import Checkpoints
from agentrl.train.loop import TrainerParts, run_trainer
from agentrl.train.model import load_model
from agentrl.train.trainer import Trainer
from agentrl.weights.metrics import SPECS
from agentrl.weights.publish import WeightFolder
from agentrl.weights.updater import Updater
from gateway.client import GatewayClient


async def run(context: RoleContext) -> None:
    folder, config = context.folder, context.config
    torch.set_num_threads(config.train.threads)
    metrics = Metrics(SPECS)
    model = load_model(folder.warm, config.model.dtype)
    vocabulary: int = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    async with AsyncExitStack() as held:
        database = await open_store_database(folder.store(config, "rollout"))
        held.push_async_callback(database.close)
        sinks = _sinks(context, metrics)
        held.callback(sinks.close)
        await held.enter_async_context(_serving_metrics(context, metrics))
        updater = await held.enter_async_context(_updater(context, metrics))
        parts = TrainerParts(
            trainer=Trainer(model, config.train, seed=config.seed),
            source=Buffer(
                database, staleness=Staleness.of(config.rollout), min_scored=config.rollout.min_scored
            ),
            weights=WeightFolder(
                folder.weights, vocab_size=vocabulary, tolerance=config.weights.probe_tolerance,
                keep=config.weights.keep,
            ),
            publisher=updater,
            checkpoints=Checkpoints(folder.checkpoints, keep=config.train.keep_checkpoints),
            sink=sinks,
            groups=config.rollout.groups,
        )  # fmt: skip
        await run_trainer(parts, config.train)


def _sinks(context: RoleContext, metrics: Metrics) -> Sinks:
    sinks: list[MetricSink] = [JsonlSink(context.folder.metrics), PrometheusSink(metrics.registry)]
    if context.config.telemetry.tensorboard:
        sinks.append(TensorBoardSink(context.folder.tensorboard))
    return Sinks(sinks)


@asynccontextmanager
async def _updater(context: RoleContext, metrics: Metrics) -> AsyncIterator[Updater]:
    """The updater over clients of the run's engines and of the gateway's pool."""
    endpoints = context.endpoints
    async with AsyncExitStack() as held:
        engines = [EngineClient(url, endpoints.token) for url in endpoints.engines]
        for engine in engines:
            held.push_async_callback(engine.close)
        pool = GatewayClient(endpoints.url("gateway"), endpoints.token)
        held.push_async_callback(pool.close)
        updater = Updater(engines, pool, deadline_s=context.config.weights.deadline_s, metrics=metrics)
        async with updater.running():
            yield updater


@asynccontextmanager
async def _serving_metrics(context: RoleContext, metrics: Metrics) -> AsyncIterator[None]:
    app = create_app("trainer", metrics=metrics, token=context.endpoints.token)
    http = server(app, host=context.host, port=context.port)
    serving = asyncio.create_task(http.serve())
    try:
        yield
    finally:
        http.should_exit = True
        await serving
