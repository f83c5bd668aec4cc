import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rollout_toys import STOP, VOCAB_SIZE, mixed_requests, quick_collections, reference_log_probs, toy_llama
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from lightning_rlbatch.rollout.engine import RolloutRequest, SamplingParams, rollout_seed
from lightning_rlbatch.rollout.transformers_engine import TransformersEngine
from lightning_rlbatch.rollout.weights import full_parameters
from lightning_rlbatch.testing import run_distributed

SAMPLING = SamplingParams(max_new_tokens=20, stop_token_ids=(STOP, 9))


def count_forwards(engine: TransformersEngine) -> list[tuple[int, int]]:
    """Record the shape of the input of every forward."""
    shapes: list[tuple[int, int]] = []
    engine.model.register_forward_pre_hook(lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True)
    return shapes


@pytest.mark.parametrize("max_batch_size", [None, 1, 4, 7])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_equal_those_of_each_sample_alone_without_padding_or_cache(max_batch_size: int | None, temperature: float) -> None:
    model = toy_llama()
    engine = TransformersEngine(model, pad_token_id=0, max_batch_size=max_batch_size)
    requests = mixed_requests()
    sampling = SamplingParams(max_new_tokens=20, temperature=temperature, stop_token_ids=(STOP, 9))
    completions = engine.generate(requests, sampling)
    assert len({len(completion.token_ids) for completion in completions}) > 3  # they leave at different steps
    for request, completion in zip(requests, completions):
        expected = reference_log_probs(model, request.prompt_ids, completion.token_ids, temperature)
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, rtol=1e-4, atol=1e-5)


def test_a_request_gives_the_same_completion_in_any_batch_order_and_share() -> None:
    engine = TransformersEngine(toy_llama(), pad_token_id=0)
    requests = mixed_requests(7, 4)
    expected = [completion.token_ids for completion in engine.generate(requests, SAMPLING)]
    for size in (1, 3, 8):
        engine.max_batch_size = size
        assert [completion.token_ids for completion in engine.generate(requests, SAMPLING)] == expected
    engine.max_batch_size = None
    backwards = engine.generate(requests[::-1], SAMPLING)[::-1]
    assert [completion.token_ids for completion in backwards] == expected
    for world_size in (2, 4):
        shares = [engine.generate(requests[rank::world_size], SAMPLING) for rank in range(world_size)]
        assert [shares[i % world_size][i // world_size].token_ids for i in range(len(requests))] == expected


@pytest.mark.parametrize("sampling", [SAMPLING, SamplingParams(max_new_tokens=9, temperature=0.7, top_k=20, top_p=0.9)])
@quick_collections()
def test_every_method_gives_the_same_completions_whatever_the_models_own_generation_settings(sampling: SamplingParams) -> None:
    model = toy_llama()
    model.generation_config.update(repetition_penalty=3.0, temperature=0.1, top_k=1, do_sample=True, eos_token_id=12)
    before, state = model.generation_config.to_dict(), torch.get_rng_state()
    requests = [RolloutRequest(r.prompt_ids, r.seed, None if index % 3 else 1 + index) for index, r in enumerate(mixed_requests())]
    expected = TransformersEngine(model, pad_token_id=0).generate(requests, sampling)
    for method in ("generate", "continuous_batching"):
        for max_batch_size in (None, 4):
            completions = TransformersEngine(model, pad_token_id=0, max_batch_size=max_batch_size, method=method).generate(
                requests, sampling
            )
            for completion, reference in zip(completions, expected):
                assert (completion.token_ids, completion.finish_reason) == (reference.token_ids, reference.finish_reason), method
                torch.testing.assert_close(torch.tensor(completion.log_probs), torch.tensor(reference.log_probs), rtol=1e-4, atol=1e-5)
    assert model.generation_config.to_dict() == before
    assert torch.equal(torch.get_rng_state(), state)


def test_models_without_a_key_value_cache_are_sampled_by_their_own_generate() -> None:
    config = MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2, state_size=4, initializer_range=0.3, pad_token_id=0)
    torch.manual_seed(0)
    model = MambaForCausalLM(config).eval()
    with pytest.raises(ValueError, match=r"MambaForCausalLM.forward takes input_ids, .*Set method='generate'"):
        TransformersEngine(model, pad_token_id=0, attn_implementation=None)  # it would sample every token without the ones before
    engine = TransformersEngine(model, pad_token_id=0, attn_implementation=None, method="generate")
    for request, completion in zip(mixed_requests(4, 2), engine.generate(mixed_requests(4, 2), SAMPLING)):
        expected = reference_log_probs(model, request.prompt_ids, completion.token_ids)
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, rtol=1e-4, atol=1e-5)


