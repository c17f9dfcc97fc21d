"""The simulator of an RL step: discrete events, seeded, from laptops to ten thousand GPUs.

Used by the plan's report and benches. Invariant: equal parameters give equal numbers, on any machine.
"""

from agentrl.plan.choice.forms import Form
from agentrl.plan.simulate.parameters import Parameters, Policy
from agentrl.plan.simulate.result import Result, Series, Step
from agentrl.plan.simulate.run import simulate

__all__ = [
    "Form",
    "Parameters",
    "Policy",
    "Result",
    "Series",
    "Step",
    "simulate",
]
