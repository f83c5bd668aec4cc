"""The critic's loss."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_rlbatch.functional.losses import LossTerms
from lightning_rlbatch.functional.segments import sanitize


def value_loss(
    values: Tensor, old_values: Tensor | None, returns: Tensor, response_mask: Tensor, *, clip: float | None = None
) -> LossTerms:
    """Compute half the squared error of the value head, clipped around the old values if wanted.

    The term is max((V - R)**2, (V_old + clamp(V - V_old, -clip, clip) - R)**2) / 2; without ``clip`` it is (V - R)**2 / 2.

    Source: Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation", 2016 (regression on
    returns); the clipping is that of the "baselines" PPO2 implementation, described in Engstrom et al., "Implementation Matters in
    Deep Policy Gradients", 2020, section 3.

    Args:
        values: ``[T]``, floating point: V(state before token t), differentiable.
        old_values: ``[T]``, floating point: the same at the start of the iteration. May be None if ``clip`` is None.
        returns: ``[T]``, floating point: regression targets.
        response_mask: ``[T]``, bool.
        clip: half width of the trust interval, > 0.

    Returns:
        Terms and the metrics ``value_mean``, ``value_error`` (V - R) and, with ``clip``, ``clip_fraction``: all ``[T]``.

    Raises:
        ValueError: ``clip`` is not positive, or ``old_values`` is missing.

    Example:
        >>> value_loss(torch.tensor([3.0]), None, torch.tensor([1.0]), torch.tensor([True])).terms
        tensor([2.])
    """
    values, returns = sanitize(values, response_mask), sanitize(returns.detach(), response_mask)
    error = (values - returns).square()
    metrics = {"value_mean": values.detach(), "value_error": (values - returns).detach()}
    if clip is None:
        return LossTerms(0.5 * error, metrics)
    if not clip > 0:
        raise ValueError(f"Expected the value clip range to be positive but got {clip}. Pass None to switch clipping off.")
    if old_values is None:
        raise ValueError("Value clipping needs old_values, the values at the start of the iteration, but got None.")
    old_values = sanitize(old_values.detach(), response_mask)
    moved = values - old_values
    clipped_error = (old_values + moved.clamp(-clip, clip) - returns).square()
    # Inside of the interval the two errors differ by rounding alone, which is no clipping.
    metrics["clip_fraction"] = ((clipped_error > error) & (moved.abs() > clip)).detach().to(error.dtype)
    return LossTerms(0.5 * torch.maximum(error, clipped_error), metrics)
