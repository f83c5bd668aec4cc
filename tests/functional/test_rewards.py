import math

import pytest
import torch

from lightning_rlbatch.functional.rewards import combine_rewards, reward_columns


def test_none_becomes_nan_and_counts_nowhere_unless_every_function_abstains():
    columns = reward_columns([[1, None, 0.5, None], [2.0, 3.0, None, None]])
    assert columns.shape == (4, 2)
    total = combine_rewards(columns, [1.0, 10.0])
    assert total[:3].tolist() == [21.0, 30.0, 0.5]
    assert math.isnan(total[3])


def test_a_rank_without_samples_has_an_empty_table():
    assert reward_columns([[], []]).shape == (0, 2)
    assert combine_rewards(reward_columns([[], []])).shape == (0,)


def test_a_function_that_returns_too_few_rewards_is_an_error_with_the_numbers():
    with pytest.raises(ValueError, match=r"one reward per sample .* got \[2, 1\] rewards"):
        reward_columns([[1.0, 2.0], [1.0]])
    with pytest.raises(ValueError, match="one weight for each of 2 rewards but got 1"):
        combine_rewards(torch.zeros(3, 2), [1.0])
