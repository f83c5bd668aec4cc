"""Advantages against slow loops; groups by id; missing rewards; the same on any number of ranks."""

import dataclasses
import itertools
import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rl_cases import run_ranks

from lightning_rlbatch.functional.advantages import discounted_returns, gae, merge_moments, moments, place_rewards, token_sums, whiten
from lightning_rlbatch.functional.advantages_group import (
    gdpo_advantages,
    gpg_advantages,
    group_advantages,
    opo_advantages,
    pass_at_k_advantages,
    remax_advantages,
    rloo_advantages,
)
from lightning_rlbatch.functional.estimators import GAE, AdvantageEstimator, ReinforcePlusPlus
from lightning_rlbatch.functional.estimators_group import (
    GDPO,
    GPG,
    GRPO,
    OPO,
    RLOO,
    DrGRPO,
    PassAtK,
    PassAtKTraining,
    ReinforcePlusPlusBaseline,
    ReMax,
)
from lightning_rlbatch.functional.optimal_token_baseline import OTB, optimal_token_baseline
from lightning_rlbatch.functional.pass_at_k import best_of_k, pass_at_k_training_advantages
from lightning_rlbatch.functional.peers import Peers

NAN = float("nan")


def double(values):
    return torch.tensor(values, dtype=torch.float64)


# -- per token -----------------------------------------------------------------------------------------------------------------


def slow_gae(rewards, values, mask, cu_seqlens, gamma, lam):
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    for start, end in itertools.pairwise(cu_seqlens):
        next_value = next_advantage = 0.0
        for t in reversed(range(start, end)):
            if not mask[t]:
                continue
            delta = rewards[t] + gamma * next_value - values[t]
            next_advantage = delta + gamma * lam * next_advantage
            next_value = values[t]
            advantages[t], returns[t] = next_advantage, next_advantage + values[t]
    return advantages, returns


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.booleans(), max_size=12), max_size=5),
    st.sampled_from([0.0, 0.5, 0.97, 1.0]),
    st.sampled_from([0.0, 0.9, 1.0]),
    st.integers(0, 10),
)
def test_gae_equals_the_backward_loop_for_any_masks_and_any_lengths(masks, gamma, lam, seed):
    mask = [bit for row in masks for bit in row]
    cu_seqlens = [0]
    for row in masks:
        cu_seqlens.append(cu_seqlens[-1] + len(row))
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, len(mask), generator=generator, dtype=torch.float64)
    hide = torch.tensor(mask, dtype=torch.bool)
    expected = slow_gae(rewards.tolist(), values.tolist(), mask, cu_seqlens, gamma, lam)
    rewards[~hide], values[~hide] = NAN, math.inf
    actual = gae(rewards, values, hide, torch.tensor(cu_seqlens, dtype=torch.int32), gamma, lam)
    for ours, slow in zip(actual, expected):
        torch.testing.assert_close(ours, double(slow), rtol=1e-10, atol=1e-10)
    returns = discounted_returns(rewards, hide, torch.tensor(cu_seqlens), gamma)
    torch.testing.assert_close(returns, actual[1] if lam == 1.0 else returns, rtol=1e-10, atol=1e-10)


def test_a_turn_of_the_user_between_two_turns_is_stepped_over_undiscounted():
    gap = torch.tensor([False, True, False, False, True])
    dense = torch.tensor([False, True, True])
    with_gap = gae(double([0, 0, NAN, 7, 1]), double([9, 0.3, 9, NAN, 0.6]), gap, torch.tensor([0, 5]), 0.9, 0.8)
    without = gae(double([0, 0, 1]), double([9, 0.3, 0.6]), dense, torch.tensor([0, 3]), 0.9, 0.8)
    for a, b in zip(with_gap, without):
        assert torch.equal(a[gap], b[dense])


def test_a_response_of_30000_tokens_is_no_loop_over_tokens():
    mask = torch.ones(30_000, dtype=torch.bool)
    rewards = torch.zeros(30_000, dtype=torch.float32)
    rewards[-1] = 1
    returns = discounted_returns(rewards, mask, torch.tensor([0, 30_000]), gamma=0.9999)
    assert returns[0].item() == pytest.approx(0.9999**29_999, rel=1e-6)


