"""Which rollouts are trained on: overlong responses, groups that teach nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_rlbatch.functional.advantages_group import group_statistics
from lightning_rlbatch.functional.sample_inputs import GroupIds, Rewards, as_rewards
from lightning_rlbatch.functional.segments import segment_ids


def drop_samples(response_mask: Tensor, cu_seqlens: Tensor | Sequence[int], keep: Tensor | Sequence[bool]) -> Tensor:
    """Take whole samples out of the response mask: overlong ones, ones without a reward.

    Their tokens leave numerators and, since those are counted from the mask, denominators.

    Source: Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", 2025, section 3.4 (overlong filtering).

    Args:
        response_mask: ``[T]``, bool.
        cu_seqlens: ``[N + 1]``, int.
        keep: ``[N]``, bool: False for samples to drop (``~truncated``; ``valid`` of an advantage estimator).

    Returns:
        ``[T]``, bool.

    Example:
        >>> drop_samples(torch.tensor([True, True, True]), torch.tensor([0, 1, 3]), torch.tensor([True, False]))
        tensor([ True, False, False])
    """
    owner = segment_ids(cu_seqlens, response_mask.shape[0], response_mask.device)
    return response_mask.bool() & torch.as_tensor(keep, device=response_mask.device).bool()[owner]


def overlong_penalty(response_lengths: Tensor | Sequence[int], *, max_length: int, buffer: int, factor: float = 1.0) -> Tensor:
    """Compute the soft punishment of responses that come close to the length limit, to be added to the reward.

    0 up to max_length - buffer tokens, falling linearly to -factor at max_length, and -factor beyond.

    Source: Yu et al., "DAPO", 2025, eq. 13.

    Args:
        response_lengths: ``[N]``, number of response tokens.
        max_length: longest response, in tokens.
        buffer: length of the slope, in tokens, in [1, max_length].
        factor: largest penalty.

    Returns:
        ``[N]``, float32, in [-factor, 0].

    Raises:
        ValueError: ``buffer`` is out of range.

    Example:
        >>> overlong_penalty(torch.tensor([80, 95, 200]), max_length=100, buffer=10)
        tensor([ 0.0000, -0.5000, -1.0000])
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(f"Expected buffer to be between 1 and max_length={max_length} but got {buffer}.")
    excess = torch.as_tensor(response_lengths).double() - (max_length - buffer)
    return (-(excess / buffer).clamp(0, 1) * factor + 0.0).float()  # + 0.0 turns -0 into 0


@dataclass(frozen=True)
class ZeroVariance:
    """Groups whose rewards are all equal, so that every advantage is 0.

    Args:
        samples: ``[N]``, bool: the sample's group has no variance. Groups with fewer than two rewards count as such.
        num_groups: 0-d, int64: groups with at least one reward.
        num_zero: 0-d, int64: of these, without variance.
        num_all_right: 0-d, int64: of these, with a common reward of at least ``right``.
        num_all_wrong: 0-d, int64: of these, with a common reward below it.
    """

    samples: Tensor
    num_groups: Tensor
    num_zero: Tensor
    num_all_right: Tensor
    num_all_wrong: Tensor


def zero_variance_groups(rewards: Rewards, group_ids: GroupIds, *, right: float = 1.0) -> ZeroVariance:
    """Find the groups that give no gradient, for DAPO's dynamic sampling and as a metric.

    Source: Yu et al., "DAPO", 2025, section 3.2 (dynamic sampling).

    Args:
        rewards: ``[N]``, floating point, NaN: no reward. Whole groups.
        group_ids: ``[N]``, integer.
        right: smallest reward of a right answer.

    Returns:
        The samples concerned and counts of groups.

    Example:
        >>> found = zero_variance_groups(torch.tensor([1.0, 1.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1]))
        >>> found.samples, int(found.num_zero), int(found.num_all_right)
        (tensor([ True,  True, False, False]), 1, 1)
    """
    rewards = as_rewards(rewards)
    group = group_statistics(rewards, group_ids)
    samples = group.std == 0
    # One representative per group that has a reward: its first valid sample.
    order = torch.arange(rewards.shape[0], device=rewards.device)
    size = int(group.index.max()) + 1 if rewards.numel() else 0
    first = order.new_full((size,), rewards.shape[0]).scatter_reduce(0, group.index[group.valid], order[group.valid], "amin")
    first = first[first < rewards.shape[0]]
    zero = samples[first]
    all_right = zero & (group.rewards[first] >= right)
    return ZeroVariance(samples, torch.tensor(first.numel(), device=rewards.device), zero.sum(), all_right.sum(), (zero & ~all_right).sum())


def should_resample(num_useful_groups: int, num_wanted_groups: int, num_attempts: int, max_attempts: int) -> bool:
    """Decide whether to sample more prompts because too many groups had no variance.

    Source: Yu et al., "DAPO", 2025, algorithm 1.

    Args:
        num_useful_groups: groups with variance so far, over all ranks.
        num_wanted_groups: groups of an iteration.
        num_attempts: rounds of sampling so far, the first included.
        max_attempts: most rounds; 1: never sample again.

    Returns:
        True if another round is needed and allowed. At the limit, train on what there is.

    Raises:
        ValueError: ``max_attempts`` is below 1.

    Example:
        >>> should_resample(3, 8, 1, 4), should_resample(8, 8, 1, 4), should_resample(3, 8, 4, 4)
        (True, False, False)
    """
    if max_attempts < 1:
        raise ValueError(f"Expected max_attempts to be at least 1 but got {max_attempts}.")
    return num_useful_groups < num_wanted_groups and num_attempts < max_attempts
