import functools

import pytest
import torch
import torch.distributed as dist
from parity_step import Case, Step, make_batch, relative_errors, sp_groups, token_terms
from tiny_models import FAMILIES, checkpoint_layers, tiny_model
from torch.distributed.fsdp import fully_shard

from lightning_rlbatch.distributed.ulysses import gather_sequence, shard_sequence
from lightning_rlbatch.models.attention import attach_packed_attention
from lightning_rlbatch.models.packed_inputs import packed_model_kwargs
from lightning_rlbatch.testing import run_distributed

TOLERANCE = 1e-5
TOTALS = {  # packed totals that 2 and 4 do not divide, are shorter than P, leave shards of padding only
    "13 tokens": lambda: make_batch([5, 1, 7]),
    "3 tokens": lambda: make_batch([2, 1]),
    "1 token": lambda: make_batch([1]),
    "5 tokens": lambda: make_batch([5]),
    "response inside one shard": lambda: make_batch([6, 10], response=slice(4, 8)),
}


def two_batches():
    return [make_batch([5, 1, 7]), make_batch([9, 2], seed=1)]


@functools.cache
def cases_of(dp_size):
    """Every family with every total on one data-parallel rank, or with two batches on two."""
    if dp_size == 2:
        return {family: Case(family, two_batches()) for family in FAMILIES}
    return {f"{family}, {name}": Case(family, [make()]) for family in FAMILIES for name, make in TOTALS.items()}


def assert_small(errors_per_rank):
    worst_of_all = (0.0, "", "")
    for errors in errors_per_rank:
        for case, values in errors.items():
            worst = max(values, key=values.get)
            assert values[worst] < TOLERANCE, f"{case}: {worst} is off by {values[worst]:.1e}"
            worst_of_all = max(worst_of_all, (values[worst], case, worst))
    print("worst relative error {:.1e}: {}, {}".format(*worst_of_all))  # shown by pytest -s


@pytest.mark.parametrize(("world_size", "dp_size"), [(1, 1), (2, 1), (4, 1), (4, 2)])
def test_loss_gradients_and_norm_equal_the_plain_step_for_every_family_and_total(world_size, dp_size):
    cases = cases_of(dp_size)

    def work(rank, size):
        groups = sp_groups(dp_size)
        return {name: case.errors(groups) for name, case in cases.items()}

    assert_small(run_distributed(work, world_size, timeout=240.0, pg_timeout=60.0))


def test_activation_checkpointing_repeats_the_collectives_and_changes_nothing():
    cases = {family: Case(family, two_batches()) for family in ("llama", "gemma2", "qwen3_moe")}
    for case in cases.values():
        case.model.train()
        checkpoint_layers(case.model)

    def work(rank, size):
        groups = sp_groups(2)
        return {family: case.errors(groups) for family, case in cases.items()}

    assert_small(run_distributed(work, 4))


