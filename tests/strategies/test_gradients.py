"""Gradients of sharded models: mean, norm and clipping are those of one process (R14); every parameter belongs to an FSDP2 group."""

import pytest
import torch
from hand_made import ConstantLossModule, HandMadeDataModule, Scale, Step, make_samples, with_policy_log_probs
from helpers import (
    StepRecorder,
    length_reward,
    make_trainer,
    relative_difference,
    sgd,
    tiny_llama,
    whole,
    whole_parameters,
)
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_rlbatch.data import BatchingOptions
from lightning_rlbatch.distributed.mesh import build_meshes
from lightning_rlbatch.functional import GAE
from lightning_rlbatch.functional.aggregation import aggregate
from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.modules import MicroBatchOutput, PPOModule
from lightning_rlbatch.strategies import RLBatchFSDPStrategy, sharding, synchronization
from lightning_rlbatch.testing import run_distributed

CLIP = 0.01


def clipped_step(world_size, strategy):
    """One SGD step with learning rate 1 of a tied policy and a critic with a one-row value head, clipped far below its norm."""
    torch.set_default_dtype(torch.float64)
    policy = tiny_llama(tied=True, dtype=torch.float64)
    samples = with_policy_log_probs(make_samples([(3, 9), (2, 1), (1, 20), (4, 6)]), policy, noise=0.3)
    module = PPOModule(
        lambda: tiny_llama(tied=True, dtype=torch.float64),
        [length_reward],
        critic=lambda: tiny_llama(1, dtype=torch.float64),
        advantage=GAE(),
        optimizer=sgd,
        max_grad_norm=CLIP,
    )
    recorder = StepRecorder()
    data = HandMadeDataModule(samples, [Step(BatchingOptions(max_tokens_per_rank=21))])
    trainer = make_trainer(world_size, strategy, max_steps=1, callbacks=[recorder])
    before = {}
    module.on_fit_start = lambda: before.update(whole_parameters(module))
    trainer.fit(module, datamodule=data)
    after = whole_parameters(module)
    return recorder.gradients[0], recorder.metrics[0], {name: before[name] - after[name] for name in after}


@pytest.fixture(scope="module")
def one_process():
    return run_distributed(lambda rank, size: clipped_step(size, "auto"), 1, init_process_group=False)[0]


@pytest.mark.parametrize(("world_size", "sp_size", "replicas"), [(2, 1, 1), (4, 1, 1), (4, 2, 1), (4, 1, 2)])
def test_gradient_norm_and_clipped_step_of_tied_and_one_row_weights_are_those_of_one_process(world_size, sp_size, replicas, one_process):
    expected = one_process
    # One weight serves as embedding and LM head.
    assert not any("lm_head" in name for name in expected[0])
    results = run_distributed(
        lambda rank, size: clipped_step(size, RLBatchFSDPStrategy(sp_size, replicas)), world_size, init_process_group=False
    )
    for gradients, metrics, change in results:
        assert relative_difference(gradients, expected[0]) < 1e-10
        assert relative_difference(change, expected[2]) < 1e-10
        for role in ("policy", "critic"):
            assert metrics[f"train/grad_norm/{role}"] == pytest.approx(expected[1][f"train/grad_norm/{role}"], rel=1e-10)
            assert metrics[f"train/grad_norm/{role}"] > 10 * CLIP
            moved = torch.cat([value.flatten() for name, value in change.items() if name.startswith(role)])
            assert moved.norm().item() == pytest.approx(CLIP, rel=1e-4)  # each role is clipped by its own norm


