"""Data modules that are used before a Trainer has set them up say what is missing."""

import pytest

from lightning_rlbatch.data import ReplayDataModule, RolloutDataModule, SFTDataModule


def rollouts():
    return RolloutDataModule([], object(), train_batch_size=2, mini_batch_size=1, micro_batch_size=1)


def test_loaders_need_a_trainer(tmp_path):
    sft = SFTDataModule([{"input_ids": [1, 2], "response_mask": [0, 1]}], mini_batch_size=1, micro_batch_size=1)
    sft.setup("fit")
    with pytest.raises(RuntimeError, match=r"SFTDataModule has no Trainer yet\. Pass it to one: trainer\.fit"):
        sft.train_dataloader()
    with pytest.raises(RuntimeError, match="ReplayDataModule has no Trainer yet"):
        ReplayDataModule(str(tmp_path), mini_batch_size=1, micro_batch_size=1).setup("fit")
    with pytest.raises(TypeError, match=r"got no Trainer yet: call trainer\.fit"):
        rollouts().train_dataloader()


def test_prompts_are_not_there_before_setup():
    for ask in (lambda: rollouts().iteration_prompts(0), lambda: rollouts().predict_dataloader()):
        with pytest.raises(RuntimeError, match=r"The prompts are read in setup\(\), which the Trainer calls"):
            ask()
