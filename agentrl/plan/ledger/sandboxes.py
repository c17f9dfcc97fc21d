"""The third pool: sandboxes, CPU hours and hosts of a step. Called by the ledger.

A sandbox that holds an episode's state is occupied while the model samples too; one that can be released is not.
Invariant: stateful sandboxes are never fewer than releasable ones.
"""

from __future__ import annotations

import math
from functools import cached_property

from agentrl.plan.figure import Figure, Input, Quantity
from agentrl.plan.inputs import PlanInput
from agentrl.plan.ledger.given import Given
from agentrl.plan.ledger.rollout import Rollout

_LITTLE = "Little 1961, A Proof for the Queuing Formula L = lambda W"


def executions(episodes: Quantity, turns: Quantity) -> Figure:
    value = episodes.value * turns.value
    return Figure("executions", value, "runs", f"{episodes.name} x {turns.name}", (episodes, turns))


def cpu_hours(runs: Quantity, seconds: Quantity, cores: Quantity) -> Figure:
    value = runs.value * seconds.value * cores.value / 3600
    formula = f"{runs.name} x {seconds.name} x {cores.name} / 3600"
    return Figure("cpu_hours", value, "core hours", formula, (runs, seconds, cores))


def releasable_sandboxes(runs: Quantity, seconds: Quantity, target: Quantity) -> Figure:
    """Sandboxes busy at once if each is given back after its command."""
    value = runs.value * seconds.value / target.value
    formula = f"{runs.name} x {seconds.name} / {target.name}"
    return Figure("releasable_sandboxes", value, "sandboxes", formula, (runs, seconds, target), _LITTLE)


def stateful_sandboxes(episodes: Quantity, wall: Quantity, target: Quantity) -> Figure:
    """Sandboxes busy at once if each stays with its episode to the end."""
    value = episodes.value * wall.value / target.value
    formula = f"{episodes.name} x {wall.name} / {target.name}"
    return Figure("stateful_sandboxes", value, "sandboxes", formula, (episodes, wall, target), _LITTLE)


def cpu_hosts(sandboxes: Quantity, cores: Quantity, host_cores: Quantity) -> Figure:
    value = math.ceil(sandboxes.value * cores.value / host_cores.value)
    formula = f"ceil({sandboxes.name} x {cores.name} / {host_cores.name})"
    return Figure("cpu_hosts", value, "hosts", formula, (sandboxes, cores, host_cores))


def versions_spanned(wall: Quantity, interval: Quantity) -> Figure:
    """Policy versions that an episode lives through."""
    value = wall.value / interval.value
    return Figure("versions_spanned", value, "versions", f"{wall.name} / {interval.name}", (wall, interval))


class Sandboxes:
    def __init__(self, plan: PlanInput, rollout: Rollout) -> None:
        self.plan = plan
        self.given = Given(plan)
        self.rollout = rollout

    @cached_property
    def executions(self) -> Figure:
        return executions(self.given.episodes, self.given.turns)

    @cached_property
    def cpu_hours(self) -> Figure:
        return cpu_hours(self.executions, self.given.environment_s, self.given.environment_cores)

    @cached_property
    def reward_hours(self) -> Figure:
        seconds = Input("reward_s", self.plan.workload.reward_s, "s", "[workload]")
        value = self.given.episodes.value * seconds.value / 3600
        return Figure(
            "reward_cpu_hours", value, "core hours", "episodes x reward_s / 3600", (self.given.episodes, seconds)
        )

    @cached_property
    def target(self) -> Quantity:
        """Seconds in which the step's executions are spread: the rollout's own. A plan that states how long a turn
        takes states with `rollout_target_s` how soon the episodes have to be done."""
        work = self.plan.workload
        if work.turn_generation_s is None or work.rollout_target_s is None:
            return self.rollout.throughput
        return Input("rollout_target_s", work.rollout_target_s, "s", "[workload]")

    @cached_property
    def releasable(self) -> Figure:
        return releasable_sandboxes(self.executions, self.given.environment_s, self.target)

    @cached_property
    def stateful(self) -> Figure:
        """One for each episode in flight; by Little's law where the plan states how long a turn takes."""
        if self.plan.workload.turn_generation_s is not None:
            return stateful_sandboxes(self.given.episodes, self.rollout.mean_episode, self.target)
        held = self.rollout.in_flight
        return Figure("stateful_sandboxes", held.value, "sandboxes", held.name, (held,))

    @cached_property
    def hosts(self) -> Figure:
        cores = self.plan.workload.sandbox_cores or self.plan.workload.environment_cores
        host = self.plan.cpu_host
        return cpu_hosts(
            self.stateful,
            Input("sandbox_cores", cores, "cores", "[workload]"),
            Input("host_cores", host.cores, "cores", host.source),
        )
