"""Run the heaviest legal micro-batch once before the first step, so that a lack of memory shows in the first minute."""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_rlbatch.data.mini_batch import MiniBatch
from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.functional.plan import BatchPlan
from lightning_rlbatch.modules.base import RLBatchModule


class MemoryRehearsal(Callback):
    """Run forward and backward on the heaviest micro-batch that the configuration allows, before the first optimizer step.

    Its samples are as long as they may be and fill the budget (or number ``micro_batch_size``); every token but each first one is a
    response token, so that the LM head works at its largest too. Gradients are thrown away, and nothing of the run changes: not
    weights, optimizer states, learning rates, random numbers or metrics. On CUDA the peak is printed, and running out of memory becomes
    an error that says what to lower. Optimizer states that do not exist yet, and the engine's key/value cache, are not in the peak.

    Args:
        max_sample_length: Longest sample; None takes the data module's ``max_prompt_length + max_response_length``, or the longest
            sample of the first mini-batch.

    Raises:
        ValueError: ``max_sample_length`` is below 2.
    """

    def __init__(self, *, max_sample_length: int | None = None) -> None:
        if max_sample_length is not None and max_sample_length < 2:
            raise ValueError(f"Expected max_sample_length to be at least 2 but got {max_sample_length}.")
        self.max_sample_length = max_sample_length
        self.num_tokens: int | None = None
        """Tokens of the micro-batch that was rehearsed; None before."""

    @override
    def on_train_batch_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, batch_idx: int) -> None:
        if self.num_tokens is not None or not isinstance(batch, MiniBatch) or batch.plan is None:
            return
        if not isinstance(pl_module, RLBatchModule):
            raise MisconfigurationException(
                f"MemoryRehearsal needs a module that knows how to train on micro-batches, such as PPOModule or SFTModule (any"
                f" RLBatchModule), but got {type(pl_module).__name__}."
            )
        lengths = heaviest_micro_batch(batch.plan, self._longest(trainer, batch.plan))
        self.num_tokens = sum(lengths)
        heavy = rehearsal_batch(batch.micro_batches[0], lengths)
        critic = None if batch.critic_micro_batches is None else [heavy]
        device = pl_module.device
        on_cuda = device.type == "cuda"
        if on_cuda:
            torch.cuda.reset_peak_memory_stats(device)
        try:
            self._run(pl_module, MiniBatch([heavy], batch.plan, critic))
        except torch.OutOfMemoryError as error:
            raise RuntimeError(self._advice(batch.plan, lengths)) from error
        if on_cuda:
            peak, total = torch.cuda.max_memory_allocated(device), torch.cuda.get_device_properties(device).total_memory
            rank_zero_info(
                f"Memory rehearsal: {len(lengths)} sample(s), {self.num_tokens} tokens in one micro-batch, peak {peak / 2**30:.2f} GiB of"
                f" {total / 2**30:.2f} GiB."
            )

    @staticmethod
    def _run(module: RLBatchModule, batch: MiniBatch) -> None:
        """Do what a training step does before its optimizer step, and forget the gradients."""
        module.accumulate_gradients(batch, module.count(batch))
        for parameter in module.parameters():
            parameter.grad = None

    def _longest(self, trainer: "pl.Trainer", plan: BatchPlan) -> int:
        if self.max_sample_length is not None:
            return self.max_sample_length
        data = getattr(trainer, "datamodule", None)
        limits = [getattr(data, name, None) for name in ("max_prompt_length", "max_response_length")]
        known = [limit for limit in limits if isinstance(limit, int)]
        return sum(known) if len(known) == 2 else int(plan.lengths.max(initial=2))

    def _advice(self, plan: BatchPlan, lengths: list[int]) -> str:
        option = "micro_batch_size" if plan.max_tokens_per_rank is None else "max_tokens_per_rank"
        value = plan.micro_batch_size if plan.max_tokens_per_rank is None else plan.max_tokens_per_rank
        return (
            f"Out of memory on the heaviest micro-batch that the configuration allows: {len(lengths)} sample(s) of up to {max(lengths)}"
            f" tokens, {self.num_tokens} in all ({option}={value}, sequence_parallel_size={plan.sp_size}). Lower {option}, raise"
            " sequence_parallel_size, shard over more ranks, or lower the longest sample."
        )


def heaviest_micro_batch(plan: BatchPlan, longest: int) -> list[int]:
    """Return the lengths of the micro-batch that needs most memory and time under the limits of a plan.

    Args:
        plan: Gives the budget or the number of samples.
        longest: Most tokens of a sample.

    Returns:
        Under a budget: samples of the longest length until it is full, and one that fills the rest; a single sample of the longest
        length where that alone exceeds the budget.

    Example:
        >>> from lightning_rlbatch.functional import plan_mini_batch
        >>> heaviest_micro_batch(plan_mini_batch([3], dp_size=1, max_tokens_per_rank=20), 8)
        [8, 8, 4]
        >>> heaviest_micro_batch(plan_mini_batch([3], dp_size=1, micro_batch_size=2), 8)
        [8, 8]
    """
    if plan.budget is None:
        assert plan.micro_batch_size is not None
        return [longest] * plan.micro_batch_size
    count, rest = divmod(plan.budget, longest)
    if plan.padded or count == 0:
        return [longest] * max(1, count)
    return [longest] * count + ([rest] if rest >= 2 else [])


def rehearsal_batch(template: PackedBatch, lengths: list[int]) -> PackedBatch:
    """Return samples of given lengths with the fields of another batch, zero but for the response mask.

    Args:
        template: Gives the fields and the device.
        lengths: Tokens of each sample, at least 2.
    """
    samples = []
    for length in lengths:
        filler = PackedBatch.filler(template.schema, length, template.device)
        mask = torch.ones(length, dtype=torch.bool, device=template.device)
        mask[0] = False
        samples.append(filler.with_fields(per_token={"response_mask": mask}))
    return PackedBatch.concat(samples)
