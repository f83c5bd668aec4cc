"""Correction for the difference between the policy that sampled and the policy that is trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_rlbatch.functional.aggregation import check_per_token
from lightning_rlbatch.functional.losses import MAX_LOG_RATIO, log_ratio
from lightning_rlbatch.functional.segments import sanitize, segment_mean, segment_sum, spread


class ImportanceCorrection(NamedTuple):
    """What ``importance_weights`` returns.

    Args:
        weights: ``[T]``, floating point, detached: factor of each term; 0 outside ``response_mask``.
        response_mask: ``[T]``, bool: the mask without the rejected tokens. Count the denominators from it, so that numerator and
            denominator lose a rejected token together.
        metrics: name -> ``[T]``, detached, over the ORIGINAL response mask.
    """

    weights: Tensor
    response_mask: Tensor
    metrics: dict[str, Tensor]


def importance_weights(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor | Sequence[int],
    *,
    level: str = "token",
    mode: str = "truncate",
    upper: float = 2.0,
    lower: float = 0.0,
) -> ImportanceCorrection:
    """Compute weights exp(log_probs - rollout_log_probs), truncated or masked outside [lower, upper].

    ``level``: ``token`` takes each token's own ratio; ``sequence`` the product over the response; ``sequence-mean`` its geometric mean.
    ``mode``: ``truncate`` clips the weight at ``upper`` (and raises it to ``lower``); ``mask`` removes tokens (or, at the sequence
    levels, whole responses) outside the interval and keeps the weight of the rest.

    Sources: Ionides, "Truncated Importance Sampling", 2008; Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training", 2025 (token level, truncated); Liu et al., "When Speed Kills Stability: Demystifying RL Collapse from the
    Training-Inference Mismatch", 2025 (sequence level, masked); Zheng et al., "Group Sequence Policy Optimization", 2025 (geometric mean).

    Args:
        log_probs: ``[T]``, floating point: of the trained policy at the start of the iteration.
        rollout_log_probs: ``[T]``, floating point: as reported by the engine that sampled.
        response_mask: ``[T]``, bool.
        cu_seqlens: ``[N + 1]``, int.
        level: ``token``, ``sequence`` or ``sequence-mean``.
        mode: ``truncate`` or ``mask``.
        upper: largest weight, > 0.
        lower: smallest weight, in [0, upper].

    Returns:
        Weights, the response mask that is left, and metrics: ``importance_weight`` (before the bound), ``importance_clipped`` (1 where
        out of bounds), ``behavior_kl`` (k3 estimate of KL(rollout || trained)), ``log_prob_difference`` (absolute).

    Raises:
        ValueError: unknown level or mode, bounds out of order, or log-probs that are not ``[T]``.
        TypeError: ``response_mask`` is not bool.

    Example:
        >>> mask = torch.ones(2, dtype=torch.bool)
        >>> new, rollout = torch.tensor([-1.0, -1.0]), torch.tensor([-3.0, -1.0])
        >>> importance_weights(new, rollout, mask, torch.tensor([0, 2])).weights
        tensor([2., 1.])
    """
    if level not in ("token", "sequence", "sequence-mean"):
        raise ValueError(f"Expected level to be 'token', 'sequence' or 'sequence-mean' but got {level!r}.")
    if mode not in ("truncate", "mask"):
        raise ValueError(f"Expected mode to be 'truncate' or 'mask' but got {mode!r}.")
    if not 0 <= lower <= upper or not upper > 0:
        raise ValueError(f"Expected 0 <= lower <= upper and upper > 0 but got lower={lower} and upper={upper}.")
    check_per_token(log_probs, response_mask, source="log_probs")
    check_per_token(rollout_log_probs, response_mask, source="rollout_log_probs")
    token_delta = log_ratio(log_probs.detach(), rollout_log_probs, response_mask, limit=None)
    delta = token_delta
    if level != "token":
        reduced = segment_mean(delta, response_mask, cu_seqlens) if level == "sequence-mean" else segment_sum(delta, cu_seqlens)
        delta = spread(reduced, cu_seqlens, delta.shape[0])
    ratio = delta.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    outside = response_mask & ((ratio > upper) | (ratio < lower))
    kept = response_mask & ~outside if mode == "mask" else response_mask
    bounded = token_delta.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    metrics = {
        "importance_weight": sanitize(ratio, response_mask),
        "importance_clipped": outside.to(ratio.dtype),
        "behavior_kl": torch.expm1(bounded) - bounded,
        "log_prob_difference": token_delta.abs(),
    }
    return ImportanceCorrection(sanitize(ratio.clamp(lower, upper), kept), kept, metrics)


def effective_sample_size_sums(weights: Tensor, response_mask: Tensor) -> Tensor:
    """Return what ``effective_sample_size`` needs of one piece: count, sum and sum of squares of the weights.

    Args:
        weights: ``[T]``, floating point.
        response_mask: ``[T]``, bool.

    Returns:
        ``[3]``, float64: add over pieces and ranks.

    Example:
        >>> effective_sample_size_sums(torch.tensor([1.0, 3.0]), torch.tensor([True, True]))
        tensor([ 2.,  4., 10.], dtype=torch.float64)
    """
    w = sanitize(weights.detach(), response_mask).double()
    return torch.stack([response_mask.sum().double(), w.sum(), w.square().sum()])


def effective_sample_size(sums: Tensor) -> Tensor:
    """Compute (sum w)**2 / (n sum w**2): 1 if all weights are equal, 1 / n if one of n carries everything.

    Source: Kong, "A Note on Importance Sampling using Standardized Weights", 1992.

    Args:
        sums: ``[3]``: ``effective_sample_size_sums`` added over all pieces.

    Returns:
        0-d, float64; 0 if there is nothing.

    Example:
        >>> effective_sample_size(torch.tensor([2.0, 4.0, 8.0]))
        tensor(1., dtype=torch.float64)
    """
    count, total, squares = sums.double().unbind()
    divisor = count * squares
    return torch.where(divisor > 0, total.square() / torch.where(divisor > 0, divisor, 1.0), 0.0)
