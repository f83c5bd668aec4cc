import numpy as np
import pytest

from lightning_rlbatch.functional.parallel_sizes import sequence_parallel_times


def test_splitting_a_giant_helps_until_it_is_no_longer_the_bottleneck():
    lengths = np.array([32_000, *np.random.default_rng(0).integers(300, 2000, 127)])
    times = sequence_parallel_times(lengths, world_size=16, max_tokens_per_rank=8192, communication=0.1)
    assert list(times) == [4, 8, 16]  # one or two GPUs do not hold 32,000 tokens
    times = sequence_parallel_times(lengths, world_size=16, max_tokens_per_rank=32_768, communication=0.1)
    assert times[1] > 1.7 * times[2] > 1.7 * 1.7 * times[4]
    assert times[8] < 1.2
    assert times[16] > 0.85 * times[8]


def test_even_lengths_gain_nothing_from_sequence_parallelism():
    times = sequence_parallel_times([1000] * 64, world_size=8, max_tokens_per_rank=4000, communication=0.05, overhead=0)
    assert times[1] == pytest.approx(1.0)
    assert times[8] == pytest.approx(1.05)


def test_no_size_holds_a_sample_longer_than_all_gpus_together():
    assert sequence_parallel_times([100], world_size=4, max_tokens_per_rank=20) == {}


def test_bad_sizes_are_named():
    with pytest.raises(ValueError, match="`world_size` must be at least 1 but got 0"):
        sequence_parallel_times([1], world_size=0, max_tokens_per_rank=4)
