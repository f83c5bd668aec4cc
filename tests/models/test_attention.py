"""Packed samples are computed as each of them alone, in value and gradient, and only where packed attention is attached."""

import copy
import importlib

import pytest
import torch
from tiny_models import FAMILIES, VOCAB, checkpoint_layers, tiny_config, tiny_model, token_batch
from transformers import AttentionInterface, AutoModelForCausalLM

from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.models import registration
from lightning_rlbatch.models.attention import attach_packed_attention
from lightning_rlbatch.models.packed_inputs import packed_model_kwargs


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
    model, batch = tiny_model(family), token_batch()
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
    model, batch = tiny_model(family), token_batch()
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
    model, batch = tiny_model(family), token_batch()
    ids = batch["input_ids"].clone()
    ids[:5] = (ids[:5] + 13) % VOCAB
    with attach_packed_attention(model):
        before = model(**packed_model_kwargs(batch)).logits[0]
        after = model(**packed_model_kwargs(batch.with_fields({"input_ids": ids}))).logits[0]
    assert torch.equal(before[5:], after[5:])
    assert not torch.allclose(before[:5], after[:5])


def test_checkpointed_recomputation_uses_the_lengths_of_its_own_micro_batch():
    batches = [token_batch([5, 4]), token_batch([2, 3, 4], seed=1)]
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
    model, batch = tiny_model(), token_batch()
    kwargs = packed_model_kwargs(batch)
    with attach_packed_attention(model):
        expected = model(**kwargs).logits
        del kwargs["packed_lengths"]
        torch.testing.assert_close(model(**kwargs).logits, expected, rtol=0, atol=0)


def test_a_call_without_lengths_is_an_error_not_a_guess():
    model, batch = tiny_model(), token_batch()
    with attach_packed_attention(model), pytest.raises(ValueError, match="called without lengths, which are never guessed"):
        model(batch["input_ids"].unsqueeze(0), position_ids=batch.position_ids.unsqueeze(0))


def test_lengths_of_another_batch_are_an_error_with_both_numbers():
    model = tiny_model()
    kwargs = packed_model_kwargs(token_batch()) | {"packed_lengths": packed_model_kwargs(token_batch([3, 4]))["packed_lengths"]}
    with attach_packed_attention(model), pytest.raises(ValueError, match="got 18 tokens but the lengths add up to 7"):
        model(**kwargs)


def test_an_all_ones_mask_is_harmless_and_real_padding_is_refused():
    model, batch = tiny_model("gemma3"), token_batch()
    kwargs = packed_model_kwargs(batch)
    ones = torch.ones(1, batch.num_tokens, dtype=torch.int64)
    with attach_packed_attention(model):
        expected = model(**kwargs).logits
        torch.testing.assert_close(model(**kwargs, attention_mask=ones).logits, expected, rtol=0, atol=0)
        ones[0, :2] = 0
        with pytest.raises(ValueError, match="2 padding positions of 18"):
            model(**kwargs, attention_mask=ones)


def test_a_cache_and_attention_weights_are_refused():
    model, kwargs = tiny_model(), packed_model_kwargs(token_batch())
    with attach_packed_attention(model):
        with pytest.raises(ValueError, match="no cache"):
            model(**kwargs | {"use_cache": True})
        with pytest.raises(ValueError, match="returns no attention weights"):
            model(**kwargs, output_attentions=True)


def test_detaching_and_pausing_bring_the_former_attention_back_even_after_an_error():
    model, batch = tiny_model(), token_batch()
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
    batch = token_batch()
    expected = alone(critic, batch)
    with attach_packed_attention(policy):
        assert torch.equal(alone(critic, batch), expected)
        with attach_packed_attention(critic):
            torch.testing.assert_close(critic(**packed_model_kwargs(batch)).logits[0], expected, rtol=1e-4, atol=1e-5)
        policy(**packed_model_kwargs(batch))
        assert torch.equal(alone(critic, batch), expected)


def test_attaching_twice_is_an_error_and_a_copy_keeps_working():
    model, batch = tiny_model(), token_batch()
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
    model, batch = tiny_model(attention_dropout=0.5), token_batch()
    with attach_packed_attention(model):
        first, second = (model(**packed_model_kwargs(batch)).logits for _ in range(2))
        assert torch.equal(first, second)
        model.train()
        assert not torch.allclose(model(**packed_model_kwargs(batch)).logits, first)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_under_autocast_packed_samples_equal_the_same_samples_alone(family):
    model, batch = tiny_model(family), token_batch()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = alone(model, batch)
        with attach_packed_attention(model):
            logits = model(**packed_model_kwargs(batch)).logits[0]
    torch.testing.assert_close(logits, expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))
