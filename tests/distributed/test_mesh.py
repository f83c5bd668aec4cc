import datetime
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from lightning_rlbatch.distributed.mesh import build_meshes, single_process_meshes
from lightning_rlbatch.testing import run_distributed


def test_without_a_process_group_all_sizes_are_one_and_groups_are_none():
    meshes = build_meshes("cpu")
    assert meshes == single_process_meshes()
    assert (meshes.world_size, meshes.rank, meshes.dp_size, meshes.sp_size) == (1, 0, 1, 1)
    assert meshes.batch is meshes.fsdp is meshes.dp_group is meshes.sp_group is meshes.world_group is None
    assert meshes.ranks_of_dp(0) == [0]


@pytest.mark.parametrize(
    ("arguments", "kind", "pieces"),
    [
        ({"sequence_parallel_size": 2}, ValueError, ["sequence_parallel_size", "2", "1"]),
        ({"sequence_parallel_size": 0}, ValueError, ["sequence_parallel_size", "at least 1", "0"]),
        ({"sequence_parallel_size": True}, TypeError, ["sequence_parallel_size", "True"]),
        ({"sequence_parallel_size": "2"}, TypeError, ["sequence_parallel_size", "'2'"]),
        ({"data_parallel_replicate_size": 2}, ValueError, ["data_parallel_replicate_size", "2"]),
        ({"data_parallel_replicate_size": -1}, ValueError, ["data_parallel_replicate_size", "-1"]),
    ],
)
def test_a_bad_size_in_a_lone_process_names_the_option_and_the_number(arguments, kind, pieces):
    with pytest.raises(kind) as caught:
        build_meshes("cpu", **arguments)
    assert all(piece in str(caught.value) for piece in pieces)


def test_the_rank_in_a_data_parallel_list_is_checked():
    with pytest.raises(ValueError, match="0 to 0, got 1"):
        single_process_meshes().ranks_of_dp(1)


def places(rank, world_size, sp_size, replicate_size):
    meshes = build_meshes("cpu", sequence_parallel_size=sp_size, data_parallel_replicate_size=replicate_size)
    assert meshes.rank == rank == dist.get_rank()
    assert meshes.world_size == world_size
    assert meshes.batch.mesh_dim_names == ("data_parallel", "sequence_parallel")
    assert meshes.batch["data_parallel"].get_group() is meshes.dp_group
    assert meshes.batch["sequence_parallel"].get_group() is meshes.sp_group
    assert meshes.batch["data_parallel"].get_local_rank() == meshes.dp_rank == meshes.dp_group.rank()
    assert meshes.batch["sequence_parallel"].get_local_rank() == meshes.sp_rank == meshes.sp_group.rank()
    assert dist.get_process_group_ranks(meshes.sp_group) == meshes.ranks_of_dp(meshes.dp_rank)
    return (
        dist.get_process_group_ranks(meshes.dp_group),
        dist.get_process_group_ranks(meshes.sp_group),
        [dist.get_process_group_ranks(meshes.fsdp.get_group(dim)) for dim in range(meshes.fsdp.ndim)],
    )


@pytest.mark.parametrize(
    ("world_size", "sp_size", "replicate_size", "expected"),
    [
        (1, 1, 1, [([0], [0], [[0]])]),
        (2, 1, 1, [([0, 1], [0], [[0, 1]]), ([0, 1], [1], [[0, 1]])]),
        (
            4,
            2,
            2,
            [
                ([0, 2], [0, 1], [[0, 2], [0, 1]]),
                ([1, 3], [0, 1], [[1, 3], [0, 1]]),
                ([0, 2], [2, 3], [[0, 2], [2, 3]]),
                ([1, 3], [2, 3], [[1, 3], [2, 3]]),
            ],
        ),
        (4, 4, 1, [([rank], [0, 1, 2, 3], [[0, 1, 2, 3]]) for rank in range(4)]),
    ],
)
def test_sequence_parallel_peers_are_neighbours_and_fsdp_spans_everybody(world_size, sp_size, replicate_size, expected):
    assert run_distributed(places, world_size, sp_size, replicate_size) == expected


def test_sizes_that_do_not_divide_are_the_same_error_on_every_rank_before_any_collective():
    def build_badly(rank, world_size):
        messages = []
        for sizes in ((3, 1), (2, 4), (8, 1)):
            with pytest.raises(ValueError, match="must divide") as caught:
                build_meshes("cpu", sequence_parallel_size=sizes[0], data_parallel_replicate_size=sizes[1])
            messages.append(str(caught.value))
        if rank == 0:  # the others have not been asked: had it communicated, it would still be waiting
            time.sleep(0.2)
        return messages

    first, *others = run_distributed(build_badly, 4)
    assert all(messages == first for messages in others)
    assert "sequence_parallel_size`=3" in first[0]
    assert " 4" in first[0]
    assert "data_parallel_replicate_size`=4" in first[1]
    assert "2 (4 ranks / sequence_parallel_size=2)" in first[1]


def test_sub_groups_honour_the_timeout():
    def wait_for_nobody(rank, world_size):
        meshes = build_meshes("cpu", sequence_parallel_size=2, timeout=datetime.timedelta(seconds=1))
        seconds = 0.0
        if rank % 2 == 0:
            started = time.monotonic()
            with pytest.raises(RuntimeError):
                dist.all_reduce(torch.ones(1), group=meshes.sp_group)
            seconds = time.monotonic() - started
        else:
            time.sleep(3)
        return seconds

    assert all(seconds < 2.9 for seconds in run_distributed(wait_for_nobody, 4))


@pytest.mark.parametrize(("sp_size", "replicate_size"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_fsdp_averages_gradients_over_all_ranks_of_its_mesh(sp_size, replicate_size):
    def gradient(rank, world_size):
        meshes = build_meshes("cpu", sequence_parallel_size=sp_size, data_parallel_replicate_size=replicate_size)
        model = nn.Linear(3, 1, bias=False)
        nn.init.ones_(model.weight)
        fully_shard(model, mesh=meshes.fsdp)
        model(torch.full((1, 3), 10.0**rank)).sum().backward()
        return model.weight.grad.full_tensor().flatten().tolist()

    assert run_distributed(gradient, 4) == [[1111 / 4] * 3] * 4
