"""Each policy loss against its formula in plain Python, its gradient against finite differences or the formula's, and the public hook."""

import functools
import math

import pytest
import torch
from rl_cases import LOSSES

from lightning_rlbatch.functional.aggregation import Denominators, aggregate
from lightning_rlbatch.functional.algorithms import FunctionLoss, LossInputs, PolicyLoss, PPOClip
from lightning_rlbatch.functional.kl import AdaptiveKL, FixedKL, full_kl, kl_penalty
from lightning_rlbatch.functional.losses import LossTerms, entropy, entropy_bonus, policy_loss, ppo_clip_loss
from lightning_rlbatch.functional.losses_covariance import kl_cov_loss, select_clip_cov, select_kl_cov, token_covariance, token_keys
from lightning_rlbatch.functional.losses_sequence import gmpo_loss, gspo_loss
from lightning_rlbatch.functional.losses_token import binary_kl, cispo_loss, dppo_loss, reinforce_loss, sapo_loss
from lightning_rlbatch.functional.value import value_loss

NAN = math.nan
LENGTHS = [3, 1, 6, 4]
CU_SEQLENS = torch.tensor([0, 3, 4, 10, 14], dtype=torch.int32)
MASK = torch.tensor([0, 1, 1, 1, 0, 1, 1, 0, 1, 1, 0, 0, 0, 0], dtype=torch.bool)  # the last sample has no response token


def draw(seed=0):
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(14, generator=generator, dtype=torch.float64) * 3 - 0.05
    log_probs = (old + torch.randn(14, generator=generator, dtype=torch.float64) * 0.7).clamp(max=-0.01)
    return log_probs, old, torch.randn(14, generator=generator, dtype=torch.float64)


def clip(x, low, high):
    return min(max(x, low), high)


def by_token(formula):
    """Apply ``formula(log_prob, old_log_prob, advantage) -> (value, gradient)`` to each response token."""
    log_probs, old, advantages = (x.tolist() for x in draw())
    rows = [formula(log_probs[t], old[t], advantages[t]) if MASK[t] else (0.0, 0.0) for t in range(14)]
    return [row[0] for row in rows], [row[1] for row in rows]


def check_token_loss(function, formula):
    log_probs, old, advantages = draw()
    log_probs.requires_grad_()
    terms = function(log_probs, old, advantages, MASK).terms
    value, slope = by_token(formula)
    torch.testing.assert_close(terms.detach(), torch.tensor(value, dtype=torch.float64), rtol=1e-12, atol=1e-14)
    (gradient,) = torch.autograd.grad(terms.sum(), log_probs)
    torch.testing.assert_close(gradient, torch.tensor(slope, dtype=torch.float64), rtol=1e-12, atol=1e-14)


def test_ppo_clip_is_the_papers_formula():
    def formula(new, old, a):
        r = math.exp(new - old)
        surrogate, bounded = r * a, clip(r, 0.8, 1.3) * a
        return (-surrogate, -surrogate) if surrogate <= bounded else (-bounded, 0.0)

    check_token_loss(lambda *x: ppo_clip_loss(*x, clip_low=0.2, clip_high=0.3), formula)


def test_dual_clip_bounds_the_loss_of_negative_advantages():
    def formula(new, old, a):
        r = math.exp(new - old)
        surrogate, bounded = r * a, clip(r, 0.8, 1.2) * a
        value, slope = (-surrogate, -surrogate) if surrogate <= bounded else (-bounded, 0.0)
        return (-1.5 * a, 0.0) if a < 0 and value > -1.5 * a else (value, slope)

    check_token_loss(lambda *x: ppo_clip_loss(*x, dual_clip=1.5), formula)


def test_cispo_weights_the_log_likelihood_by_a_clipped_ratio_without_gradient():
    def formula(new, old, a):
        weight = clip(math.exp(new - old), 0.7, 1.5)
        return -weight * a * new, -weight * a

    check_token_loss(lambda *x: cispo_loss(*x, clip_low=0.3, clip_high=0.5), formula)


def test_sapo_is_a_sigmoid_gate():
    def formula(new, old, a):
        r, tau = math.exp(new - old), 1.0 if a > 0 else 1.05
        gate = 1 / (1 + math.exp(-tau * (r - 1)))
        return -a * gate * 4 / tau, -a * r * 4 * gate * (1 - gate)

    check_token_loss(sapo_loss, formula)


