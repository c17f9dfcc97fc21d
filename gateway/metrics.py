"""The gateway's rows of the metrics table."""

from __future__ import annotations

from agentrl.core.telemetry import MetricSpec

SPECS: tuple[MetricSpec, ...] = (
    MetricSpec(
        "gateway/calls_total", "counter", "Model calls by outcome: ok, replayed or the error's code", ("outcome",)
    ),
    MetricSpec("gateway/unapplied_fields_total", "counter", "Fields of requests that do nothing", ("field",)),
    MetricSpec("gateway/call_seconds", "histogram", "From a call's arrival to its answer"),
    MetricSpec("gateway/engine_seconds", "histogram", "The engine's part of a call, waiting for a replica included"),
    MetricSpec("gateway/prompt_tokens_total", "counter", "Prompt tokens sent to engines"),
    MetricSpec("gateway/cached_tokens_total", "counter", "Prompt tokens that engines had in their prefix cache"),
    MetricSpec("gateway/sampled_tokens_total", "counter", "Tokens sampled by engines and recorded"),
    MetricSpec("gateway/branches_total", "counter", "Calls that could not continue earlier tokens", ("reason",)),
    MetricSpec("gateway/malformed_calls_total", "counter", "Tool calls whose arguments are no JSON object"),
    MetricSpec(
        "gateway/constrained_tokens_total", "counter", "Tokens sampled under a response_format, which do not train"
    ),
    MetricSpec("gateway/resubmits_total", "counter", "Parts of calls sent again, by cause", ("cause",)),
    MetricSpec("gateway/waiting_calls", "gauge", "Calls that wait for a replica"),
    MetricSpec("gateway/replicas_live", "gauge", "Replicas that answer"),
    MetricSpec(
        "gateway/sessions_purged_total", "counter", "Sessions deleted from the store at the end of their retention"
    ),
    MetricSpec("gateway/sessions_live", "gauge", "Sessions held in memory"),
)
