"""Estimators that give one number per sample, mostly by comparing the rollouts of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lightning_rlbatch.functional.advantages_group import (
    SampleAdvantages,
    gdpo_advantages,
    gpg_advantages,
    group_advantages,
    opo_advantages,
    pass_at_k_advantages,
    remax_advantages,
    rloo_advantages,
)
from lightning_rlbatch.functional.estimators import AdvantageInputs, OutcomeEstimator
from lightning_rlbatch.functional.pass_at_k import pass_at_k_training_advantages
from lightning_rlbatch.functional.segments import segment_sum


@dataclass(frozen=True)
class GRPO(OutcomeEstimator):
    """Use ``group_advantages`` (Shao et al., 2024).

    Args:
        normalize_by_std: divide by the standard deviation of the group.
        eps: added to the standard deviation.
        whiten: scale to mean 0 and variance 1 over the response tokens of all ranks.
    """

    normalize_by_std: bool = True
    eps: float = 1e-6
    whiten: bool = False

    def compare(self, *columns: Tensor) -> SampleAdvantages:
        """See ``group_advantages``."""
        return group_advantages(*columns, normalize_by_std=self.normalize_by_std, eps=self.eps)


@dataclass(frozen=True)
class DrGRPO(OutcomeEstimator):
    """Use ``group_advantages`` without the standard deviation (Liu et al., 2025); aggregate by ``seq-mean-token-sum-norm``.

    Args:
        whiten: scale to mean 0 and variance 1 over the response tokens of all ranks.
    """

    whiten: bool = False

    def compare(self, *columns: Tensor) -> SampleAdvantages:
        """See ``group_advantages``."""
        return group_advantages(*columns, normalize_by_std=False)


@dataclass(frozen=True)
class ReinforcePlusPlusBaseline(OutcomeEstimator):
    """Subtract the group's mean, then whiten over the whole batch.

    Source: Hu, "REINFORCE++: A Simple and Efficient Approach for Aligning Large Language Models", 2025 (baseline form).

    Args:
        whiten: scale to mean 0 and variance 1 over the response tokens of all ranks.
    """

    whiten: bool = True

    def compare(self, *columns: Tensor) -> SampleAdvantages:
        """See ``group_advantages``."""
        return group_advantages(*columns, normalize_by_std=False)


@dataclass(frozen=True)
class RLOO(OutcomeEstimator):
    """Use ``rloo_advantages`` (Kool et al., 2019; Ahmadian et al., 2024).

    Args:
        whiten: scale to mean 0 and variance 1 over the response tokens of all ranks.
    """

    whiten: bool = False

    def compare(self, *columns: Tensor) -> SampleAdvantages:
        """See ``rloo_advantages``."""
        return rloo_advantages(*columns)


@dataclass(frozen=True)
class GPG(OutcomeEstimator):
    """Use ``gpg_advantages`` (Chu et al., 2025), with the loss ``Reinforce``.

    Args:
        scale: divisor of all advantages.
        whiten: scale to mean 0 and variance 1 over the response tokens of all ranks.
    """

    scale: float = 1.0
    whiten: bool = False

    def compare(self, *columns: Tensor) -> SampleAdvantages:
        """See ``gpg_advantages``."""
        return gpg_advantages(*columns, scale=self.scale)


@dataclass(frozen=True)
class PassAtK(OutcomeEstimator):
    """Use ``pass_at_k_advantages`` (Tang et al., 2025), k = group size.

    Args:
        normalize_by_std: divide by the standard deviation of the group.
        eps: added to the standard deviation.
        whiten: scale to mean 0 and variance 1 over the response tokens of all ranks.
    """

    normalize_by_std: bool = True
    eps: float = 1e-6
    whiten: bool = False

    def compare(self, *columns: Tensor) -> SampleAdvantages:
        """See ``pass_at_k_advantages``."""
        return pass_at_k_advantages(*columns, normalize_by_std=self.normalize_by_std, eps=self.eps)


@dataclass(frozen=True)
class PassAtKTraining(OutcomeEstimator):
    """Use ``pass_at_k_training_advantages`` (Chen et al., 2025), k below the group size.

    Args:
        k: tries whose best is trained; less than ``rollouts_per_prompt``.
        normalize_by_std: divide by the standard deviation of the best.
        eps: added to the standard deviation.
        whiten: scale to mean 0 and variance 1 over the response tokens of all ranks.
    """

    k: int = 4
    normalize_by_std: bool = True
    eps: float = 1e-6
    whiten: bool = False

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"Expected k to be at least 1 but got {self.k}.")

    @property
    def min_group_size(self) -> int:
        """One more than k: k rollouts are one subset."""
        return self.k + 1

    def compare(self, *columns: Tensor) -> SampleAdvantages:
        """See ``pass_at_k_training_advantages``."""
        return pass_at_k_training_advantages(*columns, k=self.k, normalize_by_std=self.normalize_by_std, eps=self.eps)


@dataclass(frozen=True)
class OPO(OutcomeEstimator):
    """Use ``opo_advantages`` (Hao et al., 2025).

    Args:
        whiten: scale to mean 0 and variance 1 over the response tokens of all ranks.
    """

    whiten: bool = False

    def columns(self, inputs: AdvantageInputs) -> Sequence[Tensor]:
        """Add the response lengths."""
        return inputs.outcomes, inputs.group_ids, segment_sum(inputs.response_mask, inputs.cu_seqlens)

    def compare(self, *columns: Tensor) -> SampleAdvantages:
        """See ``opo_advantages``."""
        return opo_advantages(*columns)


@dataclass(frozen=True)
class ReMax(OutcomeEstimator):
    """Use ``remax_advantages`` (Li et al., 2024).

    Args:
        whiten: scale to mean 0 and variance 1 over the response tokens of all ranks.
    """

    whiten: bool = False
    needs_baseline_rewards: ClassVar[bool] = True

    def columns(self, inputs: AdvantageInputs) -> Sequence[Tensor]:
        """Compare with the greedy response instead of the group."""
        assert inputs.baseline_rewards is not None
        return inputs.outcomes, inputs.baseline_rewards

    def compare(self, *columns: Tensor) -> SampleAdvantages:
        """See ``remax_advantages``."""
        return remax_advantages(*columns)


@dataclass(frozen=True)
class GDPO(OutcomeEstimator):
    """Use ``gdpo_advantages`` (Liu et al., 2026), whitened.

    Args:
        weights: one factor per reward; None: 1 each.
        eps: added to the standard deviations.
        whiten: scale to mean 0 and variance 1 over the response tokens of all ranks.
    """

    weights: list[float] | None = None
    eps: float = 1e-6
    whiten: bool = True
    needs_component_rewards: ClassVar[bool] = True

    def columns(self, inputs: AdvantageInputs) -> Sequence[Tensor]:
        """Compare the single rewards."""
        if inputs.token_rewards is not None:
            raise ValueError("GDPO normalizes each reward on its own and has no place for token_rewards. Put the KL penalty into the loss.")
        assert inputs.component_rewards is not None
        return inputs.component_rewards, inputs.group_ids

    def compare(self, *columns: Tensor) -> SampleAdvantages:
        """See ``gdpo_advantages``."""
        rewards, group_ids = columns
        weights = None if self.weights is None else rewards.new_tensor(self.weights)
        return gdpo_advantages(rewards, group_ids, weights, eps=self.eps)
