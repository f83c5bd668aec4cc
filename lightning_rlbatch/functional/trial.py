"""Run algorithms on one token, so that a setting out of range is an error before anything is sampled."""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_rlbatch.functional.algorithms import FunctionLoss
from lightning_rlbatch.functional.estimators import AdvantageEstimator
from lightning_rlbatch.functional.policy_loss_base import PolicyLoss


class Correction(Protocol):
    """What weighs tokens by the probability with which the engine sampled them."""

    def __call__(self, log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor, cu_seqlens: Tensor) -> Any:
        """Return weights, the mask that is left, and metrics."""


def algorithm_errors(
    *,
    policy_loss: PolicyLoss | None = None,
    advantage: AdvantageEstimator | None = None,
    rollout_correction: Correction | None = None,
    num_rewards: int = 1,
) -> Iterator[tuple[str, Exception]]:
    """Yield the error of each of this package's algorithms that refuses its own settings; a user's own are left alone.

    Args:
        policy_loss: The loss of the policy.
        advantage: The estimator.
        rollout_correction: The correction.
        num_rewards: Reward functions, and models, whose rewards an estimator may be given one by one.

    Yields:
        Name of the argument, and what it raised.

    Example:
        >>> from lightning_rlbatch.functional import PPOClip
        >>> [(name, str(error)) for name, error in algorithm_errors(policy_loss=PPOClip(clip_low=-1.0))]
        [('policy_loss', 'Expected clip_low and clip_high to be >= 0 but got -1.0 and 0.2.')]
    """
    one, mask, bounds = torch.zeros(1), torch.ones(1, dtype=torch.bool), torch.tensor([0, 1])

    def run_loss(loss: PolicyLoss) -> None:
        selected = loss.select(one, one, one, mask, one.double(), num_tokens=1) if loss.needs_selection else None
        loss(one, one, one, mask, bounds, selected=selected)

    def run_estimator(estimator: AdvantageEstimator) -> None:
        per_token: dict[str, Any] = {"values": one, "log_probs": one, "sum_pi_squared": one}
        components = torch.zeros(1, num_rewards)
        estimator([0.0], [0], mask, bounds, baseline_rewards=one, component_rewards=components, **per_token)

    trials: tuple[tuple[str, Any, Any], ...] = (
        ("policy_loss", policy_loss, run_loss),
        ("advantage", advantage, run_estimator),
        ("rollout_correction", rollout_correction, lambda correction: correction(one, one, mask, bounds)),
    )
    for name, algorithm, run in trials:
        if algorithm is None or isinstance(algorithm, FunctionLoss) or not type(algorithm).__module__.startswith("lightning_rlbatch."):
            continue
        try:
            run(algorithm)
        except (ValueError, TypeError, RuntimeError) as error:
            yield name, error
