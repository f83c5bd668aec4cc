"""Record rollouts while training."""

import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_rlbatch.callbacks.rollout_hooks import RolloutCallback, Rollouts
from lightning_rlbatch.data.recording import FOLDER_NAME, GROUP_ID, RecordingHeader, folder_name, save_rollouts
from lightning_rlbatch.data.store import SAMPLE_ID
from lightning_rlbatch.distributed.failure import fail_together
from lightning_rlbatch.distributed.mesh import Meshes
from lightning_rlbatch.distributed.reductions import all_reduce_max
from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.strategies.access import meshes_of


class RolloutRecorder(RolloutCallback):
    """Write each iteration's rollouts to disk, for :class:`ReplayDataModule`.

    One safetensors file per data-parallel rank and iteration (``iteration_000003/rank_00001.safetensors``) with token ids, masks,
    rewards, log-probs, advantages and ids. A folder gets its final name when all ranks have written, so a crash leaves finished
    iterations intact. Rollouts without a reward are not trained on and not recorded.

    Args:
        dirpath: Folder to write to. Folders that a resumed or repeated run makes obsolete are renamed, never deleted.
        every_n_iterations: Record every n-th iteration.
        prompt_texts: Write the prompts' texts beside their token ids.

    Raises:
        ValueError: ``every_n_iterations`` is below 1.

    Example::

        trainer = Trainer(strategy="rlbatch_fsdp", callbacks=[RolloutRecorder("outputs/rollouts")])
    """

    def __init__(self, dirpath: str, *, every_n_iterations: int = 1, prompt_texts: bool = True) -> None:
        if every_n_iterations < 1:
            raise ValueError(f"Expected every_n_iterations to be at least 1 but got {every_n_iterations}.")
        self.dirpath = dirpath
        self.every_n_iterations = every_n_iterations
        self.prompt_texts = prompt_texts

    @override
    def on_rollout_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", rollouts: Rollouts) -> None:
        if rollouts.iteration % self.every_n_iterations:
            return
        meshes, prompts = meshes_of(trainer), rollouts.prompts
        size = prompts.rollouts_per_prompt
        samples = recorded_samples(rollouts.store.samples, prompts.positions, size)
        own = sorted(set(samples[GROUP_ID].tolist()))
        text_of = dict(zip(prompts.positions, prompts.prompts))
        header = RecordingHeader(
            iteration=rollouts.iteration,
            file=meshes.dp_rank,
            num_files=meshes.dp_size,
            num_prompts=getattr(getattr(trainer, "datamodule", None), "train_batch_size", max(prompts.positions) + 1),
            positions=tuple(prompts.positions),
            rollouts_per_prompt=size,
            seed=prompts.seed,
            prompts={str(position): text_of[position] for position in own} if self.prompt_texts else None,
        )
        folder = RecordingFolder(Path(self.dirpath), meshes, trainer.local_rank)
        folder.save(samples, header, is_part=_resumes_inside_an_iteration(trainer))


def _resumes_inside_an_iteration(trainer: "pl.Trainer") -> bool:
    # The data module's position counts a mini-batch when it is handed out; rollouts are collected before the first.
    position = getattr(getattr(trainer, "datamodule", None), "position", None)
    return getattr(position, "mini_batch", 0) > 0


class RecordingFolder:
    """Writes collections into a folder, all ranks together.

    Args:
        dirpath: Created when the first collection is saved.
        meshes: Groups of the run. The first rank of each sequence-parallel group writes, since its peers hold the same samples.
        local_rank: This process on its node; the first one tidies up and names folders where nodes share no disk.
    """

    def __init__(self, dirpath: Path, meshes: Meshes, local_rank: int) -> None:
        self.dirpath = dirpath
        self._meshes = meshes
        self._local_rank = local_rank

    def save(self, samples: PackedBatch, header: RecordingHeader, *, is_part: bool) -> Path:
        """Write one collection; collective over all ranks, and an error on one rank is an error on all.

        Later iterations that lie in the folder are of a run that went on from here once before, and so is this iteration unless
        ``is_part``: they get another name.

        Args:
            samples: This rank's samples.
            header: This rank's header.
            is_part: The iteration was collected before and a part of its prompts is collected again.

        Returns:
            The finished folder.
        """
        world = self._meshes.world_group
        incomplete = self.dirpath / f"{folder_name(header.iteration)}.incomplete"
        with fail_together(world, "preparing to record rollouts"):
            if self._local_rank == 0:
                shutil.rmtree(incomplete, ignore_errors=True)
                self._set_aside(header.iteration + int(is_part))
                incomplete.mkdir(parents=True, exist_ok=True)
        part = int(all_reduce_max({"part": self._next_part(header.iteration)}, world)["part"])
        with fail_together(world, "recording rollouts"):
            if self._meshes.sp_rank == 0:
                save_rollouts(incomplete / header.name(), samples, header)
        finished = self.dirpath / folder_name(header.iteration, part)
        for naming in (self._meshes.rank == 0, self._local_rank == 0):  # where nodes share a disk, nothing is left for the second round
            with fail_together(world, "naming recorded rollouts"), contextlib.suppress(FileNotFoundError):
                if naming:
                    os.rename(incomplete, finished)
        return finished

    def _matches(self) -> list[tuple[Path, int, int]]:
        paths = sorted(self.dirpath.iterdir()) if self.dirpath.is_dir() else []
        found = [(path, FOLDER_NAME.fullmatch(path.name)) for path in paths]
        return [(path, int(match[1]), int(match[2] or 0)) for path, match in found if match]

    def _next_part(self, iteration: int) -> int:
        return max((part + 1 for _, other, part in self._matches() if other == iteration), default=0)

    def _set_aside(self, first_iteration: int) -> None:
        stale = [path for path, iteration, _ in self._matches() if iteration >= first_iteration]
        for path in stale:
            number = 0
            while (target := self.dirpath / f"superseded_{number}_{path.name}").exists():
                number += 1
            with contextlib.suppress(FileNotFoundError):  # another node on the same disk was faster
                os.rename(path, target)
        if stale:
            rank_zero_warn(
                f"{self.dirpath} held {len(stale)} rollout folders of an earlier run from iteration {first_iteration} on:"
                " they are now called superseded_..."
            )


def recorded_samples(samples: PackedBatch, positions: Sequence[int], rollouts_per_prompt: int) -> PackedBatch:
    """Number samples by their prompts' positions in the iteration instead of the collection.

    Args:
        samples: With ``sample_id`` = index of the prompt in the collection * rollouts_per_prompt + rollout.
        positions: Position of each prompt of the collection.
        rollouts_per_prompt: Group size.

    Returns:
        The samples with ``sample_id`` and ``group_id`` as they are recorded.
    """
    own = samples[SAMPLE_ID].cpu()
    groups = torch.tensor(positions, dtype=torch.int64)[own // rollouts_per_prompt]
    ids = groups * rollouts_per_prompt + own % rollouts_per_prompt
    return samples.with_fields(per_sample={SAMPLE_ID: ids.to(samples.device), GROUP_ID: groups.to(samples.device)})
