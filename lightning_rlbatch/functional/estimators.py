"""Advantage estimators as small frozen dataclasses, chosen by ``class_path`` in a configuration file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from lightning_rlbatch.functional.advantages import discounted_returns, gae, place_rewards, spread_to_tokens, token_sums, whiten
from lightning_rlbatch.functional.advantages_group import SampleAdvantages
from lightning_rlbatch.functional.filters import drop_samples
from lightning_rlbatch.functional.peers import ALONE, Peers
from lightning_rlbatch.functional.sample_inputs import GroupIds, Rewards, as_group_ids, as_rewards, result_dtype


class Advantages(NamedTuple):
    """What an estimator returns.

    Args:
        advantages: ``[T]``, floating point, detached: 0 outside the response mask and for samples that are not valid.
        returns: ``[T]``, floating point, detached: targets of a critic; the advantages again where there is none.
        valid: ``[N]``, bool: False where a reward is missing: take these samples out of the response mask (``drop_samples``).
    """

    advantages: Tensor
    returns: Tensor
    valid: Tensor


@dataclass(frozen=True)
class AdvantageInputs:
    """One rank's rollouts of one iteration.

    Args:
        rewards: ``[N]``, floating point: outcome of each sample; NaN: none.
        group_ids: ``[N]``, integer: equal for the rollouts of one prompt, on whichever rank they are.
        response_mask: ``[T]``, bool.
        cu_seqlens: ``[N + 1]``, int.
        token_rewards: ``[T]``, floating point: what each token adds, for example -beta KL.
        values: ``[T]``, floating point: of the critic, for estimators with ``needs_values``.
        baseline_rewards: ``[N]``, floating point: of the greedy response, for estimators with ``needs_baseline_rewards``.
        component_rewards: ``[N, K]``, floating point: the single rewards behind ``rewards``, for ``GDPO``.
        peers: the data-parallel ranks.
        log_probs: ``[T]``, floating point: of the policy that is trained, at the start of the iteration.
        sum_pi_squared: ``[T]``, floating point: sum of the squared probabilities, for estimators with ``needs_sum_pi_squared``.
    """

    rewards: Tensor
    group_ids: Tensor
    response_mask: Tensor
    cu_seqlens: Tensor
    token_rewards: Tensor | None = None
    values: Tensor | None = None
    baseline_rewards: Tensor | None = None
    component_rewards: Tensor | None = None
    peers: Peers = ALONE
    log_probs: Tensor | None = None
    sum_pi_squared: Tensor | None = None

    @property
    def outcomes(self) -> Tensor:
        """``[N]``: reward of each sample, its token rewards included."""
        if self.token_rewards is None:
            return self.rewards
        return self.rewards + token_sums(self.token_rewards, self.response_mask, self.cu_seqlens)

    @property
    def rewards_per_token(self) -> Tensor:
        """``[T]``: token rewards, and the sample's reward at its last response token."""
        placed = place_rewards(self.rewards, self.response_mask, self.cu_seqlens)
        return placed if self.token_rewards is None else placed + self.token_rewards

    def spread(self, per_sample: Tensor) -> Tensor:
        """``[N]`` -> ``[T]``: each response token gets its sample's value."""
        return spread_to_tokens(per_sample, self.response_mask, self.cu_seqlens)


class AdvantageEstimator(ABC):
    """An advantage estimator: call it with one iteration's rollouts of this rank, all ranks together.

    For an estimator of your own, subclass and implement ``compute`` (or, if it gives one number per sample,
    ``OutcomeEstimator.compare``). Statistics over all ranks come from ``inputs.peers``.

    Args:
        whiten: scale the result to mean 0 and variance 1 over the response tokens of all ranks.

    Example:
        >>> from lightning_rlbatch.functional.estimators_group import GRPO
        >>> mask = torch.tensor([False, True, True, False, True])
        >>> result = GRPO(normalize_by_std=False)(torch.tensor([1.0, 0.0]), torch.tensor([5, 5]), mask, torch.tensor([0, 3, 5]))
        >>> result.advantages
        tensor([ 0.0000,  0.5000,  0.5000,  0.0000, -0.5000])
    """

    needs_values: ClassVar[bool] = False
    needs_baseline_rewards: ClassVar[bool] = False
    needs_component_rewards: ClassVar[bool] = False
    needs_sum_pi_squared: ClassVar[bool] = False
    whiten: bool = False

    @property
    def min_group_size(self) -> int:
        """Fewest rollouts of a prompt with which an advantage can differ from 0."""
        return 1

    def __call__(
        self,
        rewards: Rewards,
        group_ids: GroupIds,
        response_mask: Tensor,
        cu_seqlens: Tensor | Sequence[int],
        *,
        token_rewards: Tensor | None = None,
        values: Tensor | None = None,
        baseline_rewards: Tensor | None = None,
        component_rewards: Tensor | None = None,
        peers: Peers = ALONE,
        log_probs: Tensor | None = None,
        sum_pi_squared: Tensor | None = None,
        trained_mask: Tensor | None = None,
    ) -> Advantages:
        """Compute the advantages; arguments as in ``AdvantageInputs``, lists too (None: no reward).

        With ``trained_mask``, ``[T]`` bool, only these tokens of ``response_mask`` are trained on. The others, left out of the loss, count
        with their rewards and lengths all the same, but results are 0 there, and whitening does not look at them.

        Raises:
            ValueError: an input that the estimator needs is missing.
            TypeError: ``group_ids`` are names although other ranks have samples of their own.
        """
        response_mask, device = response_mask.bool(), response_mask.device
        cu_seqlens = torch.as_tensor(cu_seqlens, device=device)
        inputs = AdvantageInputs(
            as_rewards(rewards).to(device),
            _group_numbers(group_ids, peers).to(device),
            response_mask,
            cu_seqlens,
            token_rewards,
            values,
            baseline_rewards,
            component_rewards,
            peers,
            log_probs,
            sum_pi_squared,
        )
        if self.needs_sum_pi_squared and log_probs is None:
            raise ValueError(f"{type(self).__name__} needs log_probs but got None.")
        for name in ("values", "baseline_rewards", "component_rewards", "sum_pi_squared"):
            if getattr(self, f"needs_{name}") and getattr(inputs, name) is None:
                raise ValueError(f"{type(self).__name__} needs {name} but got None.")
        advantages, returns, valid = self.compute(inputs)
        if not isinstance(rewards, Tensor) or not rewards.is_floating_point():
            dtype = result_dtype(rewards, token_rewards, *([values] if self.needs_values else []))
            advantages, returns = advantages.to(dtype), returns.to(dtype)
        kept = drop_samples(response_mask if trained_mask is None else response_mask & trained_mask, cu_seqlens, valid)
        if self.whiten:
            advantages = whiten(advantages, kept, global_moments=peers.moments(advantages, kept))
        zero = advantages.new_zeros(())
        return Advantages(torch.where(kept, advantages, zero), torch.where(kept, returns, zero), valid)

    @abstractmethod
    def compute(self, inputs: AdvantageInputs) -> Advantages:
        """Return advantages before whitening."""


