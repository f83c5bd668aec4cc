"""Sharded tensors put together: values, and the memory that it takes."""

import time

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from benchmarks.measuring import forget_peak, peak_mb, resident_mb
from lightning_rlbatch.distributed import whole_tensor
from lightning_rlbatch.rollout.weights import full_parameters
from lightning_rlbatch.testing import run_distributed

SHAPES = [(), (1,), (3,), (8, 3), (9, 2), (5, 0), (2, 3, 4)]


def test_whole_tensor_is_the_tensor_that_was_sharded_whatever_its_shape_and_placement():
    def fn(rank, world_size):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for shape in SHAPES:
            for dtype in (torch.float32, torch.bfloat16, torch.int64):
                expected = torch.arange(1, torch.Size(shape).numel() + 1).reshape(shape).to(dtype)
                placements = [(Replicate(), Replicate())]
                placements += [(Replicate(), Shard(dim)) for dim in range(len(shape))] + [(Shard(0), Shard(0))] * bool(shape)
                for placement in placements:
                    sharded = distribute_tensor(expected.clone(), mesh, placement)
                    whole = whole_tensor(sharded)
                    assert (whole.shape, whole.dtype, whole.tolist()) == (expected.shape, dtype, expected.tolist()), placement
                    whole.add_(1)
                    assert torch.equal(whole_tensor(sharded), expected), "the result is a copy"

    run_distributed(fn, 4)
    plain = torch.ones(2, requires_grad=True)
    assert whole_tensor(plain).data_ptr() == plain.data_ptr()
    assert not whole_tensor(plain).requires_grad


def test_streaming_weights_takes_the_memory_of_the_largest_parameter():
    """``full_tensor``, beside it, takes it twice: the measure can tell."""

    def fn(rank, world_size):
        model = nn.Sequential(
            *(nn.Linear(1024, rows, bias=False) for rows in (9_000, 8_999, 11_001))
        )  # 37, 37 and 45 MB in fp32: malloc gives such blocks back
        for layer in model:
            fully_shard(layer, mesh=init_device_mesh("cpu", (world_size,)))
        largest = max(parameter.numel() * parameter.element_size() for parameter in model.parameters()) / 1e6
        peaks = []
        for stream in (full_parameters(model), ((name, value.full_tensor()) for name, value in model.named_parameters())):
            time.sleep(0.2)  # gloo's thread lets go of the stream before a moment after it ended
            before = resident_mb()
            forget_peak()
            for _, tensor in stream:
                del tensor
            peaks.append((peak_mb() - before) / largest)
        return peaks

    for ours, full in run_distributed(fn, 2):
        assert ours < 1.15 < 1.8 < full