def test_dppo_drops_tokens_that_leave_the_trust_region():
    def formula(new, old, a):
        p, q = math.exp(new), math.exp(old)
        if (a > 0 and p - q > 0.1) or (a < 0 and q - p > 0.05):
            return 0.0, 0.0
        weight = min(p / q, 1.4)
        return -a * weight * new, -a * weight

    check_token_loss(lambda *x: dppo_loss(*x, threshold_low=0.05, threshold_high=0.1, max_ratio=1.4), formula)


def test_dppo_with_binary_kl_drops_tokens_that_leave_the_trust_region():
    def formula(new, old, a):
        p, q = math.exp(new), math.exp(old)
        divergence = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        if (a > 0 and p > q and divergence > 0.02) or (a < 0 and p < q and divergence > 0.03):
            return 0.0, 0.0
        return -a * p / q * new, -a * p / q

    check_token_loss(lambda *x: dppo_loss(*x, divergence="kl", threshold_low=0.03, threshold_high=0.02), formula)


def test_reinforce_weights_are_truncated_and_carry_no_gradient():
    check_token_loss(reinforce_loss, lambda new, old, a: (-a * new, -a))
    check_token_loss(
        lambda *x: reinforce_loss(*x, max_ratio=1.1),
        lambda new, old, a: (-a * min(math.exp(new - old), 1.1) * new, -a * min(math.exp(new - old), 1.1)),
    )


def test_value_loss_is_the_larger_of_plain_and_clipped_error():
    def formula(new, old, target):
        plain, bounded = (new - target) ** 2, (old + clip(new - old, -0.3, 0.3) - target) ** 2
        return (plain / 2, new - target) if plain >= bounded else (bounded / 2, 0.0)

    check_token_loss(lambda v, old, returns, mask: value_loss(v, old, returns, mask, clip=0.3), formula)
    check_token_loss(lambda v, old, returns, mask: value_loss(v, None, returns, mask), lambda v, old, r: ((v - r) ** 2 / 2, v - r))


def test_values_that_move_by_less_than_the_clip_range_are_not_counted_as_clipped():
    generator = torch.Generator().manual_seed(0)
    old, move, returns = (torch.randn(500, generator=generator) for _ in range(3))
    everywhere = torch.ones(500, dtype=torch.bool)
    for values in (old, old + 0.05 * move):  # old + (values - old) is not values, to the last bit
        assert value_loss(values, old, returns, everywhere, clip=1.0).metrics["clip_fraction"].sum() == 0
    assert value_loss(old + 2, old, old, everywhere, clip=1.0).metrics["clip_fraction"].sum() == 0  # the larger error counts
    assert value_loss(old + 2, old, old + 4, everywhere, clip=1.0).metrics["clip_fraction"].sum() == 500


def test_entropy_is_that_of_torchs_categorical_distribution_in_value_and_gradient():
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(5, 7, generator=generator, dtype=torch.float64)
    logits[1, 2] = float("-inf")  # a token that was ruled out
    mask = torch.tensor([True, True, False, True, True])
    distribution = torch.distributions.Categorical(logits=logits)
    expected = distribution.entropy().where(mask, 0)
    logits[2] = float("nan")
    values = entropy(logits.requires_grad_(), mask)
    assert torch.allclose(values, expected, rtol=1e-12, atol=0)
    values.sum().backward()
    slope = -distribution.probs * (distribution.logits.clamp(min=-1e9) + expected[:, None])  # dH/dz_v = -p_v (log p_v + H)
    assert torch.allclose(logits.grad, slope.where(mask[:, None], 0), rtol=1e-10, atol=1e-12)


def test_entropy_bonus_is_minus_the_coefficient_times_entropy():
    check_token_loss(lambda h, old, a, mask: entropy_bonus(h, mask, coefficient=0.3), lambda h, old, a: (-0.3 * h, -0.3))


def response_tokens(sample):
    start, end = CU_SEQLENS[sample], CU_SEQLENS[sample + 1]
    return [t for t in range(start, end) if MASK[t]]


