"""LightningCLI with this package's strategy and classes at hand."""

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonargparse
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger
from typing_extensions import override

import lightning_rlbatch
from lightning_rlbatch.cli.config_file import SUBCOMMANDS, ConfigFileError, read_config
from lightning_rlbatch.cli.imports import is_import_path
from lightning_rlbatch.cli.outputs import print_outputs, write_predictions
from lightning_rlbatch.cli.run_errors import report_failure
from lightning_rlbatch.cli.saved_config import SaveRunConfig

_STRATEGY = "--trainer.strategy"


class ShortUsageParser(LightningArgumentParser):
    """Leaves the list of all options to ``--help``: above an error it would hide what is wrong."""

    @override
    def print_usage(self, *args: Any, **kwargs: Any) -> None:
        pass


class RLBatchCLI(LightningCLI):
    """LightningCLI in subclass mode: ``model`` and ``data`` name their classes, optimizers belong to the module.

    The optimizer is an argument of the module, since parameters exist only after the strategy has sharded the models.

    Five things differ from LightningCLI:

    * A class of ``--model`` or ``--data`` is known before the configuration files are read, so that a file may leave it out.
    * ``trainer.strategy`` takes a class path alone, where LightningCLI takes every text for a registered name.
    * ``strategy: rlbatch_fsdp`` of a file takes ``--trainer.strategy.sequence_parallel_size`` and the strategy's other options.
    * With ``--ckpt_path`` the options of the model are those of the configuration. LightningCLI replaces them by the ones in the
      checkpoint, so that a changed option of a resumed run would have no effect.
    * Without a ``trainer.logger`` the logger is a :class:`CSVLogger`, which ``rlbatch report`` reads, whatever is installed.

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
        kwargs.setdefault("save_config_kwargs", {"overwrite": True})
        kwargs.setdefault("save_config_callback", SaveRunConfig)
        kwargs.setdefault("parser_class", ShortUsageParser)
        self._ckpt_path: Any = None
        super().__init__(*args, **kwargs)

    @staticmethod
    @override
    def subcommands() -> dict[str, set[str]]:
        return {name: LightningCLI.subcommands()[name] for name in SUBCOMMANDS}

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        if args is None or isinstance(args, list):
            self.config = parser.parse_args(strategy_as_class(classes_first(sys.argv[1:] if args is None else args)))
        else:
            super().parse_arguments(parser, args)
        options = self._options()
        strategy = options.get("trainer.strategy")
        if isinstance(strategy, str) and is_import_path(strategy):
            made: Any = jsonargparse.Namespace  # it has no types of its own
            options["trainer.strategy"] = made(class_path=strategy, init_args=made())
        self._ckpt_path = options.get("ckpt_path")
        if self._ckpt_path is not None:
            options["ckpt_path"] = None  # what comes next would take the options of the model from the checkpoint

    @override
    def before_instantiate_classes(self) -> None:
        if self._ckpt_path is not None:
            self._options()["ckpt_path"] = self._ckpt_path

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        given = self._options().get("trainer")
        if given.get("logger") is None and not given.get("fast_dev_run") and not given.get("barebones"):
            kwargs.setdefault("logger", CSVLogger(given.get("default_root_dir") or Path.cwd()))
        return super().instantiate_trainer(**kwargs)

    def _options(self) -> Any:
        """Return the options of the subcommand."""
        command = self.config.get("subcommand")
        return self.config if command is None else self.config[command]

    def predict(self, **options: Any) -> None:
        """Write what ``Trainer.predict`` returns as JSON lines beside the logs.

        Args:
            **options: Of ``Trainer.predict``.
        """
        write_predictions(self.trainer, self.trainer.predict(**options))

    def after_fit(self) -> None:
        """Say where the results are."""
        print_outputs(self.trainer)


def classes_first(arguments: Sequence[str]) -> list[str]:
    """Return a command line on which the classes of model and data come before the files, and the strategy's is written as one.

    Args:
        arguments: Command line after the program's name.

    Example:
        >>> classes_first(["fit", "-c", "run.yaml", "--model", "mine.PPO"])
        ['fit', '--model=mine.PPO', '-c', 'run.yaml', '--model', 'mine.PPO']
        >>> classes_first(["fit", "--trainer.strategy=mine.Strategy"])
        ['fit', '--trainer.strategy.class_path=mine.Strategy']
    """
    rewritten = list(arguments)
    early = []
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if not equals:
            value = arguments[index + 1] if index + 1 < len(arguments) else ""
        if not is_import_path(value) or value.endswith((".yaml", ".yml")):
            continue
        if name == _STRATEGY:
            rewritten[index] = argument.replace(_STRATEGY, f"{_STRATEGY}.class_path", 1)
        elif name.removesuffix(".class_path") in ("--model", "--data"):
            early.append(f"{name.removesuffix('.class_path')}={value}")
    place = 1 if rewritten and not rewritten[0].startswith("-") else len(rewritten)  # of the subcommand's options
    return [*rewritten[:place], *(early if place == 1 else []), *rewritten[place:]]


def strategy_as_class(arguments: list[str]) -> list[str]:
    """Return a command line that names our strategy by its class before it sets an option of it: a registered name has no options.

    Args:
        arguments: Command line after the program's name.
    """
    by_class = (f"{_STRATEGY}.class_path", f"{_STRATEGY}.help")
    is_option = [argument.startswith(f"{_STRATEGY}.") and not argument.startswith(by_class) for argument in arguments]
    first = is_option.index(True) if True in is_option else 0
    try:
        given = read_config(arguments[1:first]).get("trainer") if first > 1 else None
    except ConfigFileError:
        return arguments  # whoever reads it next says what is wrong
    strategy = given.get("strategy") if isinstance(given, dict) else None
    if not isinstance(strategy, dict) or strategy.get("class_path") != "rlbatch_fsdp":
        return arguments
    return [*arguments[:first], f"{by_class[0]}=lightning_rlbatch.RLBatchFSDPStrategy", *arguments[first:]]


def run(arguments: list[str] | None) -> None:
    """Run ``fit``, ``validate`` or ``predict``.

    Args:
        arguments: Command line without the program's name; None reads ``sys.argv``.

    Raises:
        SystemExit: 1 for a run that failed; one rank has said why.
    """
    lightning_rlbatch.register()
    # Of torch about a line of Lightning 2.6, which users can do nothing about; warnings from elsewhere stay.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"lightning\.pytorch\.utilities\._pytree")
    try:
        RLBatchCLI(args=arguments)
    except Exception as error:  # whatever a user's code may raise
        given = sys.argv[1:] if arguments is None else arguments
        report_failure(error, " ".join(["rlbatch", *given[:1]]))
        raise SystemExit(1) from None
