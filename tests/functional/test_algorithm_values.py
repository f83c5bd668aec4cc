"""Values computed by another trainer's functions (tests/data/algorithm_values.json), reproduced where the definitions agree.

Where that trainer's value is a known fault, the test asserts ours and says why.
"""

import math
from pathlib import Path

import pytest
import torch
from rl_cases import CASES, mask_of, padded

from lightning_rlbatch.functional.advantages import discounted_returns, gae, moments, spread_to_tokens, whiten
from lightning_rlbatch.functional.advantages_group import (
    gdpo_advantages,
    gpg_advantages,
    group_advantages,
    group_statistics,
    pass_at_k_advantages,
    rloo_advantages,
)
from lightning_rlbatch.functional.aggregation import AGGREGATION_MODES, Denominators, aggregate
from lightning_rlbatch.functional.estimators_group import GDPO, ReinforcePlusPlusBaseline
from lightning_rlbatch.functional.kl import kl_penalty
from lightning_rlbatch.functional.losses import LossTerms, ppo_clip_loss
from lightning_rlbatch.functional.losses_covariance import clip_cov_loss, kl_cov_loss, select_clip_cov, select_kl_cov, token_keys
from lightning_rlbatch.functional.losses_sequence import gmpo_loss
from lightning_rlbatch.functional.losses_token import dppo_loss, reinforce_loss, sapo_loss
from lightning_rlbatch.functional.optimal_token_baseline import optimal_token_baseline
from lightning_rlbatch.functional.value import value_loss

GROUPS = {"a": 0, "b": 1, "c": 2}


def close(actual, expected, relative=1e-5):
    torch.testing.assert_close(torch.as_tensor(actual).double(), torch.as_tensor(expected).double(), rtol=relative, atol=1e-7)


def denominators_of(mask, cu_seqlens, info=None, norm_constant=None):
    if info is None:
        local = Denominators.local(mask, cu_seqlens)
        return Denominators(local.num_tokens, local.num_sequences, norm_constant)
    return Denominators(info["batch_num_tokens"], info["global_batch_size"], norm_constant)


# -- aggregation ---------------------------------------------------------------------------------------------------------


def test_every_aggregation_mode_gives_the_value_of_the_case():
    case = CASES["agg_local"]
    mask, cu_seqlens = mask_of(case["input"]["mask"])
    for mode, expected in case["expected"].items():
        # The case divides the last mode by the padded width, 4; ours wants the constant said.
        close(
            aggregate(padded(case["input"]["loss_mat"]), mask, cu_seqlens, mode, denominators_of(mask, cu_seqlens, norm_constant=4)),
            expected,
        )


def test_a_fully_masked_sequence_is_in_no_denominator():
    # Theirs keeps it in the global count (3 sequences) although the local count leaves it out (2): 3.667 against 5.5 on the same data.
    # Ours counts valid sequences everywhere, so the values are those of the local case.
    case = CASES["agg_global_bs_counts_masked"]
    mask, cu_seqlens = mask_of(case["input"]["mask"])
    denominators = Denominators.local(mask, cu_seqlens, norm_constant=4)
    assert int(denominators.num_sequences) == 2
    for mode, theirs in case["expected"].items():
        ours = aggregate(padded(case["input"]["loss_mat"]), mask, cu_seqlens, mode, denominators)
        close(ours, CASES["agg_local"]["expected"][mode])
        close(ours * 2 / 3, theirs)


def test_an_all_masked_batch_gives_zero_not_nan():
    # Theirs is 0/0 = NaN without global numbers; ours is a legal step that does nothing.
    case = CASES["agg_all_masked"]
    mask, cu_seqlens = mask_of(case["input"]["mask"])
    loss = padded(case["input"]["loss_mat"]).requires_grad_()
    for mode in AGGREGATION_MODES:
        total = aggregate(loss, mask, cu_seqlens, mode, Denominators.local(mask, cu_seqlens, norm_constant=4))
        assert total.item() == 0
        (gradient,) = torch.autograd.grad(total, loss)
        assert gradient.eq(0).all()


def test_an_all_masked_piece_of_a_batch_gives_zero():
    case = CASES["agg_all_masked_global"]
    mask, cu_seqlens = mask_of(case["input"]["mask"])
    denominators = denominators_of(mask, cu_seqlens, case["input"], norm_constant=4)
    for mode, expected in case["expected"].items():
        assert aggregate(padded(case["input"]["loss_mat"]), mask, cu_seqlens, mode, denominators).item() == expected


