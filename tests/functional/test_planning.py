import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlbatch.functional.bounds import step_workload_bound
from lightning_rlbatch.functional.per_rank import count_micro_steps, plan_rank
from lightning_rlbatch.functional.plan import BatchPlan
from lightning_rlbatch.functional.plan_input import OversizeWarning
from lightning_rlbatch.functional.planning import plan_mini_batch, recut
from lightning_rlbatch.functional.rows import fewest_rows
from lightning_rlbatch.functional.workload import attention_workload, workload_array

DATA = Path(__file__).parent.parent / "data"
CASES = [case for case in json.loads((DATA / "balance_cases.json").read_text())["cases"] if case["kind"] == "microbatch_rows"]
VALUES = json.loads((DATA / "algorithm_values.json").read_text())["cases"]


@st.composite
def problems(draw):
    """Draw lengths and settings: few and many samples, ties, zeros, giants, groups, all planners."""
    group_size = draw(st.sampled_from([1, 1, 1, 2, 3]))
    largest = draw(st.sampled_from([1, 8, 100, 40_000, 3_000_000]))
    sample = draw(st.sampled_from([st.integers(0, largest), st.just(largest), st.one_of(st.integers(0, 5), st.integers(0, largest))]))
    lengths = draw(st.lists(sample, max_size=48))
    lengths = lengths[: len(lengths) // group_size * group_size]
    options = {
        "dp_size": draw(st.integers(1, 9)),
        "sp_size": draw(st.integers(1, 4)),
        "group_size": group_size,
        "balance": draw(st.booleans()),
        "equal_size": draw(st.booleans()),
        "planner": draw(st.sampled_from(["global", "global", "per_rank"])),
        "padded": draw(st.sampled_from([False, False, True])),
        "refine": draw(st.booleans()),
        "min_num_micro_steps": draw(st.sampled_from([1, 1, 4])),
        "num_micro_steps_multiple": draw(st.sampled_from([1, 1, 3])),
    }
    if draw(st.integers(0, 3)) == 0:
        options["micro_batch_size"] = group_size * draw(st.integers(1, 5))
    else:
        options["max_tokens_per_rank"] = draw(st.integers(1, 2 * largest))
        options["oversize"] = "isolate"
    return lengths, options


def cost_in_tokens(bucket, lengths, options):
    tokens = [lengths[i] for i in bucket]
    total = len(tokens) * max(tokens, default=0) if options.get("padded") else sum(tokens)
    return -(-total // options["sp_size"]) * options["sp_size"]


def assert_invariants(plan, lengths, options):
    """Every sample once; the cap, padding included; equal numbers of micro-steps; groups whole; counts as asked."""
    assert len(plan.assignment) == options["dp_size"]
    assert {len(rank) for rank in plan.assignment} == {plan.num_micro_steps}
    assert sorted(i for rank in plan.assignment for bucket in rank for i in bucket) == list(range(len(lengths)))
    size = options["group_size"]
    for rank in plan.assignment:
        for bucket in rank:
            groups = {i // size for i in bucket}
            assert sorted(bucket) == [i for g in sorted(groups) for i in range(g * size, g * size + size)]
            if "micro_batch_size" in options:
                assert len(bucket) <= options["micro_batch_size"]
            elif len(groups) > 1:
                assert cost_in_tokens(bucket, lengths, options) <= options["max_tokens_per_rank"] * options["sp_size"]
    counts = [sum(map(len, rank)) for rank in plan.assignment]
    if options["equal_size"] or not options["balance"]:
        assert max(counts) - min(counts) <= size
    assert plan.num_micro_steps >= options["min_num_micro_steps"]
    assert plan.num_micro_steps % options["num_micro_steps_multiple"] == 0


def plan_quietly(lengths, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OversizeWarning)
        return plan_mini_batch(lengths, **options)


@settings(max_examples=1500, deadline=None)
@given(problems())
def test_every_plan_holds_the_invariants(problem):
    lengths, options = problem
    plan = plan_quietly(lengths, **options)
    assert_invariants(plan, lengths, options)
    plan.check()
    assert 0.0 < plan.efficiency() <= plan.efficiency_bound() + 1e-12 or options["padded"]
    assert all(value >= 1.0 for value in plan.imbalance())
    assert plan.fill() <= 1.0 or options["padded"] or "max_tokens_per_rank" in options
    assert all(np.isfinite(value) for value in plan.metrics().values())


@settings(max_examples=300, deadline=None)
@given(problems())
def test_the_plan_depends_only_on_its_input(problem):
    lengths, options = problem
    plan = plan_quietly(lengths, **options)
    assert plan == plan_quietly(torch.tensor(lengths, dtype=torch.int32), **options)
    assert plan == plan_quietly(np.array(lengths, dtype=np.int64), **options)


@settings(max_examples=300, deadline=None)
@given(problems())
def test_fillers_appear_only_where_a_rank_has_fewer_groups_than_micro_steps(problem):
    lengths, options = problem
    if "micro_batch_size" in options:
        return
    plan = plan_quietly(lengths, **options)
    if options["planner"] == "global" and options["balance"] and not options["equal_size"]:
        groups = len(lengths) // options["group_size"]
        assert plan.num_fillers == max(0, plan.dp_size * plan.num_micro_steps - groups)
        return
    for rank in plan.assignment:
        groups = sum(map(len, rank)) // options["group_size"]
        assert sum(not bucket for bucket in rank) == max(0, plan.num_micro_steps - groups)


@settings(max_examples=300, deadline=None)
@given(problems())
def test_no_plan_is_cheaper_than_the_bound_nor_shorter_than_the_fewest_rows(problem):
    lengths, options = problem
    if "micro_batch_size" in options or options["padded"]:
        return
    plan = plan_quietly(lengths, **options)
    budget = options["max_tokens_per_rank"] * options["sp_size"]
    tokens = np.minimum(np.array(lengths, dtype=np.int64).reshape(-1, options["group_size"]).sum(axis=1), budget)
    work = workload_array(np.array(lengths, dtype=np.int64)).reshape(-1, options["group_size"]).sum(axis=1)
    assert plan.step_workload() >= step_workload_bound(tokens, work, options["dp_size"], budget)
    assert plan.num_micro_steps >= fewest_rows(tokens, options["dp_size"], budget)


@settings(max_examples=150, deadline=None)
@given(problems(), st.integers(1, 3))
def test_a_recut_keeps_every_sample_on_its_rank_and_agrees_on_the_number_of_micro_steps(problem, factor):
    lengths, options = problem
    plan = plan_quietly(lengths, **options)
    cap = {name: options[name] * factor for name in ("max_tokens_per_rank", "micro_batch_size") if name in options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OversizeWarning)
        again = recut(lengths, plan.samples_per_rank, sp_size=options["sp_size"], padded=options["padded"], oversize="isolate", **cap)
    again.check()
    assert [sorted(rank) for rank in again.samples_per_rank] == [sorted(rank) for rank in plan.samples_per_rank]
    assert len({len(rank) for rank in again.assignment}) == 1


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_the_plan_reaches_the_goal_of_every_stored_case(case):
    plan = plan_mini_batch(
        case["lengths"], dp_size=case["dp"], max_tokens_per_rank=case["token_budget"], coefficient=case["coef"], oversize="isolate"
    )
    plan.check()
    assert plan.step_workload() <= case["goal_T"]
    assert plan.num_micro_steps <= case["goal_rows"]
    work = workload_array(np.array(case["lengths"]), case["coef"])
    bound = step_workload_bound(np.array(case["lengths"]), work, case["dp"], case["token_budget"])
    assert bound <= case["best_known_T"]


@pytest.mark.parametrize("family", ["lognormal", "uniform", "at_the_cap"])
@pytest.mark.parametrize("refine", [True, False])
def test_plans_of_realistic_lengths_stay_close_to_the_bound_and_beat_the_baseline(family, refine):
    generator = np.random.default_rng(3)
    lengths = {
        "lognormal": np.minimum(np.exp(7.3 + generator.standard_normal(512)), 16384),
        "uniform": generator.integers(300, 16384, 512),
        "at_the_cap": np.where(generator.random(512) < 0.15, 16384, np.exp(7.2 + 0.5 * generator.standard_normal(512))),
    }[family].astype(np.int64)
    options = dict(dp_size=16, max_tokens_per_rank=17408)
    plan = plan_mini_batch(lengths, refine=refine, **options)
    bound = step_workload_bound(lengths, workload_array(lengths), 16, 17408)
    assert plan.step_workload() <= bound * (1.022 if refine else 1.03)
    baseline = plan_mini_batch(lengths, planner="per_rank", **options)
    baseline.check()
    assert plan.step_workload() < baseline.step_workload()


def test_three_lengths_of_five_with_a_budget_of_eight_need_three_micro_steps():
    assert plan_mini_batch([5, 5, 5], dp_size=1, max_tokens_per_rank=8).num_micro_steps == 3


def test_a_budget_exactly_met_is_met_by_one_micro_batch():
    assert plan_mini_batch([3, 4], dp_size=1, max_tokens_per_rank=7).assignment == [[[0, 1]]]
    assert plan_mini_batch([3, 4], dp_size=1, max_tokens_per_rank=6).num_micro_steps == 2


def test_the_budget_of_a_sequence_parallel_group_counts_its_padding():
    plan = plan_mini_batch([10, 6], dp_size=1, sp_size=2, max_tokens_per_rank=8)
    assert plan.assignment == [[[0, 1]]]
    odd = plan_mini_batch([10, 5], dp_size=1, sp_size=2, max_tokens_per_rank=8)
    assert (odd.num_tokens(0, 0), odd.padded_num_tokens(0, 0)) == (15, 16)


def test_a_larger_budget_never_needs_more_micro_steps():
    lengths = np.random.default_rng(0).integers(1, 9000, 200)
    steps = [plan_mini_batch(lengths, dp_size=4, max_tokens_per_rank=b).num_micro_steps for b in (9000, 9001, 12000, 20000, 10**6)]
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] == 1


@pytest.mark.parametrize(("num_samples", "dp_size"), [(7, 4), (3, 4), (206, 4), (1, 2), (0, 3)])
def test_any_number_of_samples_runs_on_any_number_of_ranks(num_samples, dp_size):
    for extra in ({}, {"balance": False}, {"equal_size": True}, {"planner": "per_rank"}):
        for cap in ({"max_tokens_per_rank": 300}, {"micro_batch_size": 2}):
            plan = plan_mini_batch([50 + i for i in range(num_samples)], dp_size=dp_size, **cap, **extra)
            plan.check()
            assert plan.num_micro_steps >= 1


def test_static_micro_batches_hold_so_many_samples_and_only_the_last_is_short():
    plan = plan_mini_batch(list(range(1, 12)), dp_size=2, micro_batch_size=4)
    for rank in plan.assignment:
        assert all(len(bucket) == 4 for bucket in rank[:-1])
    assert plan.num_micro_steps == 2


def test_without_balance_rank_r_gets_the_rth_block_in_order():
    plan = plan_mini_batch([4, 4, 4, 2, 2, 2, 2], dp_size=2, max_tokens_per_rank=8, balance=False)
    assert plan.assignment == [[[0, 1], [2, 3]], [[4], [5, 6]]]


def test_a_rank_short_of_work_splits_its_samples_instead_of_running_fillers():
    """Local counts 4 and 1, four samples each, layer one off: 4 and 4 micro-batches, no filler."""
    options = dict(max_tokens_per_rank=8)
    assert count_micro_steps([8, 8, 8, 8], **options) == 4
    assert count_micro_steps([2, 2, 2, 2], **options) == 1
    assert [len(b) for b in plan_rank([2, 2, 2, 2], num_micro_steps=4, **options)] == [1, 1, 1, 1]
    plan = plan_mini_batch([8, 8, 8, 8, 2, 2, 2, 2], dp_size=2, balance=False, planner="per_rank", **options)
    assert plan.num_micro_steps == 4
    assert plan.num_fillers == 0
    fewer = plan_mini_batch([8, 8, 2], dp_size=2, balance=False, planner="per_rank", min_num_micro_steps=3, **options)
    assert [sum(not b for b in rank) for rank in fewer.assignment] == [1, 2]


@pytest.mark.parametrize("case", [case for case in VALUES if case["area"] == "micro_batches_strict"], ids=lambda case: case["id"])
def test_the_baseline_needs_as_many_micro_batches_as_verl_with_its_budget_enforced(case):
    lengths, budget = case["input"]["lengths"], case["input"]["max_token_len"]
    assert count_micro_steps(lengths, max_tokens_per_rank=budget) == case["expected"]["final"]
    parts = plan_rank(lengths, num_micro_steps=case["expected"]["final"], max_tokens_per_rank=budget)
    assert sorted(sum(lengths[i] for i in part) for part in parts) == sorted(case["expected"]["tokens"])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 100), max_size=20), st.integers(100, 400), st.integers(0, 6))
