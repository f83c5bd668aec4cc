"""Advantages on packed tokens: returns, generalized advantage estimation, whitening."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_rlbatch.functional.sample_inputs import Rewards, as_rewards, result_dtype
from lightning_rlbatch.functional.segments import sanitize, segment_ids, segment_sum, spread

EQUAL = 1e-14
"""Relative spread up to which fp64 numbers are taken to be equal: the rounding of their mean, some ten units in the last place."""


def gae(
    rewards: Tensor, values: Tensor, response_mask: Tensor, cu_seqlens: Tensor | Sequence[int], gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Compute generalized advantage estimates over the response tokens of each sample.

    With t' the NEXT RESPONSE token of the sample (so tool output and user turns between two turns are stepped over, undiscounted):
    delta_t = r_t + gamma V_t' - V_t, A_t = delta_t + gamma lam A_t', R_t = A_t + V_t. After the last response token V and A are 0.

    Source: Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation", 2016, eq. 16. The paper's
    state s_t is the text before token t here.

    Args:
        rewards: ``[T]``, floating point: reward of token t. A reward outside the response mask is ignored.
        values: ``[T]``, floating point: V(state before token t).
        response_mask: ``[T]``, bool.
        cu_seqlens: ``[N + 1]``, int.
        gamma: discount per response token, in [0, 1].
        lam: in [0, 1]; 1 gives returns minus values, 0 gives one-step errors.

    Returns:
        ``(advantages, returns)``, ``[T]`` each, not whitened, detached, 0 outside the response mask.

    Raises:
        ValueError: ``gamma`` or ``lam`` is outside [0, 1].

    Example:
        >>> mask = torch.tensor([False, True, False, True])
        >>> r, v = torch.tensor([0.0, 0.0, 0.0, 1.0]), torch.tensor([9.0, 0.2, 9.0, 0.5])
        >>> gae(r, v, mask, torch.tensor([0, 4]), gamma=1.0, lam=1.0)
        (tensor([0.0000, 0.8000, 0.0000, 0.5000]), tensor([0., 1., 0., 1.]))
    """
    _check_unit_interval(gamma=gamma, lam=lam)
    packed, owner = _compact(response_mask, cu_seqlens)
    dtype = result_dtype(rewards, values)
    rewards, values = (sanitize(as_rewards(field).detach(), response_mask).to(dtype) for field in (rewards, values))
    v = values[packed]
    delta = rewards[packed] + gamma * _next(v, owner) - v
    a = _discounted_suffix_sum(delta, owner, gamma * lam)
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    advantages[packed], returns[packed] = a, a + v
    return advantages, returns


def discounted_returns(rewards: Tensor, response_mask: Tensor, cu_seqlens: Tensor | Sequence[int], gamma: float = 1.0) -> Tensor:
    """Sum the rewards from each response token to the end of its sample: G_t = r_t + gamma G_t', t' the next response token.

    Source: Sutton and Barto, "Reinforcement Learning: An Introduction", 2nd ed., 2018, eq. 3.9.

    Args:
        rewards: ``[T]``, floating point.
        response_mask: ``[T]``, bool.
        cu_seqlens: ``[N + 1]``, int.
        gamma: discount per response token, in [0, 1].

    Returns:
        ``[T]``, detached, 0 outside the response mask.

    Raises:
        ValueError: ``gamma`` is outside [0, 1].

    Example:
        >>> discounted_returns(torch.tensor([0.0, 0.0, 1.0]), torch.tensor([False, True, True]), torch.tensor([0, 3]), gamma=0.5)
        tensor([0.0000, 0.5000, 1.0000])
    """
    _check_unit_interval(gamma=gamma)
    packed, owner = _compact(response_mask, cu_seqlens)
    rewards = sanitize(as_rewards(rewards).detach(), response_mask).to(result_dtype(rewards))
    out = torch.zeros_like(rewards)
    out[packed] = _discounted_suffix_sum(rewards[packed], owner, gamma)
    return out


def place_rewards(rewards: Rewards, response_mask: Tensor, cu_seqlens: Tensor | Sequence[int]) -> Tensor:
    """Put each sample's reward at its last response token.

    Args:
        rewards: ``[N]``, floating point; NaN (no reward) places 0.
        response_mask: ``[T]``, bool.
        cu_seqlens: ``[N + 1]``, int.

    Returns:
        ``[T]``: 0 elsewhere. The reward of a sample without response tokens appears nowhere.

    Example:
        >>> place_rewards(torch.tensor([5.0]), torch.tensor([False, True, True, False]), torch.tensor([0, 4]))
        tensor([0., 0., 5., 0.])
    """
    packed, owner = _compact(response_mask, cu_seqlens)
    rewards = as_rewards(rewards).to(response_mask.device, result_dtype(rewards))
    out = rewards.new_zeros(response_mask.shape[0])
    last = torch.ones_like(owner, dtype=torch.bool)
    last[:-1] = owner[1:] != owner[:-1]
    out[packed[last]] = rewards.nan_to_num(nan=0.0)[owner[last]]
    return out


def token_sums(per_token: Tensor, response_mask: Tensor, cu_seqlens: Tensor | Sequence[int]) -> Tensor:
    """Sum each sample's response tokens, for example token rewards into the outcome that group estimators compare.

    Args:
        per_token: ``[T]``, floating point.
        response_mask: ``[T]``, bool.
        cu_seqlens: ``[N + 1]``, int.

    Returns:
        ``[N]``.

    Example:
        >>> token_sums(torch.tensor([9.0, 1.0, 2.0]), torch.tensor([False, True, True]), torch.tensor([0, 3]))
        tensor([3.])
    """
    return segment_sum(sanitize(per_token, response_mask), cu_seqlens)


