"""What an engine of the user's own returns is taken as it is meant, or refused in words that name the engine and the request."""

import dataclasses

import numpy as np
import pytest
import torch
from hand_made import prompts
from helpers import EOS, ToyTokenizer, length_reward, make_trainer, tiny_llama

from lightning_rlbatch.data import RolloutDataModule
from lightning_rlbatch.modules import PPOModule
from lightning_rlbatch.rollout import Completion, EngineConfig
from lightning_rlbatch.rollout.engine_output import checked_completions
from lightning_rlbatch.testing import run_distributed

GOOD = Completion([5, EOS], [-1.0, -0.5], "stop")


class Mine:
    """Returns the same for every request."""

    def __init__(self, completion=GOOD):
        self.completion = completion

    def generate(self, requests, sampling, on_progress=None):
        return (self.completion for _ in requests)

    def update_weights(self, weights):
        for _ in weights:
            pass

    def sleep(self):
        pass

    def wake(self):
        pass


@pytest.mark.parametrize("make", [torch.tensor, np.array, tuple])
def test_tensors_arrays_and_tuples_are_as_good_as_lists(make):
    returned = (Completion(make(GOOD.token_ids), make(GOOD.log_probs), "stop") for _ in range(2))
    taken = checked_completions(Mine(), returned, 2)
    assert taken == [GOOD, GOOD]
    assert {type(number) for number in taken[0].token_ids + taken[0].log_probs} == {int, float}


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        (None, TypeError, "Mine.generate must return a list of Completion, one per request, but returned None"),
        ([GOOD], RuntimeError, "Mine returned 1 completions for 2 requests"),
        ([GOOD, {"token_ids": [3]}], TypeError, "Mine returned .* for request 1 but must return a Completion"),
        (
            [GOOD, Completion([3.5, 2], [-1.0, -1.0], "stop")],
            ValueError,
            r"for request 1 to be integers but got \[3.5, 2\]",
        ),
        ([GOOD, Completion(torch.ones(2), [-1.0, -1.0], "stop")], ValueError, "token_ids of Mine for request 1 to be integers"),
        ([Completion([3, 2], [-1.0], "stop"), GOOD], ValueError, r"as many log_probs .* for request 0 but got \[-1.0\] for 2 tokens"),
        ([GOOD, Completion([3, 2], None, "stop")], ValueError, "but got None for 2 tokens. Return NaN"),
        ([GOOD, Completion([3], [-1.0], "eos")], ValueError, "finish_reason .* to be 'stop' or 'length' but got 'eos'"),
    ],
)
def test_wrong_completions_are_refused_with_the_engine_and_the_request(returned, error, message):
    with pytest.raises(error, match=message):
        checked_completions(Mine(), returned, 2)


@dataclasses.dataclass(frozen=True)
class MineConfig(EngineConfig):
    completion: Completion

    def build(self, model, context):
        return Mine(self.completion)


def test_tokens_outside_the_vocabulary_are_named_before_a_model_sees_them():
    def fn(rank, world_size):
        errors = []
        for completion, prompt in ((Completion([5, 50], [-1.0, -1.0], "stop"), "c"), (Completion([-1], [-1.0], "stop"), "c"), (GOOD, "A")):
            module = PPOModule(tiny_llama, [length_reward], rollout_engine=MineConfig(completion))
            sizes = {
                "train_batch_size": 1,
                "mini_batch_size": 1,
                "rollouts_per_prompt": 2,
                "max_prompt_length": 4,
                "max_response_length": 4,
            }
            data = RolloutDataModule(lambda letter=prompt: prompts(letter), ToyTokenizer(), max_tokens_per_rank=16, **sizes)
            with pytest.raises(ValueError, match="vocabulary") as raised:
                make_trainer(world_size, "auto", max_steps=1).fit(module, datamodule=data)
            errors.append(str(raised.value))
        return errors

    ((too_large, negative, prompt),) = run_distributed(fn, 1, init_process_group=False)
    assert "A response to 'c' holds token 50 but the policy's vocabulary is 0 to 49" in too_large
    assert "A response to 'c' holds token -1" in negative
    assert "The prompt 'A' holds token -29" in prompt
