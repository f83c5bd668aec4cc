"""The norm of all gradients of a role, the same for any sharding."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the Euclidean norm of all gradients together; collective if they are sharded.

    Norms of rows are taken first. A single fp32 sum over millions of squares, which is what torch computes on a CPU, is off by 2e-4 for the
    gradient of an LM head of 32,000 x 256, and by another amount for half of it: the norm would depend on the number of ranks. Norms of
    half-precision gradients are fp32: in bf16 they would be off by 4e-3, and in fp16 those above 65,504 infinite.

    Args:
        gradients: Any shapes, plain or sharded.

    Returns:
        0-d, fp32 (fp64 for fp64 gradients), on the gradients' device; not sharded.

    Example:
        >>> total_norm([torch.tensor([[3.0, 0.0], [0.0, 0.0]]), torch.tensor([4.0])])
        tensor(5.)
    """
    norm = torch.nn.utils.get_total_norm([_row_norms(gradient) for gradient in gradients])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _row_norms(gradient: Tensor) -> Tensor:
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    return gradient.to(dtype) if gradient.dim() < 2 else torch.linalg.vector_norm(gradient, dim=-1, dtype=dtype)
