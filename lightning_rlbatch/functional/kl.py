"""Divergence from the reference policy, per token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_rlbatch.functional.losses import MAX_LOG_RATIO, absolute
from lightning_rlbatch.functional.segments import sanitize

KLKind = Literal["k1", "k2", "k3", "abs", "full", "k1+", "k2+", "k3+", "abs+", "full+"]
KL_KINDS: tuple[str, ...] = get_args(KLKind)
MAX_K3 = 10.0


def needs_logits(kind: str) -> bool:
    """Return whether a kind of penalty sums over the vocabulary, for which log-probabilities of the sampled tokens are not enough.

    Example:
        >>> needs_logits("full+"), needs_logits("k3")
        (True, False)
    """
    return kind.rstrip("+") == "full"


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, response_mask: Tensor, kind: str = "k3", *, full: Tensor | None = None) -> Tensor:
    """Estimate KL(policy || reference) of each sampled token from its two log-probabilities.

    With d = log_probs - ref_log_probs: ``k1`` = d, ``k2`` = d**2 / 2, ``k3`` = exp(-d) - 1 + d, ``abs`` = abs(d). A trailing ``+``
    keeps the value and takes the gradient of ``k2``, which on policy is the gradient of the true divergence. (On policy the gradient of
    ``k1`` averages to 0, so as a loss it does nothing and belongs in the reward; that of ``k3`` is the gradient of KL(reference ||
    policy).) ``k3`` uses d clamped to +-20 and is itself clamped to 10, so that one token the reference finds impossible cannot take
    over the step; its gradient is 0 there. ``full`` is the exact sum over the vocabulary, computed by the caller (``full_kl``).

    Sources: Schulman, "Approximating KL Divergence", 2020 (k1, k2, k3); Tang and Munos, "On a few pitfalls in KL divergence gradient
    estimation for RL", 2025 (whose gradient is which).

    Args:
        log_probs: ``[T]``, floating point, differentiable.
        ref_log_probs: ``[T]``, floating point. No gradient.
        response_mask: ``[T]``, bool.
        kind: one of ``KL_KINDS``.
        full: ``[T]``, floating point, differentiable: the value of the kinds ``full`` and ``full+``; None for the others.

    Returns:
        ``[T]``: 0 outside the response mask.

    Raises:
        ValueError: unknown kind, or ``full`` is missing.

    Example:
        >>> kl_penalty(torch.tensor([-1.0]), torch.tensor([-1.5]), torch.tensor([True]), "k2")
        tensor([0.1250])
    """
    if kind not in KL_KINDS:
        raise ValueError(f"Expected KL kind to be one of {', '.join(KL_KINDS)} but got {kind!r}.")
    d = sanitize(log_probs, response_mask) - sanitize(ref_log_probs.detach(), response_mask)
    k2 = 0.5 * d.square()
    base = kind.rstrip("+")
    if needs_logits(kind):
        if full is None:
            raise ValueError(
                f"KL kind {kind!r} is a sum over the vocabulary, which the log-probs of sampled tokens do not tell. Pass"
                " full=full_kl(logits, ref_logits, response_mask), or use k1, k2, k3 or abs."
            )
        value = sanitize(full, response_mask)
    elif base == "k1":
        value = d
    elif base == "k2":
        value = k2
    elif base == "abs":
        value = absolute(d)
    else:
        bounded = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        value = (torch.expm1(-bounded) + bounded).clamp(max=MAX_K3)
    if kind.endswith("+"):
        # Straight-through: (k2 - k2.detach()) is 0 in value and carries k2's gradient.
        value = value.detach() + (k2 - k2.detach())
    return value


def full_kl(logits: Tensor, ref_logits: Tensor, response_mask: Tensor) -> Tensor:
    """Compute KL(policy || reference) exactly, summed over the vocabulary, where both models' logits exist.

    Source: Kullback and Leibler, "On Information and Sufficiency", 1951.

    Args:
        logits: ``[T, V]``, floating point, differentiable: row t predicts token t.
        ref_logits: ``[T, V]``, floating point. No gradient.
        response_mask: ``[T]``, bool.

    Returns:
        ``[T]``, >= 0 but for rounding: 0 outside the response mask; inf where the policy samples what the reference rules out (-inf).

    Example:
        >>> full_kl(torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 1.0]]), torch.tensor([True]))
        tensor([0.])
    """
    log_p = sanitize(logits, response_mask[:, None]).log_softmax(-1)
    log_q = sanitize(ref_logits.detach(), response_mask[:, None]).log_softmax(-1)
    # A probability of 0 contributes 0, in value and gradient, also where the reference rules the token out too: 0 * -inf would be NaN.
    log_q = torch.where(log_p == -torch.inf, 0.0, log_q)
    log_p = log_p.clamp(min=torch.finfo(log_p.dtype).min)
    return sanitize((log_p.exp() * (log_p - log_q)).sum(-1), response_mask)


class KLController(ABC):
    """Say how the coefficient of the KL penalty moves from iteration to iteration; subclass it for a rule of your own."""

    coefficient: float
    """Weight of the penalty in the first iteration."""

    @abstractmethod
    def update(self, coefficient: float, *, current_kl: float, num_samples: int) -> float:
        """Return the coefficient of the next iteration.

        Args:
            coefficient: of this iteration.
            current_kl: mean divergence of this iteration's rollouts, over all ranks.
            num_samples: rollouts of this iteration, over all ranks.
        """


@dataclass(frozen=True)
class FixedKL(KLController):
    """Keep the coefficient of the KL penalty.

    Args:
        coefficient: weight of the penalty, >= 0.

    Example:
        >>> FixedKL(0.01).update(0.01, current_kl=3.0, num_samples=64)
        0.01
    """

    coefficient: float = 0.001

    def __post_init__(self) -> None:
        _check_coefficient(self.coefficient)

    def update(self, coefficient: float, *, current_kl: float, num_samples: int) -> float:
        """Return the same coefficient."""
        return coefficient


@dataclass(frozen=True)
class AdaptiveKL(KLController):
    """Steer the coefficient so that the divergence approaches a target.

    beta <- beta (1 + clip(kl / target - 1, -0.2, 0.2) num_samples / horizon).

    Source: Ziegler et al., "Fine-Tuning Language Models from Human Preferences", 2019, section 2.2.

    Args:
        coefficient: weight of the penalty at the start, >= 0.
        target: wanted divergence per token, > 0.
        horizon: number of samples over which an error of 20 % changes the coefficient by 20 %, > 0.

    Example:
        >>> AdaptiveKL(0.5, target=1.0, horizon=100).update(0.5, current_kl=2.0, num_samples=50)
        0.55
    """

    coefficient: float = 0.001
    target: float = 0.1
    horizon: int = 10_000

    def __post_init__(self) -> None:
        _check_coefficient(self.coefficient)
        if not (self.target > 0 and self.horizon > 0):
            raise ValueError(f"Expected target and horizon to be positive but got target={self.target} and horizon={self.horizon}.")

    def update(self, coefficient: float, *, current_kl: float, num_samples: int) -> float:
        """Return a larger coefficient if the divergence was above the target, a smaller one if below."""
        error = min(max(current_kl / self.target - 1, -0.2), 0.2)
        return coefficient * (1 + error * num_samples / self.horizon)


def _check_coefficient(coefficient: float) -> None:
    if not coefficient >= 0:
        raise ValueError(f"Expected the KL coefficient to be >= 0 but got {coefficient}.")
