"""Files of recorded rollouts: one safetensors file per data-parallel rank and collection.

Invariants:

1. A folder ``iteration_000003`` holds the files of all ranks: it gets its name after every rank has written, and is never written
   again. What a crash leaves behind is called ``iteration_000003.incomplete``, and readers pass over it.
2. A run that was resumed inside an iteration samples a part of that iteration's prompts again: ``iteration_000003.1``. Readers take
   each prompt's rollouts from the last folder that has it.
3. ``sample_id`` is ``prompt position in the iteration * rollouts_per_prompt + rollout``, on any number of ranks.
"""

import dataclasses
import json
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from lightning_rlbatch.data.store import SAMPLE_ID, RolloutTable, describe_samples
from lightning_rlbatch.distributed.mesh import Meshes
from lightning_rlbatch.distributed.reductions import all_gather_rows
from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.functional.schema import Schema, schema_difference

FORMAT = "lightning_rlbatch.rollouts"
VERSION = 1
GROUP_ID = "group_id"
FOLDER_NAME = re.compile(r"iteration_(\d+)(?:\.(\d+))?")
_BOUNDS = "cu_seqlens"


@dataclasses.dataclass(frozen=True)
class RecordingHeader:
    """What a file of recorded rollouts says about its collection, the same in all files of a folder but for ``file`` and ``prompts``.

    Attributes:
        iteration: RL iteration.
        file: This file's number, the data-parallel rank that wrote it.
        num_files: Files of the collection.
        num_prompts: Prompts of a whole iteration.
        positions: Positions in the iteration of the prompts that were collected, over all files.
        rollouts_per_prompt: Group size.
        seed: Seed of the run, for the membership of mini-batches.
        prompts: Text of each prompt that the file has rollouts of, by position (a string, as JSON wants it); None if not recorded.
    """

    iteration: int
    file: int
    num_files: int
    num_prompts: int
    positions: tuple[int, ...]
    rollouts_per_prompt: int
    seed: int
    prompts: dict[str, str] | None = None

    def name(self) -> str:
        """Return the file's name."""
        return file_name(self.file)


def folder_name(iteration: int, part: int = 0) -> str:
    """Return the name of a finished collection's folder."""
    return f"iteration_{iteration:06d}" + (f".{part}" if part else "")


def file_name(rank: int, suffix: str = "safetensors") -> str:
    """Return the name of a data-parallel rank's file."""
    return f"rank_{rank:05d}.{suffix}"


def save_rollouts(path: Path, samples: PackedBatch, header: RecordingHeader) -> None:
    """Write one file, under another name until it is whole.

    Args:
        path: File to write.
        samples: Any number of samples, none included, on any device.
        header: What the file says about itself.
    """
    fields = {_BOUNDS: samples.cu_seqlens, **samples.per_token, **samples.per_sample}
    # Cloned, because the format refuses tensors that share memory (advantages and returns of some estimators do).
    tensors = {name: value.detach().cpu().clone(memory_format=torch.contiguous_format) for name, value in fields.items()}
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "per_sample": json.dumps(sorted(samples.per_sample)),
        "header": json.dumps(dataclasses.asdict(header)),
    }
    temporary = path.with_name(path.name + ".tmp")
    save_file(tensors, temporary, metadata)
    os.replace(temporary, path)