def test_the_reward_lies_at_the_last_response_token_and_sums_back():
    mask = torch.tensor([False, True, True, False, False, True, False, False])
    cu_seqlens = torch.tensor([0, 4, 6, 8])
    placed = place_rewards(double([2.0, NAN, 5.0]), mask, cu_seqlens)
    assert placed.tolist() == [0, 0, 2, 0, 0, 0, 0, 0]  # no reward: 0; no response token: nowhere
    assert token_sums(placed, mask, cu_seqlens).tolist() == [2, 0, 0]


def test_discounts_outside_the_unit_interval_are_refused():
    one, mask = torch.ones(1), torch.ones(1, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"gamma to be between 0 and 1 but got 1\.5"):
        discounted_returns(one, mask, torch.tensor([0, 1]), 1.5)
    with pytest.raises(ValueError, match=r"lam to be between 0 and 1 but got -1"):
        gae(one, one, mask, torch.tensor([0, 1]), 1.0, -1)


def test_moments_of_pieces_merge_to_those_of_the_whole_even_far_from_zero():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1000, generator=generator, dtype=torch.float64) + 1e6
    mask = torch.rand(1000, generator=generator) < 0.7
    sizes = [1, 0, 600, 398, 1]
    pieces = torch.stack([moments(part, keep) for part, keep in zip(x.split(sizes), mask.split(sizes))])
    merged = merge_moments(pieces)
    assert merged[0] == mask.sum()
    assert merged[1].item() == pytest.approx(x[mask].mean().item(), rel=1e-14)
    assert merged[2].item() == pytest.approx((x[mask] - x[mask].mean()).square().sum().item(), rel=1e-8)


@pytest.mark.parametrize("shift_mean", [True, False])
def test_whitening_over_ranks_equals_whitening_in_one_process(shift_mean):
    x = double([1.0, NAN, 4.0, -2.0, 0.5, 3.0])
    mask = torch.tensor([True, False, True, True, True, True])
    whole = whiten(x, mask, shift_mean=shift_mean)
    kept = x[mask]
    std = statistics.stdev(kept.tolist())
    expected = (kept - kept.mean()) / std + (0 if shift_mean else kept.mean())
    torch.testing.assert_close(whole[mask], expected, rtol=1e-7, atol=1e-9)
    cuts = [slice(0, 1), slice(1, 2), slice(2, 2), slice(2, 6)]  # one token; nothing unmasked; nothing at all; the rest

    def work(rank, peers):
        mine, keep = x[cuts[rank]], mask[cuts[rank]]
        return whiten(mine, keep, shift_mean=shift_mean, global_moments=peers.moments(mine, keep))

    torch.testing.assert_close(torch.cat(run_ranks(4, work)), whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("count", [0, 1])
def test_whitening_nothing_or_one_token_is_finite_and_zero(count):
    mask = torch.zeros(4, dtype=torch.bool)
    mask[:count] = True
    assert whiten(torch.tensor([5.0, NAN, NAN, NAN]), mask).tolist() == [0, 0, 0, 0]


# -- per group -----------------------------------------------------------------------------------------------------------------


def slow_one(kind, i, rewards, group, lengths):
    values, others = [rewards[j] for j in group], [rewards[j] for j in group if j != i]
    mean, std = statistics.fmean(values), statistics.stdev(values)
    if kind == "grpo":
        return (rewards[i] - mean) / (std + 1e-6)
    if kind == "rloo":
        return rewards[i] - statistics.fmean(others)
    if kind == "opo":
        return rewards[i] - sum(lengths[j] * rewards[j] for j in group) / sum(lengths[j] for j in group)
    if kind.startswith("best of 2"):
        subsets = [max(pair) for pair in itertools.combinations(values, 2)]
        own = [max(values[a], values[b]) for a, b in itertools.combinations(range(len(group)), 2) if i in (group[a], group[b])]
        scale = statistics.pstdev(subsets) + 1e-6 if kind.endswith("std") else 1.0
        return (statistics.fmean(own) - statistics.fmean(subsets)) / scale
    if kind == "pass_at_k":
        return (max(values) - max(others)) / (std + 1e-6)
    return rewards[i] - mean


def slow(kind, rewards, groups, lengths=None):
    """Plain Python over each group's valid rewards."""
    out = [0.0] * len(rewards)
    valid = [i for i, r in enumerate(rewards) if not math.isnan(r)]
    members = {g: [i for i in valid if groups[i] == g] for g in set(groups)}
    useful = sum(len(m) for m in members.values() if len({rewards[i] for i in m}) > 1)
    for group in members.values():
        values = [rewards[i] for i in group]
        if len(set(values)) < 2:
            continue
        for i in group:
            out[i] = slow_one(kind, i, rewards, group, lengths)
            if kind == "gpg":
                out[i] *= len(valid) / useful
    return out


FUNCTIONS = {
    "grpo": group_advantages,
    "dr_grpo": lambda r, g: group_advantages(r, g, normalize_by_std=False),
    "rloo": rloo_advantages,
    "opo": lambda r, g, lengths: opo_advantages(r, g, lengths),
    "gpg": gpg_advantages,
    "pass_at_k": pass_at_k_advantages,
    "best of 2 by std": lambda r, g: pass_at_k_training_advantages(r, g, k=2),
    "best of 2": lambda r, g: pass_at_k_training_advantages(r, g, k=2, normalize_by_std=False),
}


@pytest.mark.parametrize("kind", FUNCTIONS)
@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0.0, 1.0, 0.5, -2.0, 10.0, NAN]), st.integers(-1, 3), st.integers(1, 9)), max_size=14))
def test_group_estimators_equal_the_slow_loop_with_missing_rewards_in_any_order(kind, samples):
    rewards, groups, lengths = ([s[k] for s in samples] for k in range(3))
    extra = (torch.tensor(lengths),) if kind == "opo" else ()
    result = FUNCTIONS[kind](double(rewards), torch.tensor(groups, dtype=torch.int64), *extra)
    torch.testing.assert_close(result.advantages, double(slow(kind, rewards, groups, lengths)), rtol=1e-9, atol=1e-12)
    assert result.valid.tolist() == [not math.isnan(r) for r in rewards]


