"""What policy losses are: objects that are called with a micro-batch and return unreduced terms."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from lightning_rlbatch.functional.losses import LossTerms, policy_loss
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

        Raises:
            RuntimeError: The loss makes no selection.
        """
        raise RuntimeError(f"{type(self).__name__} makes no selection over the mini-batch (needs_selection is False).")
