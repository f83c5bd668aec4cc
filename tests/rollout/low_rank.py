"""A model whose layers have adapters as peft's have."""

import torch

from tests.rollout.rollout_toys import toy_llama


class LowRank(torch.nn.Module):
    """A linear layer with adapters, with the names that peft's layers have."""

    def __init__(self, base_layer, active=("first", "second")):
        super().__init__()
        self.base_layer = base_layer
        self.active_adapters = list(active)
        generator = torch.Generator().manual_seed(1)
        sizes = base_layer.weight.shape
        self.lora_A = torch.nn.ParameterDict({name: torch.randn(2, sizes[1], generator=generator) for name in ("first", "second")})
        self.lora_B = torch.nn.ParameterDict({name: torch.randn(sizes[0], 2, generator=generator) for name in ("first", "second")})

    def get_delta_weight(self, name):
        return 0.5 * (self.lora_B[name] @ self.lora_A[name])

    def enable_adapters(self, enabled):
        pass

    def forward(self, states):
        return self.base_layer(states) + sum(states @ self.get_delta_weight(name).T for name in self.active_adapters)


def adapted(active=("first", "second")):
    model = toy_llama().requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = LowRank(layer.self_attn.q_proj, active)
    return model
