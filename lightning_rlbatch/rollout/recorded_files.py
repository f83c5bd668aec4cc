"""Completions out of the files of a recorded run, with the seeds of the requests that they answered."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from lightning_rlbatch.rollout.engine import Completion, FinishReason, rollout_seed

_FORMAT = "lightning_rlbatch.rollouts"  # of RolloutRecorder, which lies in a higher layer
_SET_ASIDE = re.compile(r"superseded_.*|.*\.incomplete")  # what RolloutRecorder calls folders that are not part of the run


def recorded_files(path: Path) -> list[Path]:
    """Return a file, or those of a folder in their natural order (2 before 10).

    Args:
        path: A file, or a folder that is searched for ``.safetensors``, ``.jsonl`` and ``.parquet`` files, in folders within it too. What
            a recorder left unfinished or set aside is passed over.

    Raises:
        FileNotFoundError: There is nothing of this name.
        ValueError: The folder has no such files.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"There is neither a file nor a folder {path}.")
    found = [
        file
        for file in path.rglob("*")
        if file.suffix in (".safetensors", ".jsonl", ".parquet") and not any(map(_SET_ASIDE.fullmatch, file.relative_to(path).parts))
    ]
    if not found:
        raise ValueError(f"{path} holds no .safetensors, .jsonl or .parquet file of recorded rollouts.")
    return sorted(found, key=natural_order)


def natural_order(path: Path) -> list[list[str | int]]:
    """Return what to sort paths by so that 2 comes before 10, and a folder before those whose names go on (``a/x``, ``a.1/x``).

    Args:
        path: Any.

    Example:
        >>> sorted(map(Path, ["a10/x", "a2.1/x", "a2/x"]), key=natural_order)
        [PosixPath('a2/x'), PosixPath('a2.1/x'), PosixPath('a10/x')]
    """
    return [[int(piece) if piece.isdigit() else piece for piece in re.split(r"(\d+)", part)] for part in path.parts]


def turns_of_recording(path: Path) -> Iterator[tuple[tuple[int, ...], Completion, int]]:
    """Yield prompt, completion and seed of each turn of the policy in a file of ``RolloutRecorder``.

    A later turn's prompt is all that came before it, the environment's replies included.

    Args:
        path: A ``.safetensors`` file.

    Raises:
        ValueError: It is damaged, or holds something else.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise ValueError(f"{path} is no file of recorded rollouts: its format is {metadata.get('format')!r}, expected {_FORMAT!r}.")
            mask = "sampled_mask" if "sampled_mask" in file.keys() else "response_mask"  # noqa: SIM118 - safe_open is no dictionary
            names = {"bounds": "cu_seqlens", "ids": "input_ids", "mask": mask, "sample_id": "sample_id"}
            columns: dict[str, list[Any]] = {key: file.get_tensor(name).tolist() for key, name in names.items()}
            optional = [name for name in ("rollout_log_probs", "truncated") if name in file.keys()]  # noqa: SIM118 - as above
            columns |= {name: file.get_tensor(name).tolist() for name in optional}
    except SafetensorError as error:
        raise ValueError(f"{path} is no whole safetensors file ({error}).") from None
    header = json.loads(metadata["header"])
    bounds, size = columns["bounds"], header["rollouts_per_prompt"]
    log_probs = columns.get("rollout_log_probs", [math.nan] * len(columns["ids"]))
    cut_off = columns.get("truncated", [False] * len(columns["sample_id"]))
    for start, end, number, truncated in zip(bounds, bounds[1:], columns["sample_id"], cut_off):
        ids, sampled = columns["ids"][start:end], columns["mask"][start:end]
        first_seed = rollout_seed(header["seed"], header["iteration"], number // size, number % size)
        for turn, (begin, stop) in enumerate(_runs(sampled)):
            reason: FinishReason = "length" if truncated and stop == len(ids) else "stop"
            seed = rollout_seed(first_seed, turn, 0, 0) if turn else first_seed
            yield tuple(ids[:begin]), Completion(ids[begin:stop], log_probs[start + begin : start + stop], reason), seed


def _runs(mask: list[bool]) -> list[tuple[int, int]]:
    """Return where each run of True begins and where it has ended."""
    edges = [place for place, (before, now) in enumerate(zip([False, *mask], [*mask, False])) if before != now]
    return list(zip(edges[::2], edges[1::2]))
