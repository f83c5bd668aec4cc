from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from tiny_models import SIZES, VOCAB, checkpoint_layers, noisy_model, response_batch
from torch import Tensor, nn

from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.models.output_heads import ValueHead
from lightning_rlbatch.models.scored_positions import shift_to_sources
from lightning_rlbatch.models.scorer import TokenScorer

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": noisy_model,
    "tied qwen2": lambda: noisy_model("Qwen2", tie_word_embeddings=True),
    "gemma2 (soft cap)": lambda: noisy_model(
        "Gemma2", head_dim=4, final_logit_softcapping=2.0, sliding_window=4, attn_implementation="eager"
    ),
    "cohere (logit scale)": lambda: noisy_model("Cohere", logit_scale=0.3),
    "granite (logits scaling)": lambda: noisy_model("Granite", logits_scaling=3.0),
    "phi (head bias)": lambda: noisy_model("Phi", num_key_value_heads=8),
    "gpt-neox (embed_out)": lambda: noisy_model("GPTNeoX", use_parallel_residual=True),
}


def reference(model: Any, batch: PackedBatch, temperature: Tensor | None = None, value: ValueHead | None = None) -> list[Tensor]:
    """Log-probs, entropies and values token by token, each sample alone, through the model's own forward."""
    results: list[list[Tensor]] = [[], [], []]
    masks = batch.split_per_sample("response_mask")
    for index, (ids, mask) in enumerate(zip(batch.split_per_sample("input_ids"), masks)):
        output = model(ids[None], output_hidden_states=True, use_cache=False)
        for position in range(len(ids)):
            zero = torch.zeros(())
            if not mask[position]:
                for column in results:
                    column.append(zero)
                continue
            logits = output.logits[0, position - 1]
            distribution = torch.distributions.Categorical(logits=logits / (1.0 if temperature is None else temperature[index]))
            results[0].append(distribution.log_prob(ids[position]))
            results[1].append(distribution.entropy())
            results[2].append(zero if value is None else value(output.hidden_states[-1][0, position - 1 : position])[0])
    return [torch.stack(column) for column in results]


def gradients(module: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*module.named_parameters())
    found = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
    return {name: gradient for name, gradient in zip(names, found) if gradient is not None}


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor], relative: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        error = (found[name] - gradient).abs().max()
        assert error <= relative * gradient.abs().max() + 1e-9, f"{name}: {error} of {gradient.abs().max()}"


def weighted(*columns: Tensor | None) -> Tensor:
    """A loss in which no two tokens weigh the same."""
    total = torch.zeros(())
    for power, column in enumerate(column for column in columns if column is not None):
        total = total + (column * torch.linspace(0.5, 1.5, column.shape[0]) * 0.3**power).sum()
    return total


