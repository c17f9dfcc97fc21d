from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from agentrl.core.config import ModelConfig, TinyModelConfig
from agentrl.core.errors import TrainError
from agentrl.core.rendering import ConversationRenderer, load_renderer
from agentrl.core.types import Message
from agentrl.train.model import load_model, load_weights, save_model, weights_of
from agentrl.train.tiny import build_tiny_model
from agentrl.train.tokenizer import SPECIAL
from agentrl.train.warm_start import examples
from envs.vault.environment import CODES, NAMES, Vault

CONFIG = ModelConfig(tiny=TinyModelConfig(hidden=32, layers=1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "model"
    build_tiny_model(path, Vault(), CONFIG, seed=0)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def renderer(folder: Path) -> ConversationRenderer:
    return load_renderer(folder, CONFIG.renderer)


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_the_same_seed_gives_the_same_files(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(123)  # global state must not matter
    build_tiny_model(tmp_path / "again", Vault(), CONFIG, seed=0)
    assert digests(tmp_path / "again") == digests(folder)
    build_tiny_model(tmp_path / "other", Vault(), CONFIG, seed=1)
    assert digests(tmp_path / "other")["model.safetensors"] != digests(folder)["model.safetensors"]


def test_the_folder_is_one_that_transformers_reads(folder: Path, tokenizer: Tokenizer) -> None:
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    text = '<|im_start|>user\nFind the code in grove.<|im_end|>\n{"name": "bash"}'
    assert theirs.encode(text, add_special_tokens=False) == tokenizer.encode(text).ids
    model = load_model(folder)
    assert model.config.vocab_size == tokenizer.get_vocab_size()
    assert model.config.eos_token_id == tokenizer.token_to_id("<|im_end|>")
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight  # type: ignore[operator]


@given(st.text().filter(lambda text: not any(special in text for special in SPECIAL)))
def test_any_text_survives(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_a_word_is_one_token_wherever_it_stands(tokenizer: Tokenizer) -> None:
    for word in (*NAMES, *CODES):
        wanted = tokenizer.token_to_id(word)
        assert wanted is not None
        for text in (f"Find the code in {word}.", f"\n{word}\n", f'"cat {word}"}}}}\n', word):
            assert wanted in tokenizer.encode(text).ids


def test_what_all_prompts_share_is_a_handful_of_tokens(renderer: ConversationRenderer) -> None:
    vault = Vault()
    ids = renderer.prompt(vault.messages(next(vault.tasks("train", 0))), vault.tools)
    assert len(ids) < 50 < len(renderer.tokenizer.decode(ids)) / 10


def test_what_the_model_says_is_no_such_token(renderer: ConversationRenderer) -> None:
    """Else a whole command would be one token, and there would be no words to learn."""
    vault = Vault()
    for demonstration in [next(vault.demonstrations(5, 0.0))]:
        spoken = [renderer.sampled(m, vault.tools) for m in demonstration.messages if m.role == "assistant"]
        assert all(len(ids) > 10 for ids in spoken)


def test_demonstrations_become_sequences_that_train_what_the_model_says(renderer: ConversationRenderer) -> None:
    vault = Vault()
    sequence = next(examples(vault, renderer, seed=3, noise=0.0))
    demonstration = next(vault.demonstrations(3, 0.0))
    trained = renderer.tokenizer.decode(sequence.token_ids[sequence.targets].tolist())
    said = [renderer.sampled(m, vault.tools) for m in demonstration.messages if m.role == "assistant"]
    assert trained == "".join(renderer.tokenizer.decode(ids) for ids in said)
    first = renderer.prompt(demonstration.messages[:2], vault.tools)
    assert tuple(sequence.token_ids[: len(first)].tolist()) == first
    assert int(sequence.targets[0]) == len(first)


def test_a_shape_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    config = ModelConfig(tiny=TinyModelConfig(hidden=30, heads=4))
    with pytest.raises(TrainError, match="heads = 4"):
        build_tiny_model(tmp_path / "m", Vault(), config, seed=0)


def test_a_saved_model_is_complete_and_equal(folder: Path, tmp_path: Path) -> None:
    model = load_model(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    save_model(model, folder, tmp_path / "saved")
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {path.name for path in folder.iterdir()}
    again = load_model(tmp_path / "saved")
    assert all(torch.equal(tensor, weights_of(again)[name]) for name, tensor in weights_of(model).items())
    renderer = load_renderer(tmp_path / "saved", CONFIG.renderer)
    assert renderer.prompt([Message(role="user", content="hi")])


def test_weights_that_do_not_fit_are_refused(folder: Path) -> None:
    model = load_model(folder)
    tensors = weights_of(model)
    with pytest.raises(TrainError, match="do not fit"):
        load_weights(model, {**tensors, "extra": torch.zeros(1)})


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=r"model\.path"):
        load_model(tmp_path)