def test_a_rank_can_always_be_cut_into_more_micro_batches_than_it_needs(lengths, budget, more):
    needed = count_micro_steps(lengths, max_tokens_per_rank=budget)
    parts = plan_rank(lengths, num_micro_steps=needed + more, max_tokens_per_rank=budget)
    assert len(parts) == needed + more
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in part) <= budget for part in parts)
    assert sum(not part for part in parts) == max(0, needed + more - len(lengths))


def test_an_isolated_sample_runs_alone_with_one_warning():
    with pytest.warns(OversizeWarning, match=r"Sample 0 has 9 tokens.*8.*max_tokens_per_rank=8") as caught:
        plan = plan_mini_batch([9, 1, 0], dp_size=1, max_tokens_per_rank=8, oversize="isolate")
    assert len(caught) == 1
    assert [0] in plan.assignment[0]


def test_padded_micro_batches_count_samples_times_longest():
    plan = plan_mini_batch([8, 1, 1, 1, 1], dp_size=1, max_tokens_per_rank=8, padded=True)
    assert sorted(map(sorted, plan.assignment[0])) == [[0], [1, 2, 3, 4]]
    assert plan.padded_num_tokens(0, 0) == 8


def test_a_sample_heavier_than_the_mean_load_is_reported_with_its_number():
    plan = plan_mini_batch([1000, 10, 10, 10], dp_size=4, max_tokens_per_rank=1000)
    text = plan.bottleneck()
    assert "Sample 0 with 1000 tokens" in text
    assert plan.efficiency() == pytest.approx(plan.efficiency_bound())
    assert f"{100 * plan.efficiency_bound():.1f}%" in text
    assert plan_mini_batch([10] * 8, dp_size=4, max_tokens_per_rank=20).bottleneck() is None


