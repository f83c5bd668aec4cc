"""Policy losses as small frozen dataclasses, chosen by ``class_path`` in a configuration file; the functions do the work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from lightning_rlbatch.functional.losses import LossTerms, call_loss, ppo_clip_loss
from lightning_rlbatch.functional.losses_covariance import clip_cov_loss, kl_cov_loss, select_clip_cov, select_kl_cov
from lightning_rlbatch.functional.losses_sequence import gmpo_loss, gspo_loss
from lightning_rlbatch.functional.losses_token import cispo_loss, dppo_loss, reinforce_loss, sapo_loss
from lightning_rlbatch.functional.peers import ALONE, Peers
from lightning_rlbatch.functional.policy_loss_base import LossInputs, PolicyLoss


@dataclass(frozen=True)
class PPOClip(PolicyLoss):
    """Use ``ppo_clip_loss`` (Schulman et al., 2017; clip-higher: Yu et al., 2025; dual clip: Ye et al., 2020).

    Args:
        clip_low: the ratio is clipped at 1 - clip_low.
        clip_high: the ratio is clipped at 1 + clip_high.
        dual_clip: largest factor of a negative advantage, > 1; None: no bound.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None

    def compute(self, inputs: LossInputs) -> LossTerms:
        """See ``ppo_clip_loss``."""
        return ppo_clip_loss(*inputs.tokens, clip_low=self.clip_low, clip_high=self.clip_high, dual_clip=self.dual_clip)


