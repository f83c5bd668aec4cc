"""The reward of the answer that most rollouts of a prompt agree on, as a metric."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from lightning_rlbatch.functional.sample_inputs import GroupIds, Rewards, as_group_ids, as_rewards


def majority_reward(rewards: Rewards, group_ids: GroupIds, answers: Sequence[Hashable | None]) -> tuple[Tensor, Tensor]:
    """Let the rollouts of each prompt vote for their answer and return the winners' rewards: majority@k for groups of k.

    An answer's reward is the mean of those that gave it, since reward functions may look at more than the answer. Answers with equally
    many votes share the win. Where no rollout has an answer, none of them is better than another: the mean of the group counts.

    Source: Wang et al., "Self-Consistency Improves Chain of Thought Reasoning in Language Models", 2022.

    Args:
        rewards: ``[N]``, floating point; NaN leaves the sample out of its group. All samples of the groups.
        group_ids: ``[N]``, integer.
        answers: ``[N]``, anything that can be compared; None for a rollout without an answer, which does not vote.

    Returns:
        ``(sum, count)``, 0-d float64: summed over the groups with at least one reward, and their number: a numerator and a denominator.

    Raises:
        ValueError: The three differ in length.

    Example:
        >>> majority_reward(torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([5, 5, 5, 5]), ["42", "7", None, "42"])
        (tensor(1., dtype=torch.float64), tensor(1., dtype=torch.float64))
    """
    values, ids = as_rewards(rewards).double().tolist(), as_group_ids(group_ids).tolist()
    if not len(values) == len(ids) == len(answers):
        raise ValueError(
            f"Expected a reward, a group id and an answer for each sample but got {len(values)}, {len(ids)} and {len(answers)} of them."
        )
    groups: dict[int, list[tuple[Hashable | None, float]]] = {}
    for reward, group, answer in zip(values, ids, answers):
        if not math.isnan(reward):
            groups.setdefault(group, []).append((answer, reward))
    total = math.fsum(_winning_reward(members) for members in groups.values())
    return torch.tensor(total, dtype=torch.float64), torch.tensor(len(groups), dtype=torch.float64)


def _winning_reward(members: Sequence[tuple[Hashable | None, float]]) -> float:
    """Return the reward of the most frequent answer of a group, from (answer, reward) of each of its samples."""
    by_answer: dict[Hashable, list[float]] = {}
    for answer, reward in members:
        if answer is not None:
            by_answer.setdefault(answer, []).append(reward)
    if not by_answer:
        return math.fsum(reward for _, reward in members) / len(members)
    most = max(map(len, by_answer.values()))
    winners = [math.fsum(rewards) / most for rewards in by_answer.values() if len(rewards) == most]
    return math.fsum(winners) / len(winners)
