"""A user's own LightningCLI, with nothing of ours in it, runs what `rlbatch` runs: class paths, alias, overrides, saved files."""

import contextlib
import io
import json
import sys
import warnings

import pytest
import torch
import yaml
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger

from lightning_rlbatch.cli import RLBatchCLI, export
from lightning_rlbatch.data import RolloutDataModule
from lightning_rlbatch.modules import PPOModule
from lightning_rlbatch.strategies import RLBatchFSDPStrategy
from lightning_rlbatch.testing import run_distributed
from tests.e2e.small_run import config, losses


class OwnModule(PPOModule):
    """What users do: an own class with an own argument."""

    def __init__(self, own: int = 3, **kwargs):
        super().__init__(**kwargs)
        self.own = own


def plain_cli(*arguments, typed=False, run=True):
    """Run LightningCLI as a user's script does; return it."""
    kinds = {
        "model_class": LightningModule,
        "datamodule_class": LightningDataModule,
        "subclass_mode_model": True,
        "subclass_mode_data": True,
    }
    if typed:
        kinds = {"model_class": OwnModule, "datamodule_class": RolloutDataModule}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # jsonargparse about Lightning's command line
        warnings.filterwarnings("ignore", message="LightningCLI's args parameter is intended")
        return LightningCLI(**kinds, save_config_kwargs={"overwrite": True}, args=[str(argument) for argument in arguments], run=run)


def rewritten(path, change):
    content = yaml.safe_load(path.read_text())
    change(content)
    path.write_text(yaml.safe_dump(content))
    return path


def in_folder(folder, name):
    (folder / name).mkdir()
    return folder / name


def test_all_forms_of_the_configuration_train_alike(tmp_path):
    folders = {name: in_folder(tmp_path, name) for name in ("class_path", "override", "typed", "saved")}
    paths = {name: config(folder, default_root_dir=str(folder), max_epochs=1) for name, folder in folders.items()}
    rewritten(paths["class_path"], lambda content: content["trainer"]["strategy"].pop("init_args"))
    rewritten(paths["override"], lambda content: content["trainer"].pop("strategy"))

    def typed(content):
        content["trainer"]["strategy"] = "rlbatch_fsdp"
        content["model"], content["data"] = content["model"]["init_args"], content["data"]["init_args"]

    rewritten(paths["typed"], typed)

    def main(rank, size):
        class_path = plain_cli("fit", "--config", paths["class_path"])
        assert isinstance(class_path.trainer.strategy, RLBatchFSDPStrategy)
        override = plain_cli(
            "fit",
            f"--config={paths['override']}",
            "--trainer.strategy=lightning_rlbatch.RLBatchFSDPStrategy",
            "--trainer.strategy.grad_sync=every",
            "--model.init_args.max_grad_norm=1.0",
            "--data.seed=0",
            '--model.policy={"class_path": "tests.helpers.tiny_llama", "init_args": {"seed": 0}}',  # a model, made already
        )
        assert override.trainer.strategy.grad_sync == "every"
        own = plain_cli("fit", "--config", paths["typed"], "--model.own=4", typed=True)
        assert own.model.own == 4
        # What LightningCLI saved beside the first run, as it is, but for where it writes.
        saved = (folders["class_path"] / "run" / "config.yaml").read_text().replace(str(folders["class_path"]), str(folders["saved"]))
        paths["saved"].write_text(saved)
        plain_cli("fit", "--config", paths["saved"])

    run_distributed(main, 2, init_process_group=False)
    expected = losses(folders["class_path"])
    assert len(expected) == 2
    for name in folders:
        assert losses(folders[name]) == pytest.approx(expected, abs=1e-6), name
    for name in ("class_path", "override"):  # the second one's policy is a class_path with arguments
        assert export.main([str(folders[name] / "checkpoints" / "last.ckpt"), str(folders[name] / "policy")]) == 0


def test_a_checkpoint_of_the_command_line_loads_without_it(tmp_path):
    path = config(tmp_path, devices=1, strategy="auto", max_epochs=1, default_root_dir=str(tmp_path))

    def main(rank, size):
        trained = plain_cli("fit", "--config", path).model
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            loaded = PPOModule.load_from_checkpoint(tmp_path / "checkpoints" / "last.ckpt", map_location="cpu")
            changed = PPOModule.load_from_checkpoint(tmp_path / "checkpoints" / "last.ckpt", map_location="cpu", entropy_coefficient=0.5)
        weights = dict(trained.named_parameters())
        assert all(torch.equal(value, weights[name]) for name, value in loaded.named_parameters())
        optimizer = loaded.configure_optimizers()
        found = loaded.reward_names, optimizer.param_groups[0]["lr"], type(optimizer).__name__, changed.entropy_coefficient
        return found, resumed(path, tmp_path / "checkpoints" / "last.ckpt")

    ((found, (limit, steps, printed, logger)),) = run_distributed(main, 1, init_process_group=False)
    assert found == (["length_reward"], 0.01, "AdamW", 0.5)
    assert (limit, steps) == (5.0, 4)
    *_, written, predicted = printed.splitlines()
    folder = tmp_path / "told" / "lightning_logs" / "version_0"
    assert predicted == f"Written: 7 predictions in {folder}/predictions.jsonl"
    row = json.loads((folder / "predictions.jsonl").read_text().splitlines()[0])
    assert row.keys() >= {"prompt", "completions"}
    assert (folder / "config_predict.yaml").is_file()
    assert logger is CSVLogger  # without one in the configuration: `rlbatch report` reads it
    assert written == f"Written: checkpoints in {tmp_path}/checkpoints; plots: rlbatch report {tmp_path}/run/resumed"


def resumed(path, checkpoint):
    """Go on with another option of the module; return it, the steps, and what was printed."""
    sys.argv = ["rlbatch"]
    printed = io.StringIO()
    changes = ["--model.max_grad_norm=5", "--trainer.max_epochs=2", "--trainer.logger.version=resumed"]
    with warnings.catch_warnings(), contextlib.redirect_stdout(printed):
        warnings.simplefilter("ignore", DeprecationWarning)
        cli = RLBatchCLI(args=["fit", "--config", str(path), "--ckpt_path", str(checkpoint), *changes])
        alone = ["--trainer.logger=null", f"--trainer.default_root_dir={path.parent / 'told'}"]
        told = RLBatchCLI(args=["predict", "--config", str(path), "--ckpt_path", str(checkpoint), *alone])
    return cli.model.max_grad_norm, cli.trainer.global_step, printed.getvalue(), type(told.trainer.logger)


def test_a_misspelt_option_is_refused_by_its_name(tmp_path, capfd):
    path = config(tmp_path)
    for wrong in ("--model.init_args.max_grad_nrom=1", "--trainer.strategy.init_args.sequence_paralel_size=2"):
        with pytest.raises(SystemExit):
            plain_cli("fit", "--config", path, wrong, run=True)
        assert wrong.partition("=")[0].rpartition(".")[2] in capfd.readouterr().err


def test_the_strategy_explains_itself(capsys):
    with pytest.raises(SystemExit) as stop:
        plain_cli("fit", "--trainer.strategy.help=lightning_rlbatch.RLBatchFSDPStrategy")
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert "sequence_parallel_size" in printed
    assert "Ranks that share one packed micro-batch" in printed
    assert "--trainer.strategy.async_save" in printed