def test_gspo_is_the_papers_sequence_objective_and_gradient():
    """With one advantage per sample: (1/N) sum_i min(s_i A_i, clip(s_i) A_i), differentiated through s_i."""
    log_probs, old, advantages = draw()
    advantages = advantages[CU_SEQLENS[:-1].long()].repeat_interleave(torch.tensor(LENGTHS))
    ours, reference = log_probs.clone().requires_grad_(), log_probs.clone().requires_grad_()
    terms = gspo_loss(ours, old, advantages, MASK, CU_SEQLENS, clip_low=0.2, clip_high=0.2).terms
    aggregate(terms, MASK, CU_SEQLENS, "seq-mean-token-mean", Denominators.local(MASK, CU_SEQLENS)).backward()
    total = torch.zeros((), dtype=torch.float64)
    for sample in range(3):
        tokens = response_tokens(sample)
        s = torch.exp(sum(reference[t] - old[t] for t in tokens) / len(tokens))
        a = advantages[tokens[0]]
        total = total - torch.minimum(s * a, s.clamp(0.8, 1.2) * a) / 3
    total.backward()
    torch.testing.assert_close(ours.grad, reference.grad, rtol=1e-12, atol=1e-14)
    assert aggregate(terms, MASK, CU_SEQLENS, "seq-mean-token-mean", Denominators(7, 3)).item() == pytest.approx(total.item())


def test_gmpo_is_the_papers_sequence_objective_and_gradient():
    log_probs, old, advantages = draw()
    advantages = advantages[CU_SEQLENS[:-1].long()].repeat_interleave(torch.tensor(LENGTHS))
    ours, reference = log_probs.clone().requires_grad_(), log_probs.clone().requires_grad_()
    terms = gmpo_loss(ours, old, advantages, MASK, CU_SEQLENS, clip_low=0.3, clip_high=0.4).terms
    loss = aggregate(terms, MASK, CU_SEQLENS, "seq-mean-token-mean", Denominators.local(MASK, CU_SEQLENS))
    loss.backward()
    total = torch.zeros((), dtype=torch.float64)
    for sample in range(3):
        tokens = response_tokens(sample)
        a = advantages[tokens[0]]
        product = torch.ones((), dtype=torch.float64)
        for t in tokens:  # min of the products with the sign of A, token by token
            r = (reference[t] - old[t]).exp()
            held = r.clamp(math.exp(-0.3), math.exp(0.4))
            product = product * (torch.minimum(r, held) if a > 0 else torch.maximum(r, held))
        total = total - a * product ** (1 / len(tokens)) / 3
    total.backward()
    assert loss.item() == pytest.approx(total.item(), rel=1e-12)
    torch.testing.assert_close(ours.grad, reference.grad, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_the_gradient_of_every_loss_is_the_policy_gradient_and_the_ratio_is_one(name):
    if name in ("kl_cov", "clip_cov", "function"):
        selected = torch.zeros(14, dtype=torch.bool) if LOSSES[name].needs_selection else None
    else:
        selected = None
    _, old, advantages = draw(seed=4)
    advantages = advantages[CU_SEQLENS[:-1].long()].repeat_interleave(torch.tensor(LENGTHS))
    log_probs = old.clone().requires_grad_()
    result = LOSSES[name](log_probs, old, advantages, MASK, CU_SEQLENS, selected=selected)
    loss = aggregate(result.terms, MASK, CU_SEQLENS, "seq-mean-token-mean", Denominators.local(MASK, CU_SEQLENS))
    (gradient,) = torch.autograd.grad(loss, log_probs)
    expected = torch.zeros(14, dtype=torch.float64)
    for sample in range(3):
        for t in response_tokens(sample):
            expected[t] = -advantages[t] / len(response_tokens(sample)) / 3
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)
    if "ratio" in result.metrics:
        assert (result.metrics["ratio"].sum() / MASK.sum()).item() == pytest.approx(1)
        assert result.metrics["approx_kl"].abs().max() < 1e-15
        assert all(result.metrics[key].sum() == 0 for key in result.metrics if key.startswith("clip_fraction"))


# -- losses that select tokens -----------------------------------------------------------------------------------------------


def test_covariance_is_the_product_of_deviations_over_response_tokens():
    log_probs, _, advantages = draw()
    x, a = log_probs[MASK], advantages[MASK]
    expected = (x - x.mean()) * (a - a.mean())
    torch.testing.assert_close(token_covariance(log_probs, advantages, MASK)[MASK], expected)


