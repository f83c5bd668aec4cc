"""Rewards as reward functions return them, as tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_rlbatch.functional.sample_inputs import as_component_rewards


def reward_columns(outputs: Sequence[Sequence[float | None]]) -> Tensor:
    """Stack the outputs of K reward functions.

    Args:
        outputs: K lists of N rewards; None: the function has no opinion on that sample.

    Returns:
        ``[N, K]``, float64, so that near-equal rewards differ until they have been compared: NaN for None.

    Raises:
        ValueError: there is no list, or the lists differ in length.

    Example:
        >>> reward_columns([[1.0, None], [0.0, 2.0]])
        tensor([[1., 0.],
                [nan, 2.]], dtype=torch.float64)
    """
    lengths = [len(column) for column in outputs]
    if not lengths or min(lengths) != max(lengths):
        raise ValueError(f"Expected one reward per sample from every reward function but got {lengths} rewards.")
    rows = [[float("nan") if value is None else float(value) for value in column] for column in outputs]
    return torch.tensor(rows, dtype=torch.float64).reshape(len(rows), lengths[0]).T.contiguous()


def combine_rewards(component_rewards: Tensor | Sequence[Sequence[float | None]], weights: Sequence[float] | None = None) -> Tensor:
    """Add the rewards of each sample, those that are NaN left out.

    Args:
        component_rewards: ``[N, K]``, floating point.
        weights: one per reward. None: 1 each.

    Returns:
        ``[N]``: NaN where all rewards of a sample are NaN.

    Raises:
        ValueError: the number of weights is not K.

    Example:
        >>> combine_rewards(torch.tensor([[1.0, 2.0], [float("nan"), 2.0]]), weights=[1.0, 0.5])
        tensor([2., 1.])
    """
    component_rewards = as_component_rewards(component_rewards)
    num_rewards = component_rewards.shape[1]
    if weights is not None and len(weights) != num_rewards:
        raise ValueError(f"Expected one weight for each of {num_rewards} rewards but got {len(weights)}.")
    factors = component_rewards.new_ones(num_rewards) if weights is None else component_rewards.new_tensor(list(weights))
    total = (component_rewards * factors).nansum(1)
    return torch.where(component_rewards.isnan().all(1), torch.nan, total)
