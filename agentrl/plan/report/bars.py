"""Pictures made of bars: the MFU waterfall and the memory of a GPU by owner. Called by `page`."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.plan.figure import Figure
from agentrl.plan.ledger import Stack
from agentrl.plan.report.svg import (
    AMBER,
    BLUE,
    FAINT,
    GREEN,
    GREY,
    IDLE,
    INK,
    LIGHT_BLUE,
    LIGHT_GREEN,
    ORANGE,
    PURPLE,
    RED,
    TEAL,
    Drawing,
    Scale,
    ink_on,
)

LOSS_COLOURS = {
    "prefill": TEAL, "decode": BLUE, "tail": LIGHT_BLUE, "forward": AMBER, "train": ORANGE, "switch": PURPLE,
    "sync": PURPLE, "idle": GREY,
}  # fmt: skip
MEMORY_COLOURS = (BLUE, GREEN, ORANGE, AMBER, PURPLE, TEAL, LIGHT_BLUE, LIGHT_GREEN)


def draw_waterfall(parts: Sequence[Figure]) -> str:
    """From the whole peak down to what does useful work; `parts` begins with that, losses follow in order."""
    useful, losses = parts[0], parts[1:]
    width, height, left, bottom = 1000.0, 390.0, 80.0, 330.0
    drawing = Drawing(width, height, "MFU waterfall")
    scale = Scale(0, 100, bottom, 30)
    drawing.y_axis(scale, left, width - 10, "share of all GPUs' peak FLOP/s (%)")
    names = ["peak", *(loss.name.removesuffix("_loss") for loss in losses), "useful"]
    slot = (width - left - 20) / len(names)
    left_over = 1.0
    for at, name in enumerate(names):
        x = left + 10 + at * slot
        if name in ("peak", "useful"):
            share = 1.0 if name == "peak" else useful.value
            drawing.rect(x, scale(100 * share), slot * 0.72, bottom - scale(100 * share), GREEN)
            words = f"{100 * share:.3g} %"
        else:
            share = losses[at - 1].value
            high, low = scale(100 * left_over), scale(100 * (left_over - share))
            left_over -= share
            drawing.rect(
                x, high, slot * 0.72, max(low - high, 1.5), LOSS_COLOURS.get(name, RED), losses[at - 1].formula
            )
            drawing.line(x - slot * 0.28, high, x + slot * 0.72, high, FAINT, 1, "2 3")
            words = f"\N{MINUS SIGN}{100 * share:.2g} %" if share > 1e-6 else "0 %"
            share += left_over
        drawing.text(x + slot * 0.36, scale(100 * share) - 7, words, "middle", INK, 12, bold=name == "useful")
        drawing.text(x + slot * 0.36, bottom + 20, name, "middle", INK, 13)
    drawing.text((left + width) / 2, bottom + 44, "where the step's GPU seconds go", "middle")
    return drawing.svg()


def draw_memory(stacks: Sequence[Stack]) -> str:
    """One bar a phase, in GB, each part with its owner."""
    width, row, left = 1000.0, 52.0, 110.0
    names = list(dict.fromkeys(owner(part) for stack in stacks for part in stack.parts))
    colours = {name: MEMORY_COLOURS[at % len(MEMORY_COLOURS)] for at, name in enumerate(names)}
    capacity = stacks[0].capacity.value / 1e9
    most = max([capacity, *(stack.used.value / 1e9 for stack in stacks)])
    drawing = Drawing(width, 130 + len(stacks) * (row + 16), "Memory of one GPU by owner")
    scale = Scale(0, most * 1.03, left, width - 20)
    top = drawing.legend(left, 16, {**colours, "free": IDLE}, width - left) + 4
    bottom = top + len(stacks) * (row + 16)
    drawing.x_axis(scale, top, bottom, "GB of one GPU")
    for at, stack in enumerate(stacks):
        y, used = top + at * (row + 16) + 8, 0.0
        drawing.text(left - 10, y + row / 2 + 4, stack.phase, "end")
        drawing.rect(scale(0), y, scale(capacity) - scale(0), row, IDLE)
        for part in stack.parts:
            size, name = part.value / 1e9, owner(part)
            wide = scale(used + size) - scale(used)
            drawing.rect(scale(used), y, wide, row, colours[name], f"{name}: {size:,.2f} GB")
            if wide > 60:
                drawing.text(
                    scale(used) + wide / 2, y + row / 2 + 4, f"{size:,.1f} GB", "middle", ink_on(colours[name]), 12
                )
            used += size
        drawing.text(scale(used) + 8, y + row / 2 + 4, f"{stack.free.value / 1e9:,.1f} GB free", fill=INK, size=12)
    drawing.line(scale(capacity), top, scale(capacity), bottom, RED, 2)
    drawing.height = bottom + 48
    return drawing.svg()


def owner(part: Figure) -> str:
    return part.name.removesuffix("_gpu_bytes").removesuffix("_bytes").replace("_", " ")
