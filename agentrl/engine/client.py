"""Calls one engine replica: the embedded engine and vLLM 0.32 alike. Used by the gateway and the weight updater.

Imports no torch. Invariant: errors come out as EngineError, ContextOverflow or ServiceUnavailable (and WeightsError for
weights), whichever engine answered, and a cancelled call is aborted on the engine.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
from pydantic import ValidationError

from agentrl.core.errors import (
    AgentRLError,
    ContextOverflow,
    EngineError,
    Ran,
    ServiceUnavailable,
    Unauthorized,
    WeightsError,
)
from agentrl.core.http import Service
from agentrl.core.protocols import EngineStatus
from agentrl.core.types import Completion, GenerateRequest, VersionRun

GENERATE = "/inference/v1/generate"
CALL_TIMEOUT_S = 600.0
"""A call may be held by a pause; who needs an answer sooner cancels."""


class EngineClient:
    """Implements `agentrl.core.protocols.Engine`. Close it when done."""

    def __init__(self, url: str, token: str = "", *, model: str | None = None) -> None:
        """`model` is the served model's name; None leaves it to the engine, which serves one."""
        self._service = Service(url, token=token, timeout_s=CALL_TIMEOUT_S)
        self._model = model

    @property
    def url(self) -> str:
        return self._service.base_url

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion. Cancelling the call aborts it: the connection closes."""
        body = orjson.dumps(self._body(request))
        response = await self._request("POST", GENERATE, content=body, headers=_headers(request))
        answer = orjson.loads(response.content)
        choice = answer["choices"][0]
        tokens, logprobs = _sampled(choice)
        return _completion(tokens, logprobs, choice, answer["usage"])

    async def status(self) -> EngineStatus:
        models, version, weights, metrics = await asyncio.gather(
            self._get("/v1/models"), self._get("/version"), self._get("/weight_info"), self._request("GET", "/metrics")
        )
        card = models["data"][0]
        numbers = _vllm_metrics(metrics.text)
        return EngineStatus(
            name=f"{card['owned_by']}/{version['version']}",
            version=_version(weights["weight_version"]),
            running=int(numbers["num_requests_running"]),
            waiting=int(numbers["num_requests_waiting"]),
            kv_usage=numbers["kv_cache_usage_perc"],
            context=card["max_model_len"],
        )

    async def prompt_logprobs(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Log-probabilities of token_ids[1:] under the current weights; for probes."""
        body = {
            "token_ids": list(token_ids),
            "sampling_params": {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0},
        }
        response = await self._request("POST", GENERATE, json=body)
        rows = orjson.loads(response.content)["prompt_logprobs"]
        pairs = zip(token_ids[1:], rows[1:], strict=True)
        return tuple(row[str(token)]["logprob"] for token, row in pairs)

    async def pause(self) -> None:
        await self._request("POST", "/pause", params={"mode": "keep", "clear_cache": "true"})

    async def resume(self) -> None:
        await self._request("POST", "/resume")

    async def stage_weights(self, manifest_path: Path) -> None:
        """Load and verify a published version beside the serving one. WeightsError when the replica refuses it."""
        async with _refusals(f"{self.url}: did not stage {manifest_path}"):
            # Each time: the engine may have restarted since the last update.
            await self._request("POST", "/init_weight_transfer_engine", json={"init_info": {}})
            await self._start_update()
            await self._request("POST", "/update_weights", json={"update_info": {"path": str(manifest_path)}})

    async def commit_weights(self, version: int) -> None:
        """Swap the staged weights in; call between pause and resume."""
        async with _refusals(f"{self.url}: did not take version {version}"):
            await self._request("POST", "/finish_weight_update", json={"weight_version": str(version)})

    async def close(self) -> None:
        await self._service.close()

    def _body(self, request: GenerateRequest) -> dict[str, Any]:
        sampling = request.sampling
        body: dict[str, Any] = {
            "request_id": request.request_id,
            "token_ids": request.token_ids,
            "priority": request.priority,
            "sampling_params": {
                "max_tokens": sampling.max_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "stop_token_ids": request.stop_token_ids,
                "logprobs": 0,
            },
        }
        if request.seed is not None:
            body["sampling_params"]["seed"] = request.seed
        if request.json_schema:
            body["sampling_params"]["structured_outputs"] = {"json": request.json_schema}
        if self._model is not None:
            body["model"] = self._model
        if request.cache_salt:
            body["cache_salt"] = request.cache_salt
        return body

    async def _start_update(self) -> None:
        """An update that was begun and never finished is taken over: what it staged is replaced."""
        try:
            await self._request("POST", "/start_weight_update")
        except EngineError as error:
            if "already active" not in error.message:
                raise

    async def _get(self, path: str) -> Any:
        return orjson.loads((await self._request("GET", path)).content)

    async def _request(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            return await self._service.request(method, path, **options)
        except AgentRLError as error:
            raise _engine_error(error) from error


def _headers(request: GenerateRequest) -> dict[str, str]:
    headers = {"content-type": "application/json"}
    if request.session_id:
        headers["x-session-id"] = request.session_id
    return headers


def _engine_error(error: AgentRLError) -> AgentRLError:
    """vLLM's errors have no agentrl code: what a status and a message say is sorted here."""
    if isinstance(error, EngineError | ServiceUnavailable | Unauthorized | WeightsError):
        return error
    status = error.detail.get("http_status", 500)
    if status == 400 and re.search("maximum (context|model) length", error.message):
        return ContextOverflow(error.message)
    if status == 503:
        return ServiceUnavailable(error.message, ran=Ran.NO)
    # The engine's own failures may pass; a request that it refuses will be refused again.
    return EngineError(error.message, ran=error.ran, retryable=status >= 500, detail=error.detail)


@asynccontextmanager
async def _refusals(what: str) -> AsyncIterator[None]:
    try:
        yield
    except EngineError as error:
        raise WeightsError(f"{what}: {error.message}", ran=error.ran) from error


def _sampled(choice: Mapping[str, Any]) -> tuple[list[int], list[float]]:
    tokens: list[int] = choice["token_ids"] or []
    content = (choice["logprobs"] or {}).get("content") or []
    return tokens, [entry["logprob"] for entry in content]


def _completion(
    tokens: Sequence[int], logprobs: Sequence[float], choice: Mapping[str, Any], usage: Mapping[str, Any]
) -> Completion:
    runs = choice.get("weight_versions") or []
    try:
        return Completion(
            token_ids=tuple(tokens),
            logprobs=tuple(logprobs),
            finish_reason=choice["finish_reason"],
            stop_reason=choice["stop_reason"],
            versions=tuple(VersionRun(version=_version(r["version"]), start=r["start"], end=r["end"]) for r in runs),
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        )
    except ValidationError as error:
        # Such as a logprob that is no number, after an update that diverged.
        raise EngineError(f"the engine's answer is not a whole completion: {error}", ran=Ran.YES) from error


def _version(label: str) -> int:
    try:
        return int(label)
    except ValueError:
        raise EngineError(
            f"the engine's weights are labelled {label!r}, not a policy version: start it with its version, or set it "
            "with POST /update_weight_version"
        ) from None


def _vllm_metrics(text: str) -> dict[str, float]:
    """vLLM's numbers by their names without the prefix, summed over an engine's data-parallel ranks."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("vllm:"):
            name, _, value = line.removeprefix("vllm:").rpartition(" ")
            name = name.partition("{")[0]
            found[name] = found.get(name, 0.0) + float(value)
    return found
