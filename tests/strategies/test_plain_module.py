"""The strategy under a LightningModule that knows nothing of this package: automatic optimization, Lightning's own options."""

import warnings

import lightning.pytorch as pl
import torch
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_rlbatch.strategies import RLBatchFSDPStrategy
from lightning_rlbatch.testing import run_distributed
from tests.helpers import make_trainer, whole_parameters


class Regression(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = None

    def configure_model(self):
        if self.net is None:
            torch.manual_seed(0)
            self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()

    def training_step(self, batch, batch_idx):
        loss = 10 * self.net(batch).pow(2).sum()
        self.log("train/loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/mean", self.net(batch).mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def test_clipping_accumulation_validation_and_resume_equal_ddp(tmp_path):
    # fp64: the norm that clips is a sum over shards here and over whole gradients there, equal but for its rounding
    data = torch.randn(32, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def loader():
        return DataLoader(data, batch_size=4)

    def main(rank, size):
        warnings.filterwarnings("ignore", message=".*does not have many workers")
        warnings.filterwarnings("ignore", message="The 'val_dataloader'|The 'train_dataloader'|It is recommended to use")
        results = []
        for name, strategy in (("ddp", "ddp"), ("file", RLBatchFSDPStrategy()), ("folder", True)):
            strategy = RLBatchFSDPStrategy(save_distributed_checkpoint=True, async_save=True) if strategy is True else strategy
            options = {"gradient_clip_val": 1.0, "accumulate_grad_batches": 2, "limit_val_batches": 1.0, "num_sanity_val_steps": 0}
            path = str(tmp_path / f"{name}.ckpt")
            trainer, module = make_trainer(size, strategy, max_epochs=1, **options), Regression()
            trainer.fit(module, loader(), loader())
            moments = [value for state in trainer.optimizers[0].state.values() for value in state.values() if value.dim()]
            assert all(isinstance(value, DTensor) for value in moments) == (name != "ddp")
            trainer.save_checkpoint(path)
            again, module = (
                make_trainer(size, trainer.strategy.__class__() if name != "ddp" else "ddp", max_epochs=3, **options),
                Regression(),
            )
            again.fit(module, loader(), loader(), ckpt_path=path)
            results.append((again.global_step, float(again.callback_metrics["val/mean"]), whole_parameters(module)))
        return results

    for (step, metric, expected), *others in run_distributed(main, 2, init_process_group=False):
        for other_step, other_metric, parameters in others:
            assert other_step == step == 6
            assert abs(other_metric - metric) < 1e-6  # callback_metrics are fp32
            assert parameters.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(parameters[name], value, rtol=0, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")
