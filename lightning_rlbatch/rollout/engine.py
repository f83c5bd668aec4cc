"""The protocol between a trainer and whatever samples its rollouts."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import torch

FinishReason = Literal["stop", "length"]

ProgressCallback: TypeAlias = Callable[[int, int], None]
"""Called as ``on_progress(num_finished, num_tokens)`` with what came on since the last call (what a progress bar's ``update`` takes)."""

WeightStream: TypeAlias = Iterable[tuple[str, torch.Tensor]]
"""Pairs of parameter name and whole (unsharded) tensor, lazily produced so that one of them is in memory at a time."""


@dataclass(frozen=True)
class SamplingParams:
    """How completions are drawn from the policy.

    Attributes:
        max_new_tokens: Most tokens of a completion, a stop token included.
        temperature: Divisor of the logits; 0 means greedy (always the most likely token).
        top_k: Draw among the ``top_k`` most likely tokens only; 0 switches it off.
        top_p: Draw among the fewest most likely tokens whose probabilities sum to at least ``top_p``; 1 switches it off.
        stop_token_ids: A completion ends with the first of these tokens; the token belongs to the completion.

    Raises:
        ValueError: If a value is out of range.
    """

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1 but is {self.max_new_tokens}.")
        if not math.isfinite(self.temperature) or self.temperature < 0:
            raise ValueError(f"temperature must be 0 (greedy) or a positive number but is {self.temperature}.")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or a positive number of tokens but is {self.top_k}.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1] (1 is off) but is {self.top_p}.")
        object.__setattr__(self, "stop_token_ids", tuple(int(token) for token in self.stop_token_ids))


@dataclass(frozen=True)
class RolloutRequest:
    """One completion to be sampled.

    Attributes:
        prompt_ids: Token ids of the prompt, without padding; at least one.
        seed: All the randomness of this completion, in ``[0, 2**63)`` (see :func:`rollout_seed`). The same prompt, seed, weights and
            sampling parameters give the same completion, whatever else is sampled with it and on however many ranks.
        max_new_tokens: Most tokens of this completion where that is less than the sampling parameters say (a later turn has less room
            than the first); None for as many as they say.

    Raises:
        ValueError: If a number is out of range.
    """

    prompt_ids: list[int]
    seed: int
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"The seed of a request must lie in [0, 2**63) but is {self.seed}. Make it with rollout_seed.")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens of a request must be at least 1, or None, but is {self.max_new_tokens}.")

    def limit(self, sampling: SamplingParams) -> int:
        """Return the most tokens that this completion may have."""
        return sampling.max_new_tokens if self.max_new_tokens is None else min(self.max_new_tokens, sampling.max_new_tokens)


@dataclass(frozen=True)
class Completion:
    """One sampled completion.

    Attributes:
        token_ids: The sampled tokens; the stop token is the last of them if ``finish_reason`` is ``"stop"``.
        log_probs: Of each sampled token, under the policy with its logits divided by the sampling temperature (by 1 when greedy)
            over the WHOLE vocabulary, before ``top_k`` and ``top_p`` cut it; what a trainer recomputes as old log-probs.
        finish_reason: ``"stop"`` after a stop token, ``"length"`` after ``max_new_tokens`` tokens without one.
    """

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason


@runtime_checkable
class RolloutEngine(Protocol):
    """Samples completions from the current policy.

    An engine serves the rank (or the tensor-parallel group) that holds it. The trainer calls, per iteration: ``wake``,
    ``update_weights``, ``generate`` (once or more often), ``sleep``.
    """

    def generate(
        self, requests: Sequence[RolloutRequest], sampling: SamplingParams, on_progress: ProgressCallback | None = None
    ) -> list[Completion]:
        """Sample one completion per request and return them in the order of the requests.

        Args:
            requests: What to complete; an empty list gives an empty list.
            sampling: How to draw.
            on_progress: Told about finished completions and sampled tokens while the engine works.

        Returns:
            The completions; their token ids and log-probs may be lists, tensors or arrays, a log-prob that is not known is NaN.

        Raises:
            ValueError: If a prompt is empty or does not fit the engine's limits.
            RuntimeError: If the engine sleeps.
        """
        ...

    def update_weights(self, weights: WeightStream) -> None:
        """Copy the trainer's weights, given one by one.

        Args:
            weights: Every parameter and persistent buffer once. Producing them may be collective: what an engine does not take is
                produced all the same.

        Raises:
            ValueError: Naming the parameters that are missing, unknown or of another shape.
        """
        ...

    def sleep(self) -> None:
        """Release accelerator memory until ``wake``; without effect on an engine that sleeps."""
        ...

    def wake(self) -> None:
        """Make the engine ready to generate; without effect on an engine that is awake."""
        ...


_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_MASK_64 = 0xFFFFFFFFFFFFFFFF


def _mix_64(value: int) -> int:
    """Scramble 64 bits: the output function of splitmix64 (Steele, Lea and Flood, Fast splittable pseudorandom generators, 2014)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


def rollout_seed(seed: int, iteration: int, prompt_index: int, rollout_index: int) -> int:
    """Mix what identifies a rollout into the seed of its request.

    Pure integer arithmetic: the same on every rank, machine, Python process and world size.

    Args:
        seed: Seed of the run.
        iteration: RL iteration (or any other number that separates passes, such as the number of a validation).
        prompt_index: Index of the prompt in its data set or batch, the same on any world size.
        rollout_index: Index of the rollout in its group.

    Returns:
        An integer in ``[0, 2**63)``.

    Example:
        >>> rollout_seed(0, 0, 0, 0) == rollout_seed(0, 0, 0, 0), rollout_seed(0, 0, 0, 0) == rollout_seed(0, 0, 0, 1)
        (True, False)
    """
    state = 0
    for part in (seed, iteration, prompt_index, rollout_index):
        state = _mix_64((state + _GOLDEN_GAMMA + _mix_64(part & _MASK_64)) & _MASK_64)
    return state >> 1