@pytest.mark.parametrize("remove_padding", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_and_gradients_equal_each_sample_alone_through_the_models_own_logits(family: str, remove_padding: bool) -> None:
    batch, model = response_batch(), FAMILIES[family]()
    expected = reference(model, batch)  # before packed attention is attached
    expected_gradients = gradients(model, weighted(*expected[:2]))
    scores = TokenScorer(model, remove_padding=remove_padding)(batch, with_entropy=True)
    torch.testing.assert_close(scores.log_probs, expected[0], rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(scores.entropy, expected[1], rtol=1e-5, atol=2e-6)
    assert_same_gradients(gradients(model, weighted(scores.log_probs, scores.entropy)), expected_gradients)


@pytest.mark.parametrize("remove_padding", [True, False], ids=["packed", "padded"])
def test_temperature_may_differ_per_sample(remove_padding: bool) -> None:
    batch, model = response_batch(), noisy_model()
    temperature = torch.tensor([0.5, 1.0, 2.0, 1.5, 0.8])
    expected = reference(model, batch, temperature)
    scorer = TokenScorer(model, remove_padding=remove_padding)
    scores = scorer(batch, temperature=temperature, with_entropy=True)
    torch.testing.assert_close(scores.log_probs, expected[0], rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(scores.entropy, expected[1], rtol=1e-5, atol=2e-6)
    same = scorer(batch, temperature=0.7).log_probs
    torch.testing.assert_close(scorer(batch, temperature=torch.tensor(0.7)).log_probs, same)
    torch.testing.assert_close(scorer(batch, temperature=torch.full((5,), 0.7)).log_probs, same)


def test_values_come_from_the_state_before_the_token_and_train_the_backbone() -> None:
    batch, model = response_batch(), noisy_model()
    scorer = TokenScorer(model, value_head=True)
    assert scorer.value_head is not None
    assert scorer.attention is not None
    nn.init.normal_(scorer.value_head.weight)
    nn.init.constant_(scorer.value_head.bias, 0.3)
    with scorer.attention.paused():
        expected = reference(model, batch, value=scorer.value_head)[2]
    expected_gradients = gradients(scorer, weighted(expected))
    scores = scorer(batch, with_log_probs=False, with_values=True)
    assert scores.log_probs is None
    assert scores.entropy is None
    torch.testing.assert_close(scores.values, expected, rtol=1e-5, atol=2e-6)
    assert_same_gradients(gradients(scorer, weighted(scores.values)), expected_gradients)


def test_a_critic_needs_no_lm_head() -> None:
    torch.manual_seed(0)
    scorer = TokenScorer(transformers.LlamaModel(transformers.LlamaConfig(**SIZES)), value_head=True)
    values = scorer(response_batch(), with_log_probs=False, with_values=True).values
    assert values is not None
    assert torch.equal(values, torch.zeros(23))  # the head starts at zero
    with pytest.raises(ValueError, match="LlamaModel has none"):
        scorer(response_batch())


def test_without_a_response_mask_all_but_first_tokens_are_scored() -> None:
    batch, model = response_batch(), noisy_model()
    everything = batch.with_fields(per_token={"response_mask": batch.position_ids > 0})
    scorer = TokenScorer(model)
    torch.testing.assert_close(scorer(batch.without_fields(["response_mask"])).log_probs, scorer(everything).log_probs)


def test_positions_outside_the_response_are_zero_and_the_neighbours_token_is_never_scored() -> None:
    batch = response_batch(3, 4, prompt=1)
    targets, scored = shift_to_sources(batch)
    assert scored.tolist() == [True, True, False, True, True, True, False]
    assert targets[scored].tolist() == batch["input_ids"][batch["response_mask"]].tolist()
    log_probs = TokenScorer(noisy_model())(batch).log_probs
    assert log_probs is not None
    assert (log_probs != 0).tolist() == batch["response_mask"].tolist()


@pytest.mark.parametrize("remove_padding", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("num_tokens", [1, 2, 7])
def test_a_filler_scores_zero_and_reaches_every_parameter_that_a_real_batch_reaches(num_tokens: int, remove_padding: bool) -> None:
    batch = response_batch()
    scorer = TokenScorer(noisy_model(), value_head=True, remove_padding=remove_padding)
    real = scorer(batch, with_entropy=True, with_values=True)
    filler = scorer(PackedBatch.filler(batch.schema, num_tokens), with_entropy=True, with_values=True)
    assert all(column is not None and torch.equal(column, torch.zeros(num_tokens)) for column in filler)
    found = gradients(scorer, weighted(*filler))
    assert found.keys() == gradients(scorer, weighted(*real)).keys() == dict(scorer.named_parameters()).keys()
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in found.values())


def test_activation_checkpointing_gives_the_same_gradients() -> None:
    batch, model = response_batch(), noisy_model()
    scorer = TokenScorer(model)
    expected = gradients(scorer, weighted(scorer(batch).log_probs))
    checkpoint_layers(model)
    model.train()
    assert_same_gradients(gradients(scorer, weighted(scorer(batch).log_probs)), expected, relative=1e-6)


def test_what_cannot_be_done_is_refused_with_the_way_out() -> None:
    batch, scorer = response_batch(), TokenScorer(noisy_model())
    with pytest.raises(ValueError, match=r"no samples.*filler"):
        scorer(PackedBatch.empty(batch.schema))
    with pytest.raises(ValueError, match="value_head=True"):
        scorer(batch, with_values=True)
    with pytest.raises(ValueError, match="Nothing was asked for"):
        scorer(batch, with_log_probs=False)
    capped = noisy_model("Gemma2", head_dim=4, attn_implementation="eager")
    capped.config._attn_implementation = "sdpa"  # what transformers before 5.21 lets a model have
    with pytest.raises(ValueError, match=r"attn_logit_softcapping=50.*'sdpa'.*attn_implementation to 'eager'"):
        TokenScorer(capped, remove_padding=False)
    routed = noisy_model("Mixtral", num_local_experts=4, output_router_logits=True)
    with pytest.raises(ValueError, match=r"router losses \(output_router_logits=True\).*Set output_router_logits=False"):
        TokenScorer(routed)
    with pytest.raises(TypeError, match=r"0\.7 would become 0\.699219"):
        scorer(batch, temperature=torch.ones(5, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"each of 5 samples.*\(3,\)"):
        scorer(batch, temperature=torch.ones(3))


def test_a_head_that_does_more_than_multiply_by_its_weight_is_refused() -> None:
    class Adapted(nn.Linear):
        def forward(self, states: Tensor) -> Tensor:
            return super().forward(states) + 1

    model = noisy_model()
    model.set_output_embeddings(Adapted(32, VOCAB))
    with pytest.raises(TypeError, match="Adapted with a forward of its own"):
        TokenScorer(model)(response_batch())


@pytest.mark.parametrize("remove_padding", [True, False])
def test_logits_that_the_head_alone_does_not_give_are_found_before_any_training(remove_padding: bool) -> None:
    sizes = SIZES | {"is_decoder": True}  # a dense layer and a norm stand between its last state and the last matrix
    model = transformers.BertLMHeadModel(transformers.BertConfig(**sizes))
    with pytest.raises(RuntimeError, match=r"BertLMHeadModel cannot be scored from its LM head.*logit_scale=1"):
        TokenScorer(model, remove_padding=remove_padding)
    scaled = noisy_model("Cohere", logit_scale=0.3)
    scaled.config.logit_scale = 0.6  # as if the family's factor were unknown: the model keeps its own copy
    with pytest.raises(RuntimeError, match=r"logit_scale=0\.6.*differ from the model's own by 1\.0e\+00"):
        TokenScorer(scaled, remove_padding=remove_padding)
    scaled.config.logit_scale = 0.3
    TokenScorer(scaled, remove_padding=remove_padding)  # nothing was left attached


def test_values_are_single_precision_under_a_half_precision_head() -> None:
    head = ValueHead(4, dtype=torch.bfloat16)
    nn.init.normal_(head.weight)
    states = torch.randn(3, 4, dtype=torch.bfloat16)
    found = head(states)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, (states.float() @ head.weight.float().t())[:, 0])
