import pytest

from lightning_rlbatch.functional.per_rank import count_micro_steps, plan_rank
from lightning_rlbatch.functional.planning import plan_mini_batch, recut

GOOD = dict(dp_size=2, max_tokens_per_rank=8)


def test_a_sample_over_the_budget_is_an_error_that_names_it_and_what_to_change():
    with pytest.raises(ValueError, match="Sample 2") as caught:
        plan_mini_batch([3, 4, 9001], dp_size=2, max_tokens_per_rank=4096, sp_size=2)
    for part in ("9001", "8192", "max_tokens_per_rank=4096", "sequence_parallel_size=2", "Raise", "oversize='isolate'"):
        assert part in str(caught.value)


def test_the_longest_sample_is_named_and_the_others_are_counted():
    with pytest.raises(ValueError, match=r"Sample 1 has 12 tokens.*2 more exceed it too"):
        plan_mini_batch([9, 12, 10, 1], **GOOD)


def test_a_group_over_the_budget_is_named_by_its_samples():
    with pytest.raises(ValueError, match="group of samples 2 to 3 has 10 tokens"):
        plan_mini_batch([1, 1, 5, 5], group_size=2, **GOOD)
    with pytest.raises(ValueError, match="group of samples 0 to 1 has 10 tokens"):
        plan_mini_batch([5, 1], group_size=2, padded=True, **GOOD)


@pytest.mark.parametrize("call", [
    lambda **kw: recut([9], [[0]], **kw),
    lambda **kw: count_micro_steps([9], **kw),
    lambda **kw: plan_rank([9], num_micro_steps=1, **kw),
])  # fmt: skip
def test_every_entry_point_checks_the_budget(call):
    with pytest.raises(ValueError, match="Sample 0 has 9 tokens but a micro-batch may hold 8"):
        call(max_tokens_per_rank=8)


@pytest.mark.parametrize(("changes", "message"), [
    ({"max_tokens_per_rank": 0}, "`max_tokens_per_rank` must be at least 1 but got 0"),
    ({"max_tokens_per_rank": -5}, "`max_tokens_per_rank` must be at least 1 but got -5"),
    ({"max_tokens_per_rank": None}, "Exactly one of `max_tokens_per_rank`"),
    ({"micro_batch_size": 4}, "max_tokens_per_rank=8 and micro_batch_size=4"),
    ({"max_tokens_per_rank": None, "micro_batch_size": 0}, "`micro_batch_size` must be at least 1 but got 0"),
    ({"dp_size": 0}, "`dp_size` must be at least 1 but got 0"),
    ({"sp_size": 0}, "`sp_size` must be at least 1 but got 0"),
    ({"group_size": 0}, "`group_size` must be at least 1 but got 0"),
    ({"group_size": 2}, "3 samples do not form groups of group_size=2"),
    ({"oversize": "drop"}, "`oversize` must be one of 'error', 'isolate' but got 'drop'"),
    ({"planner": "best"}, "`planner` must be one of 'global', 'per_rank' but got 'best'"),
    ({"min_num_micro_steps": 0}, "`min_num_micro_steps` must be at least 1 but got 0"),
    ({"num_micro_steps_multiple": 0}, "`num_micro_steps_multiple` must be at least 1 but got 0"),
    ({"coefficient": -1}, "`coefficient` must not be negative but got -1"),
])  # fmt: skip
def test_a_bad_setting_is_named_with_its_value(changes, message):
    with pytest.raises(ValueError, match=message):
        plan_mini_batch([1, 2, 3], **{**GOOD, **changes})


def test_static_micro_batches_must_hold_whole_groups():
    with pytest.raises(ValueError, match="`micro_batch_size` must be a multiple of group_size=2 but got 3"):
        plan_mini_batch([1, 2], dp_size=1, micro_batch_size=3, group_size=2)


def test_negative_and_fractional_lengths_are_refused():
    with pytest.raises(ValueError, match="sample 1 has -2"):
        plan_mini_batch([1, -2], **GOOD)
    with pytest.raises(TypeError, match="`seq_lens` must hold integers"):
        plan_mini_batch([1.5], **GOOD)
    with pytest.raises(TypeError, match=r"`dp_size` must be an int but got 2\.5"):
        plan_mini_batch([1], dp_size=2.5, max_tokens_per_rank=8)


@pytest.mark.parametrize("flag", ["balance", "equal_size", "padded", "refine"])
def test_a_flag_that_is_no_bool_is_refused(flag):
    with pytest.raises(TypeError, match=f"`{flag}` must be True or False but got 'false'"):
        plan_mini_batch([1, 2, 3], **GOOD, **{flag: "false"})


def test_too_few_micro_steps_for_a_rank_are_refused():
    with pytest.raises(ValueError, match=r"`num_micro_steps` must be at least 2 for 2 samples of 16 tokens but got 1.*MAX"):
        plan_rank([8, 8], num_micro_steps=1, max_tokens_per_rank=8)
    with pytest.raises(TypeError, match=r"`num_micro_steps` must be an int but got 2\.0"):
        plan_rank([8, 8], num_micro_steps=2.0, max_tokens_per_rank=8)


@pytest.mark.parametrize("ranks", [[[0, 1], [1]], [[0]], [], [[0, 1, 2]]])
def test_a_recut_of_other_samples_is_refused(ranks):
    with pytest.raises(ValueError, match="`samples_per_rank` must hold each of the 2 samples exactly once"):
        recut([3, 4], ranks, max_tokens_per_rank=8)