def test_an_error_while_batches_are_scheduled_is_raised_here() -> None:
    engine = TransformersEngine(toy_llama(), pad_token_id=0, method="continuous_batching")
    engine.model.lm_head.register_forward_hook(lambda module, args, output: 1 / 0)
    with pytest.raises(RuntimeError, match=r"continuous batching failed at request .*division by zero"):
        engine.generate(mixed_requests(1, 2), SAMPLING)


def test_seeds_of_a_group_give_different_completions() -> None:
    engine = TransformersEngine(toy_llama(), pad_token_id=0)
    requests = [RolloutRequest([11, 12], rollout_seed(0, 0, 0, r)) for r in range(12)]
    assert len({tuple(completion.token_ids) for completion in engine.generate(requests, SAMPLING)}) == 12


def test_greedy_decoding_equals_generate_of_transformers() -> None:
    model = toy_llama()
    requests = mixed_requests(6, 1)
    completions = TransformersEngine(copy.deepcopy(model), pad_token_id=0).generate(
        requests, SamplingParams(max_new_tokens=15, temperature=0.0, stop_token_ids=(STOP,))
    )
    for request, completion in zip(requests, completions):
        prompt = torch.tensor([request.prompt_ids])
        output = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=15, do_sample=False)
        assert completion.token_ids == output[0, len(request.prompt_ids) :].tolist()


def test_first_tokens_follow_the_models_distribution() -> None:
    model = toy_llama()
    requests = [RolloutRequest([20, 21, 22], rollout_seed(0, 0, 0, r)) for r in range(5000)]
    completions = TransformersEngine(model, pad_token_id=0).generate(requests, SamplingParams(max_new_tokens=1))
    frequencies = torch.bincount(torch.tensor([c.token_ids[0] for c in completions]), minlength=VOCAB_SIZE) / 5000
    with torch.no_grad():
        probabilities = model(input_ids=torch.tensor([[20, 21, 22]])).logits[0, -1].softmax(-1)
    assert (frequencies - probabilities).abs().max() < 0.025


def test_completions_end_with_the_first_stop_token_or_at_the_limit() -> None:
    completions = TransformersEngine(toy_llama(), pad_token_id=0).generate(mixed_requests(8, 4), SAMPLING)
    assert {completion.finish_reason for completion in completions} == {"stop", "length"}
    for completion in completions:
        assert len(completion.token_ids) == len(completion.log_probs)
        assert not {STOP, 9} & set(completion.token_ids[:-1])
        if completion.finish_reason == "stop":
            assert completion.token_ids[-1] in (STOP, 9)
        else:
            assert len(completion.token_ids) == 20
            assert completion.token_ids[-1] not in (STOP, 9)


def test_a_group_shares_the_encoding_of_its_prompt() -> None:
    engine = TransformersEngine(toy_llama(), pad_token_id=0)
    shapes = count_forwards(engine)
    engine.generate(mixed_requests(3, 16), SamplingParams(max_new_tokens=2))
    assert shapes == [(3, 3), (48, 1)]


def test_finished_sequences_leave_the_batch() -> None:
    engine = TransformersEngine(toy_llama(), pad_token_id=0)
    shapes = count_forwards(engine)
    completions = engine.generate(mixed_requests(8, 8), SamplingParams(max_new_tokens=40, stop_token_ids=(STOP, 9, 10, 11)))
    computed = sum(rows for rows, width in shapes[1:] if width == 1)
    needed = sum(len(completion.token_ids) - 1 for completion in completions)
    longest = max(len(completion.token_ids) for completion in completions)
    assert needed <= computed < 1.15 * needed
    assert 64 * (longest - 1) > 2 * computed  # what a batch that waits for its longest sequence computes


