"""Samples and models of the update benchmark: the same for every trainer."""

import dataclasses
import functools

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.models.scorer import TokenScorer

FAMILIES = ("hanoi", "lognormal", "bimodal")
CAP = 1600  # tokens of a response


@dataclasses.dataclass(frozen=True)
class Workload:
    """Samples of one optimizer step.

    Attributes:
        prompts: Tokens of each prompt.
        responses: Tokens of each response.
        vocabulary: Size of the vocabulary.
        seed: Of tokens, advantages and old log-probs.
    """

    prompts: tuple[int, ...]
    responses: tuple[int, ...]
    vocabulary: int
    seed: int = 0

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sample."""
        return tuple(map(sum, zip(self.prompts, self.responses)))

    @property
    def num_tokens(self) -> int:
        """Real tokens."""
        return sum(self.lengths)

    @property
    def fill(self) -> float:
        """Real tokens over those of all samples padded to the longest."""
        return self.num_tokens / (len(self.lengths) * max(self.lengths))

    def equal_lengths(self) -> "Workload":
        """Return samples of one length with the same number of tokens and the same attention, up to rounding.

        With n samples of length L both n L and n L^2 must be kept, so that L is the sum of squares over the sum.
        """
        squares = sum(length**2 for length in self.lengths)
        number = max(1, round(self.num_tokens**2 / squares))
        length, prompt = round(self.num_tokens / number), max(1, round(sum(self.prompts) / number))
        return dataclasses.replace(self, prompts=(prompt,) * number, responses=(length - prompt,) * number)

    def tiny(self) -> "Workload":
        """Return as many samples of a few tokens: a step that allocates what every step needs."""
        return dataclasses.replace(self, prompts=(2,) * len(self.prompts), responses=(3,) * len(self.prompts))


def make_workload(family: str, num_samples: int, vocabulary: int, *, seed: int = 0, cap: int = CAP) -> Workload:
    """Draw lengths.

    Args:
        family: ``hanoi``: answers of 3 to 63 moves, and a sixth that runs to the limit of 72; ``lognormal``: median 150, sigma 0.9;
            ``bimodal``: as lognormal with sigma 0.5, and 15% cut off at the cap.
        num_samples: Rollouts of the optimizer step.
        vocabulary: Size of the vocabulary.
        seed: Of everything.
        cap: Most tokens of a response.
    """
    draw = np.random.default_rng([sum(map(ord, family)), num_samples, seed])
    if family == "hanoi":
        prompts = np.full(num_samples, 7)
        responses = draw.choice([4, 8, 16, 32, 64, 72], num_samples)
    else:
        prompts = draw.integers(16, 49, num_samples)
        responses = 150 * np.exp((0.9 if family == "lognormal" else 0.5) * draw.standard_normal(num_samples))
        if family == "bimodal":
            responses[draw.permutation(num_samples)[: max(1, round(0.15 * num_samples))]] = cap
    responses = np.minimum(responses, cap).astype(int).clip(1)
    return Workload(tuple(prompts.tolist()), tuple(responses.tolist()), vocabulary, seed)


def make_model(vocabulary: int, hidden_size: int = 256, layers: int = 4) -> LlamaForCausalLM:
    """Return a Llama with random weights, the same at every call."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 11 // 4 // 16 * 16,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=max(1, hidden_size // 128),
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config)


def make_batch(workload: Workload, *, old_log_probs: bool = True) -> PackedBatch:
    """Return the samples with everything that a policy update reads.

    Args:
        workload: What to make.
        old_log_probs: False leaves out what needs a forward pass.
    """
    generator = torch.Generator().manual_seed(workload.seed)
    ids = torch.randint(3, workload.vocabulary, (workload.num_tokens,), generator=generator)
    mask = torch.cat([torch.arange(p + r) >= p for p, r in zip(workload.prompts, workload.responses)])
    per_sample = torch.randn(len(workload.lengths), generator=generator)
    advantages = per_sample.repeat_interleave(torch.tensor(workload.lengths))
    bounds = [0, *np.cumsum(workload.lengths).tolist()]
    batch = PackedBatch(bounds, {"input_ids": ids, "response_mask": mask, "advantages": advantages}, {"advantage": per_sample})
    return batch.with_fields(per_token={"old_log_probs": _near_log_probs(batch, workload, generator)}) if old_log_probs else batch


@torch.no_grad()
def _near_log_probs(batch: PackedBatch, workload: Workload, generator: torch.Generator) -> Tensor:
    """Return log-probs off the model's by up to half, so that ratios differ and some are clipped."""
    scores = TokenScorer(make_model(workload.vocabulary))(batch).log_probs
    return scores + 0.1 * torch.randn(scores.shape, generator=generator)


@functools.cache
def cached_batch(workload: Workload) -> PackedBatch:
    """Return :func:`make_batch`; made once in the parent, inherited by forked ranks."""
    return make_batch(workload)
