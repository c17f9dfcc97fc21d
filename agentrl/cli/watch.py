"""Hands a run's places and addresses to the live view. Used by `train` and `eval`."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.core.config import RunConfig
from agentrl.launch.endpoints import Endpoints
from agentrl.launch.layout import RunFolder
from agentrl.observe.gauges import Gauges, StatusPage
from agentrl.observe.history import Tail
from agentrl.observe.view import RunView


def view_of(folder: RunFolder, config: RunConfig, endpoints: Endpoints, plan: Sequence[str]) -> RunView:
    return RunView(
        name=folder.name,
        config=config,
        gauges=Gauges(endpoints.urls),
        status=StatusPage(endpoints.url("rollout"), endpoints.token),
        metrics=Tail(folder.metrics),
        warm_metrics=Tail(folder.warm_metrics),
        plan=plan,
    )
