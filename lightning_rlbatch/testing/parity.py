"""Check on a user's own model that packed, padded and parallel log-probs and gradients equal those of each sample alone.

What is compared, and with what, stands in `lightning_rlbatch.models.parity`.
"""

from collections.abc import Callable

import torch.distributed as dist
from transformers import PreTrainedModel

from lightning_rlbatch.distributed.mesh import Meshes, build_meshes
from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.models.attention_backends import Backend
from lightning_rlbatch.models.parity import ParityReport, ParityRow, RunOnRanks, compare_on_ranks, random_batch
from lightning_rlbatch.models.probe import check_heads
from lightning_rlbatch.testing.distributed import run_distributed

__all__ = ["ParityReport", "ParityRow", "assert_parity", "compare_layouts", "random_batch"]


def assert_parity(
    model: PreTrainedModel,
    batch: PackedBatch | None = None,
    sp_size: int = 1,
    *,
    dp_size: int = 1,
    meshes: Meshes | None = None,
    temperature: float = 1.0,
    backend: Backend = "auto",
    tolerance: float | None = None,
    timeout: float = 90.0,
    remove_padding: bool = True,
) -> ParityReport:
    """Raise unless packed, padded and parallel log-probs and gradients of a model equal the plain forward's.

    Args:
        model: A causal LM, unsharded and without packed attention attached; it is left as it was. Dropout is off meanwhile.
        batch: Samples to compare on; None draws short random ones (`random_batch`).
        sp_size: Sequence-parallel ranks; more than 1 forks that many CPU processes.
        dp_size: Data-parallel ranks, each with a part of the samples; forks ``dp_size * sp_size`` processes.
        meshes: Meshes of ranks that already run (all call this with the same model and batch); replaces the sizes and the forking,
            for models on a GPU.
        temperature: Divides the logits.
        backend: Kernel of the packed attention.
        tolerance: Largest relative error; None: 1e-5, and for models that are not in fp64 a few times their rounding, which is measured
            with a copy of the model in fp64 (`lightning_rlbatch.models.parity`).
        timeout: Seconds that the forked ranks may take.
        remove_padding: False compares padded samples only, for a model that cannot run packed.

    Returns:
        The report.

    Raises:
        AssertionError: A difference above the tolerance, with the table as its message; or a forked rank failed.
        ValueError: The model cannot be run this way at all (see `attach_packed_attention`).
        RuntimeError: Ranks cannot be forked from this process.
    """
    report = compare_layouts(
        model,
        batch,
        sp_size,
        dp_size=dp_size,
        meshes=meshes,
        temperature=temperature,
        backend=backend,
        tolerance=tolerance,
        timeout=timeout,
        remove_padding=remove_padding,
    )
    if not report.passed:
        raise AssertionError(f"{type(model).__name__} does not compute the same in every layout.\n{report}")
    return report


def compare_layouts(
    model: PreTrainedModel,
    batch: PackedBatch | None = None,
    sp_size: int = 1,
    *,
    dp_size: int = 1,
    meshes: Meshes | None = None,
    temperature: float = 1.0,
    backend: Backend = "auto",
    tolerance: float | None = None,
    timeout: float = 90.0,
    remove_padding: bool = True,
) -> ParityReport:
    """Return the table of `assert_parity` without judging it; same arguments."""
    run_on_ranks: RunOnRanks | None = None
    if meshes is not None:
        sp_size = meshes.sp_size
        run_on_ranks = (lambda row: row(meshes)) if meshes.world_size > 1 else None
    elif dp_size * sp_size > 1:
        check_heads(model.config, sp_size)
        _check_can_fork(model, dp_size * sp_size)

        def run_on_ranks(row: Callable[[Meshes], ParityRow]) -> ParityRow:
            def on_rank(rank: int, world_size: int) -> ParityRow:
                return row(build_meshes("cpu", sequence_parallel_size=sp_size))

            rows: list[ParityRow] = run_distributed(on_rank, dp_size * sp_size, timeout=timeout)
            return rows[0]

    return compare_on_ranks(
        model,
        batch,
        sp_size=sp_size,
        run_on_ranks=run_on_ranks,
        temperature=temperature,
        backend=backend,
        tolerance=tolerance,
        remove_padding=remove_padding,
    )


def _check_can_fork(model: PreTrainedModel, world_size: int) -> None:
    reason = None
    if dist.is_initialized():
        reason = "this process has joined a process group"
    elif model.device.type != "cpu":
        reason = f"the model is on {model.device}, which forked processes cannot use"
    if reason is not None:
        raise RuntimeError(
            f"Cannot fork {world_size} ranks: {reason}. Run the check under torchrun on all ranks and pass meshes=build_meshes(...), "
            "or move the model to the CPU and call it before any process group exists."
        )
