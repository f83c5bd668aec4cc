"""A baseline for each token of a group's rollouts, weighted by how much a token's gradient varies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_rlbatch.functional.advantages import discounted_returns
from lightning_rlbatch.functional.estimators import AdvantageEstimator, AdvantageInputs, Advantages
from lightning_rlbatch.functional.peers import ALONE, Peers
from lightning_rlbatch.functional.segments import sanitize, segment_ids, segment_sum


def optimal_token_baseline(
    returns: Tensor,
    log_probs: Tensor,
    sum_pi_squared: Tensor,
    group_ids: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor | Sequence[int],
    *,
    valid: Tensor | None = None,
    peers: Peers = ALONE,
) -> Tensor:
    """Compute the baseline B_t = sum_i W_it G_it / sum_i W_it over the rollouts i of a prompt that have a t-th response token.

    W_it = sum_(s <= t) (1 - 2 p_s + sum_v p_sv^2), the squared norm of the gradient of log p_s with respect to the logits, summed up to
    t. Response tokens are counted without those between turns. Where one rollout alone reaches t, B_t is its own return, so that G - B is 0
    as for a group of one.

    Source: Li et al., "The Optimal Token Baseline: Variance Reduction for Long-Horizon LLM-RL", 2026 (with the logit-gradient proxy).

    Args:
        returns: ``[T]``, floating point: G_it, the rewards from token t on.
        log_probs: ``[T]``, floating point: log p_s of the sampled token.
        sum_pi_squared: ``[T]``, floating point: sum_v p_sv^2 of the distribution that it was drawn from.
        group_ids: ``[N]``, integer.
        response_mask: ``[T]``, bool.
        cu_seqlens: ``[N + 1]``, int.
        valid: ``[N]``, bool: False leaves the sample out of its group. None: all are valid.
        peers: the data-parallel ranks; groups may be spread over them.

    Returns:
        ``[T]``, detached, 0 outside the response mask and for samples that are not valid.

    Example:
        >>> mask, ids = torch.tensor([True, True]), torch.tensor([0, 0])
        >>> optimal_token_baseline(torch.tensor([1.0, 0.0]), torch.zeros(2) - 0.7, torch.full((2,), 0.5), ids, mask, [0, 1, 2])
        tensor([0.5000, 0.5000])
    """
    num_tokens = response_mask.shape[0]
    owner = segment_ids(cu_seqlens, num_tokens, response_mask.device)
    mask = response_mask.bool() if valid is None else response_mask.bool() & valid[owner]
    packed = mask.nonzero().flatten()
    owner = owner[packed]
    probability, squares = (sanitize(field.detach().double(), mask)[packed] for field in (log_probs, sum_pi_squared))
    norms = 1 - 2 * probability.exp() + squares
    # Prefix sums inside each sample, and each token's number in it.
    counts = segment_sum(mask, cu_seqlens)
    starts = counts.cumsum(0) - counts
    place = torch.arange(packed.numel(), device=packed.device) - starts[owner]
    sums = norms.cumsum(0)
    weights = (sums - (sums - norms)[starts.clamp(max=max(packed.numel() - 1, 0))][owner]).clamp(min=0) if packed.numel() else norms
    values = sanitize(returns.detach().double(), mask)[packed]
    keys, own = peers.rows(torch.stack([group_ids.to(owner.device)[owner].long(), place], dim=-1))
    columns, _ = peers.rows(torch.stack([weights, values], dim=-1))
    _, cell = torch.unique(keys, dim=0, return_inverse=True)
    baseline = _weighted_means(columns, cell)[own]
    out = returns.new_zeros(num_tokens)
    out[packed] = baseline.to(out.dtype)
    return out


def _weighted_means(columns: Tensor, cell: Tensor) -> Tensor:
    """Average the second column over each cell, weighted by the first; plainly where all weights are 0."""
    weights, values = columns.unbind(-1)
    size = int(cell.max()) + 1 if cell.numel() else 0

    def total(terms: Tensor) -> Tensor:
        return terms.new_zeros(size).index_add(0, cell, terms)

    # Relative to the plain mean of the cell, so that equal returns give exactly themselves.
    mean = (total(values) / total(torch.ones_like(values)))[cell]
    lowest = values.new_full((size,), torch.inf).scatter_reduce(0, cell, values, "amin")[cell]
    highest = values.new_full((size,), -torch.inf).scatter_reduce(0, cell, values, "amax")[cell]
    mass = total(weights)
    shift = (total(weights * (values - mean)) / torch.where(mass > 0, mass, 1.0))[cell]
    return torch.where(highest > lowest, mean + shift, values)


@dataclass(frozen=True)
class OTB(AdvantageEstimator):
    """Use the returns minus ``optimal_token_baseline`` (Li et al., 2026).

    Args:
        whiten: scale to mean 0 and variance 1 over the response tokens of all ranks.
    """

    whiten: bool = False
    needs_sum_pi_squared: ClassVar[bool] = True

    def compute(self, inputs: AdvantageInputs) -> Advantages:
        """See ``optimal_token_baseline``."""
        assert inputs.log_probs is not None
        assert inputs.sum_pi_squared is not None
        valid = ~inputs.rewards.isnan()
        returns = discounted_returns(inputs.rewards_per_token, inputs.response_mask, inputs.cu_seqlens)
        tokens = (returns, inputs.log_probs, inputs.sum_pi_squared, inputs.group_ids, inputs.response_mask, inputs.cu_seqlens)
        return Advantages(returns - optimal_token_baseline(*tokens, valid=valid, peers=inputs.peers), returns, valid)
