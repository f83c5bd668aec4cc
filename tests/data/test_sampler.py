"""Mini-batches that a sampler plans: what is in them, for which rank, from where on."""

import itertools
import pickle
import warnings

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlbatch.data.indices import MicroBatchIndices
from lightning_rlbatch.data.sampler import TokenBudgetSampler
from lightning_rlbatch.functional.plan_input import OversizeWarning
from lightning_rlbatch.testing import run_distributed

LENGTHS = [5, 9, 2, 8, 3, 7, 1]


def of_all_ranks(lengths, dp_size, **options):
    return [TokenBudgetSampler(lengths, dp_size=dp_size, dp_rank=rank, **options) for rank in range(dp_size)]


def seen(items):
    """Dataset indices with weight that one rank runs, in order."""
    if items and isinstance(items[0], MicroBatchIndices):
        return [i for indices in items if indices.loss_scale > 0 for i in indices]
    return [i for item in items for bucket in item.micro_batches for i in bucket]


@st.composite
def datasets(draw):
    group_size = draw(st.sampled_from([1, 1, 2]))
    lengths = draw(st.lists(st.one_of(st.integers(1, 10), st.integers(1, 100)), min_size=group_size, max_size=50))
    lengths = lengths[: len(lengths) // group_size * group_size]
    options = dict(
        mini_batch_size=group_size * draw(st.integers(1, 12)),
        max_tokens_per_rank=draw(st.integers(100 * group_size, 250 * group_size)),
        group_size=group_size,
        seed=draw(st.integers(0, 5)),
        shuffle=draw(st.booleans()),
        flat=draw(st.booleans()),
    )
    return lengths, draw(st.integers(1, 4)), options


@settings(max_examples=150, deadline=None)
@given(datasets(), st.integers(0, 3), st.integers(0, 100))
def test_ranks_share_an_epoch_without_overlap_or_loss_and_resume_anywhere(dataset, epoch, stop):
    lengths, dp_size, options = dataset
    samplers = of_all_ranks(lengths, dp_size, **options)
    for sampler in samplers:
        sampler.set_epoch(epoch)
    items = [list(sampler) for sampler in samplers]
    assert {len(rank) for rank in items} == {len(samplers[0])}
    assert sorted(i for rank in items for i in seen(rank)) == list(range(len(lengths)))
    if options["flat"]:
        assert all(len(indices) > 0 for rank in items for indices in rank)
        assert all(sum(lengths[i] for i in indices) <= options["max_tokens_per_rank"] for rank in items for indices in rank)
    stop %= len(samplers[0])
    last = samplers[-1]
    iterator = iter(last)
    for _ in range(stop):
        next(iterator)
    restored = of_all_ranks(lengths, dp_size, **options)[-1]
    restored.load_state_dict(pickle.loads(pickle.dumps(last.state_dict())))
    restored.set_epoch(epoch)  # Lightning calls it again when it resumes
    assert [repr(item) for item in restored] == [repr(item) for item in items[-1]][stop:]
    assert len(list(restored)) == len(restored)


@settings(max_examples=60, deadline=None)
@given(datasets())
def test_one_optimizer_step_of_the_flat_form_weighs_every_token_of_its_mini_batch_alike(dataset):
    lengths, dp_size, options = dataset
    options = {**options, "flat": True}
    samplers = of_all_ranks(lengths, dp_size, **options)
    steps = samplers[0].num_micro_steps
    for items in zip(*(zip(*[iter(sampler)] * steps) for sampler in samplers)):
        # Lightning divides by the accumulation, DDP averages over ranks: what remains must be the mean over all tokens.
        gradient = sum(indices.loss_scale * sum(lengths[i] for i in indices) for rank in items for indices in rank) / steps / dp_size
        assert gradient == pytest.approx(1.0)
        assert all([indices.is_last for indices in rank] == [False] * (steps - 1) + [True] for rank in items)
        assert len({indices.num_tokens for rank in items for indices in rank}) == 1


def test_epochs_differ_in_order_and_membership_ignores_lengths():
    one, other = (TokenBudgetSampler(lengths, mini_batch_size=2, max_tokens_per_rank=9) for lengths in (LENGTHS, [1, 1, 9, 9, 1, 4, 4]))
    orders = []
    for epoch in range(3):
        one.set_epoch(epoch)
        other.set_epoch(epoch)
        orders.append([item.mini_batch for item in one])
        assert orders[-1] == [item.mini_batch for item in other]
    assert len({str(order) for order in orders}) == 3
    assert all(sorted(itertools.chain(*order)) == list(range(7)) for order in orders)


def test_sequence_parallel_peers_get_the_same_items_and_the_budget_of_their_group():
    peers = [TokenBudgetSampler(LENGTHS, mini_batch_size=7, max_tokens_per_rank=10, sp_size=2, dp_size=1, dp_rank=0) for _ in range(2)]
    items = [next(iter(peer)) for peer in peers]
    assert items[0].micro_batches == items[1].micro_batches
    assert max(sum(LENGTHS[i] for i in bucket) for bucket in items[0].micro_batches) > 10
    assert max(sum(LENGTHS[i] for i in bucket) for bucket in items[0].micro_batches) <= 20


def test_scored_tokens_are_the_denominator():
    sampler = TokenBudgetSampler(LENGTHS, mini_batch_size=7, max_tokens_per_rank=35, num_tokens=[1] * 7)
    assert next(iter(sampler)).num_tokens == 7


def test_drop_last_drops_the_short_mini_batch_only():
    sampler = TokenBudgetSampler(LENGTHS, mini_batch_size=3, max_tokens_per_rank=9, drop_last=True)
    assert [len(item.mini_batch) for item in sampler] == [3, 3]
    assert len(sampler) == 2


def test_a_mini_batch_that_needs_too_many_micro_steps_exchanges_samples_with_the_others():
    lengths = [9] * 4 + [1] * 12
    sampler = TokenBudgetSampler(lengths, mini_batch_size=4, max_tokens_per_rank=12, shuffle=False, flat=True, num_micro_steps=1)
    items = list(sampler)
    assert sorted(itertools.chain(*items)) == list(range(16))
    assert all(sum(lengths[i] for i in indices) <= 12 for indices in items)
    impossible = TokenBudgetSampler([9] * 4, mini_batch_size=4, max_tokens_per_rank=12, flat=True, num_micro_steps=2)
    with pytest.raises(ValueError, match=r"A mini-batch of 4 samples with 36 tokens needs more than num_micro_steps=2"):
        list(impossible)


def test_an_outlier_is_reported_once(capsys, monkeypatch):
    said = []
    monkeypatch.setattr("lightning_rlbatch.data.sampler.rank_zero_info", said.append)
    sampler = TokenBudgetSampler([1, 1, 90, 1, 1, 1, 1, 1], mini_batch_size=4, max_tokens_per_rank=90, dp_size=2, dp_rank=0, shuffle=False)
    list(sampler)
    list(sampler)
    assert len(said) == 1
    assert "Sample 2 with 90 tokens" in said[0]


def test_an_oversize_sample_is_refused_at_once_or_isolated_with_one_warning():
    with pytest.raises(ValueError, match="Sample 1 has 9 tokens but a micro-batch may hold 8"):
        TokenBudgetSampler(LENGTHS, mini_batch_size=2, max_tokens_per_rank=8)
    with pytest.warns(OversizeWarning, match="Sample 1 has 9 tokens"):
        sampler = TokenBudgetSampler(LENGTHS, mini_batch_size=2, max_tokens_per_rank=8, oversize="isolate")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sorted(seen(list(sampler))) == list(range(7))


@pytest.mark.parametrize(("changes", "message"), [
    ({"mini_batch_size": 0}, "`mini_batch_size` must be at least 1 but got 0"),
    ({"mini_batch_size": 3, "group_size": 2, "lengths": [1, 2]}, "`mini_batch_size` must be a multiple of group_size=2 but got 3"),
    ({"dp_rank": 2, "dp_size": 2}, "`dp_rank` must be between 0 and dp_size - 1 = 1 but got 2"),
    ({"dp_size": 0}, "`dp_size` must be at least 1 but got 0"),
    ({"max_tokens_per_rank": 0}, "`max_tokens_per_rank` must be at least 1 but got 0"),
    ({"num_micro_steps": 2}, "`num_micro_steps` has no effect without flat=True"),
    ({"num_tokens": [1, 2]}, "one entry per sample"),
    ({"lengths": []}, "at least one"),
    ({"seed": -1}, "`seed` must be at least 0 but got -1"),
    ({"drop_last": True, "mini_batch_size": 8}, "drop_last=True leaves nothing of 7 samples"),
])  # fmt: skip
def test_a_bad_setting_is_named_with_its_value(changes, message):
    options = {"lengths": LENGTHS, "mini_batch_size": 2, "max_tokens_per_rank": 9, **changes}
    with pytest.raises(ValueError, match=message):
        TokenBudgetSampler(options.pop("lengths"), **options)


def test_a_state_of_another_sampler_is_refused():
    sampler = TokenBudgetSampler(LENGTHS, mini_batch_size=2, max_tokens_per_rank=9)
    with pytest.raises(ValueError, match="at item 9 of its epoch but this sampler has 4 items"):
        sampler.load_state_dict({"epoch": 0, "position": 9})


def _default_sizes(rank, world_size):
    sampler = TokenBudgetSampler(LENGTHS, mini_batch_size=7, max_tokens_per_rank=20, sp_size=2)
    return sampler.num_replicas, sampler.rank, seen(list(sampler))


def test_sizes_default_to_the_process_group():
    results = run_distributed(_default_sizes, 4)
    assert [result[:2] for result in results] == [(2, 0), (2, 0), (2, 1), (2, 1)]
    assert results[0][2] == results[1][2]
    assert sorted(results[0][2] + results[2][2]) == list(range(7))


def _made_too_early(rank, world_size):
    sampler = TokenBudgetSampler(LENGTHS, mini_batch_size=7, max_tokens_per_rank=20)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    try:
        list(sampler)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_sampler_made_before_the_process_group_is_refused_on_every_rank():
    for text in run_distributed(_made_too_early, 2, init_process_group=False):
        assert "without dp_size before the process group of 2 ranks" in text
        assert "pass dp_size and dp_rank" in text
