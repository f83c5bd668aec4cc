"""Rewards and group ids as callers have them, tensors or lists, made tensors."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import reduce
from typing import TypeAlias

import torch
from torch import Tensor

Rewards: TypeAlias = Tensor | Sequence[float | None]
"""``[N]``: a tensor, NaN where there is no reward, or a list, None where there is none."""

GroupIds: TypeAlias = Tensor | Sequence[Hashable]
"""``[N]``: integers, or a list of anything that can be compared: equal for the rollouts of one prompt."""


def as_rewards(rewards: Rewards) -> Tensor:
    """Return rewards as a floating point tensor that loses no digit of them, NaN for None.

    Near-equal rewards far from 0 must differ until they have been compared, so Python numbers and integers become fp64.

    Args:
        rewards: see ``Rewards``.

    Example:
        >>> as_rewards([1, None]), as_rewards(torch.tensor([1.0, 0.0])).dtype
        (tensor([1., nan], dtype=torch.float64), torch.float32)
    """
    if isinstance(rewards, Tensor):
        return rewards if rewards.is_floating_point() else rewards.double()
    return torch.tensor([float("nan") if reward is None else float(reward) for reward in rewards], dtype=torch.float64)


def result_dtype(*inputs: object) -> torch.dtype:
    """Return the dtype of what is computed from some inputs: fp64 for fp64 tensors, else torch's default, fp32 at least.

    Args:
        *inputs: tensors, lists of numbers, None.

    Example:
        >>> result_dtype([0.5, None]), result_dtype(torch.zeros(1, dtype=torch.bfloat16)), result_dtype([1], torch.zeros(1).double())
        (torch.float32, torch.float32, torch.float64)
    """
    dtypes = [value.dtype for value in inputs if isinstance(value, Tensor) and value.is_floating_point()]
    return reduce(torch.promote_types, dtypes, torch.float32) if dtypes else torch.get_default_dtype()


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
    """Return rewards of several functions, ``[N, K]``, as a floating point tensor, NaN for None; see ``as_rewards``.

    Args:
        component_rewards: a tensor, or a list of K rewards for each sample.

    Example:
        >>> as_component_rewards([[1, None], [0, 2]])
        tensor([[1., nan],
                [0., 2.]], dtype=torch.float64)
    """
    if isinstance(component_rewards, Tensor):
        return as_rewards(component_rewards)
    return torch.stack([as_rewards(row) for row in component_rewards])
