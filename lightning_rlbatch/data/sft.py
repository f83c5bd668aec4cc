"""The DataModule of supervised fine-tuning: any map-style dataset of token ids, in planned mini-batches."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader, Dataset, SequentialSampler
from typing_extensions import override

from lightning_rlbatch.data.batching import BatchingOptions, options_for
from lightning_rlbatch.data.indices import PlannedIndices
from lightning_rlbatch.data.iteration_loader import Resumable, overfits, trainer_of
from lightning_rlbatch.data.mini_batch import MiniBatch
from lightning_rlbatch.data.rollout_loader import CollectsRollouts
from lightning_rlbatch.data.run_seed import run_seed
from lightning_rlbatch.data.sampler import TokenBudgetSampler
from lightning_rlbatch.data.sources import NoValidation, import_callable
from lightning_rlbatch.distributed.failure import fail_together
from lightning_rlbatch.distributed.fingerprint import CollectiveCheck
from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.functional.workload import DEFAULT_COEFFICIENT
from lightning_rlbatch.rollout.row_files import rows_of_file
from lightning_rlbatch.strategies.access import meshes_of

DatasetSource: TypeAlias = str | Callable[[], Any] | Any
"""A map-style dataset, a function that makes one or its import path, or the path of a JSONL or Parquet file with a sample per row. A sample
is a mapping with ``input_ids`` [L] integers and ``response_mask`` [L], True where a token is trained on; the same for the same index on
every rank."""


class MiniBatchDataset(Dataset[MiniBatch]):
    """Turn the items of a :class:`TokenBudgetSampler` into mini-batches.

    Args:
        samples: Dataset of single samples.
        sp_size: Sequence-parallel size, for the size of fillers.
    """

    def __init__(self, samples: Any, *, sp_size: int = 1) -> None:
        self.samples = samples
        self.sp_size = sp_size

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.samples)

    def __getitem__(self, item: PlannedIndices) -> MiniBatch:
        """Return this rank's micro-batches of one mini-batch."""
        indices = [index for bucket in item.micro_batches for index in bucket]
        if not indices:
            empty = PackedBatch.empty(PackedBatch.from_samples([self.samples[0]]).schema)
            return MiniBatch.cut(empty, item.micro_batches, sp_size=self.sp_size, plan=item.plan)
        packed = PackedBatch.from_samples([self.samples[index] for index in indices])
        place = iter(range(len(indices)))
        micro_batches = [[next(place) for _ in bucket] for bucket in item.micro_batches]
        return MiniBatch.cut(packed, micro_batches, sp_size=self.sp_size, plan=item.plan)


class MiniBatchLoader(Resumable, DataLoader[MiniBatch]):
    """A DataLoader that Lightning knows to be resumable: the data module restores the sampler's position before it is made."""


class InOrderSampler(TokenBudgetSampler, SequentialSampler):  # type: ignore[misc]  # yields plans, where a SequentialSampler yields int
    """The same mini-batches in every epoch; its second base tells ``Trainer(overfit_batches=...)`` that nothing is shuffled."""


