"""`agentrl plan`: what a step will take, before it is run; and how far a finished run was from that.

Typed by people before they rent GPUs. Invariant: a plan that cannot be is one line that names the field and the nearest
valid choice, with exit code 2.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn

from agentrl.cli.arguments import find_run
from agentrl.cli.plan_fit import show_fit
from agentrl.cli.plan_tables import comparison_table, figures_table, rows_table
from agentrl.core.errors import ConfigError
from agentrl.plan.choice.choose import Choice, choose
from agentrl.plan.figure import Figure
from agentrl.plan.figure import explain as explanation
from agentrl.plan.inputs import load
from agentrl.plan.ledger import Ledger
from agentrl.plan.report.export import as_json, tree_of
from agentrl.plan.report.forecast import STEPS, simulate_choice
from agentrl.plan.report.page import page
from agentrl.plan.report.simulated import PREFIX, simulated_named
from agentrl.plan.report.tables import STALENESS, forms_rows, named, sections, simulation_rows
from agentrl.plan.simulate import Result

PLANS = Path("plans")
COMPARE = "compare"
WIDE = 400

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="FILE... | compare FILE FILE", help="Plans in TOML, as in examples/plan.", show_default=False
    ),
]


def command(
    words: Words = None,
    explain: Annotated[
        str, typer.Option(help="Print formula, inputs and source of this figure, simulated_* included.")
    ] = "",
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, an array for several files; write no report.")
    ] = False,
    fit: Annotated[str, typer.Option(metavar="RUN", help="Fit a measured run: its name or folder.")] = "",
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the reports.")] = PLANS,
    steps: Annotated[int, typer.Option(min=0, help="Steps to simulate of each form; 0: none.")] = STEPS,
    policies: Annotated[bool, typer.Option("--policies", help="Simulate every policy, not the plan's alone.")] = False,
    seed: Annotated[int, typer.Option(help="Of the simulation.")] = 0,
) -> None:
    """Say what a step takes: FLOPs, bytes, seconds, GPUs, sandboxes and dollars, by form; and write a report.

    `agentrl plan compare A.toml B.toml` shows where two plans differ, `agentrl plan --fit RUN` how far a finished run
    was from what the model says.
    """
    given = words or []
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        # A file or a pipe is as wide as the tables.
        console = Console(highlight=False, width=WIDE)
    if fit:
        _fit(console, fit, given)
        return
    if given[:1] == [COMPARE]:
        _compare(console, given[1:])
        return
    if not given:
        raise ConfigError("name a plan file, as in `agentrl plan examples/plan/8b_reasoning.toml`")
    trees = []
    for path in map(Path, given):
        ledger, choice = _read(path)
        if explain:
            typer.echo(_explanation(ledger, choice, explain, steps, seed))
            continue
        results = _simulate(ledger, choice, steps, seed, policies)
        if json:
            trees.append(tree_of(ledger, choice, results))
            continue
        _show(console, ledger, choice, results)
        out.mkdir(parents=True, exist_ok=True)
        target = out / f"{path.stem}.html"
        target.write_text(page(ledger, choice, results))
        console.print(f"report: {target}", markup=False)
    if trees:
        typer.echo(as_json(trees))


def _fit(console: Console, run: str, given: list[str]) -> None:
    if len(given) > 1:
        raise ConfigError(f"--fit takes one plan file at most, not {len(given)}")
    show_fit(console, find_run(run), load(Path(given[0])) if given else None)


def _read(path: Path) -> tuple[Ledger, Choice]:
    plan = load(path)
    try:
        choice = choose(plan)
        return Ledger(plan, colocated=any(option.split is None for option in choice.options)), choice
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}") from None


def _explanation(ledger: Ledger, choice: Choice, name: str, steps: int, seed: int) -> str:
    if not name.startswith(PREFIX):
        return explanation(named(ledger, choice, name))
    with _progress() as bar:
        task = bar.add_task("", total=steps)

        def tell(done: int, total: int) -> None:
            bar.update(task, description=name, completed=done, total=total)

        return explanation(simulated_named(ledger, choice, name, steps, seed, tell))


def _progress() -> Progress:
    console = Console(stderr=True)
    columns = (
        TextColumn("simulate {task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} steps"),
    )
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _simulate(ledger: Ledger, choice: Choice, steps: int, seed: int, every: bool) -> tuple[Result, ...]:
    if not steps:
        return ()
    with _progress() as bar:
        task = bar.add_task("", total=steps)

        def tell(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        return simulate_choice(ledger, choice, tell, steps, seed, every)


def _show(console: Console, ledger: Ledger, choice: Choice, results: tuple[Result, ...]) -> None:
    plan, best = ledger.plan, choice.chosen
    console.print(f"[bold]{escape(plan.name)}: {escape(plan.shape.name)} on {plan.cluster.gpus} {plan.gpu.name}[/]\n")
    for title, figures in sections(ledger, choice).items():
        console.print(figures_table(title, figures, console.width), "")
    console.print(rows_table("Forms", forms_rows(choice)), "")
    if results:
        steps = len(results[0].steps)
        console.print(rows_table(f"Simulation of {steps} steps", simulation_rows(choice, results)), "")
    console.print(f"[bold]{best.label}[/]: {best.step_s.value:,.0f} s a step")
    for reason in choice.reasons:
        console.print(f"  {reason}", markup=False)


def _compare(console: Console, paths: list[str]) -> None:
    if len(paths) != 2:
        raise ConfigError(f"compare two plan files, as in `agentrl plan compare A.toml B.toml`, not {len(paths)}")
    plans = [_read(Path(path)) for path in paths]
    tables = [sections(*plan) for plan in plans]
    # What stands under the name of a form is compared where both plans show that form; the chosen one's always is.
    apart = {title for title in tables[0].keys() ^ tables[1].keys() if title.startswith(STALENESS)}
    figures = [
        {_plain(figure, choice): figure for title, table in shown.items() if title not in apart for figure in table}
        | _forms(choice)
        for shown, (_, choice) in zip(tables, plans, strict=True)
    ]
    names = [ledger.plan.name for ledger, _ in plans]
    if names[0] == names[1]:
        names = paths
    console.print(comparison_table((names[0], names[1]), figures[0], figures[1]))
    for name, (_, choice) in zip(names, plans, strict=True):
        console.print(f"{name}: {choice.chosen.label}, {choice.chosen.step_s.value:,.0f} s a step", markup=False)


def _plain(figure: Figure, choice: Choice) -> str:
    """A figure of the chosen form is compared with that of the other plan's, whichever form that is."""
    return figure.name.removesuffix(f".{choice.chosen.form}")


def _forms(choice: Choice) -> dict[str, Figure]:
    return {option.step_s.name: option.step_s for option in choice.options}
