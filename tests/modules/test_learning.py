"""Learning in seconds: PPO's critic explains the returns and the policy finds the answer; GRPO does so in half precision."""

import functools

import pytest
import torch
from helpers import EOS, StepRecorder, make_trainer
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_rlbatch.data import RolloutDataModule
from lightning_rlbatch.functional import GAE, GRPO
from lightning_rlbatch.modules import PPOModule

VOCABULARY = 11
LETTERS = "abcd"  # tokens 3 to 6


class Letters:
    """One letter is one token; 'a' is token 3."""

    pad_token_id, eos_token_id = 0, EOS

    def encode(self, text):
        return [ord(letter) - ord("a") + 3 for letter in text]

    def decode(self, token_ids, skip_special_tokens=True):
        return "".join(chr(int(token) - 3 + ord("a")) for token in token_ids if int(token) > EOS)


def make_model(seed=0):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCABULARY, **sizes, max_position_embeddings=16, pad_token_id=0, bos_token_id=1, eos_token_id=EOS)
    )


def next_letters(prompts, completions):
    """One point for each of the two letters that follow the prompt's, and a point that only a critic can know of for some prompts."""
    rewards = []
    for prompt, completion in zip(prompts, completions):
        right = sum(int(completion[place : place + 1] == chr(ord(prompt) + 1 + place)) for place in range(2))
        rewards.append(right / 2 + (prompt in "ab"))
    return rewards


def learn(iterations, precision="32-true", **options):
    module = PPOModule(make_model, [next_letters], optimizer=functools.partial(torch.optim.AdamW, lr=1e-2), **options)
    data = RolloutDataModule(
        lambda: [{"prompt": letter} for letter in LETTERS],
        Letters(),
        train_batch_size=16,
        mini_batch_size=8,
        rollouts_per_prompt=8,
        max_prompt_length=1,
        max_response_length=3,
        max_tokens_per_rank=512,
    )
    recorder = StepRecorder()
    make_trainer(1, "auto", max_epochs=iterations, callbacks=[recorder], precision=precision).fit(module, datamodule=data)
    return recorder.metrics[::2]  # the first step of each iteration has the numbers of its rollouts


def mean(rows, name):
    return sum(row[name] for row in rows) / len(rows)


def test_ppo_learns_the_answer_and_its_critic_the_returns():
    rows = learn(30, critic=functools.partial(make_model, 1), critic_lr=1e-2, advantage=GAE())
    assert abs(rows[0]["value/explained_variance"]) < 0.05
    assert mean(rows[-5:], "value/explained_variance") > 0.5
    assert mean(rows[:3], "reward/mean") < 0.8
    assert mean(rows[-5:], "reward/mean") > 1.1
    assert all(row["train/ratio"] == pytest.approx(1, abs=1e-5) for row in rows)


def test_grpo_learns_in_half_precision():
    rows = learn(20, "bf16-mixed", advantage=GRPO())
    assert mean(rows[:3], "reward/mean") < 0.8
    assert mean(rows[-5:], "reward/mean") > 1.1
    assert all(row["train/ratio"] == pytest.approx(1, abs=1e-5) for row in rows)
