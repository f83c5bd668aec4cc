"""Manual optimization of one planned mini-batch per training step."""

import dataclasses
import inspect
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from lightning_rlbatch.data.mini_batch import MiniBatch
from lightning_rlbatch.distributed.failure import end_of_data_is_an_error
from lightning_rlbatch.distributed.mesh import Meshes, single_process_meshes
from lightning_rlbatch.distributed.reductions import all_reduce_sums, gradient_scale
from lightning_rlbatch.functional.aggregation import Denominators
from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.models.scorer import TokenScorer
from lightning_rlbatch.modules.callback_checks import check_callbacks
from lightning_rlbatch.modules.gradient_norm import total_norm
from lightning_rlbatch.modules.hyperparameters import hyperparameters
from lightning_rlbatch.modules.loading import LoadsFromCheckpoints
from lightning_rlbatch.modules.schedulers import AdvancesSchedulers, PlateauSteps
from lightning_rlbatch.modules.step_sums import accumulate, ratios
from lightning_rlbatch.modules.stop_hooks import StopsTogether
from lightning_rlbatch.modules.trainer_checks import check_makers, check_manual_optimization, check_strategy
from lightning_rlbatch.strategies.access import averages_over, check_collectives, meshes_of
from lightning_rlbatch.strategies.compatibility import use_atomic_checkpoints
from lightning_rlbatch.strategies.watching import meet_before_communicating, watches_ranks

OptimizerFactory = Callable[[Iterable[Any]], Optimizer]
LRSchedulerFactory = Callable[[Optimizer], LRScheduler]


def default_optimizer(parameters: Iterable[Any]) -> Optimizer:
    """Return AdamW with a learning rate for fine-tuning a pretrained model, 1e-6."""
    return torch.optim.AdamW(parameters, lr=1e-6)


