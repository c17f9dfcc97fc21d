"""How to divide GPUs between generating and training. Called by `choose`.

By time, not by FLOPs: generation has the fewer FLOPs and takes longer. Both sides are computed on their own GPUs for
every split, since concurrency, waves and decode time change with them and the tail does not. Invariant: the chosen
split is feasible, and no feasible split of the same form is faster; among equals it generates on the most GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from agentrl.plan.choice.forms import Form, step_s
from agentrl.plan.figure import Figure, Input, Quantity

NOTHING_S = Input("other_s", 0.0, "s", "nothing else in this form")


class Phases(Protocol):
    """The times of one step's phases on any number of GPUs, and whether they have the memory for it."""

    def throughput_s(self, gpus: int) -> Quantity:
        """Generation, without the tail."""

    def tail_s(self, gpus: int) -> Quantity:
        """What the longest responses add to it."""

    def training_s(self, gpus: int) -> Quantity:
        """All passes over the batch."""

    def sync_s(self, rollout_gpus: int) -> Quantity:
        """Bringing the new weights to all instances, for all syncs of a step."""

    def problems(self, rollout_gpus: int, trainer_gpus: int) -> tuple[str, ...]:
        """What does not fit on this many GPUs of each role; empty when all does."""


@dataclass(frozen=True)
class Scaled:
    """Times that are known for some number of GPUs, such as a measured run's; all but the tail scale with them."""

    throughput: Quantity
    tail: Quantity
    training: Quantity
    sync: Quantity
    gpus: int
    """Those that the times are of."""

    def throughput_s(self, gpus: int) -> Figure:
        return self._scaled(self.throughput, gpus)

    def tail_s(self, gpus: int) -> Quantity:
        return self.tail

    def training_s(self, gpus: int) -> Figure:
        return self._scaled(self.training, gpus)

    def sync_s(self, rollout_gpus: int) -> Quantity:
        return self.sync

    def problems(self, rollout_gpus: int, trainer_gpus: int) -> tuple[str, ...]:
        return ()

    def _scaled(self, time: Quantity, gpus: int) -> Figure:
        inputs = (time, Input("known_gpus", self.gpus, "GPUs"), Input("own_gpus", gpus, "GPUs"))
        return Figure(
            f"own_{time.name}", time.value * self.gpus / gpus, "s", f"{time.name} x known_gpus / own_gpus", inputs
        )


@dataclass(frozen=True)
class Split:
    rollout_gpus: int
    trainer_gpus: int
    throughput_s: Quantity
    tail_s: Quantity
    training_s: Quantity
    sync_s: Quantity
    step_s: Figure
    problems: tuple[str, ...] = ()

    @property
    def feasible(self) -> bool:
        return not self.problems

    @property
    def label(self) -> str:
        return f"{self.rollout_gpus}:{self.trainer_gpus}"


def rollout_gpus_by_time(generating_s: Quantity, training_s: Quantity, gpus: Quantity) -> Figure:
    """Share by the times on all GPUs. Exact when both sides scale; a tail does not, so check with `best_split`."""
    return Figure(
        "rollout_gpus_by_time",
        gpus.value * generating_s.value / (generating_s.value + training_s.value),
        "GPUs",
        f"{gpus.name} x {generating_s.name} / ({generating_s.name} + {training_s.name})",
        (generating_s, training_s, gpus),
    )


def work_ratio(generating: Quantity, training: Quantity, name: str) -> Figure:
    """Generation to training, in seconds or in FLOPs: the two point in opposite directions."""
    return Figure(
        name, generating.value / training.value, "", f"{generating.name} / {training.name}", (generating, training)
    )


def split_at(form: Form, phases: Phases, rollout_gpus: int, trainer_gpus: int, other_s: Quantity = NOTHING_S) -> Split:
    """One split of a separate form, each side on its own GPUs."""
    throughput, tail = phases.throughput_s(rollout_gpus), phases.tail_s(rollout_gpus)
    training, sync = phases.training_s(trainer_gpus), phases.sync_s(rollout_gpus)
    step = step_s(form, throughput, tail, training, sync, other_s)
    problems = phases.problems(rollout_gpus, trainer_gpus)
    return Split(rollout_gpus, trainer_gpus, throughput, tail, training, sync, step, problems)


def split_curve(
    form: Form, phases: Phases, gpus: int, *, rollout_unit: int = 1, trainer_unit: int = 1, points: int = 400
) -> tuple[Split, ...]:
    """Splits into whole units of both sides, smallest rollout side first; all GPUs are used.

    Every split where there are at most `points`; else a grid, and every split around its fastest. A side's time only
    falls with its GPUs, so that the fastest of max(generation, training) lies there.
    """
    sizes = [size for size in range(rollout_unit, gpus, rollout_unit) if (gpus - size) % trainer_unit == 0]
    stride = -(-len(sizes) // points) if sizes else 1
    curve = {size: split_at(form, phases, size, gpus - size) for size in sizes[::stride]}
    best = fastest(curve.values())
    if stride > 1 and best is not None:
        middle = sizes.index(best.rollout_gpus)
        for size in sizes[max(0, middle - stride) : middle + stride + 1]:
            curve.setdefault(size, split_at(form, phases, size, gpus - size))
    return tuple(curve[size] for size in sorted(curve))


def fastest(splits: Iterable[Split]) -> Split | None:
    """None when nothing is feasible."""
    return min(
        (split for split in splits if split.feasible),
        key=lambda split: (split.step_s.value, -split.rollout_gpus),
        default=None,
    )
