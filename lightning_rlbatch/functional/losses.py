"""Policy losses on tokens: the container of per-token terms, PPO's clipped loss, one front for all losses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_rlbatch.functional.aggregation import check_per_token
from lightning_rlbatch.functional.segments import sanitize

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before ``exp`` (e**20 is about 5e8), so that one broken token cannot turn a step into inf."""


@dataclass(frozen=True)
class LossTerms:
    """Unreduced terms of a loss and of its metrics.

    Args:
        terms: ``[T]``, floating point, differentiable: 0 outside the response mask.
        metrics: name -> ``[T]``, detached: the caller sums them over the response mask and divides by the global token count.

    Example:
        >>> LossTerms(torch.zeros(2)).metrics
        {}
    """

    terms: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


LOSS_ARGUMENTS = ("log_probs", "old_log_probs", "advantages", "response_mask", "cu_seqlens")
LossFunction = Callable[..., "LossTerms | Tensor"]
"""``(log_probs, old_log_probs, advantages, response_mask, cu_seqlens) -> LossTerms`` or ``[T]`` terms."""


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor | Sequence[int],
    *,
    loss: LossFunction | None = None,
    weights: Tensor | None = None,
    selected: Tensor | None = None,
    name: str | None = None,
) -> LossTerms:
    """Compute any policy loss: clean its inputs, check its output, apply importance weights.

    This is the public hook for a loss of one's own: ``loss`` sees inputs that are 0 outside the response mask, so it need not care
    for NaN there, and must return one unreduced term per token.

    Args:
        log_probs: ``[T]``, floating point: log-probabilities under the policy that is trained.
        old_log_probs: ``[T]``, floating point: under the policy at the start of the iteration (the proximal policy). No gradient.
        advantages: ``[T]``, floating point. No gradient.
        response_mask: ``[T]``, bool.
        cu_seqlens: ``[N + 1]``, int: every sample is whole, so that sequence-level losses see all of it.
        loss: called with the five arguments above, or as many of them as it takes (and ``selected=`` if given). None: ``ppo_clip_loss``.
        weights: ``[T]``, floating point: factor of each term, for example from ``importance_weights``. No gradient.
        selected: ``[T]``, bool: choice of tokens made over the whole mini-batch, for losses that need one.
        name: of the loss, for error messages. None: the name of ``loss``.

    Returns:
        Terms and metrics, both ``[T]``.

    Raises:
        TypeError: the loss returned something else than ``[T]`` terms or ``LossTerms``.
        ValueError: the loss returned a mean or a sum, or shapes disagree.

    Example:
        >>> def reinforce(log_probs, old_log_probs, advantages, response_mask, cu_seqlens):
        ...     return -advantages * log_probs
        >>> mask = torch.tensor([False, True])
        >>> x = torch.tensor([float("nan"), -0.5])
        >>> policy_loss(x, x, torch.ones(2), mask, torch.tensor([0, 2]), loss=reinforce).terms
        tensor([0.0000, 0.5000])
    """
    function: LossFunction = ppo_clip_loss if loss is None else loss
    name = name or getattr(function, "__qualname__", type(function).__name__)
    for label, tensor in (("log_probs", log_probs), ("old_log_probs", old_log_probs), ("advantages", advantages)):
        check_per_token(tensor, response_mask, source=f"Argument {label} of policy loss {name}")
    extra = {} if selected is None else {"selected": selected & response_mask}
    cu_seqlens = torch.as_tensor(cu_seqlens, device=response_mask.device)
    clean = (sanitize(field, response_mask) for field in (log_probs, old_log_probs.detach(), advantages.detach()))
    result = call_loss(function, *clean, response_mask, cu_seqlens, **extra)
    if isinstance(result, tuple):
        raise TypeError(f"Policy loss {name} returned a tuple. Return [T] terms, or LossTerms(terms, metrics) with [T] metrics by name.")
    if not isinstance(result, LossTerms):
        result = LossTerms(result)
    check_per_token(result.terms, response_mask, source=f"Policy loss {name}")
    for key, metric in result.metrics.items():
        check_per_token(metric, response_mask, source=f"Metric {key!r} of policy loss {name}")
    terms = sanitize(result.terms, response_mask)
    if weights is not None:
        check_per_token(weights, response_mask, source="Argument weights of policy_loss")
        terms = terms * sanitize(weights.detach(), response_mask)
    return LossTerms(terms, {key: sanitize(metric.detach(), response_mask) for key, metric in result.metrics.items()})


