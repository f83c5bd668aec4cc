"""Options of the importance correction between the engine that sampled and the policy that is trained."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from lightning_rlbatch.functional.importance import ImportanceCorrection, importance_weights


@dataclass(frozen=True)
class RolloutCorrection:
    """Weight (or leave out) tokens whose probability under the engine differs from the trained policy's.

    See ``importance_weights`` for formulas and sources.

    Args:
        level: ``token``, ``sequence`` (product over the response) or ``sequence-mean`` (its geometric mean).
        mode: ``truncate`` clips the weight, ``mask`` leaves out what lies outside the interval.
        upper: Largest weight.
        lower: Smallest weight.
        normalize: True divides the weights by their mean over all tokens of the iteration that are left, on all ranks (self-normalized
            importance sampling: Hesterberg, "Weighted Average Importance Sampling and Defensive Mixture Distributions", 1995).
    """

    level: Literal["token", "sequence", "sequence-mean"] = "token"
    mode: Literal["truncate", "mask"] = "truncate"
    upper: float = 2.0
    lower: float = 0.0
    normalize: bool = False

    def __call__(self, log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor, cu_seqlens: Tensor) -> ImportanceCorrection:
        """Return weights, the mask that is left, and metrics."""
        bounds = {"upper": self.upper, "lower": self.lower}
        return importance_weights(log_probs, rollout_log_probs, response_mask, cu_seqlens, level=self.level, mode=self.mode, **bounds)
