"""The DataModule of RL: prompts in, planned mini-batches of fresh rollouts out."""

import dataclasses
import zlib
from array import array
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_rlbatch.data.batching import BatchingOptions, iteration_mini_batches, options_for
from lightning_rlbatch.data.iteration_loader import Position, overfits
from lightning_rlbatch.data.prompt_reading import PromptSource, TokenizerSource, load_tokenizer, read_prompts
from lightning_rlbatch.data.prompts import PromptBatch
from lightning_rlbatch.data.rollout_loader import CollectsRollouts, PromptLoader, RolloutLoader
from lightning_rlbatch.data.run_seed import run_seed
from lightning_rlbatch.data.sources import NoValidation
from lightning_rlbatch.distributed.failure import fail_together
from lightning_rlbatch.distributed.fingerprint import CollectiveCheck
from lightning_rlbatch.functional.workload import DEFAULT_COEFFICIENT
from lightning_rlbatch.strategies.access import meshes_of

_ORDER = ("seed", "train_batch_size", "num_prompts")  # of the passes over the prompts
_POSITIVE = (
    "train_batch_size",
    "mini_batch_size",
    "rollouts_per_prompt",
    "ppo_epochs",
    "max_prompt_length",
    "max_response_length",
    "val_batch_size",
    "val_rollouts_per_prompt",
)


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
        seed: Seed of prompt order, mini-batch membership and sampling; None takes that of ``seed_everything``. A resumed run goes on
            with the checkpoint's unless one is given.

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
        workload_coefficient: int = DEFAULT_COEFFICIENT,
        max_prompt_length: int = 1024,
        max_response_length: int = 1024,
        val_batch_size: int | None = None,
        val_rollouts_per_prompt: int = 1,
        seed: int | None = None,
    ) -> None:
        super().__init__()
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
        self._run_seed = 0
        self._restored_seed: int | None = None  # a checkpoint may be loaded before setup
        self.position = Position()
        self._train: PromptBatch | None = None
        self._val: PromptBatch | None = None
        self._check_sizes()

    def _check_sizes(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"Expected {name} to be at least 1 but got {value}.")
        if self.mini_batch_size > self.train_batch_size:
            raise ValueError(
                f"mini_batch_size={self.mini_batch_size} prompts per optimizer step exceed train_batch_size={self.train_batch_size} prompts"
                " per iteration. Lower mini_batch_size, or raise train_batch_size."
            )

    @override
    def setup(self, stage: str) -> None:
        NoValidation.refuse(stage, self.val_source, "val_prompts")
        if self._train is not None:
            return
        group = None if self.trainer is None else meshes_of(self.trainer).world_group
        self._run_seed = run_seed(self._restored_seed if self.seed is None else self.seed, group)
        with fail_together(group, "reading prompts"):
            self.tokenizer = load_tokenizer(self.tokenizer_source)
            self._check_budget()
            self._train = self._read(self.train_source, self.rollouts_per_prompt, "train_prompts")
            if self.val_source is not None:
                self._val = self._read(self.val_source, self.val_rollouts_per_prompt, "val_prompts")
        # A group's rollouts come from several ranks: a source that is random, or a file that differs, would mix prompts silently.
        CollectiveCheck(group)("reading prompts", train_prompts=_checksums(self._train), val_prompts=_checksums(self._val))

    def _check_budget(self) -> None:
        strategy = self.trainer.strategy if self.trainer is not None else None
        module = self.trainer.lightning_module if self.trainer is not None else None
        self.options.check_longest_sample(
            self.max_prompt_length,
            self.max_response_length,
            sp_size=getattr(strategy, "sequence_parallel_size", 1),
            has_reward_model=getattr(module, "reward_model_source", None) is not None,
        )

    def _read(self, source: PromptSource, rollouts_per_prompt: int, name: str) -> PromptBatch:
        return read_prompts(
            source,
            self.tokenizer,
            name=name,
            rollouts_per_prompt=rollouts_per_prompt,
            max_prompt_length=self.max_prompt_length,
            max_response_length=self.max_response_length,
            seed=self._run_seed,
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

        Raises:
            RuntimeError: Before ``setup``.
        """
        prompts = self._prompts_read()
        size = len(prompts)
        iteration = self._shuffle_of(iteration)
        first = iteration * self.train_batch_size
        chosen = []
        orders: dict[int, list[int]] = {}
        for index in range(first, first + self.train_batch_size):
            passes, place = divmod(index, size)
            if passes not in orders:
                generator = torch.Generator().manual_seed((self._run_seed * 7_368_787 + passes) % 2**63)
                orders[passes] = torch.randperm(size, generator=generator).tolist()
            chosen.append(orders[passes][place])
        return dataclasses.replace(prompts.select(chosen), positions=list(range(len(chosen))), pool=prompts, prompt_epoch=first / size)

    def _prompts_read(self) -> PromptBatch:
        if self._train is None:
            raise RuntimeError("The prompts are read in setup(), which the Trainer calls.")
        return self._train

    def _shuffle_of(self, iteration: int) -> int:
        """Return the iteration whose prompts and mini-batches an iteration has."""
        return 0 if overfits(self.trainer) else iteration

    def mini_batches_of(self, iteration: int) -> list[list[int]]:
        """Return the prompts of each mini-batch of an iteration, epoch after epoch, as positions in :meth:`iteration_prompts`."""
        shuffle = self._shuffle_of(iteration)
        return iteration_mini_batches(self.train_batch_size, self.mini_batch_size, self.ppo_epochs, seed=self._run_seed, iteration=shuffle)

    @override
    def train_dataloader(self) -> "RolloutLoader":
        module = self.trainer.lightning_module if self.trainer is not None else None
        if not isinstance(module, CollectsRollouts):
            got = "got no Trainer yet: call trainer.fit(module, datamodule=data)" if module is None else f"got {type(module).__name__}"
            raise TypeError(f"RolloutDataModule needs a module with collect_rollouts, such as PPOModule, but {got}.")
        return RolloutLoader(self, module, options_for(module, self.options))

    @override
    def val_dataloader(self) -> "PromptLoader | NoValidation":
        return NoValidation() if self._val is None else PromptLoader(self._val, self.val_batch_size or len(self._val))

    @override
    def predict_dataloader(self) -> "PromptLoader":
        """Hand out the validation prompts, or the training ones in their order if there are none."""
        prompts = self._prompts_read() if self._val is None else self._val
        return PromptLoader(prompts, self.val_batch_size or len(prompts))

    # -- position --------------------------------------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            **dataclasses.asdict(self.position),
            "prompt_epoch": self.position.iteration * self.train_batch_size // len(self._train or [0]),
            "seed": self._run_seed,
            "sizes": self._sizes(),
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = Position(iteration=state_dict["iteration"], mini_batch=state_dict["mini_batch"])
        if self.seed is None and "seed" in state_dict:
            self._restored_seed = state_dict["seed"]
            self._go_on_with(state_dict["seed"])
        now = {"seed": self._run_seed if self.seed is None else self.seed, **self._sizes()}
        before = {"seed": state_dict.get("seed", now["seed"]), **state_dict.get("sizes", {})}
        if self._train is None:
            before.pop("num_prompts", None)  # not read yet
        changed = [f"{name} was {old} and is {now[name]}" for name, old in before.items() if now[name] != old]
        if changed and self.position.mini_batch:
            raise ValueError(
                f"The checkpoint stands behind mini-batch {self.position.mini_batch} of iteration {self.position.iteration}, but the"
                f" iteration would be another one: {', '.join(changed)}. Resume with the old values, or from a checkpoint between"
                " iterations (RLBatchModelCheckpoint)."
            )
        if set(_ORDER).intersection(name for name, old in before.items() if now[name] != old):
            rank_zero_warn(f"Resuming with another order of prompts ({', '.join(changed)}): some will come again earlier than the others.")

    def _sizes(self) -> dict[str, int]:
        """Return what decides which prompts a position stands for."""
        return {
            "train_batch_size": self.train_batch_size,
            "mini_batch_size": self.mini_batch_size,
            "ppo_epochs": self.ppo_epochs,
            "num_prompts": len(self._train or []),
        }

    def _go_on_with(self, seed: int) -> None:
        self._run_seed = seed
        self._train = None if self._train is None else dataclasses.replace(self._train, seed=seed)
        self._val = None if self._val is None else dataclasses.replace(self._val, seed=seed)


def _checksums(prompts: PromptBatch | None) -> list[int] | None:
    """Return a number for each prompt's token ids, to compare between ranks."""
    return None if prompts is None else [zlib.crc32(array("q", ids).tobytes()) for ids in prompts.prompt_ids]
