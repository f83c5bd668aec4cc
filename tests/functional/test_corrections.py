"""Importance correction, overlong and zero-variance filters, metrics as pairs."""

import math
import statistics

import pytest
import torch

from lightning_rlbatch.functional.aggregation import Denominators, aggregate
from lightning_rlbatch.functional.filters import drop_samples, overlong_penalty, should_resample, zero_variance_groups
from lightning_rlbatch.functional.importance import effective_sample_size, effective_sample_size_sums, importance_weights
from lightning_rlbatch.functional.metrics import (
    add_pairs,
    explained_variance,
    explained_variance_sums,
    length_metrics,
    quotients,
    sample_mean,
    token_mean,
)
from lightning_rlbatch.functional.peers import ALONE

NAN = float("nan")
CU_SEQLENS = torch.tensor([0, 4, 6, 9], dtype=torch.int32)
MASK = torch.tensor([0, 1, 1, 1, 0, 1, 0, 0, 0], dtype=torch.bool)  # the third sample has no response token
NEW = torch.tensor([NAN, -1.0, -0.5, -2.0, NAN, -0.1, NAN, NAN, NAN], dtype=torch.float64)
ROLLOUT = torch.tensor([NAN, -2.0, -0.6, -1.0, math.inf, -2.1, NAN, NAN, -math.inf], dtype=torch.float64)
SAMPLES = [[1, 2, 3], [5]]


def slow_ratios(level):
    out = {}
    for tokens in SAMPLES:
        deltas = [(NEW[t] - ROLLOUT[t]).item() for t in tokens]
        for t, delta in zip(tokens, deltas):
            out[t] = math.exp({"token": delta, "sequence": sum(deltas), "sequence-mean": statistics.fmean(deltas)}[level])
    return out


def test_an_importance_mask_of_numbers_is_refused_with_what_to_pass():
    with pytest.raises(TypeError, match=r"Pass mask.bool\(\)"):
        importance_weights(NEW, ROLLOUT, MASK.float(), CU_SEQLENS)


@pytest.mark.parametrize("level", ["token", "sequence", "sequence-mean"])
def test_truncated_weights_are_ratios_held_between_the_bounds(level):
    result = importance_weights(NEW, ROLLOUT, MASK, CU_SEQLENS, level=level, upper=2.0, lower=0.5)
    for t in range(9):
        expected = min(max(slow_ratios(level)[t], 0.5), 2.0) if MASK[t] else 0.0
        assert result.weights[t].item() == pytest.approx(expected, rel=1e-12)
    assert torch.equal(result.response_mask, MASK)
    for t, ratio in slow_ratios(level).items():
        assert result.metrics["importance_weight"][t].item() == pytest.approx(ratio, rel=1e-12)
        assert result.metrics["importance_clipped"][t].item() == (ratio > 2.0 or ratio < 0.5)
    assert all(metric.isfinite().all() and metric[~MASK].eq(0).all() for metric in result.metrics.values())


@pytest.mark.parametrize("level", ["token", "sequence", "sequence-mean"])
def test_masked_weights_leave_the_response_mask_so_that_numerator_and_denominator_shrink_together(level):
    result = importance_weights(NEW, ROLLOUT, MASK, CU_SEQLENS, level=level, mode="mask", upper=2.0, lower=0.5)
    kept = {t: ratio for t, ratio in slow_ratios(level).items() if 0.5 <= ratio <= 2.0}
    assert result.response_mask.nonzero().flatten().tolist() == sorted(kept)
    for t in range(9):
        assert result.weights[t].item() == pytest.approx(kept.get(t, 0.0), rel=1e-12)
    if kept:
        ones = torch.ones(9, dtype=torch.float64)
        denominators = Denominators.local(result.response_mask, CU_SEQLENS)
        assert aggregate(ones, result.response_mask, CU_SEQLENS, "token-mean", denominators).item() == 1.0


def test_the_behavior_kl_metric_is_the_k3_estimate():
    result = importance_weights(NEW, ROLLOUT, MASK, CU_SEQLENS)
    for t, ratio in slow_ratios("token").items():
        assert result.metrics["behavior_kl"][t].item() == pytest.approx(ratio - 1 - math.log(ratio), rel=1e-10)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"level": "word"}, "level to be 'token'"),
        ({"mode": "drop"}, "mode to be 'truncate' or 'mask'"),
        ({"upper": 1.0, "lower": 2.0}, "0 <= lower <= upper"),
        ({"upper": 0.0}, "upper > 0"),
    ],
)
def test_a_bad_correction_setting_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        importance_weights(NEW, ROLLOUT, MASK, CU_SEQLENS, **settings)


def test_effective_sample_size_is_one_for_equal_weights_and_adds_over_pieces():
    weights, mask = torch.tensor([1.0, 3.0, NAN, 2.0]), torch.tensor([True, True, False, True])
    whole = effective_sample_size(effective_sample_size_sums(weights, mask))
    assert whole.item() == pytest.approx(36 / (3 * 14))
    pieces = effective_sample_size_sums(weights[:1], mask[:1]) + effective_sample_size_sums(weights[1:], mask[1:])
    assert effective_sample_size(pieces).item() == pytest.approx(whole.item(), rel=1e-12)
    assert effective_sample_size(torch.zeros(3)).item() == 0