@dataclass(frozen=True)
class GSPO(PolicyLoss):
    """Use ``gspo_loss`` (Zheng et al., 2025); aggregate by ``seq-mean-token-mean`` as the paper does.

    Args:
        clip_low: the sequence ratio is clipped at 1 - clip_low.
        clip_high: the sequence ratio is clipped at 1 + clip_high.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def compute(self, inputs: LossInputs) -> LossTerms:
        """See ``gspo_loss``."""
        return gspo_loss(*inputs.tokens, inputs.cu_seqlens, clip_low=self.clip_low, clip_high=self.clip_high)


@dataclass(frozen=True)
class GMPO(PolicyLoss):
    """Use ``gmpo_loss`` (Zhao et al., 2025); aggregate by ``seq-mean-token-mean`` as the paper does.

    Args:
        clip_low: log ratios are clipped at -clip_low.
        clip_high: log ratios are clipped at clip_high.
    """

    clip_low: float = 0.4
    clip_high: float = 0.4

    def compute(self, inputs: LossInputs) -> LossTerms:
        """See ``gmpo_loss``."""
        return gmpo_loss(*inputs.tokens, inputs.cu_seqlens, clip_low=self.clip_low, clip_high=self.clip_high)


@dataclass(frozen=True)
class CISPO(PolicyLoss):
    """Use ``cispo_loss`` (MiniMax, 2025).

    Args:
        clip_low: the weight is clipped at 1 - clip_low; 1 or more: no lower bound.
        clip_high: the weight is clipped at 1 + clip_high.
    """

    clip_low: float = 1.0
    clip_high: float = 4.0

    def compute(self, inputs: LossInputs) -> LossTerms:
        """See ``cispo_loss``."""
        return cispo_loss(*inputs.tokens, clip_low=self.clip_low, clip_high=self.clip_high)


@dataclass(frozen=True)
class SAPO(PolicyLoss):
    """Use ``sapo_loss`` (Gao et al., 2025); aggregate by ``seq-mean-token-mean`` as the paper does.

    Args:
        temperature_positive: steepness of the gate for positive advantages.
        temperature_negative: steepness of the gate for negative advantages.
    """

    temperature_positive: float = 1.0
    temperature_negative: float = 1.05

    def compute(self, inputs: LossInputs) -> LossTerms:
        """See ``sapo_loss``."""
        return sapo_loss(*inputs.tokens, temperature_positive=self.temperature_positive, temperature_negative=self.temperature_negative)


@dataclass(frozen=True)
class DPPO(PolicyLoss):
    """Use ``dppo_loss`` (Qi et al., 2026).

    Args:
        divergence: ``tv`` or ``kl``, of the choice between the sampled token and any other.
        threshold_low: bound for negative advantages.
        threshold_high: bound for positive advantages.
        max_ratio: truncation of the importance weight.
    """

    divergence: Literal["tv", "kl"] = "tv"
    threshold_low: float = 0.2
    threshold_high: float = 0.2
    max_ratio: float = 20.0

    def compute(self, inputs: LossInputs) -> LossTerms:
        """See ``dppo_loss``."""
        return dppo_loss(
            *inputs.tokens,
            divergence=self.divergence,
            threshold_low=self.threshold_low,
            threshold_high=self.threshold_high,
            max_ratio=self.max_ratio,
        )


@dataclass(frozen=True)
class Reinforce(PolicyLoss):
    """Use ``reinforce_loss`` (Williams, 1992; truncated importance sampling: Ionides, 2008; also GPG's loss).

    Args:
        max_ratio: upper bound of the importance weight; None: no weight.
    """

    max_ratio: float | None = None

    def compute(self, inputs: LossInputs) -> LossTerms:
        """See ``reinforce_loss``."""
        return reinforce_loss(*inputs.tokens, max_ratio=self.max_ratio)


@dataclass(frozen=True)
class ClipCov(PolicyLoss):
    """Use ``clip_cov_loss`` (Cui et al., 2025): PPO's loss without some tokens of high covariance, chosen over the mini-batch.

    Args:
        clip_low: the ratio is clipped at 1 - clip_low.
        clip_high: the ratio is clipped at 1 + clip_high.
        fraction: share of the mini-batch's tokens to leave out.
        lower: smallest covariance of such a token.
        upper: largest covariance of such a token.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    fraction: float = 2e-4
    lower: float = 1.0
    upper: float = 5.0
    needs_selection: ClassVar[bool] = True

    def compute(self, inputs: LossInputs) -> LossTerms:
        """See ``clip_cov_loss``."""
        assert inputs.selected is not None
        return clip_cov_loss(*inputs.tokens, inputs.selected, clip_low=self.clip_low, clip_high=self.clip_high)

    def select(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        keys: Tensor,
        *,
        num_tokens: int,
        peers: Peers = ALONE,
    ) -> Tensor:
        """See ``select_clip_cov``."""
        settings = {"fraction": self.fraction, "lower": self.lower, "upper": self.upper}
        bounds = {"clip_low": self.clip_low, "clip_high": self.clip_high}
        return select_clip_cov(
            log_probs, old_log_probs, advantages, response_mask, keys, num_tokens=num_tokens, peers=peers, **settings, **bounds
        )


@dataclass(frozen=True)
class KLCov(PolicyLoss):
    """Use ``kl_cov_loss`` (Cui et al., 2025): a penalty on the tokens of highest covariance of the mini-batch.

    Args:
        coefficient: weight of the penalty.
        fraction: share of the mini-batch's tokens to penalize.
    """

    coefficient: float = 1.0
    fraction: float = 2e-3
    needs_selection: ClassVar[bool] = True

    def compute(self, inputs: LossInputs) -> LossTerms:
        """See ``kl_cov_loss``."""
        assert inputs.selected is not None
        return kl_cov_loss(*inputs.tokens, inputs.selected, coefficient=self.coefficient)

    def select(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        keys: Tensor,
        *,
        num_tokens: int,
        peers: Peers = ALONE,
    ) -> Tensor:
        """See ``select_kl_cov``; ``old_log_probs`` is not used."""
        return select_kl_cov(log_probs, advantages, response_mask, keys, num_tokens=num_tokens, fraction=self.fraction, peers=peers)


@dataclass(frozen=True)
class FunctionLoss(PolicyLoss):
    """Use a function of your own, named by its import path in a configuration file.

    Args:
        function: ``(log_probs, old_log_probs, advantages, response_mask, cu_seqlens) -> [T]`` terms or ``LossTerms``; it may take the
            first few of the arguments only.

    Example:
        >>> import torch
        >>> one = torch.ones(1)
        >>> mean = FunctionLoss(lambda log_probs, *rest: -log_probs.mean())
        >>> mean(one, one, one, one.bool(), torch.tensor([0, 1]))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: Policy loss <lambda> must hold one unreduced term per token, shape (1,), but got shape (). Return the terms ...
    """

    function: Callable[..., Any]

    @property
    def name(self) -> str:
        """The function's name."""
        return getattr(self.function, "__qualname__", type(self.function).__name__)

    def compute(self, inputs: LossInputs) -> LossTerms | Tensor:
        """Call the function."""
        return call_loss(self.function, *inputs.tokens, inputs.cu_seqlens)
