"""A run with Lightning's TensorBoard logger writes metrics, tables, histograms and pictures that TensorBoard can read."""

import struct
import warnings

import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboardX.proto import event_pb2

from lightning_rlbatch.callbacks import BalanceMonitor, RolloutLogger
from lightning_rlbatch.testing import run_distributed
from tests.helpers import make_trainer
from tests.strategies.runs import ppo, rollouts


def events(folder):
    """Return (tag, step, value) of everything in the event files of a folder, as TensorBoard reads them: records of length, sum, bytes."""
    found = []
    for path in sorted(folder.rglob("events.out.tfevents*")):
        content, place = path.read_bytes(), 0
        while place < len(content):
            (length,) = struct.unpack_from("<Q", content, place)
            event = event_pb2.Event.FromString(content[place + 12 : place + 12 + length])
            found += [(value.tag, event.step, value) for value in event.summary.value]
            place += 12 + length + 4
    return found


def test_tensorboard_has_metrics_by_optimizer_step_and_what_callbacks_show(tmp_path, capsys):
    def main(rank, size):
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="google|tensorboardX")
        callbacks = [RolloutLogger(max_rows=2), BalanceMonitor(str(tmp_path / "plans"), every_n_steps=2)]
        trainer = make_trainer(size, max_epochs=2, logger=TensorBoardLogger(str(tmp_path), name="run"), callbacks=callbacks)
        trainer.fit(ppo(), datamodule=rollouts())
        return float(trainer.logged_metrics["train/loss"])

    last_loss, _ = run_distributed(main, 2, init_process_group=False)
    found = events(tmp_path / "run")
    losses = [(step, value.simple_value) for tag, step, value in found if tag == "train/loss"]
    assert [step for step, _ in losses] == [0, 1, 2, 3]
    assert losses[-1][1] == pytest.approx(last_loss, rel=1e-6)
    tags = {tag for tag, _, _ in found}
    assert {"reward/mean", "balance/plan/efficiency", "balance/speedup", "rollouts/length_max"} <= tags
    assert [step for tag, step, value in found if tag == "rollouts/length" and value.HasField("histo")] == [0, 2]
    assert [step for tag, step, _ in found if tag.startswith("rollouts/text")] == [0, 2]
    pictures = [(step, value.image) for tag, step, value in found if tag == "balance/plan"]
    assert [step for step, _ in pictures] == [0, 2]
    assert all(picture.encoded_image_string.startswith(b"\x89PNG") and picture.width > 100 for _, picture in pictures)