def test_token_sum_times_the_number_of_ranks_is_the_case():
    # Their aggregation multiplies by dp_size itself; here the caller does (gradient_scale), once for every loss.
    case = CASES["agg_test_token_sum_dp4"]
    mask, cu_seqlens = mask_of(case["input"]["mask"])
    total = aggregate(padded(case["input"]["loss_mat"]), mask, cu_seqlens, "token-sum", Denominators.local(mask, cu_seqlens))
    close(total * case["input"]["dp_size"], case["expected"])


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_pieces_add_up_to_the_whole_and_equal_the_global_values_of_the_case(mode):
    case = CASES["agg_microbatch_invariance"]
    rows, masks = case["input"]["loss_mat"], case["input"]["mask"]
    mask, cu_seqlens = mask_of(masks)
    denominators = Denominators.local(mask, cu_seqlens, norm_constant=4)
    expected = case["expected"][mode]
    close(aggregate(padded(rows), mask, cu_seqlens, mode, denominators), expected["whole"])
    for name, sizes in (("global_2+4", (2, 4)), ("global_1+2+3", (1, 2, 3))):
        start, values = 0, []
        for size in sizes:
            piece_mask, piece_cu = mask_of(masks[start : start + size])
            values.append(aggregate(padded(rows[start : start + size]), piece_mask, piece_cu, mode, denominators))
            start += size
        close(torch.stack(values), expected[name][0])
        close(sum(values), expected[name][1])  # theirs with local fallback: expected["local_fallback_..."], different for every cut


def test_scaling_micro_batch_means_by_sample_counts_is_wrong_for_token_means_only():
    """The two formulas users know, loss / accumulation steps and loss * len(micro) / len(mini), are exact for sequence means."""
    case = CASES["legacy_dp_actor_token_mean"]
    rows, masks, split = case["input"]["loss_mat"], case["input"]["mask"], case["input"]["split"]
    mask, cu_seqlens = mask_of(masks)
    whole = Denominators.local(mask, cu_seqlens)

    def by_samples(mode, sizes):
        start, total = 0, 0.0
        for size in sizes:
            piece_mask, piece_cu = mask_of(masks[start : start + size])
            local = Denominators.local(piece_mask, piece_cu)
            total += aggregate(padded(rows[start : start + size]), piece_mask, piece_cu, mode, local) * size / len(rows)
            start += size
        return total

    close(aggregate(padded(rows), mask, cu_seqlens, "token-mean", whole), case["expected"]["correct_full_token_mean"])
    close(by_samples("token-mean", split), case["expected"]["legacy_accumulated"])
    assert case["expected"]["legacy_accumulated"] - case["expected"]["correct_full_token_mean"] > 1.2
    ours = aggregate(padded(rows), mask, cu_seqlens, "seq-mean-token-mean", whole)
    close(by_samples("seq-mean-token-mean", split), ours)  # dynamic: any cut
    close(by_samples("seq-mean-token-mean", (2, 2, 2)), ours)  # static: equal counts, size / len(rows) = 1 / accumulation steps


# -- advantages ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gae_g1.0_l1.0", "gae_g0.9_l0.95"])
def test_gae_and_whitening_give_the_case(name):
    case = CASES[name]
    mask, cu_seqlens = mask_of(case["input"]["mask"])
    advantages, returns = gae(
        padded(case["input"]["rewards"]), padded(case["input"]["values"]), mask, cu_seqlens, case["input"]["gamma"], case["input"]["lam"]
    )
    expected = padded(case["expected"]["advantages"])
    close(whiten(advantages, mask)[mask], expected[mask])
    close(returns[mask], padded(case["expected"]["returns"])[mask])
    # Theirs leaves whitened values and raw values at masked positions; ours are 0 there.
    assert whiten(advantages, mask)[~mask].eq(0).all()
    assert returns[~mask].eq(0).all()


