"""Real processes: torchrun on two nodes, and Lightning's own launcher with a rank that fails."""

import os
import re
import subprocess
import sys
import time
import warnings

import yaml

from lightning_rlbatch.cli import lightning_cli
from lightning_rlbatch.testing import run_distributed
from lightning_rlbatch.testing.distributed import free_port


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def config(tmp_path, **trainer):
    """Write the configuration of a run of a few seconds; return its path."""
    content = {
        "seed_everything": 0,
        "trainer": {
            "accelerator": "cpu",
            "devices": 2,
            "strategy": {"class_path": "lightning_rlbatch.RLBatchFSDPStrategy", "init_args": {"sequence_parallel_size": 2}},
            "max_epochs": 2,
            "log_every_n_steps": 1,
            "limit_val_batches": 0,
            "enable_model_summary": False,
            "enable_progress_bar": False,
            "logger": {
                "class_path": "lightning.pytorch.loggers.CSVLogger",
                "init_args": {"save_dir": str(tmp_path), "name": "run", "version": ""},
            },
            "callbacks": [
                {
                    "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
                    "init_args": {"dirpath": str(tmp_path / "checkpoints"), "save_last": True, "save_top_k": 0, "every_n_epochs": 1},
                }
            ],
            **trainer,
        },
        "model": {
            "class_path": "lightning_rlbatch.PPOModule",
            "init_args": {
                "policy": "tests.helpers.tiny_llama",
                "reward_functions": ["tests.e2e.rewards.length_reward"],
                "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.01}},
            },
        },
        "data": {
            "class_path": "lightning_rlbatch.RolloutDataModule",
            "init_args": {
                "train_prompts": "tests.strategies.runs.prompt_rows",
                "tokenizer": {"class_path": "tests.helpers.ToyTokenizer"},
                "train_batch_size": 4,
                "mini_batch_size": 2,
                "rollouts_per_prompt": 2,
                "max_tokens_per_rank": 40,
                "max_prompt_length": 8,
                "max_response_length": 8,
            },
        },
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def losses(tmp_path):
    rows = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    column = rows[0].split(",").index("train/loss")
    return [float(row.split(",")[column]) for row in rows[1:] if row.split(",")[column]]


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
    assert "Rank 1 failed" in done.stderr
    assert "the reward of rank 1" in done.stderr
    found = re.search(r"failed at ([0-9.]+)", done.stderr)
    assert found is not None, done.stderr[-3000:]
    assert ended - float(found.group(1)) < 30
