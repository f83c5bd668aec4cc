"""What validation reports of the rollouts of a prompt together: the majority's answer."""

import pytest
import torch
from hand_made import ScriptedPPO, prompts
from helpers import ToyTokenizer, make_trainer, tiny_llama

from lightning_rlbatch.data import RolloutDataModule
from lightning_rlbatch.functional.majority import majority_reward
from lightning_rlbatch.modules.rewards import call_answers
from lightning_rlbatch.strategies import RLBatchFSDPStrategy
from lightning_rlbatch.testing import run_distributed


def last_letter(completions):
    """Rollouts that end in a letter before 'x' vote for one of three answers."""
    return [ord(text[-1]) % 3 if text[-1] < "x" else None for text in completions]


def right(prompts, completions):
    return [float(ord(text[-1]) % 3 == 0) for text in completions]


@pytest.mark.parametrize(
    ("rewards", "answers", "expected"),
    [
        ([1, 0, 0, 1], ["a", "b", "c", "a"], 1.0),
        ([1, 0, 0, 1], ["a", "b", "b", "a"], 0.5),  # a tie is shared
        ([1, 0, 0, 0], ["a", None, None, None], 1.0),  # who has no answer does not vote
        ([1, 0, 0, 0], [None] * 4, 0.25),
        ([0.5, 1.0, 0.0, 0.2], ["a", "a", "b", "c"], 0.75),  # rewards that look at more than the answer
        ([None, None, 1, 0], ["b", "b", "a", "c"], 0.5),  # without a verdict a rollout is out of its group
    ],
)
def test_the_most_frequent_answer_of_a_group_is_rewarded(rewards, answers, expected):
    total, count = majority_reward(rewards, [7] * 4, answers)
    assert (total.item(), count.item()) == (pytest.approx(expected), 1)


def test_groups_are_found_by_their_ids_and_those_without_a_verdict_are_not_counted():
    rewards = torch.tensor([1.0, 0.0, float("nan"), 1.0, 0.0])
    total, count = majority_reward(rewards, torch.tensor([3, 1, 2, 3, 1]), "aabaa")
    assert (total.item(), count.item()) == (1.0, 2)
    with pytest.raises(ValueError, match="got 5, 5 and 4"):
        majority_reward(rewards, [0] * 5, "abcd")


def test_rollouts_vote_for_the_answers_that_a_function_finds_on_any_number_of_ranks():
    sizes = {"train_batch_size": 2, "mini_batch_size": 2, "max_prompt_length": 1, "max_response_length": 7, "max_tokens_per_rank": 12}

    def fn(rank, world_size, sp_size=1):
        found = []
        for options in ({"answer_function": last_letter}, {}):
            module = ScriptedPPO(tiny_llama, [right], **options)
            data = RolloutDataModule(
                lambda: prompts("gf"), ToyTokenizer(), val_prompts=lambda: prompts("bcdea"), val_rollouts_per_prompt=3, seed=1, **sizes
            )
            trainer = make_trainer(world_size, RLBatchFSDPStrategy(sp_size), limit_val_batches=1.0)
            trainer.validate(module, datamodule=data, verbose=False)
            found.append(float(trainer.callback_metrics["val/reward/majority_of_3"]))
        (rows,) = trainer.predict(module, datamodule=data)
        texts = [row["completions"] for row in rows]
        return found, texts

    (alone, texts) = run_distributed(fn, 1, init_process_group=False)[0]
    for found, answers in zip(alone, (last_letter, lambda group: group)):
        votes = [answer for group in texts for answer in answers(group)]
        total, count = majority_reward([reward for group in texts for reward in right(None, group)], [i // 3 for i in range(15)], votes)
        assert found == pytest.approx(total.item() / count.item())
    assert alone[0] != alone[1]
    for world_size, sp_size in ((2, 1), (2, 2)):
        for others, _ in run_distributed(fn, world_size, sp_size, init_process_group=False):
            assert others == pytest.approx(alone)


def test_answers_are_compared_as_texts_and_conversations_by_their_last_message():
    told = {"prompts": ["p"] * 2, "completion_ids": [[1], [2]], "columns": {"column": [5, 6]}}
    assert call_answers(None, completions=[" 42\n", "7"], **told) == ["42", "7"]
    messages = [[{"role": "assistant", "content": "x"}, {"role": "assistant", "content": "1"}], [{"role": "assistant", "content": "2 "}]]
    assert call_answers(None, completions=messages, **told) == ["1", "2"]
    assert call_answers(lambda column, completion_ids: [column[0], None], completions=["", ""], **told) == ["5", None]
    with pytest.raises(ValueError, match="returned 1 answers for 2 completions"):
        call_answers(lambda completions: ["x"], completions=["", ""], **told)
    with pytest.raises(TypeError, match="answer_function takes gold, but the prompts' rows have no such column"):
        call_answers(lambda gold: gold, completions=["", ""], **told)