def outcome_case(name):
    case = CASES[name]
    groups = torch.tensor([GROUPS.get(g, g) for g in case["input"]["index"]])
    scores = torch.tensor(case["input"]["scores"], dtype=torch.float64)
    if "mask" in case["input"]:
        mask, cu_seqlens = mask_of(case["input"]["mask"])
    else:
        mask, cu_seqlens = torch.ones(4 * len(groups), dtype=torch.bool), torch.arange(len(groups) + 1) * 4
    expected = case["expected"]
    return scores, groups, mask, cu_seqlens, padded(expected["advantages"] if isinstance(expected, dict) else expected)


def check_outcome(name, compute, singleton_differs=True):
    scores, groups, mask, cu_seqlens, expected = outcome_case(name)
    result = spread_to_tokens(compute(scores, groups).advantages, mask, cu_seqlens)
    if singleton_differs:
        # Their group of one keeps the raw reward, a baseline of 0 with no reason; ours is exactly 0.
        alone = spread_to_tokens((groups == GROUPS["c"]).double(), mask, cu_seqlens).bool()
        assert expected[alone].ne(0).all()
        assert result[alone].eq(0).all()
        close(result[~alone], expected[~alone])
    else:
        close(result, expected)


@pytest.mark.parametrize("name", ["adv_grpo_std", "adv_grpo_vectorized"])
def test_grpo_gives_the_case_but_for_the_singleton(name):
    check_outcome(name, group_advantages)


def test_dr_grpo_gives_the_case_but_for_the_singleton():
    check_outcome("adv_grpo_nostd_drgrpo", lambda r, g: group_advantages(r, g, normalize_by_std=False))


def test_rloo_gives_the_case():
    check_outcome("adv_rloo_vectorized", rloo_advantages, singleton_differs=False)


@pytest.mark.parametrize(("name", "norm"), [("adv_grpo_passk", True), ("adv_grpo_passk_nonorm", False)])
def test_pass_at_k_gives_the_case(name, norm):
    check_outcome(name, lambda r, g: pass_at_k_advantages(r, g, normalize_by_std=norm), singleton_differs=False)


def test_equal_rewards_give_the_zero_of_the_case():
    check_outcome("adv_grpo_identical", group_advantages, singleton_differs=False)


def test_gpg_differs_from_the_case_by_the_papers_alpha():
    # Theirs takes alpha = samples / samples with non-zero reward = 6/4; the paper's is samples / samples in groups that have variance
    # (5 of 6, the singleton has none).
    scores, groups, mask, cu_seqlens, expected = outcome_case("adv_gpg")
    result = spread_to_tokens(gpg_advantages(scores, groups).advantages, mask, cu_seqlens)
    alone = spread_to_tokens((groups == GROUPS["c"]).double(), mask, cu_seqlens).bool()
    close(result[~alone] / (6 / 5) * (6 / 4), expected[~alone])
    assert result[alone].eq(0).all()


def raw_singleton(advantages, scores, groups):
    """Put the other trainer's value of a group of one back, to check what follows it."""
    return torch.where(groups == GROUPS["c"], scores, advantages)


def test_reinforce_plus_plus_baseline_gives_the_case_once_the_singleton_keeps_its_reward():
    scores, groups, mask, cu_seqlens, expected = outcome_case("adv_reinforce_plus_plus_baseline")
    centered = group_advantages(scores, groups, normalize_by_std=False).advantages
    close(whiten(spread_to_tokens(raw_singleton(centered, scores, groups), mask, cu_seqlens), mask), expected)
    # Ours: the singleton enters with 0.
    ours = ReinforcePlusPlusBaseline()(scores, groups, mask, cu_seqlens).advantages
    close(ours, whiten(spread_to_tokens(centered, mask, cu_seqlens), mask))


def test_reinforce_plus_plus_gives_the_case():
    case = CASES["adv_reinforce_pp"]
    mask, cu_seqlens = mask_of(case["input"]["mask"])
    returns = discounted_returns(padded(case["input"]["rewards"]), mask, cu_seqlens, case["input"]["gamma"])
    close(returns, padded(case["expected"]["returns"]))
    close(whiten(returns, mask), padded(case["expected"]["advantages"]))


def test_gdpo_without_components_gives_the_case_once_the_singleton_keeps_its_reward():
    scores, groups, mask, cu_seqlens, expected = outcome_case("adv_gdpo_fallback")
    normalized = gdpo_advantages(scores[:, None], groups).advantages
    raw = raw_singleton(normalized, scores / (1 + 1e-6), groups)
    close(whiten(spread_to_tokens(raw, mask, cu_seqlens), mask), expected)


