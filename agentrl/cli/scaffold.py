"""Writes the plugin package of a new environment. Called by `agentrl env new`.

Invariant: nothing that exists is overwritten, and what is written installs with pip and passes its own test.
"""

from __future__ import annotations

import keyword
import re
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from agentrl.core.errors import ConfigError
from agentrl.core.plugins import installed


def write_package(name: str, folder: Path) -> list[Path]:
    """The files of a package that provides the environment `name`, under `folder`; returns their paths."""
    _check_name(name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: exists and is not an empty folder; choose another with --folder")
    package = f"{name}_env"
    values = {
        "name": name,
        "package": package,
        "distribution": f"agentrl-env-{name.replace('_', '-')}",
        "cls": "".join(word.capitalize() for word in name.split("_")),
    }
    targets = {
        "pyproject.toml": folder / "pyproject.toml",
        "README.md": folder / "README.md",
        "__init__.py": folder / package / "__init__.py",
        "environment.py": folder / package / "environment.py",
        "test_environment.py": folder / "tests" / "test_environment.py",
    }
    templates = Environment(
        loader=PackageLoader("agentrl.cli", "templates/env"), undefined=StrictUndefined, keep_trailing_newline=True
    )
    for template, target in targets.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(templates.get_template(f"{template}.jinja").render(values))
    return list(targets.values())


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name):
        raise ConfigError(f"environment name {name!r}: use lower-case words joined by _, e.g. 'bug_hunt'")
    known = installed("agentrl.envs")
    if name in known:
        raise ConfigError(f"an environment {name!r} is installed already ({known[name]}); choose another name")
