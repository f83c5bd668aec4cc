"""LightningCLI with this package's strategy and classes at hand."""

import warnings
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI, SaveConfigCallback
from typing_extensions import override

import lightning_rlbatch


class RLBatchCLI(LightningCLI):
    """LightningCLI in subclass mode: ``model`` and ``data`` name their classes, optimizers belong to the module.

    The optimizer is an argument of the module, since parameters exist only after the strategy has sharded the models.

    Args:
        *args: As for LightningCLI.
        **kwargs: As for LightningCLI; model and data classes, and where the configuration is saved, have defaults.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("model_class", LightningModule)
        kwargs.setdefault("datamodule_class", LightningDataModule)
        kwargs.setdefault("subclass_mode_model", True)
        kwargs.setdefault("subclass_mode_data", True)
        kwargs.setdefault("auto_configure_optimizers", False)
        kwargs.setdefault("seed_everything_default", 0)
        # A second `fit` into the same folder is normal use, and a refusal on rank 0 alone would leave the others waiting.
        kwargs.setdefault("save_config_kwargs", {"overwrite": True})
        kwargs.setdefault("save_config_callback", SaveConfigCallback)
        super().__init__(*args, **kwargs)

    @staticmethod
    @override
    def subcommands() -> dict[str, set[str]]:
        return {name: LightningCLI.subcommands()[name] for name in ("fit", "validate")}


def run(arguments: list[str] | None) -> None:
    """Run ``fit`` or ``validate``.

    Args:
        arguments: Command line without the program's name; None reads ``sys.argv``.
    """
    lightning_rlbatch.register()
    # Of torch about a line of Lightning 2.6, which users can do nothing about; warnings from elsewhere stay.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"lightning\.pytorch\.utilities\._pytree")
    RLBatchCLI(args=arguments)
