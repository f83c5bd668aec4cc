"""The DataModule that trains on recorded rollouts: no prompts, no generation."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, cast, runtime_checkable

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_rlbatch.data.batching import BatchingOptions, iteration_mini_batches, options_for
from lightning_rlbatch.data.dumps import RolloutDump
from lightning_rlbatch.data.iteration_loader import IterationLoader, Position, overfits, trainer_of
from lightning_rlbatch.data.mini_batch import MiniBatch
from lightning_rlbatch.data.prompt_reading import TokenizerSource, load_tokenizer
from lightning_rlbatch.data.recording import RecordedRollouts, gather_recorded_table
from lightning_rlbatch.data.sources import NoValidation
from lightning_rlbatch.data.store import RolloutStore
from lightning_rlbatch.distributed.failure import fail_together
from lightning_rlbatch.distributed.fingerprint import CollectiveCheck
from lightning_rlbatch.distributed.mesh import Meshes
from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.functional.schema import Schema
from lightning_rlbatch.functional.workload import DEFAULT_COEFFICIENT
from lightning_rlbatch.strategies.access import meshes_of


@runtime_checkable
class ScoresRollouts(Protocol):
    """What replaying asks of a module when the recorded scores are not enough."""

    def score_rollouts(self, store: RolloutStore) -> None:
        """Add old and reference log-probs, values and advantages to the samples of a store; collective over all ranks."""


class RolloutSource(Protocol):
    """Recorded iterations, seen alike by every rank."""

    iterations: list[int]
    num_prompts: int

    def seed(self, iteration: int) -> int:
        """Return the seed of the recorded run."""

    def rollouts_per_prompt(self, iteration: int) -> int:
        """Return the group size."""

    def schema(self, iteration: int) -> Schema:
        """Return the fields of the samples."""

    def read(self, iteration: int, rank: int, world_size: int) -> PackedBatch:
        """Return a rank's share, by ascending ``sample_id``."""


class ReplayDataModule(pl.LightningDataModule):
    """Feed :class:`PPOModule` from recorded rollouts: every Lightning epoch is one recorded iteration.

    With the recorded run's ``mini_batch_size``, ``ppo_epochs`` and initial weights, replaying gives the recorded run's losses, on any
    number of ranks and with any budget: membership of mini-batches, log-probs, advantages and groups are the recorded ones. After the
    last recorded iteration it begins again with the first, in another order.

    Two kinds of data: what :class:`RolloutRecorder` wrote, and, with a ``tokenizer``, text dumps of verl, TRL or
    :class:`RolloutLogger` (see :class:`RolloutDump`), whose log-probs and advantages the module computes.

    Args:
        dirpath: Folder (or file) of recorded rollouts.
        mini_batch_size: Prompts per optimizer step, over all ranks.
        ppo_epochs: Passes over an iteration's rollouts.
        rescore: Compute log-probs, values and advantages with the module's own models and estimator instead of taking the recorded ones.
            None does so for text dumps only.
        tokenizer: Of the policy, for text dumps; see ``TokenizerSource``.
        reward_columns: Text dumps: columns whose sum is the reward; None takes ``reward`` or ``score``.
        append_eos: Text dumps: end every completion with the end token.
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
        seed: Seed of mini-batch membership; None takes the recorded run's.

    Raises:
        ValueError: An option is out of range, or the recorded rollouts are incomplete, damaged or lack a field; at ``setup``, on
            every rank.
    """

    def __init__(
        self,
        dirpath: str,
        *,
        mini_batch_size: int,
        ppo_epochs: int = 1,
        rescore: bool | None = None,
        tokenizer: TokenizerSource | None = None,
        reward_columns: list[str] | None = None,
        append_eos: bool = True,
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
        seed: int | None = None,
    ) -> None:
        super().__init__()
        for name, value in {"mini_batch_size": mini_batch_size, "ppo_epochs": ppo_epochs}.items():
            if value < 1:
                raise ValueError(f"Expected {name} to be at least 1 but got {value}.")
        if tokenizer is not None and rescore is False:
            raise ValueError("A text dump has no log-probs, so rescore=False is impossible with a tokenizer. Drop one of them.")
        if tokenizer is None and (reward_columns is not None or not append_eos):
            raise ValueError("reward_columns and append_eos have an effect on text dumps only. Pass the tokenizer, or drop them.")
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
        self.dirpath = dirpath
        self.tokenizer_source = tokenizer
        self.reward_columns = reward_columns
        self.append_eos = append_eos
        self.mini_batch_size = mini_batch_size
        self.ppo_epochs = ppo_epochs
        self.rescore = tokenizer is not None if rescore is None else rescore
        self.seed = seed
        self.position = Position()
        self._source: RolloutSource | None = None

    @property
    def source(self) -> RolloutSource:
        """The recorded rollouts, known from ``setup`` on.

        Raises:
            RuntimeError: Before.
        """
        if self._source is None:
            raise RuntimeError("The recorded rollouts are opened in setup(), which the Trainer calls.")
        return self._source

    @property
    def num_mini_batches(self) -> int:
        """Optimizer steps per PPO epoch."""
        return -(-self.source.num_prompts // self.mini_batch_size)

    @override
    def setup(self, stage: str) -> None:
        if stage == "validate":
            raise ValueError("Recorded rollouts are no prompts to validate on. Validate with the val_prompts of a RolloutDataModule.")
        if self._source is not None:
            return
        group = meshes_of(trainer_of(self)).world_group
        with fail_together(group, "opening recorded rollouts"):
            self._source = self._open()
            self._check_mini_batches(self._source)
        # A disk that is not shared, or a folder that is being written, would make ranks run different numbers of steps.
        sizes = [self.source.rollouts_per_prompt(iteration) for iteration in self.source.iterations]
        seen = {"iterations": self.source.iterations, "num_prompts": self.source.num_prompts, "rollouts_per_prompt": sizes}
        CollectiveCheck(group)("opening recorded rollouts", **seen)

    def _open(self) -> RolloutSource:
        if self.tokenizer_source is None:
            return RecordedRollouts(self.dirpath)
        tokenizer = load_tokenizer(self.tokenizer_source)
        return RolloutDump(Path(self.dirpath), tokenizer, reward_columns=self.reward_columns, append_eos=self.append_eos)

    def _check_mini_batches(self, source: RolloutSource) -> None:
        if self.mini_batch_size > source.num_prompts:
            raise ValueError(
                f"mini_batch_size={self.mini_batch_size} prompts per optimizer step exceed the {source.num_prompts} prompts per iteration"
                f" recorded in {self.dirpath}. Lower mini_batch_size."
            )

    @override
    def train_dataloader(self) -> "ReplayLoader":
        trainer = trainer_of(self)
        module = trainer.lightning_module
        if self.rescore and not isinstance(module, ScoresRollouts):
            raise TypeError(f"rescore needs a module with score_rollouts, such as PPOModule, but got {type(module).__name__}.")
        options = options_for(module, self.options)
        if not self.rescore:
            for iteration in self.source.iterations:
                self._check_fields(module, self.source.schema(iteration), iteration)
        return ReplayLoader(self, module, options, meshes_of(trainer))

    @override
    def val_dataloader(self) -> NoValidation:
        return NoValidation()

    def _check_fields(self, module: "pl.LightningModule", schema: Schema, iteration: int) -> None:
        needed = ["old_log_probs", "advantages"]
        if getattr(module, "reference", None) is not None:
            needed.append("ref_log_probs")
        if getattr(module, "has_values", False):
            needed += ["values", "returns"]
        if getattr(module, "rollout_correction", None) is not None:
            needed.append("loss_weights")
        missing = [name for name in needed if name not in schema]
        if missing:
            raise ValueError(
                f"The module needs {', '.join(missing)} but iteration {iteration} of {self.dirpath} was recorded with {sorted(schema)}."
                " Pass rescore=True to compute them."
            )

    @override
    def state_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self.position)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = Position(iteration=state_dict["iteration"], mini_batch=state_dict["mini_batch"])


