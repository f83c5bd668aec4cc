"""Policy losses that bound or weight each token's gradient on its own."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_rlbatch.functional.losses import LossTerms, check_clip_bounds, log_ratio, ratio_metrics
from lightning_rlbatch.functional.segments import sanitize


def reinforce_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, *, max_ratio: float | None = None
) -> LossTerms:
    """Compute -w A log_probs, with w = 1, or the importance ratio truncated at ``max_ratio``.

    With ``old_log_probs`` from the engine that sampled, w corrects for its difference from the trained policy; w has no gradient.

    Sources: Williams, "Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning", 1992; Ionides,
    "Truncated Importance Sampling", 2008; Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025.
    Chu et al., "GPG: A Simple and Strong Reinforcement Learning Baseline for Model Reasoning", 2025, uses it with w = 1.

    Args:
        log_probs: ``[T]``, floating point, differentiable.
        old_log_probs: ``[T]``, floating point.
        advantages: ``[T]``, floating point.
        response_mask: ``[T]``, bool.
        max_ratio: upper bound of w, > 0. None: no weight.

    Returns:
        Terms and the metrics of the ratio, ``clip_fraction_high`` (truncated tokens) with ``max_ratio``.

    Raises:
        ValueError: ``max_ratio`` is not positive.

    Example:
        >>> one = torch.ones(1)
        >>> reinforce_loss(-0.5 * one, -0.5 * one, 2 * one, one.bool()).terms
        tensor([1.])
    """
    delta, advantages = log_ratio(log_probs, old_log_probs, response_mask), sanitize(advantages, response_mask)
    metrics = ratio_metrics(delta, response_mask)
    terms = -advantages * sanitize(log_probs, response_mask)
    if max_ratio is not None:
        if not max_ratio > 0:
            raise ValueError(f"Expected max_ratio to be positive but got {max_ratio}. Pass None for no weight.")
        ratio = delta.detach().exp()
        terms = terms * ratio.clamp(max=max_ratio)
        metrics["clip_fraction_high"] = ((ratio > max_ratio) & response_mask).to(ratio.dtype)
    return LossTerms(terms, metrics)


def cispo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> LossTerms:
    """Compute -clip(r, 1 - clip_low, 1 + clip_high) A log_probs, no gradient through the clipped ratio: no token is dropped.

    Source: MiniMax, "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention", 2025, eq. 4 and 5. The defaults have
    no lower bound, as there, and cap the ratio at 5, as in Khatri et al., "The Art of Scaling Reinforcement Learning Compute for
    LLMs", 2025.

    Args:
        log_probs: ``[T]``, floating point, differentiable.
        old_log_probs: ``[T]``, floating point.
        advantages: ``[T]``, floating point.
        response_mask: ``[T]``, bool.
        clip_low: the ratio is clipped at 1 - clip_low; 1 or more: no lower bound.
        clip_high: the ratio is clipped at 1 + clip_high.

    Returns:
        Terms and the metrics of the ratio, ``clip_fraction_low``, ``clip_fraction_high`` (whatever the sign of the advantage).

    Raises:
        ValueError: a bound is negative.

    Example:
        >>> one = torch.ones(1)
        >>> cispo_loss(-0.5 * one, -0.5 * one, one, one.bool()).terms
        tensor([0.5000])
    """
    check_clip_bounds(clip_low, clip_high)
    delta, advantages = log_ratio(log_probs, old_log_probs, response_mask), sanitize(advantages, response_mask)
    ratio = delta.detach().exp()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    metrics = ratio_metrics(delta, response_mask)
    metrics["clip_fraction_low"] = ((ratio < 1 - clip_low) & response_mask).to(ratio.dtype)
    metrics["clip_fraction_high"] = ((ratio > 1 + clip_high) & response_mask).to(ratio.dtype)
    return LossTerms(-weight * advantages * sanitize(log_probs, response_mask), metrics)


def sapo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
) -> LossTerms:
    """Compute -A (4 / tau) sigmoid(tau (r - 1)): a smooth gate in place of the clip, steeper for negative advantages.

    At r = 1 the gradient is that of -A r. The paper aggregates by ``seq-mean-token-mean``.

    Source: Gao et al., "Soft Adaptive Policy Optimization", 2025.

    Args:
        log_probs: ``[T]``, floating point, differentiable.
        old_log_probs: ``[T]``, floating point.
        advantages: ``[T]``, floating point.
        response_mask: ``[T]``, bool.
        temperature_positive: tau where A > 0.
        temperature_negative: tau elsewhere.

    Returns:
        Terms and the metrics of the ratio.

    Raises:
        ValueError: a temperature is not positive.

    Example:
        >>> one = torch.ones(1)
        >>> sapo_loss(0 * one, 0 * one, one, one.bool()).terms
        tensor([-2.])
    """
    if not (temperature_positive > 0 and temperature_negative > 0):
        raise ValueError(f"Expected both temperatures to be positive but got {temperature_positive} and {temperature_negative}.")
    delta, advantages = log_ratio(log_probs, old_log_probs, response_mask), sanitize(advantages, response_mask)
    # Of two Python numbers torch.where makes an fp32 tensor, whatever the dtype of the rest.
    tau = torch.where(advantages > 0, delta.new_tensor(temperature_positive), delta.new_tensor(temperature_negative))
    gate = torch.sigmoid(tau * (delta.exp() - 1)) * 4 / tau
    return LossTerms(-advantages * gate, ratio_metrics(delta, response_mask))


def dppo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    divergence: str = "tv",
    threshold_low: float = 0.2,
    threshold_high: float = 0.2,
    max_ratio: float = 20.0,
) -> LossTerms:
    """Compute -A min(r, max_ratio) log_probs on the tokens whose probability is still inside a trust region, 0 elsewhere.

    With p, q the new and the old probability of the sampled token, seen as a two-way choice, a token is dropped when it moves on in
    the direction of its advantage from outside the region: ``tv``: A > 0 and p - q > threshold_high, or A < 0 and q - p >
    threshold_low; ``kl``: the same with q log(q / p) + (1 - q) log((1 - q) / (1 - p)) against the thresholds. The weight has no gradient.

    Source: Qi et al., "Rethinking the Trust Region in LLM Reinforcement Learning", 2026 (DPPO, binary approximations).

    Args:
        log_probs: ``[T]``, floating point, differentiable.
        old_log_probs: ``[T]``, floating point: of the policy that sampled.
        advantages: ``[T]``, floating point.
        response_mask: ``[T]``, bool.
        divergence: ``tv`` or ``kl``.
        threshold_low: bound for negative advantages.
        threshold_high: bound for positive advantages.
        max_ratio: truncation of the importance weight.

    Returns:
        Terms and the metrics of the ratio, ``clip_fraction_low``, ``clip_fraction_high``.

    Raises:
        ValueError: unknown divergence, a negative threshold, a ``max_ratio`` that is not positive.

    Example:
        >>> one = torch.ones(1)
        >>> dppo_loss(-0.1 * one, -2 * one, one, one.bool()).terms  # 0.14 -> 0.90 is far enough
        tensor([0.])
    """
    if divergence not in ("tv", "kl"):
        raise ValueError(f"Expected divergence to be 'tv' or 'kl' but got {divergence!r}.")
    check_clip_bounds(threshold_low, threshold_high)
    if not max_ratio > 0:
        raise ValueError(f"Expected max_ratio to be positive but got {max_ratio}.")
    delta, advantages = log_ratio(log_probs, old_log_probs, response_mask), sanitize(advantages, response_mask)
    scored = sanitize(log_probs, response_mask)
    new, old = scored.detach(), sanitize(old_log_probs.detach(), response_mask)
    change = new.exp() - old.exp()
    distance = change.abs() if divergence == "tv" else binary_kl(old, new)
    low = (advantages < 0) & (change < 0) & (distance > threshold_low)
    high = (advantages > 0) & (change > 0) & (distance > threshold_high)
    weight = torch.where(low | high, 0.0, delta.detach().exp().clamp(max=max_ratio))
    metrics = ratio_metrics(delta, response_mask)
    metrics |= {"clip_fraction_low": low.to(delta.dtype), "clip_fraction_high": high.to(delta.dtype)}
    return LossTerms(-advantages * weight * scored, metrics)


def binary_kl(log_q: Tensor, log_p: Tensor) -> Tensor:
    """Compute KL(q || p) of the choice "this token or another", from the token's two log-probabilities.

    Source: Qi et al., "Rethinking the Trust Region in LLM Reinforcement Learning", 2026.

    Args:
        log_q: ``[T]``, floating point, <= 0.
        log_p: ``[T]``, floating point, <= 0.

    Returns:
        ``[T]``, >= 0. Probabilities of 1 are taken as just below 1, where the divergence would be infinite.

    Example:
        >>> half = torch.tensor([0.5]).log()
        >>> binary_kl(half, half)
        tensor([0.])
    """
    tiny = torch.finfo(log_q.dtype).eps
    log_q, log_p = log_q.clamp(max=-tiny), log_p.clamp(max=-tiny)
    rest_q, rest_p = torch.log(-torch.expm1(log_q)), torch.log(-torch.expm1(log_p))
    return (log_q.exp() * (log_q - log_p) + rest_q.exp() * (rest_q - rest_p)).clamp(min=0)
