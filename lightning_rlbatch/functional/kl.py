"""Divergence from the reference policy, per token."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_rlbatch.functional.losses import MAX_LOG_RATIO
from lightning_rlbatch.functional.segments import sanitize

KLKind = Literal["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+"]
KL_KINDS: tuple[str, ...] = get_args(KLKind)
MAX_K3 = 10.0


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, response_mask: Tensor, kind: str = "k3") -> Tensor:
    """Estimate KL(policy || reference) of each sampled token from its two log-probabilities.

    With d = log_probs - ref_log_probs: ``k1`` = d, ``k2`` = d**2 / 2, ``k3`` = exp(-d) - 1 + d, ``abs`` = abs(d). A trailing ``+``
    keeps the value and takes the gradient of ``k2``, which on policy is the gradient of the true divergence. (The plain gradients of
    ``k1`` average to 0 on policy: as a loss it does nothing; ``k1`` belongs in the reward.) ``k3`` uses d clamped to +-20 and is
    itself clamped to 10, so that one token the reference finds impossible cannot take over the step; its gradient is 0 there.

    Sources: Schulman, "Approximating KL Divergence", 2020 (k1, k2, k3); Tang and Munos, "On a few pitfalls in KL divergence gradient
    estimation for RL", 2025 (whose gradient is which).

    Args:
        log_probs: ``[T]``, floating point, differentiable.
        ref_log_probs: ``[T]``, floating point. No gradient.
        response_mask: ``[T]``, bool.
        kind: one of ``KL_KINDS``.

    Returns:
        ``[T]``: 0 outside the response mask.

    Raises:
        ValueError: unknown kind.

    Example:
        >>> kl_penalty(torch.tensor([-1.0]), torch.tensor([-1.5]), torch.tensor([True]), "k2")
        tensor([0.1250])
    """
    if kind not in KL_KINDS:
        raise ValueError(f"Expected KL kind to be one of {', '.join(KL_KINDS)} but got {kind!r}.")
    d = sanitize(log_probs, response_mask) - sanitize(ref_log_probs.detach(), response_mask)
    k2 = 0.5 * d.square()
    base = kind.rstrip("+")
    if base == "k1":
        value = d
    elif base == "k2":
        value = k2
    elif base == "abs":
        value = d.abs()
    else:
        bounded = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        value = (torch.expm1(-bounded) + bounded).clamp(max=MAX_K3)
    if kind.endswith("+"):
        # Straight-through: (k2 - k2.detach()) is 0 in value and carries k2's gradient.
        value = value.detach() + (k2 - k2.detach())
    return value