def test_gdpo_of_two_rewards_gives_the_case_once_the_singleton_keeps_its_reward():
    case = CASES["adv_gdpo_two_rewards"]
    groups = torch.tensor([GROUPS[g] for g in case["input"]["index"]])
    mask, cu_seqlens = mask_of(case["input"]["mask"])
    rewards = torch.tensor([case["input"]["fmt"], case["input"]["acc"]], dtype=torch.float64).T
    weights = torch.tensor(case["input"]["weights"], dtype=torch.float64)
    total = gdpo_advantages(rewards, groups, weights).advantages
    raw = raw_singleton(total, rewards @ weights / (1 + 1e-6), groups)
    close(whiten(spread_to_tokens(raw, mask, cu_seqlens), mask), padded(case["expected"]))
    ours = GDPO(weights=case["input"]["weights"])(rewards.sum(1), groups, mask, cu_seqlens, component_rewards=rewards).advantages
    close(ours, whiten(spread_to_tokens(total, mask, cu_seqlens), mask))


@pytest.mark.parametrize("name", ["adv_otb", "adv_tir_otb"])
def test_the_optimal_token_baseline_gives_the_case_where_two_rollouts_can_be_compared(name):
    case = CASES[name]
    given = case["input"]
    mask, cu_seqlens = mask_of(given["mask"])
    returns = discounted_returns(padded(given["rewards"]), mask, cu_seqlens)
    close(returns, padded(case["expected"]["returns"]))
    tokens = (returns, padded(given["old_probs"]).log(), padded(given["sum_pi_squared"]))
    advantages = returns - optimal_token_baseline(*tokens, torch.tensor(given["index"]), mask, cu_seqlens)
    # Where only the longest rollout of a group is left, theirs has no baseline: the raw return. Ours is 0, as for a group of one.
    alone = torch.tensor([[0, 0, 0, 1], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 1, 1]]).flatten().bool()
    close(advantages[~alone], padded(case["expected"]["advantages"])[~alone])
    assert advantages[alone].eq(0).all()
    close(padded(case["expected"]["advantages"])[alone], returns[alone])


def test_group_statistics_give_the_case_but_for_the_singleton():
    case = CASES["group_mean_std"]
    group = group_statistics(torch.tensor(case["input"]["scores"], dtype=torch.float64), torch.tensor(case["input"]["group"]))
    close(group.mean[0], case["expected"]["mean"][0])
    close(group.std[0], case["expected"]["std"][0])
    assert group.count.tolist() == [3, 3, 3, 1]
    # Theirs says mean 0 and std 1 for a group of one, so that its reward passes through.
    assert (group.mean[3], group.std[3], group.centered[3]) == (10, 0, 0)


# -- KL, masked statistics ---------------------------------------------------------------------------------------------------


def test_every_kl_estimate_gives_value_and_gradient_of_the_case():
    case = CASES["kl_penalties"]
    ours = {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "low_var_kl+": "k3+"}
    reference = torch.tensor(case["input"]["ref_logprob"], dtype=torch.float64)
    for name, expected in case["expected"].items():
        log_probs = torch.tensor(case["input"]["logprob"], dtype=torch.float64, requires_grad=True)
        value = kl_penalty(log_probs, reference, torch.ones(4, dtype=torch.bool), ours.get(name, name))
        close(value, expected["value"])
        (gradient,) = torch.autograd.grad(value.sum(), log_probs)
        close(gradient, expected["grad"], relative=2e-5)


def test_masked_moments_give_the_case_whatever_the_mask_hides():
    case = CASES["masked_mean_nan"]
    mask, _ = mask_of(case["input"]["mask"])
    count, mean, _ = moments(padded(case["input"]["values"]), mask)
    close(mean, case["expected"]["all"])
    close(count * mean, CASES["masked_sum_nan"]["expected"]["all"])
    case = CASES["masked_var"]
    mask, _ = mask_of(case["input"]["mask"])
    count, _, squares = moments(padded(case["input"]["values"]), mask)
    close(squares / (count - 1), case["expected"]["unbiased"])
    close(squares / count, case["expected"]["biased"])
    case = CASES["masked_mean_empty"]
    mask, _ = mask_of(case["input"]["mask"])
    assert moments(padded(case["input"]["values"]), mask)[1].item() == case["expected"]


