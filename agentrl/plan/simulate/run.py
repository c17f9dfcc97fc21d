"""One entry for every form."""

from __future__ import annotations

from agentrl.plan.choice.forms import Form
from agentrl.plan.simulate.batches import simulate_one_step, simulate_sync
from agentrl.plan.simulate.parameters import Parameters
from agentrl.plan.simulate.progress import Progress, silent
from agentrl.plan.simulate.result import Result
from agentrl.plan.simulate.stream import simulate_async

FORMS = {
    Form.COLOCATED: simulate_sync,
    Form.COLOCATED_ASYNC: simulate_sync,
    Form.SEPARATE_SYNC: simulate_sync,
    Form.ONE_STEP: simulate_one_step,
    Form.ASYNC: simulate_async,
}


def simulate(parameters: Parameters, progress: Progress = silent) -> Result:
    return FORMS[parameters.form](parameters, progress)
