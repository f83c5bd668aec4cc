"""Runs whose ranks are killed while they write checkpoints, and what can be resumed of them."""

import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from lightning_rlbatch.testing import run_distributed
from lightning_rlbatch.testing.distributed import free_port
from tests.helpers import make_trainer
from tests.strategies.runs import sft, sft_data


def train_until_killed(fit: Callable[[int], None], folder: Path, delay: float, world_size: int = 2) -> None:
    """Let forked ranks train, and kill them in the middle.

    Args:
        fit: Trains for ever on a number of ranks, and saves ``last.ckpt`` in the folder.
        folder: Where the checkpoints are.
        delay: Seconds between the first checkpoint and the end.
        world_size: Number of ranks.
    """
    context, port = multiprocessing.get_context("fork"), free_port()
    ranks = [context.Process(target=_fit_rank, args=(fit, port, rank, world_size), daemon=True) for rank in range(world_size)]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + 60
    while not (folder / "last.ckpt").exists():
        assert time.monotonic() < deadline, "no checkpoint was written"
        time.sleep(0.02)
    time.sleep(delay)
    for process in ranks:
        os.kill(process.pid, signal.SIGKILL)
    for process in ranks:
        process.join()


def _fit_rank(fit: Callable[[int], None], port: int, rank: int, world_size: int) -> None:
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # a killed rank's peer complains
    fit(world_size)


def steps_after_resuming(runs: Iterable[tuple[Path, dict[str, Any]]]) -> list[int]:
    """Resume killed runs of ``sft()`` on two ranks, one after the other.

    Args:
        runs: Folder of the checkpoints, and arguments of the Trainer that says when to stop.

    Returns:
        The number of steps at the end of each.
    """

    def resume(rank: int, size: int) -> list[int]:
        warnings.filterwarnings("ignore", message="Be aware that when using `ckpt_path`, callbacks")
        steps = []
        for folder, options in runs:
            trainer = make_trainer(size, **options)
            trainer.fit(sft(), datamodule=sft_data(), ckpt_path=str(folder / "last.ckpt"))
            steps.append(trainer.global_step)
        return steps

    found: list[int] = run_distributed(resume, 2, init_process_group=False)[0]
    return found