def call_loss(function: LossFunction, *arguments: Tensor, **extra: Tensor) -> LossTerms | Tensor:
    """Call a loss with as many of the five arguments as it takes: token losses have no use for ``cu_seqlens``.

    A parameter with a default value is a setting of the loss, unless it is named like the argument in its place.

    Example:
        >>> call_loss(lambda log_probs, old_log_probs, clip=0.2: log_probs - old_log_probs, torch.ones(1), torch.ones(1), torch.ones(1))
        tensor([0.])
    """
    parameters = list(inspect.signature(function).parameters.values())
    if inspect.Parameter.VAR_POSITIONAL not in [parameter.kind for parameter in parameters]:
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        taken = [
            parameter.kind in positional and (parameter.default is parameter.empty or parameter.name == name)
            for parameter, name in zip(parameters, LOSS_ARGUMENTS)
        ]
        arguments = arguments[: [*taken, False].index(False)]
    return function(*arguments, **extra)


def ppo_clip_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> LossTerms:
    """Compute PPO's clipped surrogate, with separate bounds and an optional second bound for negative advantages.

    With r = exp(log_probs - old_log_probs) the term is max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)); where A < 0 and
    ``dual_clip`` is set, at most -A * dual_clip.

    Sources: Schulman et al., "Proximal Policy Optimization Algorithms", 2017, eq. 7; Yu et al., "DAPO", 2025 (clip-higher); Ye et al.,
    "Mastering Complex Control in MOBA Games with Deep Reinforcement Learning", 2020 (dual clip).

    Args:
        log_probs: ``[T]``, floating point.
        old_log_probs: ``[T]``, floating point.
        advantages: ``[T]``, floating point.
        response_mask: ``[T]``, bool.
        clip_low: the ratio is clipped at 1 - clip_low.
        clip_high: the ratio is clipped at 1 + clip_high.
        dual_clip: largest factor of a negative advantage, > 1.

    Returns:
        Terms and the metrics ``ratio``, ``approx_kl``, ``approx_kl_k1``, ``clip_fraction_low`` (A < 0, ratio below its bound),
        ``clip_fraction_high`` (A > 0, ratio above its bound), ``clip_fraction_dual``.

    Raises:
        ValueError: a bound is negative, or ``dual_clip`` is not above 1.

    Example:
        >>> one = torch.ones(1)
        >>> ppo_clip_loss(0.7 * one, 0 * one, one, one.bool()).terms  # ratio 2.01 is clipped to 1.2
        tensor([-1.2000])
    """
    check_clip_bounds(clip_low, clip_high)
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"Expected dual_clip to be above 1 but got {dual_clip}. Pass None to switch it off.")
    delta, advantages = log_ratio(log_probs, old_log_probs, response_mask), sanitize(advantages, response_mask)
    ratio = delta.exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    terms = torch.maximum(-advantages * ratio, -advantages * clipped)
    metrics = ratio_metrics(delta, response_mask) | clip_metrics(ratio, advantages, clip_low, clip_high)
    if dual_clip is not None:
        bound = -advantages * dual_clip
        hit = (advantages < 0) & (terms > bound)
        terms = torch.where(hit, bound, terms)
        metrics["clip_fraction_dual"] = hit.to(terms.dtype)
    return LossTerms(terms, metrics)


def log_ratio(log_probs: Tensor, old_log_probs: Tensor, response_mask: Tensor, limit: float | None = MAX_LOG_RATIO) -> Tensor:
    """Return log_probs - old_log_probs, 0 outside the response mask, clamped to +-limit.

    Args:
        log_probs: ``[T]``, floating point.
        old_log_probs: ``[T]``, floating point; no gradient flows into it.
        response_mask: ``[T]``, bool.
        limit: largest absolute value; beyond it the gradient is 0. None: no clamp.

    Returns:
        ``[T]``.

    Example:
        >>> log_ratio(torch.tensor([-1.0, 0.0]), torch.tensor([-1.5, float("-inf")]), torch.tensor([True, False]))
        tensor([0.5000, 0.0000])
    """
    delta = sanitize(log_probs, response_mask) - sanitize(old_log_probs.detach(), response_mask)
    return delta if limit is None else delta.clamp(-limit, limit)


def absolute(delta: Tensor) -> Tensor:
    """Return abs(delta) with gradient 0 where delta is 0 up to rounding, as it is in the first update of an iteration.

    There the sign is noise: it depends on how a batch was cut. 0 is the gradient that abs has at 0 itself.

    Args:
        delta: ``[T]``, floating point, differentiable: difference of two log-probabilities.

    Returns:
        ``[T]``.

    Example:
        >>> delta = torch.tensor([0.5, 1e-6], requires_grad=True)
        >>> torch.autograd.grad(absolute(delta).sum(), delta)
        (tensor([1., 0.]),)
    """
    is_rounding = delta.abs() <= 1024 * torch.finfo(delta.dtype).eps
    return torch.where(is_rounding, delta.detach(), delta).abs()


