"""The time line of a step in each form: a lane for each pool of GPUs, as high as its share of them.

An area is GPU seconds, so that what stands idle can be seen. Called by `page`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.plan.choice.choose import Choice
from agentrl.plan.choice.forms import Form
from agentrl.plan.choice.options import Option
from agentrl.plan.figure import Quantity
from agentrl.plan.ledger import Ledger
from agentrl.plan.report.svg import AMBER, BLUE, FAINT, IDLE, LIGHT_BLUE, ORANGE, PURPLE, TEAL, Drawing, Scale, ink_on

COLOURS = {
    "generate": BLUE, "tail": LIGHT_BLUE, "forward": AMBER, "train": ORANGE, "weights": PURPLE, "continue": TEAL,
    "idle": IDLE,
}  # fmt: skip
TITLES = {
    Form.COLOCATED: "colocated", Form.COLOCATED_ASYNC: "colocated async", Form.SEPARATE_SYNC: "separate, in turns",
    Form.ONE_STEP: "one-step pipeline", Form.ASYNC: "async",
}  # fmt: skip
ROW, GAP, LEFT, WIDTH = 58.0, 22.0, 170.0, 1000.0


@dataclass(frozen=True, slots=True)
class Segment:
    kind: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Lane:
    """What one pool does in a step; the rest of the step it is idle."""

    name: str
    gpus: int
    segments: tuple[Segment, ...]


def lanes(option: Option, ledger: Ledger) -> tuple[Lane, ...]:
    """The pools of a form, each with its part of the step in order."""
    if option.split is None:
        return (_one_pool(option, ledger),)
    split = option.split
    generating = [_of("generate", split.throughput_s)]
    if option.form.waits_for_tail:
        generating.append(_of("tail", split.tail_s))
    training = [_of("train", split.training_s)]
    sync = _of("weights", split.sync_s)
    if option.form is Form.SEPARATE_SYNC:
        generated = sum(segment.seconds for segment in generating)
        training.insert(0, Segment("idle", generated))
        generating.append(Segment("idle", split.training_s.value))
    else:
        longer = max(sum(segment.seconds for segment in side) for side in (generating, training))
        for side in (generating, training):
            side.append(Segment("idle", longer - sum(segment.seconds for segment in side)))
    rest = option.step_s.value - sum(segment.seconds for segment in generating) - sync.seconds
    generating.append(sync)
    if rest > 1e-9:
        generating.append(Segment("continue", rest))
    return (
        Lane("generate", split.rollout_gpus, tuple(generating)),
        Lane("train", split.trainer_gpus, (*training, sync)),
    )


def _one_pool(option: Option, ledger: Ledger) -> Lane:
    rollout, training = ledger.rollout, ledger.training
    segments = [_of("generate", rollout.throughput)]
    if option.form.waits_for_tail:
        segments.append(_of("tail", rollout.tail))
    segments += [_of("forward", training.forward), Segment("train", training.total.value - training.forward.value)]
    rest = option.step_s.value - sum(segment.seconds for segment in segments)
    weights = min(rest, ledger.switch.value + ledger.sync.chosen(colocated=True).value)
    segments.append(Segment("weights", weights))
    if rest - weights > 1e-9:
        segments.append(Segment("continue", rest - weights))
    return Lane("all", int(ledger.gpus.value), tuple(segments))


def draw(choice: Choice, ledger: Ledger) -> str:
    options = choice.options
    longest = max(option.step_s.value for option in options)
    drawing = Drawing(WIDTH, 60 + len(options) * (ROW + GAP) + 60, "Time line of a step in each form")
    scale = Scale(0, longest * 1.02, LEFT, WIDTH - 90)
    top = drawing.legend(LEFT, 16, COLOURS, WIDTH - LEFT) + 4
    bottom = top + len(options) * (ROW + GAP)
    drawing.x_axis(scale, top, bottom, "seconds from the beginning of a step (lane height: share of the GPUs)")
    for at, option in enumerate(options):
        y = top + at * (ROW + GAP) + 4
        chosen = option.form is choice.chosen.form
        drawing.text(12, y + 22, TITLES[option.form], bold=chosen)
        places = f"{option.split.rollout_gpus} + {option.split.trainer_gpus} GPUs" if option.split else "all GPUs"
        drawing.text(12, y + 40, f"{places}{', chosen' if chosen else ''}", fill=FAINT, size=12)
        _lanes(drawing, scale, y, lanes(option, ledger), option.step_s.value)
        drawing.text(scale(option.step_s.value) + 8, y + ROW / 2 + 5, f"{option.step_s.value:,.0f} s", bold=chosen)
    drawing.height = bottom + 48
    return drawing.svg()


def _lanes(drawing: Drawing, scale: Scale, y: float, pools: Sequence[Lane], step_s: float) -> None:
    gpus = sum(lane.gpus for lane in pools)
    for lane in pools:
        height = max(6.0, ROW * lane.gpus / gpus)
        drawing.rect(scale(0), y, scale(step_s) - scale(0), height, IDLE)
        began = 0.0
        for segment in lane.segments:
            if segment.kind != "idle":
                wide = scale(began + segment.seconds) - scale(began)
                tip = f"{lane.gpus} GPUs, {segment.kind}: {segment.seconds:,.1f} s"
                drawing.rect(scale(began), y, wide, height, COLOURS[segment.kind], tip)
                if wide > 7.5 * len(segment.kind) + 8 and height > 15:
                    at = scale(began) + wide / 2, y + height / 2 + 4
                    drawing.text(*at, segment.kind, "middle", ink_on(COLOURS[segment.kind]), 12)
            began += segment.seconds
        y += height


def _of(kind: str, seconds: Quantity) -> Segment:
    return Segment(kind, seconds.value)
