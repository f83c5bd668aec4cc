"""The loaders of RL: prompts for validation, and planned mini-batches of fresh rollouts for training."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_rlbatch.data.batching import BatchingOptions
from lightning_rlbatch.data.iteration_loader import IterationLoader
from lightning_rlbatch.data.mini_batch import MiniBatch
from lightning_rlbatch.data.prompts import PromptBatch
from lightning_rlbatch.data.store import RolloutStore
from lightning_rlbatch.strategies.access import check_collectives
from lightning_rlbatch.strategies.stopping import CollectionStopped

if TYPE_CHECKING:
    from lightning_rlbatch.data.rollout import RolloutDataModule


@runtime_checkable
class CollectsRollouts(Protocol):
    """What the loader asks of the module."""

    def collect_rollouts(
        self, prompts: PromptBatch, iteration: int, mini_batches: Sequence[Sequence[int]], options: BatchingOptions
    ) -> RolloutStore:
        """Sample, reward and score the rollouts of one iteration."""


class PromptLoader:
    """Hands out prompts in order, the same on every rank: ranks share the rollouts of a batch, not the batches.

    So every rank runs the same number of validation steps, whatever the number of prompts and ranks.

    Args:
        prompts: All prompts.
        batch_size: Prompts per step over all ranks.
    """

    def __init__(self, prompts: PromptBatch, batch_size: int) -> None:
        self._prompts = prompts
        self._batch_size = batch_size

    def __len__(self) -> int:
        """Return the number of steps."""
        return -(-len(self._prompts) // self._batch_size)

    def __iter__(self) -> Iterator[PromptBatch]:
        """Yield the batches."""
        for start in range(0, len(self._prompts), self._batch_size):
            yield self._prompts.select(range(start, min(start + self._batch_size, len(self._prompts))))


class RolloutLoader(IterationLoader):
    """Hands out one iteration per pass; collects its rollouts when the first mini-batch is asked for.

    Args:
        data: The data module.
        module: What collects rollouts.
        options: How to cut.
    """

    def __init__(self, data: "RolloutDataModule", module: CollectsRollouts, options: BatchingOptions) -> None:
        super().__init__(data)
        self._data = data
        self._module = module
        self._options = options
        self._said_cut = False
        self._said_bottleneck = False

    def __iter__(self) -> Iterator[MiniBatch]:
        """Yield the mini-batches that the current iteration still owes."""
        data, iteration, first = self._data, self._data.position.iteration, self._data.position.mini_batch
        self._say_cut()
        remaining = data.mini_batches_of(iteration)[first : self._limit()]
        if first:
            rank_zero_warn(
                f"Resuming inside iteration {iteration}: the prompts of its remaining {len(remaining)} mini-batches are rolled out"
                " again with the restored policy. Statistics over the whole iteration (whitening) see these prompts only."
            )
        needed = sorted({prompt for part in remaining for prompt in part})
        place = {prompt: index for index, prompt in enumerate(needed)}
        batches = [[place[prompt] for prompt in part] for part in remaining]
        placed = _first_uses(batches)
        if data.trainer is not None:
            check_collectives(data.trainer, "collect rollouts", iteration=iteration, prompts=needed, mini_batches=batches)
        try:
            store = self._module.collect_rollouts(data.iteration_prompts(iteration).select(needed), iteration, placed, self._options)
        except CollectionStopped:
            return  # the epoch ends without a step, and training with it
        for batch in self._hand_out(store, batches):
            self._say_bottleneck(batch)
            yield batch

    def _say_bottleneck(self, batch: MiniBatch) -> None:
        """Say once per run that one sample bounds the efficiency of every plan, with the number."""
        text = None if batch.plan is None or self._said_bottleneck else batch.plan.bottleneck()
        if text is not None:
            self._said_bottleneck = True
            rank_zero_info(text)

    def _say_cut(self) -> None:
        """Say once per run that the Trainer cuts off mini-batches of each iteration; their prompts are never rolled out."""
        trainer, allowed = self._data.trainer, self._limit()
        if allowed < len(self) and not self._said_cut and trainer is not None and not getattr(trainer, "fast_dev_run", False):
            self._said_cut = True
            rank_zero_warn(
                f"The Trainer takes {allowed} of the {len(self)} mini-batches of each iteration (limit_train_batches or overfit_batches):"
                " the prompts of the others are neither rolled out nor trained on. Lower train_batch_size or ppo_epochs to train on all."
            )


def _first_uses(batches: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return mini-batches that hold every prompt exactly once: the leading ones without repetition, and one of all others."""
    seen: set[int] = set()
    leading: list[list[int]] = []
    for part in batches:
        if seen.intersection(part):
            break
        seen.update(part)
        leading.append(list(part))
    others = sorted({prompt for part in batches for prompt in part} - seen)
    return [*leading, others] if others else leading
