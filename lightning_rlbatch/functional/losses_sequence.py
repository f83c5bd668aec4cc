"""Policy losses whose ratio belongs to the whole response."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_rlbatch.functional.losses import MAX_LOG_RATIO, LossTerms, check_clip_bounds, clip_metrics, log_ratio, ratio_metrics
from lightning_rlbatch.functional.segments import sanitize, segment_mean, spread


def gspo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> LossTerms:
    """Compute the clipped surrogate with the sequence ratio s_i = exp(mean over the response of log r), GSPO-token form.

    Token t of sample i has the value of s_i and, straight through, the gradient s_i d log_probs_t. With one advantage per sample and
    ``seq-mean-token-mean`` this is the paper's sequence objective.

    Source: Zheng et al., "Group Sequence Policy Optimization", 2025, eq. 7 and 13; the bounds are those of section 5.

    Args:
        log_probs: ``[T]``, floating point, differentiable.
        old_log_probs: ``[T]``, floating point.
        advantages: ``[T]``, floating point.
        response_mask: ``[T]``, bool.
        cu_seqlens: ``[N + 1]``, int.
        clip_low: the sequence ratio is clipped at 1 - clip_low.
        clip_high: the sequence ratio is clipped at 1 + clip_high.

    Returns:
        Terms and the metrics of the token ratio, ``sequence_ratio``, ``clip_fraction_low``, ``clip_fraction_high`` (of the tokens).

    Raises:
        ValueError: a bound is negative.

    Example:
        >>> two = torch.ones(2)
        >>> gspo_loss(0.1 * two, 0 * two, two, two.bool(), torch.tensor([0, 2]), clip_high=0.05).terms
        tensor([-1.0500, -1.0500])
    """
    check_clip_bounds(clip_low, clip_high)
    delta, advantages = log_ratio(log_probs, old_log_probs, response_mask, limit=None), sanitize(advantages, response_mask)
    mean = segment_mean(delta.detach(), response_mask, cu_seqlens).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    sequence_ratio = spread(mean.exp(), cu_seqlens, delta.shape[0])
    ratio = sequence_ratio * (delta - delta.detach()).exp()
    terms = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    metrics = ratio_metrics(delta.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), response_mask)
    metrics |= {"sequence_ratio": sanitize(sequence_ratio, response_mask)}
    return LossTerms(terms, metrics | clip_metrics(ratio, advantages, clip_low, clip_high))


def gmpo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> LossTerms:
    """Compute -A exp(mean over the response of the clipped log r): the geometric mean of the token ratios.

    log r is clipped to [-clip_low, clip_high] token by token, only where that lowers the objective (as in PPO). Every response token of
    a sample carries the sample's product of ratio and its own advantage, so ``seq-mean-token-mean`` gives the paper's objective.

    Source: Zhao et al., "Geometric-Mean Policy Optimization", 2025.

    Args:
        log_probs: ``[T]``, floating point, differentiable.
        old_log_probs: ``[T]``, floating point.
        advantages: ``[T]``, floating point.
        response_mask: ``[T]``, bool.
        cu_seqlens: ``[N + 1]``, int.
        clip_low: lower bound of log r is -clip_low.
        clip_high: upper bound of log r.

    Returns:
        Terms and the metrics of the token ratio, ``sequence_ratio``, ``clip_fraction_low``, ``clip_fraction_high``.

    Raises:
        ValueError: a bound is negative.

    Example:
        >>> two = torch.ones(2)
        >>> gmpo_loss(torch.tensor([0.0, 0.2]), 0 * two, two, two.bool(), torch.tensor([0, 2])).terms
        tensor([-1.1052, -1.1052])
    """
    check_clip_bounds(clip_low, clip_high)
    delta, advantages = log_ratio(log_probs, old_log_probs, response_mask), sanitize(advantages, response_mask)
    sign = advantages.sign()
    bounded = sign * torch.minimum(sign * delta, sign * delta.clamp(-clip_low, clip_high))
    ratio = spread(segment_mean(bounded, response_mask, cu_seqlens).exp(), cu_seqlens, delta.shape[0])
    held = delta.detach()
    metrics = ratio_metrics(delta, response_mask) | {
        "sequence_ratio": sanitize(ratio.detach(), response_mask),
        "clip_fraction_low": ((sign < 0) & (held < -clip_low)).to(delta.dtype),
        "clip_fraction_high": ((sign > 0) & (held > clip_high)).to(delta.dtype),
    }
    return LossTerms(-advantages * ratio, metrics)
