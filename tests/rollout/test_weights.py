"""Weights of a policy with adapters, for engines that know the plain model."""

import copy
import sys

import pytest
import torch
import vllm_stand_in
from hand_made import prompts, varied_reward
from helpers import ToyTokenizer, make_trainer
from rollout_toys import mixed_requests, reference_log_probs, toy_llama
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lightning_rlbatch.data import RolloutDataModule
from lightning_rlbatch.modules import PPOModule
from lightning_rlbatch.rollout import SamplingParams, TransformersEngineConfig, VLLMEngineConfig
from lightning_rlbatch.rollout.transformers_engine import TransformersEngine
from lightning_rlbatch.rollout.weights import full_parameters
from lightning_rlbatch.testing import run_distributed
from tests.rollout.low_rank import adapted


def merged_by_hand(model):
    plain = toy_llama()
    for layer, source in zip(plain.model.layers, model.model.layers):
        layer.self_attn.q_proj.weight.data += sum(source.self_attn.q_proj.get_delta_weight(name) for name in ("first", "second")).detach()
    return plain


@pytest.mark.parametrize("world_size", [1, 2])
def test_adapters_are_added_to_their_weights_under_the_names_of_the_plain_model(world_size):
    def fn(rank, world_size):
        model = adapted()
        if world_size > 1:
            mesh, half = init_device_mesh("cpu", (world_size,)), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh, mp_policy=half)
            root = fully_shard(torch.nn.Sequential(model), mesh=mesh, mp_policy=half)
            with torch.no_grad():
                root(torch.tensor([[3]]))  # leaves the root's parameters gathered, in half precision
            assert not isinstance(model.lm_head.weight, DTensor)
        return dict(full_parameters(model, merge_adapters=True))

    expected = dict(merged_by_hand(adapted()).named_parameters())
    for weights in run_distributed(fn, world_size):
        assert weights.keys() == expected.keys()
        for name, value in weights.items():
            torch.testing.assert_close(value, expected[name].detach(), msg=name)


def test_inactive_adapters_stay_out_and_the_policy_stays_as_it_is():
    model = adapted(active=())
    before = copy.deepcopy(model.state_dict())
    for name, value in full_parameters(model, merge_adapters=True):
        assert torch.equal(value, toy_llama().get_parameter(name)), name
    list(full_parameters(adapted(), merge_adapters=True))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_persistent_buffers_are_streamed_and_others_are_not():
    class Shifted(type(toy_llama())):
        def __init__(self, config):
            super().__init__(config)
            self.register_buffer("shift", torch.zeros(3, dtype=torch.int64))
            self.register_buffer("derived", torch.zeros(3), persistent=False)

    model = Shifted(toy_llama().config)
    model.shift += torch.arange(3)
    streamed = dict(full_parameters(model))
    assert streamed.keys() == {name for name, _ in model.named_parameters()} | {"shift"}
    engine = TransformersEngine.from_model(model, pad_token_id=0)
    assert engine.model.shift.tolist() == [0, 1, 2]
    model.shift += 1
    engine.update_weights(full_parameters(model))
    assert engine.model.shift.tolist() == [1, 2, 3]
    assert engine.model.shift is not model.shift


