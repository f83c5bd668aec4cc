"""Recorded rollouts train as they did when they were recorded."""

import pytest
import torch
from replaying import Letters, assert_same, fit, policy, record, replay, replay_data

from lightning_rlbatch.data.recording import gather_recorded_table
from lightning_rlbatch.distributed.mesh import single_process_meshes
from lightning_rlbatch.functional import GAE
from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.testing import run_distributed


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rollouts")
    return folder, record(folder)


@pytest.mark.parametrize(
    ("world_size", "options"),
    [(2, {}), (1, {}), (2, {"max_tokens_per_rank": 14}), (1, {"max_tokens_per_rank": None, "micro_batch_size": 3})],
    ids=["same", "1 rank", "other budget", "static"],
)
def test_replaying_a_run_gives_its_losses_on_other_ranks_and_budgets_too(recording, world_size, options):
    folder, steps = recording
    assert len(steps) == 8
    assert all(step[0] != 0 and step[3] == 0 for step in steps)
    assert_same(replay(folder, world_size, options), steps)


def test_replaying_with_sequence_parallelism_gives_the_recorded_losses(recording):
    folder, steps = recording
    assert_same(replay(folder, 2, sequence_parallel_size=2), steps)


def test_recomputed_log_probs_and_advantages_give_the_recorded_losses(recording):
    folder, steps = recording
    assert_same(replay(folder, 2, {"rescore": True}), steps)


def test_another_seed_is_another_run(recording):
    folder, steps = recording
    others = replay(folder, 1, {"seed": 4})
    assert not torch.allclose(torch.tensor(others), torch.tensor(steps), rtol=1e-4)


def test_after_the_last_recorded_iteration_the_first_comes_again_in_another_order(recording):
    folder, steps = recording
    more = replay(folder, 1, iterations=3)
    assert_same(more[:8], steps)
    assert len(more) == 12
    tokens = [[step[1] for step in part] for part in (more[:4], more[8:])]
    assert sum(tokens[0]) == sum(tokens[1])
    assert tokens[0] != tokens[1]


def test_a_trainer_that_limits_its_batches_goes_on_with_the_next_iteration(recording):
    folder, steps = recording
    limited = replay(folder, 1, trainer_options={"limit_train_batches": 3})
    assert len(limited) == 6
    assert_same(limited[:3], steps[:3])
    assert [step[1] for step in limited[3:]] == [step[1] for step in steps[4:7]]


def test_a_resumed_replay_equals_the_uninterrupted_one_between_epochs_and_inside_of_one(recording, tmp_path):
    folder, _ = recording

    def run(rank, world_size):
        whole = fit(replay_data(folder), iterations=2, world_size=world_size)
        path, resumed = str(tmp_path / "after_a_step.ckpt"), {}
        for step in (2, 3):
            fit(replay_data(folder), iterations=1, save=(step, path), world_size=world_size)
            resumed[step] = fit(replay_data(folder), iterations=2, resume=path, world_size=world_size)
        return whole, resumed

    whole, resumed = run_distributed(run, 2, init_process_group=False)[0]
    for step, steps in resumed.items():
        assert_same(steps, whole[step:], tolerance=0)


def test_a_critic_is_replayed_from_recorded_values(tmp_path):
    options = {"critic": policy, "advantage": GAE()}
    steps = record(tmp_path, 1, **options)
    assert_same(replay(tmp_path, 2, **options), steps)


def test_what_was_not_recorded_is_an_error_that_says_to_rescore(recording):
    folder, _ = recording
    with pytest.raises(AssertionError, match=r"2 of 2 ranks failed(.|\n)*needs ref_log_probs but iteration 0 .*rescore=True"):
        replay(folder, 2, kl_coefficient=0.1)


def test_a_folder_that_only_one_rank_cannot_read_ends_all_ranks(recording, tmp_path):
    folder, _ = recording

    def run(rank, world_size):
        fit(replay_data(folder if rank == 0 else tmp_path), world_size=world_size)

    with pytest.raises(AssertionError, match=r"Rank 1 failed in phase 'opening recorded rollouts'") as error:
        run_distributed(run, 2, init_process_group=False)
    assert "No recorded rollouts in" in str(error.value)


def test_ranks_that_see_different_recordings_are_told_so(recording, tmp_path):
    folder, _ = recording
    (tmp_path / "iteration_000000").symlink_to(folder / "iteration_000000")

    def run(rank, world_size):
        fit(replay_data(folder if rank == 0 else tmp_path), world_size=world_size)

    with pytest.raises(AssertionError, match="the length of `iterations` is 2 on rank 0 and 1 on rank 1"):
        run_distributed(run, 2, init_process_group=False)


def test_options_without_effect_or_out_of_range_are_errors():
    with pytest.raises(ValueError, match="mini_batch_size to be at least 1 but got 0"):
        replay_data("x", mini_batch_size=0)
    with pytest.raises(ValueError, match="ppo_epochs to be at least 1 but got 0"):
        replay_data("x", ppo_epochs=0)
    with pytest.raises(ValueError, match="rescore=False is impossible"):
        replay_data("x", tokenizer=Letters, rescore=False)
    with pytest.raises(ValueError, match="effect on text dumps only"):
        replay_data("x", reward_columns=["length"])
    with pytest.raises(ValueError, match="exactly one of max_tokens_per_rank and micro_batch_size"):
        replay_data("x", micro_batch_size=1)


def test_a_mini_batch_larger_than_the_recorded_iteration_is_an_error(recording):
    folder, _ = recording
    with pytest.raises(
        AssertionError, match=r"2 of 2 ranks failed(.|\n)*mini_batch_size=5 prompts per optimizer step exceed the 4 prompts"
    ):
        replay(folder, 2, {"mini_batch_size": 5})


def test_ids_that_occur_twice_are_an_error():
    samples = PackedBatch.from_samples([{"input_ids": [1, 2], "response_mask": [0, 1], "reward": 1.0, "sample_id": 3}] * 2)
    with pytest.raises(ValueError, match="different ids from 0 to 7"):
        gather_recorded_table(samples, 2, 4, single_process_meshes())