def ratio_metrics(delta: Tensor, response_mask: Tensor) -> dict[str, Tensor]:
    """Return the metrics that every policy loss reports about its log-ratio.

    Args:
        delta: ``[T]``, floating point: log-ratio, 0 outside the response mask.
        response_mask: ``[T]``, bool.

    Returns:
        ``ratio`` (its mean must be 1 at the first micro-step), ``approx_kl`` (r - 1 - log r, never negative) and ``approx_kl_k1``
        (-log r): both estimate KL(old || new), see ``kl_penalty``. All ``[T]``, detached, 0 outside the mask.

    Example:
        >>> ratio_metrics(torch.zeros(1), torch.ones(1, dtype=torch.bool))["ratio"]
        tensor([1.])
    """
    delta = delta.detach()
    # r - 1 - log r of ratios near 1 has no digit left if the 1 is subtracted after rounding.
    return {
        "ratio": sanitize(delta.exp(), response_mask),
        "approx_kl": (torch.expm1(delta) - delta).clamp(min=0),
        "approx_kl_k1": -delta,
    }


def clip_metrics(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> dict[str, Tensor]:
    """Return which tokens are held by the lower and which by the upper bound of the ratio.

    Args:
        ratio: ``[T]``, floating point.
        advantages: ``[T]``, floating point, 0 outside the response mask.
        clip_low: lower bound is 1 - clip_low.
        clip_high: upper bound is 1 + clip_high.

    Returns:
        ``clip_fraction_low`` and ``clip_fraction_high``, ``[T]`` of 0 and 1, detached.

    Example:
        >>> clip_metrics(torch.tensor([0.5, 1.5]), torch.tensor([1.0, 1.0]), 0.2, 0.2)["clip_fraction_high"]
        tensor([0., 1.])
    """
    ratio = ratio.detach()
    low = (advantages < 0) & (ratio < 1 - clip_low)
    high = (advantages > 0) & (ratio > 1 + clip_high)
    return {"clip_fraction_low": low.to(ratio.dtype), "clip_fraction_high": high.to(ratio.dtype)}


def check_clip_bounds(clip_low: float, clip_high: float) -> None:
    """Refuse bounds that would exclude the ratio 1.

    Raises:
        ValueError: a bound is negative.

    Example:
        >>> check_clip_bounds(0.2, 0.28)
    """
    if clip_low < 0 or clip_high < 0:
        raise ValueError(f"Expected clip_low and clip_high to be >= 0 but got {clip_low} and {clip_high}.")


def entropy(logits: Tensor, response_mask: Tensor) -> Tensor:
    """Compute the entropy of the distribution that each token was sampled from, -sum_v p_v log p_v, in nats.

    :class:`~lightning_rlbatch.models.TokenScorer` computes the same in chunks, without logits of all tokens in memory at once.

    Source: Shannon, "A Mathematical Theory of Communication", 1948.

    Args:
        logits: ``[T, V]``, floating point, differentiable: row t predicts token t, divided by the temperature. -inf rules a token out.
        response_mask: ``[T]``, bool.

    Returns:
        ``[T]``: 0 outside the response mask.

    Example:
        >>> entropy(torch.tensor([[0.0, 0.0], [float("nan"), 0.0]]), torch.tensor([True, False]))
        tensor([0.6931, 0.0000])
    """
    log_p = sanitize(logits, response_mask[:, None]).log_softmax(-1)
    # A probability of 0 contributes 0, in value and gradient: 0 * -inf would be NaN.
    log_p = log_p.clamp(min=torch.finfo(log_p.dtype).min)
    return sanitize(-(log_p.exp() * log_p).sum(-1), response_mask)


def entropy_bonus(entropy: Tensor, response_mask: Tensor, *, coefficient: float = 1.0) -> LossTerms:
    """Compute -coefficient * entropy: what a loss subtracts to keep the policy from collapsing.

    Source: Williams and Peng, "Function Optimization using Connectionist Reinforcement Learning Algorithms", 1991.

    Args:
        entropy: ``[T]``, floating point, differentiable, in nats: of the distribution that token t was sampled from.
        response_mask: ``[T]``, bool.
        coefficient: weight of the bonus; negative values are a penalty.

    Returns:
        Terms and the metric ``entropy``.

    Example:
        >>> entropy_bonus(torch.tensor([2.0, float("nan")]), torch.tensor([True, False]), coefficient=0.5).terms
        tensor([-1.,  0.])
    """
    entropy = sanitize(entropy, response_mask)
    return LossTerms(0.0 - coefficient * entropy, {"entropy": entropy.detach()})
