"""Models that packed attention cannot run exactly are refused, by their class, their config or a probe."""

import pytest
import torch
from tiny_models import VOCAB, tiny_config, tiny_model, token_batch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    MambaConfig,
    StableLmConfig,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.models import registration
from lightning_rlbatch.models.attention import attach_packed_attention
from lightning_rlbatch.models.packed_inputs import packed_model_kwargs
from lightning_rlbatch.models.probe import check_heads, check_model


def small(config_class, **changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 8, "intermediate_size": 40}
    return AutoModelForCausalLM.from_config(config_class(**{**sizes, **changes}))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: small(BloomConfig, n_head=8, n_layer=2),
            "BloomForCausalLM: its attention layers do not use transformers'",
        ),
        (lambda: small(StableLmConfig), "StableLmForCausalLM: its attention layers do not use"),
        (lambda: small(MambaConfig), "MambaForCausalLM: it has layers of the kinds"),
        (
            lambda: T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, d_model=8, num_layers=1, d_ff=8, num_heads=2, d_kv=4)),
            "it is an encoder-decoder",
        ),
    ],
)
def test_a_model_that_cannot_be_exact_is_refused_before_anything_changes(build, message):
    model = build()
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=message):
        attach_packed_attention(model)
    assert model.config._attn_implementation == before


def test_a_bidirectional_layer_is_refused():
    model = tiny_model()
    model.model.layers[1].self_attn.is_causal = False
    with pytest.raises(ValueError, match=r"LlamaAttention.* attend in both directions"):
        attach_packed_attention(model)


def test_something_that_is_no_transformers_model_is_refused():
    with pytest.raises(TypeError, match="PreTrainedModel but got Linear"):
        attach_packed_attention(nn.Linear(2, 2))


class DropsKwargs(LlamaDecoderLayer):
    def forward(self, hidden_states, position_embeddings=None, **kwargs):
        return super().forward(hidden_states, position_embeddings=position_embeddings)


class LooksBack(LlamaDecoderLayer):
    def forward(self, hidden_states, **kwargs):
        return super().forward(hidden_states, **kwargs) + 0.1 * hidden_states.roll(1, dims=1)


class SkipsAttention(LlamaDecoderLayer):
    def forward(self, hidden_states, **kwargs):
        return hidden_states + self.mlp(hidden_states)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (DropsKwargs, "its layers do not pass keyword arguments on"),
        (LooksBack, "two samples packed differ from the same samples alone"),
        (SkipsAttention, "Only 1 of 2 layers of LlamaModel ran packed attention"),
    ],
)
def test_the_probe_catches_what_the_class_does_not_tell(layer, message):
    model = tiny_model()
    model.model.layers[1].__class__ = layer
    with pytest.raises(RuntimeError, match=message):
        attach_packed_attention(model)
    assert model.config._attn_implementation != registration.NAME
    assert not model.model._forward_pre_hooks


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [2.0, 4.0]}
FREQUENCIES = {
    "phi3": (8, {"rope_parameters": {"rope_theta": 1e4, **LONGROPE}, "original_max_position_embeddings": 8}),
    "llama": (64, {"rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2.0}}),
}


@pytest.mark.parametrize("family", FREQUENCIES)
def test_samples_beyond_the_length_where_rotary_frequencies_follow_the_longest_one_are_refused(family):
    longest, options = FREQUENCIES[family]
    with attach_packed_attention(model := tiny_model(family, **options)):
        model(**packed_model_kwargs(token_batch([longest, 3])))
        with pytest.raises(ValueError, match=rf"{longest + 1} tokens, but beyond {longest} the rotary frequencies of .*Model depend"):
            model(**packed_model_kwargs(token_batch([longest + 1, 3])))


def test_a_model_on_the_meta_device_is_attached_without_a_probe():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config())
    check_model(model)
    assert attach_packed_attention(model).attached


@pytest.mark.parametrize(
    ("heads", "kv_heads", "sp_size", "fits"), [(6, 3, 4, True), (3, 3, 4, False), (8, 1, 8, True), (14, 2, 4, True), (8, 2, 9, False)]
)
def test_impossible_head_counts_are_refused_from_the_config_alone(heads, kv_heads, sp_size, fits):
    config = tiny_config(num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=4 * heads)
    if fits:
        check_heads(config, sp_size)
    else:
        with pytest.raises(
            ValueError, match=f"sequence_parallel_size={sp_size} needs at least {sp_size} attention heads but .* has {heads}"
        ):
            check_heads(config, sp_size)


def test_an_empty_batch_cannot_be_run():
    batch = token_batch()
    with pytest.raises(ValueError, match=r"PackedBatch\.filler"):
        packed_model_kwargs(PackedBatch.empty(batch.schema))
