"""`agentrl plan` in this process: figures, derivations, comparisons, and plans that cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl.cli.main import main

PLAN = """
[model]
name = "Llama-3-8B"
[workload]
prompts = 64
samples = 8
response_tokens = { kind = "lognormal", mean = 2048, cap = 8192 }
[cluster]
gpu = "H100"
gpus = 16
"""


def agentrl(*arguments: str) -> int:
    try:
        main(arguments)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "small.toml"
    path.write_text(PLAN)
    return path


def test_a_plan_is_printed_and_written_as_a_page(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert agentrl("plan", "small.toml", "--steps", "2") == 0
    shown = capsys.readouterr().out
    for words in ("decode_step_s", "MFU waterfall", "Forms", "Simulation of 2 steps", "report: plans/small.html"):
        assert words in shown
    assert shown.startswith("small: Llama-3-8B on 16 H100"), "named as its file when it has no name"
    assert "<svg" in Path("plans/small.html").read_text()


def test_a_narrow_terminal_cuts_formulas_and_no_number(
    plan: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    assert agentrl("plan", "small.toml", "--steps", "0") == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("instance_tokens_per_s"))
    assert "tokens/s" in line
    assert line.endswith("\N{HORIZONTAL ELLIPSIS}")


def test_a_drop_limit_is_shown_for_the_form_that_has_it(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan.write_text(PLAN + '[form]\nkind = "async"\nat_limit = "drop"\nmax_lag = 2\n')
    assert agentrl("plan", "small.toml", "--steps", "0") == 0
    shown = capsys.readouterr().out
    assert "Staleness, async" in shown
    assert "over max_lag = 2" in shown
    plan.write_text(PLAN + '[form]\nkind = "colocated_async"\n')
    assert agentrl("plan", "small.toml", "--steps", "0") == 0
    shown = capsys.readouterr().out
    assert "Staleness, colocated async" in shown
    assert "dropped_share" not in shown, "it cuts and continues, whatever the lag"


def test_a_rollout_target_that_is_not_met_is_told(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for target, told in ((1, True), (1_000_000, False)):
        plan.write_text(PLAN.replace("samples = 8", f"samples = 8\nrollout_target_s = {target}"))
        assert agentrl("plan", "small.toml", "--steps", "0") == 0
        assert ("over workload.rollout_target_s = 1" in capsys.readouterr().out) is told


def test_a_plan_that_only_fits_in_separate_pools_is_printed(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan.write_text(PLAN + "[rollout]\nresident_bytes = 70e9\n")
    assert agentrl("plan", "small.toml", "--steps", "2") == 0
    assert "rollout.gpus_per_instance: 1 H100 cannot hold" in capsys.readouterr().out


def test_json_holds_every_figure_and_writes_nothing(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert agentrl("plan", "small.toml", "--json", "--steps", "2") == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["figures"]["Step"]["step_s"]["unit"] == "s"
    assert [found["form"] for found in tree["simulation"]] == list(tree["forms"])
    assert tree["chosen"] in tree["forms"]
    assert not Path("plans").exists()


def test_several_plans_are_one_json_array(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("more.toml").write_text(PLAN.replace("gpus = 16", "gpus = 32"))
    assert agentrl("plan", "small.toml", "more.toml", "--json", "--steps", "0") == 0
    assert [tree["name"] for tree in json.loads(capsys.readouterr().out)] == ["small", "more"]


def test_a_simulated_figure_is_explained(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert agentrl("plan", "small.toml", "--explain", "simulated_step_s.async.wait", "--steps", "2") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("simulated_step_s.async.wait = ")
    assert "2 steps, seed 0" in shown
    assert agentrl("plan", "small.toml", "--explain", "simulated_step_s.asink.wait") == 2


def test_every_policy_is_simulated_when_asked(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert agentrl("plan", "small.toml", "--json", "--steps", "2", "--policies") == 0
    found = [(one["form"], one["policy"]) for one in json.loads(capsys.readouterr().out)["simulation"]]
    assert len(found) == len(set(found)) == 4 * 4 + 2
    assert found[0][1] in ("wait", "backfill")


def test_the_same_seed_prints_the_same_simulation(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for seed in ("3", "3", "4"):
        assert agentrl("plan", "small.toml", "--json", "--steps", "2", "--seed", seed) == 0
        shown.append(json.loads(capsys.readouterr().out)["simulation"])
    assert shown[0] == shown[1] != shown[2]


def test_a_figure_is_explained_down_to_its_inputs(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert agentrl("plan", "small.toml", "--explain", "decode_step_s") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("decode_step_s = ")
    for words in ("memory_bytes_per_s", "NVIDIA H100", "Pope et al.", "kv_bytes_per_token"):
        assert words in shown


def test_two_plans_are_compared_where_they_differ(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("more.toml").write_text(PLAN.replace("gpus = 16", "gpus = 32"))
    assert agentrl("plan", "compare", "small.toml", "more.toml") == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert "0.5 x" in lines["train_s"]
    assert "kv_bytes_per_token" not in lines
    assert {"small:", "more:"} <= set(lines)


def test_lags_are_compared_where_they_are_of_one_form(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for other, shown in (("async", False), ("colocated_async", True)):
        plan.write_text(PLAN + '[form]\nkind = "colocated_async"\n')
        Path("more.toml").write_text(PLAN.replace("samples = 8", "samples = 12") + f'[form]\nkind = "{other}"\n')
        assert agentrl("plan", "compare", "small.toml", "more.toml") == 0
        assert ("mean_lag" in capsys.readouterr().out) is shown


WRONG = {
    "negative length": (("mean = 2048", "mean = -2048"), ("response_tokens", "mean", "greater than or equal to 0")),
    "mean over the cap": (("cap = 8192", "cap = 1024"), ("response_tokens", "cap of 1024")),
    "unknown GPU": (('gpu = "H100"', 'gpu = "H10"'), ("cluster.gpu", "'H10'", "nearest is 'H100'")),
    "unknown model": (("Llama-3-8B", "Lama-3-8B"), ("model.name", "nearest is 'Llama-3-8B'")),
    "unknown key": (
        ("prompts = 64", "prompts = 64\npromts = 3"),
        ("workload.promts", "did you mean 'workload.prompts'"),
    ),
    "unknown form": (
        ("[cluster]", '[form]\nkind = "asinc"\n[cluster]'),
        ("form.kind: Input should be 'auto'", "'async'"),
    ),
    "no GPU": (("gpus = 16", "gpus = 0"), ("cluster.gpus", "greater than 0")),
    "fits nowhere": (("Llama-3-8B", "DeepSeek-V3"), ("gpus", "H100", "DeepSeek-V3", "nearest")),
    "not TOML": (("[model]", "[model"), ("not valid TOML",)),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_plan_that_cannot_be_names_the_field(name: str, plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (old, new), words = WRONG[name]
    assert old in PLAN
    plan.write_text(PLAN.replace(old, new))
    assert agentrl("plan", "small.toml") == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "Traceback" not in shown.err
    assert "small.toml" in shown.err
    for word in words:
        assert word in shown.err


COMMANDS = {
    "no file": (("plan",), "name a plan file"),
    "missing file": (("plan", "nope.toml"), "nope.toml: no such file"),
    "unknown figure": (("plan", "small.toml", "--explain", "decode_stp_s"), "did you mean 'decode_step_s'"),
    "one to compare": (("plan", "compare", "small.toml"), "compare two plan files"),
    "unknown run": (("plan", "--fit", "nope"), "no run 'nope'"),
    "two plans to fit": (("plan", "--fit", "nope", "small.toml", "small.toml"), "one plan file at most"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_cannot_be_says_what_to_do(name: str, plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, words = COMMANDS[name]
    assert agentrl(*arguments) == 2
    shown = capsys.readouterr().err
    assert words in shown
    assert "Traceback" not in shown
