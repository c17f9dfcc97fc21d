"""What `agentrl plan --fit` reads of a run's folder, and how it shows the fit. Called by `agentrl.cli.plan`."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agentrl.core.errors import ConfigError
from agentrl.launch.layout import RunFolder
from agentrl.observe.history import Row, read_history
from agentrl.plan.figure import show
from agentrl.plan.fit import Fit, Measured, Phase, Run, fit, rate_words, settings
from agentrl.plan.inputs import PlanInput
from agentrl.plan.model import read_model

BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}


def read_run(folder: RunFolder) -> Run:
    """The run's steps, with the model that it trained."""
    config = folder.config()
    rows = read_history(folder.metrics).rows
    if not rows:
        raise ConfigError(f"{folder.path} has no training step yet, so there is nothing to fit")
    places = (folder.warm, folder.model)
    model = next((place for place in places if (place / "config.json").exists()), None)
    if model is None:
        raise ConfigError(f"{folder.path} holds no config.json of a model in warm/ or model/")
    weight_bytes = BYTES[config.model.dtype]
    overlapped = config.rollout.form != "sync"
    return Run(folder.name, read_model(model), overlapped, weight_bytes, [_measured(row) for row in rows])


def _measured(row: Row) -> Measured:
    def of(name: str) -> float:
        return row.get(f"train/{name}", 0.0)

    return Measured(
        tokens=of("tokens"), sampled=of("trained_tokens"), wait_s=of("take_s"), prepare_s=of("prepare_s"),
        forward_s=of("proximal_s"), update_s=of("update_s"), checkpoint_s=of("checkpoint_s"),
        publish_s=of("publish_s"), apply_s=of("apply_s"), step_s=of("step_s"),
    )  # fmt: skip


def show_fit(console: Console, folder: RunFolder, plan: PlanInput | None) -> None:
    """Predicted against measured by phase; with a plan of the run's GPUs, its settings for [assume]."""
    found = fit(read_run(folder))
    console.print(_table(found))
    console.print(
        f"fitted on {found.fitted} steps, compared on {found.compared} others; the difference sits in "
        f"[bold]{found.worst.name}[/] ({found.worst.predicted_s - found.worst.measured_s:+.3f} s a step)"
    )
    if not found.bound:
        console.print("no step waited for its batch: generation may be faster than its rate here")
    if plan is not None:
        if plan.shape.parameters != found.run.model.parameters:
            names = f"{plan.shape.name} has {plan.shape.parameters:,} parameters"
            console.print(f"[yellow]the plan is of another model than the run: {escape(names)}[/]")
        console.print(f"\n\\[assume] of a plan on {plan.cluster.gpus} {plan.gpu.name}:")
        for line in settings(found, plan.gpu.flops, plan.cluster.gpus):
            console.print(f"  {line}", markup=False)


def _table(found: Fit) -> Table:
    model = found.run.model
    title = f"{escape(found.run.name)}: a model of {model.parameters:,} parameters, seconds of a step"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for at, column in enumerate(("phase", "predicted", "measured", "difference", "work", "fixed + rate")):
        table.add_column(column, justify="left" if at == 0 else "right")
    for phase in found.phases:
        table.add_row(*_row(phase), show(phase.work), rate_words(phase))
    table.add_section()
    table.add_row(*_row(found.step), "", "", style="bold")
    return table


def _row(phase: Phase) -> tuple[str, str, str, str]:
    return phase.name, f"{phase.predicted_s:.3f}", f"{phase.measured_s:.3f}", f"{100 * phase.error:+.0f} %"
