"""Advantages that compare the rollouts of one prompt; groups are found by id, never by position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_rlbatch.functional.sample_inputs import GroupIds, Rewards, as_component_rewards, as_group_ids, as_rewards, result_dtype


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


def group_statistics(rewards: Rewards, group_ids: GroupIds) -> GroupStatistics:
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
    rewards, group_ids = as_rewards(rewards), as_group_ids(group_ids).to(rewards.device if isinstance(rewards, Tensor) else "cpu")
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
    lowest = x.new_full((unique.numel(),), torch.inf).scatter_reduce(0, index, torch.where(valid, x, torch.inf), "amin")[index]
    # Differences from the lowest are exact for near-equal rewards, whose mean is not: division by a tiny std would blow its rounding up.
    above = torch.where(valid, x - lowest, 0.0)
    mean_above = total(above) / count.clamp(min=1)
    mean = torch.where(count > 0, lowest + mean_above, 0.0)
    centered = torch.where(valid, above - mean_above, 0.0)
    std = (total(centered.square()) / (count - 1).clamp(min=1)).sqrt()
    return GroupStatistics(x, valid, index, count, mean, centered, std)


def group_advantages(rewards: Rewards, group_ids: GroupIds, *, normalize_by_std: bool = True, eps: float = 1e-6) -> SampleAdvantages:
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
    advantages = _over_std(group.centered, group, eps) if normalize_by_std else group.centered
    return SampleAdvantages(advantages.to(result_dtype(rewards)), group.valid)


def rloo_advantages(rewards: Rewards, group_ids: GroupIds) -> SampleAdvantages:
    """Compute R minus the mean reward of the OTHER rollouts of the group: n / (n - 1) (R - mean).

    Sources: Kool et al., "Buy 4 REINFORCE Samples, Get a Baseline for Free!", 2019; Ahmadian et al., "Back to Basics: Revisiting
    REINFORCE Style Optimization for Learning from Human Feedback in LLMs", 2024.

    Args:
        rewards: ``[N]``, floating point; NaN leaves the sample out of its group.
        group_ids: ``[N]``, integer.

    Returns:
        Advantages (exactly 0 for singletons, which have no baseline, and groups of equal rewards) and validity.

    Example:
        >>> rloo_advantages(torch.tensor([3.0, 0.0, 0.0]), torch.tensor([4, 4, 4])).advantages
        tensor([ 3.0000, -1.5000, -1.5000])
    """
    group = group_statistics(rewards, group_ids)
    factor = group.count.double() / (group.count - 1).clamp(min=1)
    return SampleAdvantages((factor * group.centered).to(result_dtype(rewards)), group.valid)


def opo_advantages(rewards: Rewards, group_ids: GroupIds, response_lengths: Tensor | Sequence[int]) -> SampleAdvantages:
    """Compute R minus the length-weighted mean reward of the group, sum(l R) / sum(l).

    Source: Hao et al., "On-Policy RL with Optimal Reward Baseline", 2025.

    Args:
        rewards: ``[N]``, floating point; NaN leaves the sample out of its group.
        group_ids: ``[N]``, integer.
        response_lengths: ``[N]``, number of response tokens.

    Returns:
        Advantages (exactly 0 for singletons and groups of equal rewards) and validity.

    Raises:
        ValueError: shapes differ.

    Example:
        >>> opo_advantages(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), torch.tensor([1, 3])).advantages
        tensor([ 0.7500, -0.2500])
    """
    group, response_lengths = group_statistics(rewards, group_ids), torch.as_tensor(response_lengths)
    if response_lengths.shape != group.valid.shape:
        raise ValueError(f"Expected response_lengths [N] = {tuple(group.valid.shape)} but got {tuple(response_lengths.shape)}.")
    weight = torch.where(group.valid, response_lengths.to(group.valid.device).double(), 0.0)
    # The baseline, relative to the plain mean: sums of centered rewards keep equal rewards at exactly 0.
    shift = _group_sum(weight * group.centered, group) / _group_sum(weight, group).clamp(min=1)
    advantages = torch.where(group.std > 0, group.centered - shift, 0.0)
    return SampleAdvantages(torch.where(group.valid, advantages, 0.0).to(result_dtype(rewards)), group.valid)


def gpg_advantages(rewards: Rewards, group_ids: GroupIds, *, scale: float = 1.0) -> SampleAdvantages:
    """Compute alpha (R - mean) / scale, alpha = valid samples / valid samples in groups with variance.

    Groups of equal rewards have no gradient but count in the mean over the batch; alpha makes up for them.

    Source: Chu et al., "GPG: A Simple and Strong Reinforcement Learning Baseline for Model Reasoning", 2025 (there
    alpha = B / (B - M) with M samples in all-right or all-wrong groups).

    Args:
        rewards: ``[N]``, floating point; NaN leaves the sample out of its group.
        group_ids: ``[N]``, integer.
        scale: divisor, the paper's F_norm, > 0.

    Returns:
        Advantages (exactly 0 for singletons and groups of equal rewards) and validity.

    Raises:
        ValueError: ``scale`` is not positive.

    Example:
        >>> gpg_advantages(torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1])).advantages
        tensor([ 1., -1.,  0.,  0.])
    """
    if not scale > 0:
        raise ValueError(f"Expected scale to be positive but got {scale}.")
    group = group_statistics(rewards, group_ids)
    useful = (group.valid & (group.std > 0)).sum()
    alpha = group.valid.sum().double() / useful.clamp(min=1)
    return SampleAdvantages((alpha * group.centered / scale).to(result_dtype(rewards)), group.valid)


def pass_at_k_advantages(rewards: Rewards, group_ids: GroupIds, *, normalize_by_std: bool = True, eps: float = 1e-6) -> SampleAdvantages:
    """Reward the best of the group with its lead over the second best: max of all rewards - max of the others' rewards.

    The leave-one-out advantage of pass@k for k = group size. Every sample but a single best one gets 0; a tie gives 0 to all.

    Source: Tang et al., "Optimizing Language Models for Inference Time Objectives using Reinforcement Learning", 2025.

    Args:
        rewards: ``[N]``, floating point; NaN leaves the sample out of its group.
        group_ids: ``[N]``, integer.
        normalize_by_std: divide by the group's std, as GRPO does.
        eps: added to the std.

    Returns:
        Advantages (exactly 0 for singletons and groups of equal rewards) and validity.

    Example:
        >>> pass_at_k_advantages(torch.tensor([0.0, 1.0, 3.0]), torch.tensor([0, 0, 0]), normalize_by_std=False).advantages
        tensor([0., 0., 2.])
    """
    group = group_statistics(rewards, group_ids)
    best = _group_max(torch.where(group.valid, group.rewards, -torch.inf), group)
    is_best = group.valid & (group.rewards == best)
    second = _group_max(torch.where(group.valid & ~is_best, group.rewards, -torch.inf), group)
    alone = is_best & (_group_sum(is_best.double(), group) == 1) & (group.std > 0)
    lead = torch.where(alone, group.rewards - torch.where(alone, second, 0.0), 0.0)
    return SampleAdvantages((_over_std(lead, group, eps) if normalize_by_std else lead).to(result_dtype(rewards)), group.valid)


def gdpo_advantages(
    component_rewards: Tensor | Sequence[Sequence[float | None]],
    group_ids: GroupIds,
    weights: Tensor | Sequence[float] | None = None,
    *,
    eps: float = 1e-6,
) -> SampleAdvantages:
    """Normalize each reward within its group on its own, then add: sum_k w_k (R_k - mean_k) / (std_k + eps).

    The paper whitens the sum over the batch afterwards (``whiten``; ``GDPO`` does both).

    Source: Liu et al., "GDPO: Group reward-Decoupled Normalization Policy Optimization for Multi-reward RL Optimization", 2026.

    Args:
        component_rewards: ``[N, K]``, floating point; NaN leaves the sample out of that reward's group statistics.
        group_ids: ``[N]``, integer.
        weights: ``[K]``, floating point. None: 1 each.
        eps: added to each std.

    Returns:
        Advantages and validity (False: all rewards of the sample are NaN).

    Raises:
        ValueError: shapes differ.

    Example:
        >>> rewards = torch.tensor([[1.0, 0.0], [0.0, 10.0]])
        >>> gdpo_advantages(rewards, torch.tensor([0, 0])).advantages.abs() < 1e-5  # the two cancel, although 10 > 1
        tensor([True, True])
    """
    dtype, component_rewards = result_dtype(component_rewards), as_component_rewards(component_rewards)
    if component_rewards.dim() != 2:
        raise ValueError(f"Expected component_rewards to be [N, K], one column per reward, but got {tuple(component_rewards.shape)}.")
    num_rewards = component_rewards.shape[1]
    if weights is None:
        weights = component_rewards.new_ones(num_rewards)
    weights = torch.as_tensor(weights, device=component_rewards.device)
    if weights.shape != (num_rewards,):
        raise ValueError(f"Expected one weight for each of {num_rewards} rewards but got shape {tuple(weights.shape)}.")
    parts = [group_advantages(column, group_ids, eps=eps) for column in component_rewards.double().unbind(1)]
    total = sum((w.double() * part.advantages for w, part in zip(weights.unbind(), parts)), component_rewards.new_zeros(()).double())
    valid = torch.stack([part.valid for part in parts]).any(0)
    return SampleAdvantages(total.to(dtype), valid)


def remax_advantages(rewards: Rewards, baseline_rewards: Rewards) -> SampleAdvantages:
    """Compute R minus the reward of the greedy response to the same prompt.

    Source: Li et al., "ReMax: A Simple, Effective, and Efficient Reinforcement Learning Method for Aligning Large Language Models",
    2024.

    Args:
        rewards: ``[N]``, floating point; NaN: no reward.
        baseline_rewards: ``[N]``, floating point: of the greedy response to the sample's prompt; NaN: none.

    Returns:
        Advantages and validity: False where either is NaN.

    Example:
        >>> remax_advantages(torch.tensor([1.0, 0.0]), torch.tensor([0.25, 0.25])).advantages
        tensor([ 0.7500, -0.2500])
    """
    dtype = result_dtype(rewards, baseline_rewards)
    rewards, baseline_rewards = as_rewards(rewards), as_rewards(baseline_rewards)
    if rewards.shape != baseline_rewards.shape:
        raise ValueError(f"Expected baseline_rewards of shape {tuple(rewards.shape)} but got {tuple(baseline_rewards.shape)}.")
    difference = rewards.detach().double() - baseline_rewards.detach().double().to(rewards.device)
    valid = ~difference.isnan()
    return SampleAdvantages(torch.where(valid, difference, 0.0).to(dtype), valid)


def _over_std(values: Tensor, group: GroupStatistics, eps: float) -> Tensor:
    """Divide by the group's std; 0 where it is 0, even if ``eps`` is."""
    varies = group.std > 0
    return torch.where(varies, values / torch.where(varies, group.std + eps, 1.0), 0.0)


def _group_sum(values: Tensor, group: GroupStatistics) -> Tensor:
    """Sum over each sample's group, ``[N] -> [N]``."""
    return torch.zeros_like(values).index_add(0, group.index, values)[group.index]


def _group_max(values: Tensor, group: GroupStatistics) -> Tensor:
    """Take the maximum over each sample's group, ``[N] -> [N]``."""
    return torch.full_like(values, -torch.inf).scatter_reduce(0, group.index, values, "amax")[group.index]
