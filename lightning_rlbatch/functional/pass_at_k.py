"""The best of k rollouts of a prompt: as a metric, and as what is trained."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_rlbatch.functional.advantages_group import GroupStatistics, SampleAdvantages, group_statistics
from lightning_rlbatch.functional.sample_inputs import GroupIds, Rewards, result_dtype


def best_of_k(rewards: Rewards, group_ids: GroupIds, k: int) -> tuple[Tensor, Tensor]:
    """Estimate the expected best reward of k rollouts from groups of n >= k, without bias; for rewards of 0 and 1 this is pass@k.

    With a group's rewards sorted, r_1 <= ... <= r_n, the mean of the best over all subsets of k is sum_j C(j-1, k-1) r_j / C(n, k). With c
    rewards of 1 and the others 0 that is 1 - C(n-c, k) / C(n, k).

    Source: Chen et al., "Evaluating Large Language Models Trained on Code", 2021, eq. 1.

    Args:
        rewards: ``[N]``, floating point; NaN leaves the sample out of its group. All samples of the groups.
        group_ids: ``[N]``, integer.
        k: Number of tries, at least 1.

    Returns:
        ``(sum, count)``, 0-d float64: summed over the groups with at least k rewards, and their number: a numerator and a denominator.

    Raises:
        ValueError: ``k`` is below 1.

    Example:
        >>> best_of_k(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([5, 5, 5, 5]), k=2)  # 1 - C(3, 2) / C(4, 2)
        (tensor(0.5000, dtype=torch.float64), tensor(1., dtype=torch.float64))
    """
    _check_k(k)
    total, count = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    group = group_statistics(rewards, group_ids)
    for members in _groups(group):
        number = members.numel()
        if number < k:
            continue
        weights = _shares([math.comb(place, k - 1) for place in range(number)], math.comb(number, k), group.rewards)
        total += (weights * group.rewards[members].sort().values).sum().cpu()
        count += 1
    return total, count


def pass_at_k_training_advantages(
    rewards: Rewards, group_ids: GroupIds, *, k: int, normalize_by_std: bool = True, eps: float = 1e-6
) -> SampleAdvantages:
    """Compare the best of the subsets of k rollouts that hold a rollout with the best of all subsets of k, the analytical form.

    A_i = (mean of the best over subsets with i - mean of the best over all subsets) / (std of the best over all subsets + eps). With n
    rollouts, m of them wrong, and rewards of 0 and 1 this is the paper's: R = 1 - C(m, k) / C(n, k), std = sqrt(R (1 - R)),
    A_right = (1 - R) / std, A_wrong = (1 - R - C(m-1, k-1) / C(n-1, k-1)) / std. For other rewards the subsets are counted the same way.

    Source: Chen et al., "Pass@k Training for Adaptively Balancing Exploration and Exploitation of Large Reasoning Models", 2025 (there
    without ``eps``).

    Args:
        rewards: ``[N]``, floating point; NaN leaves the sample out of its group.
        group_ids: ``[N]``, integer.
        k: Size of the subsets, at least 1; 1 is GRPO with the biased std.
        normalize_by_std: divide by the standard deviation of the best.
        eps: added to it.

    Returns:
        Advantages (exactly 0 in groups of equal rewards, and of k rollouts or fewer, which are one subset) and validity.

    Raises:
        ValueError: ``k`` is below 1.

    Example:
        >>> rewards, groups = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([0, 0, 0, 0])
        >>> pass_at_k_training_advantages(rewards, groups, k=2, normalize_by_std=False).advantages
        tensor([ 0.5000, -0.1667, -0.1667, -0.1667])
    """
    _check_k(k)
    group = group_statistics(rewards, group_ids)
    advantages = torch.zeros_like(group.centered)
    for members in _groups(group):
        if members.numel() > k and bool(group.std[members[0]] > 0):
            # Relative to the group's mean, so that rewards far from 0 lose no digits.
            advantages[members] = _subset_advantages(group.centered[members], k, normalize_by_std, eps)
    return SampleAdvantages(advantages.to(result_dtype(rewards)), group.valid)


def _subset_advantages(rewards: Tensor, k: int, normalize_by_std: bool, eps: float) -> Tensor:
    """Return the advantages of one group, ``[n]`` float64, n > k."""
    number = rewards.numel()
    ordered, order = rewards.sort()
    all_subsets, own_subsets = math.comb(number, k), math.comb(number - 1, k - 1)
    chance = _shares([math.comb(place, k - 1) for place in range(number)], all_subsets, ordered)
    mean = (chance * ordered).sum()
    # With i the best is i, if the other k - 1 are below it, or some j above it, with k - 2 others below j.
    itself = _shares([math.comb(place, k - 1) for place in range(number)], own_subsets, ordered)
    above = _shares([math.comb(place - 1, k - 2) if k > 1 and place > 0 else 0 for place in range(number)], own_subsets, ordered)
    from_above = (above * ordered).flip(0).cumsum(0).flip(0) - above * ordered
    difference = itself * ordered + from_above - mean
    if normalize_by_std:
        difference = difference / ((chance * (ordered - mean).square()).sum().sqrt() + eps)
    # The best of all subsets may be equal although the rewards are not.
    reached = ordered[chance > 0]
    difference = torch.where(reached.max() > reached.min(), difference, 0.0)
    return torch.empty_like(rewards).index_copy(0, order, difference)


def _groups(group: GroupStatistics) -> tuple[Tensor, ...]:
    """Return the positions of each group's samples that have a reward; a group without any is left out."""
    valid = group.valid.nonzero().flatten()
    _, counts = torch.unique(group.index[valid], return_counts=True)
    ordered = valid[group.index[valid].argsort(stable=True)]
    return torch.split(ordered, counts.tolist())


def _shares(counts: Sequence[int], total: int, like: Tensor) -> Tensor:
    """Divide integers that may be too large for a float."""
    return like.new_tensor([count / total for count in counts])


def _check_k(k: int) -> None:
    if k < 1:
        raise ValueError(f"Expected k to be at least 1 but got {k}.")