class ReplayLoader(IterationLoader):
    """Hands out one recorded iteration per pass.

    Args:
        data: The data module, which keeps the position.
        module: The module that trains.
        options: How to cut.
        meshes: Groups of the run.
    """

    def __init__(self, data: ReplayDataModule, module: "pl.LightningModule", options: BatchingOptions, meshes: Meshes) -> None:
        super().__init__(data)
        self._data = data
        self._module = module
        self._options = options
        self._meshes = meshes

    def __iter__(self) -> Iterator[MiniBatch]:
        """Yield the mini-batches that the current iteration still owes."""
        data, current, first = self._data, self._data.position.iteration, self._data.position.mini_batch
        iterations = data.source.iterations
        passes, place = (0, 0) if overfits(data.trainer) else divmod(current, len(iterations))
        recorded = iterations[place]
        members = iteration_mini_batches(
            data.source.num_prompts,
            data.mini_batch_size,
            data.ppo_epochs,
            seed=data.source.seed(recorded) if data.seed is None else data.seed,
            iteration=recorded + passes * (iterations[-1] + 1),  # the recorded number in the first pass, a new one ever after
        )[: self._limit()]
        if first and data.rescore:
            rank_zero_warn(f"Resuming inside iteration {current}: log-probs and advantages are computed again with the restored policy.")
        yield from self._hand_out(self._load(recorded, members[: data.num_mini_batches]), members[first:])

    def _load(self, iteration: int, mini_batches: Sequence[Sequence[int]]) -> RolloutStore:
        source, meshes = self._data.source, self._meshes
        with fail_together(meshes.world_group, "reading recorded rollouts"):
            samples = source.read(iteration, meshes.rank, meshes.world_size)
        table = gather_recorded_table(samples, source.num_prompts, source.rollouts_per_prompt(iteration), meshes)
        store = RolloutStore(samples, table, [table.ids_of_prompts(part) for part in mini_batches], self._options, meshes)
        store.to(self._module.device)
        if self._data.rescore:
            cast(ScoresRollouts, self._module).score_rollouts(store)
        return store
