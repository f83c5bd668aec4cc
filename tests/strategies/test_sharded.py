"""A folder of shards looks complete only when it is, and loads without the ranks that wrote it."""

import resource
import signal
import warnings

import pytest
import torch
import torch.distributed as dist

from lightning_rlbatch.functional import GAE
from lightning_rlbatch.modules import PPOModule, SFTModule
from lightning_rlbatch.strategies import RLBatchFSDPStrategy
from lightning_rlbatch.strategies.sharded import METADATA, save_sharded_state, sharded_metadata
from lightning_rlbatch.testing import run_distributed
from tests.helpers import length_reward, tiny_llama
from tests.strategies.runs import adamw, rollouts, run, sft_data


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


def tied_llama():
    return tiny_llama(tied=True)


def test_load_from_checkpoint_makes_the_module_from_a_folder_in_one_process(tmp_path):
    path = tmp_path / "folder.ckpt"

    def main(rank, size):
        module = PPOModule(tied_llama, [length_reward], critic="shared", advantage=GAE(), optimizer=adamw, kl_coefficient=0.1)
        strategy = RLBatchFSDPStrategy(save_distributed_checkpoint=True)
        return run(module, rollouts(), size, strategy=strategy, max_epochs=1, save_to=str(path))["parameters"]

    expected = run_distributed(main, 2, init_process_group=False)[0]
    with warnings.catch_warnings():
        # Lightning hands the description to jsonargparse in a form that this one has deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        module = PPOModule.load_from_checkpoint(path)
        with pytest.raises(RuntimeError, match=r"Unexpected key.*policy\.value_head"):
            SFTModule.load_from_checkpoint(path)
        next(path.glob("*.distcp")).unlink()
        with pytest.raises(RuntimeError, match=r"folder\.ckpt is no checkpoint, or a damaged one"):
            PPOModule.load_from_checkpoint(path)
    own = {name: parameter.detach() for name, parameter in module.named_parameters()}
    assert own.keys() == expected.keys()
    assert all(torch.equal(own[name], value) for name, value in expected.items())
    assert module.policy.model.lm_head.weight is module.policy.model.model.embed_tokens.weight
    assert module.kl_coefficient == 0.1


class Renamed(SFTModule):
    """Reads what an older class saved under another name, and in two parts."""

    def on_load_checkpoint(self, checkpoint):
        state = checkpoint["state_dict"]
        for name in [name for name in state if name.endswith("norm.weight")]:
            state[name.replace("norm", "old_norm")] = state.pop(name)
        for name in [name for name in state if "old_norm" in name]:
            halves = state.pop(name).chunk(2)
            state[name.replace("old_norm", "norm")] = torch.cat(halves) + 1


def test_a_hook_that_changes_a_checkpoint_is_given_its_values(tmp_path):
    path = tmp_path / "folder.ckpt"

    def main(rank, size):
        strategy = RLBatchFSDPStrategy(save_distributed_checkpoint=True)
        return run(SFTModule(tiny_llama), sft_data(), size, strategy=strategy, max_epochs=1, save_to=str(path))["parameters"]

    expected = run_distributed(main, 2, init_process_group=False)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        module = Renamed.load_from_checkpoint(path)
    for name, value in module.named_parameters():
        assert torch.equal(value, expected[name] + (1 if name.endswith("norm.weight") else 0)), name