@pytest.mark.parametrize("fraction", [0.01, 0.3, 0.5, 1.0])
def test_kl_cov_selects_the_tokens_of_highest_covariance(fraction):
    log_probs, _, advantages = draw()
    keys = token_keys(torch.arange(4), CU_SEQLENS, 14)
    selected = select_kl_cov(log_probs, advantages, MASK, keys, num_tokens=7, fraction=fraction)
    covariance = token_covariance(log_probs, advantages, MASK)
    ranked = sorted((t for t in range(14) if MASK[t]), key=lambda t: -covariance[t].item())
    assert selected.nonzero().flatten().tolist() == sorted(ranked[: max(1, int(7 * fraction))])


def test_rounding_decides_neither_which_tokens_are_chosen_nor_their_gradient():
    mask, bounds = torch.ones(40, dtype=torch.bool), torch.tensor([0, 20, 40])
    generator = torch.Generator().manual_seed(0)
    log_probs = -torch.rand(40, generator=generator, dtype=torch.float64) - 0.1
    advantages = torch.tensor([0.3, -0.3] + [0.0] * 38, dtype=torch.float64)  # most have the mean, so that their covariance is 0 on paper
    noise = torch.randn(40, generator=generator, dtype=torch.float64) * 1e-14
    keys = token_keys(torch.arange(2), bounds, 40)
    for given in (advantages, torch.full_like(advantages, 1 / 3)):  # all equal: there is nothing but rounding
        chosen = [
            select_kl_cov(log_probs + noise * sign, given + noise.flip(0) * sign, mask, keys, num_tokens=40, fraction=0.5)
            for sign in (0, 1, -1)
        ]
        assert torch.equal(chosen[0], chosen[1])
        assert torch.equal(chosen[0], chosen[2])
    for dtype in (torch.float64, torch.float32):  # the first update of an iteration: old and new log-probs differ by rounding alone
        rounding = (noise * 1e14 * torch.finfo(dtype).eps).to(dtype)
        gradients = []
        for old in (log_probs.to(dtype), log_probs.to(dtype) + rounding):
            new = log_probs.to(dtype).requires_grad_()
            terms = kl_cov_loss(new, old, advantages.to(dtype), mask, chosen[0]).terms + kl_penalty(new, old, mask, "abs")
            gradients += torch.autograd.grad(terms.sum(), new)
        torch.testing.assert_close(*gradients)


def test_equal_covariances_are_chosen_by_key_and_never_more_than_asked_for():
    log_probs, advantages = torch.full((14,), -1.0), torch.ones(14)
    chosen = set()
    for seed in range(40):
        keys = token_keys(torch.arange(4), CU_SEQLENS, 14, seed=seed)
        selected = select_kl_cov(log_probs, advantages, MASK, keys, num_tokens=7, fraction=0.3)
        assert int(selected.sum()) == 2
        assert not (selected & ~MASK).any()
        chosen |= set(selected.nonzero().flatten().tolist())
    assert len(chosen) == 7  # every response token has its turn


def test_clip_cov_leaves_clipped_tokens_and_those_outside_the_interval_alone():
    log_probs, old, advantages = draw()
    covariance = token_covariance(log_probs, advantages, MASK)
    keys = token_keys(torch.arange(4), CU_SEQLENS, 14)
    settings = {"num_tokens": 7, "fraction": 1.0, "lower": 0.05, "upper": 0.6}
    selected = select_clip_cov(log_probs, old, advantages, MASK, keys, **settings)
    metrics = ppo_clip_loss(log_probs, old, advantages, MASK).metrics
    clipped = (metrics["clip_fraction_low"] + metrics["clip_fraction_high"]) > 0
    assert torch.equal(selected, MASK & ~clipped & (covariance > 0.05) & (covariance < 0.6))
    assert selected.any()


def test_losses_that_select_say_so_when_the_selection_is_missing_or_not_wanted():
    log_probs, old, advantages = draw()
    with pytest.raises(ValueError, match=r"KLCov needs `selected`.*whole mini-batch"):
        LOSSES["kl_cov"](log_probs, old, advantages, MASK, CU_SEQLENS)
    with pytest.raises(ValueError, match="PPOClip makes no use of `selected`"):
        LOSSES["ppo"](log_probs, old, advantages, MASK, CU_SEQLENS, selected=MASK)
    with pytest.raises(RuntimeError, match="PPOClip makes no selection"):
        LOSSES["ppo"].select(log_probs, old, advantages, MASK, log_probs, num_tokens=7)


