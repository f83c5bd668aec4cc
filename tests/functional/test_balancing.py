import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlbatch.functional.balancing import balanced_partition, karmarkar_karp
from lightning_rlbatch.functional.bounds import equal_partition_bound, free_partition_bound
from lightning_rlbatch.functional.exchange import Exchange, level, settle
from lightning_rlbatch.functional.workload import attention_workload

DATA = Path(__file__).parent.parent / "data"
VALUES = [
    case
    for case in json.loads((DATA / "algorithm_values.json").read_text())["cases"]
    if case["area"] == "partition" and case["function_in_verl"] == "get_seqlen_balanced_partitions"
]
CASES = [case for case in json.loads((DATA / "balance_cases.json").read_text())["cases"] if case["kind"] == "equal_count_partition"]
weight_lists = st.lists(st.one_of(st.integers(0, 12), st.integers(0, 10**6), st.integers(0, 2**45)), max_size=60)


def loads(weights, parts):
    return [sum(int(weights[i]) for i in part) for part in parts]


def assert_is_a_partition(parts, num_samples, num_parts, equal_size):
    assert len(parts) == num_parts
    assert sorted(itertools.chain.from_iterable(parts)) == list(range(num_samples))
    if equal_size:
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def slow_differencing(weights, num_parts, equal_size):
    """The largest differencing method with every part of every partial partition spelled out."""
    ascending = sorted(range(len(weights)), key=lambda i: (weights[i], i))
    width = num_parts if equal_size else 1
    partials = []
    for start in range(0, len(weights), width):
        row = [(weights[i], 1, [i]) for i in ascending[start : start + width]]
        partials.append(sorted(row + [(0, 0, [])] * (num_parts - len(row)), reverse=True))
    while len(partials) > 1:
        first, second = (take_widest(partials) for _ in range(2))
        partials.append(sorted(((a[0] + b[0], a[1] + b[1], a[2] + b[2]) for a, b in zip(first, reversed(second))), reverse=True))
    return [part[0] for part in partials[0]]


def take_widest(partials):
    most = partials[0]
    for partial in partials[1:]:
        spread, best = partial[0][0] - partial[-1][0], most[0][0] - most[-1][0]
        if spread > best or (spread == best and partial[0] > most[0]):
            most = partial
    partials.remove(most)
    return most


def smallest_heaviest(weights, num_parts, equal_size):
    """Try every assignment."""
    best = sum(weights)
    for owners in itertools.product(range(num_parts), repeat=len(weights)):
        sizes = [owners.count(p) for p in range(num_parts)]
        if not equal_size or max(sizes) - min(sizes) <= 1:
            best = min(best, max(sum(w for w, o in zip(weights, owners) if o == p) for p in range(num_parts)))
    return best


@pytest.mark.parametrize("case", VALUES, ids=lambda case: case["id"])
def test_differencing_gives_the_part_sums_that_verl_gives(case):
    lengths = case["input"]["lengths"]
    weights = lengths if case["input"]["weights"] == "tokens" else attention_workload(lengths)
    parts = karmarkar_karp(weights, case["input"]["k"], equal_size=case["input"]["equal_size"])
    assert loads(lengths, parts) == case["expected"]["sums"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=24), st.integers(1, 6), st.booleans())
def test_differencing_equals_its_slow_reference_ties_included(weights, num_parts, equal_size):
    if equal_size:
        weights = weights[: len(weights) // num_parts * num_parts]
        if not weights:
            return
    parts = karmarkar_karp(weights, num_parts, equal_size=equal_size)
    assert loads(weights, parts) == slow_differencing(weights, num_parts, equal_size)


@settings(max_examples=1000, deadline=None)
@given(weight_lists, st.integers(1, 12), st.booleans(), st.sampled_from([karmarkar_karp, balanced_partition]))
def test_a_partition_holds_every_sample_once_with_sizes_as_asked(weights, num_parts, equal_size, method):
    parts = method(weights, num_parts, equal_size=equal_size)
    assert_is_a_partition(parts, len(weights), num_parts, equal_size)
    assert loads(weights, parts) == sorted(loads(weights, parts), reverse=True)
    assert parts == method(torch.tensor(weights, dtype=torch.int64), num_parts, equal_size=equal_size)


@settings(max_examples=300, deadline=None)
@given(weight_lists.filter(len), st.integers(1, 8), st.booleans())
def test_the_best_partition_is_between_the_bound_and_plain_differencing(weights, num_parts, equal_size):
    bound = (equal_partition_bound if equal_size else free_partition_bound)(np.array(weights), num_parts)
    heaviest = max(loads(weights, balanced_partition(weights, num_parts, equal_size=equal_size)))
    assert bound <= heaviest
    assert heaviest <= max(loads(weights, karmarkar_karp(weights, num_parts, equal_size=equal_size))) * 1.12 + 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=7), st.integers(1, 3), st.booleans())
