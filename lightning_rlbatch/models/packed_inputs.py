"""Build the keyword arguments that run a packed batch through a transformers model."""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from lightning_rlbatch.distributed.ulysses import pad_seq_lens, shard_sequence
from lightning_rlbatch.functional.packing import PackedBatch

LENGTHS = "packed_lengths"


class PackedLengths:
    """Lengths of the segments of one packed row, host integers; one opaque object, so that hooks pass it on untouched.

    Args:
        seq_lens: Tokens of each sample of the whole sequence, and of the padding that makes it a multiple of P.
    """

    __slots__ = ("num_tokens", "seq_lens")
    seq_lens: tuple[int, ...]
    num_tokens: int

    def __init__(self, seq_lens: Sequence[int]) -> None:
        object.__setattr__(self, "seq_lens", tuple(seq_lens))
        object.__setattr__(self, "num_tokens", sum(seq_lens))

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"PackedLengths cannot be changed (attribute {name!r}).")

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedLengths, (self.seq_lens,)


def packed_model_kwargs(batch: PackedBatch, *, sp_group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """Return what a transformers causal LM is called with to run a packed batch.

    Args:
        batch: The whole micro-batch, the same on every rank of ``sp_group``.
        sp_group: The group of the model's :func:`attach_packed_attention`; None means one rank.

    Returns:
        ``input_ids`` and ``position_ids`` (int64 ``[1, t]``, this rank's tokens; t = T without a group, else T padded to a multiple of P
        and divided by it), ``cu_seq_lens_q/k`` (int32, boundaries of the whole sequence, padding as its own segment),
        ``max_length_q/k`` (int), ``packed_lengths`` (the same lengths on the host) and ``use_cache=False``. There is no attention mask.

    Raises:
        ValueError: A batch without tokens; every rank runs a filler instead.
    """
    if batch.num_tokens == 0:
        raise ValueError("A batch without samples cannot be run. Use PackedBatch.filler(schema, num_tokens) for an empty micro-batch.")
    sp_size = 1 if sp_group is None else dist.get_world_size(sp_group)
    seq_lens = pad_seq_lens(batch.seq_lens, sp_size)
    cu_seqlens = batch.cu_seqlens
    if len(seq_lens) > batch.num_samples:
        cu_seqlens = torch.cat((cu_seqlens, cu_seqlens.new_full((1,), sum(seq_lens))))
    longest = max(seq_lens)
    return {
        "input_ids": shard_sequence(batch["input_ids"], sp_group).unsqueeze(0),
        "position_ids": shard_sequence(batch.position_ids, sp_group).unsqueeze(0),
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": longest,
        "max_length_k": longest,
        LENGTHS: PackedLengths(seq_lens),
        "use_cache": False,
    }
