"""Hooks of a subclass that does not call ``super()``, as Lightning's own examples do not, take nothing of ours away."""

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_rlbatch.functional import GRPO
from lightning_rlbatch.modules import PPOModule
from lightning_rlbatch.testing import run_distributed
from tests.helpers import length_reward, make_trainer, sgd, tiny_llama, whole_parameters
from tests.strategies.runs import prompt_rows, rollouts


class Mine(Callback):
    pass


class Forgetful(PPOModule):
    """Overrides what it can, and calls nothing."""

    def __init__(self):
        super().__init__(tiny_llama, [length_reward], advantage=GRPO(), optimizer=sgd, max_grad_norm=1e-2)
        self.called, self.synced = [], []

    def build_models(self):
        super().build_models()
        take = self.rollout_engine.update_weights

        def update_weights(weights):
            self.synced_at = self.global_step
            take(weights)

        self.rollout_engine.update_weights = update_weights

    def configure_callbacks(self):
        return Mine()

    def on_train_start(self):
        self.called.append("on_train_start")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.global_step == 3 and self.global_rank == 1:
            self.trainer.should_stop = True

    def on_train_epoch_end(self):
        self.called.append("on_train_epoch_end")

    def on_before_optimizer_step(self, optimizer):
        self.norm_before = torch.stack([p.grad.full_tensor().norm() for p in self.parameters() if p.grad is not None]).norm()

    def on_validation_epoch_start(self):
        self.called.append("on_validation_epoch_start")

    def on_validation_end(self):
        self.synced.append(self.synced_at)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["mine"] = 1


class Careful(Forgetful):
    """Calls one of them, which is not run twice."""

    def on_train_epoch_end(self):
        super().on_train_epoch_end()


@pytest.mark.parametrize("kind", [Forgetful, Careful])
def test_gradients_are_clipped_ranks_stop_together_and_validation_has_the_new_weights(kind, tmp_path):
    def main(rank, size):
        module, data = kind(), rollouts(val_prompts=prompt_rows)
        trainer = make_trainer(size, max_epochs=5, limit_val_batches=1.0, num_sanity_val_steps=0)
        before = whole_parameters(tiny_llama())
        trainer.fit(module, data)
        trainer.save_checkpoint(tmp_path / "end.ckpt")
        after = whole_parameters(module)
        moved = torch.stack([(after[f"policy.model.{name}"] - value).norm() for name, value in before.items()]).norm()
        kinds = {type(callback).__name__ for callback in trainer.callbacks}
        return trainer.global_step, float(moved), float(module.norm_before), kinds, module.called, module.synced

    for step, moved, norm, kinds, called, synced in run_distributed(main, 2, init_process_group=False):
        assert step == 3  # rank 1 alone wanted to
        assert norm > 1e-2
        assert 0 < moved <= 3 * 1e-2 + 1e-5
        assert {"Mine", "PlateauSteps"} <= kinds
        assert called == ["on_train_start", *(2 * ["on_validation_epoch_start", "on_train_epoch_end"])]
        assert synced == [2, 3]  # of the validations: engines get the weights of these steps
    stored = torch.load(tmp_path / "end.ckpt", weights_only=True)
    assert stored["mine"] == 1
    assert any("kl_reward_coefficient" in value for value in stored.values() if isinstance(value, dict))