class RecordingFile:
    """One file of recorded rollouts; opening it reads its header only.

    Args:
        path: The file.

    Raises:
        ValueError: The file is damaged, holds something else, or was written in another version of the format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                names = set(file.keys())
                empty = {name: file.get_slice(name)[:0] for name in names if metadata.get("format") == FORMAT}
        except SafetensorError as error:
            raise ValueError(f"{path} is no whole safetensors file ({error}). Record the rollouts again, or delete its folder.") from None
        if metadata.get("format") != FORMAT:
            raise ValueError(f"{path} is no file of recorded rollouts: its format is {metadata.get('format')!r}, expected {FORMAT!r}.")
        if metadata["version"] != str(VERSION):
            raise ValueError(
                f"{path} has version {metadata['version']} of the format but this package reads {VERSION}. Use the one that wrote it."
            )
        per_sample = set(json.loads(metadata["per_sample"]))
        plain: dict[str, Any] = json.loads(metadata["header"])
        self.header = RecordingHeader(**{**plain, "positions": tuple(plain["positions"])})
        del empty[_BOUNDS]
        self._per_sample = per_sample
        self.schema: Schema = PackedBatch(
            [0],
            {name: value for name, value in empty.items() if name not in per_sample},
            {name: value for name, value in empty.items() if name in per_sample},
        ).schema

    def load(self) -> PackedBatch:
        """Return the file's samples."""
        with safe_open(self.path, "pt") as file:
            fields = {name: file.get_tensor(name) for name in self.schema}
            bounds = file.get_tensor(_BOUNDS)
        return PackedBatch(
            bounds,
            {name: value for name, value in fields.items() if name not in self._per_sample},
            {name: value for name, value in fields.items() if name in self._per_sample},
        )


class RecordedRollouts:
    """The finished collections in a folder, checked as a whole before any sample is read.

    Args:
        dirpath: What :class:`RolloutRecorder` wrote.

    Raises:
        ValueError: The folder has no finished collection, a file is missing, damaged or does not fit the others; the message names it.
    """

    def __init__(self, dirpath: str | Path) -> None:
        self.dirpath = Path(dirpath)
        self._files: dict[int, list[tuple[RecordingFile, frozenset[int]]]] = {}
        taken: dict[int, set[int]] = {}
        for iteration, part in reversed(self._folders()):  # the last part first: it replaces what earlier ones hold of its prompts
            files = _read_folder(self.dirpath / folder_name(iteration, part))
            kept = frozenset(files[0].header.positions) - taken.setdefault(iteration, set())
            taken[iteration] |= kept
            parts = self._files.setdefault(iteration, [])
            if parts and not _same_run(parts[0][0], files[0]):
                raise ValueError(
                    f"{files[0].path.parent} and {parts[0][0].path.parent.name} beside it differ in prompts per iteration,"
                    " rollouts per prompt, seed or fields: they are not of one run. Delete one of the folders."
                )
            parts.extend((file, kept) for file in files if kept)
        self.iterations = sorted(self._files)
        self.num_prompts = max(parts[0][0].header.num_prompts for parts in self._files.values() if parts)

    def _folders(self) -> list[tuple[int, int]]:
        entries = sorted(self.dirpath.iterdir()) if self.dirpath.is_dir() else []
        matches = [match for match in (FOLDER_NAME.fullmatch(path.name) for path in entries if path.is_dir()) if match]
        if matches:
            return sorted((int(match[1]), int(match[2] or 0)) for match in matches)
        held = f"it holds {', '.join(path.name for path in entries[:5])}" if entries else "it is empty"
        found = held if self.dirpath.is_dir() else "it is a file" if self.dirpath.is_file() else "there is no such folder"
        advice = " Record some with the callback RolloutRecorder; folders that end in .incomplete were not finished."
        if any(path.suffix in (".jsonl", ".parquet") for path in (self.dirpath, *self.dirpath.rglob("*"))):
            advice = " Dumps of text need the policy's tokenizer: ReplayDataModule(..., tokenizer=...)."
        raise ValueError(f"No recorded rollouts in {self.dirpath}: expected folders such as {folder_name(0)}, but {found}.{advice}")

    def seed(self, iteration: int) -> int:
        """Return the seed of the run that was recorded."""
        return self._files[iteration][0][0].header.seed

    def rollouts_per_prompt(self, iteration: int) -> int:
        """Return the group size of an iteration."""
        return self._files[iteration][0][0].header.rollouts_per_prompt

    def schema(self, iteration: int) -> Schema:
        """Return the fields of an iteration's samples."""
        return {name: spec for name, spec in self._files[iteration][0][0].schema.items() if name != GROUP_ID}

    def read(self, iteration: int, rank: int, world_size: int) -> PackedBatch:
        """Read this rank's share of an iteration: every ``world_size``-th file, so that each file is read once.

        Args:
            iteration: One of ``iterations``.
            rank: This process.
            world_size: Number of processes, which need not be that of the recorded run.

        Returns:
            Samples by ascending ``sample_id``, on the CPU; may be empty.
        """
        pieces = [_of_groups(file.load(), groups) for file, groups in self._files[iteration][rank::world_size]]
        if not pieces:
            return PackedBatch.empty(self.schema(iteration))
        samples = PackedBatch.concat(pieces)
        return samples.select(samples[SAMPLE_ID].argsort()).without_fields([GROUP_ID])


