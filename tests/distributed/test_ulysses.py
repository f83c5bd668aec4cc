import itertools

import pytest
import torch
import torch.distributed as dist

from lightning_rlbatch.distributed.heads import HeadPlan
from lightning_rlbatch.distributed.ulysses import gather_sequence, pad_seq_lens, shard_sequence, ulysses_attention
from lightning_rlbatch.functional.attention import varlen_attention
from lightning_rlbatch.testing import run_distributed

LAYOUTS = [(8, 8), (8, 4), (8, 2), (8, 1), (6, 3), (6, 2), (6, 1), (7, 7), (7, 1), (14, 2), (14, 7), (4, 2)]
OPTIONS = [{}, {"window": 3}, {"softcap": 2.0, "scale": 0.4}, {"causal": False}]


def test_every_query_head_has_one_owner_and_finds_its_own_kv_head():
    for heads, kv_heads in LAYOUTS:
        for sp_size in range(1, heads + 1):
            plan = HeadPlan.build(heads, kv_heads, sp_size)
            owned = [head for rank in range(sp_size) for head in plan.query_heads(rank)]
            assert owned == list(range(heads))
            counts = [len(plan.query_heads(rank)) for rank in range(sp_size)]
            assert max(counts) - min(counts) <= 1
            for rank in range(sp_size):
                kv, local = plan.kv_heads(rank), len(plan.query_heads(rank))
                repeats = plan.kv_repeats(rank) or [local // len(kv)] * len(kv)  # None: what an attention kernel does by itself
                used = [head for head, count in zip(kv, repeats) for _ in range(count)]
                assert used == [head // (heads // kv_heads) for head in plan.query_heads(rank)]


def test_kv_heads_travel_only_where_they_are_needed():
    plan = HeadPlan.build(8, 2, 2)
    assert [list(plan.kv_heads(rank)) for rank in range(2)] == [[0], [1]]
    assert [list(HeadPlan.build(14, 2, 4).kv_heads(rank)) for rank in range(4)] == [[0], [0, 1], [1], [1]]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "sp_size", "message"),
    [
        (3, 3, 4, "sequence_parallel_size=4 needs at least 4 attention heads but the model has 3 .*Lower sequence_parallel_size to 3"),
        (8, 3, 2, "8 query heads must be a multiple of the 3 key/value heads"),
        (8, 8, 0, "must be at least 1 but is 0"),
    ],
)
def test_impossible_splits_are_errors_with_their_numbers(heads, kv_heads, sp_size, message):
    with pytest.raises(ValueError, match=message):
        HeadPlan.build(heads, kv_heads, sp_size)


def test_padding_is_a_segment_of_its_own_and_only_where_needed():
    assert pad_seq_lens([5, 8], 4) == (5, 8, 3)
    assert pad_seq_lens([5, 7], 4) == (5, 7)
    assert pad_seq_lens([1], 4) == (1, 3)
    assert pad_seq_lens([5, 8], 1) == (5, 8)


