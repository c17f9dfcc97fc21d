"""The embedded engine's HTTP side: the part of vLLM 0.32's API that agentrl uses. Started by `launch`.

Invariant: a call that was accepted is answered with what was sampled, also when it was aborted; weights that fail
their checks leave the serving ones as they were.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version as distribution_version
from pathlib import Path
from typing import Any, Literal

import torch
from fastapi import Body, FastAPI, Query
from starlette.responses import Response
from starlette.routing import Route

from agentrl.core.config import EngineConfig
from agentrl.core.errors import RequestError, WeightsError
from agentrl.core.http import create_app, server
from agentrl.core.telemetry import Metrics
from agentrl.engine.generate import GenerateEndpoint
from agentrl.engine.metrics import SPECS, VllmMetrics
from agentrl.engine.model import ModelRunner
from agentrl.engine.scheduler import Scheduler
from agentrl.engine.staging import StagedWeights, load
from agentrl.engine.worker import Worker

MODEL = "policy"
"""The model's name on the wire, whatever its folder."""
SWITCH_S = 0.0002
"""How long one thread may keep the interpreter from the other; the default of 5 ms is longer than a step."""


def build_worker(model_dir: Path, *, version: int, config: EngineConfig, dtype: str = "auto") -> Worker:
    """Load the model and make its scheduler; `create_engine_app` starts the thread."""
    rows = max(config.cache_rows, config.max_rows)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    runner = ModelRunner(model_dir, rows=rows, context=config.context, dtype=dtype, device=device)
    return Worker(Scheduler(runner, version=version, max_rows=config.max_rows))


def create_engine_app(worker: Worker, *, token: str = "") -> FastAPI:
    """The app over a worker that is not started yet; the app's lifespan starts and stops it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        await worker.stop()

    async def ready() -> str:
        return "the scheduler died" if worker.failed.done() else ""

    metrics = Metrics(SPECS)
    metrics.registry.register(VllmMetrics(worker.scheduler, MODEL))
    app = create_app("engine", metrics=metrics, token=token, ready=ready, lifespan=lifespan)
    app.router.routes.append(Route("/inference/v1/generate", GenerateEndpoint(worker, MODEL), methods=["POST"]))
    _add_model_routes(app, worker)
    _add_control_routes(app, worker)
    _add_weight_routes(app, worker)
    return app


async def run_engine(
    model_dir: Path,
    *,
    port: int,
    token: str,
    version: int,
    config: EngineConfig,
    dtype: str = "auto",
    host: str = "127.0.0.1",
) -> None:
    """Serve until SIGTERM, in the trainer's `dtype`, since it takes no weights of another.

    Raises what killed the scheduler, so that the process ends with its traceback.
    """
    torch.set_num_threads(config.threads)
    sys.setswitchinterval(SWITCH_S)
    worker = build_worker(model_dir, version=version, config=config, dtype=dtype)
    run = server(create_engine_app(worker, token=token), host=host, port=port)
    serving = asyncio.create_task(run.serve())
    await asyncio.wait({serving, worker.failed}, return_when=asyncio.FIRST_COMPLETED)
    run.should_exit = True
    await serving
    if worker.failed.done():
        worker.failed.result()


def _add_model_routes(app: FastAPI, worker: Worker) -> None:
    runner = worker.scheduler.runner

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=500 if worker.failed.done() else 200)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": distribution_version("agentrl")}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        card = {"id": MODEL, "object": "model", "owned_by": "agentrl", "root": MODEL, "max_model_len": runner.context}
        return {"object": "list", "data": [card]}


def _add_control_routes(app: FastAPI, worker: Worker) -> None:
    @app.post("/pause")
    async def pause(mode: Literal["abort", "keep"] = "abort", clear_cache: bool = Query(True)) -> dict[str, str]:
        def hold(scheduler: Scheduler) -> None:
            scheduler.paused = True
            if clear_cache:
                scheduler.runner.kv.clear()

        if mode == "abort":
            worker.abort(lambda sequence: True)
        await worker.call(hold)
        return {"status": "paused"}

    @app.post("/resume")
    async def resume() -> dict[str, str]:
        def release(scheduler: Scheduler) -> None:
            scheduler.paused = False

        await worker.call(release)
        return {"status": "resumed"}


def _add_weight_routes(app: FastAPI, worker: Worker) -> None:
    staged: list[StagedWeights] = []

    @app.post("/init_weight_transfer_engine")
    async def init(init_info: dict[str, Any] = Body(embed=True)) -> dict[str, str]:
        return {"message": "Weight transfer initialized"}

    @app.post("/start_weight_update")
    async def start() -> dict[str, str]:
        staged.clear()
        return {"message": "Weight update started"}

    @app.post("/update_weights")
    async def update(update_info: dict[str, Any] = Body(embed=True)) -> dict[str, str]:
        path = update_info.get("path")
        if not isinstance(path, str):
            raise RequestError("update_info.path must name a weight manifest")
        staged.clear()
        staged.append(await asyncio.to_thread(load, Path(path), worker.scheduler.runner.tensors()))
        return {"message": "Weights updated"}

    @app.post("/finish_weight_update")
    async def finish(weight_version: str = Body(embed=True)) -> dict[str, str]:
        if not staged:
            raise WeightsError("no weights are staged: call /start_weight_update and /update_weights first")
        weights = staged.pop()
        if str(weights.version) != weight_version:
            raise WeightsError(f"version {weights.version} is staged, not {weight_version}: stage it again")
        await worker.call(lambda scheduler: scheduler.install(weights.tensors, weights.version))
        return {"message": "Weight update finished"}

    @app.get("/weight_info")
    async def weight_info() -> dict[str, str]:
        return {"weight_version": str(worker.scheduler.version)}
