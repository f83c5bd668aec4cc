"""Turn the inputs of a packed batch into checked, flat fields."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Fields = dict[str, Tensor]


def check_fields(lengths: Sequence[int], per_token: Mapping[str, Tensor], per_sample: Mapping[str, Tensor]) -> None:
    """Raise unless the fields fit samples of these lengths (see :class:`~lightning_rlbatch.functional.PackedBatch`).

    Args:
        lengths: Tokens of each sample.
        per_token: Name to tensor ``[T, ...]``, ``input_ids`` among them.
        per_sample: Name to tensor ``[N, ...]``.

    Raises:
        ValueError: A missing or doubled name, a wrong number of rows, or fields on different devices.
        TypeError: A field that is not a tensor, or a wrong dtype of ``input_ids`` or ``response_mask``.
    """
    if "input_ids" not in per_token:
        raise ValueError(f"Every batch needs the per-token field 'input_ids' but got {sorted(per_token)}.")
    both = sorted(per_token.keys() & per_sample.keys())
    if both:
        raise ValueError(f"Field {both[0]!r} is given both per token and per sample. Keep one of them.")
    for kind, count, fields in (("tokens", sum(lengths), per_token), ("samples", len(lengths), per_sample)):
        for name, value in fields.items():
            if not isinstance(value, Tensor):
                raise TypeError(f"Expected field {name!r} to be a tensor but got {type(value).__name__}.")
            if value.ndim == 0 or value.shape[0] != count:
                raise ValueError(f"Field {name!r} has shape {list(value.shape)} but the batch has {count} {kind}.")
            if value.device != per_token["input_ids"].device:
                expected = per_token["input_ids"].device
                raise ValueError(f"Field {name!r} is on {value.device} but input_ids is on {expected}. Move it there first.")
    ids = per_token["input_ids"]
    if ids.dtype != torch.int64 or ids.ndim != 1:
        raise TypeError(f"Expected input_ids to be int64 [T] but got {ids.dtype} {list(ids.shape)}.")
    if "response_mask" in per_token:
        _check_response_mask(lengths, per_token["response_mask"])


def _check_response_mask(lengths: Sequence[int], mask: Tensor) -> None:
    if mask.dtype != torch.bool or mask.ndim != 1:
        raise TypeError(f"Expected response_mask to be bool [T] but got {mask.dtype} {list(mask.shape)}. Convert it with .bool().")
    if mask.device.type != "cpu":
        return  # reading it would make the host wait for the device
    ends = torch.tensor(lengths, dtype=torch.int64).cumsum(0)
    wrong = mask[ends - torch.tensor(lengths, dtype=torch.int64)].nonzero()
    if len(wrong):
        raise ValueError(
            f"response_mask is True at the first token of sample {int(wrong[0])}, but nothing precedes that token, so no policy can have "
            "sampled it. Set it to False there, or put a beginning-of-sequence token before it."
        )


def samples_to_fields(samples: Sequence[Mapping[str, Any]], per_sample: Collection[str]) -> tuple[list[int], Fields, Fields]:
    """Return cumulative lengths, per-token and per-sample fields of samples given as dictionaries.

    Args:
        samples: One dictionary per sample; values are tensors, arrays, lists or numbers.
        per_sample: Names that are per-sample although they have dimensions.

    Returns:
        N + 1 boundaries, fields ``[T, ...]``, fields ``[N, ...]``.

    Raises:
        ValueError: No samples, differing names, or a value that is neither per-token nor per-sample.
        TypeError: A value that no tensor can hold, or dtypes that differ between samples.

    Example:
        >>> samples_to_fields([{"input_ids": [1, 2], "reward": 0.5}], ())
        ([0, 2], {'input_ids': tensor([1, 2])}, {'reward': tensor([0.5000])})
    """
    if not samples:
        raise ValueError("Expected at least one sample but got none. Use PackedBatch.empty(schema) for a batch without samples.")
    names = list(samples[0])
    for index, sample in enumerate(samples):
        if "input_ids" not in sample:
            raise ValueError(f"Sample {index} has no 'input_ids'; it has {sorted(sample)}.")
        if sample.keys() != samples[0].keys():
            odd = sorted(sample.keys() ^ samples[0].keys())
            raise ValueError(f"Samples 0 and {index} differ in the fields {odd}. Every sample needs the same fields.")
    unknown = sorted(set(per_sample) - set(names))
    if unknown:
        raise ValueError(f"per_sample names {unknown} but the samples have only {sorted(names)}.")
    columns = {name: [_as_tensor(sample[name], name, index) for index, sample in enumerate(samples)] for name in names}
    for index, ids in enumerate(columns["input_ids"]):
        if ids.ndim != 1 or len(ids) == 0:
            raise ValueError(f"Expected input_ids of sample {index} to be [L] with L >= 1 but got shape {list(ids.shape)}.")
    lengths = [len(ids) for ids in columns["input_ids"]]
    token_fields: Fields = {}
    sample_fields: Fields = {}
    for name, column in columns.items():
        is_token = name not in per_sample and _is_per_token(name, column, lengths)
        _check_alike(name, column, skip_dims=int(is_token))
        if is_token:
            token_fields[name] = torch.cat(column)
        else:
            sample_fields[name] = torch.stack(column)
    return _bounds(lengths), _normalise(token_fields), sample_fields


def padded_to_fields(
    input_ids: Tensor, attention_mask: Tensor, response_mask: Tensor | None, fields: Mapping[str, Tensor], per_sample: Collection[str]
) -> tuple[list[int], Fields, Fields]:
    """Return cumulative lengths, per-token and per-sample fields of a rectangular batch, given as tensors, arrays or lists.

    Args:
        input_ids: ``[N, L]``, integers.
        attention_mask: ``[N, L]``, non-zero at real tokens, one unbroken run per row.
        response_mask: ``[N, L]`` or None.
        fields: Further fields, ``[N, L, ...]`` or ``[N, ...]``.
        per_sample: Names of fields that are per-sample although their shape starts with ``[N, L]``.

    Returns:
        N + 1 boundaries, fields ``[T, ...]``, fields ``[N, ...]``.

    Raises:
        ValueError: A shape that does not fit, a row without real tokens, or a row with a hole.

    Example:
        >>> padded_to_fields(torch.tensor([[0, 1]]), torch.tensor([[0, 1]]), None, {}, ())
        ([0, 1], {'input_ids': tensor([1])}, {})
    """
    input_ids, attention_mask = torch.as_tensor(input_ids), torch.as_tensor(attention_mask)
    fields = {name: torch.as_tensor(value) for name, value in fields.items()}
    if input_ids.ndim != 2 or attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"Expected input_ids and attention_mask of one shape [N, L] but got {list(input_ids.shape)} and {list(attention_mask.shape)}."
        )
    keep = attention_mask != 0
    runs = keep[:, :1].long().sum(1) + (keep[:, 1:] & ~keep[:, :-1]).sum(1)
    for row, count in enumerate(runs.tolist()):
        if count != 1:
            problem = "has no real token" if count == 0 else f"has {count} separate runs of real tokens"
            raise ValueError(f"Row {row} of attention_mask {problem}; expected one unbroken run of ones.")
    token_fields = {"input_ids": input_ids[keep]}
    if response_mask is not None:
        fields = {"response_mask": torch.as_tensor(response_mask) != 0, **fields}
    sample_fields: Fields = {}
    for name, value in fields.items():
        if value.shape[:2] == input_ids.shape and name not in per_sample:
            token_fields[name] = value[keep]
        elif name != "response_mask" and value.ndim >= 1 and value.shape[0] == len(input_ids):
            sample_fields[name] = value
        else:
            rows, width = input_ids.shape
            raise ValueError(f"Expected field {name!r} to be [N={rows}, L={width}, ...] or [N={rows}, ...] but got {list(value.shape)}.")
    return _bounds(keep.sum(1).tolist()), _normalise(token_fields), sample_fields


def _bounds(lengths: Sequence[int]) -> list[int]:
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    return bounds


def _as_tensor(value: Any, name: str, index: int) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"Field {name!r} of sample {index} is a {type(value).__name__} that no tensor can hold ({error}). Keep it outside."
        ) from error


def _is_per_token(name: str, column: Sequence[Tensor], lengths: Sequence[int]) -> bool:
    if all(value.ndim == 0 for value in column):
        return False
    for index, (value, length) in enumerate(zip(column, lengths)):
        if value.ndim == 0 or value.shape[0] != length:
            raise ValueError(
                f"Field {name!r} of sample {index} has shape {list(value.shape)} but the sample has {length} tokens, so it is not "
                f"per-token, and it is not a number in every sample. Fix its length, or pass per_sample=[{name!r}]."
            )
    return True


def _check_alike(name: str, column: Sequence[Tensor], skip_dims: int) -> None:
    """Raise if the samples disagree about dtype or trailing shape; a list of integers beside floats is such a disagreement."""
    first = column[0]
    for index, value in enumerate(column):
        if value.dtype != first.dtype:
            raise TypeError(f"Field {name!r} is {first.dtype} in sample 0 but {value.dtype} in sample {index}. Give all of them one dtype.")
        if value.shape[skip_dims:] != first.shape[skip_dims:]:
            raise ValueError(f"Field {name!r} has shape {list(first.shape)} in sample 0 but {list(value.shape)} in sample {index}.")


def _normalise(token_fields: Fields) -> Fields:
    """Give ``input_ids`` and ``response_mask`` the dtypes a batch holds, whatever integers the caller's data had."""
    ids = token_fields["input_ids"]
    if ids.dtype in (torch.int32, torch.int16, torch.uint8):
        token_fields["input_ids"] = ids.long()
    mask = token_fields.get("response_mask")
    if mask is not None and mask.dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        token_fields["response_mask"] = mask != 0
    return token_fields
