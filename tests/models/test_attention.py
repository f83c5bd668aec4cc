import copy
import importlib

import pytest
import torch
from tiny_models import FAMILIES, VOCAB, checkpoint_layers, tiny_config, tiny_model
from torch import nn
from transformers import (
    AttentionInterface,
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

LENGTHS = [5, 1, 9, 3]


def make_batch(lengths=LENGTHS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return PackedBatch.from_samples([{"input_ids": torch.randint(1, VOCAB, (length,), generator=generator)} for length in lengths])


def alone(model, batch):
    """Logits of every sample by itself, with the model's own attention: the reference."""
    return torch.cat([model(ids.unsqueeze(0), use_cache=False).logits[0] for ids in batch.split_per_sample("input_ids")])


def loss_and_gradients(model, logits):
    loss = logits.log_softmax(-1)[:, 7].sum() + logits.logsumexp(-1).square().sum()
    return loss, dict(zip([n for n, _ in model.named_parameters()], torch.autograd.grad(loss, list(model.parameters()))))


def assert_close_gradients(ours, reference, tolerance=1e-5):
    floor = 1e-3 * max(float(grad.abs().max()) for grad in reference.values())
    for name, grad in reference.items():
        error = float((ours[name] - grad).abs().max()) / max(float(grad.abs().max()), floor)
        assert error < tolerance, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_each_sample_alone_in_logits_and_gradients(family):
    model, batch = tiny_model(family), make_batch()
    reference = copy.deepcopy(model)
    reference.set_attn_implementation("eager")
    expected = alone(reference, batch)
    with attach_packed_attention(model) as handle:
        assert handle.num_layers == 2
        logits = model(**packed_model_kwargs(batch)).logits[0]
        _, gradients = loss_and_gradients(model, logits)
        assert handle.num_forwards == 1
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=2e-5)
    assert_close_gradients(gradients, loss_and_gradients(reference, expected)[1])


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_left_padded_right_padded_and_packed_inputs_give_the_same_logits(family):
    model, batch = tiny_model(family), make_batch()
    with attach_packed_attention(model):
        packed = [model(**packed_model_kwargs(PackedBatch.from_padded(**batch.to_padded(0, side)))).logits[0] for side in ("left", "right")]
        assert torch.equal(packed[0], packed[1])
    for side in ("left", "right"):
        padded = batch.to_padded(0, side)
        positions = (padded["attention_mask"].cumsum(1) - 1).clamp(min=0)
        logits = model(**padded, position_ids=positions, use_cache=False).logits[padded["attention_mask"].bool()]
        torch.testing.assert_close(packed[0], logits, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_the_tokens_of_one_sample_never_reach_another_sample(family):
    model, batch = tiny_model(family), make_batch()
    ids = batch["input_ids"].clone()
    ids[:5] = (ids[:5] + 13) % VOCAB
    with attach_packed_attention(model):
        before = model(**packed_model_kwargs(batch)).logits[0]
        after = model(**packed_model_kwargs(batch.with_fields({"input_ids": ids}))).logits[0]
    assert torch.equal(before[5:], after[5:])
    assert not torch.allclose(before[:5], after[:5])


def test_checkpointed_recomputation_uses_the_lengths_of_its_own_micro_batch():
    batches = [make_batch([5, 4]), make_batch([2, 3, 4], seed=1)]
    gradients = []
    for checkpointing in (False, True):
        model = tiny_model().train()
        if checkpointing:
            checkpoint_layers(model)
        with attach_packed_attention(model):
            logits = [model(**packed_model_kwargs(batch)).logits[0] for batch in batches]  # two in flight
            gradients.append(loss_and_gradients(model, torch.cat(logits))[1])
    assert_close_gradients(gradients[1], gradients[0])


def test_lengths_from_cu_seq_lens_alone_are_enough():
    model, batch = tiny_model(), make_batch()
    kwargs = packed_model_kwargs(batch)
    with attach_packed_attention(model):
        expected = model(**kwargs).logits
        del kwargs["packed_lengths"]
        torch.testing.assert_close(model(**kwargs).logits, expected, rtol=0, atol=0)


def test_a_call_without_lengths_is_an_error_not_a_guess():
    model, batch = tiny_model(), make_batch()
    with attach_packed_attention(model), pytest.raises(ValueError, match="called without lengths, which are never guessed"):
        model(batch["input_ids"].unsqueeze(0), position_ids=batch.position_ids.unsqueeze(0))


def test_lengths_of_another_batch_are_an_error_with_both_numbers():
    model = tiny_model()
    kwargs = packed_model_kwargs(make_batch()) | {"packed_lengths": packed_model_kwargs(make_batch([3, 4]))["packed_lengths"]}
    with attach_packed_attention(model), pytest.raises(ValueError, match="got 18 tokens but the lengths add up to 7"):
        model(**kwargs)


def test_an_all_ones_mask_is_harmless_and_real_padding_is_refused():
    model, batch = tiny_model("gemma3"), make_batch()
    kwargs = packed_model_kwargs(batch)
    ones = torch.ones(1, batch.num_tokens, dtype=torch.int64)
    with attach_packed_attention(model):
        expected = model(**kwargs).logits
        torch.testing.assert_close(model(**kwargs, attention_mask=ones).logits, expected, rtol=0, atol=0)
        ones[0, :2] = 0
        with pytest.raises(ValueError, match="2 padding positions of 18"):
            model(**kwargs, attention_mask=ones)


def test_a_cache_and_attention_weights_are_refused():
    model, kwargs = tiny_model(), packed_model_kwargs(make_batch())
    with attach_packed_attention(model):
        with pytest.raises(ValueError, match="no cache"):
            model(**kwargs | {"use_cache": True})
        with pytest.raises(ValueError, match="returns no attention weights"):
            model(**kwargs, output_attentions=True)


def test_detaching_and_pausing_bring_the_former_attention_back_even_after_an_error():
    model, batch = tiny_model(), make_batch()
    before = model.config._attn_implementation
    expected = alone(model, batch)
    handle = attach_packed_attention(model)
    with pytest.raises(ZeroDivisionError), handle.paused():
        _ = 1 / 0
    assert handle.attached
    model(**packed_model_kwargs(batch))
    with handle.paused():
        assert not handle.attached
        assert torch.equal(alone(model, batch), expected)
        model.generate(batch["input_ids"][:5].unsqueeze(0), max_new_tokens=2, do_sample=False)
    handle.detach()
    handle.detach()
    assert model.config._attn_implementation == before
    assert torch.equal(alone(model, batch), expected)
    with pytest.raises(ZeroDivisionError), attach_packed_attention(model):
        _ = 1 / 0
    assert torch.equal(alone(model, batch), expected)
    assert not model.model._forward_pre_hooks
    assert not model.model._forward_hooks


def test_two_models_of_one_config_do_not_see_each_other():
    config = tiny_config()
    torch.manual_seed(0)
    policy, critic = (AutoModelForCausalLM.from_config(config).eval() for _ in range(2))
    batch = make_batch()
    expected = alone(critic, batch)
    with attach_packed_attention(policy):
        assert torch.equal(alone(critic, batch), expected)
        with attach_packed_attention(critic):
            torch.testing.assert_close(critic(**packed_model_kwargs(batch)).logits[0], expected, rtol=1e-4, atol=1e-5)
        policy(**packed_model_kwargs(batch))
        assert torch.equal(alone(critic, batch), expected)


def test_attaching_twice_is_an_error_and_a_copy_keeps_working():
    model, batch = tiny_model(), make_batch()
    with attach_packed_attention(model):
        with pytest.raises(RuntimeError, match="already has packed attention"):
            attach_packed_attention(model)
        expected = model(**packed_model_kwargs(batch)).logits
        twin = copy.deepcopy(model)
    torch.testing.assert_close(twin(**packed_model_kwargs(batch)).logits, expected, rtol=0, atol=0)


def test_nothing_is_registered_before_the_first_attachment():
    for mapping in (AttentionInterface._global_mapping,):
        mapping.pop(registration.NAME, None)
    importlib.reload(registration)
    assert registration.NAME not in AttentionInterface._global_mapping
    attach_packed_attention(tiny_model()).detach()
    assert registration.NAME in AttentionInterface._global_mapping


def test_the_probe_leaves_training_mode_and_random_state_alone():
    model = tiny_model().train()
    model.model.layers[0].eval()
    state = torch.get_rng_state()
    attach_packed_attention(model).detach()
    assert model.training
    assert not model.model.layers[0].training
    assert torch.equal(state, torch.get_rng_state())


def test_dropout_in_attention_is_applied_in_training_only():
    model, batch = tiny_model(attention_dropout=0.5), make_batch()
    with attach_packed_attention(model):
        first, second = (model(**packed_model_kwargs(batch)).logits for _ in range(2))
        assert torch.equal(first, second)
        model.train()
        assert not torch.allclose(model(**packed_model_kwargs(batch)).logits, first)


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
        model(**packed_model_kwargs(make_batch([longest, 3])))
        with pytest.raises(ValueError, match=rf"{longest + 1} tokens, but beyond {longest} the rotary frequencies of .*Model depend"):
            model(**packed_model_kwargs(make_batch([longest + 1, 3])))


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
    batch = make_batch()
    with pytest.raises(ValueError, match=r"PackedBatch\.filler"):
        packed_model_kwargs(PackedBatch.empty(batch.schema))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_under_autocast_packed_samples_equal_the_same_samples_alone(family):
    model, batch = tiny_model(family), make_batch()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = alone(model, batch)
        with attach_packed_attention(model):
            logits = model(**packed_model_kwargs(batch)).logits[0]
    torch.testing.assert_close(logits, expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))
