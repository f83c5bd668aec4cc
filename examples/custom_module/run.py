"""A plain torch model with its own reward, its own loss and its own callback, trained by subclassing; no transformers model anywhere.

    python -m examples.custom_module.run

The model is a bigram table that learns to spell the alphabet: the reward counts steps from one letter to the next.
"""

from itertools import pairwise

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

import lightning_rlbatch
from lightning_rlbatch import PPOModule, RolloutDataModule
from lightning_rlbatch.callbacks import RolloutCallback, Rollouts
from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.models.scorer import TokenScores
from lightning_rlbatch.rollout.engine import Completion, RolloutRequest, SamplingParams

LETTERS, EOS = "abcdef", 6


class Bigram(nn.Module):
    """Scores packed samples: the logits of a token depend on the token before it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Embedding(len(LETTERS) + 1, len(LETTERS) + 1)
        nn.init.zeros_(self.model.weight)

    def forward(self, batch: PackedBatch, *, temperature: float = 1.0, **kwargs: bool) -> TokenScores:
        """Return log-probs and entropy of each token, 0 where it was not sampled."""
        ids, mask = batch["input_ids"], batch["response_mask"]
        logs = (self.model(ids.roll(1)) / temperature).log_softmax(-1)  # a first token is never sampled, so its neighbour does not matter
        chosen = logs.gather(1, ids[:, None]).squeeze(1)
        return TokenScores(torch.where(mask, chosen, 0), torch.where(mask, -(logs.exp() * logs).sum(-1), 0), None)


class Tokenizer:
    """One letter is one token."""

    eos_token_id, pad_token_id = EOS, EOS

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        return [LETTERS.index(letter) for letter in text]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        return "".join(LETTERS[token] for token in token_ids if token != EOS)


class Engine:
    """Samples from its own copy of the table, token by token."""

    def wake(self) -> None:
        """Have nothing to wake."""

    def sleep(self) -> None:
        """Have no memory to give back."""

    def update_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        """Copy the trained table."""
        self.table = dict(weights)["weight"].clone()

    def generate(self, requests: list[RolloutRequest], sampling: SamplingParams, on_progress: object = None) -> list[Completion]:
        """Return one completion per request, random by the request's own seed."""
        return [self._one(list(request.prompt_ids), request.seed, sampling) for request in requests]

    def _one(self, ids: list[int], seed: int, sampling: SamplingParams) -> Completion:
        generator, tokens, log_probs = torch.Generator().manual_seed(seed % 2**63), [], []
        while len(tokens) < sampling.max_new_tokens and EOS not in tokens:
            logs = (self.table[(ids + tokens)[-1]] / sampling.temperature).log_softmax(-1)
            tokens.append(int(torch.multinomial(logs.exp(), 1, generator=generator)))
            log_probs.append(float(logs[tokens[-1]]))
        return Completion(tokens, log_probs, "stop" if EOS in tokens else "length")


class SpellingModule(PPOModule):
    """GRPO on the table, with a loss of our own: REINFORCE, the plain product of advantage and log-prob."""

    def build_models(self) -> None:
        """Make the policy, and the engine that samples from it."""
        self.policy, self.rollout_engine = Bigram(), Engine()

    def policy_terms(self, micro_batch: PackedBatch, log_probs: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of each token."""
        return -micro_batch["advantages"] * log_probs, {"train/entropy": entropy}


def spelling_reward(prompts: list[str], completions: list[str]) -> list[float]:
    """Return the share of steps from one letter to the next, the prompt's letter included."""
    texts = [prompt + completion for prompt, completion in zip(prompts, completions)]
    return [sum(ord(b) == ord(a) + 1 for a, b in pairwise(text)) / max(1, len(text) - 1) for text in texts]


class RewardHistory(RolloutCallback):
    """Keeps the mean reward of each iteration."""

    def __init__(self) -> None:
        self.means: list[float] = []

    def on_rollout_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, rollouts: Rollouts) -> None:
        """Look at the rewards of all ranks."""
        self.means.append(float(rollouts.store.table.rewards.mean()))


def main(**trainer_options: object) -> list[float]:
    """Train, and return the mean reward of each iteration."""
    lightning_rlbatch.register()
    history = RewardHistory()
    options = {"accelerator": "cpu", "devices": 2, "strategy": "rlbatch_fsdp", "max_epochs": 15, "log_every_n_steps": 1, **trainer_options}
    module = SpellingModule("", [spelling_reward], optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.2))
    data = RolloutDataModule(
        lambda: [{"prompt": letter} for letter in LETTERS[:4]], Tokenizer(), train_batch_size=4, mini_batch_size=2,
        rollouts_per_prompt=8, max_tokens_per_rank=64, max_prompt_length=1, max_response_length=4,
    )  # fmt: skip
    pl.Trainer(callbacks=[history], **options).fit(module, datamodule=data)
    return history.means


if __name__ == "__main__":
    print([round(mean, 2) for mean in main()])
