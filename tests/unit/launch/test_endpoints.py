"""Addresses of a run: private, stable over launches, and taken from the config for services that run elsewhere."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

import pytest

from agentrl.core.config import load_config
from agentrl.core.errors import ConfigError
from agentrl.launch.endpoints import TOKEN_VARIABLE, Endpoints, choose_endpoints, kept_endpoints


def test_every_embedded_role_has_a_port_of_its_own() -> None:
    endpoints = choose_endpoints(load_config(None, ["engine.replicas=2"]))
    assert set(endpoints.urls) == {"engine-0", "engine-1", "gateway", "sandbox", "reward", "rollout", "trainer"}
    assert len({endpoints.port(role) for role in endpoints.urls}) == 7
    assert len(endpoints.engines) == 2


def test_services_elsewhere_keep_their_urls_and_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "shared")
    config = load_config(None, ['engine.urls=["http://a:1", "http://b:2"]', "gateway.url=http://c:3"])
    endpoints = choose_endpoints(config)
    assert endpoints.engines == ("http://a:1", "http://b:2")
    assert endpoints.url("gateway") == "http://c:3"
    assert endpoints.token == "shared"


def test_the_file_is_private_and_reads_back(tmp_path: Path) -> None:
    endpoints = choose_endpoints(load_config(None))
    endpoints.write(tmp_path / "endpoints.json")
    assert stat.S_IMODE((tmp_path / "endpoints.json").stat().st_mode) == 0o600
    assert Endpoints.read(tmp_path / "endpoints.json") == endpoints


def test_a_resume_keeps_addresses_until_a_port_is_taken(tmp_path: Path) -> None:
    config, path = load_config(None), tmp_path / "endpoints.json"
    first = kept_endpoints(path, config)
    first.write(path)
    assert kept_endpoints(path, config) == first
    with socket.create_server(("127.0.0.1", first.port("gateway"))):
        assert kept_endpoints(path, config).port("gateway") != first.port("gateway")
    more_engines = load_config(None, ["engine.replicas=2"])
    assert "engine-1" in kept_endpoints(path, more_engines).urls


def test_an_unknown_role_is_named() -> None:
    with pytest.raises(ConfigError, match="no address for role 'scorer'"):
        choose_endpoints(load_config(None)).url("scorer")