def _same_run(one: RecordingFile, other: RecordingFile) -> bool:
    names = ("num_prompts", "rollouts_per_prompt", "seed")
    alike = all(getattr(one.header, name) == getattr(other.header, name) for name in names)
    return alike and schema_difference(one.schema, other.schema) is None


def _of_groups(samples: PackedBatch, groups: Collection[int]) -> PackedBatch:
    return samples.select([index for index, group in enumerate(samples[GROUP_ID].tolist()) if group in groups])


def _read_folder(folder: Path) -> list[RecordingFile]:
    paths = sorted(path for path in folder.iterdir() if path.suffix == ".safetensors")
    if not paths:
        raise ValueError(f"{folder} has no files: expected {file_name(0)} and so on. Copy them there, or delete the folder.")
    files = [RecordingFile(path) for path in paths]
    first = files[0]
    expected = [file_name(rank) for rank in range(first.header.num_files)]
    missing = sorted(set(expected) - {path.name for path in paths})
    if missing:
        raise ValueError(
            f"{folder} lacks {', '.join(missing[:5])}: it was recorded by {len(expected)} ranks but {len(paths)} files are there."
            " Copy the missing files (each node writes its own ranks' where there is no shared disk), or delete the folder."
        )
    for file in files:
        same = dataclasses.replace(file.header, file=first.header.file, prompts=first.header.prompts) == first.header
        difference = schema_difference(first.schema, file.schema)
        if difference or not same or file.path.name not in expected:
            raise ValueError(
                f"{file.path} does not fit {first.path.name} beside it: {difference or 'they are of different runs'}."
                " Keep the files of one run in a folder."
            )
    return files


def gather_recorded_table(samples: PackedBatch, num_prompts: int, rollouts_per_prompt: int, meshes: Meshes) -> RolloutTable:
    """Tell every rank the lengths and rewards of recorded rollouts, whichever rank has read which.

    Args:
        samples: What this rank has read, with ``sample_id`` and ``reward`` per sample; no two samples over all ranks have one id.
        num_prompts: Prompts of the iteration.
        rollouts_per_prompt: Group size.
        meshes: Groups of the run.

    Returns:
        A table of ``num_prompts * rollouts_per_prompt`` rollouts; those that were not recorded have no reward.

    Raises:
        ValueError: An id occurs twice or is out of range; on every rank.
    """
    own = torch.cat([samples[SAMPLE_ID].double()[:, None], describe_samples(samples)], dim=1)
    rows, _ = all_gather_rows(own, meshes.world_group)
    size = num_prompts * rollouts_per_prompt
    ids = rows[:, 0].long()
    if len(ids) and (len(set(ids.tolist())) < len(ids) or int(ids.min()) < 0 or int(ids.max()) >= size):
        raise ValueError(f"Expected recorded rollouts with different ids from 0 to {size - 1} but got {sorted(ids.tolist())[:20]}...")
    table = torch.tensor([[0.0, 0.0, torch.nan, 0.0]], dtype=torch.float64).repeat(size, 1)
    table[ids] = rows[:, 1:]
    return RolloutTable.of_rows(table, torch.arange(num_prompts).repeat_interleave(rollouts_per_prompt), rollouts_per_prompt)
