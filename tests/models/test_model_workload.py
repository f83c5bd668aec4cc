import pytest
from tiny_models import FAMILIES, tiny_config, tiny_model
from transformers import LlamaConfig, Qwen3MoeConfig

from lightning_rlbatch.models import model_workload_coefficient


def test_the_coefficient_counts_matrices_at_their_real_width():
    layer = 4 * 4096**2 + 3 * 4096 * 11008  # attention, gated MLP
    assert model_workload_coefficient(LlamaConfig()) == round((layer + 32000 * 4096 / 32) / 4096)
    assert model_workload_coefficient(LlamaConfig(), causal=False) == pytest.approx((layer + 32000 * 4096 / 32) / 8192, abs=1)
    grouped = layer - 2 * 4096 * (4096 - 1024)
    assert model_workload_coefficient(LlamaConfig(num_key_value_heads=8)) == round((grouped + 32000 * 4096 / 32) / 4096)


def test_of_a_mixture_of_experts_the_chosen_ones_count():
    sizes = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "num_hidden_layers": 2,
        "vocab_size": 10,
    }
    config = Qwen3MoeConfig(**sizes, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32)
    layer = 4 * 64**2 + 64 * 8 + 2 * 3 * 64 * 32  # attention, router, two experts
    assert model_workload_coefficient(config) == round((layer + 10 * 64 / 2) / 64)


def test_layers_with_a_sliding_window_count_as_linear():
    assert model_workload_coefficient(tiny_config("gemma2")) == pytest.approx(
        2 * model_workload_coefficient(tiny_config("gemma2", layer_types=["full_attention"] * 2)), abs=1
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_coefficient(family):
    config = tiny_config(family)
    assert 0 < model_workload_coefficient(config) < 2 * sum(parameter.numel() for parameter in tiny_model(family).parameters())