@pytest.mark.parametrize("attach_first", [True, False])
def test_sharded_by_fsdp_over_data_and_sequence_ranks_it_equals_the_plain_step(attach_first):
    case = Case("qwen2", two_batches(), tie_word_embeddings=True)

    def work(rank, size):
        group, model, batch, step = sp_groups(2)[rank // 2], case.model, case.batches[rank // 2], Step()
        if attach_first:
            attach_packed_attention(model, sp_group=group)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        if not attach_first:
            attach_packed_attention(model, sp_group=group)
        logits = model(**step.model_kwargs(batch, group)).logits[0]
        terms = token_terms(logits, step.labels(batch, group), shard_sequence(batch["weights"], group))
        loss = step.loss(terms, batch, group, 2, case.total_tokens)
        loss.backward()
        gradients = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
        total = loss.detach().clone()
        dist.all_reduce(total)
        return {"fsdp": relative_errors(float(total) / size, gradients, *case.expected)}

    assert_small(run_distributed(work, 4))


def test_policy_over_two_ranks_and_critic_on_one_live_in_the_same_process():
    def work(rank, size):
        policy, critic = tiny_model("llama"), tiny_model("mistral", seed=1)
        batch, group = make_batch([5, 1, 7]), dist.group.WORLD
        with attach_packed_attention(policy, sp_group=group) as outer:
            with attach_packed_attention(critic) as inner:
                whole = critic(**packed_model_kwargs(batch)).logits
                local = policy(**packed_model_kwargs(batch, sp_group=group)).logits
                with pytest.raises(ValueError, match="called without lengths"):
                    critic(batch["input_ids"].unsqueeze(0))
            assert outer.attached
            assert not inner.attached
            torch.testing.assert_close(policy(**packed_model_kwargs(batch, sp_group=group)).logits, local)
        return whole.shape[1], local.shape[1], outer.num_forwards, inner.num_forwards

    assert run_distributed(work, 2) == [(13, 7, 2, 1)] * 2


def test_too_few_heads_fail_on_every_rank_before_any_collective():
    def work(rank, size):
        model = tiny_model("llama", num_attention_heads=3, num_key_value_heads=3, hidden_size=12)
        with pytest.raises(ValueError, match="sequence_parallel_size=4 needs at least 4 attention heads but the model has 3"):
            attach_packed_attention(model, sp_group=dist.group.WORLD)
        return model.config._attn_implementation

    assert run_distributed(work, 4) == ["sdpa"] * 4


def test_whole_sequences_given_to_a_sequence_parallel_model_are_an_error():
    def work(rank, size):
        model = tiny_model()
        message = "got 13 tokens but the lengths add up to 13 over 2 sequence-parallel ranks"
        with attach_packed_attention(model, sp_group=dist.group.WORLD), pytest.raises(ValueError, match=message):
            model(**packed_model_kwargs(make_batch([5, 1, 7])))
        return True

    assert run_distributed(work, 2) == [True, True]


def activation_bytes(model, batch, group):
    """Bytes that the forward keeps for the backward, without parameters; each storage once."""
    storages = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def note(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor  # keeps it alive, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model.base_model(**packed_model_kwargs(batch, sp_group=group))
    return sum(tensor.untyped_storage().nbytes() for pointer, tensor in storages.items() if pointer not in own)


@pytest.mark.parametrize("family", ["llama-mha", "gemma2", "mistral"])
def test_activation_memory_of_a_rank_falls_with_the_number_of_ranks(family):
    def work(rank, size):
        model = tiny_model(family, num_key_value_heads=8, head_dim=32, hidden_size=256)
        with attach_packed_attention(model, sp_group=dist.group.WORLD):
            return activation_bytes(model, make_batch([40, 300, 60, 112]), dist.group.WORLD)

    whole = run_distributed(work, 1)[0]
    for size in (2, 4):
        for used in run_distributed(work, size):
            assert used <= 1.1 / size * whole, f"{used} bytes on each of {size} ranks, {whole} on one"


@pytest.mark.parametrize(("checkpointing", "backward_calls"), [(False, 4), (True, 8)])
def test_a_model_of_two_layers_issues_four_all_to_alls_forward_and_four_backward(monkeypatch, checkpointing, backward_calls):
    def work(rank, size):
        calls, real = [], dist.all_to_all_single
        monkeypatch.setattr(dist, "all_to_all_single", lambda *args, **kwargs: (calls.append(1), real(*args, **kwargs)))
        model = tiny_model("llama")
        if checkpointing:
            model.train()
            checkpoint_layers(model)
        with attach_packed_attention(model, sp_group=dist.group.WORLD, probe=False):
            hidden = model.base_model(**packed_model_kwargs(make_batch([5, 1, 7]), sp_group=dist.group.WORLD))[0]
            forward = len(calls)
            hidden.sum().backward()
        return forward, len(calls) - forward

    assert run_distributed(work, 2) == [(4, backward_calls)] * 2


def test_under_autocast_the_ranks_exchange_one_dtype_and_agree_with_one_rank():
    model, batch = tiny_model("qwen3"), make_batch([5, 1, 7])  # normed queries and keys are fp32 there, values bf16

    def work(rank, size):
        group = dist.group.WORLD if size > 1 else None
        with torch.autocast("cpu", torch.bfloat16), attach_packed_attention(model, sp_group=group):
            hidden = model.base_model(**packed_model_kwargs(batch, sp_group=group))[0][0]
        return gather_sequence(hidden, group, 13).detach()

    expected = run_distributed(work, 1)[0]
    for hidden in run_distributed(work, 2):
        assert float((hidden - expected).abs().max()) < 2e-2 * float(expected.abs().max())