# -- policy losses -------------------------------------------------------------------------------------------------------------


def loss_case(name):
    case = CASES[name]
    given = case["input"]
    mask, cu_seqlens = mask_of(given["mask"])
    log_probs = padded(given["log_prob"]).requires_grad_()
    old = padded(given.get("old_log_prob", given.get("rollout_log_prob")))
    return case, (log_probs, old, padded(given["advantages"]), mask), cu_seqlens


def check_loss(name, compute, mode=None, sum_of_clip_fractions=True):
    case, tokens, cu_seqlens = loss_case(name)
    given = case["input"]
    result: LossTerms = compute(*tokens, cu_seqlens)
    terms = result.terms
    weights = given.get("rollout_is_weights", given.get("w"))
    if weights is not None:
        terms = terms * padded(weights)
    info = given.get("config", {}).get("global_batch_info")
    mode = mode or given.get("loss_agg_mode", given.get("mode"))
    loss = aggregate(terms, tokens[3], cu_seqlens, mode, denominators_of(tokens[3], cu_seqlens, info))
    loss = loss * (info["dp_size"] if info else 1)  # the caller's gradient scale
    close(loss.detach(), case["expected"]["loss"])
    (gradient,) = torch.autograd.grad(loss, tokens[0])
    close(gradient, padded(case["expected"].get("grad_log_prob", case["expected"].get("grad"))), relative=2e-5)
    means = {key: value.sum() / tokens[3].sum() for key, value in result.metrics.items()}
    theirs = case["expected"]["metrics"]
    if sum_of_clip_fractions and "actor/pg_clipfrac" in theirs and "clip_fraction_low" in means:
        close(means["clip_fraction_low"] + means["clip_fraction_high"], theirs["actor/pg_clipfrac"])
    if "clip_fraction_dual" in means:
        close(means["clip_fraction_dual"], theirs["actor/pg_clipfrac_lower"])
    return means, theirs


PPO_CASES = ["ppo_vanilla", "ppo_vanilla_seqmean", "ppo_vanilla_isw", "ppo_vanilla_global", "ppo_vanilla_onpolicy_adv1"]


@pytest.mark.parametrize("name", PPO_CASES)
def test_ppo_gives_loss_gradient_and_metrics_of_the_case(name):
    means, theirs = check_loss(name, lambda *x: ppo_clip_loss(*x[:4], dual_clip=3.0))
    close(means["approx_kl_k1"], theirs["actor/ppo_kl"])


def test_the_log_ratio_is_bounded_as_in_the_case():
    case = CASES["ppo_ratio_clamp"]
    mask = torch.ones(2, dtype=torch.bool)
    result = ppo_clip_loss(padded(case["input"]["new"]), padded(case["input"]["old"]), padded(case["input"]["adv"]), mask, dual_clip=3.0)
    close(result.terms.mean(), case["expected"]["loss"])
    close(result.metrics["approx_kl_k1"].mean(), case["expected"]["metrics"]["actor/ppo_kl"])
    close(result.metrics["clip_fraction_dual"].mean(), case["expected"]["metrics"]["actor/pg_clipfrac_lower"])
    # Their clip fraction of 0 compares e**20 with a bound that it does not show; r far below 1 - 0.2 with A > 0 is not clipped here either,
    # but r = e**20 with A < 0 only meets the dual bound: none is held by 1 +- 0.2.
    held = result.metrics["clip_fraction_low"] + result.metrics["clip_fraction_high"]
    close(held.mean(), case["expected"]["metrics"]["actor/pg_clipfrac"])


@pytest.mark.parametrize(("name", "divergence"), [("dppo_tv", "tv"), ("dppo_kl", "kl")])
def test_dppo_gives_loss_gradient_and_metrics_of_the_case(name, divergence):
    check_loss(name, lambda *x: dppo_loss(*x[:4], divergence=divergence))


def test_sapo_gives_the_case_in_the_mode_it_always_uses():
    check_loss("sapo", lambda *x: sapo_loss(*x[:4]), mode="seq-mean-token-mean")


def test_gpg_loss_gives_the_case():
    check_loss("gpg", lambda *x: reinforce_loss(*x[:4]))


def test_weighted_reinforce_gives_the_case():
    check_loss("reinforce_is", lambda *x: reinforce_loss(*x[:4]))