@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_singletons_and_equal_rewards_give_exactly_zero(kind, dtype):
    rewards = torch.tensor([0.1] * 7 + [5.0] + [1 / 3] * 3 + [NAN, 2.0], dtype=dtype)
    groups = torch.tensor([0] * 7 + [1] + [2] * 3 + [3, 3])  # the last group has one reward only
    extra = (torch.arange(1, 14),) if kind == "opo" else ()
    result = FUNCTIONS[kind](rewards, groups, *extra)
    assert result.advantages.tolist() == [0.0] * 13
    assert result.advantages.dtype == dtype


@pytest.mark.parametrize(("n", "right", "k"), [(8, 3, 4), (8, 1, 2), (16, 15, 8), (5, 0, 3), (200, 7, 100)])
def test_pass_at_k_of_right_and_wrong_answers_is_the_papers(n, right, k):
    rewards, groups = double([1.0] * right + [0.0] * (n - right)), torch.zeros(n, dtype=torch.int64)
    chance = 1 - math.comb(n - right, k) / math.comb(n, k)
    total, count = best_of_k(rewards, groups, k)
    assert (total.item(), count.item()) == (pytest.approx(chance, abs=1e-12), 1)
    advantages = pass_at_k_training_advantages(rewards, groups, k=k, eps=0.0).advantages
    if 0 < chance < 1:
        std = math.sqrt(chance * (1 - chance))
        wrong = (1 - chance - math.comb(n - right - 1, k - 1) / math.comb(n - 1, k - 1)) / std
        expected = [(1 - chance) / std] * right + [wrong] * (n - right)
        torch.testing.assert_close(advantages, double(expected), rtol=1e-9, atol=1e-9)
    else:
        assert advantages.eq(0).all()


def test_best_of_k_counts_groups_with_k_rewards_only():
    rewards = double([1.0, NAN, 0.0, 5.0, NAN, 2.0, 4.0, 3.0])
    groups = torch.tensor([0, 0, 0, 1, 1, 9, 9, 9])
    total, count = best_of_k(rewards, groups, 2)
    assert (total.item(), count.item()) == (pytest.approx(1 + (4 + 4 + 3) / 3), 2)
    assert [x.item() for x in best_of_k(rewards, groups, 4)] == [0, 0]
    assert [x.item() for x in best_of_k(rewards[:0], groups[:0], 1)] == [0, 0]
    with pytest.raises(ValueError, match="k to be at least 1"):
        best_of_k(rewards, groups, 0)


