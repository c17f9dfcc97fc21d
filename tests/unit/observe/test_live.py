"""The live view over real services and files: what it says, and that it never disturbs a run."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rich.console import Console

from agentrl.core.config import load_config
from agentrl.core.http import create_app, serving
from agentrl.core.telemetry import JsonlSink, Metrics, MetricSpec
from agentrl.observe.gauges import Gauges, StatusPage, parse
from agentrl.observe.history import Tail
from agentrl.observe.live import watching
from agentrl.observe.panel import clock, panel, spark
from agentrl.observe.view import RunView

SPECS = (
    MetricSpec("rollout/running_episodes", "gauge", "Episodes in flight."),
    MetricSpec("rollout/failures_total", "counter", "Failed episodes.", ("code", "blame")),
    MetricSpec("rollout/eval_success_ratio", "gauge", "Success.", ("label",)),
)


class Rollout:
    """A service with the rollout's metrics and status page."""

    def __init__(self) -> None:
        self.metrics = Metrics(SPECS)
        self.page: dict[str, object] = {"phase": "starting"}
        self.url = ""


@pytest.fixture
async def rollout() -> AsyncIterator[Rollout]:
    service = Rollout()
    app = create_app("rollout", metrics=service.metrics, token="secret")
    app.add_api_route("/v1/status", lambda: service.page)
    async with serving(app) as service.url:
        yield service


@pytest.fixture
async def view(rollout: Rollout, tmp_path: Path) -> AsyncIterator[RunView]:
    config = load_config(None, ["name=demo", "train.steps=4", "eval.tasks=8", "warm_start.steps=100"])
    gauges = Gauges({"rollout": rollout.url, "gone": "http://127.0.0.1:1"})
    status = StatusPage(rollout.url, "secret")
    yield RunView("demo", config, gauges, status, Tail(tmp_path / "metrics.jsonl"), Tail(tmp_path / "warm.jsonl"))
    await gauges.close()
    await status.close()


def text_of(view: RunView) -> str:
    console = Console(width=140, file=io.StringIO(), record=True)
    console.print(panel(view))
    return console.export_text()


def step(path: Path, number: int, reward: float) -> None:
    sink = JsonlSink(path)
    sink.write(number, {"reward/mean": reward, "reward/mean/vault": reward, "train/lag_mean": 0.5, "train/step_s": 2.0})
    sink.close()


async def test_the_phases_follow_the_rollouts_own_account(view: RunView, rollout: Rollout) -> None:
    view.phase("services")
    for said, phase in (("starting", "services"), ("evaluating before", "eval_before"), ("training", "train")):
        rollout.page = {"phase": said}
        await view.refresh()
        assert view.now == phase
    view.phase("report")
    await view.refresh()
    assert view.now == "report"
    assert [phase.name for phase in view.phases] == ["services", "eval_before", "train", "report"]
    assert all(phase.ended for phase in view.phases[:-1])


async def test_progress_counts_the_phase_it_is_in(view: RunView, rollout: Rollout, tmp_path: Path) -> None:
    view.phase("warm_start")
    sink = JsonlSink(tmp_path / "warm.jsonl")
    sink.write(1, {"train/warm_loss": 2.0, "train/warm_accuracy": 0.1})
    sink.close()
    await view.refresh()
    assert view.progress == (1, 100, "steps")
    view.phase("services")
    rollout.page = {"phase": "evaluating before", "evaluations/before": 5}
    await view.refresh()
    assert view.progress == (5, 8, "tasks")
    rollout.page = {"phase": "training"}
    step(tmp_path / "metrics.jsonl", 3, 0.5)
    await view.refresh()
    assert view.progress == (3, 4, "steps")


async def test_the_panel_shows_what_the_services_say(view: RunView, rollout: Rollout, tmp_path: Path) -> None:
    view.phase("services")
    view.process("gateway", "ready")
    view.process("engine-0", "restarting")
    rollout.page = {"phase": "training", "episodes/accepted": 1234}
    rollout.metrics.set("rollout/running_episodes", 96)
    rollout.metrics.inc("rollout/failures_total", 3, code="SANDBOX_LOST", blame="infra")
    rollout.metrics.set("rollout/eval_success_ratio", 0.25, label="before")
    step(tmp_path / "metrics.jsonl", 1, 0.625)
    await view.refresh()
    text = text_of(view)
    for expected in ("0.625", "vault 0.62", "96 episodes", "SANDBOX_LOST 3", "before 0.250", "1,234", "engine-0 ×1"):
        assert expected in text


async def test_a_run_that_stands_still_says_what_it_waits_for(view: RunView, rollout: Rollout) -> None:
    view.phase("services")
    rollout.page = {"phase": "starting", "waiting_for": "the trainer's first policy version"}
    await view.refresh()
    assert "the trainer's first policy version" in text_of(view)
    rollout.metrics.set("rollout/running_episodes", 3)
    await view.refresh()
    assert "waiting for" not in text_of(view)


async def test_a_service_that_went_away_keeps_its_last_numbers() -> None:
    metrics = Metrics(SPECS)
    metrics.set("rollout/running_episodes", 7)
    async with serving(create_app("rollout", metrics=metrics)) as url:
        gauges = Gauges({"rollout": url})
        await gauges.refresh()
    await gauges.refresh()
    assert gauges.total("agentrl_rollout_running_episodes") == 7
    await gauges.close()


async def test_without_a_terminal_there_is_a_line_for_each_event(
    view: RunView, rollout: Rollout, tmp_path: Path
) -> None:
    said = io.StringIO()
    async with watching(view, Console(file=said, width=200), live=True):
        view.phase("services")
        rollout.page = {"phase": "training"}
        rollout.metrics.set("rollout/eval_success_ratio", 0.25, label="before")
        step(tmp_path / "metrics.jsonl", 1, 0.5)
        step(tmp_path / "metrics.jsonl", 2, 0.75)
        await asyncio.sleep(0)
    lines = said.getvalue().splitlines()
    assert [line.split()[0:2] for line in lines if line.startswith("  step")] == [["step", "1/4"], ["step", "2/4"]]
    assert any("start services" in line for line in lines)
    assert "  success on held-out tasks, before: 0.250" in lines


async def test_a_view_that_fails_does_not_reach_the_run(view: RunView, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("this is no JSON\n")
    finished = False
    async with watching(view, Console(file=io.StringIO()), live=True):
        await asyncio.sleep(0.01)
        finished = True
    assert finished


def test_the_remaining_time_follows_the_latest_pace(view: RunView) -> None:
    now = time.time()
    assert view.eta_s is None
    view.rows = [{"step": 1.0, "time": now - 6}, {"step": 2.0, "time": now}]
    assert view.eta_s == pytest.approx(12.0)


def test_pages_are_read_with_their_labels() -> None:
    page = 'vllm:generation_tokens_total{model_name="policy",engine="0"} 12\n'
    (reading,) = parse("engine-0", page)
    assert (reading.name, reading.labels["engine"], reading.value) == ("vllm:generation_tokens_total", "0", 12.0)


def test_small_helpers_of_the_picture() -> None:
    assert spark([0.0, 0.5, 1.0]) == "▁▅█"
    assert spark([0.0, 4.0]) == "▁█"
    assert clock(125.9) == "2:05"
