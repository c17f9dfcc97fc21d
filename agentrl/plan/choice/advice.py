"""What else a plan should set, in sentences. Called by `choose`, whose reasons they follow."""

from __future__ import annotations

from agentrl.plan.choice.agentic import ResidencyChoice, SandboxChoice, WindowChoice
from agentrl.plan.choice.reliability import Reliability
from agentrl.plan.choice.synchronization import SyncCost
from agentrl.plan.figure import Quantity, show

DEAR_SYNC = 0.1
"""Share of a step above which sending less, or from more ranks, is worth its parts."""


def advice(
    step_s: Quantity,
    sync: SyncCost,
    saving: Reliability,
    sandboxes: SandboxChoice | None,
    residency: ResidencyChoice | None,
    window: WindowChoice | None,
) -> tuple[str, ...]:
    found = []
    if sync.share.value > DEAR_SYNC:
        found.append(
            f"weight sync takes {show(sync.share)} of the step, worth {show(sync.tax_gpus)}: form.sync_method = "
            "'multi_source', or a delta (form.changed_share)"
        )
    if saving.write_s.value > DEAR_SYNC * step_s.value:
        found.append(
            f"a checkpoint takes {show(saving.write_s)} to write: save asynchronously, which stops the trainer for "
            f"{show(saving.copy_s)}"
        )
    if sandboxes is not None and sandboxes.excess.value > 0:
        found.append(
            f"of {show(sandboxes.stateful)} {show(sandboxes.excess)} wait for the model at any time: releasing them "
            f"between turns pays if saving and restoring one takes less than {show(sandboxes.break_even_s)}"
        )
    if window is not None and window.pays:
        found.append(
            f"{window.window_in_flight.value:,.0f} episodes in flight (rollout.in_flight = 'window') keep the "
            f"engines as busy as {window.in_flight.value:,.0f}, and {show(window.window_residency)} of the KV on them: "
            f"generation without its tail takes {show(window.window_throughput_s)}, not {show(window.throughput_s)}"
        )
    if residency is not None and residency.offload_pays:
        found.append(
            f"{show(residency.resident)} of the waiting turns' KV stays on the GPUs; keeping the rest in "
            f"{show(residency.host_bytes)} of host memory (rollout.kv_offload) prefills "
            f"{show(residency.offload_s)} a step instead of {show(residency.recompute_s)}"
        )
    return tuple(found)
