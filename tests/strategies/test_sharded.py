"""A folder of shards looks complete only when it is, and loads without the ranks that wrote it."""

import resource
import signal

import pytest
import torch
import torch.distributed as dist

from lightning_rlbatch.strategies.sharded import METADATA, save_sharded_state, sharded_metadata
from lightning_rlbatch.testing import run_distributed


def save_a_matrix(folder, in_background, limit=None, change=None):
    """Save 256 KiB on one rank, which dies when a file grows beyond the limit."""

    def main(rank, size):
        if limit is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        checkpoint = {"state_dict": {"weight": torch.ones(256, 256), "extra": {"kept": 1}}, "epoch": 3, "loops": {"step": 1}}
        group = dist.new_group(backend="gloo") if in_background else None
        finish = save_sharded_state(checkpoint, folder, sharded_metadata(checkpoint), background=group)
        checkpoint["loops"]["step"] = 2  # training goes on
        finish()

    return run_distributed(main, 1)


@pytest.mark.parametrize("in_background", [False, True])
def test_a_process_killed_while_it_writes_its_shards_leaves_no_folder_that_looks_complete(in_background, tmp_path):
    with pytest.raises(AssertionError, match="died without a result"):
        save_a_matrix(tmp_path, in_background, limit=2**16)
    assert any(tmp_path.iterdir())  # it had begun
    assert not (tmp_path / METADATA).exists()


@pytest.mark.parametrize("in_background", [False, True])
def test_metadata_is_of_the_moment_of_saving(in_background, tmp_path):
    save_a_matrix(tmp_path, in_background)
    meta = torch.load(tmp_path / METADATA, weights_only=True)
    assert meta == {"epoch": 3, "loops": {"step": 1}, "extra_state": {"extra": {"kept": 1}}, "optimizer_states": []}
