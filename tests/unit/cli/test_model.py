"""The commands that make models, and the plugin for an engine that is not ours."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from agentrl.cli.main import main
from agentrl.weights.vllm_plugin import MODULE


def test_the_plugin_comes_with_the_command_that_loads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["model", "vllm-plugin", str(tmp_path / "plugin"), "--model", "my model"])
    assert not ended.value.code
    words = shlex.split(capsys.readouterr().out)
    assert f"PYTHONPATH={tmp_path / 'plugin'}" in words
    assert words[words.index("--model") + 1] == "my model"
    assert words[words.index("--weight-transfer-config") + 1] == '{"backend": "staged"}'
    assert (tmp_path / "plugin" / f"{MODULE}.py").exists()
    (entry,) = (tmp_path / "plugin").glob("*.dist-info/entry_points.txt")
    assert f"{MODULE}:register" in entry.read_text()