class SFTDataModule(pl.LightningDataModule):
    """Feed :class:`SFTModule`: one Lightning batch is one optimizer step on ``mini_batch_size`` samples over all ranks.

    Args:
        train_dataset: Samples, see ``DatasetSource``.
        val_dataset: The same for validation.
        mini_batch_size: Samples per optimizer step, over all ranks.
        max_tokens_per_rank: See :class:`BatchingOptions`.
        micro_batch_size: See :class:`BatchingOptions`.
        balance: See :class:`BatchingOptions`.
        equal_size: See :class:`BatchingOptions`.
        planner: See :class:`BatchingOptions`.
        oversize: See :class:`BatchingOptions`.
        workload_coefficient: See :func:`attention_workload`.
        num_workers: Worker processes that collate.
        seed: Seed of the shuffle; None takes that of ``seed_everything``. A resumed run goes on with the checkpoint's unless one is
            given.
    """

    def __init__(
        self,
        train_dataset: DatasetSource,
        *,
        val_dataset: DatasetSource | None = None,
        mini_batch_size: int,
        max_tokens_per_rank: int | None = None,
        micro_batch_size: int | None = None,
        balance: bool = True,
        equal_size: bool = False,
        planner: Literal["global", "per_rank"] = "global",
        oversize: Literal["error", "isolate"] = "error",
        workload_coefficient: int = DEFAULT_COEFFICIENT,
        num_workers: int = 0,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        if mini_batch_size < 1:
            raise ValueError(f"Expected mini_batch_size to be at least 1 but got {mini_batch_size}.")
        self.options = BatchingOptions(
            max_tokens_per_rank=max_tokens_per_rank,
            micro_batch_size=micro_batch_size,
            balance=balance,
            equal_size=equal_size,
            planner=planner,
            oversize=oversize,
            coefficient=workload_coefficient,
        )
        self.train_source = train_dataset
        self.val_source = val_dataset
        self.mini_batch_size = mini_batch_size
        self.num_workers = num_workers
        self.seed = seed
        self._run_seed = 0
        self._restored_seed: int | None = None  # a checkpoint may be loaded before setup
        self._loaded: dict[str, tuple[Any, list[int], list[int]]] = {}
        self._train_sampler: TokenBudgetSampler | None = None
        self._restored: dict[str, int] | None = None

    @override
    def setup(self, stage: str) -> None:
        NoValidation.refuse(stage, self.val_source, "val_dataset")
        group = None if self.trainer is None else meshes_of(self.trainer).world_group
        self._run_seed = run_seed(self._restored_seed if self.seed is None else self.seed, group)
        for name, source in (("train", self.train_source), ("val", self.val_source)):
            if source is not None and name not in self._loaded:
                with fail_together(group, f"reading {name}_dataset"):
                    self._loaded[name] = _measured(source, f"{name}_dataset")
                _, lengths, scored = self._loaded[name]
                # Every rank plans by itself: plans from different lengths would not fit each other.
                CollectiveCheck(group)(f"reading {name}_dataset", lengths=lengths, num_trained_tokens=scored)

    def _sampler(self, name: str, *, shuffle: bool) -> TokenBudgetSampler:
        trainer = trainer_of(self)
        _, lengths, num_tokens = self._loaded[name]
        meshes, options = meshes_of(trainer), options_for(trainer.lightning_module, self.options)
        return (TokenBudgetSampler if shuffle else InOrderSampler)(
            lengths,
            mini_batch_size=self.mini_batch_size,
            dp_rank=meshes.dp_rank,
            shuffle=shuffle,
            seed=self._run_seed,
            num_tokens=num_tokens,
            **options.planner_arguments(meshes),
        )

    def _loader(self, name: str, sampler: TokenBudgetSampler) -> DataLoader[MiniBatch]:
        batches = MiniBatchDataset(self._loaded[name][0], sp_size=meshes_of(trainer_of(self)).sp_size)
        return MiniBatchLoader(batches, sampler=sampler, batch_size=None, num_workers=self.num_workers)

    @override
    def train_dataloader(self) -> DataLoader[MiniBatch]:
        module = trainer_of(self).lightning_module
        if isinstance(module, CollectsRollouts):
            name = type(module).__name__
            raise TypeError(f"{name} trains on rollouts, but SFTDataModule has samples. Use RolloutDataModule, or SFTModule.")
        self._train_sampler = self._sampler("train", shuffle=not overfits(self.trainer))
        if self._restored is not None:  # before any worker of the loader fetches ahead
            self._train_sampler.load_state_dict(self._restored)
            self._restored = None
        return self._loader("train", self._train_sampler)

    @override
    def val_dataloader(self) -> DataLoader[MiniBatch] | NoValidation:
        return self._loader("val", self._sampler("val", shuffle=False)) if "val" in self._loaded else NoValidation()

    # -- position --------------------------------------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        trainer: Any = self.trainer
        if self._train_sampler is None or trainer is None:
            return {}
        # What training has finished, not what the sampler has handed out: workers fetch ahead.
        consumed = trainer.fit_loop.epoch_loop.batch_progress.current.processed
        if consumed >= min(len(self._train_sampler), trainer.num_training_batches):
            return {"epoch": self._train_sampler.epoch + 1, "position": 0, "seed": self._run_seed}
        return {**self._train_sampler.state_dict(consumed), "seed": self._run_seed}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict
        if self.seed is None:
            self._restored_seed = state_dict.get("seed")
            self._run_seed = state_dict.get("seed", self._run_seed)
        elif self.seed != (before := state_dict.get("seed", self.seed)) and state_dict.get("position"):
            rank_zero_warn(
                f"Resuming inside an epoch with seed={self.seed} where it was {before}: some samples come twice, others not at all."
            )


def _measured(source: DatasetSource, name: str) -> tuple[Any, list[int], list[int]]:
    """Return a dataset with the number of tokens, and of trained tokens, of each sample.

    Args:
        source: See ``DatasetSource``.
        name: Option to name in errors.

    Raises:
        TypeError: The source is no dataset with a length, or a sample no mapping.
        ValueError: No samples, or one whose fields are missing or do not fit; the message names it. There is no such file or function.
    """
    dataset = _dataset(source, name)
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"{name} must be a map-style dataset (with __len__ and __getitem__) or a function that makes one, but is"
            f" {type(dataset).__name__}. Make a list of a stream's samples."
        )
    if not len(dataset):
        raise ValueError(f"{name} has no samples.")
    counts = [_counts(dataset[index], f"{name}: sample {index}") for index in range(len(dataset))]
    return dataset, [length for length, _ in counts], [scored for _, scored in counts]


def _dataset(source: DatasetSource, name: str) -> Any:
    if isinstance(source, str):
        if Path(source).is_file():
            return [row for _, row in rows_of_file(Path(source), option=name)]
        maker = import_callable(source)
        if maker is None:
            raise ValueError(f"{name} is {source!r}, which is neither an existing file nor the import path of a function or dataset.")
        return maker()
    return source() if not hasattr(source, "__getitem__") and callable(source) else source


def _counts(sample: Any, place: str) -> tuple[int, int]:
    if not isinstance(sample, Mapping):
        raise TypeError(f"{place} must be a mapping with input_ids and response_mask but is {type(sample).__name__}.")
    missing = [field for field in ("input_ids", "response_mask") if field not in sample]
    if missing:
        hint = " Trained tokens are those whose label is not -100: response_mask = labels != -100." if "labels" in sample else ""
        raise ValueError(f"{place} has no {missing[0]!r}; it has {sorted(sample)}.{hint}")
    length = len(sample["input_ids"])
    try:
        mask = torch.as_tensor(sample["response_mask"])
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{place}: response_mask must hold 0 and 1, or booleans ({error}).") from None
    if mask.shape != (length,) or not length:
        raise ValueError(
            f"{place} has {length} input_ids and a response_mask of shape {list(mask.shape)}: one value per token, at least one."
        )
    if bool(mask[0]):
        raise ValueError(
            f"{place}: response_mask is 1 at the first token, but nothing precedes it, so that it cannot be predicted. Set it to 0 there,"
            " or put a beginning-of-sequence token before it."
        )
    return length, int(mask.sum())
