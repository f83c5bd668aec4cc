"""Supervised fine-tuning on packed, planned mini-batches."""

from typing import Literal

from typing_extensions import override

from lightning_rlbatch.data.mini_batch import MiniBatch
from lightning_rlbatch.functional.aggregation import Denominators, aggregate
from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.models.scorer import TokenScorer
from lightning_rlbatch.models.scoring import HEAD_MEMORY_MIB, check_head_memory
from lightning_rlbatch.modules.base import (
    LRSchedulerFactory,
    MicroBatchOutput,
    OptimizerFactory,
    RLBatchModule,
    default_optimizer,
)
from lightning_rlbatch.modules.model_sources import ModelSource, as_source, is_on_meta, load_model
from lightning_rlbatch.modules.ratio_metric import RatioMetric


class SFTModule(RLBatchModule):
    """Train a causal LM to predict the tokens of ``response_mask``: cross-entropy over the GLOBAL number of such tokens.

    Validation logs ``val/loss``: the same loss over the whole validation set, so it does not depend on how that was cut.

    Args:
        policy: Model to train: a function that makes it, or the folder or hub name of a pretrained one.
        remove_padding: False pads each micro-batch to its longest sample instead of packing it; the numbers are the same.
        head_memory_mib: Most memory, in MiB, in which the LM head keeps its products for the backward pass; see :class:`TokenScorer`.
        loss_aggregation: ``"token-mean"``, or ``"seq-mean-token-mean"`` to give every sample the same weight.
        optimizer: See :class:`RLBatchModule`.
        lr_scheduler: See :class:`RLBatchModule`.
        max_grad_norm: See :class:`RLBatchModule`.

    Example::

        trainer = Trainer(accelerator="cpu", devices=2, strategy="rlbatch_fsdp", max_epochs=1)
        trainer.fit(SFTModule(policy="my/model"), datamodule=SFTDataModule(samples, mini_batch_size=32, max_tokens_per_rank=4096))
    """

    def __init__(
        self,
        policy: ModelSource,
        *,
        remove_padding: bool = True,
        head_memory_mib: float = HEAD_MEMORY_MIB,
        loss_aggregation: Literal["token-mean", "seq-mean-token-mean"] = "token-mean",
        optimizer: OptimizerFactory = default_optimizer,
        lr_scheduler: LRSchedulerFactory | None = None,
        max_grad_norm: float | None = 1.0,
    ) -> None:
        super().__init__(optimizer=optimizer, lr_scheduler=lr_scheduler, max_grad_norm=max_grad_norm)
        self.policy_source = as_source(policy)
        self.remove_padding = remove_padding
        check_head_memory(head_memory_mib)
        self.head_memory_mib = head_memory_mib
        self.loss_aggregation = loss_aggregation
        self._validation: dict[str, RatioMetric] = {}

    @override
    def build_models(self) -> None:
        # Rank 0 reads a pretrained model, and the strategy hands every rank its shards.
        model = load_model(self.policy_source, without_weights=self.gets_weights_from_rank_zero)
        self.policy = TokenScorer(
            model,
            remove_padding=self.remove_padding,
            sp_group=self.meshes.sp_group,
            probe=not is_on_meta(model),
            head_memory_mib=self.head_memory_mib,
        )

    @override
    def micro_batch_step(self, micro_batch: PackedBatch, denominators: Denominators) -> MicroBatchOutput:
        mask = self.score_mask(micro_batch)
        log_probs = self.policy(micro_batch).log_probs
        loss = aggregate(-log_probs, mask, micro_batch.cu_seqlens, self.loss_aggregation, denominators)
        return MicroBatchOutput(loss)

    # -- validation --------------------------------------------------------------------------------------------------------------

    @override
    def on_validation_epoch_start(self) -> None:
        self._validation["val/loss"] = RatioMetric(self.meshes.dp_group).to(self.device)

    @override
    def validation_step(self, batch: MiniBatch, batch_idx: int) -> None:
        for micro_batch in batch.micro_batches:
            mask, cu_seqlens = self.score_mask(micro_batch), micro_batch.cu_seqlens
            counts = Denominators.local(mask, cu_seqlens)
            loss_sum = aggregate(-self.policy(micro_batch).log_probs, mask, cu_seqlens, self.loss_aggregation, Denominators(1, 1))
            count = counts.num_tokens if self.loss_aggregation == "token-mean" else counts.num_sequences
            self._validation["val/loss"].update(loss_sum, count)

    @override
    def on_validation_epoch_end(self) -> None:
        # The values are global; sync_dist only keeps Lightning from warning.
        self.log_dict({name: metric.compute() for name, metric in self._validation.items()}, batch_size=1, sync_dist=True)
