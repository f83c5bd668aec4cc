"""Which positions of a packed batch are scored, with one read from the device for many batches."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_rlbatch.distributed.ulysses import shard_sequence
from lightning_rlbatch.functional.packing import PackedBatch


def shift_to_sources(batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """Return what each position predicts and whether that is scored.

    Args:
        batch: Read are ``input_ids`` and ``response_mask``; without the latter every token but a sample's first is scored.

    Returns:
        ``(targets, scored)``: [T] int64 the next token, [T] bool. Both are without meaning, and False, at the last token of a sample.

    Example:
        >>> batch = PackedBatch([0, 3, 5], {"input_ids": torch.tensor([7, 8, 9, 5, 6])})
        >>> shift_to_sources(batch)[1].tolist()
        [True, True, False, True, False]
    """
    targets = batch["input_ids"].roll(-1)
    scored = batch["response_mask"].roll(-1) if "response_mask" in batch else torch.ones_like(targets, dtype=torch.bool)
    return targets, scored.index_fill(0, batch.cu_seqlens[1:].long() - 1, False)


class ScoredPositions:
    """Finds the scored positions of this rank's shard; their number is data, so that an accelerator has to be waited for.

    :meth:`prepare` waits once for all micro-batches of an optimizer step; what it finds is kept as long as the batches are.

    Args:
        sp_group: Ranks that share each sample; None: this process alone.
    """

    def __init__(self, sp_group: dist.ProcessGroup | None) -> None:
        self._sp_group = sp_group
        # By the boundaries, which a batch with other fields shares; the mask tells whether it is still the same one.
        self._known: Any = WeakTensorKeyDictionary()  # torch leaves its methods without annotations

    def __deepcopy__(self, memo: object) -> "ScoredPositions":
        return ScoredPositions(self._sp_group)

    def prepare(self, batches: Sequence[PackedBatch]) -> None:
        """Find the positions of several batches, with one read from the device.

        Args:
            batches: Batches that will be scored, or batches with other fields in place of some of theirs.
        """
        if not batches:
            return
        shards = [self._shards(batch)[1] for batch in batches]
        counts = torch.stack([scored.sum() for scored in shards]).tolist()
        for batch, scored, count in zip(batches, shards, counts):
            self._known[batch.cu_seqlens] = (_mask(batch), torch.nonzero_static(scored, size=count).squeeze(1))

    def find(self, batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Find the positions of one batch.

        Args:
            batch: The whole batch, the same on every rank of the group.

        Returns:
            ``(targets, scored, sources)``: targets and scored as :func:`shift_to_sources` returns them, but of this rank's ``[t]`` tokens;
            ``[n]`` int64 the scored positions, or position 0 if there is none.
        """
        targets, scored = self._shards(batch)
        mask, sources = self._known.get(batch.cu_seqlens, (None, None))
        if sources is None or mask is not _mask(batch):
            sources = scored.nonzero().squeeze(1)
        return targets, scored, sources if sources.numel() else sources.new_zeros(1)

    def _shards(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        targets, scored = shift_to_sources(batch)
        return shard_sequence(targets, self._sp_group), shard_sequence(scored, self._sp_group)


def _mask(batch: PackedBatch) -> Tensor | None:
    has_mask = "response_mask" in batch
    return batch["response_mask"] if has_mask else None