def test_geometric_mean_loss_gives_the_case_as_a_sequence_mean():
    means, theirs = check_loss(
        "geo_mean", lambda *x: gmpo_loss(*x, clip_low=0.2, clip_high=0.2), mode="seq-mean-token-mean", sum_of_clip_fractions=False
    )
    close(means["clip_fraction_high"], theirs["actor/pg_clipfrac"])
    # Their lower fraction (2/7) counts the token with A < 0 and r = e**1.5 too, which the bound does not hold: its gradient is not 0.
    close(means["clip_fraction_low"], 1 / 7)


def test_geometric_mean_loss_uses_the_global_denominators():
    # Theirs takes the mean over the local sequences whatever the global numbers are, so it grows with the number of micro-batches.
    case, tokens, cu_seqlens = loss_case("geo_mean_global_ignored")
    info = case["input"]["config"]["global_batch_info"]
    terms = gmpo_loss(*tokens, cu_seqlens, clip_low=0.2, clip_high=0.2).terms
    loss = aggregate(terms, tokens[3], cu_seqlens, "seq-mean-token-mean", denominators_of(tokens[3], cu_seqlens, info))
    close(loss.detach(), case["expected"]["loss"] * 2 / info["global_batch_size"])


def test_kl_cov_gives_the_case():
    def compute(log_probs, old, advantages, mask, cu_seqlens):
        keys = token_keys(torch.arange(2), cu_seqlens, 8)
        selected = select_kl_cov(log_probs, advantages, mask, keys, num_tokens=7, fraction=0.3)
        return kl_cov_loss(log_probs, old, advantages, mask, selected, coefficient=1.0)

    means, _ = check_loss("kl_cov", compute)
    close(means["selected_fraction"], 2 / 7)


def test_clip_cov_without_candidates_gives_the_case():
    def compute(log_probs, old, advantages, mask, cu_seqlens):
        keys = token_keys(torch.arange(2), cu_seqlens, 8)
        selected = select_clip_cov(log_probs, old, advantages, mask, keys, num_tokens=7)
        return clip_cov_loss(log_probs, old, advantages, mask, selected)

    case, tokens, cu_seqlens = loss_case("clip_cov_none")
    result = compute(*tokens, cu_seqlens)
    loss = aggregate(result.terms, tokens[3], cu_seqlens, "token-mean", denominators_of(tokens[3], cu_seqlens))
    close(loss.detach(), case["expected"]["loss"])
    (gradient,) = torch.autograd.grad(loss, tokens[0])
    close(gradient, padded(case["expected"]["grad_log_prob"]), relative=2e-5)
    # Their clip fraction counts the tokens left out for their covariance; ours is selected_fraction.
    assert result.metrics["selected_fraction"].sum() == 0


# -- value loss ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["value_loss_modes", "value_loss_global", "value_loss_clip0.2"])
def test_value_loss_gives_the_case(name):
    case = CASES[name]
    given = case["input"]
    mask, cu_seqlens = mask_of(given["mask"])
    result = value_loss(padded(given["vpreds"]), padded(given["values"]), padded(given["returns"]), mask, clip=given["cliprange_value"])
    expected = case["expected"] if "token-mean" in case["expected"] else {"token-mean": case["expected"]}
    for mode, values in expected.items():
        info = {"batch_num_tokens": given["batch_num_tokens"], "global_batch_size": 0} if "dp_size" in given else None
        loss = aggregate(result.terms, mask, cu_seqlens, mode, denominators_of(mask, cu_seqlens, info, norm_constant=4))
        close(loss * given.get("dp_size", 1), values["loss"])
        close(result.metrics["clip_fraction"].sum() / mask.sum(), values["clipfrac"])


def test_every_case_of_this_area_is_used_or_listed_here():
    used_elsewhere = {"partition", "workload", "micro_batches", "micro_batches_strict", "group_balance", "ulysses"}
    text = Path(__file__).read_text()
    not_built = {"response_mask_eos"}
    for name, case in CASES.items():
        assert case["area"] in used_elsewhere or name in not_built or f'"{name}"' in text, name


def test_nan_in_the_file_means_zero_over_zero():
    assert all(math.isnan(float(CASES["agg_all_masked"]["expected"][mode])) for mode in AGGREGATION_MODES if mode != "token-sum")
