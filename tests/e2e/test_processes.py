"""Real processes: torchrun on two nodes, and Lightning's own launcher with a rank that fails."""

import os
import re
import subprocess
import sys
import time
import warnings

from lightning_rlbatch.cli import lightning_cli
from lightning_rlbatch.testing import run_distributed
from lightning_rlbatch.testing.distributed import free_port
from tests.e2e.small_run import config, losses


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def test_two_nodes_of_two_ranks_under_torchrun_train_like_one_node(tmp_path):
    """Two torchrun agents meet on the loopback interface, as two machines would."""
    folders = {name: tmp_path / name for name in ("two", "one")}
    for folder in folders.values():
        folder.mkdir()
    path, port = config(folders["two"], num_nodes=2), free_port()
    nodes = [
        subprocess.Popen(
            [
                sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", f"--node-rank={node}",
                "--master-addr=127.0.0.1", f"--master-port={port}", "-m", "lightning_rlbatch", "fit", "--config", str(path),
            ],
            env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for node in range(2)
    ]  # fmt: skip
    texts = [node.communicate(timeout=240)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(texts)[-6000:]
    assert "MEMBER: 4/4" in "".join(texts)
    assert (folders["two"] / "checkpoints" / "last.ckpt").is_file()
    one_node = str(config(folders["one"], devices=4))

    def forked(rank, size):
        sys.argv = ["rlbatch", "fit", "--config", one_node]
        warnings.simplefilter("ignore", DeprecationWarning)  # jsonargparse about Lightning's command line
        lightning_cli.run(None)

    run_distributed(forked, 4, init_process_group=False)
    assert len(losses(folders["two"])) == 4
    assert losses(folders["two"]) == losses(folders["one"])


def test_lightnings_launcher_ends_with_the_error_of_the_rank_that_failed(tmp_path):
    path = config(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "lightning_rlbatch", "fit", "--config", str(path)],
        env={**environment(), "RLBATCH_TEST_FAIL_ON_RANK": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    ended = time.time()
    assert done.returncode != 0
    assert done.stderr.count("rlbatch fit failed") == 1  # by one rank, the one that did
    assert "rlbatch fit failed on rank 1. Reward function" in done.stderr
    assert "the reward of rank 1" in done.stderr
    found = re.search(r"failed at ([0-9.]+)", done.stderr)
    assert found is not None, done.stderr[-3000:]
    assert ended - float(found.group(1)) < 30