def spread_to_tokens(per_sample: Tensor, response_mask: Tensor, cu_seqlens: Tensor | Sequence[int]) -> Tensor:
    """Give each response token its sample's value, 0 elsewhere.

    Args:
        per_sample: ``[N]``, floating point.
        response_mask: ``[T]``, bool.
        cu_seqlens: ``[N + 1]``, int.

    Returns:
        ``[T]``.

    Example:
        >>> spread_to_tokens(torch.tensor([2.0]), torch.tensor([False, True]), torch.tensor([0, 2]))
        tensor([0., 2.])
    """
    return sanitize(spread(per_sample, cu_seqlens, response_mask.shape[0]), response_mask)


def moments(values: Tensor, mask: Tensor) -> Tensor:
    """Return count, mean and sum of squared deviations of one piece, for ``merge_moments``.

    Args:
        values: ``[T]``, floating point; anything where ``mask`` is False.
        mask: ``[T]``, bool.

    Returns:
        ``[3]``, float64: zeros for an empty piece.

    Example:
        >>> moments(torch.tensor([1.0, 3.0]), torch.tensor([True, True]))
        tensor([2., 2., 2.], dtype=torch.float64)
    """
    x = sanitize(values.detach().double(), mask)
    count = mask.sum().double()
    mean = x.sum() / count.clamp(min=1)
    return torch.stack([count, mean, sanitize((x - mean).square(), mask).sum()])


def merge_moments(pieces: Tensor) -> Tensor:
    """Merge the moments of pieces (micro-batches, ranks) into those of the whole, without ever subtracting squares of means.

    Source: Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979, eq. 2.1.

    Args:
        pieces: ``[R, 3]``, float64: rows as returned by ``moments``; rows of zeros count nothing.

    Returns:
        ``[3]``, float64.

    Example:
        >>> merge_moments(torch.tensor([[1.0, 1.0, 0.0], [1.0, 3.0, 0.0]], dtype=torch.float64))
        tensor([2., 2., 2.], dtype=torch.float64)
    """
    counts, means, squares = pieces.double().unbind(-1)
    count = counts.sum()
    mean = (counts * means).sum() / count.clamp(min=1)
    return torch.stack([count, mean, (squares + counts * (means - mean).square()).sum()])


def whiten(values: Tensor, mask: Tensor, *, shift_mean: bool = True, global_moments: Tensor | None = None, eps: float = 1e-8) -> Tensor:
    """Scale the masked values to unit variance, and shift them to mean 0.

    (x - mean) / sqrt(var + eps), var unbiased (n - 1). A single value, or equal values, give 0 (their mean if not shifted).

    Source: Schulman et al., "Proximal Policy Optimization Algorithms", 2017 (advantage normalization of its implementation, see
    Huang et al., "The 37 Implementation Details of Proximal Policy Optimization", 2022, detail 7).

    Args:
        values: ``[T]``, floating point; anything where ``mask`` is False.
        mask: ``[T]``, bool.
        shift_mean: False keeps the mean where it was.
        global_moments: ``[3]``: merged moments of all data-parallel ranks, each token counted once. None: this piece is the whole.
        eps: added to the variance.

    Returns:
        ``[T]``, detached, 0 where ``mask`` is False.

    Example:
        >>> whiten(torch.tensor([1.0, 3.0, float("nan")]), torch.tensor([True, True, False]))
        tensor([-0.7071,  0.7071,  0.0000])
    """
    x = as_rewards(values).to(mask.device)
    count, mean, squares = (moments(x, mask) if global_moments is None else global_moments.to(x.device)).unbind()
    variance = squares / (count - 1).clamp(min=1)
    out = (sanitize(x.detach(), mask).double() - mean) * torch.rsqrt(variance + eps)
    # The mean of equal numbers is not always that number in floating point.
    out = torch.where(squares <= count * (EQUAL * mean).square(), 0.0, out)
    if not shift_mean:
        out = out + mean
    return sanitize(out.to(result_dtype(values)), mask)


def _compact(response_mask: Tensor, cu_seqlens: Tensor | Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the positions of the response tokens and the sample that owns each, ``[M]`` both."""
    packed = response_mask.nonzero().squeeze(-1)
    return packed, segment_ids(cu_seqlens, response_mask.shape[0], packed.device)[packed]


def _next(values: Tensor, owner: Tensor) -> Tensor:
    """Return the value of the following token of the same sample, 0 at a sample's last."""
    following = torch.zeros_like(values)
    following[:-1] = torch.where(owner[1:] == owner[:-1], values[1:], 0)
    return following


def _discounted_suffix_sum(values: Tensor, owner: Tensor, discount: float) -> Tensor:
    """Solve y_t = x_t + discount * y_(t+1) inside each sample, in log2(T) vectorized steps.

    After k steps y_t holds the 2**k terms from t on; each step adds the block that follows (Hillis and Steele, "Data Parallel
    Algorithms", 1986). Sums are formed in float64, since a long response adds tens of thousands of terms.
    """
    total = values.double()
    longest = int(torch.bincount(owner).max()) if owner.numel() else 0
    for step in range(math.ceil(math.log2(longest)) if longest > 1 else 0):
        shift = 2**step
        same = owner[shift:] == owner[:-shift]
        total = total + torch.nn.functional.pad(torch.where(same, discount**shift * total[shift:], 0), (0, shift))
    return total.to(values.dtype)


def _check_unit_interval(**settings: float) -> None:
    for name, value in settings.items():
        if not 0 <= value <= 1:
            raise ValueError(f"Expected {name} to be between 0 and 1 but got {value}.")
