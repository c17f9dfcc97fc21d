"""Packed rows, padded rows and single sequences must be the same mathematics."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import VOCAB, tiny_model
from torch import Tensor
from train_batches import make_batch
from transformers import GPT2Config, GPT2LMHeadModel

from agentrl.core.config import TrainConfig
from agentrl.train.model import separates_rows, token_logprobs
from agentrl.train.packing import TokenSequence, arrange, pack
from agentrl.train.samples import rewards_of, samples_of
from agentrl.train.trainer import Trainer


def random_sequences(count: int, seed: int = 0) -> list[TokenSequence]:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    sequences = []
    for _ in range(count):
        length = rng.choice([5, 9, 17, 40])
        targets = sorted(rng.sample(range(1, length), rng.randrange(1, length)))
        sequences.append(TokenSequence(torch.randint(0, VOCAB, (length,)), torch.tensor(targets)))
    return sequences


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 200), st.booleans())
def test_every_sequence_is_arranged_once_within_the_budget(lengths: list[int], budget: int, share: bool) -> None:
    packs = arrange(lengths, budget, share_rows=share)
    placed = [i for rows in packs for row in rows for i in row]
    assert sorted(placed) == list(range(len(lengths)))
    for rows in packs:
        width = max(sum(lengths[i] for i in row) for row in rows)
        assert len(rows) * width <= budget or len(rows) == 1
        assert width == max(lengths[i] for row in rows for i in row)
        assert share or all(len(row) == 1 for row in rows)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "gpt2"])
@pytest.mark.parametrize("budget", [120, 200, 4000])
def test_logprobs_equal_those_of_each_sequence_alone(family: str, budget: int) -> None:
    if family == "gpt2":
        shape = GPT2Config(
            vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=160, bos_token_id=1, eos_token_id=1
        )
        model: torch.nn.Module = GPT2LMHeadModel(shape).eval()
    else:
        model = tiny_model(family)
    sequences = random_sequences(12)
    shared = False
    for one in pack(sequences, budget):
        shared |= len(one.members) > len(one.token_ids)
        got = token_logprobs(model, one).logprobs
        assert torch.allclose(got, torch.cat([plain_logprobs(model, sequences[i]) for i in one.members]), atol=2e-6)
    assert shared  # the arrangement under test does put several sequences in one row


@torch.no_grad()
def plain_logprobs(model: torch.nn.Module, sequence: TokenSequence) -> Tensor:
    """The whole table of one forward of one sequence, without anything of `model` or `packing`."""
    table = torch.log_softmax(model(sequence.token_ids[None]).logits[0].float(), -1)
    return table[sequence.targets - 1, sequence.token_ids[sequence.targets]]


def test_packed_and_padded_batches_give_the_same_loss_and_gradients() -> None:
    batch = make_batch(groups=4, size=4)
    found = []
    for share, budget in [(True, 160), (False, 160), (True, 10_000)]:
        trainer = Trainer(tiny_model(), TrainConfig(minibatches=1, pack_tokens=budget, lr=1e-30, grad_clip=1e9))
        trainer._share_rows = share
        metrics = trainer.train_step(batch)
        gradients = torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])
        found.append((metrics["train/loss"], gradients))
    for (loss, gradients), (other_loss, other) in itertools.pairwise(found):
        assert loss == pytest.approx(other_loss, rel=1e-6)
        assert ((gradients - other).norm() / gradients.norm()).item() <= 1e-6


def test_gradient_equals_that_of_a_padded_batch_written_out() -> None:
    """The whole path against ten lines of plain PyTorch on a padded batch with an attention mask."""
    config = TrainConfig(minibatches=1, lr=1e-30, grad_clip=1e9)
    batch = make_batch(groups=4, size=4)
    trainer = Trainer(tiny_model(), config)
    trainer.train_step(batch)
    samples = samples_of(batch, rewards_of(batch.groups, config), config, version=0)
    model = tiny_model()
    width = max(len(s.sequence.token_ids) for s in samples)
    ids, mask = torch.zeros(len(samples), width, dtype=torch.int64), torch.zeros(len(samples), width)
    seen, prox, weight = torch.zeros_like(ids), torch.zeros_like(mask), torch.zeros_like(mask)
    for i, s in enumerate(samples):
        n = len(s.sequence.token_ids)
        ids[i, :n], seen[i, :n] = s.sequence.token_ids, 1
        mask[i, s.sequence.targets] = 1
        prox[i, s.sequence.targets] = s.behavior
        weight[i] = s.advantage
    table = torch.log_softmax(model(ids, attention_mask=seen).logits[:, :-1], -1)
    current = table.gather(-1, ids[:, 1:, None]).squeeze(-1)
    kept = mask[:, 1:].bool()
    w = (current.detach() - prox[:, 1:]).exp().clamp(max=2.0)
    losses = -w * (current - current.detach()).exp() * weight[:, 1:]
    (losses[kept].sum() / kept.sum()).backward()
    for (name, mine), theirs in zip(trainer.model.named_parameters(), model.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert ((mine.grad - theirs.grad).norm() / theirs.grad.norm()).item() <= 2e-6, name


def test_temperature_divides_the_logits() -> None:
    model = tiny_model()
    ids = torch.tensor([3, 4, 5])
    one = pack([TokenSequence(ids, torch.tensor([2]), temperature=0.5)], 10)[0]
    expected = torch.log_softmax(model(ids[None]).logits[0, 1] / 0.5, -1)[5]
    assert token_logprobs(model, one).logprobs.item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_model_that_mixes_rows_is_found_out() -> None:
    class Mixing(torch.nn.Module):
        """Ignores position ids: attention crosses from one sequence of a row to the next."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = tiny_model()

        def get_output_embeddings(self) -> torch.nn.Module:
            return self.inner.get_output_embeddings()

        def forward(self, input_ids: Tensor, position_ids: Tensor, **rest: object) -> object:
            return self.inner(input_ids=input_ids, **rest)

    assert separates_rows(tiny_model())
    assert not separates_rows(Mixing())
