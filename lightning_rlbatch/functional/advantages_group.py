"""Advantages that compare the rollouts of one prompt; groups are found by id, never by position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class SampleAdvantages(NamedTuple):
    """Advantages of whole rollouts.

    Args:
        advantages: ``[N]``, floating point: 0 for a sample without a reward.
        valid: ``[N]``, bool: False where the reward was NaN, so that the sample must leave the response mask too.
    """

    advantages: Tensor
    valid: Tensor


@dataclass(frozen=True)
class GroupStatistics:
    """What group estimators need, spread to the samples of each group.

    Args:
        rewards: ``[N]``, float64: 0 where NaN.
        valid: ``[N]``, bool: False where the reward was NaN.
        index: ``[N]``, int64: dense number of the sample's group.
        count: ``[N]``, int64: valid samples of the group.
        mean: ``[N]``, float64: over the valid samples, 0 if there is none.
        centered: ``[N]``, float64: reward - mean; exactly 0 where all rewards of the group are equal, for singletons, where not valid.
        std: ``[N]``, float64: unbiased (count - 1), from the centered rewards; 0 where all are equal.
    """

    rewards: Tensor
    valid: Tensor
    index: Tensor
    count: Tensor
    mean: Tensor
    centered: Tensor
    std: Tensor


def group_statistics(rewards: Tensor, group_ids: Tensor) -> GroupStatistics:
    """Compute count, mean and deviation of each group's rewards, NaN rewards left out.

    Args:
        rewards: ``[N]``, floating point; NaN: no reward. All samples of the groups, so gathered over ranks if groups are spread.
        group_ids: ``[N]``, integer: equal for the rollouts of one prompt, in any order.

    Returns:
        Statistics spread to the samples.

    Raises:
        ValueError: shapes differ or a reward is infinite.

    Example:
        >>> group_statistics(torch.tensor([1.0, 0.0, 5.0]), torch.tensor([7, 7, 3])).centered
        tensor([ 0.5000, -0.5000,  0.0000], dtype=torch.float64)
    """
    if rewards.shape != group_ids.shape or rewards.dim() != 1:
        raise ValueError(f"Rewards and group_ids must be [N] both but got {tuple(rewards.shape)} and {tuple(group_ids.shape)}.")
    if bool(rewards.isinf().any()):
        where = rewards.isinf().nonzero().flatten().tolist()
        raise ValueError(f"Rewards must be finite, or NaN/None to leave a sample out, but the samples {where} have infinite ones.")
    valid = ~rewards.isnan()
    x = torch.where(valid, rewards.detach().double(), 0.0)
    unique, index = torch.unique(group_ids, return_inverse=True)

    def total(values: Tensor) -> Tensor:
        return values.new_zeros(unique.numel()).index_add(0, index, values)[index]

    count = total(valid.long())
    mean = total(x) / count.clamp(min=1)
    highest = x.new_full((unique.numel(),), -torch.inf).scatter_reduce(0, index, torch.where(valid, x, -torch.inf), "amax")[index]
    lowest = x.new_full((unique.numel(),), torch.inf).scatter_reduce(0, index, torch.where(valid, x, torch.inf), "amin")[index]
    # The mean of equal numbers is not always that number in floating point; division by a tiny std would blow the rest up.
    centered = torch.where(valid & (highest > lowest), x - mean, 0.0)
    std = (total(centered.square()) / (count - 1).clamp(min=1)).sqrt()
    return GroupStatistics(x, valid, index, count, mean, centered, std)


def group_advantages(rewards: Tensor, group_ids: Tensor, *, normalize_by_std: bool = True, eps: float = 1e-6) -> SampleAdvantages:
    """Compute GRPO's advantage (R - mean) / (std + eps) of each rollout in its group; without the std it is Dr. GRPO's.

    Sources: Shao et al., "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models", 2024, section 4.1.2
    (GRPO); Liu et al., "Understanding R1-Zero-Like Training: A Critical Perspective", 2025 (no std). The std is the unbiased one.

    Args:
        rewards: ``[N]``, floating point; NaN leaves the sample out of its group.
        group_ids: ``[N]``, integer.
        normalize_by_std: divide by the group's std.
        eps: added to the std.

    Returns:
        Advantages (exactly 0 for singletons and groups of equal rewards) and validity.

    Example:
        >>> group_advantages(torch.tensor([1.0, 0.0, float("nan"), 5.0]), torch.tensor([0, 0, 0, 1]), normalize_by_std=False)
        SampleAdvantages(advantages=tensor([ 0.5000, -0.5000,  0.0000,  0.0000]), valid=tensor([ True,  True, False,  True]))
    """
    group = group_statistics(rewards, group_ids)
    advantages = group.centered / (group.std + eps) if normalize_by_std else group.centered
    return SampleAdvantages(advantages.to(rewards.dtype), group.valid)