def make_inputs(heads, kv_heads, tokens, value_size=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(heads * 100 + kv_heads)
    shapes = [(heads, 4), (kv_heads, 4), (kv_heads, value_size)]
    return [torch.randn(tokens, *shape, generator=generator, dtype=dtype) for shape in shapes]


def run_layout(group, seq_lens, heads, kv_heads, options, value_size=4, sinks=False):
    """Return the errors of output and gradients of one layout against the whole sequence on one rank."""
    cu_seqlens = torch.tensor([0, *itertools.accumulate(seq_lens)], dtype=torch.int32)  # without the padding of the shards
    tokens = sum(seq_lens)
    whole = [x.requires_grad_() for x in make_inputs(heads, kv_heads, tokens, value_size)]
    sink = torch.linspace(-1, 1, heads, dtype=torch.float64).requires_grad_() if sinks else None
    weights = torch.linspace(-1, 1, tokens * heads * value_size, dtype=torch.float64).view(tokens, heads, value_size)
    expected = varlen_attention(*whole, seq_lens, sinks=sink, **options)
    leaves = [*whole, sink] if sinks else whole
    reference = torch.autograd.grad((expected * weights).square().sum(), leaves)

    local = [shard_sequence(x, group) for x in whole]
    out = ulysses_attention(*local, cu_seqlens, group=group, sinks=sink, **options)
    gathered = gather_sequence(out, group, tokens)
    gradients = torch.autograd.grad((gathered * weights).square().sum(), leaves)
    for gradient in gradients:  # what FSDP or DDP does with the gradients of parameters
        dist.all_reduce(gradient, group=group)
        gradient /= dist.get_world_size(group)
    return [float((x - y).detach().abs().max()) for x, y in zip([gathered, *gradients], [expected, *reference])]


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_head_layout_and_total_equals_one_rank_in_value_and_gradient(world_size):
    def work(rank, size):
        errors = {}
        for seq_lens in ([5, 1, 7], [3], [1], [9, 2, 5]):
            for heads, kv_heads in LAYOUTS:
                errors[heads, kv_heads, str(seq_lens)] = run_layout(dist.group.WORLD, seq_lens, heads, kv_heads, {})
        for options in OPTIONS:
            errors["options", str(options)] = run_layout(dist.group.WORLD, [5, 1, 7], 6, 3, options)
        errors["value size"] = run_layout(dist.group.WORLD, [5, 1, 7], 8, 2, {}, value_size=3)
        errors["sinks"] = run_layout(dist.group.WORLD, [5, 1, 7], 7, 1, {"window": 4}, sinks=True)
        return errors

    for errors in run_distributed(work, world_size):
        for case, values in errors.items():
            assert max(values) < 1e-10, f"{case}: {values}"


def test_two_sequence_parallel_groups_work_side_by_side():
    def work(rank, size):
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        seq_lens = [[5, 1, 7], [2, 2]][rank // 2]
        return run_layout(groups[rank // 2], seq_lens, 8, 2, {})

    assert max(max(errors) for errors in run_distributed(work, 4)) < 1e-10


COLLECTIVES = (
    "all_to_all_single",
    "all_to_all",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "broadcast",
    "send",
)


def count_collectives(monkeypatch):
    """Return a list that receives the name of every collective issued from now on."""
    calls = []

    def counted(name, real):
        def call(*args, **kwargs):
            calls.append(name)
            return real(*args, **kwargs)

        return call

    for name in COLLECTIVES:
        if hasattr(dist, name):
            monkeypatch.setattr(dist, name, counted(name, getattr(dist, name)))
    return calls


@pytest.mark.parametrize("layout", [(8, 8), (8, 2), (7, 1)])
def test_a_layer_costs_two_all_to_alls_forward_and_two_backward_and_nothing_else(layout, monkeypatch):
    def work(rank, size):
        calls = count_collectives(monkeypatch)
        local = [x[:4].requires_grad_() for x in make_inputs(*layout, 8)]
        out = ulysses_attention(*local, [0, 3, 8], group=dist.group.WORLD)
        forward, calls[:] = list(calls), []
        out.sum().backward()
        return forward, calls

    for forward, backward in run_distributed(work, 2):
        assert forward == backward == ["all_to_all_single"] * 2


def test_shards_gather_to_the_sequence_and_hand_back_their_slice_times_the_group_size():
    def work(rank, size):
        tokens = torch.arange(10.0).view(5, 2).requires_grad_()
        local = shard_sequence(tokens, dist.group.WORLD, pad_value=-1)
        whole = gather_sequence(local, dist.group.WORLD)
        assert torch.equal(gather_sequence(local, dist.group.WORLD, 5), tokens)
        columns = shard_sequence(torch.arange(3).unsqueeze(0), dist.group.WORLD, dim=1)
        gradient = torch.autograd.grad((whole[:5, 0] * torch.arange(1.0, 6)).sum(), local)[0]
        with pytest.raises(ValueError, match=r"num_tokens between 0 and 2 ranks x 3 tokens but got 7"):
            gather_sequence(local, dist.group.WORLD, 7)
        return local.tolist(), whole[:, 0].tolist(), columns.tolist(), gradient[:, 0].tolist()

    first, second = run_distributed(work, 2)
    assert first[0] == [[0, 1], [2, 3], [4, 5]]
    assert second[0] == [[6, 7], [8, 9], [-1, -1]]
    assert first[1] == second[1] == [0, 2, 4, 6, 8, -1]
    assert (first[2], second[2]) == ([[0, 1]], [[2, 0]])
    assert (first[3], second[3]) == ([2, 4, 6], [8, 10, 0])


def test_without_a_group_nothing_is_communicated_and_nothing_changes():
    whole = make_inputs(8, 2, 9)
    assert torch.equal(ulysses_attention(*whole, [0, 4, 9], group=None), varlen_attention(*whole, [4, 5]))
    assert shard_sequence(whole[0], None) is whole[0]
    assert gather_sequence(whole[0], None) is whole[0]
    assert gather_sequence(whole[0], None, 3).shape[0] == 3


def test_what_does_not_fit_is_an_error_on_every_rank():
    def work(rank, size):
        group, local = dist.group.WORLD, make_inputs(8, 2, 4)
        with pytest.raises(ValueError, match=r"samples have 4 tokens but 2 rank\(s\) with 4 tokens each hold 8.*shard_sequence"):
            ulysses_attention(*local, [0, 4], group=group)
        with pytest.raises(ValueError, match=r"begin with 0 and never to fall, but got \[3, 5\]"):  # lengths instead of boundaries
            ulysses_attention(*local, torch.tensor([3, 5]), group=group)
        with pytest.raises(TypeError, match="cu_seqlens, or seq_lens, but got neither"):
            ulysses_attention(*local, None, group=group)
        with pytest.raises(ValueError, match=r"Expected query \[T, Hq, D\].*but got query \[1, 4, 8, 4\]"):
            ulysses_attention(*(x[None] for x in local), [0, 8], group=group)
        with pytest.raises(ValueError, match="needs at least 2 attention heads but the model has 1"):
            ulysses_attention(*make_inputs(1, 1, 4), [0, 8], group=group)
        with pytest.raises(ValueError, match="travel together and need one dtype"):
            ulysses_attention(local[0].float(), *local[1:], [0, 8], group=group)
        return True

    assert run_distributed(work, 2) == [True, True]


def test_lengths_on_the_host_serve_as_well_as_boundaries():
    whole = make_inputs(8, 2, 9)
    expected = varlen_attention(*whole, [4, 0, 5])
    for how in ({"cu_seqlens": torch.tensor([0, 4, 4, 9])}, {"cu_seqlens": None, "seq_lens": [4, 0, 5]}):
        assert torch.equal(ulysses_attention(*whole, **how, group=None), expected)


def test_the_token_dimension_may_be_any():
    def work(rank, size):
        rows = torch.arange(30.0).view(2, 5, 3)
        local = shard_sequence(rows, dist.group.WORLD, dim=1)
        return bool(torch.equal(gather_sequence(local, dist.group.WORLD, 5, dim=1), rows))

    assert run_distributed(work, 2) == [True, True]
