"""A model whose parameters have no memory is otherwise the model that the function makes; one that needs its weights has them."""

import functools

import pytest
import torch
from torch import nn

from lightning_rlbatch.models.without_weights import give_memory, make_without_weights
from lightning_rlbatch.rollout.engine import RolloutRequest, SamplingParams
from lightning_rlbatch.rollout.engine_config import TransformersEngineConfig
from lightning_rlbatch.rollout.engine_problems import EngineContext
from tests.helpers import tiny_llama


def devices(tensors):
    return {tensor.device.type for tensor in tensors}


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_have_no_memory_and_everything_else_is_as_it_was(tied, tmp_path):
    whole = tiny_llama(tied=tied)
    whole.save_pretrained(tmp_path)
    makers = [
        lambda: tiny_llama(tied=tied),
        lambda: type(whole).from_pretrained(tmp_path),
        lambda: type(whole).from_pretrained(tmp_path, dtype=torch.bfloat16).float(),
    ]
    for make in makers:
        model = make_without_weights(make)
        assert devices(model.parameters()) == {"meta"}
        for (name, value), (other, expected) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
            assert (name, value.shape, value.dtype, value.requires_grad) == (other, expected.shape, expected.dtype, True)
        for (name, value), (other, expected) in zip(model.named_buffers(), whole.named_buffers(), strict=True):
            assert name == other
            torch.testing.assert_close(value, expected, rtol=0, atol=0 if value.dtype == torch.float32 else 1e-2)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        model.load_state_dict(whole.state_dict(), assign=True)
        ids = torch.arange(3, 9)[None]
        torch.testing.assert_close(model(ids).logits, whole(ids).logits, rtol=1e-2, atol=1e-2)


class Shared(nn.Module):
    """Ties two layers by a parameter that neither of them made, and has constants of its own."""

    def __init__(self):
        super().__init__()
        weight = nn.Parameter(table().clone(), requires_grad=False)
        weight.mark = "kept"
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.first.weight, self.second.weight = weight, weight
        self.register_buffer("counts", torch.arange(3), persistent=False)
        self.constant, self.cached = torch.linspace(0, 1, 3), table()


@functools.cache
def table():
    return torch.eye(3)


def test_shared_parameters_stay_shared_and_constants_and_caches_stay_real():
    model = make_without_weights(Shared)
    assert model.first.weight is model.second.weight
    assert model.first.weight.is_meta
    assert not model.first.weight.requires_grad
    assert model.first.weight.mark == "kept"
    assert devices([model.counts, model.constant, model.cached, table()]) == {"cpu"}
    assert torch.equal(table(), torch.eye(3))
    give_memory(model)
    assert model.first.weight is model.second.weight
    assert devices(model.parameters()) == {"cpu"}
    assert torch.equal(model.counts, torch.arange(3))


def with_an_attribute():
    model = nn.Linear(2, 2)
    model.norm = model.weight.norm()
    return model


def with_a_closure():
    model = nn.Linear(2, 2)
    scale = model.weight.detach().abs().mean()
    model.register_forward_hook(lambda module, inputs, output: output * scale)
    return model


def with_a_decision():
    model = nn.Linear(2, 2)
    return nn.Sequential(model, nn.ReLU()) if model.weight.sum() != 0 else model


def with_a_random_constant():
    model = nn.Linear(2, 2)
    shift = torch.randn(2)  # another number where the layer has drawn none
    model.register_forward_hook(lambda module, inputs, output: output + shift)
    return model


def with_a_hidden_module():
    model, hidden = nn.Linear(2, 2), [nn.Linear(2, 2)]
    model.register_forward_hook(lambda module, inputs, output: hidden[0](output))
    return model


class Filled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), 3.0))


def with_hidden_parameters_that_nothing_computes():
    model, hidden = nn.Linear(2, 2), [Filled()]
    model.register_forward_hook(lambda module, inputs, output: output * hidden[0].weight)
    return model


NEED_WEIGHTS = {
    "moved": lambda: nn.Linear(2, 2).to("cpu"),
    "attribute": with_an_attribute,
    "closure": with_a_closure,
    "decision": with_a_decision,
    "random constant": with_a_random_constant,
    "hidden module": with_a_hidden_module,
    "hidden parameters": with_hidden_parameters_that_nothing_computes,
}


@pytest.mark.parametrize("make", NEED_WEIGHTS.values(), ids=NEED_WEIGHTS)
def test_a_function_that_needs_the_weights_makes_the_whole_model_from_the_same_random_numbers(make):
    torch.manual_seed(3)
    expected = make()
    torch.manual_seed(3)
    model = make_without_weights(make)
    assert devices(model.parameters()) == {"cpu"}
    rows = torch.ones(1, 2)
    assert torch.equal(model(rows), expected(rows))
    assert devices(nn.Linear(2, 2).parameters()) == {"cpu"}, "later models have weights again"


def test_an_error_of_the_function_is_its_own():
    def fails():
        nn.Linear(2, 2)
        raise KeyError("no such column")

    with pytest.raises(KeyError, match="no such column"):
        make_without_weights(fails)


class Adapted(nn.Module):
    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        self.down, self.up = nn.Linear(base_layer.in_features, 2, bias=False), nn.Linear(2, base_layer.out_features, bias=False)

    def forward(self, states):
        return self.base_layer(states) + self.up(self.down(states))


def adapted_llama():
    model = tiny_llama()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model.lm_head = Adapted(model.lm_head)
    return model


def test_an_engine_copies_a_policy_with_adapters_that_has_no_weights_yet():
    whole, model = adapted_llama(), make_without_weights(adapted_llama)
    engine, expected = (
        TransformersEngineConfig().build(policy, EngineContext(policy=None, has_adapters=True)) for policy in (model, whole)
    )
    assert devices(model.parameters()) == {"meta"}
    requests, sampling = [RolloutRequest([5, 6, 7], seed=seed) for seed in range(4)], SamplingParams(max_new_tokens=5)
    engine.update_weights(whole.named_parameters())
    assert [row.token_ids for row in engine.generate(requests, sampling)] == [
        row.token_ids for row in expected.generate(requests, sampling)
    ]