class TwoPaths(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = (torch.nn.Linear(1, 64, bias=False) for _ in range(2))

    def forward(self, values, use_left):
        return (self.left if use_left else self.right)(values)


needs_torch_that_reduces_all = pytest.mark.skipif(
    not sharding.reduces_unused_parameters(), reason="torch before 2.13 raises instead: see the test of its message"
)


def mixed_gradients(rank, world_size):
    """Each rank uses another one of two equal parameters; summed over 64 outputs and averaged over ranks each gradient is 64 in all."""
    sums = {}
    for name in ("plain FSDP2", "ours"):
        model = TwoPaths()
        fully_shard(model, mesh=build_meshes("cpu").fsdp)
        if name == "ours":
            sharding.reduce_unused_parameters(model)
        (2 * model(torch.ones(1, 1), rank == 0).sum()).backward()
        local = [parameter.grad for parameter in (model.left.weight, model.right.weight)]
        sums[name] = [None if grad is None else float(grad.to_local().sum()) for grad in local]
    return sums


@needs_torch_that_reduces_all
def test_ranks_that_use_different_parameters_do_not_mix_their_gradients():
    # Global sum of each gradient: 2 x 64 / 2 ranks = 64, half of it on each rank.
    results = run_distributed(mixed_gradients, 2)
    assert [sums["ours"] for sums in results] == [[32.0, 32.0]] * 2
    # The canary: what FSDP2 does by itself. If this changes, `reduce_unused_parameters` has become unnecessary.
    assert [sums["plain FSDP2"] for sums in results] != [[32.0, 32.0]] * 2


def constant_batch():
    return PackedBatch([0, 2], {"input_ids": torch.tensor([3, 3]), "response_mask": torch.tensor([False, True]), "constant": torch.ones(2)})


class LooseParameter(ConstantLossModule):
    """Holds a trainable parameter that no child module owns."""

    def build_models(self):
        super().build_models()
        self.temperature_of_mine = torch.nn.Parameter(torch.ones(1))


def test_trainable_parameter_outside_of_every_shard_is_refused_on_every_rank_by_name():
    def fn(rank, world_size):
        with pytest.raises(Exception, match="not sharded") as caught:
            make_trainer(world_size, max_steps=1).fit(
                LooseParameter(), datamodule=HandMadeDataModule(constant_batch(), [Step(BatchingOptions(micro_batch_size=1))])
            )
        return type(caught.value).__name__, str(caught.value)

    for kind, message in run_distributed(fn, 2, init_process_group=False):
        assert kind == "MisconfigurationException"
        assert "temperature_of_mine" in message
        assert "child module" in message


class Containers(ConstantLossModule):
    """Models inside containers, which have no forward to hook."""

    def build_models(self):
        self.heads = torch.nn.ModuleDict({"a": Scale(), "list": torch.nn.ModuleList([Scale()])})

    @property
    def model(self):
        return lambda values: self.heads["a"](values) + self.heads["list"][0](values)


def test_models_in_containers_are_sharded_one_by_one():
    def fn(rank, world_size):
        module, recorder = Containers(), StepRecorder()
        data = HandMadeDataModule(constant_batch(), [Step(BatchingOptions(micro_batch_size=1))])
        make_trainer(world_size, max_steps=1, callbacks=[recorder]).fit(module, datamodule=data)
        sharded = [name for name, child in module.named_modules() if isinstance(child, FSDPModule)]
        return sharded, {name: float(value) for name, value in recorder.gradients[0].items()}

    for sharded, gradients in run_distributed(fn, 2, init_process_group=False):
        assert sharded == ["heads.a", "heads.list.0"]
        assert gradients == {"heads.a.weight": 1.0, "heads.list.0.weight": 1.0}


class StartsAtItsRank(ConstantLossModule):
    def build_models(self):
        self.model = torch.nn.Linear(1, 4, bias=False)
        with torch.no_grad():
            self.model.weight.fill_(self.meshes.rank + 1)

    def micro_batch_step(self, micro_batch, denominators):
        terms = self.model(micro_batch["constant"][:, None]).sum(-1)
        return MicroBatchOutput(aggregate(terms, self.score_mask(micro_batch), micro_batch.cu_seqlens, "token-mean", denominators))


def test_ranks_that_initialise_differently_train_rank_zeros_weights():
    def fn(rank, world_size):
        module = StartsAtItsRank()
        data = HandMadeDataModule(constant_batch(), [Step(BatchingOptions(micro_batch_size=1))])
        make_trainer(world_size, max_steps=1).fit(module, datamodule=data)
        return whole(module.model.weight).flatten().tolist()

    assert run_distributed(fn, 2, init_process_group=False) == [[1.0] * 4] * 2


class UsesAnotherParameterOnEachRank(ConstantLossModule):
    def build_models(self):
        self.model = TwoPaths()

    def micro_batch_step(self, micro_batch, denominators):
        terms = self.model(micro_batch["constant"][:, None], self.meshes.rank == 0).sum(-1)
        mask = self.score_mask(micro_batch)
        return MicroBatchOutput(aggregate(terms, mask, micro_batch.cu_seqlens, "token-mean", denominators))


@needs_torch_that_reduces_all
def test_ranks_that_use_different_parameters_train_each_with_its_own_gradient():
    two = PackedBatch.concat([constant_batch(), constant_batch()])

    def fn(rank, world_size):
        recorder = StepRecorder()
        data = HandMadeDataModule(two, [Step(BatchingOptions(micro_batch_size=1))])
        make_trainer(world_size, max_steps=1, callbacks=[recorder]).fit(UsesAnotherParameterOnEachRank(), datamodule=data)
        return {name: gradient.flatten().tolist() for name, gradient in recorder.gradients[0].items()}

    # Mean over two tokens, one on each rank; each token goes through one of the weights.
    expected = {"model.left.weight": [0.5] * 64, "model.right.weight": [0.5] * 64}
    assert run_distributed(fn, 2, init_process_group=False) == [expected] * 2


def test_torch_that_cannot_reduce_unused_parameters_raises_on_every_rank_by_name(monkeypatch):
    for module in (synchronization, sharding):
        monkeypatch.setattr(module, "reduces_unused_parameters", lambda: False)

    def fn(rank, world_size):
        data = HandMadeDataModule(constant_batch(), [Step(BatchingOptions(micro_batch_size=1))])
        make_trainer(world_size, max_steps=1).fit(ConstantLossModule(), datamodule=data)  # equal parameters: no objection
        with pytest.raises(RuntimeError, match="gradient on some ranks only") as caught:
            make_trainer(world_size, max_steps=1).fit(UsesAnotherParameterOnEachRank(), datamodule=data)
        return str(caught.value)

    for message in run_distributed(fn, 2, init_process_group=False):
        assert "2 parameters" in message
        assert "'model.left.weight'" in message
