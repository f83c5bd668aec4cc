import random

import pytest

from lightning_rlbatch.functional.sizes import Share, iteration_sizes, share_sizes

EXAMPLE = {
    "world_size": 16,
    "train_batch_size": 128,
    "rollouts_per_prompt": 8,
    "mini_batch_size": 32,
    "ppo_epochs": 3,
    "micro_batch_size": 4,
    "sequence_parallel_size": 2,
    "rollout_tensor_parallel_size": 4,
}


def test_the_documented_example_gives_the_documented_numbers():
    sizes = iteration_sizes(**EXAMPLE)
    assert sizes.dp_size == 8
    assert sizes.num_rollouts == 1024
    assert sizes.rollouts_per_worker == Share(64, 64)
    assert sizes.rollouts_per_tp_group == Share(256, 256)
    assert sizes.rollouts_per_dp_rank == Share(128, 128)
    assert sizes.num_mini_batches == 4
    assert sizes.prompts_per_mini_batch == Share(32, 32)
    assert sizes.rollouts_per_mini_batch == Share(256, 256)
    assert sizes.rollouts_per_mini_batch_and_dp_rank == Share(32, 32)
    assert sizes.num_micro_steps == Share(8, 8)
    assert sizes.num_optimizer_steps == 12
    assert sizes.max_tokens_per_micro_batch is None


def test_sizes_that_do_not_divide_are_distributed_with_nothing_lost():
    """Compare with sharing out the rollouts one by one."""
    for seed in range(200):
        chance = random.Random(seed)
        sp, tp = chance.choice([1, 2, 4]), chance.choice([1, 2, 4])
        world = 4 * chance.randint(1, 3)
        prompts, per_prompt = chance.randint(1, 20), chance.randint(1, 5)
        mini, micro, epochs = chance.randint(1, prompts), chance.randint(1, 6), chance.randint(1, 3)
        sizes = iteration_sizes(
            world_size=world,
            train_batch_size=prompts,
            rollouts_per_prompt=per_prompt,
            mini_batch_size=mini,
            ppo_epochs=epochs,
            micro_batch_size=micro,
            sequence_parallel_size=sp,
            rollout_tensor_parallel_size=tp,
        )

        def deal(total, parts):
            return [len(range(part, total, parts)) for part in range(parts)]

        workers = deal(prompts * per_prompt, world)
        groups = [sum(workers[start : start + tp]) for start in range(0, world, tp)]
        mini_batches = [len(list(range(prompts))[start : start + mini]) for start in range(0, prompts, mini)]
        per_rank = [share for count in mini_batches for share in deal(count * per_prompt, world // sp)]
        steps = [-(-max(deal(count * per_prompt, world // sp)) // micro) for count in mini_batches]
        assert sizes.rollouts_per_worker == (min(workers), max(workers))
        assert sizes.rollouts_per_tp_group == (min(groups), max(groups))
        assert sizes.prompts_per_mini_batch == (min(mini_batches), max(mini_batches))
        assert sizes.rollouts_per_mini_batch_and_dp_rank == (min(per_rank), max(per_rank))
        assert sizes.num_micro_steps == (min(steps), max(steps))
        assert sizes.num_optimizer_steps == len(mini_batches) * epochs


def test_a_token_budget_leaves_the_number_of_micro_steps_open():
    sizes = iteration_sizes(**{**EXAMPLE, "micro_batch_size": None, "max_tokens_per_rank": 4096})
    assert sizes.num_micro_steps is None
    assert sizes.max_tokens_per_micro_batch == 8192
    assert "num micro steps                      depends on the lengths" in str(sizes)
    assert "rollouts per mini batch and dp rank  32" in str(sizes)


@pytest.mark.parametrize(
    ("change", "kind", "pieces"),
    [
        ({"sequence_parallel_size": 3}, ValueError, ["`sequence_parallel_size`=3", "16"]),
        ({"rollout_tensor_parallel_size": 32}, ValueError, ["`rollout_tensor_parallel_size`=32", "16"]),
        ({"mini_batch_size": 129}, ValueError, ["129", "`mini_batch_size`", "128", "`train_batch_size`"]),
        ({"max_tokens_per_rank": 64}, ValueError, ["exactly one", "micro_batch_size=4", "max_tokens_per_rank=64"]),
        ({"micro_batch_size": None}, ValueError, ["exactly one", "neither"]),
        ({"micro_batch_size": 0}, ValueError, ["`micro_batch_size`", "at least 1", "0"]),
        ({"rollouts_per_prompt": -2}, ValueError, ["`rollouts_per_prompt`", "-2"]),
        ({"train_batch_size": 12.5}, TypeError, ["`train_batch_size`", "12.5"]),
        ({"world_size": True}, TypeError, ["`world_size`", "True"]),
    ],
)
def test_sizes_that_cannot_be_are_refused_by_name_and_number(change, kind, pieces):
    with pytest.raises(kind) as caught:
        iteration_sizes(**{**EXAMPLE, **change})
    assert all(piece in str(caught.value) for piece in pieces)


def test_shares_sum_to_the_total_and_differ_by_at_most_one():
    for total in range(12):
        for parts in range(1, 6):
            shares = share_sizes(total, parts)
            assert sum(shares) == total
            assert max(shares) - min(shares) <= 1
    with pytest.raises(ValueError, match="num_parts=0"):
        share_sizes(3, 0)
