"""The choices of multi-turn rollouts: how many episodes to admit, whether a sandbox waits for its model, and whether KV
waits for its sandbox.

Called by `choose` when the workload has an environment.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from agentrl.plan.figure import Figure, Quantity, total
from agentrl.plan.ledger import Rollout, Sandboxes
from agentrl.plan.ledger.given import Given

WORTH = 0.9
"""A window is proposed when it holds less than this share of what the plan admits."""
_LITTLE = "Little 1961, A Proof for the Queuing Formula L = lambda W"


@dataclass(frozen=True)
class SandboxChoice:
    stateful: Figure
    releasable: Figure
    excess: Figure
    """Sandboxes that only wait for the model, as a share of the stateful ones."""
    break_even_s: Figure
    """Releasing pays when saving and restoring a sandbox takes less than this a turn."""


@dataclass(frozen=True)
class ResidencyChoice:
    resident: Figure
    """Share of the waiting KV that stays on the GPUs."""
    recompute_s: Figure
    """Prefill of a step when what was evicted is computed again."""
    offload_s: Figure
    """Prefill of a step when all of it is copied back from host memory instead; hidden where copies overlap compute."""
    host_bytes: Figure
    """Host memory that offloading takes."""

    @property
    def offload_pays(self) -> bool:
        return self.offload_s.value < self.recompute_s.value


@dataclass(frozen=True)
class WindowChoice:
    """What admitting fewer episodes at once than a batch would give."""

    in_flight: Figure
    """Of the plan."""
    throughput_s: Figure
    window_in_flight: Figure
    """The fewest with which the engines are as fast as they get (`rollout.in_flight = 'window'`)."""
    window_throughput_s: Figure
    window_residency: Figure

    @property
    def pays(self) -> bool:
        return self.window_in_flight.value < WORTH * self.in_flight.value


def window_choice(rollout: Rollout) -> WindowChoice:
    plan = rollout.plan
    narrow = plan.model_copy(update={"rollout": plan.rollout.model_copy(update={"in_flight": "window"})})
    window = Rollout(narrow, rollout.gpus, colocated=rollout.colocated)

    def named(name: str, figure: Figure) -> Figure:
        return replace(figure, name=name)

    return WindowChoice(
        rollout.in_flight,
        rollout.throughput,
        named("window_in_flight", window.in_flight),
        named("window_throughput_s", window.throughput),
        named("window_residency", window.prefill.residency),
    )


def excess_share(stateful: Quantity, releasable: Quantity) -> Figure:
    value = 1 - releasable.value / stateful.value
    formula = f"1 - {releasable.name} / {stateful.name}"
    return Figure("idle_sandbox_share", value, "share", formula, (releasable, stateful), _LITTLE)


def break_even_s(wall: Quantity, turns: Quantity, environment: Quantity) -> Figure:
    """What a turn takes besides its environment: a sandbox that is given back needs its restore instead."""
    value = wall.value / turns.value - environment.value
    formula = f"{wall.name} / {turns.name} - {environment.name}"
    return Figure("release_break_even_s", value, "s", formula, (wall, turns, environment), _LITTLE)


def sandbox_choice(sandboxes: Sandboxes) -> SandboxChoice:
    given = sandboxes.given
    return SandboxChoice(
        sandboxes.stateful,
        sandboxes.releasable,
        excess_share(sandboxes.stateful, sandboxes.releasable),
        break_even_s(sandboxes.rollout.mean_episode, given.turns, given.environment_s),
    )


def residency_choice(rollout: Rollout) -> ResidencyChoice:
    given: Given = rollout.given
    prefill, per_token = rollout.prefill, rollout.kv_per_token
    waiting = rollout.tokens.prefill_cold.value - rollout.tokens.prefill_new.value
    evicted = Figure(
        "copied_tokens",
        (1 - prefill.residency.value) * waiting,
        "tokens",
        f"(1 - {prefill.residency.name}) x (prefill_cold_tokens - prefill_new_tokens)",
        (prefill.residency, rollout.tokens.prefill_cold, rollout.tokens.prefill_new),
    )
    rate, gpus, every = (
        given.assumed("host_copy_bytes_per_s", "B/s"),
        given.gpus("rollout_gpus", rollout.gpus),
        rollout.tokens.all,
    )
    copy = Figure(
        "kv_copy_s",
        (evicted.value + every.value) * per_token.value / (gpus.value * rate.value),
        "s",
        f"({evicted.name} + {every.name}) x {per_token.name} / ({gpus.name} x {rate.name})",
        (evicted, every, per_token, gpus, rate),
        "vLLM documentation, KV offloading: every token goes out once, what was evicted comes in when its turn begins",
    )
    held = Figure(
        "host_kv_bytes",
        max(
            0.0,
            rollout.in_flight.value * rollout.context.value * per_token.value
            - rollout.instances.value * rollout.pool.value,
        ),
        "B",
        f"{rollout.in_flight.name} x {rollout.context.name} x {per_token.name} "
        f"- {rollout.instances.name} x {rollout.pool.name}",
        (rollout.in_flight, rollout.context, per_token, rollout.instances, rollout.pool),
    )
    return ResidencyChoice(
        prefill.residency, prefill.seconds, total("offload_prefill_s", "s", (prefill.warm, copy)), held
    )