def test_waiting_requests_take_the_places_of_finished_ones() -> None:
    engine = TransformersEngine(toy_llama(), pad_token_id=0, max_batch_size=8)
    shapes = count_forwards(engine)
    completions = engine.generate(mixed_requests(8, 8), SamplingParams(max_new_tokens=40, stop_token_ids=(STOP, 9, 10, 11)))
    assert max(rows for rows, _ in shapes) == 8
    decoded = [rows for rows, width in shapes if width == 1]
    assert sum(len(completion.token_ids) for completion in completions) > 0.75 * 8 * len(decoded)


def test_progress_adds_up_to_all_completions_and_tokens() -> None:
    events: list[tuple[int, int]] = []
    engine = TransformersEngine(toy_llama(), pad_token_id=0, max_batch_size=5)
    completions = engine.generate(mixed_requests(), SAMPLING, on_progress=lambda *event: events.append(event))
    assert len(events) > 5
    assert sum(finished for finished, _ in events) == len(completions)
    assert sum(tokens for _, tokens in events) == sum(len(completion.token_ids) for completion in completions)


def test_no_request_gives_no_completion() -> None:
    assert TransformersEngine(toy_llama(), pad_token_id=0).generate([], SAMPLING) == []


def test_sliding_window_models_give_the_log_probs_of_each_sample_alone() -> None:
    config = MistralConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, sliding_window=6, initializer_range=0.3, pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = MistralForCausalLM(config).eval()
    requests = mixed_requests(4, 2)
    for size in (None, 3):
        completions = TransformersEngine(model, pad_token_id=0, max_batch_size=size).generate(requests, SAMPLING)
        for request, completion in zip(requests, completions):
            expected = reference_log_probs(model, request.prompt_ids, completion.token_ids)
            torch.testing.assert_close(torch.tensor(completion.log_probs), expected, rtol=1e-4, atol=1e-5)


@quick_collections()
def test_a_model_that_mixes_kinds_of_layers_has_room_for_one_request_at_a_time() -> None:
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, sliding_window=6, use_sliding_window=True, initializer_range=0.3, pad_token_id=0, eos_token_id=None,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    model, requests = Qwen2ForCausalLM(config).eval(), mixed_requests(2, 1)
    engine = TransformersEngine(model, pad_token_id=0, max_batch_size=1, method="continuous_batching")
    for request, completion in zip(requests, engine.generate(requests, SAMPLING)):
        expected = reference_log_probs(model, request.prompt_ids, completion.token_ids)
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, rtol=1e-4, atol=1e-5)
    assert model.config._attn_implementation == "sdpa"


def test_attention_that_leaves_out_a_soft_cap_is_refused() -> None:
    model = Gemma2ForCausalLM(
        Gemma2Config(vocab_size=VOCAB_SIZE, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8)
    )
    with pytest.raises(ValueError, match="eager"):
        TransformersEngine(model, pad_token_id=0, attn_implementation="sdpa")
    with pytest.raises(ValueError, match=r"attn_logit_softcapping=50.*method to 'embedded' and attn_implementation to 'eager'"):
        TransformersEngine(model, pad_token_id=0, attn_implementation="eager", method="continuous_batching")
    TransformersEngine(model, pad_token_id=0, attn_implementation="eager")


