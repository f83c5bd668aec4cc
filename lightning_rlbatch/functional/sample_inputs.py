"""Rewards and group ids as callers have them, tensors or lists, made tensors."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Rewards: TypeAlias = Tensor | Sequence[float | None]
"""``[N]``: a tensor, NaN where there is no reward, or a list, None where there is none."""

GroupIds: TypeAlias = Tensor | Sequence[Hashable]
"""``[N]``: integers, or a list of anything that can be compared: equal for the rollouts of one prompt."""


def as_rewards(rewards: Rewards) -> Tensor:
    """Return rewards as a floating point tensor, NaN for None.

    Args:
        rewards: see ``Rewards``.

    Example:
        >>> as_rewards([1, None]), as_rewards(torch.tensor([1, 0])).dtype
        (tensor([1., nan]), torch.float32)
    """
    if isinstance(rewards, Tensor):
        return rewards if rewards.is_floating_point() else rewards.to(torch.get_default_dtype())
    return torch.tensor([float("nan") if reward is None else float(reward) for reward in rewards])


def as_group_ids(group_ids: GroupIds) -> Tensor:
    """Return group ids as an integer tensor; names are numbered in the order of their appearance.

    Args:
        group_ids: see ``GroupIds``.

    Example:
        >>> as_group_ids(["b", "a", "b"])
        tensor([0, 1, 0])
    """
    if isinstance(group_ids, Tensor):
        return group_ids
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(name, len(numbers)) for name in group_ids], dtype=torch.int64)


def as_component_rewards(component_rewards: Tensor | Sequence[Sequence[float | None]]) -> Tensor:
    """Return rewards of several functions, ``[N, K]``, as a floating point tensor, NaN for None.

    Args:
        component_rewards: a tensor, or a list of K rewards for each sample.

    Example:
        >>> as_component_rewards([[1, None], [0, 2]])
        tensor([[1., nan],
                [0., 2.]])
    """
    if isinstance(component_rewards, Tensor):
        return as_rewards(component_rewards)
    return torch.stack([as_rewards(row) for row in component_rewards])