# -- the public hook -----------------------------------------------------------------------------------------------------------


def test_a_users_loss_that_returns_a_mean_is_refused_and_the_message_says_what_to_return():
    log_probs, old, advantages = draw()
    for reduced in (lambda x: x.mean(), lambda x: x.sum(0, keepdim=True), lambda x: x[MASK]):
        loss = FunctionLoss(lambda new, old, a, mask, cu_seqlens, reduced=reduced: reduced(-a * new))
        with pytest.raises(ValueError, match=r"one unreduced term per token, shape \(14,\), but got shape .*before \.mean\(\)"):
            loss(log_probs, old, advantages, MASK, CU_SEQLENS)
    with pytest.raises(ValueError, match=r"The loss must hold one unreduced term"):
        aggregate(log_probs.mean(), MASK, CU_SEQLENS, "token-mean", Denominators(7, 3))
    for returned, message in ((1.0, "terms but got float"), ((log_probs, {}), r"returned a tuple. Return \[T\] terms, or LossTerms")):
        with pytest.raises(TypeError, match=message):
            policy_loss(log_probs, old, advantages, MASK, CU_SEQLENS, loss=lambda *x, returned=returned: returned)


def test_a_users_loss_takes_the_first_arguments_that_it_has_a_place_for_and_keeps_its_settings():
    log_probs, old, advantages = draw()
    expected = torch.where(MASK, -advantages * log_probs, 0)
    losses = [
        lambda new, _, a: -a * new,
        lambda new, _, a, mask: -a * new,
        lambda new, _, a, mask, scale=1.0: -a * new * scale,
        lambda new, _, a, mask, cu_seqlens=None: -a * new * len(cu_seqlens) / 5,
        lambda new, _, a, *, scale=1.0: -a * new * scale,
        lambda *arguments: -arguments[2] * arguments[0],
    ]
    for loss in losses:
        for result in (policy_loss(log_probs, old, advantages, MASK, CU_SEQLENS, loss=loss), FunctionLoss(loss)(*draw(), MASK, CU_SEQLENS)):
            torch.testing.assert_close(result.terms, expected)


def test_what_a_loss_returns_can_be_aggregated_as_it_is_and_boundaries_may_be_a_list():
    for name in ("ppo", "gspo", "gmpo"):
        terms = LOSSES[name](*draw(), MASK, CU_SEQLENS)
        listed = LOSSES[name](*draw(), MASK, CU_SEQLENS.tolist())
        assert torch.equal(terms.terms, listed.terms)
        totals = [aggregate(x, MASK, CU_SEQLENS, "token-mean", Denominators(7, 3)) for x in (terms, terms.terms)]
        assert torch.equal(*totals)
    keys = [token_keys(ids, bounds, 14) for ids, bounds in ((range(4), CU_SEQLENS.tolist()), (torch.arange(4), CU_SEQLENS))]
    assert torch.equal(*keys)


def test_a_users_metric_that_is_a_mean_is_refused():
    log_probs, old, advantages = draw()
    with pytest.raises(ValueError, match=r"Metric 'mine' of policy loss .* shape"):
        policy_loss(log_probs, old, advantages, MASK, CU_SEQLENS, loss=lambda new, *x: LossTerms(-new, {"mine": new.mean()}))


def test_a_users_loss_sees_zeros_where_the_mask_hides_nan():
    seen = []

    class Mine(PolicyLoss):
        def compute(self, inputs: LossInputs) -> torch.Tensor:
            seen.append(inputs)
            return -inputs.advantages * inputs.log_probs.exp() / inputs.old_log_probs.exp()

    hidden = torch.where(MASK, draw()[0], float("nan")).requires_grad_()
    terms = Mine()(hidden, hidden, hidden, MASK, CU_SEQLENS).terms
    (gradient,) = torch.autograd.grad(terms.sum(), hidden)
    assert gradient.isfinite().all()
    assert all(x[~MASK].eq(0).all() for x in seen[0].tokens[:3])
    assert not seen[0].old_log_probs.requires_grad


