"""Policy losses as small frozen dataclasses, chosen by ``class_path`` in a configuration file; the functions do the work."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from lightning_rlbatch.functional.losses import LossTerms, call_loss, policy_loss, ppo_clip_loss
from lightning_rlbatch.functional.losses_covariance import clip_cov_loss, kl_cov_loss, select_clip_cov, select_kl_cov
from lightning_rlbatch.functional.losses_sequence import gmpo_loss, gspo_loss
from lightning_rlbatch.functional.losses_token import cispo_loss, dppo_loss, reinforce_loss, sapo_loss
from lightning_rlbatch.functional.peers import ALONE, Peers


@dataclass(frozen=True)
class LossInputs:
    """What a policy loss sees of one micro-batch; everything is 0 outside the response mask.

    Args:
        log_probs: ``[T]``, floating point, differentiable.
        old_log_probs: ``[T]``, floating point.
        advantages: ``[T]``, floating point.
        response_mask: ``[T]``, bool.
        cu_seqlens: ``[N + 1]``, int.
        selected: ``[T]``, bool, for losses with ``needs_selection``.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    response_mask: Tensor
    cu_seqlens: Tensor
    selected: Tensor | None = None

    @property
    def tokens(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """``log_probs, old_log_probs, advantages, response_mask``: what every loss function takes first."""
        return self.log_probs, self.old_log_probs, self.advantages, self.response_mask


class PolicyLoss(ABC):
    """A policy loss: call it with one micro-batch, get unreduced terms.

    For a loss of your own, subclass and implement ``compute``: its result must be ``[T]`` terms, or ``LossTerms`` with metrics. What
    they are divided by is not its business, and a mean is refused.

    Example:
        >>> import torch
        >>> class Mine(PolicyLoss):
        ...     def compute(self, inputs):
        ...         return -inputs.advantages * inputs.log_probs
        >>> one = torch.ones(1)
        >>> Mine()(-0.5 * one, -0.5 * one, one, one.bool(), torch.tensor([0, 1])).terms
        tensor([0.5000])
    """

    needs_selection: ClassVar[bool] = False
    """True: ``select`` must run on the whole mini-batch first, and its result be passed as ``selected``."""

    @property
    def name(self) -> str:
        """What error messages call this loss."""
        return type(self).__name__

    def __call__(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        cu_seqlens: Tensor | Sequence[int],
        *,
        weights: Tensor | None = None,
        selected: Tensor | None = None,
    ) -> LossTerms:
        """Compute terms and metrics of one micro-batch; arguments as in ``policy_loss``.

        Raises:
            ValueError: ``selected`` is missing or not wanted, or the terms were reduced.
        """
        name = self.name
        if self.needs_selection and selected is None:
            raise ValueError(f"{name} needs `selected`, the result of its select() on the whole mini-batch, but got None.")
        if not self.needs_selection and selected is not None:
            raise ValueError(f"{name} makes no use of `selected` but got one. Do not pass it.")

        def compute(*arguments: Tensor, **extra: Any) -> LossTerms | Tensor:
            return self.compute(LossInputs(*arguments, **extra))

        return policy_loss(
            log_probs, old_log_probs, advantages, response_mask, cu_seqlens, loss=compute, weights=weights, selected=selected, name=name
        )

    @abstractmethod
    def compute(self, inputs: LossInputs) -> LossTerms | Tensor:
        """Return the ``[T]`` terms of one micro-batch."""

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
        """Choose tokens over the whole mini-batch, for losses with ``needs_selection``.

        Args:
            log_probs: ``[T]``, floating point: this rank's part of the mini-batch, all its micro-batches end to end. From a forward
                pass with the current weights, or ``old_log_probs`` again (exact in an iteration's first mini-batch).
            old_log_probs: ``[T]``, floating point.
            advantages: ``[T]``, floating point.
            response_mask: ``[T]``, bool.
            keys: ``[T]``, float64, from ``token_keys``.
            num_tokens: response tokens of the mini-batch over all ranks.
            peers: the data-parallel ranks.

        Returns:
            ``[T]``, bool.
        """
        raise RuntimeError(f"{type(self).__name__} makes no selection over the mini-batch (needs_selection is False).")


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