def _group_numbers(group_ids: GroupIds, peers: Peers) -> Tensor:
    """Return integer group ids; names become numbers only where no other rank numbers them too."""
    if isinstance(group_ids, Tensor):
        return group_ids
    try:
        return torch.as_tensor(group_ids)
    except (TypeError, ValueError, RuntimeError):
        if peers is not ALONE:
            raise TypeError(
                f"Groups that may be spread over ranks need integer ids, the same on all ranks, but got {list(group_ids)[:4]}. Number them."
            ) from None
        return as_group_ids(group_ids)


class OutcomeEstimator(AdvantageEstimator):
    """An estimator that compares whole samples: one number per sample, the same at each of its response tokens."""

    def compute(self, inputs: AdvantageInputs) -> Advantages:
        """Gather the samples of all ranks (groups may be spread), compare, keep this rank's."""
        gathered = self.columns(inputs)
        columns = [inputs.peers.rows(column) for column in gathered]
        result = self.compare(*[rows for rows, _ in columns])
        own = columns[0][1]
        valid = result.valid[own]
        advantages = inputs.spread(result.advantages[own])
        return Advantages(advantages, advantages, valid)

    def columns(self, inputs: AdvantageInputs) -> Sequence[Tensor]:
        """Return this rank's ``[N, ...]`` arguments of ``compare``."""
        return inputs.outcomes, inputs.group_ids

    @abstractmethod
    def compare(self, *columns: Tensor) -> SampleAdvantages:
        """Return advantages of all ranks' samples, from the gathered ``columns``."""


@dataclass(frozen=True)
class GAE(AdvantageEstimator):
    """Use ``gae`` (Schulman et al., 2016) with a critic, whitened as PPO does.

    Args:
        gamma: discount per response token.
        lam: 1: returns minus values; 0: one-step errors.
        critic_lam: the same for the targets of the critic, if they differ (decoupled GAE: Yuan et al., "What's Behind PPO's Collapse in
            Long-CoT? Value Optimization Holds the Secret", 2025); None: ``lam``.
        whiten: scale to mean 0 and variance 1 over the response tokens of all ranks; returns are not touched.
    """

    gamma: float = 1.0
    lam: float = 1.0
    critic_lam: float | None = None
    whiten: bool = True
    needs_values: ClassVar[bool] = True

    def compute(self, inputs: AdvantageInputs) -> Advantages:
        """See ``gae``."""
        assert inputs.values is not None
        arguments = (inputs.rewards_per_token, inputs.values, inputs.response_mask, inputs.cu_seqlens)
        advantages, returns = gae(*arguments, self.gamma, self.lam)
        if self.critic_lam is not None:
            _, returns = gae(*arguments, self.gamma, self.critic_lam)
        return Advantages(advantages, returns, ~inputs.rewards.isnan())


@dataclass(frozen=True)
class ReinforcePlusPlus(AdvantageEstimator):
    """Use the discounted rewards to go, whitened over the whole batch.

    Source: Hu, "REINFORCE++: A Simple and Efficient Approach for Aligning Large Language Models", 2025.

    Args:
        gamma: discount per response token.
        whiten: scale to mean 0 and variance 1 over the response tokens of all ranks; returns are not touched.
    """

    gamma: float = 1.0
    whiten: bool = True

    def compute(self, inputs: AdvantageInputs) -> Advantages:
        """See ``discounted_returns``."""
        returns = discounted_returns(inputs.rewards_per_token, inputs.response_mask, inputs.cu_seqlens, self.gamma)
        return Advantages(returns, returns, ~inputs.rewards.isnan())
