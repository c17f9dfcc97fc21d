"""The engine's numbers. Read by Prometheus, by `EngineClient.status` and by the gateway's pool.

The engine speaks vLLM's metric names, so that dashboards and clients work for both; it declares none of its own.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from agentrl.core.telemetry import MetricSpec
from agentrl.engine.scheduler import Scheduler

SPECS: tuple[MetricSpec, ...] = ()


class VllmMetrics(Collector):
    """vLLM's gauges and counters, read from the scheduler when scraped."""

    def __init__(self, scheduler: Scheduler, model: str) -> None:
        self._scheduler = scheduler
        self._model = model

    def collect(self) -> Iterable[Metric]:
        scheduler, kv = self._scheduler, self._scheduler.runner.kv
        gauges = (
            ("num_requests_running", "Requests that are being computed.", scheduler.running),
            ("num_requests_waiting", "Requests that wait for a row.", scheduler.waiting),
            ("kv_cache_usage_perc", "Share of the KV cache's rows that run, 0 to 1.", kv.usage),
        )
        counters = (
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", kv.queried),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", kv.hits),
            ("prompt_tokens", "Prompt tokens computed, recomputation included.", scheduler.computed),
            ("generation_tokens", "Tokens sampled.", scheduler.sampled),
            ("num_preemptions", "Running requests that lost their row; this engine never takes one.", 0),
        )
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name", "engine"])
            gauge.add_metric([self._model, "0"], value)
            yield gauge
        for name, text, value in counters:
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=["model_name", "engine"])
            counter.add_metric([self._model, "0"], value)
            yield counter
