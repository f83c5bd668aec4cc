import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_rlbatch.modules.gradient_norm import total_norm
from lightning_rlbatch.testing import run_distributed


def gradients():
    generator = torch.Generator().manual_seed(0)
    shapes = [(16000, 256), (256,), (3, 5, 7), ()]
    return [1e-5 * torch.randn(shape, generator=generator) for shape in shapes]


def exact(tensors):
    return float(sum(tensor.double().square().sum() for tensor in tensors).sqrt())


def test_norm_of_millions_of_numbers_is_right_to_single_precision():
    assert float(total_norm(gradients())) == pytest.approx(exact(gradients()), rel=1e-6)


def test_norm_of_shards_is_that_of_the_whole():
    def fn(rank, world_size):
        mesh = init_device_mesh("cpu", (world_size,))
        sharded = [distribute_tensor(gradient, mesh, [Shard(0)]) for gradient in gradients()[:3]]
        return float(total_norm(sharded))

    assert run_distributed(fn, 2) == pytest.approx([exact(gradients()[:3])] * 2, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norm_of_half_precision_gradients_is_not_rounded_to_half_precision(dtype):
    halves = [torch.randn(300, 700, generator=torch.Generator().manual_seed(0)).to(dtype), torch.full((33,), 0.1).to(dtype)]
    assert float(total_norm(halves)) == pytest.approx(exact(halves), rel=1e-6)
    large = [torch.full((4, 500), 30_000.0).to(dtype)]  # the norm is above the largest number of fp16
    assert float(total_norm(large)) == pytest.approx(exact(large), rel=1e-6)
