"""What a simulation found, as figures that say what was simulated. Read by the tables, the page and the CLI.

Invariant: a name holds its form and policy, so that it stands for one number whatever else was simulated.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping

import numpy as np

from agentrl.core.errors import ConfigError
from agentrl.plan.choice.choose import Choice
from agentrl.plan.choice.options import Option
from agentrl.plan.figure import Figure, Input
from agentrl.plan.ledger import Ledger
from agentrl.plan.report.forecast import parameters_of, policies_of
from agentrl.plan.simulate import Parameters, Policy, Result, simulate

PREFIX = "simulated_"
_SOURCE = "agentrl.plan.simulate"
_FORMULAS: Mapping[str, str] = {
    "step_s": "mean seconds of a step",
    "tail_share": "part of the time until a batch is there beyond its tokens at full replicas",
    "trainer_idle": "part of the time in which the trainer has nothing to train on",
    "replicas_idle_p10": "part of its time in which a replica decodes nothing: the 10 % quantile of the replicas",
    "replicas_idle_p90": "part of its time in which a replica decodes nothing: the 90 % quantile of the replicas",
    "place_use": "part of the places' time in which a sequence decodes there",
    "lag": "versions between a trajectory's first token and its training, mean over trajectories",
    "token_lag": "versions between a token and its training, mean over tokens",
    "dropped_share": "of all trajectories that left generation, those that were thrown away",
    "sandboxes": "most sandboxes in use at the end of any moment",
}
Tell = Callable[[int, int], None]


def simulated(result: Result) -> Mapping[str, Figure]:
    """The figures of one simulation by what they are of."""
    known = result.parameters
    low, high = np.quantile(result.idle_share, (0.1, 0.9)).tolist()
    values = {
        "step_s": (result.step_s, "s"),
        "tail_share": (result.tail_share, "share"),
        "trainer_idle": (result.trainer_idle, "share"),
        "replicas_idle_p10": (low, "share"),
        "replicas_idle_p90": (high, "share"),
        "place_use": (result.place_use, "share"),
        "lag": (result.lag_mean, "versions"),
        "token_lag": (result.token_lag_mean, "versions"),
        "dropped_share": (result.dropped_share, "share"),
        "sandboxes": (float(result.sandboxes.peak), "sandboxes"),
    }
    inputs = _inputs(known)
    return {
        key: Figure(_name(key, known), value, unit, f"simulated: {_FORMULAS[key]}; {known.steps} steps, seed "
                    f"{known.seed}, without the first quarter of the steps where a mean over steps", inputs, _SOURCE)
        for key, (value, unit) in values.items()
    }  # fmt: skip


def simulated_named(ledger: Ledger, choice: Choice, name: str, steps: int, seed: int, tell: Tell) -> Figure:
    """Simulates the form and the policy that the name of a figure holds. ConfigError names the nearest one."""
    known = {
        f"{PREFIX}{key}.{option.form}.{policy}": (key, option, policy)
        for option in choice.options
        for policy in policies_of(ledger.plan, option.form)
        for key in _FORMULAS
    }
    if name not in known or not steps:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        raise ConfigError(f"no figure {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    key, option, policy = known[name]
    return simulated(_run(ledger, option, policy, steps, seed, tell))[key]


def _run(ledger: Ledger, option: Option, policy: Policy, steps: int, seed: int, tell: Tell) -> Result:
    return simulate(parameters_of(ledger, option, steps, seed, policy), tell)


def _name(key: str, known: Parameters) -> str:
    return f"{PREFIX}{key}.{known.form}.{known.policy}"


def _inputs(known: Parameters) -> tuple[Input, ...]:
    """What the simulator was given; the ledger derives these."""
    source = "the ledger, for this form's GPUs"
    return (
        Input("replicas", known.replicas, "", source),
        Input("places_per_replica", known.places, "", source),
        Input("decodes_at_most", known.decode_limit or known.places, "", source),
        Input("batch", known.batch, "trajectories", "[workload]"),
        Input("group_size", known.group_size, "", "[workload]"),
        Input("decode_base_s", known.decode_base_s, "s", source),
        Input("decode_sequence_s", known.decode_sequence_s, "s", source),
        Input("turn_prefill_s", known.prefill_s, "s", source),
        Input("training_s", known.train_s, "s", source),
        Input("sync_s", known.sync_s, "s", source),
        Input("max_lag", known.max_lag, "versions", "[form]"),
    )
