"""Refuse to start a run whose policy does not compute the same in every layout."""

from collections.abc import Sequence
from typing import cast

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn
from typing_extensions import override

from lightning_rlbatch.distributed.mesh import Meshes
from lightning_rlbatch.distributed.reductions import all_reduce_max
from lightning_rlbatch.models.parity import compare_on_ranks, random_batch
from lightning_rlbatch.modules.model_sources import load_model
from lightning_rlbatch.strategies.access import meshes_of


class ParityCheck(Callback):
    """Compare log-probs, entropies and gradients of the policy in the layouts of this run, before the first step.

    The same check as ``rlbatch verify`` and `lightning_rlbatch.testing.assert_parity`, on the run's own devices and ranks: a few short
    random samples, each alone, padded, packed, and spread over the data- and sequence-parallel ranks. The table is printed; a difference
    beyond the tolerance ends the run on every rank. The check runs on a copy of the policy in fp32, which every rank holds whole for
    that moment, before the policy of the run is made; for a model too large for that, verify one of its family with fewer layers.
    Nothing of the run changes, its random numbers included.

    Args:
        lengths: Tokens of the random samples.
        tolerance: Largest relative error; None takes 1e-5 or a few times the model's rounding, whichever is larger. That is measured: each
            sample alone in fp32 against itself in fp64, for which a second copy of the policy is made for a moment.

    Raises:
        ValueError: A length is below 1.

    Example::

        Trainer(strategy="rlbatch_fsdp", callbacks=[ParityCheck()])
    """

    def __init__(self, *, lengths: Sequence[int] = (13, 1, 6, 2, 9), tolerance: float | None = None) -> None:
        if not lengths or min(lengths) < 1:
            raise ValueError(f"Expected lengths of at least 1 token but got {list(lengths)}.")
        self.lengths = tuple(lengths)
        self.tolerance = tolerance

    @override
    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        if stage != "fit":
            return
        source = getattr(pl_module, "policy_source", None)
        if source is None:
            raise MisconfigurationException(
                f"ParityCheck compares layouts of a module's policy but {type(pl_module).__name__} has none. Use it with PPOModule or "
                "SFTModule, or call lightning_rlbatch.testing.assert_parity on your model."
            )
        meshes = meshes_of(trainer)
        with isolate_rng():
            model = load_model(source)
            cast(nn.Module, model).to(trainer.strategy.root_device)
            copy_from_rank_zero(model, meshes)
            report = compare_on_ranks(
                model,
                random_batch(model.config.get_text_config().vocab_size, self.lengths),
                sp_size=meshes.sp_size,
                run_on_ranks=(lambda row: row(meshes)) if meshes.world_size > 1 else None,
                temperature=float(getattr(pl_module, "temperature", 1.0)),
                tolerance=self.tolerance,
                remove_padding=bool(getattr(pl_module, "remove_padding", True)),
            )
        rank_zero_info(f"Layouts of {type(model).__name__}:\n{report}")
        # Rows without other ranks are each rank's own: processors that round in other ways must not part the ranks.
        if all_reduce_max({"differs": float(not report.passed)}, meshes.world_group)["differs"]:
            raise RuntimeError(
                f"{type(model).__name__} does not compute the same in every layout of this run, so it would train on wrong gradients. "
                f"Change the layout that differs, or remove ParityCheck.\n{report}"
            )


def copy_from_rank_zero(model: nn.Module, meshes: Meshes) -> None:
    """Give every rank the weights of rank 0, as the strategy does with the policy itself.

    Args:
        model: On every rank, of the same shapes.
        meshes: Groups of the run.
    """
    if meshes.world_size > 1:
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.data, src=0, group=meshes.world_group)