def test_rewards_may_be_a_list_with_none_and_groups_any_names():
    expected = group_advantages(double([1.0, NAN, 0.0, 1.0, 2.0, 4.0]), torch.tensor([2, 2, 2, 2, 1, 1]))
    result = group_advantages([1, None, 0, 1, 2, 4], ["b", "b", "b", "b", "a", "a"])
    torch.testing.assert_close(result.advantages.double(), expected.advantages, rtol=1e-6, atol=1e-6)
    assert result.valid.tolist() == expected.valid.tolist()
    for kind, compute in FUNCTIONS.items():
        extra = ([3, 1, 2],) if kind == "opo" else ()
        whole = compute(torch.tensor([1, 0, 3]), torch.tensor([0, 0, 0], dtype=torch.int32), *extra)
        fine = compute(double([1, 0, 3]), [0, 0, 0], *(torch.tensor(column) for column in extra))
        assert whole.advantages.dtype == torch.float32  # not rounded to integers
        torch.testing.assert_close(whole.advantages.double(), fine.advantages, rtol=1e-6, atol=1e-6)
    assert remax_advantages([1, None], [0.25, 0.25]).advantages.tolist() == [0.75, 0.0]
    assert gdpo_advantages([[1, 0], [0, 10]], [0, 0]).advantages.abs().max() < 1e-5


def slow_token_baseline(returns, log_probs, squares, groups, masks):
    """One cell after the other: group and number of the response token."""
    cells = {}
    for i, mask in enumerate(masks):
        weight, place = 0.0, 0
        for t in range(len(mask)):
            if mask[t]:
                weight += 1 - 2 * math.exp(log_probs[i][t]) + squares[i][t]
                cells.setdefault((groups[i], place), []).append((weight, returns[i][t], i, t))
                place += 1
    out = [[0.0] * len(mask) for mask in masks]
    for members in cells.values():
        total = sum(weight for weight, *_ in members)
        for _, _, i, t in members:
            out[i][t] = sum(weight * value for weight, value, *_ in members) / total
    return [x for row in out for x in row]


def test_the_optimal_token_baseline_equals_the_slow_loop_over_tokens():
    every = list(range(12))
    (_, groups, mask, cu_seqlens), extra = ITERATION.arguments(OTB(), every)
    returns = torch.randn(mask.shape[0], generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    found = optimal_token_baseline(returns, extra["log_probs"], extra["sum_pi_squared"], groups, mask, cu_seqlens)
    lengths = [len(m) for m in ITERATION.masks]
    rows = [[x.tolist() for x in field.split(lengths)] for field in (returns, extra["log_probs"], extra["sum_pi_squared"])]
    expected = slow_token_baseline(*rows, groups.tolist(), [m.tolist() for m in ITERATION.masks])
    torch.testing.assert_close(found, double(expected), rtol=1e-9, atol=1e-12)


def test_lists_integers_and_mixed_precision_are_taken_as_what_they_mean():
    mask, cu_seqlens = torch.tensor([0, 1, 1, 0, 1]), [0, 3, 5]
    expected = gae(double([0, 0, 1, 0, 2]), double([0, 0.5, 0.5, 0, 1]), mask.bool(), torch.tensor(cu_seqlens))
    mixed = gae(torch.tensor([0, 0, 1, 0, 2]), double([0, 0.5, 0.5, 0, 1]), mask, cu_seqlens)
    for ours, theirs in zip(mixed, expected):
        assert torch.equal(ours, theirs)
    assert place_rewards([1, None], mask, cu_seqlens).tolist() == [0, 0, 1, 0, 0]
    assert whiten(torch.tensor([1, 3, 9]), torch.tensor([1, 1, 0])).tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5, 0])
    for name, estimator in ESTIMATORS.items():
        if not (estimator.needs_baseline_rewards or estimator.needs_component_rewards or estimator.needs_sum_pi_squared):
            values = {"values": torch.zeros(5)} if estimator.needs_values else {}
            result = estimator([1, None], [0, 0], mask, cu_seqlens, **values)
            whole = estimator(double([1.0, NAN]), torch.tensor([0, 0]), mask.bool(), torch.tensor(cu_seqlens), **values)
            torch.testing.assert_close(result.advantages.double(), whole.advantages.double(), msg=name)
            assert result.valid.tolist() == [True, False]


