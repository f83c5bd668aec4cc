"""What the loaders of fresh and of recorded rollouts share: one RL iteration per pass, from where the data module stands."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import lightning.pytorch as pl

from lightning_rlbatch.data.mini_batch import MiniBatch
from lightning_rlbatch.data.store import RolloutStore


@dataclasses.dataclass
class Position:
    """Where training stands in its data; independent of rank and world size.

    Attributes:
        iteration: Current RL iteration.
        mini_batch: Mini-batches of it that were handed out.
    """

    iteration: int = 0
    mini_batch: int = 0


class IterationData(Protocol):
    """What the loaders ask of their data module."""

    ppo_epochs: int
    position: Position
    trainer: pl.Trainer | None

    @property
    def num_mini_batches(self) -> int:
        """Optimizer steps per PPO epoch."""


class Resumable:
    """A loader without a state of its own: that it has one at all tells Lightning that training can go on in the middle of an epoch."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the data module keeps the position."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Ignore the empty state."""


class IterationLoader(Resumable):
    """Hands out one iteration per pass.

    It has a length, so Lightning does not fetch ahead (rollouts would be one optimizer step stale). The position lives in the data
    module, advanced before each mini-batch leaves, so that a checkpoint taken after a step points behind it.

    Args:
        data: The data module.
    """

    def __init__(self, data: IterationData) -> None:
        self._iteration_data = data

    def __len__(self) -> int:
        """Return the optimizer steps per iteration, the same for every iteration."""
        return self._iteration_data.ppo_epochs * self._iteration_data.num_mini_batches

    def _limit(self) -> int:
        """Return the mini-batches of an iteration that the Trainer lets through (limit_train_batches), to go on to the next after them."""
        trainer = self._iteration_data.trainer
        return len(self) if trainer is None else int(min(trainer.num_training_batches, len(self))) or len(self)

    def _hand_out(self, store: RolloutStore, mini_batches: Sequence[Sequence[int]]) -> Iterator[MiniBatch]:
        """Yield what the current iteration still owes.

        Args:
            store: The iteration's rollouts.
            mini_batches: The prompts in the store of each mini-batch from the current position to the end of the iteration.
        """
        position = self._iteration_data.position
        iteration, last = position.iteration, position.mini_batch + len(mini_batches)
        for number, prompts in enumerate(mini_batches, start=position.mini_batch + 1):
            position.mini_batch = number
            if number == last:
                position.iteration, position.mini_batch = iteration + 1, 0
            yield store.mini_batch(store.table.ids_of_prompts(prompts))


def overfits(trainer: pl.Trainer | None) -> bool:
    """Return whether every epoch is to have the data of the first one (``Trainer(overfit_batches=...)``)."""
    return getattr(trainer, "overfit_batches", 0) > 0  # set by a connector, where type checkers do not see it


def trainer_of(data: pl.LightningDataModule) -> pl.Trainer:
    """Return the Trainer that a data module is attached to.

    Args:
        data: The data module.

    Raises:
        RuntimeError: There is none yet.
    """
    if data.trainer is None:
        raise RuntimeError(f"{type(data).__name__} has no Trainer yet. Pass it to one: trainer.fit(module, datamodule=data).")
    return data.trainer
