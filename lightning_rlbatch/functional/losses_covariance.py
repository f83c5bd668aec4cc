"""Policy losses that treat the tokens of highest covariance differently; the choice is made over the whole mini-batch.

Two phases. Before the first micro-step every rank calls ``select_clip_cov`` or ``select_kl_cov`` on its tokens of the mini-batch, with
``peers`` to see the other data-parallel ranks; the boolean result is cut into micro-batches like any per-token field.
Then ``clip_cov_loss`` and ``kl_cov_loss`` are per-token losses like the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_rlbatch.functional.losses import LossTerms, absolute, log_ratio, ppo_clip_loss, ratio_metrics
from lightning_rlbatch.functional.peers import ALONE, Peers
from lightning_rlbatch.functional.segments import sanitize, segment_ids


def token_keys(sample_ids: Tensor | Sequence[int], cu_seqlens: Tensor | Sequence[int], num_tokens: int, *, seed: int = 0) -> Tensor:
    """Give each token a pseudo-random number that does not depend on where the token lies.

    Source: the mixing function of Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014 (SplitMix).

    Args:
        sample_ids: ``[N]``, integer: unique in the mini-batch, the same on whichever rank the sample is.
        cu_seqlens: ``[N + 1]``, int.
        num_tokens: T.
        seed: change it from step to step.

    Returns:
        ``[T]``, float64, uniform in [0, 1).

    Example:
        >>> a = token_keys(torch.tensor([3, 8]), torch.tensor([0, 2, 4]), 4)
        >>> b = token_keys(torch.tensor([8, 3]), torch.tensor([0, 2, 4]), 4)
        >>> torch.equal(a[:2], b[2:])
        True
    """
    sample_ids, cu_seqlens = torch.as_tensor(sample_ids), torch.as_tensor(cu_seqlens)
    owner = segment_ids(cu_seqlens, num_tokens)
    position = torch.arange(num_tokens, device=owner.device) - cu_seqlens.long()[owner]
    x = _mix(_mix(_mix(torch.full_like(owner, seed)) ^ sample_ids.to(owner.device).long()[owner]) ^ position)
    return (x & (2**53 - 1)).double() / 2**53


def token_covariance(log_probs: Tensor, advantages: Tensor, response_mask: Tensor, *, peers: Peers = ALONE) -> Tensor:
    """Compute (log p - mean log p) (A - mean A) of each token, the means over all response tokens of the mini-batch.

    Source: Cui et al., "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", 2025.

    Args:
        log_probs: ``[T]``, floating point: this rank's part of the mini-batch.
        advantages: ``[T]``, floating point.
        response_mask: ``[T]``, bool.
        peers: the data-parallel ranks; by default this part is the whole.

    Returns:
        ``[T]``, float64, 0 outside the response mask.

    Example:
        >>> token_covariance(torch.tensor([-1.0, -3.0]), torch.tensor([1.0, -1.0]), torch.tensor([True, True]))
        tensor([1., 1.], dtype=torch.float64)
    """
    log_prob_mean = peers.moments(log_probs, response_mask)[1]
    advantage_mean = peers.moments(advantages, response_mask)[1]
    centered = sanitize(log_probs.detach(), response_mask).double() - log_prob_mean
    return sanitize(centered * (sanitize(advantages, response_mask).double() - advantage_mean), response_mask)


def select_kl_cov(
    log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    keys: Tensor,
    *,
    num_tokens: int,
    fraction: float = 2e-3,
    peers: Peers = ALONE,
) -> Tensor:
    """Choose the tokens of highest covariance: max(1, floor(fraction * num_tokens)) of the whole mini-batch.

    Source: Cui et al., 2025 (KL-Cov). Ties are broken by ``keys``, so the choice does not depend on the layout; covariances that
    differ by 1e-9 of the largest log-probability times the largest advantage count as tied: what is equal on paper (0, for all tokens of
    mean advantage) differs by rounding.

    Args:
        log_probs: ``[T]``, floating point: of the current policy, or the old ones (exact in the first mini-batch of an iteration).
        advantages: ``[T]``, floating point.
        response_mask: ``[T]``, bool.
        keys: ``[T]``, float64, from ``token_keys``.
        num_tokens: response tokens of the whole mini-batch.
        fraction: share of the tokens to choose, in (0, 1].
        peers: the data-parallel ranks; by default this part is the whole.

    Returns:
        ``[T]``, bool.

    Raises:
        ValueError: ``fraction`` is out of range.

    Example:
        >>> x = torch.tensor([-1.0, -2.0, -6.0])
        >>> select_kl_cov(x, -x, torch.ones(3, dtype=torch.bool), token_keys(torch.tensor([0]), torch.tensor([0, 3]), 3), num_tokens=3)
        tensor([False,  True, False])
    """
    scores = _rounded_covariance(log_probs, advantages, response_mask, peers)
    return _select_top(scores, keys, response_mask, _quota(fraction, num_tokens), peers)


def select_clip_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    keys: Tensor,
    *,
    num_tokens: int,
    fraction: float = 2e-4,
    lower: float = 1.0,
    upper: float = 5.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    peers: Peers = ALONE,
) -> Tensor:
    """Choose at random up to max(1, floor(fraction * num_tokens)) tokens with a covariance in (lower, upper) that PPO does not clip.

    Source: Cui et al., 2025 (Clip-Cov).

    Args:
        log_probs: ``[T]``, floating point: of the current policy, or the old ones (exact in the first mini-batch of an iteration).
        old_log_probs: ``[T]``, floating point.
        advantages: ``[T]``, floating point.
        response_mask: ``[T]``, bool.
        keys: ``[T]``, float64, from ``token_keys``: the smallest are chosen.
        num_tokens: response tokens of the whole mini-batch.
        fraction: share of the tokens to choose, in (0, 1].
        lower: covariances up to here are left alone.
        upper: covariances from here on are left alone.
        clip_low: as in the loss.
        clip_high: as in the loss.
        peers: the data-parallel ranks; by default this part is the whole.

    Returns:
        ``[T]``, bool.

    Raises:
        ValueError: ``fraction`` or the interval is out of range.

    Example:
        >>> x = torch.tensor([-1.0, -2.0, -6.0])
        >>> select_clip_cov(x, x, 0 * x, torch.ones(3, dtype=torch.bool), torch.rand(3).double(), num_tokens=3)
        tensor([False, False, False])
    """
    if not lower < upper:
        raise ValueError(f"Expected lower < upper but got lower={lower} and upper={upper}.")
    covariance = _rounded_covariance(log_probs, advantages, response_mask, peers)
    ppo = ppo_clip_loss(log_probs, old_log_probs, advantages, response_mask, clip_low=clip_low, clip_high=clip_high).metrics
    clipped = (ppo["clip_fraction_low"] + ppo["clip_fraction_high"]) > 0
    eligible = response_mask & ~clipped & (covariance > lower) & (covariance < upper)
    return _select_top(-keys, keys, eligible, _quota(fraction, num_tokens), peers)


def clip_cov_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    selected: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> LossTerms:
    """Compute PPO's clipped surrogate, 0 at the selected tokens.

    Source: Cui et al., "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", 2025 (Clip-Cov).

    Args:
        log_probs: ``[T]``, floating point, differentiable.
        old_log_probs: ``[T]``, floating point.
        advantages: ``[T]``, floating point.
        response_mask: ``[T]``, bool.
        selected: ``[T]``, bool, from ``select_clip_cov``.
        clip_low: the ratio is clipped at 1 - clip_low.
        clip_high: the ratio is clipped at 1 + clip_high.

    Returns:
        Terms and the metrics of ``ppo_clip_loss``, ``selected_fraction``.

    Example:
        >>> one = torch.ones(1)
        >>> clip_cov_loss(0 * one, 0 * one, one, one.bool(), one.bool()).terms
        tensor([0.])
    """
    ppo = ppo_clip_loss(log_probs, old_log_probs, advantages, response_mask, clip_low=clip_low, clip_high=clip_high)
    metrics = dict(ppo.metrics) | {"selected_fraction": (selected & response_mask).to(ppo.terms.dtype)}
    return LossTerms(sanitize(ppo.terms, ~selected), metrics)


def kl_cov_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    selected: Tensor,
    *,
    coefficient: float = 1.0,
) -> LossTerms:
    """Compute -A r, plus coefficient * abs(log r) at the selected tokens (see ``absolute`` on its gradient at r = 1).

    Source: Cui et al., "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", 2025 (KL-Cov).

    Args:
        log_probs: ``[T]``, floating point, differentiable.
        old_log_probs: ``[T]``, floating point.
        advantages: ``[T]``, floating point.
        response_mask: ``[T]``, bool.
        selected: ``[T]``, bool, from ``select_kl_cov``.
        coefficient: weight of the penalty.

    Returns:
        Terms and the metrics of the ratio, ``selected_fraction``.

    Example:
        >>> one = torch.ones(1)
        >>> kl_cov_loss(0 * one, -0.5 * one, 0 * one, one.bool(), one.bool()).terms
        tensor([0.5000])
    """
    delta, advantages = log_ratio(log_probs, old_log_probs, response_mask), sanitize(advantages, response_mask)
    penalty = torch.where(selected & response_mask, coefficient * absolute(delta), 0.0)
    metrics = ratio_metrics(delta, response_mask) | {"selected_fraction": (selected & response_mask).to(delta.dtype)}
    return LossTerms(-advantages * delta.exp() + penalty, metrics)


def _quota(fraction: float, num_tokens: int) -> int:
    if not 0 < fraction <= 1:
        raise ValueError(f"Expected fraction to be in (0, 1] but got {fraction}.")
    return max(1, int(fraction * num_tokens))


def _rounded_covariance(log_probs: Tensor, advantages: Tensor, response_mask: Tensor, peers: Peers) -> Tensor:
    """Round covariances to multiples of a power of 2, about 1e-9 of what is multiplied: what differs by less is equal."""
    covariance = token_covariance(log_probs, advantages, response_mask, peers=peers)
    largest = torch.zeros(2, dtype=torch.float64, device=covariance.device)
    if covariance.numel():
        largest = torch.stack([sanitize(field.detach(), response_mask).double().abs().max() for field in (log_probs, advantages)])
    scale = peers.concat(largest[None]).amax(0).prod()
    step = torch.ldexp(torch.ones_like(scale), scale.frexp().exponent - 30)
    return (covariance / step).round() * step


def _select_top(scores: Tensor, keys: Tensor, eligible: Tensor, count: int, peers: Peers) -> Tensor:
    """Mark the ``count`` eligible tokens of highest (score, key) among all ranks, by exchanging each rank's best ``count`` only."""
    mine = eligible.nonzero().squeeze(-1)
    pairs = torch.stack([scores[mine].double(), keys[mine].double()], dim=-1)
    best = torch.full((count, 2), -torch.inf, dtype=torch.float64, device=scores.device)
    best[: min(count, mine.numel())] = _descending(pairs)[:count]
    bound = _descending(peers.concat(best))[count - 1]  # -inf: fewer than count are eligible
    above = (scores > bound[0]) | ((scores == bound[0]) & (keys >= bound[1]))
    return eligible & above


def _descending(pairs: Tensor) -> Tensor:
    """Sort ``[M, 2]`` by the first column, then by the second, both descending."""
    pairs = pairs[pairs[:, 1].argsort(descending=True, stable=True)]
    return pairs[pairs[:, 0].argsort(descending=True, stable=True)]


def _mix(x: Tensor) -> Tensor:
    """Scramble 64 bits; int64 products wrap around, and a masked arithmetic shift is a logical one."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))) * factor
    return x ^ ((x >> 31) & (2**33 - 1))
