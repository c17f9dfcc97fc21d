"""The report's pictures and page, without a browser: what they show and that they stand alone."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from agentrl.core.errors import ConfigError
from agentrl.plan.choice.choose import choose
from agentrl.plan.choice.forms import Form
from agentrl.plan.figure import explain, show
from agentrl.plan.inputs import PlanInput, load
from agentrl.plan.ledger import Ledger
from agentrl.plan.report.export import as_json, tree_of
from agentrl.plan.report.forecast import parameters_of, simulate_choice
from agentrl.plan.report.page import page
from agentrl.plan.report.simulated import simulated, simulated_named
from agentrl.plan.report.svg import Scale, label, ticks
from agentrl.plan.report.tables import form_figures, named, sections
from agentrl.plan.report.timeline import lanes
from agentrl.plan.simulate import Policy, simulate

EXAMPLES = Path(__file__).parents[3] / "examples" / "plan"
PLAN = PlanInput.model_validate(
    {
        "name": "test <plan>",
        "model": {"name": "Llama-3-8B"},
        "workload": {
            "prompts": 64,
            "samples": 8,
            "turns": 3,
            "response_tokens": {"kind": "lognormal", "mean": 700, "cap": 8192},
            "environment_s": 10,
        },
        "cluster": {"gpu": "H100", "gpus": 16},
        "form": {"at_limit": "drop"},
    }
)


def test_ticks_are_round_and_within() -> None:
    assert ticks(0, 100, 5) == [0, 20, 40, 60, 80, 100]
    assert ticks(0, 1, 4) == [0, 0.25, 0.5, 0.75, 1]
    assert ticks(0, 867.3, 6) == [0, 200, 400, 600, 800]
    assert ticks(5, 5) == [5]
    for tick in ticks(-3.7, 12.2):
        assert -3.7 <= tick <= 12.2


def test_labels_are_short() -> None:
    assert [label(value) for value in (0, 0.25, 1500, 32_768, 2.5e6, 4e9)] == [
        "0",
        "0.25",
        "1,500",
        "32.77k",
        "2.5M",
        "4G",
    ]


def test_a_scale_maps_its_ends() -> None:
    scale = Scale(0, 50, 100, 20)
    assert (scale(0), scale(25), scale(50)) == (100, 60, 20)
    assert Scale(3, 3, 7, 9)(3) == 7


def test_lanes_of_a_form_take_its_step() -> None:
    ledger, choice = Ledger(PLAN), choose(PLAN)
    for option in choice.options:
        pools = lanes(option, ledger)
        assert sum(lane.gpus for lane in pools) == 16
        for lane in pools:
            assert sum(segment.seconds for segment in lane.segments) <= option.step_s.value * (1 + 1e-9)
        longest = max(sum(segment.seconds for segment in lane.segments) for lane in pools)
        assert longest == pytest.approx(option.step_s.value)


def test_the_simulator_gets_the_plans_own_numbers() -> None:
    ledger, choice = Ledger(PLAN), choose(PLAN)
    option = choice.option(Form.ASYNC)
    assert option is not None
    assert option.split is not None
    found = parameters_of(ledger, option, steps=3, seed=2)
    assert (found.policy, found.group_size, found.turns, found.batch) == (Policy.DROP, 8, 3, 512)
    assert found.replicas == option.split.rollout_gpus
    assert found.train_s == option.split.training_s.value
    assert found.decode_step_s(option.rollout.decoding.value) == pytest.approx(option.rollout.decode_step.value)
    colocated = choice.option(Form.COLOCATED)
    assert colocated is not None
    step = simulate(parameters_of(ledger, colocated, steps=4)).step_s
    assert step == pytest.approx(colocated.step_s.value, rel=0.5)


@pytest.mark.parametrize("name", ["8b_reasoning", "671b_moe"])
def test_the_simulation_of_an_example_comes_near_the_closed_form(name: str) -> None:
    plan = load(EXAMPLES / f"{name}.toml")
    ledger, choice = Ledger(plan), choose(plan)
    for option in choice.options:
        # Closed forms count the longest length of a batch as a quantile; the mean of the longest is above it.
        step = simulate(parameters_of(ledger, option, steps=8)).step_s
        assert step == pytest.approx(option.step_s.value, rel=0.12), option.label


def test_the_page_stands_alone_and_its_pictures_are_well_formed() -> None:
    ledger, choice = Ledger(PLAN), choose(PLAN)
    calls: list[tuple[str, int, int]] = []
    results = simulate_choice(ledger, choice, lambda *call: calls.append(call), steps=2)
    assert len(calls) == 2 * len(choice.options)
    text = page(ledger, choice, results)
    pictures = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    titles = [
        next(ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}title")).text for picture in pictures
    ]
    for title in (
        "Time line of a step in each form", "Step time by split of the GPUs", "MFU waterfall",
        "Memory of one GPU by owner", "Lag of the samples", "Sandboxes in use over time",
    ):  # fmt: skip
        assert title in titles
    assert not re.search(r"<script|<link|<img|@import|url\(|src=", text)
    assert set(re.findall(r"https?://[^\"<]*", text)) == {"http://www.w3.org/2000/svg"}
    assert "test &lt;plan&gt;" in text
    assert "test <plan>" not in text


def test_a_page_without_a_simulation_has_the_ledgers_pictures() -> None:
    text = page(Ledger(PLAN), choose(PLAN), ())
    assert "<h2>Simulation</h2>" not in text
    assert text.count("<svg") == 4


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_printed_number_can_be_explained(path: Path) -> None:
    plan = load(path)
    choice = choose(plan)
    ledger = Ledger(plan, colocated=any(option.split is None for option in choice.options))
    printed = [figure for figures in sections(ledger, choice).values() for figure in figures]
    seen: dict[str, float] = {}
    for figure in (*printed, *form_figures(choice)):
        found = named(ledger, choice, figure.name)
        assert found.value == figure.value, figure.name
        assert seen.setdefault(figure.name, figure.value) == figure.value, figure.name
        words = explain(found)
        assert words.startswith(f"{figure.name} = {show(figure)}\n  = {figure.formula}   <- ")
        assert math.isfinite(figure.value)


def test_a_simulated_number_says_what_was_simulated() -> None:
    ledger, choice = Ledger(PLAN), choose(PLAN)
    results = simulate_choice(ledger, choice, lambda *_: None, steps=3, seed=5, every_policy=True)
    figures = [figure for result in results for figure in simulated(result).values()]
    names = [figure.name for figure in figures]
    assert len(names) == len(set(names)) == 10 * len(results)
    for figure in figures[:10] + figures[-10:]:
        found = simulated_named(ledger, choice, figure.name, 3, 5, lambda *_: None)
        assert found == figure
        words = explain(found)
        assert "3 steps, seed 5" in words
        assert "decode_base_s" in words
    with pytest.raises(ConfigError, match=r"did you mean 'simulated_step_s\.async\.drop'"):
        simulated_named(ledger, choice, "simulated_steps_s.async.drop", 3, 5, lambda *_: None)


def test_several_plans_are_one_json_document() -> None:
    tree = tree_of(Ledger(PLAN), choose(PLAN), ())
    assert json.loads(as_json([tree]))["name"] == "test <plan>"
    assert [found["name"] for found in json.loads(as_json([tree, tree]))] == ["test <plan>"] * 2


@pytest.mark.parametrize("name", ["671b_moe", "agentic_coding"])
def test_a_formula_of_waiting_names_no_figure_that_is_printed_with_another_value(name: str) -> None:
    plan = load(EXAMPLES / f"{name}.toml")
    shown = sections(Ledger(plan), choose(plan))
    printed = {figure.name: figure.value for figures in shown.values() for figure in figures}
    used = {part.name: part.value for figure in shown["Waiting"] for part in figure.inputs}
    assert {"generation_s.one_step", "training_s.one_step"} <= used.keys()
    assert {part: value for part, value in used.items() if printed.get(part, value) != value} == {}
