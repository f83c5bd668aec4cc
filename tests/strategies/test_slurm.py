"""Under SLURM: ranks are found, and the request to save and requeue takes effect on all ranks together, also in a collection."""

import os
import signal
import time
import warnings

import pytest
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.environments import SLURMEnvironment

from lightning_rlbatch.strategies import RLBatchFSDPStrategy
from lightning_rlbatch.testing import run_distributed
from tests.helpers import make_trainer
from tests.strategies.runs import Journal, assert_same_state, final_state, ppo, rollouts, run


def under_slurm(rank, size, folder):
    """Set what `srun` sets, with a `scontrol` that writes down what it is asked and what is on disk then."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK"):
        os.environ.pop(name, None)
    command = folder / "bin" / "scontrol"
    if rank == 0:
        command.parent.mkdir()
        command.write_text(f'#!/bin/sh\necho "$@" >> {folder}/asked; ls {folder}/root >> {folder}/asked\n')
        command.chmod(0o755)
    os.environ |= {
        "PATH": f"{command.parent}:{os.environ['PATH']}",
        "SLURM_JOB_NAME": "train",
        "SLURM_JOB_ID": "4711",
        "SLURM_NTASKS": str(size),
        "SLURM_NTASKS_PER_NODE": str(size),
        "SLURM_NNODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
    }


class RequeueOnce(Callback):
    """Sends SIGUSR1 to this process in the training step of global step 1, or from the reward function of the second iteration."""

    __name__ = "requeue"

    def __init__(self, where):
        self.where, self.calls, self.seconds = where, 0, 0.0

    def on_train_batch_start(self, trainer, *args):
        if self.where == "step" and trainer.global_step == 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    def __call__(self, prompts, completions):
        self.calls += 1
        if self.where == "collection" and self.calls == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(60)
        return [float(len(completion)) for completion in completions]


@pytest.mark.parametrize(("where", "async_save"), [("step", False), ("collection", True)])
def test_a_requeue_signal_on_one_rank_saves_on_all_and_changes_nothing_else(where, async_save, tmp_path):
    def main(rank, size):
        under_slurm(rank, size, tmp_path)
        (tmp_path / "root").mkdir(exist_ok=True)
        expected = run(ppo(), rollouts(), size, max_epochs=3, default_root_dir=str(tmp_path / "other"))
        requeue, journal = RequeueOnce(where if rank == 1 else "nowhere"), Journal()
        options = {"default_root_dir": str(tmp_path / "root"), "callbacks": [requeue, journal]}
        trainer = make_trainer(size, RLBatchFSDPStrategy(async_save=async_save), max_epochs=3, **options)
        assert isinstance(trainer.strategy.cluster_environment, SLURMEnvironment)
        assert (trainer.global_rank, trainer.world_size) == (rank, size)
        start = time.monotonic()
        trainer.fit(ppo(reward_functions=[requeue]), datamodule=rollouts())
        seconds, state = time.monotonic() - start, final_state(trainer)
        warnings.filterwarnings("ignore", message="Be aware that when using `ckpt_path`, callbacks")
        warnings.filterwarnings("ignore", message="Resuming inside iteration")
        again = run(ppo(), rollouts(), size, max_epochs=3, default_root_dir=str(tmp_path / "root"))  # Lightning finds the checkpoint
        return seconds, state, expected, again

    for seconds, state, expected, again in run_distributed(main, 2, init_process_group=False):
        assert seconds < 20
        assert_same_state(state, expected)
        assert again["steps"] == expected["steps"][-len(again["steps"]) :]
        assert len(again["steps"]) == 4
        if where == "collection":
            assert_same_state(again, expected)
    assert (tmp_path / "asked").read_text().split() == ["requeue", "4711", "hpc_ckpt_1.ckpt"]
