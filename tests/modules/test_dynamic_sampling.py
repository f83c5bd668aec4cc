"""Prompts whose rollouts are all rewarded alike are replaced by others and sampled again, by the same rule on every number of ranks."""

import pytest
from hand_made import ScriptedPPO, prompts
from helpers import StepRecorder, ToyTokenizer, make_trainer, tiny_llama

from lightning_rlbatch.data import RolloutDataModule
from lightning_rlbatch.testing import run_distributed

SIZES = {"train_batch_size": 4, "mini_batch_size": 4, "max_prompt_length": 1, "max_response_length": 7, "max_tokens_per_rank": 8}


def too_easy_or_not(prompts, completion_ids):
    """The prompts 'a' and 'b' always succeed; the others tell their rollouts apart."""
    return [1.0 if prompt in "ab" else float(sum(ids)) for prompt, ids in zip(prompts, completion_ids)]


def always_right(prompts, completions):
    return [1.0] * len(completions)


class Watching(ScriptedPPO):
    def collect_rollouts(self, *args):
        store = super().collect_rollouts(*args)
        self.collected = {}
        for group, reward in zip(store.table.group_ids.tolist(), store.table.rewards.tolist()):
            self.collected.setdefault(group, []).append(reward)
        return store


def run(rank, world_size, reward, rounds, rollouts_per_prompt=3):
    module, recorder = Watching(tiny_llama, [reward], max_sampling_rounds=rounds), StepRecorder()
    data = RolloutDataModule(lambda: prompts("abcd"), ToyTokenizer(), rollouts_per_prompt=rollouts_per_prompt, **SIZES)
    make_trainer(world_size, max_epochs=1, callbacks=[recorder]).fit(module, datamodule=data)
    metrics = {name: value for name, value in recorder.metrics[0].items() if name.startswith("reward/")}
    return module.collected, metrics


@pytest.fixture(scope="module")
def results():
    cases = {"once": (too_easy_or_not, 1), "useful": (too_easy_or_not, 9), "right": (always_right, 3)}

    def fn(rank, world_size):
        return {name: run(rank, world_size, *case) for name, case in cases.items()}

    return {size: run_distributed(fn, size, init_process_group=False) for size in (1, 2)}


def test_one_round_keeps_what_came(results):
    rewards, metrics = results[1][0]["once"]
    assert metrics["reward/resampled_groups"] == 0
    assert metrics["reward/zero_variance_all_right"] == 0.5
    assert sum(set(group) == {1.0} for group in rewards.values()) == 2


def test_groups_without_variance_are_replaced_and_those_with_it_are_kept(results):
    first, _ = results[1][0]["once"]
    rewards, metrics = results[1][0]["useful"]
    assert metrics["reward/zero_variance_all_right"] == metrics["reward/zero_variance_all_wrong"] == 0
    assert metrics["reward/resampled_groups"] >= 2
    kept = {group: found for group, found in first.items() if set(found) != {1.0}}
    assert len(kept) == 2
    assert kept.items() <= rewards.items()
    assert all(len(set(found)) > 1 for found in rewards.values())


def test_after_the_last_round_what_is_left_is_kept(results):
    _, metrics = results[1][0]["right"]
    assert metrics["reward/resampled_groups"] == 2 * 4  # two more rounds of four prompts
    assert metrics["reward/zero_variance_all_right"] == 1


@pytest.mark.parametrize("name", ["once", "useful", "right"])
def test_two_ranks_sample_what_one_does(name, results):
    expected, metrics = results[1][0][name]
    for rank in results[2]:
        assert rank[name][0] == expected
        assert rank[name][1] == pytest.approx(metrics)


def test_one_rollout_per_prompt_has_nothing_to_compare_and_is_refused():
    with pytest.raises(AssertionError, match="looks for prompts whose rollouts are all rewarded alike, but rollouts_per_prompt is 1"):
        run_distributed(run, 1, always_right, 2, 1, init_process_group=False)
