import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlbatch.functional.workload import (
    attention_workload,
    fit_workload_coefficient,
    to_int64,
    workload_array,
    workload_coefficient,
)

CASES = json.loads((Path(__file__).parent.parent / "data" / "algorithm_values.json").read_text())["cases"]


def test_workloads_equal_the_known_values():
    case = next(case for case in CASES if case["id"] == "calculate_workload")
    assert attention_workload(case["input"]["lengths"]) == case["expected"]


def test_int32_tensors_do_not_overflow():
    case = next(case for case in CASES if case["id"] == "workload_int32_overflow_pr5110")
    lengths = torch.tensor(case["input"]["lengths"], dtype=torch.int32)
    assert attention_workload(lengths) == case["expected"]["int64"]


@given(st.lists(st.integers(0, 2**62)), st.integers(0, 100_000))
def test_any_integer_container_gives_exact_python_ints(lengths, coefficient):
    expected = [coefficient * n + n * n for n in lengths]
    for values in (lengths, np.array(lengths, dtype=np.int64), torch.tensor(lengths, dtype=torch.int64)):
        result = attention_workload(values, coefficient=coefficient)
        assert result == expected
        assert all(type(w) is int for w in result)


def test_the_coefficient_of_a_model_follows_from_its_sizes():
    # A 7B model: hidden 3584, 28 query and 4 key-value heads of 128, MLP 18944, 28 layers, vocabulary 152064.
    attention = 3584 * 3584 * 2 + 3584 * 512 * 2
    layer = attention + 3 * 3584 * 18944
    assert workload_coefficient(params_per_layer=layer, attention_width=3584) == pytest.approx(65_000, rel=0.01)
    with_head = workload_coefficient(params_per_layer=layer, attention_width=3584, num_layers=28, head_params=152064 * 3584)
    assert with_head == pytest.approx(70_500, rel=0.01)


def test_sliding_window_layers_make_the_cost_more_linear():
    sizes = dict(params_per_layer=10_000_000, attention_width=1000, num_layers=10)
    assert workload_coefficient(**sizes, quadratic_layers=5) == 2 * workload_coefficient(**sizes)


def test_a_fit_recovers_coefficient_and_overhead_from_noisy_times():
    generator = np.random.default_rng(0)
    batches = [generator.integers(50, 16_000, generator.integers(1, 8)).tolist() for _ in range(200)]
    times = [(5e-3 + 2e-7 * sum(n + n * n / 40_000 for n in b)) * (1 + 0.003 * generator.standard_normal()) for b in batches]
    coefficient, overhead = fit_workload_coefficient(batches, times)
    assert coefficient == pytest.approx(40_000, rel=0.05)
    assert overhead == pytest.approx(5e-3 / 2e-7, rel=0.1)


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="sample 2 has -1"):
        attention_workload([1, 2, -1])
    with pytest.raises(TypeError, match=r"`coefficient` must be an int.*got 1\.5"):
        attention_workload([1], coefficient=1.5)
    with pytest.raises(ValueError, match="`coefficient` must not be negative but got -1"):
        attention_workload([1], coefficient=-1)
    with pytest.raises(TypeError, match="must hold integers but got bool"):
        to_int64(torch.tensor([True]))
    with pytest.raises(ValueError, match=r"one dimension.*\(1, 2\)"):
        to_int64([[1, 2]])
    with pytest.raises(ValueError, match="does not fit 62 bits"):
        workload_array(np.array([2**32]))
    with pytest.raises(ValueError, match="`attention_width` must be at least 1 but got 0"):
        workload_coefficient(params_per_layer=1, attention_width=0)
    with pytest.raises(ValueError, match="`quadratic_layers` must be between 1 and num_layers=2 but got 3"):
        workload_coefficient(params_per_layer=1, attention_width=1, num_layers=2, quadratic_layers=3)
    with pytest.raises(ValueError, match="at least 3 micro-batches"):
        fit_workload_coefficient([[1]], [1.0])
    with pytest.raises(ValueError, match="must be positive"):
        fit_workload_coefficient([[100], [200], [300]], [3.0, 2.0, 1.0])
