"""Parameter counts against models that transformers builds from the same config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.core.errors import ConfigError
from agentrl.plan.known_models import CONFIGS
from agentrl.plan.model import model_named, parse_model, read_model


@pytest.mark.parametrize(
    "name", ["Llama-3-8B", "Llama-3.2-1B", "Qwen2.5-0.5B", "Qwen2.5-32B", "Qwen3-4B", "Qwen3-30B-A3B", "DeepSeek-V3"]
)
def test_parameters_are_those_of_the_built_model(name: str) -> None:
    config = AutoConfig.for_model(**CONFIGS[name])
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    assert model_named(name).parameters == sum(weight.numel() for weight in built.parameters())


def test_tied_embeddings_count_once() -> None:
    tied = model_named("Qwen3-4B")
    untied = parse_model({**CONFIGS["Qwen3-4B"], "tie_word_embeddings": False}, "untied", "test")
    assert untied.parameters - tied.parameters == tied.vocabulary * tied.hidden


def test_experts_that_a_token_skips_are_not_active() -> None:
    model = model_named("Qwen3-30B-A3B")
    assert model.active_parameters == pytest.approx(3.35e9, rel=0.01)
    assert model.touched_parameters(1) == pytest.approx(model.active_parameters)
    assert model.touched_parameters(1000) == pytest.approx(model.parameters)
    dense = model_named("Llama-3-8B")
    assert dense.active_parameters == dense.parameters == dense.touched_parameters(1)


def test_kv_of_grouped_and_latent_attention() -> None:
    assert model_named("Llama-3-8B").kv_bytes_per_token() == 2 * 32 * 8 * 128 * 2
    assert model_named("DeepSeek-V3").kv_bytes_per_token() == 61 * (512 + 64) * 2
    assert model_named("Llama-3-8B").kv_bytes_per_token(1) == 2 * 32 * 8 * 128


def test_a_folder_and_a_nested_config_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": CONFIGS["Qwen3-8B"]}))
    assert read_model(tmp_path).parameters == model_named("Qwen3-8B").parameters


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ('{"model_type": "t5", "d_model": 512}', "lacks 'hidden_size': not a decoder of the Llama family"),
    ],
)
def test_what_is_no_decoder_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_model(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.path: .*no such file"):
        read_model(tmp_path / "none")


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown model 'llama3-8b'; nearest is 'Llama-3-8B'"):
        model_named("llama3-8b")
