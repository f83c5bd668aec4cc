"""A checkpoint alone is enough to have the module again."""

import functools
import subprocess
import sys
import warnings

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_rlbatch.functional import GAE, PPOClip
from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.modules import PPOModule, SFTModule, loading
from lightning_rlbatch.testing import run_distributed
from tests.hand_made import make_samples
from tests.helpers import length_reward, tiny_llama
from tests.strategies.runs import rollouts, run, sft, sft_data

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)


def trained(tmp_path, make, make_data=rollouts):
    path = str(tmp_path / "trained.ckpt")
    states = run_distributed(lambda rank, size: run(make(), make_data(), size, max_epochs=1, save_to=path), 2, init_process_group=False)
    return path, states[0]["parameters"]


def load(kind, path, **arguments):
    with warnings.catch_warnings():
        # Lightning hands the description to jsonargparse in a form that this one has deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        return kind.load_from_checkpoint(path, map_location="cpu", **arguments)


def same_parameters(module, expected):
    own = {name: parameter.detach() for name, parameter in module.named_parameters()}
    assert own.keys() == expected.keys()
    assert all(torch.equal(own[name], value) for name, value in expected.items())


def test_module_made_in_python_is_made_again_with_its_own_arguments(tmp_path):
    def make():
        return PPOModule(
            tiny_llama,
            [length_reward],
            critic="shared",
            advantage=GAE(lam=0.9),
            policy_loss=PPOClip(clip_low=0.1, clip_high=0.3),
            entropy_coefficient=0.01,
            optimizer=ADAMW,
        )

    path, expected = trained(tmp_path, make)
    module = load(PPOModule, path)
    same_parameters(module, expected)
    assert module.reward_functions == [length_reward]
    assert module.advantage == GAE(lam=0.9)
    assert module.policy_loss == PPOClip(clip_low=0.1, clip_high=0.3)
    assert module.entropy_coefficient == 0.01
    scores = module.policy(make_samples([(2, 3), (1, 4)]))
    assert scores.log_probs.isfinite().all()
    optimizer = module.configure_optimizers()
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.param_groups[0]["lr"] == 1e-2


def test_what_has_no_import_path_is_passed_again(tmp_path):
    path, expected = trained(tmp_path, lambda: sft(policy=lambda: tiny_llama()), sft_data)
    with pytest.raises(TypeError, match=r"does not hold policy, which SFTModule needs.*SFTModule.load_from_checkpoint\(path, policy=...\)"):
        load(SFTModule, path)
    same_parameters(load(SFTModule, path, policy=lambda: tiny_llama(3)), expected)


class OwnLoss(PPOModule):
    def __init__(self, scale=2.0, freeze=False, **kwargs):
        super().__init__(**kwargs)
        self.scale, self.is_frozen = scale, freeze  # `freeze` is also a method of every LightningModule

    def policy_loss(self, log_probs, old_log_probs, advantages, response_mask, cu_seqlens):
        return -self.scale * advantages * log_probs


def saved(module, path):
    """Write what a Trainer would, without one."""
    module.configure_model()
    checkpoint = {"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams), "pytorch-lightning_version": "2.6.0"}
    module.on_save_checkpoint(checkpoint)
    torch.save(checkpoint, path)
    return checkpoint["hyper_parameters"]


def test_arguments_that_are_not_recorded_are_named_and_those_that_have_no_effect_are_not_recorded(tmp_path):
    path = tmp_path / "module.ckpt"
    arguments = saved(
        OwnLoss(scale=3.0, freeze=True, policy=tiny_llama, reward_functions=[lambda completions: [0.0] * len(completions)]), path
    )
    assert "policy_loss" not in arguments
    for kind in (OwnLoss, PPOModule):
        with pytest.raises(TypeError, match=f"does not hold reward_functions, which {kind.__name__} needs"):
            load(kind, path)
    loaded = load(OwnLoss, path, reward_functions=[length_reward])
    assert (loaded.scale, loaded.is_frozen) == (3.0, True)
    saved(PPOModule(tiny_llama, [length_reward], optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)), path)
    with pytest.warns(UserWarning, match=r"optimizer: what the run had could not be recorded, so PPOModule has the default"):
        load(PPOModule, path)
    assert isinstance(load(PPOModule, path, optimizer=ADAMW).configure_optimizers(), torch.optim.AdamW)  # and no warning


def test_a_resumed_run_says_which_options_are_others(monkeypatch):
    checkpoint = {"hyper_parameters": dict(PPOModule(tiny_llama, [length_reward], advantage=GAE(lam=0.9), critic="shared").hparams)}
    checkpoint["rlbatch_ppo"] = {"kl_reward_coefficient": 0.0}
    resumed = PPOModule(tiny_llama, [length_reward], advantage=GAE(lam=0.5), critic="shared", max_grad_norm=5.0)
    resumed._trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    said = []
    monkeypatch.setattr(loading, "rank_zero_info", said.append)
    for fn in (TrainerFn.VALIDATING, TrainerFn.FITTING):
        resumed.trainer.state.fn = fn
        resumed.on_load_checkpoint(checkpoint)
    (text,) = said
    assert "max_grad_norm was 1.0 and is 5.0" in text
    assert "advantage.init_args.lam was 0.9 and is 0.5" in text
    assert text.count(" was ") == 2


def test_fresh_process_without_the_command_line_loads_it(tmp_path):
    path, expected = trained(tmp_path, lambda: PPOModule(tiny_llama, [length_reward], optimizer=ADAMW))
    code = (
        "import sys, torch; from lightning_rlbatch import PPOModule; module = PPOModule.load_from_checkpoint(sys.argv[1]);"
        "torch.save({name: value.detach() for name, value in module.named_parameters()}, sys.argv[2])"
    )
    output = tmp_path / "parameters.pt"
    subprocess.run([sys.executable, "-c", code, path, str(output)], check=True, timeout=120)
    loaded = torch.load(output)
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())
    assert isinstance(PackedBatch, type)