def test_overlong_samples_leave_the_response_mask():
    keep = torch.tensor([True, False, True])
    assert drop_samples(MASK, CU_SEQLENS, keep).nonzero().flatten().tolist() == [1, 2, 3]


@pytest.mark.parametrize(("length", "expected"), [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (101, -1.0), (5000, -1.0)])
def test_the_soft_penalty_falls_linearly_over_the_buffer(length, expected):
    penalty = overlong_penalty(torch.tensor([length]), max_length=100, buffer=20)
    assert penalty.item() == pytest.approx(expected)
    assert overlong_penalty(torch.tensor([length]), max_length=100, buffer=20, factor=3.0).item() == pytest.approx(3 * expected)


def test_a_buffer_longer_than_the_limit_is_refused():
    with pytest.raises(ValueError, match="between 1 and max_length=100 but got 101"):
        overlong_penalty(torch.tensor([1]), max_length=100, buffer=101)


def test_groups_without_variance_are_found_by_id_and_told_apart():
    rewards = torch.tensor([1.0, 0.0, 0.1, NAN, 1.0, 1.0, NAN, 0.1, 0.0, 0.1])
    groups = torch.tensor([5, 2, 9, 5, 5, 7, 8, 9, 7, 9])
    found = zero_variance_groups(rewards, groups)
    # 5: all right (one without a reward); 2: alone, wrong; 9: all 0.1, wrong; 7: has variance; 8: no reward at all, counts nowhere.
    counts = (found.num_groups, found.num_zero, found.num_all_right, found.num_all_wrong)
    assert [int(x) for x in counts] == [4, 3, 1, 2]
    assert found.samples.tolist() == [True, True, True, True, True, False, True, True, False, True]
    assert int(zero_variance_groups(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).num_groups) == 0


def test_resampling_stops_when_there_is_enough_or_the_limit_is_reached():
    assert should_resample(0, 1, 1, 2)
    assert not should_resample(0, 1, 2, 2)
    assert not should_resample(1, 1, 1, 2)
    with pytest.raises(ValueError, match="max_attempts to be at least 1 but got 0"):
        should_resample(0, 1, 1, 0)


def test_metrics_of_pieces_add_up_and_a_piece_may_lack_a_name():
    x, mask = torch.tensor([1.0, 2.0, NAN, 6.0]), torch.tensor([True, True, False, True])
    first = {"a": token_mean(x[:1], mask[:1])}
    second = {"a": token_mean(x[1:], mask[1:]), "b": sample_mean(torch.tensor([NAN, 4.0, 0.0]))}
    assert quotients(add_pairs(first, second)) == {"a": 3.0, "b": 2.0}
    assert add_pairs({}, first) == first
    (value,) = quotients({"nothing": token_mean(x[2:3], mask[2:3])}).values()
    assert math.isnan(value)
    assert sample_mean(torch.tensor([True, False]))[0] == 1


def test_explained_variance_is_the_share_of_the_variance_of_returns_and_adds_over_pieces():
    generator = torch.Generator().manual_seed(0)
    returns, noise = torch.randn(2, 500, generator=generator, dtype=torch.float64)
    values = 0.7 * returns + 0.1 * noise + 3
    mask = torch.rand(500, generator=generator) < 0.8
    values[~mask], returns[~mask] = NAN, NAN
    expected = 1 - (returns - values)[mask].var() / returns[mask].var()
    pieces = zip(values.split(123), returns.split(123), mask.split(123))
    total = sum(explained_variance_sums(*piece) for piece in pieces)
    assert explained_variance(total).item() == pytest.approx(expected.item(), rel=1e-10)
    constant = torch.full((3,), 0.1)
    assert math.isnan(explained_variance(explained_variance_sums(constant, constant, torch.ones(3, dtype=torch.bool))))
    assert math.isnan(explained_variance(torch.zeros(5)))


def test_explained_variance_tells_returns_far_from_zero_from_returns_that_do_not_vary():
    mask = torch.ones(50_000, dtype=torch.bool)
    for value in (0.1, 1 / 3, 1e6 + 0.1):
        constant = torch.full(mask.shape, value, dtype=torch.float64)
        assert explained_variance(explained_variance_sums(constant * 0, constant, mask)).isnan()
        varied = value + torch.arange(50_000, dtype=torch.float64) % 3
        found = explained_variance(explained_variance_sums(varied + torch.arange(50_000) % 2 * 0.1, varied, mask))
        assert float(found) == pytest.approx(1 - 0.0025 / (2 / 3), abs=2e-3)


def test_length_metrics_use_the_smallest_length_that_95_percent_do_not_exceed():
    lengths = torch.arange(1, 101)
    metrics = length_metrics(lengths[torch.randperm(100)], lengths > 98)
    assert metrics == {"mean": 50.5, "p95": 95.0, "max": 100.0, "truncated": pytest.approx(0.02)}
    assert length_metrics(lengths[:0], lengths[:0] > 0) == {}
    assert length_metrics(lengths[:1], lengths[:1] > 0)["p95"] == 1.0


def test_one_rank_alone_sees_its_own_rows():
    rows, own = ALONE.rows(torch.arange(3))
    assert torch.equal(rows[own], torch.arange(3))
    assert ALONE.sum(torch.tensor([2.0])).tolist() == [2.0]
