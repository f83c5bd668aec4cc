"""Save the configuration of a run beside its logs, and never over a file that the run was started with."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override


class SaveRunConfig(SaveConfigCallback):
    """Writes ``config.yaml`` of ``fit``, ``config_validate.yaml`` of ``validate`` and so on, in place of those of an earlier run.

    LightningCLI refuses to write where a file is. A second run into the same folder is normal use, and a refusal of rank 0 alone would
    leave the others waiting. Without a logger the folder may be the one in which the user's own ``config.yaml`` lies: that one stays.

    Args:
        *args: As for ``SaveConfigCallback``.
        **kwargs: As for ``SaveConfigCallback``.
    """

    @override
    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        if stage != "fit":
            self.config_filename = f"config_{TrainerFn(stage).value}.yaml"
        log_dir = trainer.log_dir  # on every rank: it is told by rank 0
        target = None if log_dir is None else (Path(log_dir) / self.config_filename).resolve()
        if target in self._given_files():
            rank_zero_warn(f"The whole configuration is not saved: {target} is the file that this run was started with.")
            self.already_saved = True
        super().setup(trainer, pl_module, stage)

    def _given_files(self) -> list[Path]:
        config: Any = self.config
        return [Path(getattr(path, "absolute", path)).resolve() for path in config.get("config") or [] if path is not None]