def test_metrics_are_those_of_the_contiguous_order_before_and_of_the_plan_after():
    plan = plan_mini_batch([9, 1, 8, 2, 3, 1], dp_size=2, max_tokens_per_rank=24)
    metrics = plan.metrics()
    assert (metrics["global_seqlen/min"], metrics["global_seqlen/max"], metrics["global_seqlen/minmax_diff"]) == (6, 18, 12)
    assert metrics["global_seqlen/balanced_max"] - metrics["global_seqlen/balanced_min"] <= 2
    assert metrics["global_seqlen/mean"] == 12
    assert metrics["plan/fill"] == pytest.approx(24 / 48)
    assert metrics["plan/padding_avoided"] == pytest.approx(1 - 24 / 54)
    work = attention_workload([9, 1, 8, 2, 3, 1])
    assert metrics["global_workload/max"] == sum(work[:3])


def test_a_broken_plan_does_not_pass_its_check():
    lengths = np.array([5, 5], dtype=np.int64)
    broken = {
        "must appear exactly once": [[[0]], [[0]]],
        "holds 10 tokens but the budget is 8": [[[0, 1]], [[]]],
    }
    for message, assignment in broken.items():
        with pytest.raises(ValueError, match=message):
            BatchPlan(assignment, lengths, lengths, max_tokens_per_rank=8).check()
    with pytest.raises(ValueError, match=r"same number of micro-steps, at least one, but got \[1, 2\]"):
        BatchPlan([[[0]], [[1], []]], lengths, lengths, max_tokens_per_rank=8)
    with pytest.raises(ValueError, match="splits a group"):
        BatchPlan([[[0]], [[1]]], lengths, lengths, max_tokens_per_rank=8, group_size=2).check()
    with pytest.raises(ValueError, match="micro_batch_size=1"):
        BatchPlan([[[0, 1]], [[]]], lengths, lengths, micro_batch_size=1).check()


def test_65536_samples_on_1024_ranks_are_planned_within_the_budget():
    lengths = np.minimum(np.exp(7.3 + np.random.default_rng(0).standard_normal(65536)), 16384).astype(np.int64)
    plan = plan_mini_batch(lengths, dp_size=1024, max_tokens_per_rank=17408, refine=False)
    plan.check()
    assert plan.step_workload() <= step_workload_bound(lengths, workload_array(lengths), 1024, 17408) * 1.02