def test_bounds_never_exceed_the_optimum_and_small_partitions_reach_it(weights, num_parts, equal_size):
    optimum = smallest_heaviest(weights, num_parts, equal_size)
    bound = (equal_partition_bound if equal_size else free_partition_bound)(np.array(weights), num_parts)
    assert bound <= optimum
    if equal_size:
        assert equal_partition_bound(np.array(weights), num_parts, strong=False) <= bound
    assert max(loads(weights, balanced_partition(weights, num_parts, equal_size=equal_size, tolerance=0.0))) <= optimum * 1.1


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_equal_counts_reach_the_goal_of_every_stored_case(case):
    weights = attention_workload(case["lengths"], coefficient=case["coef"])
    parts = balanced_partition(weights, case["parts"], equal_size=True)
    assert_is_a_partition(parts, len(weights), case["parts"], True)
    assert max(loads(weights, parts)) <= case["goal_max_load"]
    bound = equal_partition_bound(np.array(weights), case["parts"], strong=len(weights) <= 2048)
    assert bound <= case["best_known_max_load"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_free_counts_come_within_a_thousandth_of_the_best_known(case):
    weights = attention_workload(case["lengths"], coefficient=case["coef"])
    heaviest = max(loads(weights, balanced_partition(weights, case["parts"])))
    assert heaviest <= case["best_known_max_load_unequal_counts"] * 1.001


@pytest.mark.parametrize("shape", ["smooth", "at_the_cap", "one_giant"])
def test_many_samples_per_part_reach_the_bound(shape):
    generator = np.random.default_rng(0)
    lengths = np.minimum(np.exp(7.3 + generator.standard_normal(8192)), 16384).astype(np.int64)
    if shape == "at_the_cap":
        lengths[generator.random(8192) < 0.15] = 16384
    if shape == "one_giant":
        lengths = np.minimum(lengths, 4000)
        lengths[17] = 40000
    weights = np.array(attention_workload(lengths))
    heaviest = max(loads(weights, balanced_partition(weights, 128, equal_size=True)))
    assert heaviest <= equal_partition_bound(weights, 128, strong=False) * (1 + 2e-5)


def test_equal_lengths_are_spread_evenly():
    assert [len(part) for part in balanced_partition([7] * 12, 5)] == [3, 3, 2, 2, 2]


def test_int32_lengths_whose_workload_overflows_int32_are_balanced_as_int64():
    lengths = torch.arange(36_000, 40_000, 100, dtype=torch.int32)
    wide = attention_workload(lengths.long())
    assert attention_workload(lengths) == wide
    assert sum(wide) > 2**31
    parts = balanced_partition(wide, 4, equal_size=True)
    assert max(loads(wide, parts)) / (sum(wide) / 4) < 1.0001


def test_weights_too_large_for_exact_search_keys_still_balance():
    weights = [(2**50) + i * 12345 for i in range(800)]
    sums = loads(weights, balanced_partition(weights, 8, equal_size=True))
    assert max(sums) - min(sums) < 2e-5 * max(sums)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 1000), min_size=12, max_size=12), st.integers(1, 3), st.booleans())
def test_exchanges_never_raise_a_row_maximum_nor_break_the_token_cap(weights, size, tight):
    tokens = np.array([*(w // 3 + 1 for w in weights), 0])
    members = np.array([[0, 1, 2, 12], [3, 4, 5, 12], [6, 7, 8, 12], [9, 10, 11, 12]])
    cap = int(tokens[members].sum(axis=1).max()) + (0 if tight else 200)
    search = Exchange(np.array([*weights, 0]), members.copy(), False, num_rows=2, tokens=tokens, budget=cap)
    before = search.row_maxima()
    target = np.zeros(4, dtype=np.int64)
    level(search, target, 3)
    settle(search, target, (size,), 5)
    assert (search.row_maxima() <= before).all()
    assert sorted(search.members[search.members < 12].tolist()) == list(range(12))
    assert tokens[search.members].sum(axis=1).max() <= cap
    assert (search.load == search.weights[search.members].sum(axis=1)).all()
    assert all((part < 12).any() for part in search.members), "an exchange emptied a bucket"


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match=r"`num_parts` must be at least 1 but got 0"):
        balanced_partition([1, 2], 0)
    with pytest.raises(TypeError, match=r"`num_parts` must be an int but got 2\.0"):
        karmarkar_karp([1, 2], 2.0)
    with pytest.raises(ValueError, match="sample 1 has -4"):
        balanced_partition([1, -4], 2)
    with pytest.raises(TypeError, match="`weights` must hold integers but got float64"):
        karmarkar_karp([1.5], 1)
