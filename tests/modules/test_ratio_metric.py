import math

import pytest

from lightning_rlbatch.distributed import build_meshes
from lightning_rlbatch.modules import RatioMetric
from lightning_rlbatch.testing import run_distributed

PIECES = [[(3.0, 2), (5.0, 1)], [(0.0, 0)]]  # of each data-parallel rank; the second has nothing to count


def mean_on_ranks(rank, world_size, sp_size):
    meshes = build_meshes("cpu", sequence_parallel_size=sp_size)
    metric = RatioMetric(meshes.dp_group)
    for piece in PIECES[meshes.dp_rank]:
        metric.update(*piece)
    first = float(metric.compute())
    metric.update(1.0, 1)  # goes on after it was read
    return first, float(metric.compute()), [name for name in metric.state_dict()]


@pytest.mark.parametrize(("world_size", "sp_size"), [(2, 1), (4, 2)])
def test_sums_of_all_data_parallel_ranks_are_divided_once_and_peers_count_once(world_size, sp_size):
    for result in run_distributed(mean_on_ranks, world_size, sp_size):
        assert result == (8 / 3, 10 / 5, [])


def test_nothing_counted_is_no_value():
    metric = RatioMetric()
    metric.update(0.0, 0)
    assert math.isnan(metric.compute())