def test_importance_weights_multiply_the_terms_and_carry_no_gradient():
    log_probs, old, advantages = draw()
    weights = torch.where(MASK, 3.0, float("nan")).double().requires_grad_()
    plain = LOSSES["ppo"](log_probs, old, advantages, MASK, CU_SEQLENS).terms
    weighted = LOSSES["ppo"](log_probs, old, advantages, MASK, CU_SEQLENS, weights=weights).terms
    torch.testing.assert_close(weighted, 3 * plain)
    assert not weighted.requires_grad


def test_an_integer_mask_or_a_mask_of_another_length_is_refused():
    log_probs, old, advantages = draw()
    with pytest.raises(TypeError, match="response_mask to be of dtype bool"):
        LOSSES["ppo"](log_probs, old, advantages, MASK.long(), CU_SEQLENS)
    with pytest.raises(ValueError, match="Argument log_probs of policy loss PPOClip"):
        LOSSES["ppo"](log_probs[:-1], old, advantages, MASK, CU_SEQLENS)


@pytest.mark.parametrize("bounds", [[0, 3, 4, 10], [0, 3, 4, 10, 15], [1, 3, 4, 10, 14], [0, 10, 4, 14], []])
def test_boundaries_that_do_not_fit_the_tokens_are_refused_with_both_numbers(bounds):
    with pytest.raises(ValueError, match=r"end with the number of tokens, 14, but got .*cumulative lengths"):
        aggregate(draw()[0], MASK, bounds, "seq-mean-token-mean", Denominators(7, 3))
    with pytest.raises(ValueError, match="end with the number of tokens, 14"):
        gspo_loss(*draw(), MASK, torch.tensor(bounds, dtype=torch.int32))


def test_half_precision_log_probs_are_scored_in_fp32():
    log_probs, old, advantages = (x.bfloat16() for x in draw())
    result = LOSSES["gspo"](log_probs, old, advantages, MASK, CU_SEQLENS)
    assert result.terms.dtype == torch.float32


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: ppo_clip_loss(*x, clip_low=-0.1), "clip_low and clip_high to be >= 0"),
        (lambda x: ppo_clip_loss(*x, dual_clip=1.0), "dual_clip to be above 1"),
        (lambda x: reinforce_loss(*x, max_ratio=0.0), "max_ratio to be positive"),
        (lambda x: dppo_loss(*x, divergence="js"), "divergence to be 'tv' or 'kl'"),
        (lambda x: dppo_loss(*x, max_ratio=-1.0), "max_ratio to be positive"),
        (lambda x: sapo_loss(*x, temperature_positive=0.0), "temperatures to be positive"),
        (lambda x: value_loss(x[0], x[1], x[2], x[3], clip=0.0), "clip range to be positive"),
        (lambda x: value_loss(x[0], None, x[2], x[3], clip=0.2), "needs old_values"),
        (lambda x: kl_penalty(x[0], x[1], x[3], "k4"), "KL kind to be one of k1, k2"),
        (lambda x: select_kl_cov(x[0], x[2], x[3], x[0], num_tokens=7, fraction=0.0), r"fraction to be in \(0, 1\]"),
        (lambda x: select_clip_cov(*x, x[0], num_tokens=7, lower=2.0, upper=1.0), "lower < upper"),
        (lambda x: aggregate(x[0], x[3], CU_SEQLENS, "mean", Denominators(7, 3)), "token-mean, token-sum"),
        (lambda x: aggregate(x[0], x[3], CU_SEQLENS, "seq-mean-token-sum-norm", Denominators(7, 3)), "positive norm_constant but got None"),
        (lambda x: Denominators(7, 3) + Denominators(7, 3, 2), "one norm_constant"),
        (lambda x: FixedKL(-1.0), "KL coefficient to be >= 0"),
        (lambda x: AdaptiveKL(target=0.0), "target and horizon to be positive"),
    ],
)
def test_a_bad_setting_is_an_error_that_names_it(call, message):
    with pytest.raises(ValueError, match=message):
        call((*draw(), MASK))


# -- KL ------------------------------------------------------------------------------------------------------------------------


def test_the_kl_of_a_small_update_keeps_its_digits_in_single_precision():
    delta = torch.tensor([0.0, 1e-6, -3e-5, 2e-4, -0.1])
    found = ppo_clip_loss(delta - 1, torch.full((5,), -1.0), torch.ones(5), torch.ones(5, dtype=torch.bool)).metrics["approx_kl"]
    moved = (delta - 1).double() + 1
    exact = torch.expm1(moved) - moved
    assert ((found - exact).abs() <= 1.2e-7 * moved.abs()).all()  # of the ratio's distance from 1, not of the ratio
    assert (found >= 0).all()


