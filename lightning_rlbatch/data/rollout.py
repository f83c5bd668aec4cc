"""The DataModule of RL: prompts in, planned mini-batches of fresh rollouts out."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_rlbatch.data.batching import BatchingOptions, mini_batch_members
from lightning_rlbatch.data.mini_batch import MiniBatch
from lightning_rlbatch.data.prompt_reading import PromptSource, TokenizerSource, load_tokenizer, read_prompts
from lightning_rlbatch.data.prompts import PromptBatch
from lightning_rlbatch.data.store import RolloutStore
from lightning_rlbatch.strategies.access import check_collectives


@runtime_checkable
class CollectsRollouts(Protocol):
    """What the loader asks of the module."""

    def collect_rollouts(
        self, prompts: PromptBatch, iteration: int, mini_batches: Sequence[Sequence[int]], options: BatchingOptions
    ) -> RolloutStore:
        """Sample, reward and score the rollouts of one iteration."""


@dataclasses.dataclass
class Position:
    """Where training stands in its data; independent of rank and world size.

    Attributes:
        iteration: Current RL iteration.
        mini_batch: Mini-batches of it that were handed out.
    """

    iteration: int = 0
    mini_batch: int = 0


class RolloutDataModule(pl.LightningDataModule):
    """Feed :class:`PPOModule`: every Lightning epoch is one iteration over ``train_batch_size`` prompts.

    The loader shards by itself and works under an untouched ``Trainer``. Its length is
    ``ppo_epochs * ceil(train_batch_size / mini_batch_size)`` optimizer steps per iteration. Prompts cycle in a new seeded
    order per pass. Which rollouts form a mini-batch never depends on their lengths.

    Args:
        train_prompts: Rows with a ``prompt`` (text or messages), see ``PromptSource``; other columns go to the reward functions.
        tokenizer: See ``TokenizerSource``.
        val_prompts: Rows for validation.
        train_batch_size: Prompts per iteration, over all ranks.
        mini_batch_size: Prompts per optimizer step, over all ranks; at most ``train_batch_size``. The last one of an
            iteration may be smaller.
        rollouts_per_prompt: Responses sampled per prompt (a group).
        ppo_epochs: Passes over an iteration's rollouts.
        max_tokens_per_rank: See :class:`BatchingOptions`.
        micro_batch_size: See :class:`BatchingOptions`.
        log_prob_max_tokens_per_rank: See :class:`BatchingOptions`.
        log_prob_micro_batch_size: See :class:`BatchingOptions`.
        critic_max_tokens_per_rank: See :class:`BatchingOptions`.
        critic_micro_batch_size: See :class:`BatchingOptions`.
        balance: See :class:`BatchingOptions`.
        equal_size: See :class:`BatchingOptions`.
        planner: See :class:`BatchingOptions`.
        oversize: See :class:`BatchingOptions`.
        workload_coefficient: See :func:`attention_workload`.
        max_prompt_length: Prompts of more tokens are left out, with a warning that counts them.
        max_response_length: Most tokens of one response.
        val_batch_size: Prompts per validation step, over all ranks; None takes all at once.
        val_rollouts_per_prompt: Responses per validation prompt.
        seed: Seed of prompt order, mini-batch membership and sampling.

    Raises:
        ValueError: An option is out of range or contradicts another.
    """

    def __init__(
        self,
        train_prompts: PromptSource,
        tokenizer: TokenizerSource,
        *,
        val_prompts: PromptSource | None = None,
        train_batch_size: int,
        mini_batch_size: int,
        rollouts_per_prompt: int = 1,
        ppo_epochs: int = 1,
        max_tokens_per_rank: int | None = None,
        micro_batch_size: int | None = None,
        log_prob_max_tokens_per_rank: int | None = None,
        log_prob_micro_batch_size: int | None = None,
        critic_max_tokens_per_rank: int | None = None,
        critic_micro_batch_size: int | None = None,
        balance: bool = True,
        equal_size: bool = False,
        planner: Literal["global", "per_rank"] = "global",
        oversize: Literal["error", "isolate"] = "error",
        workload_coefficient: int = 24576,
        max_prompt_length: int = 1024,
        max_response_length: int = 1024,
        val_batch_size: int | None = None,
        val_rollouts_per_prompt: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name, value in {
            "train_batch_size": train_batch_size,
            "mini_batch_size": mini_batch_size,
            "rollouts_per_prompt": rollouts_per_prompt,
            "ppo_epochs": ppo_epochs,
            "max_prompt_length": max_prompt_length,
            "max_response_length": max_response_length,
            "val_batch_size": 1 if val_batch_size is None else val_batch_size,
            "val_rollouts_per_prompt": val_rollouts_per_prompt,
        }.items():
            if value < 1:
                raise ValueError(f"Expected {name} to be at least 1 but got {value}.")
        if mini_batch_size > train_batch_size:
            raise ValueError(
                f"mini_batch_size={mini_batch_size} prompts per optimizer step exceed train_batch_size={train_batch_size} prompts per"
                " iteration. Lower mini_batch_size, or raise train_batch_size."
            )
        self.options = BatchingOptions(
            max_tokens_per_rank=max_tokens_per_rank,
            micro_batch_size=micro_batch_size,
            log_prob_max_tokens_per_rank=log_prob_max_tokens_per_rank,
            log_prob_micro_batch_size=log_prob_micro_batch_size,
            critic_max_tokens_per_rank=critic_max_tokens_per_rank,
            critic_micro_batch_size=critic_micro_batch_size,
            balance=balance,
            equal_size=equal_size,
            planner=planner,
            oversize=oversize,
            coefficient=workload_coefficient,
        )
        self.train_source = train_prompts
        self.val_source = val_prompts
        self.tokenizer_source = tokenizer
        self.train_batch_size = train_batch_size
        self.mini_batch_size = mini_batch_size
        self.rollouts_per_prompt = rollouts_per_prompt
        self.ppo_epochs = ppo_epochs
        self.max_prompt_length = max_prompt_length
        self.max_response_length = max_response_length
        self.val_batch_size = val_batch_size
        self.val_rollouts_per_prompt = val_rollouts_per_prompt
        self.seed = seed
        self.position = Position()
        self._train: PromptBatch | None = None
        self._val: PromptBatch | None = None

    @override
    def setup(self, stage: str) -> None:
        if self._train is None:
            self.tokenizer = load_tokenizer(self.tokenizer_source)
            self._check_budget()
            self._train = self._read(self.train_source, self.rollouts_per_prompt, "train_prompts")
            if self.val_source is not None:
                self._val = self._read(self.val_source, self.val_rollouts_per_prompt, "val_prompts")

    def _check_budget(self) -> None:
        strategy = self.trainer.strategy if self.trainer is not None else None
        sp_size = getattr(strategy, "sequence_parallel_size", 1)
        longest = self.max_prompt_length + self.max_response_length
        for name in ("max_tokens_per_rank", "log_prob_max_tokens_per_rank", "critic_max_tokens_per_rank"):
            budget = getattr(self.options, name)
            if budget is not None and self.options.oversize == "error" and budget * sp_size < longest:
                raise ValueError(
                    f"A sample may have {longest} tokens (max_prompt_length={self.max_prompt_length} + max_response_length="
                    f"{self.max_response_length}) but a micro-batch holds {budget * sp_size} ({name}={budget} x sequence_parallel_size="
                    f"{sp_size}). Raise the budget or sequence_parallel_size, lower the lengths, or set oversize='isolate'."
                )

    def _read(self, source: PromptSource, rollouts_per_prompt: int, name: str) -> PromptBatch:
        return read_prompts(
            source,
            self.tokenizer,
            name=name,
            rollouts_per_prompt=rollouts_per_prompt,
            max_prompt_length=self.max_prompt_length,
            max_response_length=self.max_response_length,
            seed=self.seed,
        )

    @property
    def num_mini_batches(self) -> int:
        """Optimizer steps per PPO epoch."""
        return -(-self.train_batch_size // self.mini_batch_size)

    def iteration_prompts(self, iteration: int) -> PromptBatch:
        """Return the prompts of an iteration: the next ``train_batch_size`` of an endless sequence of seeded passes.

        Under ``Trainer(overfit_batches=...)`` every iteration has the prompts of the first one.

        Args:
            iteration: Number of the iteration.
        """
        assert self._train is not None
        size = len(self._train)
        iteration = self._shuffle_of(iteration)
        first = iteration * self.train_batch_size
        chosen = []
        orders: dict[int, list[int]] = {}
        for index in range(first, first + self.train_batch_size):
            passes, place = divmod(index, size)
            if passes not in orders:
                generator = torch.Generator().manual_seed((self.seed * 7_368_787 + passes) % 2**63)
                orders[passes] = torch.randperm(size, generator=generator).tolist()
            chosen.append(orders[passes][place])
        return dataclasses.replace(self._train.select(chosen), positions=list(range(len(chosen))), pool=self._train)

    def _shuffle_of(self, iteration: int) -> int:
        """Return the iteration whose prompts and mini-batches an iteration has."""
        trainer: Any = self.trainer  # connectors set attributes that type checkers do not see
        return 0 if trainer is not None and trainer.overfit_batches > 0 else iteration

    def mini_batches_of(self, iteration: int) -> list[list[int]]:
        """Return the prompts of each mini-batch of an iteration, epoch after epoch, as positions in :meth:`iteration_prompts`."""
        return [
            part
            for epoch in range(self.ppo_epochs)
            for part in mini_batch_members(
                self.train_batch_size, self.mini_batch_size, seed=self.seed, iteration=self._shuffle_of(iteration), epoch=epoch
            )
        ]

    @override
    def train_dataloader(self) -> "RolloutLoader":
        module = self.trainer.lightning_module if self.trainer is not None else None
        if not isinstance(module, CollectsRollouts):
            raise TypeError(f"RolloutDataModule needs a module with collect_rollouts, such as PPOModule, but got {type(module).__name__}.")
        if self.options.cuts_critic and getattr(module, "critic_source", None) in (None, "shared"):
            raise ValueError(
                "critic_max_tokens_per_rank and critic_micro_batch_size need a critic with a trunk of its own, but the module's critic is"
                f" {getattr(module, 'critic_source', None)!r}. Set critic, or remove the option."
            )
        if self.options.cuts_critic and isinstance(self.trainer.strategy, DDPStrategy):
            raise ValueError("DDP reduces policy and critic together, so they need the same micro-batches. Use strategy='rlbatch_fsdp'.")
        return RolloutLoader(self, module, dataclasses.replace(self.options, padded=not getattr(module, "remove_padding", True)))

    @override
    def val_dataloader(self) -> "PromptLoader | list[Any]":
        return [] if self._val is None else PromptLoader(self._val, self.val_batch_size or len(self._val))

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            **dataclasses.asdict(self.position),
            "prompt_epoch": self.position.iteration * self.train_batch_size // len(self._train or [0]),
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = Position(iteration=state_dict["iteration"], mini_batch=state_dict["mini_batch"])


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


class RolloutLoader:
    """Hands out one iteration per pass; collects its rollouts when the first mini-batch is asked for.

    It has a length, so Lightning does not fetch ahead (rollouts would be one optimizer step stale), and no state of its own:
    the position lives in the data module, advanced before each mini-batch leaves, so that a checkpoint taken after a step
    points behind it.

    Args:
        data: The data module.
        module: What collects rollouts.
        options: How to cut.
    """

    def __init__(self, data: RolloutDataModule, module: CollectsRollouts, options: BatchingOptions) -> None:
        self._data = data
        self._module = module
        self._options = options
        self._said_cut = False

    def __len__(self) -> int:
        """Return the optimizer steps per iteration, the same for every iteration."""
        return self._data.ppo_epochs * self._data.num_mini_batches

    def __iter__(self) -> Iterator[MiniBatch]:
        """Yield the mini-batches that the current iteration still owes."""
        data, position = self._data, self._data.position
        iteration, first = position.iteration, position.mini_batch
        members = data.mini_batches_of(iteration)[: self._limit()]
        if first:
            rank_zero_warn(
                f"Resuming inside iteration {iteration}: the prompts of its remaining {len(members) - first} mini-batches are rolled out"
                " again with the restored policy. Statistics over the whole iteration (whitening) see these prompts only."
            )
        remaining = members[first:]
        needed = sorted({prompt for part in remaining for prompt in part})
        place = {prompt: index for index, prompt in enumerate(needed)}
        batches = [[place[prompt] for prompt in part] for part in remaining]
        placed = _first_uses(batches)
        if data.trainer is not None:
            check_collectives(data.trainer, "collect rollouts", iteration=iteration, prompts=needed, mini_batches=batches)
        store = self._module.collect_rollouts(data.iteration_prompts(iteration).select(needed), iteration, placed, self._options)
        for offset, part in enumerate(batches, start=1):
            position.mini_batch = first + offset
            if position.mini_batch == len(members):
                position.iteration, position.mini_batch = iteration + 1, 0
            yield store.mini_batch(store.table.ids_of_prompts(part))

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: tells Lightning that the loader can resume, while the position lives in the data module."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Ignore the empty state."""

    def _limit(self) -> int:
        """Return the mini-batches of an iteration that the Trainer lets through; what it cuts off is never rolled out."""
        trainer: Any = self._data.trainer
        allowed = len(self) if trainer is None else int(min(trainer.num_training_batches, len(self)))
        if 0 < allowed < len(self) and not self._said_cut and trainer is not None and not trainer.fast_dev_run:
            self._said_cut = True
            rank_zero_warn(
                f"The Trainer takes {allowed} of the {len(self)} mini-batches of each iteration (limit_train_batches or overfit_batches):"
                " the prompts of the others are neither rolled out nor trained on. Lower train_batch_size or ppo_epochs to train on all."
            )
        return allowed or len(self)


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
