"""Finds environments and agents by name. Called by the CLI and by every process that runs plugin code.

A name is an entry point of the group `agentrl.envs` or `agentrl.agents`, or `package.module:Class`.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, Literal

from agentrl.core.environment import Environment
from agentrl.core.errors import PluginError

Group = Literal["agentrl.envs", "agentrl.agents"]


def installed(group: Group) -> dict[str, str]:
    """Names and targets (`package.module:Class`) of the installed plugins."""
    return {point.name: point.value for point in sorted(entry_points(group=group))}


def load_class(name: str, group: Group) -> type[Any]:
    """The class behind a plugin name. PluginError says what was tried and the nearest installed name."""
    known = installed(group)
    target = name if ":" in name else known.get(name)
    if target is None:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise PluginError(f"no plugin {name!r} in {group} (installed: {', '.join(known) or 'none'}){hint}")
    module_name, _, class_name = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise PluginError(f"plugin {name!r}: cannot import {module_name!r}: {error}") from error
    found = getattr(module, class_name, None)
    if not inspect.isclass(found):
        raise PluginError(f"plugin {name!r}: {module_name!r} has no class {class_name!r}")
    return found


def load_environment(name: str, options: Mapping[str, Any]) -> Environment:
    """An environment by plugin name, constructed with its options."""
    cls = load_class(name, "agentrl.envs")
    if not issubclass(cls, Environment):
        raise PluginError(f"plugin {name!r}: {cls.__qualname__} is not a subclass of agentrl.Environment")
    return _construct(cls, name, options)  # type: ignore[no-any-return]


def _construct(cls: type[Any], name: str, options: Mapping[str, Any]) -> Any:
    parameters = inspect.signature(cls).parameters
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    for key in options:
        if key not in parameters and not open_ended:
            near = difflib.get_close_matches(key, parameters, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise PluginError(f"{name}: unknown option {key!r} (it takes: {', '.join(parameters) or 'none'}){hint}")
    return cls(**options)


def load_agent(name: str, options: Mapping[str, Any]) -> Any:
    """An agent (see `protocols.Agent`) by plugin name, constructed with its options."""
    return _construct(load_class(name, "agentrl.agents"), name, options)