@pytest.mark.parametrize(
    ("requests", "sampling", "message"),
    [
        ([RolloutRequest([], 0)], SAMPLING, "Prompt 0 is empty"),
        ([RolloutRequest([9], 0), RolloutRequest([9, 50], 0)], SAMPLING, "Prompt 1 holds token 50 but the model's vocabulary is 0 to 49"),
        ([RolloutRequest([9] * 45, 0)], SAMPLING, "has 45 tokens and max_new_tokens is 20, together more than the 64 positions"),
        ([RolloutRequest([9], 0)], SamplingParams(stop_token_ids=(50,), max_new_tokens=4), "stop_token_ids"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(requests: list[RolloutRequest], sampling: SamplingParams, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TransformersEngine(toy_llama(), pad_token_id=0).generate(requests, sampling)


def test_a_prompt_that_fills_the_models_positions_exactly_is_served() -> None:
    completions = TransformersEngine(toy_llama(), pad_token_id=0).generate([RolloutRequest([9] * 44, 0)], SamplingParams(max_new_tokens=20))
    assert len(completions[0].token_ids) == 20


def test_constructor_refuses_values_out_of_range() -> None:
    with pytest.raises(ValueError, match="pad_token_id must be a token of the vocabulary"):
        TransformersEngine(toy_llama(), pad_token_id=VOCAB_SIZE)
    with pytest.raises(ValueError, match="max_batch_size must be at least 1"):
        TransformersEngine(toy_llama(), pad_token_id=0, max_batch_size=0)
    with pytest.raises(ValueError, match="method must be one of 'embedded', 'generate', 'continuous_batching' but is 'vllm'"):
        TransformersEngine(toy_llama(), pad_token_id=0, method="vllm")  # type: ignore[arg-type]  # as a configuration could


@pytest.mark.parametrize("tied", [False, True])
def test_updated_weights_are_what_is_sampled_from(tied: bool) -> None:
    trainer, engine = toy_llama(1, tied), TransformersEngine(toy_llama(2, tied), pad_token_id=0)
    engine.update_weights(full_parameters(trainer))
    requests = mixed_requests(3, 2)
    for request, completion in zip(requests, engine.generate(requests, SAMPLING)):
        expected = reference_log_probs(trainer, request.prompt_ids, completion.token_ids)
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, rtol=1e-4, atol=1e-5)


def test_tied_weights_may_come_under_either_name_or_both() -> None:
    model = toy_llama(1, tied=True)
    weights = dict(model.named_parameters(remove_duplicate=False))
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= weights.keys()
    for left_out in (None, "lm_head.weight", "model.embed_tokens.weight"):
        engine = TransformersEngine(toy_llama(2, tied=True), pad_token_id=0)
        engine.update_weights((name, tensor) for name, tensor in weights.items() if name != left_out)
        assert torch.equal(engine.model.lm_head.weight, model.lm_head.weight)


def test_wrong_weights_are_an_error_that_names_them_after_the_whole_stream_is_consumed() -> None:
    weights = dict(toy_llama().named_parameters())
    del weights["model.norm.weight"]
    weights["model.extra.bias"] = torch.zeros(3)  # type: ignore[assignment]  # any tensor
    weights["lm_head.weight"] = torch.zeros(VOCAB_SIZE, 31)  # type: ignore[assignment]  # any tensor
    consumed = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights.items():
            consumed.append(name)
            yield name, tensor

    with pytest.raises(ValueError, match="3 problems") as error:
        TransformersEngine(toy_llama(), pad_token_id=0).update_weights(stream())
    assert consumed == list(weights)
    for part in ("model.norm.weight is missing", "model.extra.bias is unknown", r"lm_head.weight has shape (50, 31)"):
        assert part in str(error.value)


def test_a_copy_of_the_policy_leaves_the_policy_and_the_random_state_alone() -> None:
    policy = toy_llama()
    policy.set_attn_implementation("eager")
    policy.train()
    before, state = copy.deepcopy(policy.state_dict()), torch.get_rng_state()
    engine = TransformersEngine.from_model(policy, pad_token_id=0)
    engine.generate(mixed_requests(2, 2), SAMPLING)
    assert torch.equal(torch.get_rng_state(), state)
    assert policy.training
    assert policy.config._attn_implementation == "eager"
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(1.0)
    for name, tensor in engine.model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_a_half_precision_copy_keeps_rotary_frequencies_in_fp32() -> None:
    engine = TransformersEngine.from_model(toy_llama(), pad_token_id=0, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in engine.model.parameters()} == {torch.bfloat16}
    assert torch.equal(engine.model.model.rotary_emb.inv_freq, toy_llama().model.rotary_emb.inv_freq)
    assert len(engine.generate(mixed_requests(2, 2), SAMPLING)) == 4


@pytest.mark.parametrize("tied", [False, True])
def test_a_half_precision_engine_takes_the_rounded_weights_of_an_fp32_trainer(tied: bool) -> None:
    engine = TransformersEngine.from_model(toy_llama(0, tied), pad_token_id=0, dtype=torch.bfloat16)
    trained = toy_llama(1, tied)
    engine.update_weights(full_parameters(trained))
    expected = copy.deepcopy(trained).bfloat16()
    expected.model.rotary_emb = engine.model.model.rotary_emb  # frequencies stay in fp32 in the engine
    for name, parameter in engine.model.named_parameters():
        assert torch.equal(parameter, expected.get_parameter(name)), name
        assert parameter.dtype == torch.bfloat16
    for request, completion in zip(mixed_requests(3, 2), engine.generate(mixed_requests(3, 2), SAMPLING)):
        log_probs = reference_log_probs(expected, request.prompt_ids, completion.token_ids)
        torch.testing.assert_close(torch.tensor(completion.log_probs), log_probs, rtol=0.05, atol=0.3)


def test_a_policy_on_the_meta_device_gives_an_engine_that_awaits_its_weights() -> None:
    policy = toy_llama(3)
    with torch.device("meta"):
        shell = type(policy)(copy.deepcopy(policy.config))
    engine = TransformersEngine.from_model(shell, pad_token_id=0)
    engine.update_weights(full_parameters(policy))
    request = RolloutRequest([9, 10], 4)
    assert engine.generate([request], SAMPLING) == TransformersEngine(policy, pad_token_id=0).generate([request], SAMPLING)


def test_a_sleeping_engine_refuses_to_generate_and_wakes_up_unchanged() -> None:
    engine = TransformersEngine(toy_llama(), pad_token_id=0)
    before = engine.generate(mixed_requests(2, 2), SAMPLING)
    engine.sleep()
    engine.sleep()
    with pytest.raises(RuntimeError, match="sleeps and cannot generate"):
        engine.generate(mixed_requests(2, 2), SAMPLING)
    engine.wake()
    assert engine.generate(mixed_requests(2, 2), SAMPLING) == before


def test_weights_that_are_not_finite_are_an_error() -> None:
    model = toy_llama()
    with torch.no_grad():
        model.lm_head.weight[3, 3] = torch.nan
    with pytest.raises(RuntimeError, match="returned NaN while generating"):
        TransformersEngine(model, pad_token_id=0).generate(mixed_requests(1, 1), SAMPLING)


def test_ranks_sample_from_sharded_weights_what_one_process_samples() -> None:
    requests = mixed_requests(5, 2)
    expected = TransformersEngine(toy_llama(3), pad_token_id=0).generate(requests, SAMPLING)

    @quick_collections()
    def rank_main(rank: int, world_size: int) -> Any:
        policy = toy_llama(3)
        mesh = init_device_mesh("cpu", (world_size,))
        for layer in policy.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(policy, mesh=mesh)
        with pytest.raises(ValueError, match="is sharded"):
            TransformersEngine(policy, pad_token_id=0)
        engine = TransformersEngine.from_model(policy, pad_token_id=0)
        engine.update_weights(full_parameters(policy))
        # unequal shares: a collective within generate would hang here
        share = range(3) if rank == 0 else range(3, len(requests))
        sampled = []
        for engine.method in ("embedded", "generate", "continuous_batching"):
            sampled.append(engine.generate([requests[index] for index in share], SAMPLING))
        assert [c.token_ids for c in sampled[0]] == [c.token_ids for c in sampled[1]] == [c.token_ids for c in sampled[2]]
        return sampled[0]

    first, second = run_distributed(rank_main, 2)
    assert [completion.token_ids for completion in first + second] == [completion.token_ids for completion in expected]
