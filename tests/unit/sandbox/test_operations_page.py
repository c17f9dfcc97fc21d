"""The operators' page names every error that the sandbox service raises, and every command."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import agentrl.cli.sandbox
import sandbox
from agentrl.core import errors

PAGE = (Path(__file__).parents[3] / "docs" / "sandbox-operations.md").read_text()


def raised() -> set[str]:
    """Codes of the error classes that our sources call, and of the refusals that sandboxd writes."""
    classes = {cls.__name__: cls.code for cls in errors.error_classes().values()}
    codes = set()
    for path in Path(sandbox.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            if name in classes:
                codes.add(classes[name])
            elif name == "Refused" and isinstance(node, ast.Call) and isinstance(node.args[1], ast.Constant):
                codes.add(str(node.args[1].value))
    return {code for code in codes if code.isupper()}


@pytest.mark.parametrize("code", sorted(raised()))
def test_the_page_says_what_an_error_means(code: str) -> None:
    assert f"| `{code}`" in PAGE


def test_the_page_names_every_command() -> None:
    verbs = [command.name or command.callback.__name__ for command in agentrl.cli.sandbox.app.registered_commands]
    missing = [verb for verb in verbs if f"`{verb}" not in PAGE]
    assert not missing