def test_near_equal_rewards_far_from_zero_are_not_crushed():
    rewards = torch.tensor([1e6, 1e6 + 0.5, 1e6 + 1.0])  # E[x**2] - E[x]**2 would be 0 or negative in fp32
    result = group_advantages(rewards, torch.zeros(3, dtype=torch.int64)).advantages
    torch.testing.assert_close(result, torch.tensor([-1.0, 0.0, 1.0]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rewards", [[1e8, 1e8 + 0.5, 1e8 + 1], [0.1 + 1e-9, 0.1 + 2e-9, 0.1 + 3e-9], [2**24, 2**24 + 1, 2**24 + 2]])
def test_rewards_given_as_python_numbers_or_integers_are_compared_before_they_are_rounded(rewards):
    forms = [rewards, double(rewards), double(rewards).numpy()]
    if all(isinstance(reward, int) for reward in rewards):
        forms.append(torch.tensor(rewards))
    for form in forms:
        for compute in (
            group_advantages,
            rloo_advantages,
            pass_at_k_advantages,
            lambda x, ids: GRPO()(x, ids, torch.ones(6).bool(), [0, 2, 4, 6]),
        ):
            found, exact = compute(form, [0, 0, 0]).advantages, compute(double(rewards) - min(rewards), [0, 0, 0]).advantages
            torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-12)
            assert found.dtype == (torch.float64 if form is forms[1] else torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_rewards_have_fp32_advantages(dtype):
    rewards, groups = torch.tensor([1, 0, 0], dtype=dtype), torch.zeros(3, dtype=torch.int64)
    for kind, compute in FUNCTIONS.items():
        extra = (torch.tensor([3, 1, 2]),) if kind == "opo" else ()
        found = compute(rewards, groups, *extra).advantages
        assert found.dtype == torch.float32
        assert torch.equal(found, compute(rewards.float(), groups, *extra).advantages)


def test_equal_values_whiten_to_exactly_zero_and_groups_without_variance_need_no_eps():
    for value in (0.1, 1e8 + 0.3, -3e-9):
        values, mask = torch.full((10_001,), value, dtype=torch.float64), torch.ones(10_001, dtype=torch.bool)
        assert whiten(values, mask).eq(0).all()
    assert group_advantages([0.3, 0.3, 5.0], ["a", "a", "b"], eps=0.0).advantages.tolist() == [0, 0, 0]
    assert pass_at_k_advantages([0.3, 0.3, 5.0], ["a", "a", "b"], eps=0.0).advantages.tolist() == [0, 0, 0]


def test_estimators_number_groups_given_by_name_unless_other_ranks_number_them_too():
    mask, cu_seqlens = torch.ones(3, dtype=torch.bool), [0, 1, 2, 3]
    found = GRPO(normalize_by_std=False)([1, 0, 5], ["x", "x", "y"], mask, cu_seqlens).advantages
    assert found.tolist() == [0.5, -0.5, 0]
    with pytest.raises(TypeError, match="need integer ids, the same on all ranks, but got"):
        GRPO()([1, 0, 5], ["x", "x", "y"], mask, cu_seqlens, peers=Peers(lambda rows: (rows, [len(rows)])))


def test_one_missing_reward_of_four_leaves_the_statistics_of_three():
    rewards, groups = torch.tensor([1.0, NAN, 0.0, 1.0]), torch.tensor([2, 2, 2, 2])
    result = group_advantages(rewards, groups, normalize_by_std=False)
    torch.testing.assert_close(result.advantages, torch.tensor([1 / 3, 0.0, -2 / 3, 1 / 3]))
    assert result.valid.tolist() == [True, False, True, True]


def test_an_infinite_reward_is_an_error_that_names_the_sample():
    with pytest.raises(ValueError, match=r"the samples \[1\] have infinite ones"):
        group_advantages(torch.tensor([1.0, math.inf]), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match=r"must be \[N\] both"):
        group_advantages(torch.ones(3), torch.zeros(2, dtype=torch.int64))


def test_gdpo_adds_rewards_normalized_on_their_own():
    rewards = double([[1, 10], [0, 30], [1, NAN], [NAN, NAN]])
    groups = torch.zeros(4, dtype=torch.int64)
    result = gdpo_advantages(rewards, groups, double([2.0, 1.0]))
    first = slow("grpo", [1, 0, 1, NAN], [0] * 4)
    second = slow("grpo", [10, 30, NAN, NAN], [0] * 4)
    torch.testing.assert_close(result.advantages, double([2 * a + b for a, b in zip(first, second)]))
    assert result.valid.tolist() == [True, True, True, False]
    with pytest.raises(ValueError, match="one weight for each of 2 rewards"):
        gdpo_advantages(rewards, groups, double([1.0]))


def test_remax_subtracts_the_greedy_reward_and_needs_both():
    result = remax_advantages(double([1.0, 0.0, NAN, 2.0]), double([0.5, 0.5, 0.5, NAN]))
    assert result.advantages.tolist() == [0.5, -0.5, 0, 0]
    assert result.valid.tolist() == [True, True, False, False]


# -- estimators ------------------------------------------------------------------------------------------------------------------


ESTIMATORS = {
    "gae": GAE(gamma=0.95, lam=0.9),
    "reinforce++": ReinforcePlusPlus(gamma=0.9),
    "reinforce++ baseline": ReinforcePlusPlusBaseline(),
    "grpo": GRPO(),
    "grpo whitened": GRPO(whiten=True),
    "dr_grpo": DrGRPO(),
    "rloo": RLOO(),
    "gpg": GPG(scale=2.0),
    "pass_at_k": PassAtK(),
    "pass_at_k training": PassAtKTraining(k=2),
    "opo": OPO(),
    "otb": OTB(),
    "remax": ReMax(),
    "gdpo": GDPO(weights=[1.0, 0.5]),
}


class Iteration:
    """Twelve samples of four groups; sample 5 has no reward, sample 6 no response token."""

    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        responses = [1, 3, 2, 5, 4, 3, 0, 2, 7, 1, 2, 3]
        self.masks = [torch.tensor([False] + [True] * n + [False]) for n in responses]
        self.groups = torch.tensor([7, 3, 7, 9, 3, 9, 7, 3, 9, 7, 3, 4])
        self.components = torch.randint(0, 3, (12, 2), generator=generator).double()
        self.components[5] = NAN
        self.rewards = self.components @ double([1.0, 0.5])
        self.baseline = torch.rand(12, generator=generator, dtype=torch.float64)
        self.values = [torch.randn(len(m), generator=generator, dtype=torch.float64) for m in self.masks]
        self.token_rewards = [torch.randn(len(m), generator=generator, dtype=torch.float64) * 0.1 for m in self.masks]
        self.log_probs = [torch.rand(len(m), generator=generator, dtype=torch.float64).log() for m in self.masks]
        self.squares = [x.exp().square() + 0.1 * torch.rand(len(x), generator=generator, dtype=torch.float64) for x in self.log_probs]
        for fields in (self.values, self.token_rewards, self.log_probs, self.squares):
            for x, mask in zip(fields, self.masks):
                x[~mask] = NAN

    def arguments(self, estimator, indices):
        lengths = torch.tensor([0] + [len(self.masks[i]) for i in indices])

        def tokens(fields):
            return torch.cat([fields[i] for i in indices]) if indices else torch.zeros(0, dtype=torch.float64)

        index = torch.tensor(indices, dtype=torch.int64)
        extra = {"values": tokens(self.values), "baseline_rewards": self.baseline[index]}
        extra["component_rewards"] = self.components[index]
        if estimator.needs_sum_pi_squared:
            extra |= {"log_probs": tokens(self.log_probs), "sum_pi_squared": tokens(self.squares)}
        extra["token_rewards"] = None if estimator.needs_component_rewards else tokens(self.token_rewards)
        return (self.rewards[index], self.groups[index], tokens(self.masks).bool(), lengths.cumsum(0)), extra


ITERATION = Iteration()


def per_sample(estimator, indices, peers=None):
    """Return {sample: (its advantages, its returns, valid)}."""
    arguments, extra = ITERATION.arguments(estimator, indices)
    result = estimator(*arguments, **extra) if peers is None else estimator(*arguments, **extra, peers=peers)
    lengths = [len(ITERATION.masks[i]) for i in indices]
    return dict(zip(indices, zip(result.advantages.split(lengths), result.returns.split(lengths), result.valid)))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_sample_has_the_same_advantage_in_any_order_and_on_any_number_of_ranks(name):
    estimator = ESTIMATORS[name]
    alone = per_sample(estimator, list(range(12)))
    layouts = [
        [[11, 3, 7, 0, 5, 2, 9, 1, 10, 4, 8, 6]],
        [[4, 2, 0, 9, 7, 5], [1, 3, 6, 8, 10, 11]],
        [[6], [8, 1, 2], [], [0, 3, 4, 5, 7, 9, 10, 11]],  # a rank without response tokens; a rank without samples
    ]
    for layout in layouts:
        for part in run_ranks(len(layout), lambda rank, peers, layout=layout: per_sample(estimator, layout[rank], peers)):
            for i, found in part.items():
                for ours, expected in zip(found[:2], alone[i][:2]):
                    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)
                assert found[2] == alone[i][2]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages_are_zero_and_finite_outside_the_mask_and_for_samples_without_a_reward(name):
    for i, (advantages, returns, valid) in per_sample(ESTIMATORS[name], list(range(12))).items():
        mask = ITERATION.masks[i] & valid
        assert valid == (i != 5)
        assert advantages.isfinite().all()
        assert advantages[~mask].eq(0).all()
        assert returns[~mask].eq(0).all()
        assert not advantages.requires_grad


@pytest.mark.parametrize("name", [name for name, estimator in ESTIMATORS.items() if estimator.whiten])
def test_whitened_advantages_have_mean_zero_and_variance_one_over_tokens(name):
    found = per_sample(ESTIMATORS[name], list(range(12)))
    tokens = torch.cat([found[i][0][ITERATION.masks[i]] for i in found if i != 5])
    assert tokens.mean().item() == pytest.approx(0, abs=1e-12)
    assert tokens.var().item() == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_tokens_left_out_of_the_loss_count_in_the_statistics_but_not_in_the_whitening(name):
    estimator, (arguments, extra) = ESTIMATORS[name], ITERATION.arguments(ESTIMATORS[name], list(range(12)))
    trained = torch.arange(arguments[2].shape[0]) % 3 > 0
    found = estimator(*arguments, **extra, trained_mask=trained)
    raw = dataclasses.replace(estimator, whiten=False)(*arguments, **extra)
    kept = arguments[2] & trained & raw.valid[torch.repeat_interleave(arguments[3].diff())]
    expected = whiten(raw.advantages, kept) if estimator.whiten else torch.where(kept, raw.advantages, 0)
    torch.testing.assert_close(found.advantages, expected)
    assert torch.equal(found.returns, torch.where(kept, raw.returns, 0))


def test_kl_in_the_reward_enters_the_outcome_that_groups_compare():
    found = per_sample(DrGRPO(), list(range(12)))
    totals = {i: ITERATION.rewards[i] + ITERATION.token_rewards[i][ITERATION.masks[i]].sum() for i in (3, 8)}
    half = (totals[3] - totals[8]) / 2  # group 9 is samples 3, 5 and 8, and 5 has no reward
    torch.testing.assert_close(found[3][0][1], half)
    torch.testing.assert_close(found[8][0][1], -half)


def test_gae_returns_are_not_whitened_and_equal_raw_advantages_plus_values():
    found, raw = per_sample(GAE(gamma=0.95, lam=0.9), list(range(12))), per_sample(GAE(gamma=0.95, lam=0.9, whiten=False), list(range(12)))
    for i, (advantages, returns, valid) in raw.items():
        mask = ITERATION.masks[i] & valid
        torch.testing.assert_close(returns[mask], advantages[mask] + ITERATION.values[i][mask])
        assert torch.equal(found[i][1], returns)


def test_an_estimator_says_which_input_it_misses():
    arguments, _ = ITERATION.arguments(GRPO(), [0, 1])
    for estimator, name in ((GAE(), "values"), (ReMax(), "baseline_rewards"), (GDPO(), "component_rewards")):
        with pytest.raises(ValueError, match=f"{type(estimator).__name__} needs {name} but got None"):
            estimator(*arguments)
    with pytest.raises(ValueError, match=r"GDPO .* no place for token_rewards"):
        GDPO()(*arguments, component_rewards=torch.zeros(2, 2), token_rewards=torch.zeros(8))
    assert issubclass(GDPO, AdvantageEstimator)


def test_the_critic_may_have_a_lambda_of_its_own() -> None:
    generator = torch.Generator().manual_seed(5)
    rewards, values = torch.tensor([1.0, 0.0]), torch.rand(9, generator=generator)
    mask = torch.tensor([False, True, True, True, True, False, True, True, True])
    arguments = (rewards, torch.tensor([0, 1]), mask, torch.tensor([0, 5, 9]))
    both = GAE(gamma=0.9, lam=1.0, critic_lam=0.5, whiten=False)(*arguments, values=values)
    policy, critic = (GAE(gamma=0.9, lam=lam, whiten=False)(*arguments, values=values) for lam in (1.0, 0.5))
    assert torch.equal(both.advantages, policy.advantages)
    assert torch.equal(both.returns, critic.returns)
    assert not torch.allclose(both.returns, policy.returns)
