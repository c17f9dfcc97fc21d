"""The learning curve is a picture that can be opened, for every kind of run."""

from __future__ import annotations

from pathlib import Path

import matplotlib.image
import pytest

from agentrl.observe.curve import Curve, Evaluation, draw


@pytest.mark.parametrize(
    "curve",
    [
        Curve("full", [1, 2, 3], [0.2, 0.5, 0.9], [Evaluation(0, 0.2, 128), Evaluation(3, 0.9, 128)], [0, 1, 2]),
        Curve("no evaluations, no lag", [1], [3.5], []),
        Curve("nothing yet", [], [], []),
    ],
    ids=lambda curve: curve.title,
)
def test_a_picture_is_drawn(curve: Curve, tmp_path: Path) -> None:
    draw(curve, tmp_path / "curve.png")
    height, width, channels = matplotlib.image.imread(tmp_path / "curve.png").shape
    assert (height, width, channels) == (650, 1040, 4)


def test_the_interval_is_wilsons() -> None:
    assert Evaluation(0, 0.5, 128).spread == pytest.approx(0.0854, abs=1e-4)
    assert Evaluation(0, 1.0, 128).spread == pytest.approx(0.0146, abs=1e-4)
    assert Evaluation(0, 0.0, 0).spread == 0.0
