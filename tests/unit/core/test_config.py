"""The config tree: what is refused, and with which words."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.core.config import dump_toml, known_keys, load_config, parse_config
from agentrl.core.errors import ConfigError


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("rollout.max_lags=3", "'rollout.max_lag'"),
        ("trian.lr=1", "'train'"),
        ("train.los.clip_low=0.1", "'train.los"),
        ("rollout.limits.turn=3", "'rollout.limits.turns'"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_one(override: str, named: str) -> None:
    with pytest.raises(ConfigError, match="unknown key") as caught:
        load_config(None, [override])
    assert named in caught.value.message


def test_every_problem_is_listed_with_its_key() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["train.lr=-1", "train.steps=none", "engine.kind=magic"])
    assert all(key in caught.value.message for key in ("train.lr", "train.steps", "engine.kind"))


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("train.steps=7", lambda c: c.train.steps, 7),
        ("train.lr=1e-4", lambda c: c.train.lr, 1e-4),
        ("rollout.form=sync", lambda c: c.rollout.form, "sync"),
        ('rollout.form="sync"', lambda c: c.rollout.form, "sync"),
        ("telemetry.tensorboard=false", lambda c: c.telemetry.tensorboard, False),
        ('engine.urls=["http://a", "http://b"]', lambda c: c.engine.urls, ("http://a", "http://b")),
        ("env.options.level=2", lambda c: c.env.options["level"], 2),
        ("store.url=postgresql+asyncpg://u@h/d?a=b", lambda c: c.store.url, "postgresql+asyncpg://u@h/d?a=b"),
    ],
)
def test_overrides_reach_their_key(override: str, read: object, value: object) -> None:
    assert read(load_config(None, [override])) == value  # type: ignore[operator]


@pytest.mark.parametrize("override", ["train.steps", "=3", "name.first=x y"])
def test_a_malformed_override_is_refused(override: str, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('name = "plain"\n')
    with pytest.raises(ConfigError):
        load_config(path, [override])


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('name = "from-file"\n[train]\nsteps = 5\nlr = 0.5\n')
    config = load_config(path, ["train.steps=9"])
    assert (config.name, config.train.steps, config.train.lr) == ("from-file", 9, 0.5)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path / "missing.toml")
    (tmp_path / "bad.toml").write_text("steps = = 3")
    with pytest.raises(ConfigError, match=r"bad\.toml: not valid TOML"):
        load_config(tmp_path / "bad.toml")


json_values = st.recursive(
    st.floats(allow_nan=False, allow_infinity=False) | st.booleans() | st.text() | st.integers(-(2**63), 2**63 - 1),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(
    name=st.text(min_size=1),
    urls=st.lists(st.text(), max_size=2),
    options=st.dictionaries(st.text(), json_values, max_size=3),
)
def test_a_dumped_config_reads_back_equal(
    tmp_path_factory: pytest.TempPathFactory, name: str, urls: list[str], options: dict[str, object]
) -> None:
    config = parse_config({"name": name, "engine": {"urls": urls}, "env": {"options": options}})
    path = tmp_path_factory.getbasetemp() / "dumped.toml"
    path.write_text(dump_toml(config))
    assert load_config(path) == config


def test_known_keys_hold_sections_and_leaves() -> None:
    assert {"train", "train.loss", "train.loss.clip_low", "rollout.sampling.top_p", "name"} <= set(known_keys())


@pytest.mark.parametrize("setting", ['train.loss.correction="none"', 'train.loss.proximal="behavior"'])
@pytest.mark.parametrize("form", ["one_step", "async"])
def test_the_uncorrected_loss_does_not_run_by_accident(setting: str, form: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [setting, f"rollout.form={form}"])
    key, _, value = setting.partition("=")
    assert f"{key} = {value}".replace('"', "'") in caught.value.message


@pytest.mark.parametrize("overrides", [["rollout.form=sync"], ["rollout.form=async", "rollout.max_lag=0"]])
def test_without_lag_no_correction_is_needed(overrides: list[str]) -> None:
    assert load_config(None, ["train.loss.correction=none", *overrides]).train.loss.correction == "none"


def test_a_part_that_no_run_can_start_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.kind = 'vllm'"):
        load_config(None, ["engine.kind=vllm"])
    assert load_config(None, ["engine.kind=vllm", 'engine.urls=["http://x"]'])


@pytest.mark.parametrize("backend", ["local", "docker", "kubernetes"])
def test_every_backend_of_sandboxes_may_be_named(backend: str) -> None:
    assert load_config(None, [f"sandbox.backend={backend}"]).sandbox.backend == backend


def test_a_group_that_could_never_be_ready_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.min_scored = 5 exceeds"):
        load_config(None, ["rollout.min_scored=5", "rollout.group_size=4"])
