"""The report of a plan as one HTML file that opens anywhere: no script, no style, font or image from elsewhere.

Called by the CLI. Invariant: every figure on the page has its formula and source beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from agentrl.plan.choice.choose import Choice
from agentrl.plan.choice.forms import Form
from agentrl.plan.figure import Figure, explain, show
from agentrl.plan.ledger import Ledger
from agentrl.plan.report import bars, lines, timeline
from agentrl.plan.report.forecast import by_form
from agentrl.plan.report.simulated import simulated
from agentrl.plan.report.tables import Rows, form_figures, forms_rows, sections, simulation_rows
from agentrl.plan.simulate import Result

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2328; background: #fff; max-width: 1040px; margin: 2em auto;
  padding: 0 1em; }
h1 { font-size: 26px; margin-bottom: 0; } h2 { font-size: 20px; margin: 2em 0 .3em; border-bottom: 1px solid #d0d7de; }
h3 { font-size: 16px; margin: 1.4em 0 .3em; } p { margin: .4em 0; } .faint { color: #57606a; }
svg { max-width: 100%; height: auto; font-family: system-ui, sans-serif; }
table { border-collapse: collapse; width: 100%; font-size: 14px; } td, th { text-align: left; padding: 3px 10px 3px 0;
  border-bottom: 1px solid #eaeef2; vertical-align: top; } td.n { text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums; } tr.chosen td { font-weight: 600; }
.facts { display: flex; flex-wrap: wrap; gap: .4em 2.4em; margin: 1em 0; } .facts b { display: block; font-size: 21px; }
summary { cursor: pointer; } pre { background: #f6f8fa; padding: .8em; overflow-x: auto; font-size: 12px; }
code { font-size: 13px; }
"""


def page(ledger: Ledger, choice: Choice, results: Sequence[Result]) -> str:
    """The whole document; `results` is empty when nothing was simulated."""
    return "\n".join(
        (
            "<!doctype html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{escape(ledger.plan.name)}: plan of a step</title>',
            f"<style>{STYLE}</style></head><body>",
            *_head(ledger, choice),
            *_forms(ledger, choice),
            *_simulation(choice, results),
            *_figures(ledger, choice),
            "</body></html>",
        )
    )


def _head(ledger: Ledger, choice: Choice) -> Iterator[str]:
    plan, best = ledger.plan, choice.chosen
    work = plan.workload
    yield f"<h1>{escape(plan.name)}</h1>"
    turns = f", {work.turns} turns" if work.turns > 1 else ""
    yield (
        f'<p class="faint">{escape(plan.shape.name)} on {plan.cluster.gpus} {escape(plan.gpu.name)}; '
        f"{work.prompts:,} tasks x {work.samples} attempts{turns}, {work.sampled_tokens:,.0f} sampled tokens each</p>"
    )
    facts = {
        "form": timeline.TITLES[best.form],
        "a step": f"{best.step_s.value:,.0f} s",
        "MFU of the step": f"{100 * best.mfu.value:.1f} %",
        "GPUs of a step": f"${best.usd.value:,.2f}",
        f"{plan.run.steps:,} steps": f"{choice.reliability.run_s.value / 86_400:,.1f} days",
    }
    yield '<div class="facts">'
    yield from (f"<div>{escape(name)}<b>{escape(value)}</b></div>" for name, value in facts.items())
    yield "</div><ul>"
    yield from (f"<li>{escape(reason)}</li>" for reason in choice.reasons)
    yield "</ul>"


def _forms(ledger: Ledger, choice: Choice) -> Iterator[str]:
    yield "<h2>Forms</h2>"
    yield _table(forms_rows(choice))
    yield _derivations(form_figures(choice))
    yield "<h3>Time line of a step</h3>"
    yield timeline.draw(choice, ledger)
    if split := lines.draw_split(choice.options):
        yield "<h3>Splitting the GPUs</h3>"
        yield '<p class="faint">Each side computed on its own GPUs. Dots: the fastest split.</p>'
        yield split
    yield "<h3>Where the peak goes (colocated)</h3>"
    yield bars.draw_waterfall(ledger.waterfall)
    yield "<h3>Memory of one GPU (colocated)</h3>"
    yield bars.draw_memory(ledger.stacks)


def _simulation(choice: Choice, results: Sequence[Result]) -> Iterator[str]:
    if not results:
        return
    steps, seed = len(results[0].steps), results[0].parameters.seed
    yield "<h2>Simulation</h2>"
    yield (
        f'<p class="faint">{steps} steps of each form, seed {seed}, every trajectory with a length of its own. '
        "<i>tail</i>: part of generation beyond full replicas; <i>replicas idle</i>: part of their time in which they "
        "decode nothing, the 10 % and the 90 % quantile; <i>places in use</i>: of those for sequences; "
        "<i>sandboxes</i>: the peak.</p>"
    )
    yield _table(simulation_rows(choice, results))
    yield _derivations([figure for result in results for figure in simulated(result).values()])
    own = by_form(results)
    shown = 4 * max(result.step_s for result in own.values())
    yield "<h3>Trajectories in flight</h3>"
    yield lines.draw_in_flight(own, shown)
    if any(result.sandboxes.peak for result in results):
        yield "<h3>Sandboxes in use</h3>"
        yield lines.draw_sandboxes(own, shown)
    for form, result in own.items():
        if result.lag_mean > 0 and form in (choice.chosen.form, Form.ASYNC):
            yield f"<h3>Lag of the samples, {timeline.TITLES[form]}</h3>"
            yield lines.draw_lag(result)


def _figures(ledger: Ledger, choice: Choice) -> Iterator[str]:
    yield '<h2>Figures</h2><p class="faint">Open a figure for what it rests on.</p>'
    for title, figures in sections(ledger, choice).items():
        yield f"<h3>{escape(title)}</h3><table>"
        yield from map(_row, figures)
        yield "</table>"


def _derivations(figures: Sequence[Figure]) -> str:
    """For a table in rows: its numbers, one by one."""
    rows = "".join(map(_row, figures))
    return f"<details><summary>The derivation of each number</summary><table>{rows}</table></details>"


def _row(figure: Figure) -> str:
    return (
        f"<tr><td><details><summary><code>{escape(figure.name)}</code></summary><pre>{escape(explain(figure))}</pre>"
        f'</details></td><td class="n">{escape(show(figure))}</td><td class="faint">{escape(figure.formula)}</td></tr>'
    )


def _table(rows: Rows) -> str:
    head, *body = rows
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines_ = [f"<tr>{cells}</tr>"]
    for row in body:
        kind = ' class="chosen"' if "chosen" in row else ""
        lines_.append(f"<tr{kind}>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>")
    return f"<table>{''.join(lines_)}</table>"
