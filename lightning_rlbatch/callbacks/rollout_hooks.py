"""The hooks that tell callbacks about an iteration's rollouts."""

import dataclasses
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from lightning_rlbatch.data.prompts import PromptBatch
from lightning_rlbatch.data.store import SAMPLE_ID, RolloutStore


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Rollouts:
    """The rollouts of one collection, as they will be trained on.

    Attributes:
        store: This rank's samples (those it trains on first, with rewards, log-probs and advantages), and the table of all ranks'
            lengths and rewards. Rollouts without a reward are in the table only. Sequence-parallel peers hold the same samples.
        prompts: Prompts of the collection, the same on every rank; after a resume inside an iteration a part of the iteration's.
        iteration: RL iteration.
    """

    store: RolloutStore
    prompts: PromptBatch
    iteration: int

    def __repr__(self) -> str:
        return f"Rollouts(iteration={self.iteration}, {self.store.samples.num_samples} of {len(self.store.table)} samples on this rank)"

    def texts(self, max_samples: int | None = None) -> list[tuple[str, str]]:
        """Return prompt and completion text of each of this rank's samples, in their order.

        Args:
            max_samples: Decode only so many; None for all.
        """
        samples, prompts = self.store.samples, self.prompts
        if max_samples is not None:
            samples = samples.select(range(min(max_samples, samples.num_samples)))
        samples = samples.to("cpu")
        own = [index // prompts.rollouts_per_prompt for index in samples[SAMPLE_ID].tolist()]
        texts = []
        for prompt, ids, mask in zip(own, samples.split_per_sample("input_ids"), samples.split_per_sample("response_mask")):
            # From the first response token on: turns of an environment inside the response belong to the text.
            start = int(mask.int().argmax()) if bool(mask.any()) else len(ids)
            texts.append((prompts.prompts[prompt], prompts.tokenizer.decode(ids[start:].tolist(), skip_special_tokens=True)))
        return texts


class RolloutCallback(Callback):
    """A callback around the collection of rollouts: override :meth:`on_rollout_start`, :meth:`on_rollout_end` or both."""

    def on_rollout_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", prompts: PromptBatch, iteration: int) -> None:
        """Know that the rollouts of an iteration are about to be sampled; called on every rank.

        Args:
            trainer: The trainer.
            pl_module: The module that collects them.
            prompts: Prompts of the collection, the same on every rank.
            iteration: RL iteration.
        """

    def on_rollout_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", rollouts: Rollouts) -> None:
        """See an iteration's rollouts before the first optimizer step on them; called on every rank.

        Args:
            trainer: The trainer.
            pl_module: The module that collected them.
            rollouts: This rank's samples and the table of all; not to be changed.
        """


def call_on_rollout_end(trainer: "pl.Trainer", pl_module: "pl.LightningModule", rollouts: Rollouts) -> None:
    """Call ``on_rollout_end`` of every callback that has it, in the order of ``trainer.callbacks``."""
    _call(trainer, "on_rollout_end", pl_module, rollouts)


def call_on_rollout_start(trainer: "pl.Trainer", pl_module: "pl.LightningModule", prompts: PromptBatch, iteration: int) -> None:
    """Call ``on_rollout_start`` of every callback that has it, in the order of ``trainer.callbacks``."""
    _call(trainer, "on_rollout_start", pl_module, prompts, iteration)


def _call(trainer: "pl.Trainer", name: str, *arguments: Any) -> None:
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by a connector, where type checkers do not see it
        hook = getattr(callback, name, None)
        if hook is not None:
            hook(trainer, *arguments)
