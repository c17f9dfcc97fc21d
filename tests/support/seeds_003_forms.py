"""003, chapter 2 section 2, the first example of section 8 and part A question 5: forms and splits."""

from __future__ import annotations

from functools import cache

from seed_plans import plan_8b, plan_32b
from seed_rows import Row, Unreproduced

from agentrl.plan.choice import Choice, Form, Option, Scaled, Split, choose, fastest, split_at, split_curve
from agentrl.plan.choice.phases import PlanPhases
from agentrl.plan.choice.split import rollout_gpus_by_time, work_ratio
from agentrl.plan.figure import Figure, Input
from agentrl.plan.inputs import FormSection
from agentrl.plan.ledger import Flops, Ledger, Rollout, Training, step_mfu

THROUGHPUT, TAIL, TRAINING = Input("throughput_s", 300, "s"), Input("tail_s", 700, "s"), Input("training_s", 300, "s")
NO_SYNC = Input("sync_s", 0, "s")
GENERATION, CARDS = Input("generation_s", 1000, "s"), Input("gpus", 64)


@cache
def _choice() -> Choice:
    """The page's thresholds let 8 versions pass; a limit of 2 that is waited for would cost 72 s a step."""
    return choose(plan_8b().model_copy(update={"form": FormSection(max_lag=8)}))


def _option(form: Form) -> Option:
    option = _choice().option(form)
    assert option is not None
    return option


def _split(form: Form) -> Split:
    split = _option(form).split
    assert split is not None
    return split


def _turns() -> Split:
    """The page takes the one-step split for separate pools that take turns; 37 : 27 would be their best."""
    return split_at(Form.SEPARATE_SYNC, PlanPhases(plan_8b(), Form.SEPARATE_SYNC), 46, 18)


def _mfu(step: Figure) -> Figure:
    ledger = Ledger(plan_8b())
    return step_mfu(ledger.flops.step, ledger.gpus, ledger.given.peak_flops, step)


def _example_1() -> Split:
    """From the page's own two times on all 128 cards."""
    times = Input("throughput_s", 650, "s"), TAIL, Input("training_s", 440, "s"), NO_SYNC
    return split_at(Form.ASYNC, Scaled(*times, 128), 80, 48)


def _example_1_mfu() -> Figure:
    ledger = Ledger(plan_32b())
    return step_mfu(ledger.flops.step, ledger.gpus, ledger.given.peak_flops, _example_1().step_s)


def _scaled_split() -> Split:
    found = fastest(split_curve(Form.ASYNC, Scaled(THROUGHPUT, TAIL, TRAINING, NO_SYNC, 64), 64))
    assert found is not None
    return found


ROWS = [
    Row("003 2.2 colocated 810 s", 810, lambda: _option(Form.COLOCATED).step_s),
    Row("003 2.2 colocated MFU 13 %", 0.13, lambda: _option(Form.COLOCATED).mfu, rounded_to=0.01),
    Row("003 2.2 separate and synchronous 1501 s at 46 : 18", 1501, lambda: _turns().step_s),
    Row("003 2.2 separate and synchronous MFU 7 %", 0.07, lambda: _mfu(_turns().step_s), rounded_to=0.01),
    Row(
        "003 2.2 nearly twice the colocated time",
        2,
        lambda: _turns().step_s.value / _option(Form.COLOCATED).step_s.value,
        rounded_to=1,
    ),
    Row("003 2.2 one-step pipeline 764 s", 764, lambda: _option(Form.ONE_STEP).step_s),
    Row("003 2.2 one-step pipeline MFU 14 %", 0.14, lambda: _option(Form.ONE_STEP).mfu, rounded_to=0.01),
    Row("003 2.2 one-step split 46", 46, lambda: _split(Form.ONE_STEP).rollout_gpus, relative=0),
    Row("003 2.2 one-step split 18", 18, lambda: _split(Form.ONE_STEP).trainer_gpus, relative=0),
    Row("003 2.2 async 619 s", 619, lambda: _option(Form.ASYNC).step_s),
    Row("003 2.2 async MFU 17 %", 0.17, lambda: _option(Form.ASYNC).mfu, rounded_to=0.01),
    Row("003 2.2 async split 42", 42, lambda: _split(Form.ASYNC).rollout_gpus, relative=0),
    Row("003 2.2 async split 22", 22, lambda: _split(Form.ASYNC).trainer_gpus, relative=0),
    Row(
        "003 2.2 async saves 191 s of the colocated step",
        191,
        lambda: _option(Form.COLOCATED).step_s.value - _option(Form.ASYNC).step_s.value,
    ),
    Row("003 2.2 generation to training 1 : 3 by FLOPs", 3, lambda: 1 / _choice().by_flops.value, rounded_to=1),
    Row(
        "003 2.2 generation to training 2 : 1 by time, without the tail",
        2,
        lambda: work_ratio(Rollout(plan_8b(), 64).throughput, Training(plan_8b(), 64).total, "by_time"),
        rounded_to=0.1,
    ),
    Row(
        "003 2.2 training has 3 times the FLOPs",
        3,
        lambda: Flops(plan_8b()).train.value / Flops(plan_8b()).decode.value,
        rounded_to=1,
    ),
    Row("003 2.8 example 1 step at 80 : 48 1170 s, from 650 and 440 s", 1170, lambda: _example_1().step_s),
    Row("003 2.8 example 1 MFU 20 %", 0.20, _example_1_mfu, rounded_to=0.01),
    Row(
        "003 2.8 example 1 ratio 3 : 2, from 650 and 440 s",
        1.5,
        lambda: work_ratio(Input("throughput_s", 650, "s"), Input("training_s", 440, "s"), "by_time"),
    ),
    Row("003 part A q5 async 32 : 32", 32, lambda: _scaled_split().rollout_gpus, relative=0),
    Row("003 part A q5 one-step 3.3 : 1", 3.3, lambda: work_ratio(GENERATION, TRAINING, "by_time")),
    Row(
        "003 part A q5 one-step 49 : 15",
        49,
        lambda: rollout_gpus_by_time(GENERATION, TRAINING, CARDS),
        relative=0,
        rounded_to=1,
    ),
]

UNREPRODUCED = [
    Unreproduced(
        "003 part A q5 one-step split after recomputing each side",
        "49 : 15",
        "the question divides by the times on all cards; recomputed as the page's 46 : 18 is, the tail does not "
        "shrink and 46 : 18 (1,117 s) beats 49 : 15 (1,280 s)",
    ),
    Unreproduced(
        "003 2.2 best split of separate pools that take turns",
        "1501 s at 46 : 18",
        "46 : 18 is the best of the one-step pipeline; taking turns is fastest at 37 : 27 with 1,392 s, "
        "and still the slowest form",
    ),
    Unreproduced(
        "003 2.8 example 1 step at 80 : 48 1170 s, from the ledger",
        "1170 s",
        "1,206 s: the ledger's training takes 449 s on all cards, not 440 (see there), and a broadcast of 66 GB 7 s",
    ),
    Unreproduced(
        "003 2.8 example 2 256 : 256 after the memory check",
        "256 : 256",
        "by the page's own bound of 70 GB a card 160 training cards are enough, 352 : 160 in whole instances of 32 "
        "cards; 256 is the next size only if trainer pools come in units of 128, which it does not say",
    ),
    Unreproduced(
        "003 part C q1 thresholds f < 0.3 and f > 0.4",
        "0.3, 0.4",
        "rules of thumb; the choice compares the computed steps instead (a form has to be 1.3 times faster)",
    ),
]
