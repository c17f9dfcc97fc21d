"""Each example of a plan as people run it, and its report in a browser."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import chromium, open_page
from runs import run_agentrl

EXAMPLES = Path(__file__).parents[2] / "examples" / "plan"
NAMES = ("8b_reasoning", "32b_reasoning", "671b_moe", "agentic_coding")

WORDS_OUTSIDE = """
[...document.querySelectorAll('svg')].flatMap(svg => {
  const edge = svg.getBoundingClientRect();
  return [...svg.querySelectorAll('text')].filter(text => {
    const box = text.getBoundingClientRect();
    return box.left < edge.left - 1 || box.right > edge.right + 1
      || box.top < edge.top - 1 || box.bottom > edge.bottom + 1;
  }).map(text => svg.querySelector('title').textContent + ': ' + text.textContent);
})
"""
WORDS_ON_WORDS = """
[...document.querySelectorAll('svg')].flatMap(svg => {
  const boxes = [...svg.querySelectorAll('text')].map(text => [text.textContent, text.getBoundingClientRect()]);
  const found = [];
  for (let i = 0; i < boxes.length; i++) for (let j = i + 1; j < boxes.length; j++) {
    const [a, b] = [boxes[i][1], boxes[j][1]];
    const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    const title = svg.querySelector('title').textContent;
    if (wide > 2 && high > 5) found.push(`${title}: ${boxes[i][0]} / ${boxes[j][0]}`);
  }
  return found;
})
"""


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.toml")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
async def test_an_example_runs_and_its_report_opens(name: str, tmp_path: Path) -> None:
    chromium()
    done = run_agentrl("plan", str(EXAMPLES / f"{name}.toml"), "--steps", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a step" in done.stdout
    report = tmp_path / "plans" / f"{name}.html"
    async with open_page(report) as page:
        assert page.requests == [report.as_uri()]
        assert page.logged == []
        assert await page.evaluate("document.querySelectorAll('svg').length") >= 5
        assert await page.evaluate(WORDS_OUTSIDE) == []
        assert await page.evaluate(WORDS_ON_WORDS) == []
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert len(await page.screenshot()) > 50_000


async def test_what_a_page_does_wrong_is_seen(tmp_path: Path) -> None:
    """The checks above can fail."""
    chromium()
    wrong = tmp_path / "wrong.html"
    wrong.write_text(
        "<img src='http://127.0.0.1:9/picture.png'><script>console.error('broken'); nothing.there</script>"
        "<svg width='50' height='50'><title>t</title><text x='40' y='20'>far out</text>"
        "<text x='40' y='22'>on it</text></svg>"
    )
    async with open_page(wrong) as page:
        assert any("picture.png" in address for address in page.requests)
        assert any("broken" in line for line in page.logged)
        assert any("nothing is not defined" in line for line in page.logged)
        assert "t: far out" in await page.evaluate(WORDS_OUTSIDE)
        assert await page.evaluate(WORDS_ON_WORDS) == ["t: far out / on it"]
