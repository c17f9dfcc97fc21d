"""The whole tree of a run's configuration: reading, checking and writing it."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar, get_args

from pydantic import BaseModel, ValidationError, model_validator

from agentrl.core.config.sections import (
    AgentConfig,
    EngineConfig,
    EnvConfig,
    EvalConfig,
    GatewayConfig,
    LaunchConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    SandboxConfig,
    Section,
    StoreConfig,
    TelemetryConfig,
    TrainConfig,
    WarmStartConfig,
    WeightsConfig,
)
from agentrl.core.errors import ConfigError

S = TypeVar("S", bound=Section)


class RunConfig(Section):
    name: str = "run"
    dir: str = "runs"
    """Folder that holds the run's folder."""
    seed: int = 0
    env: EnvConfig = EnvConfig()
    agent: AgentConfig = AgentConfig()
    model: ModelConfig = ModelConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    engine: EngineConfig = EngineConfig()
    gateway: GatewayConfig = GatewayConfig()
    sandbox: SandboxConfig = SandboxConfig()
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    train: TrainConfig = TrainConfig()
    weights: WeightsConfig = WeightsConfig()
    eval: EvalConfig = EvalConfig()
    store: StoreConfig = StoreConfig()
    launch: LaunchConfig = LaunchConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    @model_validator(mode="after")
    def _placed(self) -> Self:
        if self.engine.kind == "vllm" and not self.engine.urls:
            raise ValueError("engine.kind = 'vllm' needs engine.urls: only embedded engines are started by a run")
        return self

    @model_validator(mode="after")
    def _corrected(self) -> Self:
        loss, lag = self.train.loss, self.rollout.lag_limit
        if lag > 0 and (loss.correction == "none" or loss.proximal == "behavior"):
            setting = (
                "train.loss.correction = 'none'" if loss.correction == "none" else "train.loss.proximal = 'behavior'"
            )
            raise ValueError(
                f"{setting} with a lag of up to {lag} (rollout.form = {self.rollout.form!r}) trains on samples of "
                "older policies as if they were current: set train.loss.correction = 'token_tis' and "
                "train.loss.proximal = 'recompute', or rollout.form = 'sync'"
            )
        if self.rollout.min_scored > self.rollout.group_size:
            raise ValueError(
                f"rollout.min_scored = {self.rollout.min_scored} exceeds rollout.group_size = "
                f"{self.rollout.group_size}: no group would ever be ready"
            )
        return self

    @property
    def folder(self) -> Path:
        return Path(self.dir) / self.name


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a TOML file (None: all defaults), apply `section.key=value` overrides, validate. Raises ConfigError."""
    tree = read_toml(path) if path else {}
    where = str(path) if path else "defaults"
    for override in overrides:
        _override(tree, override)
    return parse_config(tree, where)


def read_toml(path: Path) -> dict[str, Any]:
    """The tree of a TOML file. Raises ConfigError."""
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def parse_config(tree: Mapping[str, Any], where: str = "config") -> RunConfig:
    """Validate a tree. ConfigError lists every problem, each with its dotted key."""
    return parse_section(RunConfig, tree, where)


def parse_section(kind: type[S], tree: Mapping[str, Any], where: str) -> S:
    """Validate a tree as `kind`, which need not be a run's. ConfigError as `parse_config`."""
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        problems = [_problem(kind, item["loc"], item["type"], item["msg"]) for item in error.errors()]
        raise ConfigError(f"{where}: " + "; ".join(problems)) from None


def _override(tree: dict[str, Any], text: str) -> None:
    key, equals, raw = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {text!r}: write section.key=value")
    try:
        value = tomllib.loads(f"v = {raw}")["v"]
    except tomllib.TOMLDecodeError:
        value = raw
    *parents, leaf = key.strip().split(".")
    for parent in parents:
        child = tree.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"override {text!r}: {parent!r} is not a section")
        tree = child
    tree[leaf] = value


def _problem(section: type[BaseModel], loc: tuple[int | str, ...], kind: str, message: str) -> str:
    dotted = ".".join(str(part) for part in loc)
    if kind != "extra_forbidden":
        message = message.removeprefix("Value error, ")
        return f"{dotted}: {message}" if dotted else message
    known = known_keys(section)
    near = difflib.get_close_matches(dotted, known, n=1, cutoff=0.5)
    if not near:
        last = str(loc[-1])
        near = [key for key in known if key.split(".")[-1] in difflib.get_close_matches(last, [last], n=1)][:1]
    return f"unknown key {dotted!r}" + (f"; did you mean {near[0]!r}?" if near else "")


def known_keys(section: type[BaseModel] = RunConfig, prefix: str = "") -> list[str]:
    """Every dotted key of the tree."""
    keys: list[str] = []
    for name, field in section.model_fields.items():
        kinds = [field.annotation, *get_args(field.annotation)]
        inner = next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)
        keys.append(prefix + name)
        if inner is not None:
            keys.extend(known_keys(inner, f"{prefix}{name}."))
    return keys


def changed_settings(config: RunConfig) -> dict[str, Any]:
    """Dotted keys whose values are not the defaults."""
    return _changed(config.model_dump(mode="json"), RunConfig().model_dump(mode="json"), "")


def _changed(tree: Mapping[str, Any], default: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and isinstance(default.get(key), dict):
            found |= _changed(value, default[key], f"{prefix}{key}.")
        elif key not in default or value != default[key]:
            found[prefix + key] = value
    return found


def dump_toml(config: RunConfig) -> str:
    """The whole tree as TOML, defaults included; `load_config` reads it back to an equal config."""
    lines: list[str] = []
    _dump_table(json.loads(config.model_dump_json()), "", lines)
    return "\n".join(lines).strip() + "\n"


def _dump_table(table: Mapping[str, Any], prefix: str, lines: list[str]) -> None:
    for key, value in table.items():
        if not isinstance(value, dict) and value is not None:
            lines.append(f"{_key(key)} = {_value(value)}")
    for key, value in table.items():
        if isinstance(value, dict):
            lines += ["", f"[{prefix}{_key(key)}]"]
            _dump_table(value, f"{prefix}{_key(key)}.", lines)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _value(key)


def _value(value: Any) -> str:
    if isinstance(value, str):
        # TOML has JSON's escapes, but knows no surrogate pairs and wants DEL escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_key(key)} = {_value(inner)}' for key, inner in value.items())}}}"
    return json.dumps(value)
