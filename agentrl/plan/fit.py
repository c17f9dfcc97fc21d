"""How far a measured run was from the model of a step, and in which phase. Called by `agentrl plan --fit`.

Each phase is work over a rate plus a fixed cost: FLOPs for the passes, bytes for weights and checkpoints, sampled
tokens for generation. Rates and fixed costs come from every other step; the others say how well they predict.
Invariant: no step is both fitted and compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.core.errors import ConfigError
from agentrl.plan.figure import Figure, Input, show
from agentrl.plan.model import Model

FEWEST = 6
"""Steps that a fit needs after the first, which pays for starting."""
WAITS = 0.02
"""Share of a step that the trainer has to wait for its batch before the step counts as bound by generation."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One step of a run."""

    tokens: float
    """Of all trajectories, prompts and tool results included."""
    sampled: float
    """With a loss."""
    wait_s: float
    """For the batch."""
    prepare_s: float
    forward_s: float
    update_s: float
    checkpoint_s: float
    publish_s: float
    apply_s: float
    step_s: float

    @property
    def trainer_s(self) -> float:
        """Everything but waiting."""
        return self.step_s - self.wait_s


@dataclass(frozen=True, slots=True)
class Run:
    """What a fit needs of a run."""

    name: str
    model: Model
    overlapped: bool
    """Generation goes on while the trainer works (`one_step`, `async`)."""
    weight_bytes: float
    """A parameter, as published."""
    steps: Sequence[Measured]


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds of a phase: `fixed_s` + work / `rate`."""

    fixed_s: float
    s_per_unit: float

    def seconds(self, work: float) -> float:
        return self.fixed_s + self.s_per_unit * work


@dataclass(frozen=True, slots=True)
class Phase:
    name: str
    work: Figure
    """Of a mean step."""
    rate: Figure | None
    """None where the time does not grow with the work, or hardly did in this run."""
    fixed_s: float
    predicted_s: float
    """Mean over the compared steps."""
    measured_s: float

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_s / self.measured_s - 1 if self.measured_s else 0.0


@dataclass(frozen=True, slots=True)
class Fit:
    run: Run
    phases: tuple[Phase, ...]
    step: Phase
    fitted: int
    compared: int
    bound: bool
    """Some fitted steps waited for their batch; if not, generation is only known to be as fast as the trainer."""

    @property
    def worst(self) -> Phase:
        """The phase that the difference sits in."""
        return max(self.phases, key=lambda phase: abs(phase.predicted_s - phase.measured_s))


def fit(run: Run) -> Fit:
    """ConfigError when the run is too short to tell."""
    steps = run.steps[1:]
    if len(steps) < FEWEST:
        raise ConfigError(f"run {run.name}: {len(run.steps)} steps are too few to fit; at least {FEWEST + 1}")
    fitted, compared = steps[::2], steps[1::2]
    lines = {name: _line([_work(run, name, step) for step in fitted], [_seconds(name, step) for step in fitted])
             for name in PHASES}  # fmt: skip
    waiting = [step for step in fitted if step.wait_s > WAITS * step.step_s] or fitted
    generation = _line([step.sampled for step in waiting], [_generation_s(run, step) for step in waiting])
    trainer = [sum(lines[name].seconds(_work(run, name, step)) for name in PHASES) for step in compared]
    waits = [_wait_s(run, generation, step, busy) for step, busy in zip(compared, trainer, strict=True)]
    phases = [_phase(run, name, lines[name], compared) for name in PHASES]
    sampled = _mean([step.sampled for step in compared])
    work = Figure("sampled_tokens", sampled, "tokens", "mean of train/trained_tokens", (), "metrics.jsonl")
    wait = Phase("wait", work, _rate("generation", work, generation), generation.fixed_s, _mean(waits),
                 _mean([step.wait_s for step in compared]))  # fmt: skip
    predicted = [busy + waited for busy, waited in zip(trainer, waits, strict=True)]
    whole = Phase("step", work, None, 0.0, _mean(predicted), _mean([step.step_s for step in compared]))
    bound = any(step.wait_s > WAITS * step.step_s for step in fitted)
    return Fit(run, (wait, *phases), whole, len(fitted), len(compared), bound)


PHASES = ("prepare", "forward", "update", "checkpoint", "publish", "apply")
"""What the trainer does in a step, in order."""


def _seconds(phase: str, step: Measured) -> float:
    return float(getattr(step, f"{phase}_s"))


def _work(run: Run, phase: str, step: Measured) -> float:
    """FLOPs of the passes, bytes of what is written, tokens of what is packed."""
    active, held = run.model.active_parameters, run.model.parameters
    if phase in ("forward", "update"):
        return (2 if phase == "forward" else 6) * active * step.tokens
    if phase == "checkpoint":
        return held * (run.weight_bytes + 8)
    return held * run.weight_bytes if phase in ("publish", "apply") else step.tokens


def _generation_s(run: Run, step: Measured) -> float:
    """Seconds that the batch took to generate, seen from a step that waited for it."""
    return step.step_s if run.overlapped else step.wait_s


def _wait_s(run: Run, generation: Line, step: Measured, trainer_s: float) -> float:
    seconds = generation.seconds(step.sampled)
    return max(0.0, seconds - trainer_s) if run.overlapped else seconds


def _line(works: Sequence[float], seconds: Sequence[float]) -> Line:
    """Least squares with neither a negative fixed cost nor a negative rate."""
    work, time = _mean(works), _mean(seconds)
    spread = sum((x - work) ** 2 for x in works)
    # Hardly any spread in the work cannot tell a rate from a fixed cost: all of it is the rate.
    if spread < len(works) * (0.05 * work) ** 2:
        return Line(0.0, time / work if work else 0.0)
    slope = sum((x - work) * (y - time) for x, y in zip(works, seconds, strict=True)) / spread
    if slope <= 0:
        return Line(time, 0.0)
    fixed = time - slope * work
    return Line(fixed, slope) if fixed >= 0 else Line(0.0, time / work)


def _phase(run: Run, name: str, line: Line, compared: Sequence[Measured]) -> Phase:
    works = [_work(run, name, step) for step in compared]
    words = {
        "forward": ("FLOP", "2 x active_parameters x tokens"),
        "update": ("FLOP", "6 x active_parameters x tokens"),
        "checkpoint": ("B", "parameters x (weight_bytes + 8)"),
        "prepare": ("tokens", "tokens"),
    }
    unit, formula = words.get(name, ("B", "parameters x weight_bytes"))
    parameters = Input("parameters", run.model.parameters, source=run.model.source)
    work = Figure(f"{name}_work", _mean(works), unit, formula, (parameters,), "mean of the compared steps")
    predicted = _mean([line.seconds(amount) for amount in works])
    measured = _mean([_seconds(name, step) for step in compared])
    return Phase(name, work, _rate(name, work, line), line.fixed_s, predicted, measured)


def _rate(name: str, work: Figure, line: Line) -> Figure | None:
    if line.s_per_unit == 0:
        return None
    formula = f"least squares of {name} seconds over {work.name}"
    return Figure(f"{name}_rate", 1 / line.s_per_unit, f"{work.unit}/s", formula, (work,), "metrics.jsonl")


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)


def settings(found: Fit, peak_flops: float, gpus: int) -> tuple[str, ...]:
    """Lines for [assume] of a plan whose GPUs the run used."""
    rates = {phase.name: phase.rate.value for phase in found.phases if phase.rate is not None}
    lines = []
    for phase, key in (("forward", "forward_mfu"), ("update", "train_mfu")):
        if phase in rates:
            share = rates[phase] / (peak_flops * gpus)
            lines.append(f"{key} = {share:.3g}")
    for phase, key in (("apply", "broadcast_bytes_per_s"), ("checkpoint", "checkpoint_bytes_per_s")):
        if phase in rates:
            lines.append(f"{key} = {rates[phase]:.3g}")
    return tuple(lines)


def rate_words(phase: Phase) -> str:
    """The fitted line of a phase, for people."""
    rate = show(phase.rate) if phase.rate is not None else ""
    fixed = f"{1000 * phase.fixed_s:,.0f} ms" if phase.fixed_s > 0 else ""
    return " + ".join(part for part in (fixed, rate) if part)
