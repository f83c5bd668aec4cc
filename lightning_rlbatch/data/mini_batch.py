"""The unit that a Lightning dataloader yields: one optimizer step's samples of this rank, cut into micro-batches."""

from collections.abc import Sequence

import torch

from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.functional.plan import BatchPlan


class MiniBatch:
    """One mini-batch as this rank runs it: the same number of micro-batches on every rank.

    A plain class, so that Lightning moves it with ``.to`` and leaves its fields' dtypes alone.

    Args:
        micro_batches: In the order in which they run. A filler is a micro-batch without a response token.
        plan: Which sample of the whole mini-batch runs where; the same on every rank. Its numbers are logged with the step.
        critic_micro_batches: The same samples cut for a critic with a budget of its own; None: the critic takes ``micro_batches``.
        exchanged_bytes: Bytes that samples took between ranks from the beginning of the iteration to this mini-batch, over all ranks;
            None where samples are not exchanged.
    """

    __slots__ = ("critic_micro_batches", "exchanged_bytes", "micro_batches", "plan")

    def __init__(
        self,
        micro_batches: Sequence[PackedBatch],
        plan: BatchPlan | None = None,
        critic_micro_batches: Sequence[PackedBatch] | None = None,
        exchanged_bytes: int | None = None,
    ) -> None:
        if not micro_batches:
            raise ValueError("A mini-batch needs at least one micro-batch (a filler, if this rank has no samples).")
        self.micro_batches = list(micro_batches)
        self.plan = plan
        self.critic_micro_batches = None if critic_micro_batches is None else list(critic_micro_batches)
        self.exchanged_bytes = exchanged_bytes

    @classmethod
    def cut(
        cls,
        samples: PackedBatch,
        micro_batches: Sequence[Sequence[int]],
        *,
        sp_size: int = 1,
        plan: BatchPlan | None = None,
        exchanged_bytes: int | None = None,
    ) -> "MiniBatch":
        """Cut this rank's samples into micro-batches.

        Args:
            samples: This rank's samples; may be empty.
            micro_batches: Positions in ``samples`` for each micro-step; ``[]`` becomes a filler.
            sp_size: Sequence-parallel size: a filler has a token for every rank of the group.
            plan: See the class.
            exchanged_bytes: See the class.

        Returns:
            The mini-batch.
        """
        # Two tokens at least, because the first token of a sample is never scored and the scoring head has to run.
        filler = PackedBatch.filler(samples.schema, max(2, sp_size), samples.device)
        chosen = [samples.select(indices) if indices else filler for indices in micro_batches]
        return cls(chosen, plan, exchanged_bytes=exchanged_bytes)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "MiniBatch":
        """Return a copy on another device."""

        def moved(micro_batches: list[PackedBatch]) -> list[PackedBatch]:
            return [micro.to(device, non_blocking=non_blocking) for micro in micro_batches]

        critic = None if self.critic_micro_batches is None else moved(self.critic_micro_batches)
        return MiniBatch(moved(self.micro_batches), self.plan, critic, self.exchanged_bytes)

    @property
    def metrics(self) -> dict[str, float]:
        """Numbers of the plan and the exchange, the same on every rank."""
        metrics = {} if self.plan is None else {f"balance/{name}": value for name, value in self.plan.metrics().items()}
        return metrics | ({} if self.exchanged_bytes is None else {"perf/exchange_bytes": float(self.exchanged_bytes)})

    @property
    def num_tokens(self) -> int:
        """Tokens of this rank's micro-batches, fillers included."""
        return sum(micro.num_tokens for micro in self.micro_batches)