def test_k1_and_k3_are_unbiased_and_straight_through_k3_has_the_gradient_of_the_divergence():
    """Expectations over a vocabulary of 5, in closed form: every token weighted with its probability."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, generator=generator, dtype=torch.float64).mul(0.5).requires_grad_()
    log_q = torch.randn(5, generator=generator, dtype=torch.float64).mul(0.5).log_softmax(0)  # k3 stays below its bound
    truth = full_kl(logits[None], log_q[None], torch.tensor([True])).sum()
    (true_gradient,) = torch.autograd.grad(truth, logits)
    log_p = logits.log_softmax(0)
    everywhere = torch.ones(5, dtype=torch.bool)
    for kind in ("k1", "k3"):
        assert (log_p.exp() * kl_penalty(log_p, log_q, everywhere, kind)).sum().item() == pytest.approx(truth.item(), rel=1e-12)
    for kind in ("k2", "k1+", "k3+", "abs+"):
        sampled = (log_p.exp().detach() * kl_penalty(log_p, log_q, everywhere, kind)).sum()
        (gradient,) = torch.autograd.grad(sampled, logits, retain_graph=True)
        torch.testing.assert_close(gradient, true_gradient)
    (other_way,) = torch.autograd.grad((log_q.exp() * (log_q - log_p)).sum(), logits, retain_graph=True)
    (gradient,) = torch.autograd.grad((log_p.exp().detach() * kl_penalty(log_p, log_q, everywhere, "k3")).sum(), logits, retain_graph=True)
    torch.testing.assert_close(gradient, other_way)
    (nothing,) = torch.autograd.grad((log_p.exp().detach() * kl_penalty(log_p, log_q, everywhere, "k1")).sum(), logits)
    assert nothing.abs().max() < 1e-12


def test_full_kl_ignores_rows_outside_the_mask_and_is_never_negative():
    logits = torch.tensor([[1.0, 2.0, 3.0], [float("nan")] * 3], requires_grad=True)
    value = full_kl(logits, torch.tensor([[3.0, 2.0, 1.0], [float("inf")] * 3]), torch.tensor([True, False]))
    assert value[0] > 0
    assert value[1] == 0
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    assert gradient.isfinite().all()


def test_the_adaptive_controller_moves_towards_its_target_by_at_most_a_fifth_per_horizon():
    controller = AdaptiveKL(coefficient=0.1, target=2.0, horizon=100)
    assert controller.update(0.1, current_kl=2.0, num_samples=100) == pytest.approx(0.1)
    assert controller.update(0.1, current_kl=2.2, num_samples=100) == pytest.approx(0.11)
    assert controller.update(0.1, current_kl=50.0, num_samples=100) == pytest.approx(0.12)
    assert controller.update(0.1, current_kl=0.0, num_samples=50) == pytest.approx(0.09)
    assert FixedKL(0.1).update(0.1, current_kl=50.0, num_samples=100) == 0.1


def test_binary_kl_is_finite_for_certain_tokens():
    value = binary_kl(torch.tensor([0.0, -1e-9, -30.0]), torch.tensor([-0.5, 0.0, -0.0]))
    assert value.isfinite().all()
    assert (value >= 0).all()


def test_the_front_takes_a_token_loss_as_it_is_and_ppo_by_default():
    log_probs, old, advantages = (torch.tensor(column) for column in ([-0.1, -1.0, 0.0], [-0.6, -0.9, NAN], [1.0, -1.0, NAN]))
    mask, cu_seqlens = torch.tensor([True, True, False]), torch.tensor([0, 3])
    expected = ppo_clip_loss(log_probs, old, advantages, mask).terms
    for loss in (None, ppo_clip_loss, PPOClip()):
        assert torch.equal(policy_loss(log_probs, old, advantages, mask, cu_seqlens, loss=loss).terms, expected)
    partial = functools.partial(ppo_clip_loss, clip_high=0.5)
    assert not torch.equal(policy_loss(log_probs, old, advantages, mask, cu_seqlens, loss=partial).terms, expected)