def test_adapters_without_a_weight_to_add_are_refused():
    class Other(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.base_layer = torch.nn.Linear(2, 2)

        def enable_adapters(self, enabled):
            pass

    with pytest.raises(ValueError, match=r"The adapter of 0 \(Other\) has no active_adapters or no get_delta_weight"):
        list(full_parameters(torch.nn.Sequential(Other()), merge_adapters=True))


def test_adapters_that_are_more_than_an_addition_are_refused():
    model = adapted()
    model.model.layers[1].self_attn.q_proj.lora_variant = {"first": "DoRA"}
    with pytest.raises(ValueError, match=r"The adapter of model.layers.1.self_attn.q_proj \(LowRank\) is a variant of LoRA \(first\)"):
        list(full_parameters(model, merge_adapters=True))


def test_the_engine_may_hold_its_copy_in_half_precision():
    def fn(rank, world_size):
        results = []
        for source in (toy_llama, adapted):
            optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731 - one expression
            module = PPOModule(source, [varied_reward], rollout_engine=TransformersEngineConfig(dtype="bfloat16"), optimizer=optimizer)
            sizes = {"train_batch_size": 2, "mini_batch_size": 2, "rollouts_per_prompt": 2, "max_prompt_length": 1}
            data = RolloutDataModule(lambda: prompts("gf"), ToyTokenizer(), max_tokens_per_rank=8, max_response_length=7, **sizes)
            trainer = make_trainer(1, max_epochs=2)
            trainer.fit(module, datamodule=data)
            dtypes = {parameter.dtype for model in (module.rollout_engine.model, module.policy) for parameter in model.parameters()}
            results.append((dtypes, float(trainer.logged_metrics["kl/rollout_mismatch"])))
        return results

    for dtypes, mismatch in run_distributed(fn, 1, init_process_group=False)[0]:
        assert dtypes == {torch.bfloat16, torch.float32}
        assert 1e-9 < abs(mismatch) < 0.05


def test_the_engine_has_the_dtype_of_the_trained_weights_whatever_the_model_was_made_in():
    def fn(rank, world_size):
        dtypes = {}
        for precision in ("bf16-true", "bf16-mixed", "64-true"):
            for source in (toy_llama, adapted):
                module = PPOModule(source, [varied_reward])
                sizes = {"train_batch_size": 2, "mini_batch_size": 2, "rollouts_per_prompt": 2, "max_prompt_length": 1}
                data = RolloutDataModule(lambda: prompts("gf"), ToyTokenizer(), max_tokens_per_rank=8, max_response_length=7, **sizes)
                make_trainer(1, "auto", max_epochs=1, precision=precision).fit(module, datamodule=data)
                dtypes[precision, source] = {parameter.dtype for parameter in module.rollout_engine.model.parameters()}
        return dtypes

    (dtypes,) = run_distributed(fn, 1, init_process_group=False)
    for source in (toy_llama, adapted):
        found = [dtypes[precision, source] for precision in ("bf16-true", "bf16-mixed", "64-true")]
        assert found == [{torch.bfloat16}, {torch.float32}, {torch.float64}]


def test_an_engine_of_the_plain_model_samples_from_a_policy_with_adapters(monkeypatch):
    """A stand-in for vLLM: whole training runs on it, and its weights are the merged ones."""
    monkeypatch.setitem(sys.modules, "vllm", vllm_stand_in.module())

    def fn(rank, world_size):
        vllm = VLLMEngineConfig(model="folder/of/the/policy")  # a function makes the policy
        module = PPOModule(adapted, [varied_reward], rollout_engine=vllm, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        sizes = {"train_batch_size": 2, "mini_batch_size": 2, "rollouts_per_prompt": 2, "max_prompt_length": 1, "max_response_length": 7}
        data = RolloutDataModule(lambda: prompts("gf"), ToyTokenizer(), max_tokens_per_rank=8, **sizes)
        trainer = make_trainer(1, max_epochs=1)
        trainer.fit(module, datamodule=data)
        engine, model = module.rollout_engine, module.policy.model
        engine.wake()
        engine.update_weights(full_parameters(model, merge_adapters=engine.merges_adapters))
        sampled = engine.generate(mixed_requests(2, 1), SamplingParams(max_new_tokens=5))
        return float(trainer.logged_metrics["kl/rollout_mismatch"]), dict(full_parameters(model)), sampled

    ((mismatch, parameters, sampled),) = run_distributed(fn, 1, init_process_group=False)
    assert mismatch < 1e-6
    model = adapted()
    model.load_state_dict(parameters)
    plain = merged_by_hand(model)
    for request, completion in zip(mixed_requests(2, 1), sampled):
        expected = reference_log_probs(plain, request.prompt_ids, completion.token_ids)
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, rtol=1e-4, atol=1e-4)
