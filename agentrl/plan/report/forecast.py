"""A plan's forms run through the simulator. Called by the report and the CLI.

The ledger's own decode time, prefill, training and sync times go in, so that what differs is only what a closed form
cannot hold: queues, tails over many steps, groups, and who waits for whom.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from agentrl.plan.choice.choose import Choice
from agentrl.plan.choice.forms import Form
from agentrl.plan.choice.options import Option
from agentrl.plan.inputs import PlanInput
from agentrl.plan.ledger import Ledger, Rollout, Training
from agentrl.plan.simulate import Parameters, Policy, Result, simulate

STEPS = 8
Progress = Callable[[str, int, int], None]
"""Called with the form and the policy, the steps done and the steps to do."""


def parameters_of(
    ledger: Ledger, option: Option, steps: int = STEPS, seed: int = 0, policy: Policy | None = None
) -> Parameters:
    """What the simulator needs of a plan in one form, with the plan's own policy unless another is named."""
    plan, work, form, rollout = ledger.plan, ledger.plan.workload, option.form, option.rollout
    training_s, sync_s = Training(plan, option.trainer_gpus).total.value, option.sync_s.value
    if not form.separate:
        sync_s += ledger.switch.value
    instances, per_sequence = int(rollout.instances.value), _sequence_s(rollout)
    turns = work.episodes * work.turns
    # What waits for its environment needs no memory. A batch is handed in by whole groups.
    held = math.ceil(work.prompts / instances) * work.samples
    if plan.rollout.in_flight != "batch":
        held = min(held, max(1, round(rollout.flight.in_flight.value)))
    decoding = min(held, int(rollout.capacity.value), plan.rollout.max_sequences or held)
    if not work.environment_s.mean:
        held = decoding
    return Parameters(
        form=form, policy=policy or policies_of(plan, form)[0], replicas=instances, concurrency=held,
        batch=work.episodes, steps=steps, tokens=work.response_tokens, turns=work.turns, environment=work.environment_s,
        decode_base_s=max(0.0, rollout.decode_step.value - rollout.decoding.value * per_sequence),
        decode_sequence_s=per_sequence, decode_limit=decoding if decoding < held else 0,
        prefill_s=rollout.prefill.seconds.value * instances / turns, continue_s_per_token=_continue_s(plan),
        train_s=training_s, sync_s=sync_s, max_lag=plan.form.max_lag, group_size=work.samples, seed=seed,
    )  # fmt: skip


def policies_of(plan: PlanInput, form: Form) -> tuple[Policy, ...]:
    """Of a form. First the plan's own: `at_limit` where samples of several versions meet; a barrier waits for all."""
    if form is Form.COLOCATED_ASYNC:
        return Policy.BACKFILL, Policy.PARTIAL
    own = Policy(plan.form.at_limit) if form is Form.ASYNC else Policy.WAIT
    return own, *(policy for policy in Policy if policy is not own)


def simulate_choice(
    ledger: Ledger, choice: Choice, progress: Progress, steps: int = STEPS, seed: int = 0, every_policy: bool = False
) -> tuple[Result, ...]:
    """Every form that fits, with the split that the choice found best for it; its own policy comes first."""
    results = []
    for option in choice.options:
        policies = policies_of(ledger.plan, option.form)
        for policy in policies if every_policy else policies[:1]:
            tell = partial(progress, f"{option.form}, {policy}")
            results.append(simulate(parameters_of(ledger, option, steps, seed, policy), tell))
    return tuple(results)


def by_form(results: Sequence[Result]) -> Mapping[Form, Result]:
    """Each form with its own policy."""
    found: dict[Form, Result] = {}
    for result in results:
        found.setdefault(result.parameters.form, result)
    return found


def _sequence_s(rollout: Rollout) -> float:
    """Seconds that one more sequence adds to a decode step: its KV is read."""
    given = rollout.given
    rate = given.instance_gpus.value * given.memory_rate.value * given.assumed("memory_efficiency").value
    return rollout.context.value * rollout.kv_per_token.value / rate


def _continue_s(plan: PlanInput) -> float:
    """Seconds of an instance to prefill a token."""
    rate = plan.rollout.gpus_per_instance * plan.gpu.flops * plan.assume.prefill_mfu
    return 2 * plan.shape.active_parameters / rate