def trained(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a module that are not frozen."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


@dataclasses.dataclass
class MicroBatchOutput:
    """What a module computes from one micro-batch.

    Attributes:
        loss: 0-d: this micro-batch's summed terms divided by GLOBAL denominators of the mini-batch.
        sums: Metric name to (numerator, denominator) of this micro-batch. Both are summed over micro-batches and
            data-parallel ranks before they are divided, so no metric depends on the cut.
    """

    loss: Tensor
    sums: dict[str, tuple[Tensor | float, Tensor | float]] = dataclasses.field(default_factory=dict)


MicroBatchStep = Callable[[PackedBatch, Denominators], MicroBatchOutput]


class RLBatchModule(LoadsFromCheckpoints, AdvancesSchedulers, StopsTogether):
    """Run the micro-batches of a mini-batch, then one optimizer step: one Lightning batch = one ``global_step``.

    A subclass builds its models in :meth:`build_models` and defines :meth:`micro_batch_step`. The gradient is the same
    for any cut, any number of ranks and any sequence-parallel size, because losses are sums over global denominators.

    A step whose gradient is not finite, or whose mini-batch has nothing to train on, is skipped on all ranks: Lightning
    counts it, ``train/skipped_steps`` is 1, and parameters, optimizer states and learning rate stay as they are.

    Args:
        optimizer: Makes the optimizer from parameter groups, for example ``torch.optim.AdamW`` with its ``init_args``.
        lr_scheduler: Makes a scheduler that advances once per optimizer step; ``lightning.pytorch.cli.ReduceLROnPlateau``, which has the
            metric to ``monitor``, advances once per iteration. Override ``configure_optimizers`` to say ``interval`` and ``frequency``.
        max_grad_norm: Largest gradient norm per role (policy, critic, ...); None leaves gradients alone. Replaces
            ``Trainer(gradient_clip_val=...)``, which Lightning refuses under manual optimization.
    """

    def __init__(
        self,
        *,
        optimizer: OptimizerFactory = default_optimizer,
        lr_scheduler: LRSchedulerFactory | None = None,
        max_grad_norm: float | None = 1.0,
    ) -> None:
        super().__init__()
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"Expected max_grad_norm to be positive but got {max_grad_norm}. Pass None to switch clipping off.")
        check_makers(optimizer=optimizer, lr_scheduler=lr_scheduler)
        arguments, self.unrecorded_arguments = hyperparameters(self, inspect.currentframe())
        self.save_hyperparameters(arguments)
        self.automatic_optimization = False
        self.optimizer_factory = optimizer
        self.lr_scheduler_factory = lr_scheduler
        self.max_grad_norm = max_grad_norm
        self.loss_norm_constant: float | None = None
        self._built = False
        self._step_metrics: dict[str, float] = {}
        self._empty_step = False
        self._skipped = False
        self._warned: set[str] = set()
        self._logged: set[str] = set()

    # -- for subclasses --------------------------------------------------------------------------------------------------

    @abstractmethod
    def build_models(self) -> None:
        """Create the models as attributes; called once, before they are sharded."""

    @abstractmethod
    def micro_batch_step(self, micro_batch: PackedBatch, denominators: Denominators) -> MicroBatchOutput:
        """Return loss and metric sums of one micro-batch.

        Args:
            micro_batch: Samples of this rank; a filler has no response token, and every model must run on it all the same.
            denominators: Counts of the whole mini-batch over all data-parallel ranks.
        """

    def backward_passes(self, batch: MiniBatch, denominators: Denominators) -> list[tuple[list[PackedBatch], MicroBatchStep]]:
        """Return the passes of one optimizer step: micro-batches, and what computes their loss; one pass by default.

        Gradients are synchronised after the last micro-batch of each pass. Passes that train different models may be cut differently.

        Args:
            batch: This rank's part.
            denominators: Counts of the whole mini-batch.
        """
        return [(batch.micro_batches, self.micro_batch_step)]

    def update_scorers(self) -> list[TokenScorer]:
        """Return the scorers that run in micro-steps: those of the trained models by default."""
        return [child for child in self.children() if isinstance(child, TokenScorer)]

    def optimizer_groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups, each with a ``name``: the role whose gradient norm is clipped and logged."""
        return [{"name": "policy", "params": trained(self)}]

    def score_mask(self, micro_batch: PackedBatch) -> Tensor:
        """Return the tokens that the loss counts, ``[T]`` bool."""
        return micro_batch["response_mask"]

    # -- Lightning ---------------------------------------------------------------------------------------------------------

    @property
    def meshes(self) -> Meshes:
        """Groups and sizes of this run, whatever the strategy; this process alone without a Trainer (``load_from_checkpoint``)."""
        return single_process_meshes() if self._trainer is None else meshes_of(self.trainer)

    @property
    def gets_weights_from_rank_zero(self) -> bool:
        """Whether a model made here needs no weights, because the strategy copies rank 0's, a block at a time.

        The ranks of rank 0's sequence-parallel group all have them: they check the model together.
        """
        return self.is_sharded_later and self.meshes.dp_rank > 0

    @property
    def is_sharded_later(self) -> bool:
        """Whether the strategy will shard the models made here; every rank then holds a copy of its shards alone."""
        return self._trainer is not None and averages_over(self.trainer) == "fsdp"

    @override
    def configure_model(self) -> None:
        if self._trainer is not None:
            check_strategy(self.trainer, self)
            check_callbacks(self.trainer, self)  # those of `configure_callbacks`, too
            use_atomic_checkpoints(self.trainer)
        if not self._built:
            self.build_models()
            self._built = True
        if self._trainer is not None:
            meet_before_communicating(self.trainer)

    @override
    def configure_callbacks(self) -> list[Any]:
        """Refuse what Lightning would refuse in less helpful words: this is the first hook that a Trainer calls.

        Returns:
            Callbacks that the module needs; those of a subclass are added to them.
        """
        check_manual_optimization(self.trainer, self)
        check_callbacks(self.trainer, self)
        needed: list[Any] = [PlateauSteps(), *watches_ranks(self.trainer)]
        trainer: Any = self.trainer
        earlier = tuple(map(type, needed))  # from the last run of this Trainer: Lightning would announce that ours override the user's
        trainer.callbacks = [callback for callback in trainer.callbacks if type(callback) not in earlier]
        return needed

    @override
    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer_factory(self.optimizer_groups())
        if self.lr_scheduler_factory is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.lr_scheduler_factory(optimizer)}

    @override
    def training_step(self, batch: MiniBatch, batch_idx: int) -> dict[str, Tensor]:
        """Train on one mini-batch.

        Args:
            batch: This rank's part.
            batch_idx: Its number in the epoch.

        Returns:
            ``loss``, of all ranks: it is there for callbacks that look at the outputs.
        """
        if not isinstance(batch, MiniBatch):
            raise TypeError(
                f"{type(self).__name__} trains on MiniBatch objects but the dataloader yielded {type(batch).__name__}."
                " Use RolloutDataModule, ReplayDataModule or SFTDataModule, or yield MiniBatch from your own loader."
            )
        try:
            return {"loss": self._train_on(batch)}
        except StopIteration as error:
            raise end_of_data_is_an_error(error, f"The training step of {type(self).__name__}") from error

    def _train_on(self, batch: MiniBatch) -> Tensor:
        denominators = self.count(batch)
        sums = self.accumulate_gradients(batch, denominators)
        self._empty_step = bool(denominators.num_tokens == 0)
        self._optimizer_step()
        return self._log_step(sums, batch, denominators)

    def accumulate_gradients(self, batch: MiniBatch, denominators: Denominators) -> dict[str, Tensor | float]:
        """Run every micro-batch of this rank forward and backward, all ranks together; gradients are synchronised at the end.

        Args:
            batch: This rank's part.
            denominators: Counts of the whole mini-batch, from :meth:`count`.

        Returns:
            This rank's sums of metrics, as :func:`accumulate` makes them.
        """
        scale = gradient_scale(self.meshes, averages_over(self.trainer))
        sums: dict[str, Tensor | float] = {}
        for scorer in self.update_scorers():  # one read from the device here instead of one in each micro-step
            scorer.positions.prepare([*batch.micro_batches, *(batch.critic_micro_batches or ())])
        passes = self.backward_passes(batch, denominators)
        check_collectives(
            self.trainer,
            "optimizer step",
            global_step=self.global_step,
            num_micro_steps=[len(micro_batches) for micro_batches, _ in passes],
            plan=None if batch.plan is None else batch.plan.assignment,
        )
        # DDP reduces once per step, in a backward pass that reaches every parameter: the passes' last losses go through it together.
        joined: list[Tensor] = []
        joins = isinstance(self.trainer.strategy, DDPStrategy)
        for number, (micro_batches, step) in enumerate(passes, start=1):
            for index, micro_batch in enumerate(micro_batches, start=1):
                is_last = index == len(micro_batches)
                with nullcontext() if is_last else self._deferred_gradient_sync():
                    output = step(micro_batch, denominators)
                    if joins and is_last and number < len(passes):
                        joined.append(output.loss)
                    else:
                        self.manual_backward(sum(joined if is_last else [], output.loss) * scale)
                accumulate(sums, {"train/loss": (output.loss.detach(), 0.0), **output.sums})
        return sums

    def count(self, batch: MiniBatch) -> Denominators:
        """Count tokens and sequences of the whole mini-batch: one small all-reduce over data-parallel ranks.

        Args:
            batch: This rank's part.

        Returns:
            Global counts; fillers and fully masked samples are in none of them.
        """
        local = [Denominators.local(self.score_mask(micro), micro.cu_seqlens) for micro in batch.micro_batches]
        counts = torch.stack([piece.counts() for piece in local]).sum(0)
        totals = all_reduce_sums({"num_tokens": counts[0], "num_sequences": counts[1]}, self.meshes.dp_group)
        return Denominators(totals["num_tokens"], totals["num_sequences"], self.loss_norm_constant)

    def _deferred_gradient_sync(self) -> AbstractContextManager[Any]:
        strategy = self.trainer.strategy
        return strategy.block_backward_sync() if isinstance(strategy, ParallelStrategy) else nullcontext()

    # -- optimizer step ------------------------------------------------------------------------------------------------------

    def _optimizer_step(self) -> None:
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        optimizer.step()  # calls on_before_optimizer_step after a loss scaler has unscaled the gradients
        optimizer.zero_grad(set_to_none=True)
        self.advance_schedulers(skipped=self._skipped, is_last_step=self.trainer.is_last_batch)

    @override
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Clip per role; leave no gradient behind if the step must not happen.

        Norms are global (FSDP reduces them, DDP ranks hold equal gradients), so all ranks decide alike. Optimizers pass over
        parameters without a gradient, which makes the skipped step a step that never was; zero gradients would still move AdamW.
        """
        metrics = {"train/lr": float(optimizer.param_groups[0]["lr"])}
        finite = True
        for group in optimizer.param_groups:
            norm = self._clip(group["params"])
            metrics[f"train/grad_norm/{group.get('name', 'parameters')}"] = norm
            finite = finite and math.isfinite(norm)
        self._skipped = self._empty_step or not finite
        if self._empty_step:
            self._warn_once("A mini-batch has no token to train on, on any rank: the step is skipped (train/skipped_steps counts them).")
        elif not finite:
            self._warn_once("The gradient norm is not finite: the step is skipped on all ranks (train/skipped_steps counts them).")
        if self._skipped:
            optimizer.zero_grad(set_to_none=True)
        metrics["train/skipped_steps"] = float(self._skipped)
        self._step_metrics = metrics

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            rank_zero_warn(message)

    def _clip(self, parameters: list[Tensor]) -> float:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = total_norm(gradients)
        if self.max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.max_grad_norm, norm)
        return float(norm)

    # -- metrics -------------------------------------------------------------------------------------------------------------

    def _log_step(self, sums: dict[str, Tensor | float], batch: MiniBatch, denominators: Denominators) -> Tensor:
        totals = all_reduce_sums(sums, self.meshes.dp_group)
        metrics = ratios(totals)
        metrics["train/loss"] = totals["train/loss\0numerator"]  # already divided by global denominators
        metrics |= {"train/num_tokens": float(denominators.num_tokens), "train/num_sequences": float(denominators.num_sequences)}
        metrics |= self._step_metrics | batch.metrics
        # Lightning would log the value of an earlier step again for a metric that this step has not (an empty mini-batch).
        metrics |= dict.fromkeys(self._logged - metrics.keys(), math.nan)
        self._logged |= metrics.keys()
        self.log_dict(metrics, on_step=True, on_epoch=False, batch_size=1, sync_dist=False)
        self.log("loss", metrics["train/loss"], prog_bar=True, logger=False, batch_size=1)
        return torch.tensor(metrics["train/loss"])
